"""Min-sum variable elimination over a `Problem`, for several prices of memory at once.

A `Network` is a problem as nodes (variables, classes of options, accumulators) and tables over them;
`eliminate` removes the nodes one after the other and leaves a table over those that are kept. All
tables carry a leading axis of prices, so that a sweep over prices costs little more than one price.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .budget import BUDGET
from .problem import Problem, Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_TABLE_ENTRIES = 16_000_000
"""Entries of the largest table that is made, slice by slice, for one price."""

SLICE_ENTRIES = 4_000_000
"""Entries above which a table is made in slices, of which only the minima are kept."""


LARGE_UNION = 20_000
"""Pairs of states of two readers above which the narrowest pair of readers is united instead."""


MAX_TENSOR_ENTRIES = 32_000_000
"""Entries of the largest table that one tensor may make; a problem with a larger one would need gigabytes."""


Joined = tuple[Floats, ...]
"""The tables that one step adds up, [price, node, *scope], of size 1 where they do not depend on a node."""


class TooWide(ValueError):
    """A tensor, or every order of elimination that was tried, makes a table that is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a joint state of `nodes` costs: seconds and bytes, each with one array axis a node, 0 where blocked."""

    nodes: tuple[int, ...]
    seconds: Floats
    bytes: Floats
    blocked: Bools | None = None

    def priced(self, weights: Floats) -> Floats:
        """[price, *nodes]: weights[k, 0] * seconds + weights[k, 1] * bytes, infinite where blocked."""
        spread = (len(weights), *(1,) * len(self.nodes))
        cost = weights[:, 0].reshape(spread) * self.seconds + weights[:, 1].reshape(spread) * self.bytes
        if self.blocked is not None:
            cost[:, self.blocked] = np.inf
        return np.asarray(cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A problem without its repeats: `sizes[n]` states of node n, of which the first are the variables.

    State s of variable v is its option `options[v][s]`: options that no tensor can tell apart from a
    cheaper one are left out, except where a border shows the variable to others.
    """

    sizes: tuple[int, ...]
    options: tuple[Ints, ...]
    tables: tuple[Table, ...]

    def cost(self, states: Ints) -> tuple[Floats, Floats]:
        """Seconds and bytes of joint states [node, sample], infinite seconds where blocked."""
        seconds = np.zeros(states.shape[1])
        size = np.zeros(states.shape[1])
        for table in self.tables:
            at = tuple(states[node] for node in table.nodes)
            seconds += table.seconds[at]
            size += table.bytes[at]
            if table.blocked is not None:
                seconds[table.blocked[at]] = np.inf
        return seconds, size


def network(problem: Problem, borders: Iterable[int]) -> Network:
    """The factor graph of a problem; the variables in `borders` keep all their options.

    A tensor's cost depends on (produced layout, union of wanted sets) only. Options of a variable that
    are the same for a tensor form one class, with a node of its own where that is worth it. A tensor
    with few readers is one table over classes; one with many is a tree of accumulator nodes, whose
    states are the sets wanted so far, so that tables stay small.

    Raises `TooWide` where a table would exceed `MAX_TENSOR_ENTRIES`.
    """
    rows = tensor_rows(problem)
    border_set = set(borders)
    rows_of: list[list[list[Row]]] = [[] for _ in problem.variables]
    for row in rows:
        for index, of_options in row.items():
            rows_of[index].append(of_options)
    options = tuple(
        np.arange(len(variable.options))
        if index in border_set
        else undominated(variable.seconds, variable.bytes, rows_of[index])
        for index, variable in enumerate(problem.variables)
    )
    sizes = [len(kept) for kept in options]
    tables = [
        Table(
            nodes=(index,) if sizes[index] > 1 else (),
            seconds=_states(variable.seconds, options[index]),
            bytes=_states(variable.bytes, options[index]),
        )
        for index, variable in enumerate(problem.variables)
        if any(variable.seconds) or any(variable.bytes)
    ]
    classes: dict[tuple[int, ...], int] = {}
    for tensor, row in zip(problem.tensors, rows, strict=True):
        _add_tensor(tensor, row, options, sizes, tables, classes)
    return Network(sizes=tuple(sizes), options=options, tables=tuple(tables))


def _states(values: tuple[float, ...], kept: Ints) -> Floats:
    array = np.asarray(values, dtype=np.float64)[kept]
    return array if len(kept) > 1 else array.reshape(())


