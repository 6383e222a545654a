"""Min-sum variable elimination over a `Network`.

`eliminate` removes the nodes one after the other and leaves a table over those that are kept.
"""

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .problem import TooWide
from .rows import Floats, Ints
from .work import LIMITS, NODE_WORK, Limits, Work

FILL_WEIGHTS = (0.5, 0.0, 0.25, 1.0)
"""How much a table's own size counts beside the fill that it causes, in the orders that are tried."""

RANDOM_ORDERS = 4
"""Orders with disturbed keys that are tried where those are hard."""

ALL_ORDERS = len(FILL_WEIGHTS) + RANDOM_ORDERS

FEW_ORDERS = 3
"""Tried where message passing follows: of 19 problems of three models that were too wide in three orders, all were in
eight."""

EASY_ENTRIES = 20_000_000
"""An order with fewer entries in all its tables ends the search for another."""

HOPELESS_ENTRIES = 500_000_000
"""So does one with more: others are better by small factors."""


ROUNDING = 1e-6
"""Of the logarithm of a size that is updated step by step."""


def elimination_order(
    sizes: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    keep: set[int],
    limits: Limits = LIMITS,
    orders: int = ALL_ORDERS,
) -> tuple[list[int] | None, int]:
    """The best of at most so many greedy min-fill orders, by the total size of their tables, and how many were tried.
    None where each needs a table, or all its tables together, with more entries than the limits allow.
    Deterministic."""
    generator = random.Random(0)
    even = [1.0] * len(sizes)
    fewest, best, tried = math.inf, None, 0
    for attempt in range(orders):
        disturbed = attempt >= len(FILL_WEIGHTS)
        factors = [1 + 0.6 * generator.random() for _ in sizes] if disturbed else even
        most = min(fewest, limits.elimination_entries)
        share = FILL_WEIGHTS[attempt % len(FILL_WEIGHTS)]
        entries, order = greedy_order(sizes, scopes, keep, share, factors, table=limits.table_entries, total=most)
        tried += 1
        if order is not None and entries < fewest:
            fewest, best = entries, order
        if min(entries, fewest) > HOPELESS_ENTRIES or fewest < EASY_ENTRIES:
            break
    return best, tried


