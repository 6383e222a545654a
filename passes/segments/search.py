"""The search for segments (CFP section 4.1): the runs of repeated layers of a joint graph.

Everything after this step costs per unique segment, so a repeat must be exact: its copies are isomorphic node by node,
forward and backward together, and what crosses between them is listed. The search only proposes (a greedy cover by
period over the signatures of all operators, which is finer than the paper's cover over contractions); `alignment`
alone decides, and shortens or refuses a run that does not fit. CFP lets trivial operators differ between equal
segments; here they may not, because one copy's program is stamped for all.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autopar.ir.dataflow import viewed
from autopar.ir.graph import JointGraph, Node
from autopar.ir.rewrite import last_reads

from .alignment import align, shortened
from .facts import Facts
from .periods import Ints, PeriodicRun, crossing, longest, periodic, pieces, without
from .segment import Repeated, Segments

RUNS_TRIED = 24
"""Runs that are tried before giving up."""


def segments(graph: JointGraph, *, may_vary: bool = True) -> Segments:
    """Find the repeated layers of a joint graph (CFP section 4.1). Deterministic. `may_vary`: copies may read different
    masks (`Repeated.varied`)."""
    facts = Facts.of(graph, may_vary=may_vary)
    free = [(0, facts.middle)]
    backward_runs = periodic(facts.labels[facts.middle :], facts.middle)
    forward_runs = periodic(facts.labels[: facts.middle], 0)
    repeats: list[Repeated] = []
    for _ in range(RUNS_TRIED):
        forward_runs = [clipped for run in forward_runs for clipped in _clip(run, free, facts)]
        run = longest(forward_runs)
        if run is None:
            break
        layers = divide(facts, run, backward_runs)
        if layers is None:
            forward_runs.remove(run)
            continue
        repeats.append(layers)
        taken = [i for copy in layers.copies for i in copy]
        forward = [i for i in taken if i < facts.middle]
        free = without(free, min(forward), max(forward) + 1)
        backward = [i for i in taken if i >= facts.middle]
        if backward:
            low, high = min(backward), max(backward) + 1
            outside = without([(facts.middle, len(graph.nodes))], low, high)
            backward_runs = [piece for run in backward_runs for piece in pieces(run, outside)]
    repeats = _apart(facts, repeats)
    repeats.sort(key=lambda repeated: repeated.copies[0][0])
    inside = {i for repeated in repeats for copy in repeated.copies for i in copy}
    return Segments(repeats=tuple(repeats), rest=tuple(i for i in range(len(graph.nodes)) if i not in inside))


def _apart(facts: Facts, repeats: Sequence[Repeated]) -> list[Repeated]:
    """The repeats, without copies that make what all copies of another one read, as a decoder's layers read what the
    last layer of an encoder makes: the rest of the graph makes it, replicated."""
    home = {i: (n, k) for n, repeated in enumerate(repeats) for k, copy in enumerate(repeated.copies) for i in copy}
    making: set[tuple[int, int]] = set()
    for name in dict.fromkeys(
        n for repeated in repeats for k in range(repeated.count) for n in repeated.from_outside(k)
    ):
        root, views = viewed(facts.graph, name)
        makers = (facts.graph.producer.get(value) for value in (*(view.name for view in views), root))
        making.update([home[maker] for maker in makers if maker in home][:1])
    apart: list[Repeated] = []
    for n, repeated in enumerate(repeats):
        kept = [copy for k, copy in enumerate(repeated.copies) if (n, k) not in making]
        left = repeated if len(kept) == repeated.count else shortened(facts, kept)
        if left is not None:
            apart.append(left)
    return apart


def _clip(run: PeriodicRun, free: Iterable[tuple[int, int]], facts: Facts) -> Iterator[PeriodicRun]:
    """The parts of a run in free intervals, if a period of it reads a graph input: chains of
    pointwise operators repeat too, and are not layers."""
    for piece in pieces(run, free):
        middle = piece.start + (piece.count // 2) * piece.period
        nodes = range(middle, min(middle + piece.period, piece.stop))
        if any(name not in facts.graph.producer for i in nodes for name in facts.graph.nodes[i].inputs):
            yield piece


CUTS_TRIED = 4
"""Cuts of one period that are tried before giving up."""

BORDERS_MOST = 6
"""The cost matrix of a copy has a dimension for each border: with many, a copy is no unit."""


def divide(facts: Facts, run: PeriodicRun, backward_runs: Sequence[PeriodicRun]) -> Repeated | None:
    """Cut a forward run into copies, give each its backward nodes, and verify. A period can be cut at any of its nodes:
    two copies from the middle show what crosses; least first: number of borders, their bytes, then the outermost module
    boundary. Backward nodes follow the values that their copy saved, in the reverse order of forward."""
    ranked: list[tuple[tuple[float, ...], list[list[int]]]] = []
    for forward in _cuts(facts, run):
        path = _shared_path(facts.graph.nodes, forward[len(forward) // 2][0])
        for copies in _with_backward(facts, forward, backward_runs):
            first = min(len(copies) // 2, len(copies) - 2)
            probe = align(facts, copies[first : first + 2])
            # a misfit in the middle may be at home at an end, which `shortened` drops: tried last
            number, size = (math.inf, 0) if isinstance(probe, int) else (len(probe.borders), _bytes(facts, probe))
            ranked.append(((number, size, path, -len(copies), len(ranked)), copies))
    for _, copies in sorted(ranked):
        repeated = shortened(facts, copies)
        if repeated is not None and len(repeated.borders) <= BORDERS_MOST:
            return repeated
    return None


def _bytes(facts: Facts, repeated: Repeated) -> int:
    return sum(facts.graph.metas[border.values[1]].bytes for border in repeated.borders)


def _cuts(facts: Facts, run: PeriodicRun) -> Iterator[list[range]]:
    """Forward intervals of the copies, for the rotations of the period with the least across the cut."""
    across = _crossing(facts, run, facts.graph.halves[0])
    ranked: list[tuple[tuple[int, ...], int]] = []
    for rotation in range(run.period):
        count = (run.length - rotation) // run.period
        if count >= 2:
            cut = run.start + rotation + run.period * (count // 2)
            number, size = across[cut - run.start].tolist()
            ranked.append(((number, size, _shared_path(facts.graph.nodes, cut), -count, rotation), count))
    for (*_, rotation), count in sorted(ranked)[:CUTS_TRIED]:
        start = run.start + rotation
        yield [range(start + k * run.period, start + (k + 1) * run.period) for k in range(count)]


def _crossing(facts: Facts, run: PeriodicRun, nodes: Sequence[Node]) -> Ints:
    """What crosses each cut of a run, among these nodes, the first of the graph."""
    last = {name: position - run.start for name, position in last_reads(nodes).items()}
    return crossing(nodes[run.start : run.stop], facts.graph.metas, last)


def _shared_path(nodes: Sequence[Node], cut: int) -> int:
    """How many names the module paths on both sides of a cut share: least between layers."""
    before, after = nodes[cut - 1].module.split("."), nodes[cut].module.split(".")
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))


def _with_backward(
    facts: Facts, forward: Sequence[range], backward_runs: Sequence[PeriodicRun]
) -> Iterator[list[list[int]]]:
    """Propose copies: forward intervals, each with the interval of backward nodes that read what it
    saved. Autograd runs backward in reverse order of forward, so copy k owns the k-th last interval."""
    owner = {i: k for k, interval in enumerate(forward) for i in interval}
    votes = list(_votes(facts, owner, _owned_inputs(facts, forward, owner)))
    if not votes:
        yield [list(interval) for interval in forward]
        return
    agreed = {run: _agreement(run, len(forward), votes) for run in backward_runs}
    most = max((agree.max() for agree in agreed.values()), default=0)
    fitting = [run for run in backward_runs if agreed[run].max() * 10 >= most * 9]
    if not fitting:
        return
    run = min(fitting, key=lambda run: (run.period, run.start))
    across = _crossing(facts, run, facts.graph.nodes)
    for top in _tops(run, len(forward), agreed[run], across)[:CUTS_TRIED]:
        copies = []
        for k, interval in enumerate(forward):
            low, high = top - (k + 1) * run.period, top - k * run.period
            if run.start <= low and high <= run.stop:
                copies.append([*interval, *range(low, high)])
        if len(copies) >= 2:
            yield copies


def _owned_inputs(facts: Facts, forward: Sequence[range], owner: dict[int, int]) -> dict[str, int]:
    """The graph inputs that one copy alone reads in forward, with the copy."""
    owned: dict[str, int] = {}
    for k, interval in enumerate(forward):
        for i in interval:
            for name in facts.graph.nodes[i].inputs:
                if name not in facts.graph.producer:
                    owned[name] = k if owned.get(name, k) == k else -1
    return {name: k for name, k in owned.items() if k >= 0}


def _votes(facts: Facts, owner: dict[int, int], inputs: dict[str, int]) -> Iterator[tuple[int, int]]:
    """(backward node, copy): the node reads a value that copy saved, or a parameter of it. Values
    that forward nodes of other copies read too are borders and say nothing."""
    for i in range(facts.middle, len(facts.graph.nodes)):
        for name in facts.graph.nodes[i].inputs:
            if name in inputs:
                yield i, inputs[name]
            elif name in facts.graph.producer:
                copy = owner.get(facts.graph.producer[name])
                readers = facts.graph.consumers[name]
                if copy is not None and all(owner.get(reader) == copy for reader in readers if reader < facts.middle):
                    yield i, copy


def _agreement(run: PeriodicRun, count: int, votes: Sequence[tuple[int, int]]) -> Ints:
    """For each end run.start + c of copy 0's backward interval, how many votes it agrees with."""
    agree = np.zeros(run.length + count * run.period + 3, dtype=np.int64)
    voters = np.array([vote for vote in votes if run.start <= vote[0] < run.stop], dtype=np.int64).reshape(-1, 2)
    # end - 1 - node must lie in [copy * period, (copy + 1) * period)
    low = voters[:, 0] + voters[:, 1] * run.period + 1 - run.start
    np.add.at(agree, low, 1)
    np.add.at(agree, np.minimum(low + run.period, len(agree) - 1), -1)
    return np.cumsum(agree)


def _tops(run: PeriodicRun, count: int, agree: Ints, across: Ints) -> list[int]:
    """Ends of copy 0's backward interval, best first: fewest votes against and fewest tensors across."""
    most = int(agree.max())
    ranked: list[tuple[float, float, int, int]] = []
    for end in np.flatnonzero(agree * 2 >= most).tolist():
        cuts = [end - k * run.period for k in range(count + 1)]
        inside = [k for k in range(count) if cuts[k] <= run.length and cuts[k + 1] >= 0]
        if len(inside) >= 2:
            number, size = across[[cuts[k] for k in inside[1:]]].mean(axis=0).tolist()
            against = (most - int(agree[end])) / count
            ranked.append((number + against, size, -len(inside), end + run.start))
    return [top for *_, top in sorted(ranked)]