Row = tuple[int | None, int]
"""What one option is to one tensor: the layout it produces, if it is the producer, and the set it wants."""


def tensor_rows(problem: Problem) -> list[dict[int, list[Row]]]:
    """For each tensor, for each variable on it (the producer first): the row of every option."""
    result = []
    for tensor in problem.tensors:
        row: dict[int, list[Row]] = {tensor.producer: [(layout, 0) for layout in tensor.produced]}
        for consumer, masks in zip(tensor.consumers, tensor.wanted, strict=True):
            before = row.get(consumer, [(None, 0)] * len(masks))
            row[consumer] = [(layout, mask | more) for (layout, mask), more in zip(before, masks, strict=True)]
        result.append(row)
    return result


def undominated(seconds: Sequence[float], sizes: Sequence[float], rows: list[list[Row]]) -> Ints:
    """The options that no other option with the same rows everywhere matches in both seconds and bytes."""
    best: dict[tuple[Row, ...], list[int]] = {}
    for option in range(len(seconds)):
        same = best.setdefault(tuple(row[option] for row in rows), [])
        if any(seconds[o] <= seconds[option] and sizes[o] <= sizes[option] for o in same):
            continue
        same[:] = [o for o in same if not (seconds[option] <= seconds[o] and sizes[option] <= sizes[o])]
        same.append(option)
    return np.array(sorted(option for same in best.values() for option in same), dtype=np.int64)


def _add_tensor(
    tensor: Tensor,
    rows: dict[int, list[Row]],
    options: tuple[Ints, ...],
    sizes: list[int],
    tables: list[Table],
    classes: dict[tuple[int, ...], int],
) -> None:
    """Append the nodes and tables of one tensor to `sizes`, `tables` and `classes`.

    Readers are united two by two, in their order, by accumulator nodes whose states are the sets that
    they want together: a balanced tree, so that a branch of the graph that ends in two neighbours
    shows the rest of it only the little set that it wants, and trees of tensors with like readers are alike.
    Where that makes large tables, the two neighbours with the fewest states are united.
    """
    distinct = {v: list(dict.fromkeys(row[option] for option in options[v])) for v, row in rows.items()}
    base: Row = (None, 0)
    for only in (kinds[0] for kinds in distinct.values() if len(kinds) == 1):
        base = united(base, only)
    parts: list[tuple[int, list[Row]]] = []
    """node, and the row of each of its states"""
    for variable, row in rows.items():
        kinds = distinct[variable]
        if len(kinds) == 1:
            continue
        partition = np.array([kinds.index(row[option]) for option in options[variable]], dtype=np.int64)
        if 2 * len(kinds) <= len(partition):
            parts.append((_class_node(variable, partition, len(kinds), sizes, tables, classes), kinds))
        else:
            parts.append((variable, [row[option] for option in options[variable]]))
    producer = 1 if tensor.producer in distinct and len(distinct[tensor.producer]) > 1 else 0
    head, readers = parts[:producer], parts[producer:]
    while len(head) + len(readers) > 3:
        joint = [len(one[1]) * len(other[1]) for one, other in itertools.pairwise(readers)]
        if max(joint[::2]) <= LARGE_UNION:
            pairs = [readers[at : at + 2] for at in range(0, len(readers), 2)]
            readers = [_union(pair[0], pair[1], sizes, tables) if len(pair) == 2 else pair[0] for pair in pairs]
        else:
            at = joint.index(min(joint))
            readers[at : at + 2] = [_union(readers[at], readers[at + 1], sizes, tables)]
    axes = head + readers
    _allow(*(len(kinds) for _, kinds in axes))
    states = [base]
    index = np.zeros((), dtype=np.int64)
    for _, kinds in axes:
        step, states = _unions(states, kinds)
        index = step[index]
    final = [None if layout is None else tensor.costs.get((layout, mask)) for layout, mask in states]
    seconds = np.array([0.0 if cost is None else cost[0] for cost in final])
    size = np.array([0.0 if cost is None else cost[1] for cost in final])
    blocked = np.array([cost is None for cost in final])
    _add_table(tables, tuple(node for node, _ in axes), index, seconds, size, blocked)


