"""A problem without repeats, as tables: copies written out, or the middle of each repeat folded into a repeated pair.

A body becomes tables once, and nodes whose elimination makes small tables are eliminated in it once. Its copies share
what is left, and meet in the variables of their borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from networkx.utils import UnionFind

from .elimination import EliminationStep, Joined, reduction, run, trace_back
from .network import Leads, Network, Weights
from .pricing import Library
from .problem import Choice, Problem, Repeat
from .rows import Floats, Ints

ENDS = 2
"""Copies at each end of a folded repeat that choose for themselves."""

PERIOD = 2
"""Copies between them that are repeated: layers may alternate."""

Costs = Floats | Leads

Factor = tuple[tuple[int, ...], Costs]
"""A table of a network at a price: nodes, and what each of their joint states costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`length` copies in a row, each as one or, `times` times over, as a pair that comes again and again."""

    length: int
    times: int


def spans(count: int, *, folded: bool) -> Iterator[Span]:
    """Of the copies of a repeat. What cannot be a pair is a copy more."""
    periods = (count - 2 * ENDS) // PERIOD if folded else 0
    if periods <= 1:
        yield Span(length=count, times=1)
        return
    yield Span(length=ENDS, times=1)
    yield Span(length=PERIOD, times=periods)
    yield Span(length=count - ENDS - periods * PERIOD, times=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies of a repeat that choose for themselves: node n of the body is node `nodes[copy, n]` of the whole, or
    -1 if it was eliminated in the body. `order` says which of them each copy of the repeat is."""

    body: Flat
    nodes: Ints
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A problem as tables over nodes, of which `steps` eliminated some. Node n has `sizes[n]` states; variable v is
    node `variables[v]`, whose state s is its option `options[v][s]`."""

    sizes: tuple[int, ...]
    variables: tuple[int, ...]
    options: tuple[Ints, ...]
    factors: tuple[Factor, ...]
    """What is left."""
    steps: tuple[EliminationStep, ...]
    joined: tuple[Joined, ...]
    repeats: tuple[Copies, ...]

    def choices(self, states: Ints) -> list[Choice]:
        """The choice of each sample, given states [node, sample] of the nodes that were not eliminated. Copies that
        choose together are one object."""
        states = states.copy()
        trace_back(self.steps, self.joined, states)
        options = np.array([of[states[v]] for v, of in zip(self.variables, self.options, strict=True)])
        parts: list[list[tuple[Choice, ...]]] = [[] for _ in range(states.shape[1])]
        for copies in self.repeats:
            of_bodies = copies.body.choices(np.concatenate([_given(states, nodes) for nodes in copies.nodes], axis=1))
            for sample, of_sample in enumerate(parts):
                of_sample.append(tuple(of_bodies[copy * states.shape[1] + sample] for copy in copies.order))
        return [
            Choice(options=tuple(options[:, sample].tolist()), repeats=tuple(of_sample))
            for sample, of_sample in enumerate(parts)
        ]


def _given(states: Ints, nodes: Ints) -> Ints:
    """The states [node of the body, sample] of a copy; 0 for those to be found."""
    return np.asarray(np.where(nodes[:, None] >= 0, states[nodes], 0))


def priced(network: Network, weights: Weights) -> list[Factor]:
    """The tables at `weights[0]` * seconds + `weights[1]` * bytes."""
    return [(nodes, of if isinstance(of, Leads) else of.priced(weights)) for nodes, of in network.tables]


def flattened(problem: Problem, weights: Weights, library: Library, *, most: int, folded: bool = False) -> Flat:
    """The problem at `weights[0]` * seconds + `weights[1]` * bytes. Nodes are eliminated as long as tables have at most
    `most` entries.

    `folded`: the middle of a repeat with many copies becomes `PERIOD` copies that stand for all of it, at the cost of
    all. That leaves fewer choices, and each costs what it does in `problem`.
    """
    bodies: dict[tuple[int, tuple[int, ...]], Flat] = {}

    def body_of(repeat: Repeat) -> Flat:
        borders = tuple(sorted({*repeat.body_left, *repeat.body_right}))
        key = (id(repeat.body), borders)
        if key not in bodies:
            bodies[key] = flat(repeat.body, borders)
        return bodies[key]

    def flat(part: Problem, borders: Sequence[int]) -> Flat:
        inner = (v for repeat in part.repeats for v in (*repeat.left, *repeat.right))
        network = library.network(part, {*borders, *inner})
        whole = _Whole(list(network.sizes), priced(network, weights))
        repeats = [whole.add(repeat, body_of(repeat), spans(repeat.count, folded=folded)) for repeat in part.repeats]
        return whole.reduced(range(len(part.variables)), network.options, borders, repeats, most)

    return flat(problem, ())


class _Whole:
    """A part, while the copies of its repeats are added. Nodes of borders that meet are one."""

    def __init__(self, sizes: list[int], factors: list[Factor]) -> None:
        self.sizes, self.factors = sizes, factors
        self.joined: UnionFind[int] = UnionFind(range(len(sizes)))

    def add(self, repeat: Repeat, body: Flat, parts: Iterable[Span]) -> Copies:
        gone = {step.node for step in body.steps}
        border: Sequence[int] = repeat.left
        every: list[Ints] = []
        order: list[int] = []
        for span in parts:
            first, here = border, []
            for _ in range(span.length):
                nodes = self._copy(body, gone, span.times)
                self._join(border, [nodes[body.variables[v]] for v in repeat.body_left])
                border = [int(nodes[body.variables[v]]) for v in repeat.body_right]
                here.append(len(every))
                every.append(nodes)
            if span.times > 1:
                self._join(first, border)
            order += here * span.times
        self._join(repeat.right, border)
        return Copies(body=body, nodes=np.array(every), order=tuple(order))

    def _copy(self, body: Flat, gone: set[int], times: int) -> Ints:
        nodes = np.full(len(body.sizes), -1, dtype=np.int64)
        left = [node for node in range(len(body.sizes)) if node not in gone]
        nodes[left] = np.arange(len(self.sizes), len(self.sizes) + len(left))
        self.sizes += [body.sizes[node] for node in left]
        for scope, costs in body.factors:
            at = tuple(nodes[list(scope)].tolist())
            self.factors.append((at, costs if times == 1 or isinstance(costs, Leads) else times * costs))
        return nodes

    def _join(self, border: Sequence[int], other: Iterable[int]) -> None:
        for pair in zip(border, other, strict=True):
            self.joined.union(*map(int, pair))

    def reduced(
        self,
        variables: Iterable[int],
        options: tuple[Ints, ...],
        borders: Iterable[int],
        repeats: Sequence[Copies],
        most: int,
    ) -> Flat:
        """With one node for those that are joined, and without those whose elimination makes small tables, but for
        `borders`."""
        place: dict[int, int] = {}
        at = [place.setdefault(self.joined[node], len(place)) for node in range(len(self.sizes))]
        sizes = [0] * len(place)
        for node, size in zip(at, self.sizes, strict=True):
            sizes[node] = size
        factors = [_merged(tuple(at[node] for node in scope), costs) for scope, costs in self.factors]
        steps, left = reduction(tuple(sizes), tuple(scope for scope, _ in factors), most, {at[v] for v in borders})
        used = {table for step in steps for table, _, _ in step.inputs}
        live = [_dense(costs) if number in used else None for number, (_, costs) in enumerate(factors)]
        joined = run(steps, live, sizes)
        numbers = np.array([*at, -1])
        return Flat(
            sizes=tuple(sizes),
            variables=tuple(at[v] for v in variables),
            options=options,
            factors=tuple((scope, _left(number, factors, live)) for number, scope in left.items()),
            steps=steps,
            joined=joined,
            repeats=tuple(replace(copies, nodes=numbers[copies.nodes]) for copies in repeats),
        )


def _dense(costs: Costs) -> Floats:
    return costs.costs if isinstance(costs, Leads) else costs


def _left(number: int, factors: Sequence[Factor], live: Sequence[Floats | None]) -> Costs:
    if number < len(factors):
        return factors[number][1]
    table = live[number]
    assert table is not None
    return table


def _merged(scope: tuple[int, ...], costs: Costs) -> Factor:
    """Over distinct nodes: where borders made two of them one, they have the same state."""
    distinct = tuple(dict.fromkeys(scope))
    if len(distinct) == len(scope):
        return scope, costs
    table = _dense(costs)
    states = np.ix_(*(range(table.shape[scope.index(node)]) for node in distinct))
    return distinct, table[tuple(states[distinct.index(node)] for node in scope)]
