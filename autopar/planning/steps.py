"""The step of an assignment: its seconds, and the most memory that a rank needs during it.

The exact figures are those of the assignment's program: its timeline, and its peak. An estimate comes from a program of
fewer copies of each segment, in which nothing runs in parts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cluster.machine import Cluster
from autopar.cost import liveness
from autopar.cost.memory import Peak, moments, peak
from autopar.cost.optimizers import Optimizer
from autopar.cost.streams import TimelineCache, timeline
from autopar.passes import Flow
from autopar.passes.lower.bucket import LIMIT_BYTES
from autopar.passes.lower.shorten import KEPT, shortened
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.profile.programs import Costs
from autopar.solve.effort import Effort

from .account import account
from .limit import Peaks
from .writer import Writer

BUCKETS = (LIMIT_BYTES, LIMIT_BYTES // 8, LIMIT_BYTES // 64, LIMIT_BYTES // 512)
"""Bytes of a bucket, of which the largest is taken that keeps the memory limit."""


@dataclass(eq=False)
class Steps:
    """Steps of the assignments of one space. `costs` are those of programs that were measured, if prices are."""

    space: Space
    cluster: Cluster
    writer: Writer
    operators: TimelineCache
    optimizer: Optimizer
    kind_of_device: str
    memory: liveness.PlacementCache
    flow: Flow
    effort: Effort
    costs: Costs | None = None
    peaks: dict[Assignment, tuple[int, Peak]] = field(default_factory=dict)
    """Of one search."""

    def forget(self) -> None:
        """Peaks are those of one limit."""
        self.peaks = {}

    def peaks_of(self, limit: float | None, buckets: Sequence[int] = BUCKETS) -> tuple[Peaks, Peaks]:
        """Peaks of assignments with such buckets, true and estimated."""
        return (
            lambda assignment: self.peak(assignment, limit, buckets)[1].bytes,
            lambda assignment: self.flow.timed("estimate", self._estimate, assignment, limit, buckets),
        )

    def peak(
        self, assignment: Assignment, memory_limit_bytes: float | None = None, buckets: Sequence[int] = BUCKETS
    ) -> tuple[int, Peak]:
        """The largest buckets with which the program of an assignment keeps the limit (else those with which it needs
        the least), and the most memory that a rank then needs during a training step."""
        if assignment not in self.peaks:
            found = self.flow.timed("peak", lambda: list(self._peaks(assignment, memory_limit_bytes, buckets)))
            fits = memory_limit_bytes is None or found[-1][1].bytes <= memory_limit_bytes
            best = found[-1] if fits else min(found, key=lambda item: item[1].bytes)
            self.peaks[assignment] = best
        return self.peaks[assignment]

    def _estimate(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> float:
        """The peak of `peak`, estimated from the program of fewer copies, in which nothing runs in parts: what that
        would change of it is looked at where it counts, on the programs of answers."""
        estimates = list(self._estimates(assignment, limit, buckets))
        return min(estimates) if estimates else self.peak(assignment, limit, buckets)[1].bytes

    def _estimates(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> Iterator[float]:
        """With smaller and smaller buckets, as `_peaks`; none where there are no fewer copies."""
        if (short := shortened(self.writer.space, assignment)) is None:
            return
        for size in buckets:
            bucketed = self.writer.whole(assignment, size, KEPT)
            found = moments(bucketed, self.optimizer, self.kind_of_device, self.memory)
            most = short.most(found, bucketed, self.optimizer)
            yield most
            if self._is_settled(most, size, limit):
                return

    def _peaks(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> Iterator[tuple[int, Peak]]:
        """With smaller and smaller buckets, up to the first that keep the limit, or where it is not up to them; from
        the first on of which that is estimated."""
        tried = [] if limit is None else list(self._estimates(assignment, limit, buckets))
        for size in buckets[max(0, len(tried) - 1) :]:
            bucketed = self.writer.written(assignment, size)
            found = peak(bucketed, self.optimizer, self.kind_of_device, self.memory)
            yield size, found
            if self._is_settled(found.bytes, size, limit):
                return

    def estimated_seconds(self, assignment: Assignment, limit: float | None, *, in_parts: bool = True) -> float:
        """Nearly what `limited_seconds` says, estimated from the program of fewer copies, if there are fewer."""
        short = shortened(self.writer.space, assignment)
        if short is None:
            return self.limited_seconds(assignment, limit)
        tried = 1 if limit is None else len(list(self._estimates(assignment, limit, BUCKETS)))
        bucket_bytes = BUCKETS[tried - 1]
        write = self.writer.written if in_parts else self.writer.whole
        program = write(assignment, bucket_bytes, KEPT)
        step = short.seconds(timeline(program, self.cluster, self.operators), program)
        return step * self._correction(assignment, bucket_bytes) + account(self.space, assignment).optimizer_seconds

    def limited_seconds(self, assignment: Assignment, limit: float | None) -> float:
        """The step of an assignment on its timeline, infinite where that is over the limit."""
        bucket_bytes = BUCKETS[0]
        if limit is not None:
            bucket_bytes, most = self.peak(assignment, limit)
            if most.bytes > limit:
                return math.inf
        return self.seconds(assignment, bucket_bytes)[0]

    def seconds(self, assignment: Assignment, bucket_bytes: int) -> tuple[float, float]:
        """Seconds of an assignment's step by its timeline, and for how many of them a rank stands still."""
        step = timeline(self.writer.written(assignment, bucket_bytes), self.cluster, self.operators)
        ratio = self._correction(assignment, bucket_bytes)
        updating = account(self.space, assignment).optimizer_seconds
        return step.seconds * ratio + updating, step.exposed_seconds * ratio

    def _correction(self, assignment: Assignment, bucket_bytes: int) -> float:
        """By what a timeline is multiplied: what measured programs took over theirs."""
        if self.costs is None or not self.costs.with_links:
            return 1.0
        segment = self.writer.segment_program(assignment, bucket_bytes)
        return self.costs.correction(segment, self.cluster, self.operators)

    def _is_settled(self, peak_bytes: float, bucket_bytes: int, limit: float | None) -> bool:
        """Whether smaller buckets are not needed, or would not do."""
        beyond = self.effort.buckets_in_flight * bucket_bytes
        return limit is None or peak_bytes <= limit or peak_bytes > limit + beyond