def united(a: Row, b: Row) -> Row:
    """What two rows are to a tensor together: the layout of the one that produces, and all that is wanted."""
    return a[0] if a[0] is not None else b[0], a[1] | b[1]


def _unions(ones: Sequence[Row], others: Sequence[Row]) -> tuple[Ints, list[Row]]:
    """Which state each pair is together [one, other], and the states: `united`, for all pairs at once."""
    states: dict[Row, int] = {}
    step = []
    for layout, mask in ones:
        if layout is None:
            step.append([states.setdefault((other, mask | more), len(states)) for other, more in others])
        else:
            step.append([states.setdefault((layout, mask | more), len(states)) for _, more in others])
    return np.array(step, dtype=np.int64), list(states)


def _allow(*shape: int) -> None:
    if math.prod(shape) > MAX_TENSOR_ENTRIES:
        raise TooWide(
            f"a tensor would need a table of {math.prod(shape)} entries, more than {MAX_TENSOR_ENTRIES}: "
            "use the ilp solver, or give its readers fewer options"
        )


def _union(
    a: tuple[int, list[Row]], b: tuple[int, list[Row]], sizes: list[int], tables: list[Table]
) -> tuple[int, list[Row]]:
    """A new node for what two nodes want together."""
    step, states = _unions(a[1], b[1])
    _allow(*step.shape, len(states))
    sizes.append(len(states))
    node = len(sizes) - 1
    blocked = step[:, :, None] != np.arange(len(states))
    zero = np.zeros(blocked.shape)
    tables.append(Table(nodes=(a[0], b[0], node), seconds=zero, bytes=zero, blocked=blocked))
    return node, states


def _class_node(
    variable: int,
    partition: Ints,
    count: int,
    sizes: list[int],
    tables: list[Table],
    classes: dict[tuple[int, ...], int],
) -> int:
    """The node of the classes of a variable's options, shared by the tensors that tell the same ones apart."""
    key = (variable, *partition.tolist())
    if key not in classes:
        sizes.append(count)
        classes[key] = len(sizes) - 1
        blocked = partition[:, None] != np.arange(count)
        zero = np.zeros(blocked.shape)
        tables.append(Table(nodes=(variable, classes[key]), seconds=zero, bytes=zero, blocked=blocked))
    return classes[key]


def _add_table(
    tables: list[Table], nodes: tuple[int, ...], index: Ints, seconds: Floats, size: Floats, blocked: Bools
) -> None:
    at_blocked = blocked[index]
    if not at_blocked.any() and not seconds.any() and not size.any():
        return
    tables.append(
        Table(
            nodes=nodes,
            seconds=seconds[index],
            bytes=size[index],
            blocked=np.asarray(at_blocked) if at_blocked.any() else None,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Eliminate `node`: add up the tables in `inputs` (each with its axes brought in order), take the minimum."""

    node: int
    scope: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """(table, permutation, shape to broadcast from), the price axis first, the node's axis second"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of elimination and its transposes, found once and run for every batch of prices."""

    sizes: tuple[int, ...]
    keep: tuple[int, ...]
    steps: tuple[Step, ...]
    rest: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    largest: int
    """entries of the largest table for one price"""
    entries: int
    """of all tables for one price"""


def schedule(sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], keep: tuple[int, ...]) -> Schedule:
    """Greedy elimination order by the weight of the table that eliminating a node makes, all but `keep`.

    Raises `TooWide` where a table would exceed `MAX_TABLE_ENTRIES`, or all of them the budget.
    """
    found = _schedule(sizes, scopes, tuple(sorted(set(keep))))
    if found.largest > MAX_TABLE_ENTRIES:
        raise TooWide(
            f"elimination would need a table of {found.largest} entries, more than {MAX_TABLE_ENTRIES}: "
            "use the ilp solver, or give the variables fewer options"
        )
    if found.entries > BUDGET.elimination_entries:
        raise TooWide(
            f"elimination would need tables of {found.entries} entries in all, more than "
            f"{BUDGET.elimination_entries:.0f}: use the ilp solver, or give the variables fewer options"
        )
    return found


@lru_cache(maxsize=256)
def _schedule(sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], kept: tuple[int, ...]) -> Schedule:
    steps, live, largest = _steps(sizes, scopes, _order(sizes, scopes, set(kept)))
    largest = max(largest, math.prod(sizes[n] for n in kept))
    rest = tuple((table, *_aligned(scope, kept, sizes)) for table, scope in sorted(live.items()))
    entries = sum(math.prod(sizes[n] for n in (step.node, *step.scope)) for step in steps)
    return Schedule(sizes=sizes, keep=kept, steps=steps, rest=rest, largest=largest, entries=entries)


