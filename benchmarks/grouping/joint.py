"""Joint options: those of the members of a group together that need no communication inside.

A tensor that the group makes and reads is read in the layout that it is made in, or by a local slice of it. So a split
travels through a group, members may stay replicated before it, and partial sums may be added. Of joint options that
make and want the same, only those remain that no other matches in seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solve.problem import TIE_BREAK_SECONDS_PER_BYTE, Infeasible, Problem, Tensor, Variable
from autopar.solve.rows import Bools, Floats, Row, tensor_rows, undominated, united

from .free import free_of
from .grouped import Group, largest_difference

OPTIONS_MOST = 64
"""A group that would have more options than this is divided."""

WALK_MOST = 4096
"""Joint options among which those that others can replace are looked for."""

State = tuple[Row, ...]
"""What the members so far are to each tensor that others touch too."""

History = tuple[Any, int] | None
"""The options of the members so far: those before the last, and that of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How a group is kept small: whether bytes count apart from seconds, and the options that it may have."""

    limited: bool
    options_most: int


@dataclass(frozen=True, slots=True)
class _Partial:
    seconds: float
    bytes: float
    history: History

    @property
    def objective(self) -> float:
        return self.seconds + TIE_BREAK_SECONDS_PER_BYTE * self.bytes

    def options(self) -> tuple[int, ...]:
        chosen = []
        history = self.history
        while history is not None:
            history, option = history
            chosen.append(option)
        return tuple(reversed(chosen))


class JointOptions:
    """A problem by what touches what: `rows[t][v]` says what the options of variable v are to tensor t."""

    def __init__(self, problem: Problem, limits: Limits) -> None:
        self.problem, self.limits = problem, limits
        self.rows = tensor_rows(problem)
        self.tensors_of: list[list[int]] = [[] for _ in problem.variables]
        for index, row in enumerate(self.rows):
            for variable in row:
                self.tensors_of[variable].append(index)

    def alone(self, number: int) -> Group:
        return Group(members=(number,), joint=tuple((o,) for o in range(len(self.problem.variables[number].options))))

    def parts(self, members: Sequence[int]) -> Iterator[Group]:
        """The group of these members, or where it must be divided several."""
        start = 0
        while start < len(members):
            part = self._longest(members[start:])
            yield part
            start += len(part.members)

    def _longest(self, members: Sequence[int]) -> Group:
        """As many of the first members as can be one variable."""
        live: list[int] = []
        states: dict[State, list[_Partial]] = {(): [_Partial(0.0, 0.0, None)]}
        taken = 0
        for member in members:
            after, states_after = self._step(live, states, member, frozenset(members[: taken + 1]))
            states_after = self._undominated(after, states_after, members, taken + 1)
            if taken and not 0 < sum(map(len, states_after.values())) <= self.limits.options_most:
                break
            if not states_after:
                raise Infeasible(f"no option of {self.problem.variables[member].name} gives every tensor as wanted")
            live, states, taken = after, states_after, taken + 1
        return Group(
            members=tuple(members[:taken]),
            joint=tuple(partial.options() for partials in states.values() for partial in partials),
        )

    def _step(
        self, live: list[int], states: Mapping[State, list[_Partial]], member: int, members: frozenset[int]
    ) -> tuple[list[int], dict[State, list[_Partial]]]:
        """The states with one more member; `members` is all of them, the new one included."""
        variable = self.problem.variables[member]
        touched = self.tensors_of[member]
        own = [self.rows[tensor][member] for tensor in touched]
        options: list[int] = undominated(variable.seconds, variable.bytes, own).tolist()
        closed = [self.rows[tensor].keys() <= members for tensor in touched]
        before = [live.index(tensor) if tensor in live else None for tensor in touched]
        untouched = [position for position, tensor in enumerate(live) if tensor not in touched]
        moves: dict[State, list[tuple[State, float, float, int]]] = {}
        following: dict[State, list[_Partial]] = {}
        for state, partials in states.items():
            here = tuple((None, 0) if position is None else state[position] for position in before)
            if here not in moves:
                moves[here] = list(self._moves(here, touched, own, closed, options, members, variable))
            rest = tuple(state[position] for position in untouched)
            for there, seconds, size, option in moves[here]:
                best = following.setdefault((*rest, *there), [])
                for partial in partials:
                    more = _Partial(partial.seconds + seconds, partial.bytes + size, (partial.history, option))
                    self._insert(best, more)
        after = [live[position] for position in untouched]
        after += [tensor for tensor, gone in zip(touched, closed, strict=True) if not gone]
        return after, following

    def _undominated(
        self, live: Sequence[int], states: Mapping[State, list[_Partial]], members: Sequence[int], taken: int
    ) -> dict[State, list[_Partial]]:
        """What is left when everything is dropped that another one can replace, whatever the other
        variables choose, at no more seconds and no more bytes: for every tensor the worst
        difference between the two is added up (dead-end elimination, Goldstein's criterion)."""
        flat = [(state, partial) for state, partials in states.items() for partial in partials]
        if len(flat) < 2 or len(flat) > WALK_MOST:
            return dict(states)
        inside, coming = frozenset(members[:taken]), frozenset(members[taken:])
        price = np.array([partial.seconds for _, partial in flat])
        size = np.array([partial.bytes for _, partial in flat])
        seconds, sizes = price[:, None] - price[None, :], size[:, None] - size[None, :]
        dead = np.zeros(len(flat), dtype=np.bool_)
        for position, tensor in enumerate(live):
            kinds = {row: number for number, row in enumerate(dict.fromkeys(state[position] for state, _ in flat))}
            if len(kinds) == 1:
                continue
            at = np.array([kinds[state[position]] for state, _ in flat])
            more_seconds, more_bytes, never = self._worst(tensor, list(kinds), inside, coming)
            seconds += more_seconds[np.ix_(at, at)]
            sizes += more_bytes[np.ix_(at, at)]
            dead |= never[at]
        if self.limits.limited:
            covers = (seconds <= 0) & (sizes <= 0)
        else:
            covers = seconds + TIE_BREAK_SECONDS_PER_BYTE * sizes <= 0
        earlier = np.tri(len(flat), k=-1, dtype=np.bool_).T
        gone = dead | (covers & (~covers.T | earlier) & ~dead[:, None]).any(axis=0)
        left: dict[State, list[_Partial]] = {}
        for (state, partial), dropped in zip(flat, gone.tolist(), strict=True):
            if not dropped:
                left.setdefault(state, []).append(partial)
        return left

    def _worst(
        self, index: int, kinds: Sequence[Row], inside: frozenset[int], coming: frozenset[int]
    ) -> tuple[Floats, Floats, Bools]:
        """[a, b]: how much more kind a of what a group is to a tensor can cost than kind b, in seconds
        and in bytes; and the kinds with which the tensor can never be had."""
        tensor, row = self.problem.tensors[index], self.rows[index]
        contexts: set[Row] = {(None, 0)}
        for variable, options in row.items():
            if variable not in inside:
                contexts = {united(context, option) for context in contexts for option in set(options)}
        seconds = np.full((len(kinds), len(contexts)), np.inf)
        size = np.full((len(kinds), len(contexts)), np.inf)
        for a, kind in enumerate(kinds):
            for c, context in enumerate(contexts):
                produced, wanted = united(kind, context)
                assert produced is not None
                cost = tensor.costs.get((produced, wanted))
                if cost is not None:
                    seconds[a, c], size[a, c] = cost
        more = largest_difference(seconds), largest_difference(size)
        free = free_of(tensor)
        if free is not None and coming & row.keys():
            # what the members to come may want of it must be as free of a as of b
            maker_comes = tensor.producer in coming
            for a, (produced, wanted) in enumerate(kinds):
                for b, (other, also) in enumerate(kinds):
                    if (produced is not None and other is not None and free.get(other, 0) & ~free.get(produced, 0)) or (
                        maker_comes and wanted & ~also
                    ):
                        more[0][a, b] = np.inf
        return *more, np.isinf(seconds).all(axis=1)

    def _insert(self, best: list[_Partial], more: _Partial) -> None:
        """Add what nothing in `best` can replace, and drop what it replaces."""
        if not any(self._covers(other, more) for other in best):
            best[:] = [other for other in best if not self._covers(more, other)]
            best.append(more)

    def _covers(self, one: _Partial, other: _Partial) -> bool:
        if self.limits.limited:
            return one.seconds <= other.seconds and one.bytes <= other.bytes
        return one.objective <= other.objective

    def _moves(
        self,
        here: State,
        touched: Sequence[int],
        own: Sequence[list[Row]],
        closed: Sequence[bool],
        options: Sequence[int],
        members: frozenset[int],
        variable: Variable,
    ) -> Iterator[tuple[State, float, float, int]]:
        """What each option of the new member makes of the tensors that it touches, and adds in seconds and bytes."""
        for option in options:
            joined = [united(state, rows[option]) for state, rows in zip(here, own, strict=True)]
            seconds, size = variable.seconds[option], variable.bytes[option]
            there = []
            for index, state, gone in zip(touched, joined, closed, strict=True):
                tensor = self.problem.tensors[index]
                if not _is_free(tensor, state):
                    break
                if not gone:
                    there.append(state)
                    continue
                assert state[0] is not None
                cost = tensor.costs.get((state[0], state[1]))
                if cost is None:
                    break
                seconds, size = seconds + cost[0], size + cost[1]
            else:
                yield tuple(there), seconds, size, option


def _is_free(tensor: Tensor, state: Row) -> bool:
    """Whether what a group wants of a tensor that it makes comes without communication."""
    produced, wanted = state
    free = free_of(tensor)
    return produced is None or free is None or wanted & ~free.get(produced, 0) == 0
