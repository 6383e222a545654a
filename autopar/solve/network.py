"""The factor graph of a problem: nodes (variables, classes of options, accumulators) and tables over them."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .problem import Problem, Tensor, TooWide
from .rows import Bools, Floats, Ints, Row, tensor_rows, undominated, united
from .work import LIMITS

LARGE_UNION = 20_000
"""Pairs of states of two readers above which the narrowest pair of readers is united instead."""


Weights = tuple[float, float]
"""What a second costs, and a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What a joint state of `nodes` costs: seconds and bytes, each with one array axis a node, 0 where blocked."""

    nodes: tuple[int, ...]
    seconds: Floats
    bytes: Floats
    blocked: Bools | None = None

    def priced(self, weights: Weights) -> Floats:
        """[*nodes]: weights[0] * seconds + weights[1] * bytes, infinite where blocked."""
        cost = weights[0] * self.seconds + weights[1] * self.bytes
        return np.asarray(cost if self.blocked is None else np.where(self.blocked, np.inf, cost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """The joint states of some nodes lead to a state of one more, `state[*nodes]` of `size`: that costs nothing, and
    all else is blocked."""

    state: Ints
    size: int

    @property
    def costs(self) -> Floats:
        """[*nodes, the one more]"""
        return np.where(self.state[..., None] == np.arange(self.size), 0.0, np.inf)

    def of(self, *states: Ints) -> Floats:
        """Costs of joint states."""
        return np.where(self.state[states[:-1]] == states[-1], 0.0, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A table of what all `nodes` but the last lead it to."""

    nodes: tuple[int, ...]
    leads: Leads

    def priced(self, weights: Weights) -> Floats:
        """[*nodes]: the same at each price."""
        return self.leads.costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A problem without its repeats: `sizes[n]` states of node n, of which the first are the variables.

    State s of variable v is its option `options[v][s]`: options that no tensor can tell apart from a
    cheaper one are left out, except where a border shows the variable to others.
    """

    sizes: tuple[int, ...]
    options: tuple[Ints, ...]
    tables: tuple[CostTable | Rule, ...]


def network(problem: Problem, borders: Iterable[int], entries: int = LIMITS.tensor_entries) -> Network:
    """The factor graph of a problem; the variables in `borders` keep all their options.

    A tensor's cost depends on (produced layout, union of wanted sets) only. Options of a variable that
    are the same for a tensor form one class, with a node of its own where that is worth it. A tensor
    with few readers is one table over classes; one with many is a tree of accumulator nodes, whose
    states are the sets wanted so far, so that tables stay small.

    Raises `TooWide` where a table would have more than so many entries.
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
    tables: list[CostTable | Rule] = [
        CostTable(
            nodes=(index,) if sizes[index] > 1 else (),
            seconds=_states(variable.seconds, options[index]),
            bytes=_states(variable.bytes, options[index]),
        )
        for index, variable in enumerate(problem.variables)
        if any(variable.seconds) or any(variable.bytes)
    ]
    classes: dict[tuple[int, ...], int] = {}
    for tensor, row in zip(problem.tensors, rows, strict=True):
        _add_tensor(tensor, row, options, sizes, tables, classes, entries)
    return Network(sizes=tuple(sizes), options=options, tables=tuple(tables))


def _states(values: tuple[float, ...], kept: Ints) -> Floats:
    array = np.asarray(values, dtype=np.float64)[kept]
    return array if len(kept) > 1 else array.reshape(())


def _add_tensor(
    tensor: Tensor,
    rows: dict[int, list[Row]],
    options: tuple[Ints, ...],
    sizes: list[int],
    tables: list[CostTable | Rule],
    classes: dict[tuple[int, ...], int],
    entries: int,
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
            readers = [
                _union(pair[0], pair[1], sizes, tables, entries) if len(pair) == 2 else pair[0] for pair in pairs
            ]
        else:
            at = joint.index(min(joint))
            readers[at : at + 2] = [_union(readers[at], readers[at + 1], sizes, tables, entries)]
    axes = head + readers
    _allow(entries, *(len(kinds) for _, kinds in axes))
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


def _unions(ones: Sequence[Row], others: Sequence[Row]) -> tuple[Ints, list[Row]]:
    """Which state each pair is together [one, other], and the states: `united`, for all pairs at once."""
    step, states = _cached_unions(tuple(ones), tuple(others))
    return step, list(states)


@lru_cache(maxsize=1024)
def _cached_unions(ones: tuple[Row, ...], others: tuple[Row, ...]) -> tuple[Ints, tuple[Row, ...]]:
    """Layers of one structure, and one solve after the other, ask for the same."""
    states: dict[Row, int] = {}
    step = []
    for layout, mask in ones:
        if layout is None:
            step.append([states.setdefault((other, mask | more), len(states)) for other, more in others])
        else:
            step.append([states.setdefault((layout, mask | more), len(states)) for _, more in others])
    return np.array(step, dtype=np.int64), tuple(states)


def _allow(entries: int, *shape: int) -> None:
    if math.prod(shape) > entries:
        raise TooWide(
            f"a tensor would need a table of {math.prod(shape)} entries, more than {entries}: "
            "use the ilp solver, or give its readers fewer options"
        )


def _union(
    a: tuple[int, list[Row]], b: tuple[int, list[Row]], sizes: list[int], tables: list[CostTable | Rule], entries: int
) -> tuple[int, list[Row]]:
    """A new node for what two nodes want together."""
    step, states = _unions(a[1], b[1])
    _allow(entries, *step.shape, len(states))
    sizes.append(len(states))
    node = len(sizes) - 1
    tables.append(Rule(nodes=(a[0], b[0], node), leads=Leads(state=step, size=len(states))))
    return node, states


def _class_node(
    variable: int,
    partition: Ints,
    count: int,
    sizes: list[int],
    tables: list[CostTable | Rule],
    classes: dict[tuple[int, ...], int],
) -> int:
    """The node of the classes of a variable's options, shared by the tensors that tell the same ones apart."""
    key = (variable, *partition.tolist())
    if key not in classes:
        sizes.append(count)
        classes[key] = len(sizes) - 1
        tables.append(Rule(nodes=(variable, classes[key]), leads=Leads(state=partition, size=count)))
    return classes[key]


def _add_table(
    tables: list[CostTable | Rule], nodes: tuple[int, ...], index: Ints, seconds: Floats, size: Floats, blocked: Bools
) -> None:
    at_blocked = blocked[index]
    if not at_blocked.any() and not seconds.any() and not size.any():
        return
    tables.append(
        CostTable(
            nodes=nodes,
            seconds=seconds[index],
            bytes=size[index],
            blocked=np.asarray(at_blocked) if at_blocked.any() else None,
        )
    )