def reduction(
    sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], most: int
) -> tuple[tuple[Step, ...], dict[int, tuple[int, ...]]]:
    """Steps that eliminate nodes as long as tables have at most so many entries, and the tables that are left:
    their places among those given and made, with their scopes."""
    _, order = _greedy(sizes, scopes, set(), FILL_WEIGHTS[0], [1.0] * len(sizes), most)
    steps, live, _ = _steps(sizes, scopes, order)
    return steps, live


def _steps(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], order: Sequence[int]
) -> tuple[tuple[Step, ...], dict[int, tuple[int, ...]], int]:
    """The steps of an order, the tables left at its end, and the entries of the largest."""
    live: dict[int, tuple[int, ...]] = dict(enumerate(scopes))
    holders: list[set[int]] = [set() for _ in sizes]
    for table, scope in live.items():
        for node in scope:
            holders[node].add(table)
    steps: list[Step] = []
    largest = 1
    count = len(scopes)
    for node in order:
        tables = sorted(holders[node])
        scope = tuple(sorted({other for table in tables for other in live[table]} - {node}))
        axes = (node, *scope)
        largest = max(largest, math.prod(sizes[n] for n in axes))
        inputs = tuple((table, *_aligned(live[table], axes, sizes)) for table in tables)
        steps.append(Step(node=node, scope=scope, inputs=inputs))
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
    permutation = (0, *(scope.index(axis) + 1 for axis in present))
    return permutation, (-1, *(sizes[axis] if axis in scope else 1 for axis in axes))


FILL_WEIGHTS = (0.5, 0.0, 0.25, 1.0)
"""How much a table's own size counts beside the fill that it makes, in the orders that are tried."""

RANDOM_ORDERS = 4
"""Orders with disturbed keys that are tried where those are hard."""

EASY_ENTRIES = 20_000_000
"""No further order is looked for where one makes fewer entries than this in all its tables."""


HOPELESS_ENTRIES = 500_000_000
"""Nor where one makes more: others are better by small factors."""


def _order(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], keep: set[int]) -> list[int]:
    """The best of a few greedy min-fill orders, by the total size of their tables. Deterministic."""
    generator = random.Random(0)
    even = [1.0] * len(sizes)
    best: tuple[float, list[int]] | None = None
    for attempt in range(len(FILL_WEIGHTS) + RANDOM_ORDERS):
        disturbed = attempt >= len(FILL_WEIGHTS)
        factors = [1 + 0.6 * generator.random() for _ in sizes] if disturbed else even
        found = _greedy(sizes, scopes, keep, FILL_WEIGHTS[attempt % len(FILL_WEIGHTS)], factors)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] < EASY_ENTRIES or best[0] > HOPELESS_ENTRIES:
            break
    assert best is not None
    return best[1]


