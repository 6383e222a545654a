"""Stretches: what of a program a compiler may fuse.

A stretch is a run of a rank's own operators between two instructions that stay where the schedule put them:
collectives, waits for them, autopar's own operators (attention, random numbers, routed rows), which are kernels as they
are, and what has rows that only the run counts. Long runs are cut where a period of them ends, at the place that the
fewest bytes cross, so that layers alike become stretches alike, and each is compiled once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.cost.fusion import stays
from autopar.ir.graph import VIEWS, Node, TensorMeta
from autopar.ir.program import Program
from autopar.ir.rewrite import last_reads, living, needed
from autopar.passes.segments.periods import PeriodicRun, crossing, periodic

PERIODIC = 48
"""Instructions of a run from which on it is cut by its period: a compiler takes 10 ms and more for each, and a run of
32 layers would be compiled as one."""

MOST = 256
"""Instructions of a stretch at most, where nothing repeats."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Instructions that run as one function of their `inputs`, in the order of reading, to `outputs`: what others read
    of them."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module of most of its instructions."""
        paths = [node.module for node in self.nodes]
        return max(dict.fromkeys(paths), key=paths.count)


def stretches(program: Program, half: Sequence[Node], results: Collection[str | None]) -> Iterator[Node | Stretch]:
    """The instructions of a half of the program that returns these `results`, in order, with runs of them as
    stretches. Every instruction is in one of them, or stands by itself; those that nobody reads are left out."""
    last = last_reads(half) | dict.fromkeys((name for name in results if name is not None), len(half))
    begin = 0
    for end in (*(i for i, node in enumerate(half) if stays(node, program.uneven)), len(half)):
        for first, behind in _cuts(half[begin:end], program.metas):
            first, behind = begin + first, begin + behind
            made = [name for node in half[first:behind] for name in node.outputs if name]
            yield from _part(half[first:behind], tuple(name for name in made if last.get(name, -1) >= behind))
        yield from half[end : end + 1]
        begin = end + 1


def _part(nodes: Sequence[Node], makes: tuple[str, ...]) -> Sequence[Node | Stretch]:
    """A stretch, unless there is nothing to fuse."""
    alive = living(nodes, makes)
    if sum(node.op not in VIEWS for node in alive) < 2:
        return alive
    return [Stretch(alive, needed(alive), makes)]


def _cuts(run: Sequence[Node], metas: Mapping[str, TensorMeta]) -> list[tuple[int, int]]:
    """(begin, end) of the parts of a run."""
    across = crossing(run, metas, last_reads(run))[:, 1].tolist()
    places = [0]
    if len(run) > PERIODIC and (found := _period(run, metas)):
        # the last places of a period are as good as the first ones, and come once more
        best = min(range(found.start, found.start + found.period), key=lambda at: across[at])
        cuts = (best + k * found.period for k in range(found.count))
        places += [cut for cut in cuts if 0 < cut < len(run)]
    places.append(len(run))
    k = 0
    while k + 1 < len(places):
        begin, end = places[k], places[k + 1]
        if end - begin > MOST:
            places.insert(k + 1, min(range(begin + MOST // 2, begin + MOST), key=lambda at: across[at]))
        k += 1
    return list(pairwise(places))


def _period(run: Sequence[Node], metas: Mapping[str, TensorMeta]) -> PeriodicRun | None:
    """What repeats and covers most of a run, the shortest of equals."""
    numbers: dict[tuple[str, ...], int] = {}
    forms = ((node.form, *(str(metas[name]) for name in node.outputs if name)) for node in run)
    codes = np.array([numbers.setdefault(form, len(numbers)) for form in forms])
    return max(periodic(codes, least=PERIODIC // 4), key=lambda found: found.count * found.period, default=None)
