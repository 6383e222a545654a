"""Message passing: a lower bound, and a good choice, where elimination is too wide.

The costs of a network are moved between its tables so that their minima add up to as much as possible
(sequential reweighted message passing: Kolmogorov, "A new look at reweighted message passing", 2015). That
sum is a lower bound; how far a state lies above it says how much a choice with that state costs at least.
States that lie far above are left out, and what remains is eliminated exactly. Its optimum is a choice, and that of the
problem as soon as it lies no further above the bound than the states that were left out. Where even those on the bound
are too many, node after node takes the state that costs least beside those taken before.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .effort import ELIMINATED_WORK, VISIT_WORK, Meter
from .elimination import EliminationOrder, eliminate, schedule
from .flat import Costs, Factor, flattened
from .network import Leads, Weights
from .pricing import Library
from .problem import Choice, Problem, TooWide
from .rows import Floats, Ints
from .work import NODE_WORK

REACHES = (1e-7, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 7e-3, 1e-2, 2e-2, 4e-2, 7e-2, 1e-1)
"""How far above the bound, as a share of it, states are kept: one after the other, as long as tables are small."""

GAP, STANDING_GAP = 1e-3, 1e-2
"""Relative gaps at which the search ends: after a round that improved the choice, and after one that did not."""

PROVED_GAP = 1e-12
"""One that is rounding."""

FEW_SWEEPS = 15
"""Before so many, bounds rise quickly: only a proved optimum ends the search."""

STANDING = 1e-6
"""The part of the bound by which a round without a better choice must raise it, to be worth another round."""

LONG_ENTRIES = 256
"""Entries in a row of memory from which on numpy's loops over rows cost little beside those over entries."""


