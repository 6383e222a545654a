"""Periods: the runs in which a list repeats, and what crosses the places where it may be cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import Node, TensorMeta

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PeriodicRun:
    """Labels in [start, stop) repeat with `period`, at least twice."""

    start: int
    stop: int
    period: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def count(self) -> int:
        """Of full periods."""
        return self.length // self.period


def periodic(labels: Ints, offset: int = 0, least: int = 1) -> list[PeriodicRun]:
    """All maximal runs of all periods from `least` on, the shortest period first."""
    runs: list[PeriodicRun] = []
    for period in range(least, len(labels) // 2 + 1):
        equal = labels[:-period] == labels[period:]
        if np.count_nonzero(equal) < period:
            continue
        edges = np.flatnonzero(np.diff(equal, prepend=False, append=False))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if high - low >= period:
                runs.append(PeriodicRun(low + offset, high + period + offset, period))
    return runs


def longest(runs: Sequence[PeriodicRun]) -> PeriodicRun | None:
    """The run that covers most; a multiple of a period covers a little more at times, so the
    smallest period among those that cover nearly as much."""
    if not runs:
        return None
    most = max(run.length for run in runs)
    long = [run for run in runs if run.length * 10 >= most * 9]
    return min(long, key=lambda run: (run.period, -run.length, run.start))


def without(intervals: Iterable[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    cut = [piece for start, stop in intervals for piece in ((start, min(stop, low)), (max(start, high), stop))]
    return sorted({(start, stop) for start, stop in cut if start < stop})


def pieces(run: PeriodicRun, intervals: Iterable[tuple[int, int]]) -> Iterator[PeriodicRun]:
    for start, stop in intervals:
        piece = PeriodicRun(max(run.start, start), min(run.stop, stop), run.period)
        if piece.length >= 2 * run.period:
            yield piece


def crossing(nodes: Sequence[Node], metas: Mapping[str, TensorMeta], last: Mapping[str, int]) -> Ints:
    """For each cut before nodes[c]: how many of their values come before it and are read at or after it, and their
    bytes. `last` is where each value is read last, which may be behind them all. [len(nodes) + 1, 2]."""
    steps = np.zeros((len(nodes) + 2, 2), dtype=np.int64)
    for position, node in enumerate(nodes):
        for output in node.outputs:
            if (end := min(last.get(output, -1), len(nodes))) > position:
                change = (1, metas[output].bytes)
                steps[position + 1] += change
                steps[end + 1] -= change
    return np.cumsum(steps, axis=0)[:-1]
