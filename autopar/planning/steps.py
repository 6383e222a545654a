"""The step of an assignment: its seconds, and a rank's peak memory during it.

Exact figures come from the timeline and the peak of the assignment's program, estimates from a program of fewer copies
of each segment, with collectives unsplit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from autopar.cost import liveness
from autopar.cost.memory import Peak, moments
from autopar.cost.streams import TimelineCache
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.lowering import LIMIT_BYTES
from autopar.passes.lower.shorten import KEPT, shortened
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.profile.programs import Costs
from autopar.solve.effort import Effort

from .account import optimizer_seconds
from .bound import least_step_seconds
from .limit import Peaks
from .micro import StepRun
from .writer import LOOKED_AT, Writer

BUCKETS = (LIMIT_BYTES, LIMIT_BYTES // 8, LIMIT_BYTES // 64, LIMIT_BYTES // 512)
"""Bytes of a bucket; a plan takes the largest that keep the memory limit."""

_SECONDS = ("seconds", "exposed_seconds")

HIDDEN_DIGITS = 2
"""Of the part that is hidden: a finer one would be another space with tables of its own."""


@dataclass(eq=False)
class Steps:
    """Steps of the assignments of one space. `costs` are measured ones, if prices are measured."""

    space: Space
    writer: Writer
    operators: TimelineCache
    kind_of_device: str
    memory: liveness.PlacementCache
    effort: Effort
    costs: Costs | None = None
    run: StepRun = field(init=False)
    peaks: dict[Assignment, tuple[int, Peak]] = field(default_factory=dict)
    """The cached peaks of one search."""

    def __post_init__(self) -> None:
        self.run = StepRun(self.space, self.kind_of_device, self.operators, self.memory)

    def forget(self) -> None:
        """Empties the cache of peaks, which hold for one limit."""
        self.peaks = {}

    def peaks_of(self, limit: float | None, buckets: Sequence[int] = BUCKETS) -> Peaks:
        """Of an assignment with such buckets."""

        def estimated(assignment: Assignment, *, rough: bool) -> float:
            return self.writer.flow.timed("estimate", self._estimate, assignment, limit, buckets, rough=rough)

        return Peaks(
            exact=lambda assignment: self.peak(assignment, limit, buckets)[1].bytes,
            estimate=partial(estimated, rough=False),
            rough=partial(estimated, rough=True),
        )

    def peak(
        self, assignment: Assignment, memory_limit_bytes: float | None = None, buckets: Sequence[int] = BUCKETS
    ) -> tuple[int, Peak]:
        """The largest buckets with which an assignment's program keeps the limit (else those with which it needs the
        least), and a rank's peak during a training step with them."""
        if assignment not in self.peaks:
            peaks = self.writer.flow.timed("peak", lambda: list(self._peaks(assignment, memory_limit_bytes, buckets)))
            fits = memory_limit_bytes is None or peaks[-1][1].bytes <= memory_limit_bytes
            self.peaks[assignment] = peaks[-1] if fits else min(peaks, key=lambda item: item[1].bytes)
        return self.peaks[assignment]

    def _estimate(
        self, assignment: Assignment, limit: float | None, buckets: Sequence[int], *, rough: bool = False
    ) -> float:
        """An estimate of `peak` from the program of fewer copies with collectives unsplit. Splitting them changes the
        peak little, and answers are checked with their own programs. `rough`: with gathers no further ahead than they
        must be."""
        estimates = list(self._estimates(assignment, limit, buckets, rough=rough))
        return min(estimates) if estimates else self.peak(assignment, limit, buckets)[1].bytes

    def _estimates(
        self, assignment: Assignment, limit: float | None, buckets: Sequence[int], *, rough: bool = False
    ) -> Iterator[float]:
        """Peaks with smaller and smaller buckets, as `_peaks`; none if a program of fewer copies cannot be had."""
        kept = KEPT if rough else LOOKED_AT
        if self.space.micro_batches > 1:
            return  # what waits to be reduced is of all copies
        if (short := shortened(self.writer.space, assignment, kept)) is None:
            return
        for size in buckets:
            bucketed = (self.writer.rough if rough else self.writer.unsplit)(assignment, size, kept)
            during = moments(bucketed, self.space.optimizer, self.kind_of_device, self.memory)
            peak_bytes = short.most(during, bucketed, self.space.optimizer)
            yield peak_bytes
            if self._is_settled(peak_bytes, size, limit):
                return

    def _peaks(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> Iterator[tuple[int, Peak]]:
        """Peaks with smaller and smaller buckets, up to the first that keep the limit, or to where buckets no longer
        matter. Larger buckets are skipped if their estimates exceed the limit."""
        tried = [] if limit is None or len(buckets) == 1 else list(self._estimates(assignment, limit, buckets))
        for size in buckets[max(0, len(tried) - 1) :]:
            bucketed = self.writer.written(assignment, size)
            of_rank = self.run.peak(bucketed)
            yield size, of_rank
            if self._is_settled(of_rank.bytes, size, limit):
                return

    def estimated_seconds(
        self, assignment: Assignment, limit: float | None, *, split: bool = False, kept: int = KEPT
    ) -> tuple[float, float]:
        """The seconds of an assignment's step, and for how many of them a rank stalls, estimated from the program that
        keeps so many copies, with collectives unsplit unless `split`. If there is none, they are exact, and infinite if
        the peak is over the limit."""
        short = shortened(self.writer.space, assignment, kept)
        if short is None:
            bucket_bytes = BUCKETS[0]
            if limit is not None:
                bucket_bytes, of_rank = self.peak(assignment, limit)
                if of_rank.bytes > limit:
                    return math.inf, 0.0
            return self.seconds(assignment, bucket_bytes)
        tried = 1 if limit is None else len(list(self._estimates(assignment, limit, BUCKETS, rough=True)))
        bucket_bytes = BUCKETS[tried - 1]
        write = self.writer.written if split else self.writer.unsplit
        program = write(assignment, bucket_bytes, kept)
        parts = self.run.timelines(program)
        step = sum(times * short.seconds(of_few, part) for of_few, part, times in parts)
        step *= self._correction(assignment, bucket_bytes)
        of_parts, exposed_of_parts = (sum(n * getattr(t, what) for t, _, n in parts) for what in _SECONDS)
        exposed = step * exposed_of_parts / of_parts
        return step + optimizer_seconds(self.space, assignment), exposed

    def hidden_part(self, assignment: Assignment) -> float:
        """The part of what travels in buckets that passes while a rank computes, by the timeline of few copies of an
        assignment: of the seconds of all collectives that are not exchanges."""
        copies = LOOKED_AT if shortened(self.writer.space, assignment, LOOKED_AT) is not None else 0
        total = hidden = 0.0
        for of_few, _, times in self.run.timelines(self.writer.unsplit(assignment, BUCKETS[0], copies)):
            for row in of_few.communication:
                if row.kind != "all_to_all":
                    total, hidden = total + times * row.seconds, hidden + times * row.hidden_seconds
        return round(hidden / total, HIDDEN_DIGITS) if total else 0.0

    def seconds(self, assignment: Assignment, bucket_bytes: int) -> tuple[float, float]:
        """The seconds of an assignment's step by its timeline, and for how many of them a rank stalls."""
        parts = self.run.timelines(self.writer.written(assignment, bucket_bytes))
        ratio = self._correction(assignment, bucket_bytes)
        updating = optimizer_seconds(self.space, assignment)
        step, exposed = (sum(times * getattr(of, what) for of, _, times in parts) for what in _SECONDS)
        return step * ratio + updating, exposed * ratio

    @cached_property
    def least_seconds(self) -> float:
        """Seconds that no step undercuts, or 0 where nobody knows: prices are measured, other packages have lowerings,
        or a compiler fuses operators."""
        is_known = self.costs is None and not LOWERINGS.added and not self.memory.fuses
        return least_step_seconds(self.space, self.effort) if is_known else 0.0

    def _correction(self, assignment: Assignment, bucket_bytes: int) -> float:
        """The factor from a timeline's seconds to those that its program takes, by measured programs."""
        if self.costs is None or not self.costs.with_links:
            return 1.0
        segment = self.writer.segment_program(assignment, bucket_bytes)
        return self.costs.correction(segment, self.space.cluster, self.operators)

    def _is_settled(self, peak_bytes: float, bucket_bytes: int, limit: float | None) -> bool:
        """Whether smaller buckets are unnecessary, or would not suffice."""
        beyond = self.effort.buckets_in_flight * bucket_bytes
        return limit is None or peak_bytes <= limit or peak_bytes > limit + beyond