def _greedy(
    sizes: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    keep: set[int],
    share: float,
    factors: Sequence[float],
    most: float = math.inf,
) -> tuple[float, list[int]]:
    """Total entries of all tables, and the order: the node first whose elimination joins the least
    that was not joined before (weighted by sizes, and by `factors`). Nodes whose tables would have more than
    `most` entries are passed over."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for node in scope:
            near[node].update(scope)
    for node, others in enumerate(near):
        others.discard(node)
    logs = [math.log2(size) for size in sizes]
    log_of = logs.__getitem__

    def weight(node: int) -> float:
        return logs[node] + sum(map(log_of, near[node]))

    def key(node: int) -> float:
        fill = 0.0
        for a in near[node]:
            missing = near[node] - near[a]
            if len(missing) > 1:  # more than itself
                fill += logs[a] * (sum(map(log_of, missing)) - logs[a])
        return round((fill / 2 + share * weight(node)) * factors[node], 6)

    keys = {node: key(node) for node in range(len(sizes)) if node not in keep}
    heap = [(value, node) for node, value in keys.items()]
    heapq.heapify(heap)
    total, order = 0.0, []
    while heap:
        value, node = heapq.heappop(heap)
        if keys.get(node) != value:
            continue
        del keys[node]
        if weight(node) > math.log2(most):
            continue
        order.append(node)
        total += 2 ** weight(node)
        neighbours = near[node]
        touched = set(neighbours)
        for other in neighbours:
            near[other] |= neighbours
            near[other] -= {node, other}
        for other in neighbours:
            touched |= near[other]
        for other in sorted(touched & keys.keys()):
            changed = key(other)
            if changed != keys[other]:
                keys[other] = changed
                heapq.heappush(heap, (changed, other))
    return total, order


@dataclass(frozen=True, slots=True, kw_only=True)
class Eliminated:
    """The result of a `Schedule`: `table[k, *keep]` is the least cost at price k, `joined[i]` what step i added up."""

    schedule: Schedule
    table: Floats
    joined: tuple[Joined, ...]

    def states(self, prices: Ints, kept: Ints) -> Ints:
        """The states [node, sample] of all nodes, at prices [sample], given those kept [node of keep, sample]."""
        result = np.zeros((len(self.schedule.sizes), len(prices)), dtype=np.int64)
        for node, at in zip(self.schedule.keep, kept, strict=True):
            result[node] = at
        trace_back(self.schedule.steps, self.joined, prices, result)
        return result


def eliminate(plan: Schedule, tables: Sequence[Floats], prices: int) -> Eliminated:
    """Run a schedule over tables [price, *scope]. Ties go to the lowest state."""
    if prices > 1 and plan.largest * prices > MAX_TABLE_ENTRIES:
        half = prices // 2
        first = eliminate(plan, [table[:half] for table in tables], half)
        second = eliminate(plan, [table[half:] for table in tables], prices - half)
        return Eliminated(
            schedule=plan,
            table=np.concatenate((first.table, second.table)),
            joined=tuple(
                tuple(np.concatenate(pair) for pair in zip(*parts, strict=True))
                for parts in zip(first.joined, second.joined, strict=True)
            ),
        )
    live: list[Floats | None] = list(tables)
    joined = run(plan.steps, live, plan.sizes, prices)
    result = np.zeros((prices, *(plan.sizes[node] for node in plan.keep)))
    for table in _taken(live, plan.rest):
        result += table
    return Eliminated(schedule=plan, table=result, joined=joined)


def run(steps: Iterable[Step], live: list[Floats | None], sizes: Sequence[int], prices: int) -> tuple[Joined, ...]:
    """Take the steps: tables that were used up become None, new ones are appended. Returns what each step added up."""
    joined = []
    for step in steps:
        tables = tuple(_taken(live, step.inputs))
        live.append(_minima(tables, (prices, *(sizes[node] for node in (step.node, *step.scope)))))
        joined.append(tables)
    return tuple(joined)


def trace_back(steps: Sequence[Step], joined: Sequence[Joined], prices: Ints, states: Ints) -> None:
    """Fill in the states [node, sample] of the nodes that the steps eliminated, from those of the others."""
    for step, tables in zip(reversed(steps), reversed(joined), strict=True):
        at = [states[other] for other in step.scope]
        costs = np.zeros((len(prices), 1))
        for table in tables:
            there = tuple(state if size > 1 else 0 for state, size in zip(at, table.shape[2:], strict=True))
            costs = costs + table[(prices, slice(None), *there)]
        states[step.node] = costs.argmin(axis=1)


def _taken(live: list[Floats | None], inputs: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[Floats]:
    found = []
    for index, permutation, spread in inputs:
        table = live[index]
        assert table is not None
        found.append(table.transpose(permutation).reshape(spread))
        live[index] = None
    return found


def _minima(tables: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """The minima [price, *scope] of the sum of tables over its dim 1. A large sum is made in slices along dim 2."""
    if math.prod(shape) > SLICE_ENTRIES and len(shape) > 2:
        least = np.empty((shape[0], *shape[2:]))
        for i in range(shape[2]):
            parts = [table[:, :, 0 if table.shape[2] == 1 else i] for table in tables]
            least[:, i] = _minima(parts, (*shape[:2], *shape[3:]))
        return least
    total = np.zeros((shape[0], *(1 for _ in shape[1:])))
    for table in sorted(tables, key=np.size):  # small ones are added up while they are small
        total = total + table
    return np.asarray(np.broadcast_to(total, shape).min(axis=1))
