"""Group: a problem of given groups, made of one at operator level.

A group of variables becomes one variable, whose options are the joint options of its members that
need no communication inside: a tensor that the group makes and reads is read in the layout that it is
made in, or by a local slice of it. So a split travels through a group, members may stay replicated
before it, and partial sums may be added. Tensors that nobody else touches vanish into the options'
seconds and bytes; of the others an option keeps what it makes and what it wants of them. Of joint
options that make and want the same, only those remain that no other matches in seconds and bytes.

The grouped problem is a restriction of the operator-level one: what it chooses is a choice there
with the same score (`Grouped.expand`), and its optimum is at best the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.passes.blocks.block import Blocks, ParallelBlock
from autopar.solve.elimination import Bools, Floats, Row, tensor_rows, undominated
from autopar.solve.problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Repeat,
    Tensor,
    Variable,
    evaluate,
)

from .space.strategies import Region, Space

OPTIONS_MOST = 64
"""A group that would have more options than this is divided."""

WALK_MOST = 4096
"""Joint options among which those that others can replace are looked for."""

Groups = Sequence[Sequence[int]]
"""Members of each group, by the number of the variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One variable of a grouped problem: its members in the problem that it was made of, and for each
    of its options the option that each member takes."""

    members: tuple[int, ...]
    joint: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A smaller problem, and the way back. `divided` are the names of groups that came out as several
    variables: because one would have had too many options, or none without communication inside."""

    problem: Problem
    original: Problem
    groups: tuple[Group, ...]
    bodies: tuple[Grouped, ...]
    divided: tuple[str, ...]

    def expand(self, choice: Choice) -> Choice:
        """The choice of the original problem that a choice of the grouped one is, with the same score."""
        expanded = self._expanded(choice)
        there, here = evaluate(self.original, expanded), evaluate(self.problem, choice)
        assert math.isclose(there.objective, here.objective, rel_tol=1e-9, abs_tol=1e-18), (there, here)
        return expanded

    def _expanded(self, choice: Choice) -> Choice:
        options = [0] * len(self.original.variables)
        for group, option in zip(self.groups, choice.options, strict=True):
            for member, taken in zip(group.members, group.joint[option], strict=True):
                options[member] = taken
        copies = []
        for body, chosen in zip(self.bodies, choice.repeats, strict=True):
            # equal copies stay one object: the evaluator scores them once
            known = {id(copy): body._expanded(copy) for copy in chosen}
            copies.append(tuple(known[id(copy)] for copy in chosen))
        return Choice(options=tuple(options), repeats=tuple(copies))


def group(
    problem: Problem,
    groups: Groups,
    bodies: Sequence[Groups] = (),
    *,
    limited: bool = False,
    options_most: int = OPTIONS_MOST,
) -> Grouped:
    """The problem with one variable for each group, and for each variable that is in none.

    `bodies[r]` are the groups of the body of repeat r; without them its variables stay apart. Options
    that another one can always replace are left out: one that costs no more, or, if a solver will be
    given a limit of bytes (`limited`), neither more seconds nor more bytes. Where `Tensor.free` is None
    every layout is allowed inside a group, and nothing is lost. A group is walked in the order of its
    variables, and divided before the member that would give it more than `options_most` options or
    leave it without one.

    Raises ValueError if a variable is in two groups, or in one although it joins a repeat to its neighbours;
    `Infeasible` if a variable has no option that others could join.
    """
    return _grouped(problem, groups, bodies, frozenset(), _Limits(limited=limited, options_most=options_most))


