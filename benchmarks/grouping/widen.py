"""Widen: blocks that lose nothing, whatever communicates inside.

Two neighbours become one variable where that has no more options than one of them, or no more than both and fewer
neighbours than one. Of their joint options only those are kept that no other one can replace at no more cost,
whatever all others choose (dead-end elimination, Goldstein's criterion). So the optimum is the same, under every
limit of bytes too if asked to (`limited`), no step makes more options, and tables of the dynamic program mostly
shrink. Which operators split together comes out of the prices: a block ends where communication may pay.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.problem import TIE_BREAK_SECONDS_PER_BYTE, Infeasible, Problem
from autopar.solve.rows import Bools, Floats, Ints, Row, tensor_rows, united

from .grouped import Group, Grouped, assembled, largest_difference

JOINT_MOST = 4096
"""Joint options of two variables that are looked at; two with more stay apart."""

COMPARED_MOST = 1024
"""Joint options among which those that others can replace are looked for; two with more stay apart."""

CONTEXTS_MOST = 1_000_000
"""Entries of a table of differences (two kinds of option, and what all others want); above, none is replaced."""


def widened(problem: Problem, *, limited: bool = False) -> Grouped:
    """The problem with neighbours united as far as that makes it smaller. Its optimum is the same.

    With `limited` it is the same under every limit of bytes. Variables that join repeats stay as they are.

    Raises `Infeasible` if no choice gives every tensor as wanted and that is met on the way.
    """
    return _widened(problem, frozenset(), limited)


def _widened(problem: Problem, joined: frozenset[int], limited: bool) -> Grouped:
    joined = joined.union(*((*repeat.left, *repeat.right) for repeat in problem.repeats))
    parts = _Widening(problem, joined, limited).parts()
    bodies = [_widened(r.body, frozenset((*r.body_left, *r.body_right)), limited) for r in problem.repeats]
    return Grouped(
        problem=assembled(problem, parts, bodies, joined),
        original=problem,
        groups=tuple(parts),
        bodies=tuple(bodies),
        divided=(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Members with their joint options: what each costs and which kind of thing it is to each tensor (`kinds[t]`
    are the different ones, `kind[t][o]` the number of option o's)."""

    group: Group
    seconds: Floats
    bytes: Floats
    kinds: Mapping[int, tuple[Row, ...]]
    kind: Mapping[int, Ints]

    def __len__(self) -> int:
        return len(self.seconds)

    def only(self, kept: Ints) -> _Part:
        kinds, kind = {}, {}
        for tensor, rows in self.kinds.items():
            left, kind[tensor] = np.unique(self.kind[tensor][kept], return_inverse=True)
            kinds[tensor] = tuple(rows[row] for row in left.tolist())
        joint = tuple(self.group.joint[option] for option in kept.tolist())
        return _Part(Group(members=self.group.members, joint=joint), self.seconds[kept], self.bytes[kept], kinds, kind)