class _Along:
    """One table and the states of one of its nodes, as views in which numpy's inner loops are long."""

    def __init__(self, table: Floats, axis: int) -> None:
        before, states = math.prod(table.shape[:axis]), table.shape[axis]
        after = table.size // (before * states)
        self._table = table.reshape(before, states, after)
        self._is_long = after >= LONG_ENTRIES or before == 1
        # few states and few entries after them: several rows of them are one
        joined = next(
            n for n in range(1, before + 1) if before % n == 0 and (n * states * after >= LONG_ENTRIES or n == before)
        )
        self._row = joined, states, after
        self._rows = table.reshape(before // joined, joined * states * after)
        self._state = np.broadcast_to(np.arange(states)[:, None], self._row).reshape(-1)

    def least(self) -> Floats:
        """The minimum of each state."""
        if self._is_long:
            return np.asarray(np.minimum.reduce(np.minimum.reduce(self._table, axis=2), axis=0))
        row = np.minimum.reduce(self._rows, axis=0).reshape(self._row)
        return np.asarray(np.minimum.reduce(row, axis=(0, 2)))

    def add(self, costs: Floats) -> None:
        """Adds a cost of each state."""
        if self._is_long:
            self._table += costs[:, None]
        else:
            self._rows += costs[self._state]


class _Led:
    """A table over all nodes of a rule but the last, and the states of the last one, to which the others lead."""

    def __init__(self, table: Floats, state: Ints) -> None:
        self._table, self._state = table.reshape(-1), state.reshape(-1)
        self._order = self._state.argsort(kind="stable")
        # some joint state leads to each
        self._first = np.searchsorted(self._state[self._order], np.arange(self._state.max() + 1))

    def least(self) -> Floats:
        return np.asarray(np.minimum.reduceat(self._table[self._order], self._first))

    def add(self, costs: Floats) -> None:
        self._table += costs[self._state]


class Relaxation:
    """The tables of a network, with costs moved between them: every choice costs what it did."""

    def __init__(self, factors: Sequence[Factor], sizes: Sequence[int], meter: Meter | None = None) -> None:
        self.meter = meter or Meter()
        finite = [costs[np.isfinite(costs)] for _, costs in factors if not isinstance(costs, Leads)]
        # What is blocked costs more than any choice: a sum with infinities could not be taken back.
        blocked = sum(float(np.abs(table).max()) for table in finite if table.size)
        self.nodes: list[Floats] = [np.zeros(size) for size in sizes]
        self.tables: list[Floats] = []
        """Of rules, over all their nodes but the last."""
        self.constant = 0.0
        self._states: list[Ints | None] = []
        """of each table: if it is one of a rule, the state of the last node"""
        self._around: list[list[tuple[int, _Along | _Led, int]]] = [[] for _ in sizes]
        """of each node: (table, the table along the node, its axis there)"""
        self._ahead: list[list[int]] = [[] for _ in sizes]
        self._behind: list[list[int]] = [[] for _ in sizes]
        """of each node: the positions in `_around` of the tables with a later, and an earlier, node"""
        for scope, costs in factors:
            if isinstance(costs, Leads):
                self._add(scope, np.zeros(costs.state.shape), costs.state)
                continue
            table = np.asarray(np.where(np.isfinite(costs), costs, blocked), order="C")
            if len(scope) == 0:
                self.constant += float(table)
            elif len(scope) == 1:
                self.nodes[scope[0]] += table
            else:
                self._add(scope, table, None)
        self._linked = [node for node, around in enumerate(self._around) if around]
        """Nodes that stand in tables: the others have nothing to hand on."""
        self._left = self.meter.effort.message_entries
        visits = [1 + table.ndim if state is not None else table.ndim for table, state in self._stored()]
        self._sweep_entries = 2 * sum(table.size * n for table, n in zip(self.tables, visits, strict=True))
        self.sweep_work = self._sweep_entries + 2 * VISIT_WORK * sum(visits)

    def _stored(self) -> Iterator[tuple[Floats, Ints | None]]:
        return zip(self.tables, self._states, strict=True)

    def _add(self, scope: tuple[int, ...], table: Floats, state: Ints | None) -> None:
        for axis, node in enumerate(scope):
            along = _Along(table, axis) if state is None or axis < table.ndim else _Led(table, state)
            if node != max(scope):
                self._ahead[node].append(len(self._around[node]))
            if node != min(scope):
                self._behind[node].append(len(self._around[node]))
            self._around[node].append((len(self.tables), along, axis))
        self.tables.append(table)
        self._states.append(state)

    def may_sweep(self) -> bool:
        """Whether the budget has another sweep, which then is taken from it."""
        self._left -= self._sweep_entries
        return self._left >= 0 and self.meter.takes(self.sweep_work)

    def sweep(self) -> None:
        """Through the nodes and back: each takes what its tables must cost anyway, and hands it on."""
        for forth, order in ((self._ahead, self._linked), (self._behind, self._linked[::-1])):
            for node in order:
                self._pass_on(node, forth[node])

    def _pass_on(self, node: int, to: Sequence[int]) -> None:
        around = self._around[node]
        total = self.nodes[node]
        for _, table, _ in around:
            least = table.least()
            total = total + least
            table.add(-least)
        part = total / max(1, len(self._ahead[node]), len(self._behind[node]))
        for at in to:
            around[at][1].add(part)
        self.nodes[node] = total - part * len(to)

    def bound(self) -> float:
        """No choice costs less."""
        return self.constant + sum(float(costs.min()) for costs in (*self.nodes, *self.tables))

    def excess(self, node: int) -> Floats:
        """How much more than the bound a choice with each state of a node costs at least."""
        excess = self.nodes[node] - self.nodes[node].min()
        for _, table, _ in self._around[node]:
            least = table.least()
            excess = excess + least - least.min()
        return np.asarray(excess)

    def rounded(self) -> Ints:
        """A state of each node, one after the other: the one of least cost beside those taken already. [node, 1]"""
        states = np.zeros(len(self.nodes), dtype=np.int64)
        left = list(self._stored())
        for node, costs in enumerate(self.nodes):
            total = costs
            for number, _, axis in self._around[node]:
                total = total + _least(*left[number], axis, len(costs))
            states[node] = state = total.argmin()
            for number, _, axis in self._around[node]:
                left[number] = _taken(*left[number], axis, state)
        return states[:, None]


def _least(table: Floats, state: Ints | None, axis: int, size: int) -> Floats:
    """The minimum of each state of the node of an axis."""
    if axis < table.ndim:
        return np.asarray(table.min(axis=tuple(other for other in range(table.ndim) if other != axis)))
    assert state is not None
    least = np.full(size, np.inf)
    np.minimum.at(least, state.reshape(-1), table.reshape(-1))
    return least


def _taken(table: Floats, state: Ints | None, axis: int, at: np.intp) -> tuple[Floats, Ints | None]:
    """With one state of the node of an axis, which stays."""
    if axis < table.ndim:
        return table.take([at], axis=axis), None if state is None else state.take([at], axis=axis)
    return np.where(state == at, table, np.inf), state


def relaxed(
    problem: Problem, weights: Weights, library: Library | None = None, *, folded: bool = False
) -> tuple[Choice, float]:
    """A choice of a small `weights[0]` * seconds + `weights[1]` * bytes, and a lower bound of that.

    Repeats are written out, or `folded` (`flat`): the bound is then that of choices with a repeated
    middle. `library` has the network where elimination was tried before. Raises `TooWide` where the budget gives no
    choice.
    """
    library = library or Library()
    effort = library.meter.effort
    flat = flattened(problem, weights, library, most=effort.message_small_entries, folded=folded)
    relaxation = Relaxation(flat.factors, flat.sizes, library.meter)
    best, states, bound, total = math.inf, None, -math.inf, 0
    for sweeps in effort.message_sweeps:
        swept = 0
        while swept < sweeps and relaxation.may_sweep():
            relaxation.sweep()
            swept += 1
        before, lower = best, bound
        bound = max(bound, relaxation.bound())
        total += swept
        value = math.inf
        for reach, value, near in _near(flat.factors, relaxation, best, total):
            if value < best:
                best, states = value, near
            if best - bound <= reach * abs(bound):  # nothing better was left out
                bound = best
                break
        if math.isinf(value):  # too many on the bound, or none that join
            near = relaxation.rounded()
            if (value := _value(flat.factors, near)) < best:
                best, states = value, near
        if swept < sweeps or best - bound <= PROVED_GAP * abs(bound):  # the budget is spent, or nothing is better
            break
        if total < FEW_SWEEPS:
            continue
        if best - bound <= (GAP if best < before else STANDING_GAP) * abs(bound):
            break
        if best == before < math.inf and bound - lower <= STANDING * abs(bound):
            break
    if states is None:
        raise TooWide("message passing gave no choice")
    return flat.choices(states)[0], min(bound, best)


def _value(factors: Sequence[Factor], states: Ints) -> float:
    """What a choice of states [node, 1] costs, infinite where it is blocked."""
    value = 0.0
    for nodes, costs in factors:
        at = tuple(states[list(nodes), 0])
        value += float(costs.of(*at) if isinstance(costs, Leads) else costs[at])
    return value


def _near(
    factors: Sequence[Factor], relaxation: Relaxation, best: float, sweeps: int
) -> Iterator[tuple[float, float, Ints]]:
    """Optima among the states nearest to the bound, and then among those from further above it, up to where that proves
    the best: how far, what it costs (infinite where nothing joins), and its states [node, 1]. Looking further takes
    no more work than so many sweeps."""
    near, bound = _Near(factors, relaxation), relaxation.bound()
    work = sweeps * relaxation.sweep_work

    def proof(best: float) -> int:
        return next((n for n, reach in enumerate(REACHES) if best - bound <= reach * abs(bound)), len(REACHES) - 1)

    low = next((n for n, reach in enumerate(REACHES) if all(map(len, near.kept(reach)))), len(REACHES))
    high, number, most = len(REACHES), low, math.inf
    while low < high and most > 0:
        if (plan := near.plan(REACHES[number], most)) is None:
            high = number
        else:
            taken = ELIMINATED_WORK * plan.schedule.entries + VISIT_WORK * len(factors)
            if not relaxation.meter.takes(taken):
                return
            yield (found := near.optimum(plan))
            best = min(best, found[1])
            low, high = number + 1, min(high, proof(best) + 1)
            work -= taken
        work -= NODE_WORK * len(relaxation.nodes)
        most, number = work, (low + high) // 2


@dataclass(frozen=True, slots=True)
class _Plan:
    """How states from so far above the bound are eliminated: those kept of each node, and the schedule."""

    reach: float
    kept: list[Ints]
    schedule: EliminationOrder


class _Near:
    """Choices among the states of a relaxation that are near to its bound."""

    def __init__(self, factors: Sequence[Factor], relaxation: Relaxation) -> None:
        self.factors, self.meter, self.unit = factors, relaxation.meter, abs(relaxation.bound())
        self.excesses = [relaxation.excess(node) for node in range(len(relaxation.nodes))]

    def kept(self, reach: float) -> list[Ints]:
        """The states of each node: none, as long as tables do not agree on any."""
        return [np.flatnonzero(excess <= reach * self.unit) for excess in self.excesses]

    def plan(self, reach: float, work: float) -> _Plan | None:
        """None if it would take more work."""
        kept = self.kept(reach)
        scopes = tuple(_wide(nodes, kept) for nodes, _ in self.factors)
        most = min(work / ELIMINATED_WORK, self.meter.effort.message_narrow_entries)
        try:
            return _Plan(reach, kept, schedule(tuple(map(len, kept)), scopes, (), self.meter, most, orders=1))
        except TooWide:
            return None

    def optimum(self, plan: _Plan) -> tuple[float, float, Ints]:
        """How far its states were taken from, what it costs, and the states [node, 1]."""
        result = eliminate(plan.schedule, [_restricted(*factor, plan.kept) for factor in self.factors])
        at = result.states(np.zeros((0, 1), dtype=np.int64))
        states = np.array([kept[state] for kept, state in zip(plan.kept, at, strict=True)])
        return plan.reach, float(result.table), states


def _wide(nodes: tuple[int, ...], kept: Sequence[Ints]) -> tuple[int, ...]:
    return tuple(node for node in nodes if len(kept[node]) > 1)


def _restricted(nodes: tuple[int, ...], costs: Costs, kept: Sequence[Ints]) -> Floats:
    """A table over the kept states; nodes of one state are no axes."""
    states = np.ix_(*(kept[node] for node in nodes))
    some = costs.of(*states) if isinstance(costs, Leads) else costs[states]
    return some.reshape([len(kept[node]) for node in _wide(nodes, kept)])
