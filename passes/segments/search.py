"""The search for segments (CFP section 4.1): the runs of repeated layers of a joint graph.

Everything after this step costs per unique segment, so a repeat must be exact: its copies are isomorphic node by node,
forward and backward together, and what crosses between them is listed. The search only proposes (a greedy cover by
period over the signatures of all operators, which is finer than the paper's cover over contractions); `alignment`
alone decides, and shortens or refuses a run that does not fit. CFP lets trivial operators differ between equal
segments; here they may not, because one copy's program is stamped for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.ir.graph import JointGraph, is_view

from .alignment import shortened
from .cuts import divide
from .facts import Facts, PeriodicRun, longest, periodic, pieces, without
from .segment import Repeated, Segments

RUNS_TRIED = 24
"""Runs that are tried before giving up."""


def segments(graph: JointGraph) -> Segments:
    """Find the repeated layers of a joint graph (CFP section 4.1). Deterministic."""
    facts = Facts.of(graph)
    free = [(0, facts.middle)]
    backward_runs = periodic(facts.labels[facts.middle :], facts.middle)
    forward_runs = periodic(facts.labels[: facts.middle], 0)
    repeats: list[Repeated] = []
    for _ in range(RUNS_TRIED):
        forward_runs = [clipped for run in forward_runs for clipped in _clip(run, free, facts)]
        run = longest(forward_runs)
        if run is None:
            break
        found = divide(facts, run, backward_runs)
        if found is None:
            forward_runs.remove(run)
            continue
        repeats.append(found)
        taken = [i for copy in found.copies for i in copy]
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
    last layer of an encoder makes: that is made whole, by the rest of the graph."""
    home = {i: (n, k) for n, repeated in enumerate(repeats) for k, copy in enumerate(repeated.copies) for i in copy}
    making: set[tuple[int, int]] = set()
    for name in {name: None for repeated in repeats for name in repeated.shared}:
        index = facts.graph.producer.get(name)
        while index is not None and index not in home and is_view(facts.graph.nodes[index]):
            index = facts.graph.producer.get(facts.graph.nodes[index].inputs[0])
        if index is not None and index in home:
            making.add(home[index])
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
        middle = piece.start + (piece.length // piece.period // 2) * piece.period
        nodes = range(middle, min(middle + piece.period, piece.stop))
        if any(name not in facts.graph.producer for i in nodes for name in facts.graph.nodes[i].inputs):
            yield piece