def block_groups(space: Space, region: Region, blocks: Blocks) -> list[list[int]]:
    """Groups for the problem of a region, as numbers in `region.sites`: a graph's ParallelBlocks as they are, each
    with its backward operators; the rest stays single. This is the paper's form, and it loses (see `passes.widen`).
    """
    homes: dict[str, list[int]] = {}
    for number, site in enumerate(region.sites.values()):
        home = blocks.home.get(space.graph.producer.get(site.name, -1)) if site.kind == "op" else None
        if isinstance(home, ParallelBlock):
            homes.setdefault(home.name, []).append(number)
    return list(homes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    limited: bool
    options_most: int


# ---- a problem of groups ------------------------------------------------------------------------------


def _grouped(
    problem: Problem, groups: Groups, bodies: Sequence[Groups], joined: frozenset[int], limits: _Limits
) -> Grouped:
    joined = joined.union(*((*repeat.left, *repeat.right) for repeat in problem.repeats))
    _check(problem, groups, joined)
    network = _Touching(problem, limits)
    grouped = {member for members in groups for member in members}
    parts = [network.alone(number) for number in sorted(joined)]
    for number in range(len(problem.variables)):
        if number not in grouped and number not in joined:
            parts += network.parts([number])
    divided = []
    for members in groups:
        found = list(network.parts(sorted(members)))
        parts += found
        if len(found) > 1:
            divided.append(problem.variables[found[0].members[0]].name)
    parts.sort(key=lambda part: part.members[0])
    inner = []
    for number, repeat in enumerate(problem.repeats):
        borders = frozenset((*repeat.body_left, *repeat.body_right))
        inner.append(_grouped(repeat.body, bodies[number] if bodies else (), (), borders, limits))
    return Grouped(
        problem=assembled(problem, parts, inner, joined),
        original=problem,
        groups=tuple(parts),
        bodies=tuple(inner),
        divided=(*divided, *(name for body in inner for name in body.divided)),
    )


def _check(problem: Problem, groups: Groups, joined: frozenset[int]) -> None:
    for member, count in Counter(member for members in groups for member in members).items():
        name = problem.variables[member].name
        if count > 1:
            raise ValueError(f"variable {name} is in {count} groups: a variable can be in one")
        if member in joined:
            raise ValueError(f"variable {name} joins a repeat to its neighbours: leave it out of the groups")


def assembled(problem: Problem, parts: Sequence[Group], bodies: Sequence[Grouped], joined: frozenset[int]) -> Problem:
    """The problem whose variables are the parts of another's, and the bodies of its repeats. Tensors that one part
    alone touches are in its costs; those of the variables in `joined` are not."""
    rows = tensor_rows(problem)
    home = {member: number for number, part in enumerate(parts) for member in part.members}
    inside: dict[int, list[int]] = {}
    tensors = []
    for index, row in enumerate(rows):
        homes = list(dict.fromkeys(home[v] for v in row))
        if len(homes) == 1 and not joined & row.keys():
            inside.setdefault(homes[0], []).append(index)
        else:
            tensors.append(_between(problem.tensors[index], row, home, parts))
    repeats = []
    for repeat, body in zip(problem.repeats, bodies, strict=True):
        there = {member: number for number, part in enumerate(body.groups) for member in part.members}
        repeats.append(
            Repeat(
                name=repeat.name,
                body=body.problem,
                count=repeat.count,
                left=tuple(home[v] for v in repeat.left),
                right=tuple(home[v] for v in repeat.right),
                body_left=tuple(there[v] for v in repeat.body_left),
                body_right=tuple(there[v] for v in repeat.body_right),
            )
        )
    return Problem(
        variables=tuple(_variable(problem, rows, part, inside.get(number, ())) for number, part in enumerate(parts)),
        tensors=tuple(tensors),
        repeats=tuple(repeats),
    )


def _variable(
    problem: Problem, rows: Sequence[Mapping[int, list[Row]]], part: Group, inside: Sequence[int]
) -> Variable:
    """The variable that a group is; `inside` are the tensors that vanish in it."""
    members = [problem.variables[member] for member in part.members]
    seconds = [sum(v.seconds[o] for v, o in zip(members, joint, strict=True)) for joint in part.joint]
    size = [sum(v.bytes[o] for v, o in zip(members, joint, strict=True)) for joint in part.joint]
    for index in inside:
        for number, state in enumerate(_united(rows[index], part)):
            assert state[0] is not None
            cost = problem.tensors[index].costs[state[0], state[1]]
            seconds[number] += cost[0]
            size[number] += cost[1]
    return Variable(
        name=members[0].name if len(members) == 1 else f"{members[0].name} .. {members[-1].name}",
        options=tuple(_label(members, joint) for joint in part.joint),
        seconds=tuple(seconds),
        bytes=tuple(size),
    )


def _between(tensor: Tensor, row: Mapping[int, list[Row]], home: Mapping[int, int], parts: Sequence[Group]) -> Tensor:
    """A tensor as the groups that make it and read it see it."""
    maker = home[tensor.producer]
    readers = dict.fromkeys(home[reader] for reader in tensor.consumers)
    produced = []
    for made, _ in _united(row, parts[maker]):
        assert made is not None
        produced.append(made)
    return replace(
        tensor,
        producer=maker,
        produced=tuple(produced),
        consumers=tuple(readers),
        wanted=tuple(tuple(mask for _, mask in _united(row, parts[reader])) for reader in readers),
    )


def _united(row: Mapping[int, list[Row]], part: Group) -> list[Row]:
    """What each joint option of a group is to a tensor."""
    touching = [(position, row[member]) for position, member in enumerate(part.members) if member in row]
    united = []
    for joint in part.joint:
        state: Row = (None, 0)
        for position, options in touching:
            state = _union(state, options[joint[position]])
        united.append(state)
    return united


def _union(one: Row, other: Row) -> Row:
    return (other[0] if one[0] is None else one[0], one[1] | other[1])


# ---- the joint options of a group ---------------------------------------------------------------------

State = tuple[Row, ...]
"""What the members so far are to each tensor that others touch too."""

History = tuple[Any, int] | None
"""The options of the members so far: those before the last, and that of the last."""


@dataclass(frozen=True, slots=True)
class _Partial:
    seconds: float
    bytes: float
    history: History

    @property
    def objective(self) -> float:
        return self.seconds + TIE_BREAK_SECONDS_PER_BYTE * self.bytes

    def options(self) -> tuple[int, ...]:
        found = []
        history = self.history
        while history is not None:
            history, option = history
            found.append(option)
        return tuple(reversed(found))


class _Touching:
    """A problem by what touches what: `rows[t][v]` says what the options of variable v are to tensor t."""

    def __init__(self, problem: Problem, limits: _Limits) -> None:
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
        found: dict[State, list[_Partial]] = {}
        for state, partials in states.items():
            here = tuple((None, 0) if position is None else state[position] for position in before)
            if here not in moves:
                moves[here] = list(self._moves(here, touched, own, closed, options, members, variable))
            rest = tuple(state[position] for position in untouched)
            for there, seconds, size, option in moves[here]:
                best = found.setdefault((*rest, *there), [])
                for partial in partials:
                    more = _Partial(partial.seconds + seconds, partial.bytes + size, (partial.history, option))
                    self._insert(best, more)
        after = [live[position] for position in untouched]
        after += [tensor for tensor, gone in zip(touched, closed, strict=True) if not gone]
        return after, found

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
                contexts = {_union(context, option) for context in contexts for option in set(options)}
        seconds = np.full((len(kinds), len(contexts)), np.inf)
        size = np.full((len(kinds), len(contexts)), np.inf)
        for a, kind in enumerate(kinds):
            for c, context in enumerate(contexts):
                made, wanted = _union(kind, context)
                assert made is not None
                cost = tensor.costs.get((made, wanted))
                if cost is not None:
                    seconds[a, c], size[a, c] = cost
        more = _largest_difference(seconds), _largest_difference(size)
        if tensor.free is not None and coming & row.keys():
            # what the members to come may want of it must be as free of a as of b
            maker_comes = tensor.producer in coming
            for a, (made, wanted) in enumerate(kinds):
                for b, (other, also) in enumerate(kinds):
                    if (
                        made is not None and other is not None and tensor.free.get(other, 0) & ~tensor.free.get(made, 0)
                    ) or (maker_comes and wanted & ~also):
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
            united = [_union(state, rows[option]) for state, rows in zip(here, own, strict=True)]
            seconds, size = variable.seconds[option], variable.bytes[option]
            there = []
            for index, state, gone in zip(touched, united, closed, strict=True):
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


def _largest_difference(costs: Floats) -> Floats:
    """[a, b]: the largest costs[a, c] - costs[b, c]; where b cannot be had, nothing is worse than it."""
    with np.errstate(invalid="ignore"):
        differences = costs[:, None, :] - costs[None, :, :]
    differences[np.broadcast_to(np.isinf(costs)[None, :, :], differences.shape)] = -np.inf
    largest = differences.max(axis=2)
    return np.asarray(np.where(np.isneginf(largest), 0.0, largest))


def _is_free(tensor: Tensor, state: Row) -> bool:
    """Whether what a group wants of a tensor that it makes comes without communication."""
    made, wanted = state
    return made is None or tensor.free is None or wanted & ~tensor.free.get(made, 0) == 0


def _label(members: Sequence[Variable], joint: Sequence[int]) -> str:
    """The options of the members, those that stand together counted."""
    runs: list[tuple[str, int]] = []
    for variable, option in zip(members, joint, strict=True):
        label = variable.options[option]
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1] + 1)
        else:
            runs.append((label, 1))
    return ", ".join(label if count == 1 else f"{count} x {label}" for label, count in runs)