class _Widening:
    def __init__(self, problem: Problem, joined: frozenset[int], limited: bool) -> None:
        self.problem, self.joined, self.limited = problem, joined, limited
        self.touching: list[set[int]] = []
        """The parts that each tensor is made or read by, by their numbers."""
        rows: list[dict[int, list[Row]]] = [{} for _ in problem.variables]
        for index, row in enumerate(tensor_rows(problem)):
            self.touching.append(set(row))
            for variable, options in row.items():
                rows[variable][index] = options
        self.alive = {number: self._alone(number, own) for number, own in enumerate(rows)}
        self.count = len(self.alive)
        self.contexts: dict[tuple[int, frozenset[int]], tuple[Row, ...]] = {}
        self.compared: dict[tuple[int, frozenset[int], tuple[Row, ...]], tuple[Floats, Floats, Bools]] = {}

    def _alone(self, number: int, rows: Mapping[int, Sequence[Row]]) -> _Part:
        variable = self.problem.variables[number]
        kinds = {tensor: tuple(dict.fromkeys(own)) for tensor, own in rows.items()}
        kind = {tensor: np.array([kinds[tensor].index(row) for row in own]) for tensor, own in rows.items()}
        return _Part(
            Group(members=(number,), joint=tuple((o,) for o in range(len(variable.options)))),
            np.array(variable.seconds, dtype=np.float64),
            np.array(variable.bytes, dtype=np.float64),
            kinds,
            kind,
        )

    def parts(self) -> list[Group]:
        self._prune()
        waiting: list[tuple[float, int, int]] = []
        united: dict[tuple[int, int], _Part] = {}

        def consider(one: int, other: int) -> None:
            part = self._united(one, other)
            if part is not None:
                united[one, other] = part
                share = len(part) / (len(self.alive[one]) + len(self.alive[other]))
                heapq.heappush(waiting, (share, one, other))

        for one in sorted(self.alive):
            for other in self._neighbours(one):
                if one < other:
                    consider(one, other)
        while waiting:
            _, one, other = heapq.heappop(waiting)
            part = united.pop((one, other))
            if one in self.alive and other in self.alive:
                new = self._replace({one, other}, part)
                for neighbour in self._neighbours(new):
                    consider(neighbour, new)
        self._prune()
        return sorted((part.group for part in self.alive.values()), key=lambda group: group.members[0])

    def _replace(self, old: set[int], part: _Part) -> int:
        """Put a part in the place of others, under a new number."""
        new = self.count
        self.count += 1
        for number in old:
            for tensor in self.alive.pop(number).kind:
                self.touching[tensor].discard(number)
        for tensor in part.kind:
            self.touching[tensor].add(new)
        self.alive[new] = part
        return new

    def _prune(self) -> None:
        """Leave out of each part what its others can replace, until that leaves no more out."""
        again = sorted(set(self.alive) - self.joined)
        while again:
            number = again.pop(0)
            if number in self.alive:
                before = self.alive[number]
                after = self._undominated(self._cheapest(before), {number})
                if len(after) < len(before):
                    new = self._replace({number}, after)
                    again += [near for near in self._neighbours(new) if near not in again]

    def _neighbours(self, number: int) -> list[int]:
        if number in self.joined:
            return []
        near = set().union(*(self.touching[tensor] for tensor in self.alive[number].kind))
        return sorted(near - self.joined - {number})

    # ---- two as one ----

    def _united(self, one: int, other: int) -> _Part | None:
        """The two as one, or None where they are better apart."""
        a, b = self.alive[one], self.alive[other]
        if len(a) * len(b) > JOINT_MOST:
            return None
        joint = self._cheapest(self._product(a, b, {one, other}))
        if len(joint) > COMPARED_MOST:
            return None
        rows = self._undominated(joint, {one, other})
        near, there = self._neighbours(one), self._neighbours(other)
        fewer = len({*near, *there} - {one, other}) < max(len(near), len(there))
        most = len(a) + len(b) if fewer else max(len(a), len(b))
        return rows if len(rows) <= most else None

    def _product(self, a: _Part, b: _Part, inside: set[int]) -> _Part:
        """All pairs of options that go together. Tensors that nobody else touches vanish into their costs."""
        at_a, at_b = (grid.ravel() for grid in np.indices((len(a), len(b))))
        seconds, size = a.seconds[at_a] + b.seconds[at_b], a.bytes[at_a] + b.bytes[at_b]
        kinds: dict[int, tuple[Row, ...]] = {}
        kind: dict[int, Ints] = {}
        for tensor in {**a.kind, **b.kind}:
            if tensor not in b.kind:
                kinds[tensor], kind[tensor] = a.kinds[tensor], a.kind[tensor][at_a]
            elif tensor not in a.kind:
                kinds[tensor], kind[tensor] = b.kinds[tensor], b.kind[tensor][at_b]
            else:
                different: dict[Row, int] = {}
                step = [[different.setdefault(united(x, y), len(different)) for y in b.kinds[tensor]]
                        for x in a.kinds[tensor]]  # fmt: skip
                kinds[tensor], kind[tensor] = (
                    tuple(different),
                    np.array(step)[a.kind[tensor][at_a], b.kind[tensor][at_b]],
                )
            if self.touching[tensor] <= inside:
                costs = self._costs(tensor, kinds.pop(tensor), ((None, 0),))
                at = kind.pop(tensor)
                seconds, size = seconds + costs[0][at, 0], size + costs[1][at, 0]
        members = (*a.group.members, *b.group.members)
        order = sorted(range(len(members)), key=members.__getitem__)
        feasible = np.flatnonzero(np.isfinite(seconds))
        if not len(feasible):
            raise Infeasible(f"{self._name(a)} and {self._name(b)} have no options that go together")
        pairs = zip(at_a[feasible].tolist(), at_b[feasible].tolist(), strict=True)
        chosen = ((*a.group.joint[x], *b.group.joint[y]) for x, y in pairs)
        group = Group(
            members=tuple(members[i] for i in order),
            joint=tuple(tuple(options[i] for i in order) for options in chosen),
        )
        kind = {tensor: at[feasible] for tensor, at in kind.items()}
        return _Part(group, seconds[feasible], size[feasible], kinds, kind)

    def _costs(self, tensor: int, kinds: Sequence[Row], contexts: Sequence[Row]) -> tuple[Floats, Floats]:
        """[kind, context]: seconds and bytes of the tensor; infinite where it cannot be had."""
        seconds = np.full((len(kinds), len(contexts)), np.inf)
        size = np.full((len(kinds), len(contexts)), np.inf)
        costs = self.problem.tensors[tensor].costs
        for k, kind in enumerate(kinds):
            for c, context in enumerate(contexts):
                produced, wanted = united(kind, context)
                assert produced is not None
                cost = costs.get((produced, wanted))
                if cost is not None:
                    seconds[k, c], size[k, c] = cost
        return seconds, size

    # ---- what others can replace ----

    def _name(self, part: _Part) -> str:
        return self.problem.variables[part.group.members[0]].name

    def _objective(self, part: _Part) -> Floats:
        return part.seconds + TIE_BREAK_SECONDS_PER_BYTE * part.bytes

    def _cheapest(self, part: _Part) -> _Part:
        """Of options that are the same to every tensor the cheapest, or where bytes are limited the undominated."""
        same = np.zeros(len(part), dtype=np.int64)
        for tensor, at in part.kind.items():
            same = np.unique(same * len(part.kinds[tensor]) + at, return_inverse=True)[1]
        first = part.seconds if self.limited else self._objective(part)
        order = np.lexsort((part.bytes, first, same))
        if not self.limited:
            kept = order[np.unique(same[order], return_index=True)[1]]
            return part.only(np.sort(kept))
        left = []
        before, least = -1, np.inf
        for option, group, size in zip(order.tolist(), same[order].tolist(), part.bytes[order].tolist(), strict=True):
            if group != before or size < least:
                left.append(option)
                before, least = group, size
        return part.only(np.sort(np.array(left, dtype=np.int64)))

    def _undominated(self, part: _Part, inside: set[int]) -> _Part:
        """What is left when every option is dropped that another one can replace: for every tensor the
        worst difference between the two, over all that others may want, is added up."""
        seconds = part.seconds[:, None] - part.seconds[None, :]
        size = part.bytes[:, None] - part.bytes[None, :]
        dead = np.zeros(len(part), dtype=np.bool_)
        for tensor, at in part.kind.items():
            more_seconds, more_bytes, never = self._worst(tensor, part.kinds[tensor], inside)
            seconds += more_seconds[np.ix_(at, at)]
            size += more_bytes[np.ix_(at, at)]
            dead |= never[at]
        if dead.all():
            raise Infeasible(f"{self._name(part)} cannot have every tensor as wanted, whatever the others choose")
        total = seconds + TIE_BREAK_SECONDS_PER_BYTE * size
        covers = (seconds <= 0) & (size <= 0) if self.limited else total <= 0
        earlier = np.tri(len(part), k=-1, dtype=np.bool_).T
        gone = dead | (covers & (~covers.T | earlier) & ~dead[:, None]).any(axis=0)
        return part.only(np.flatnonzero(~gone)) if gone.any() else part

    def _worst(self, tensor: int, kinds: tuple[Row, ...], inside: set[int]) -> tuple[Floats, Floats, Bools]:
        """[a, b]: how much more kind a can cost than kind b, in seconds and in bytes; and the kinds with which the
        tensor can never be had."""
        others = frozenset(self.touching[tensor] - inside)
        key = (tensor, others, kinds)
        if key not in self.compared:
            contexts = self._contexts(tensor, others)
            if len(contexts) * len(kinds) ** 2 > CONTEXTS_MOST:
                apart = np.where(np.eye(len(kinds), dtype=np.bool_), 0.0, np.inf)
                self.compared[key] = apart, apart, np.zeros(len(kinds), dtype=np.bool_)
            else:
                seconds, size = self._costs(tensor, kinds, contexts)
                never: Bools = np.asarray(np.isinf(seconds).all(axis=1))
                self.compared[key] = largest_difference(seconds), largest_difference(size), never
        return self.compared[key]

    def _contexts(self, tensor: int, others: frozenset[int]) -> tuple[Row, ...]:
        """What the others together may be to a tensor."""
        if (tensor, others) not in self.contexts:
            rows: dict[Row, None] = {(None, 0): None}
            for number in sorted(others):
                rows = {united(row, kind): None for row in rows for kind in self.alive[number].kinds[tensor]}
            self.contexts[tensor, others] = tuple(rows)
        return self.contexts[tensor, others]
