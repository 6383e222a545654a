"""Choices by two objectives: fronts of (seconds, bytes), and their min-plus products along a chain.

A front holds choices of which none is better than another in both seconds and bytes. The fronts of a
body come from a sweep over prices of memory (or from all its options, where these are few); fronts of copies in a
row are sums, so identical copies may choose different options (CFP 4.4, Fig. 11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .pricing import Pricing, border_pairs, ends_of, grid, head_of, ravel
from .problem import Choice, Problem, Repeat
from .rows import Floats, Ints

ALL_STATES = 20_000
"""A problem with at most this many joint options is tried in full, not by prices."""
SWEEP_ENTRIES = 10_000_000
"""States x prices x nodes that a sweep may look at."""
STATES_AT_ONCE = 10_000_000
"""States of variables whose costs are looked up at once."""
CHAIN_ENTRIES = 4_000_000
"""Sums of points that a product of two matrices of fronts may look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is worth keeping: `price` seconds per byte, points at most `slack` above the best of their cell at that
    price, at most `points` of a cell and `bytes_limit` bytes.

    The best complete choice costs at least (a cell's excess over its own best at the price) more than the Lagrangian
    bound; so with slack = best solution so far - bound, no point that is dropped for its excess leads to a better one.
    """

    price: float
    slack: float
    points: int
    bytes_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Undominated points, by rising bytes and falling seconds.

    `origin[i]` is what the maker of the front needs to recover point i.
    """

    seconds: Floats
    bytes: Floats
    origin: Ints
    thinned: bool = False
    """Some point was left out to keep the front small."""

    def __len__(self) -> int:
        return len(self.seconds)


def front(seconds: Floats, size: Floats, origin: Ints, window: Window, *, thinned: bool = False) -> Front:
    """The undominated points within the window."""
    priced = np.where(size <= window.bytes_limit, seconds + window.price * size, np.inf)
    near = np.flatnonzero(priced <= min(priced.min(initial=np.inf) + window.slack, np.finfo(np.float64).max))
    order = near[np.lexsort((seconds[near], size[near]))]
    if len(order):
        best = np.minimum.accumulate(seconds[order])
        order = order[np.concatenate(([True], seconds[order][1:] < best[:-1]))]
    if len(order) > window.points:
        thinned = True
        at = size[order]
        bucket = np.minimum((at - at[0]) / (at[-1] - at[0]) * window.points, window.points - 1).astype(np.int64)
        by_bucket = np.lexsort((priced[order], bucket))
        first = np.concatenate(([True], bucket[by_bucket][1:] != bucket[by_bucket][:-1]))
        order = order[np.unique(np.concatenate(([0, len(order) - 1], by_bucket[first])))]
    return Front(seconds=seconds[order], bytes=size[order], origin=origin[order], thinned=thinned)


class ChainFronts:
    """Fronts [left state][right state] of several copies of a body in a row, by repeated squaring."""

    def __init__(self, base: Sequence[Sequence[Front]], window: Window) -> None:
        states = len(base)
        points = int(math.sqrt(CHAIN_ENTRIES / max(1, states**3)))
        self._window = Window(
            price=window.price,
            slack=window.slack,
            points=max(16, min(window.points, points)),
            bytes_limit=window.bytes_limit,
        )
        self._powers: dict[int, Sequence[Sequence[Front]]] = {1: base}

    def matrix(self, count: int) -> Sequence[Sequence[Front]]:
        if count not in self._powers:
            head = head_of(count)
            self._powers[count] = self._product(self.matrix(head), self.matrix(count - head))
        return self._powers[count]

    def _product(
        self, first: Sequence[Sequence[Front]], second: Sequence[Sequence[Front]]
    ) -> Sequence[Sequence[Front]]:
        """Origins are (middle state, point of the first, point of the second)."""
        states = range(len(first))
        result = []
        for left in states:
            row = []
            for right in states:
                parts = [
                    (middle, first[left][middle], second[middle][right])
                    for middle in states
                    if len(first[left][middle]) and len(second[middle][right])
                ]
                row.append(self._joined(parts))
            result.append(row)
        return result

    def _joined(self, parts: list[tuple[int, Front, Front]]) -> Front:
        if not parts:
            return Front(seconds=np.zeros(0), bytes=np.zeros(0), origin=np.zeros((0, 3), dtype=np.int64))
        seconds = [np.add.outer(head.seconds, tail.seconds).ravel() for _, head, tail in parts]
        size = [np.add.outer(head.bytes, tail.bytes).ravel() for _, head, tail in parts]
        origin = [
            np.stack((np.full(len(head) * len(tail), middle), *np.indices((len(head), len(tail))).reshape(2, -1)), 1)
            for middle, head, tail in parts
        ]
        return front(
            np.concatenate(seconds),
            np.concatenate(size),
            np.concatenate(origin),
            self._window,
            thinned=any(head.thinned or tail.thinned for _, head, tail in parts),
        )

    def copies(self, count: int, left: int, right: int, point: int) -> list[tuple[int, int, int]]:
        """(left, right, point of the body's front) of every copy."""
        result = []
        pending = [(count, left, right, point)]
        while pending:
            length, start, end, at = pending.pop()
            if length == 1:
                result.append((start, end, at))
                continue
            head = head_of(length)
            middle, one, other = (int(x) for x in self.matrix(length)[start][end].origin[at])
            pending.append((length - head, middle, end, other))
            pending.append((head, start, middle, one))
        return result


class ProblemFronts:
    """For every joint state of the kept variables, a front of choices of the problem.

    The problem without its repeats is eliminated down to the kept variables and the borders of its repeats,
    at every price of `pricing`; what each price chooses is a point. To that the fronts of the repeats are
    added, border state by border state. `complete`: the pool is every choice, not only what a price chooses;
    `exact`: nor was any front thinned.
    """

    def __init__(self, problem: Problem, keep: Sequence[int], pricing: Pricing, window: Window) -> None:
        self.problem = problem
        self._pricing = pricing
        self._window = window
        self._bare = pricing.library.bare(problem)
        self._keep = tuple(sorted(set(keep)))
        self._wide, self._every = self._kept(self._keep)
        self._sizes = [len(problem.variables[v].options) for v in self._wide]
        self._states = grid(self._sizes)
        self._chains = [self._chain(repeat) for repeat in problem.repeats]
        self.fronts = self._fronts()
        self.complete: bool = self._every and all(body.fronts.complete for body, _ in self._chains)
        thinned = any(part.thinned for part in self.fronts)
        self.exact: bool = self._every and not thinned and all(body.fronts.exact for body, _ in self._chains)

    def _kept(self, keep: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The variables to keep while the prices are swept: borders, and all others that the work allows."""
        variables = self.problem.variables
        wide = {*keep, *(v for repeat in self.problem.repeats for v in (*repeat.left, *repeat.right))}
        if math.prod(len(v.options) for v in variables) <= ALL_STATES:
            # one option is no decision, and an array has no axes for hundreds of them
            return tuple(sorted(wide.union(v for v, x in enumerate(variables) if len(x.options) > 1))), True
        states = math.prod(len(variables[v].options) for v in wide)
        budget = SWEEP_ENTRIES / (len(self._pricing.weights) * len(variables))
        if self.problem.repeats or keep:
            budget = min(budget, 256)
        spread = [max(v.bytes) - min(v.bytes) for v in variables]
        for v in sorted(range(len(variables)), key=lambda v: (-spread[v], v)):
            if v not in wide and spread[v] > 0 and states * len(variables[v].options) <= budget:
                wide.add(v)
                states *= len(variables[v].options)
        return tuple(sorted(wide)), False

    def _chain(self, repeat: Repeat) -> tuple[BodyFronts, ChainFronts]:
        body = BodyFronts(repeat, self._pricing, self._window)
        return body, ChainFronts(body.matrix, self._window)

    def _swept(self) -> tuple[Floats, Floats]:
        """Seconds and bytes [price, state of the wide variables], infinite seconds where there is no choice."""
        table = self._pricing.table(self._bare, self._wide)
        prices = 1 if self._every else len(self._pricing.weights)
        count = self._states.shape[1]
        feasible = np.isfinite(table.reshape(len(self._pricing.weights), count)[:prices])
        feasible[self._too_many(prices, count)] = False
        price, state = np.nonzero(feasible)
        seconds = np.full((prices, count), np.inf)
        size = np.full((prices, count), np.inf)
        block = max(1, STATES_AT_ONCE // max(1, len(self.problem.variables)))
        for start in range(0, len(price), block):
            at = (price[start : start + block], state[start : start + block])
            seconds[at], size[at] = self._pricing.costs(self._bare, self._wide, at[0], self._states[:, at[1]])
        return seconds, size

    def _too_many(self, prices: int, count: int) -> Ints:
        """The prices, furthest first from that of the window, for which there is no work: the borders of repeats alone
        may have many states. Bytes alone stay, and the nearest price."""
        most = max(2, SWEEP_ENTRIES // max(1, count * len(self.problem.variables)))
        seconds, size = self._pricing.weights[:prices].T
        with np.errstate(divide="ignore"):
            distance = np.where(seconds > 0, np.abs(np.log(size / self._window.price)), 0.0)
        return np.asarray(distance.argsort(kind="stable")[most:])

    def _fronts(self) -> list[Front]:
        """Origins are (wide state, price, then for each repeat the point of its chain)."""
        seconds, size = self._swept()
        where = dict(zip(self._wide, self._states, strict=True))
        sizes = dict(zip(self._wide, self._sizes, strict=True))
        target = ravel([where[v] for v in self._keep], [sizes[v] for v in self._keep])
        target = np.broadcast_to(target, (self._states.shape[1],))
        borders = []
        for repeat in self.problem.repeats:
            left = ravel([where[v] for v in repeat.left], [sizes[v] for v in repeat.left])
            right = ravel([where[v] for v in repeat.right], [sizes[v] for v in repeat.right])
            borders.append((np.broadcast_to(left, target.shape), np.broadcast_to(right, target.shape)))
        cells: list[list[Front]] = [[] for _ in range(math.prod(sizes[v] for v in self._keep))]
        if not self.problem.repeats:
            by_target = np.argsort(target, kind="stable")
            splits = np.split(by_target, np.searchsorted(target[by_target], np.arange(1, len(cells))))
            for cell, states in zip(cells, splits, strict=True):
                price, which = np.nonzero(np.isfinite(seconds[:, states]))
                at = states[which]
                cell.append(front(seconds[price, at], size[price, at], np.stack((at, price), 1), self._window))
        else:
            for state in range(len(target)):
                price = np.flatnonzero(np.isfinite(seconds[:, state]))
                origin = np.stack((np.full(len(price), state), price), 1)
                point = front(seconds[price, state], size[price, state], origin, self._window)
                for repeat, (_, chain), (left, right) in zip(self.problem.repeats, self._chains, borders, strict=True):
                    if not len(point):
                        break
                    point = self._sum(point, chain.matrix(repeat.count)[int(left[state])][int(right[state])])
                cells[int(target[state])].append(point)
        return [self._merged(cell) for cell in cells]

    def _sum(self, one: Front, other: Front) -> Front:
        first, second = np.indices((len(one), len(other))).reshape(2, -1)
        return front(
            one.seconds[first] + other.seconds[second],
            one.bytes[first] + other.bytes[second],
            np.concatenate((one.origin[first], second[:, None]), 1),
            self._window,
            thinned=one.thinned or other.thinned,
        )

    def _merged(self, parts: list[Front]) -> Front:
        filled = [part for part in parts if len(part)]
        if len(filled) <= 1:
            return filled[0] if filled else parts[0]
        return front(
            np.concatenate([part.seconds for part in filled]),
            np.concatenate([part.bytes for part in filled]),
            np.concatenate([part.origin for part in filled]),
            self._window,
            thinned=any(part.thinned for part in filled),
        )

    def choice(self, state: int, point: int) -> Choice:
        """The choice at a point of the front of a state of the kept variables."""
        origin: list[int] = self.fronts[state].origin[point].tolist()
        wide, price, *points = origin
        options = self._pricing.choice(self._bare, self._wide, self._states[:, wide].tolist(), price).options
        repeats = []
        for repeat, (body, chain), at in zip(self.problem.repeats, self._chains, points, strict=True):
            left, right = ends_of(self.problem, repeat, options)
            copies: dict[tuple[int, int, int], Choice] = {}
            chosen = []
            for copy in chain.copies(repeat.count, left, right, at):
                if copy not in copies:
                    copies[copy] = body.choice(*copy)
                chosen.append(copies[copy])
            repeats.append(tuple(chosen))
        return Choice(options=options, repeats=tuple(repeats))


class BodyFronts:
    """The fronts of a repeat's body as a matrix [left state][right state]."""

    def __init__(self, repeat: Repeat, pricing: Pricing, window: Window) -> None:
        keep = tuple(sorted({*repeat.body_left, *repeat.body_right}))
        self.fronts = ProblemFronts(repeat.body, keep, pricing, window)
        assigned, clash = border_pairs(repeat, keep)
        index = ravel([assigned[v] for v in keep], [len(repeat.body.variables[v].options) for v in keep])
        self._index = np.broadcast_to(index, clash.shape)
        nothing = Front(seconds=np.zeros(0), bytes=np.zeros(0), origin=np.zeros((0, 0), dtype=np.int64))
        self.matrix: Sequence[Sequence[Front]] = [
            [nothing if clash[left, right] else self.fronts.fronts[int(at)] for right, at in enumerate(row)]
            for left, row in enumerate(self._index)
        ]

    def choice(self, left: int, right: int, point: int) -> Choice:
        return self.fronts.choice(int(self._index[left, right]), point)