def greedy_order(
    sizes: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    keep: set[int],
    share: float,
    factors: Sequence[float],
    *,
    most: float = math.inf,
    table: float = math.inf,
    total: float = math.inf,
) -> tuple[float, list[int] | None]:
    """Entries of all tables, and the order: the node first whose elimination joins the least that was not joined before
    (weighted by sizes, and by `factors`). A node whose table would have more than `most` entries waits until it has
    fewer: hubs of hundreds of neighbours would take minutes to weigh at each step. A table of more than `table`
    entries, or more than `total` in all, ends it without an order."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for node in scope:
            near[node].update(scope)
    for node, others in enumerate(near):
        others.discard(node)
    logs = [math.log2(size) for size in sizes]
    log_of = logs.__getitem__
    log_most = math.log2(most) + ROUNDING

    def weight(node: int) -> float:
        return logs[node] + sum(map(log_of, near[node]))

    def key(node: int) -> float:
        fill = 0.0
        for a in near[node]:
            missing = near[node] - near[a]
            if len(missing) > 1:  # more than itself
                fill += logs[a] * (sum(map(log_of, missing)) - logs[a])
        return round((fill / 2 + share * weight(node)) * factors[node], 6)

    left = {node for node in range(len(sizes)) if node not in keep}
    weights = [weight(node) for node in range(len(sizes))]
    keys = {node: key(node) for node in sorted(left) if weights[node] <= log_most}
    heap = [(value, node) for node, value in keys.items()]
    heapq.heapify(heap)
    entries, order = 0.0, []
    while heap:
        value, node = heapq.heappop(heap)
        if keys.get(node) != value:
            continue
        del keys[node]
        left.remove(node)
        order.append(node)
        size = round(2 ** min(weight(node), 1000.0))
        entries += size
        if size > table or entries > total:
            return entries, None
        neighbours = near[node]
        touched = set(neighbours)
        for other in neighbours:
            joins = neighbours - near[other] - {other}
            near[other] |= neighbours
            near[other] -= {node, other}
            weights[other] += sum(map(log_of, joins)) - logs[node]
            for joined in joins:  # whatever is near both has less to fill
                touched |= near[other] & near[joined]
        for other in sorted(touched & left):
            if weights[other] > log_most:
                keys.pop(other, None)
            elif (changed := key(other)) != keys.get(other):
                keys[other] = changed
                heapq.heappush(heap, (changed, other))
    return entries, order


SLICE_ENTRIES = 4_000_000
"""Entries above which a table is summed in slices, of which only the minima are kept."""

Joined = tuple[Floats, ...]
"""The tables that one step adds up, [node, *scope], of size 1 where they do not depend on a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationStep:
    """Eliminate `node`: add up the tables in `inputs` (each with its axes brought in order), take the minimum."""

    node: int
    scope: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """(table, permutation, shape to broadcast from), the node's axis first"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationOrder:
    """The order of elimination and its transposes, computed once and run at every price of memory."""

    sizes: tuple[int, ...]
    keep: tuple[int, ...]
    steps: tuple[EliminationStep, ...]
    rest: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    largest: int
    """entries of the largest table"""
    entries: int
    """of all tables"""


def schedule(
    sizes: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    keep: tuple[int, ...],
    meter: Work | None = None,
    entries: float | None = None,
    orders: int = ALL_ORDERS,
) -> EliminationOrder:
    """Greedy elimination order by the weight of the table that eliminating a node creates, all but `keep`.

    Raises `TooWide` where a table, or all of them together, would have more entries than the limits of the `meter`
    allows, or all together more than `entries`, in each of so many `orders`, and where the meter has no work left.
    """
    meter = meter or Work()
    limits = meter.limits if entries is None else replace(meter.limits, elimination_entries=entries)
    kept = tuple(sorted(set(keep)))
    work = NODE_WORK * len(sizes)
    if not meter.takes(work):
        raise TooWide("no work is left to look for an order of elimination")
    plan, tried = _schedule(sizes, scopes, kept, limits, orders)
    if not meter.takes(work * (tried - 1)) or plan is None:
        raise TooWide(
            f"elimination would need a table of more than {limits.table_entries} entries, or more than "
            f"{limits.elimination_entries:.0f} in all tables: use the ilp solver, or give the variables fewer options"
        )
    return plan


@lru_cache(maxsize=256)
def _schedule(
    sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], kept: tuple[int, ...], limits: Limits, orders: int
) -> tuple[EliminationOrder | None, int]:
    """The schedule, if there is one, and how many orders were tried."""
    joint = math.prod(sizes[n] for n in kept)
    if joint > limits.table_entries:
        return None, 1
    order, tried = elimination_order(sizes, scopes, set(kept), limits, orders)
    if order is None:
        return None, tried
    steps, live, largest = _steps(sizes, scopes, order)
    rest = tuple((table, *_aligned(scope, kept, sizes)) for table, scope in sorted(live.items()))
    entries = sum(math.prod(sizes[n] for n in (step.node, *step.scope)) for step in steps)
    largest = max(largest, joint)
    return EliminationOrder(sizes=sizes, keep=kept, steps=steps, rest=rest, largest=largest, entries=entries), tried


def reduction(
    sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], most: int, keep: Iterable[int] = ()
) -> tuple[tuple[EliminationStep, ...], dict[int, tuple[int, ...]]]:
    """Steps that eliminate nodes, but those to `keep`, as long as tables have at most so many entries, and the tables
    that are left: their places among the given and the new ones, with their scopes."""
    _, order = greedy_order(sizes, scopes, set(keep), FILL_WEIGHTS[0], [1.0] * len(sizes), most=most)
    assert order is not None
    steps, live, _ = _steps(sizes, scopes, order)
    return steps, live


def _steps(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], order: Sequence[int]
) -> tuple[tuple[EliminationStep, ...], dict[int, tuple[int, ...]], int]:
    """The steps of an order, the tables left at its end, and the entries of the largest."""
    live: dict[int, tuple[int, ...]] = dict(enumerate(scopes))
    holders: list[set[int]] = [set() for _ in sizes]
    for table, scope in live.items():
        for node in scope:
            holders[node].add(table)
    steps: list[EliminationStep] = []
    largest = 1
    count = len(scopes)
    for node in order:
        tables = sorted(holders[node])
        scope = tuple(sorted({other for table in tables for other in live[table]} - {node}))
        axes = (node, *scope)
        largest = max(largest, math.prod(sizes[n] for n in axes))
        inputs = tuple((table, *_aligned(live[table], axes, sizes)) for table in tables)
        steps.append(EliminationStep(node=node, scope=scope, inputs=inputs))
        for table in tables:
            for other in live.pop(table):
                holders[other].discard(table)
        live[count] = scope
        for other in scope:
            holders[other].add(count)
        count += 1
    return tuple(steps), live, largest


def _aligned(
    scope: tuple[int, ...], axes: tuple[int, ...], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The permutation, and then the shape, that bring a table over `scope` to broadcast over `axes`."""
    present = [axis for axis in axes if axis in scope]
    permutation = tuple(scope.index(axis) for axis in present)
    return permutation, tuple(sizes[axis] if axis in scope else 1 for axis in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eliminated:
    """The result of an `EliminationOrder`: `table[*keep]` is the least cost, `joined[i]` what step i added up."""

    schedule: EliminationOrder
    table: Floats
    joined: tuple[Joined, ...]

    def states(self, kept: Ints) -> Ints:
        """The states [node, sample] of all nodes, given those kept [node of keep, sample]."""
        result = np.zeros((len(self.schedule.sizes), kept.shape[1]), dtype=np.int64)
        for node, at in zip(self.schedule.keep, kept, strict=True):
            result[node] = at
        trace_back(self.schedule.steps, self.joined, result)
        return result


def eliminate(plan: EliminationOrder, tables: Sequence[Floats]) -> Eliminated:
    """Run a schedule over tables [*scope]. Ties go to the lowest state."""
    live: list[Floats | None] = list(tables)
    joined = run(plan.steps, live, plan.sizes)
    result = np.zeros([plan.sizes[node] for node in plan.keep])
    for table in _taken(live, plan.rest):
        result += table
    return Eliminated(schedule=plan, table=result, joined=joined)


def run(steps: Iterable[EliminationStep], live: list[Floats | None], sizes: Sequence[int]) -> tuple[Joined, ...]:
    """Take the steps: tables that were used up become None, new ones are appended. Returns what each step added up."""
    joined = []
    for step in steps:
        tables = tuple(_taken(live, step.inputs))
        live.append(_minima(tables, tuple(sizes[node] for node in (step.node, *step.scope))))
        joined.append(tables)
    return tuple(joined)


def trace_back(steps: Sequence[EliminationStep], joined: Sequence[Joined], states: Ints) -> None:
    """Fill in the states [node, sample] of the nodes that the steps eliminated, from those of the others."""
    for step, tables in zip(reversed(steps), reversed(joined), strict=True):
        at = [states[other] for other in step.scope]
        costs = np.zeros((1, states.shape[1]))
        for table in tables:
            there = tuple(state if size > 1 else 0 for state, size in zip(at, table.shape[1:], strict=True))
            of_node = table[(slice(None), *there)]
            costs = costs + of_node.reshape(len(of_node), -1)
        states[step.node] = costs.argmin(axis=0)


def _taken(live: list[Floats | None], inputs: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[Floats]:
    taken = []
    for index, permutation, spread in inputs:
        table = live[index]
        assert table is not None
        taken.append(table.transpose(permutation).reshape(spread))
        live[index] = None
    return taken


def _minima(tables: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """The minima [*scope] of the sum of tables over its dim 0. A large sum is taken in slices along dim 1."""
    if math.prod(shape) > SLICE_ENTRIES and len(shape) > 1:
        least = np.empty(shape[1:])
        for i in range(shape[1]):
            parts = [table[:, 0 if table.shape[1] == 1 else i] for table in tables]
            least[i] = _minima(parts, (shape[0], *shape[2:]))
        return least
    total = np.zeros([1] * len(shape))
    for table in sorted(tables, key=np.size):  # small ones are added up while they are small
        total = total + table
    return np.asarray(np.broadcast_to(total, shape).min(axis=0))
