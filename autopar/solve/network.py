"""The factor graph of a problem: nodes (variables, classes of options, accumulators) and tables over them."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .problem import Problem, Tensor, TooWide, Variable
from .rows import Bools, Floats, Ints, Row, tensor_rows, undominated, united
from .work import LIMITS

LARGE_UNION = 20_000
"""Pairs of states of two readers above which the narrowest pair of readers is united instead."""


Weights = tuple[float, float]
"""What a second costs, and a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What joint states of some nodes cost: seconds and bytes, each with one array axis a node, 0 where blocked."""

    seconds: Floats
    bytes: Floats
    blocked: Bools | None = None

    def priced(self, weights: Weights) -> Floats:
        """weights[0] * seconds + weights[1] * bytes, infinite where blocked."""
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

    def priced(self, weights: Weights) -> Floats:
        """The same at each price."""
        return self.costs


Table = tuple[tuple[int, ...], CostTable | Leads]
"""Nodes, and what each of their joint states costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A problem without its repeats: `sizes[n]` states of node n, of which the first are the variables.

    State s of variable v is its option `options[v][s]`: options that no tensor can tell apart from a
    cheaper one are left out, except where a border shows the variable to others.
    """

    sizes: tuple[int, ...]
    options: tuple[Ints, ...]
    tables: tuple[Table, ...]


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
    growing = _Growing(options, entries)
    for index, variable in enumerate(problem.variables):
        growing.add_variable(index, variable)
    for tensor, row in zip(problem.tensors, rows, strict=True):
        growing.add_tensor(tensor, row)
    return Network(sizes=tuple(growing.sizes), options=options, tables=tuple(growing.tables))


Part = tuple[int, list[Row]]
"""A node, and the row of each of its states."""


class _Growing:
    """The nodes and the tables of a network to which variables and tensors are added."""

    def __init__(self, options: tuple[Ints, ...], entries: int) -> None:
        self.options, self.entries = options, entries
        self.sizes = [len(kept) for kept in options]
        self.tables: list[Table] = []
        self.classes: dict[tuple[int, ...], int] = {}

    def add_variable(self, index: int, variable: Variable) -> None:
        if any(variable.seconds) or any(variable.bytes):
            kept = self.options[index]
            nodes, shape = ((index,), (len(kept),)) if len(kept) > 1 else ((), ())
            seconds, size = (np.asarray(of, dtype=np.float64)[kept] for of in (variable.seconds, variable.bytes))
            self.tables.append((nodes, CostTable(seconds=seconds.reshape(shape), bytes=size.reshape(shape))))

    def add_tensor(self, tensor: Tensor, rows: dict[int, list[Row]]) -> None:
        """Readers are united two by two, in their order, by accumulator nodes whose states are the sets that
        they want together: a balanced tree, so that a branch of the graph that ends in two neighbours
        shows the rest of it only the little set that it wants, and trees of tensors with like readers are alike.
        Where that makes large tables, the two neighbours with the fewest states are united.
        """
        distinct = {v: list(dict.fromkeys(row[option] for option in self.options[v])) for v, row in rows.items()}
        base: Row = (None, 0)
        for only in (kinds[0] for kinds in distinct.values() if len(kinds) == 1):
            base = united(base, only)
        parts = [self._part(v, rows[v], kinds) for v, kinds in distinct.items() if len(kinds) > 1]
        producer = 1 if tensor.producer in distinct and len(distinct[tensor.producer]) > 1 else 0
        head, readers = parts[:producer], parts[producer:]
        while len(head) + len(readers) > 3:
            joint = [len(one[1]) * len(other[1]) for one, other in itertools.pairwise(readers)]
            if max(joint[::2]) <= LARGE_UNION:
                pairs = [readers[at : at + 2] for at in range(0, len(readers), 2)]
                readers = [self._union(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            else:
                at = joint.index(min(joint))
                readers[at : at + 2] = [self._union(readers[at], readers[at + 1])]
        axes = head + readers
        self._allow(*(len(kinds) for _, kinds in axes))
        states = [base]
        index = np.zeros((), dtype=np.int64)
        for _, kinds in axes:
            step, states = _unions(states, kinds)
            index = step[index]
        final = [None if layout is None else tensor.costs.get((layout, mask)) for layout, mask in states]
        seconds = np.array([0.0 if cost is None else cost[0] for cost in final])[index]
        size = np.array([0.0 if cost is None else cost[1] for cost in final])[index]
        blocked = np.asarray(np.array([cost is None for cost in final])[index])
        if blocked.any() or seconds.any() or size.any():
            costs = CostTable(seconds=seconds, bytes=size, blocked=blocked if blocked.any() else None)
            self.tables.append((tuple(node for node, _ in axes), costs))

    def _part(self, variable: int, row: list[Row], kinds: list[Row]) -> Part:
        """The node of a variable, or that of the classes of its options, which the tensors share that tell the same
        ones apart."""
        options = self.options[variable]
        if 2 * len(kinds) > len(options):
            return variable, [row[option] for option in options]
        partition = np.array([kinds.index(row[option]) for option in options], dtype=np.int64)
        key = (variable, *partition.tolist())
        if key not in self.classes:
            self.classes[key] = self._led_to((variable,), partition, len(kinds))
        return self.classes[key], kinds

    def _union(self, a: Part, b: Part) -> Part:
        """A new node for what two nodes want together."""
        step, states = _unions(a[1], b[1])
        self._allow(*step.shape, len(states))
        return self._led_to((a[0], b[0]), step, len(states)), states

    def _led_to(self, nodes: tuple[int, ...], state: Ints, size: int) -> int:
        """A new node, to whose states those of others lead."""
        self.sizes.append(size)
        node = len(self.sizes) - 1
        self.tables.append(((*nodes, node), Leads(state=state, size=size)))
        return node

    def _allow(self, *shape: int) -> None:
        if math.prod(shape) > self.entries:
            raise TooWide(
                f"a tensor would need a table of {math.prod(shape)} entries, more than {self.entries}: "
                "use the ilp solver, or give its readers fewer options"
            )


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
