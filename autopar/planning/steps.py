"""Estimates: the seconds of an assignment's step, and a rank's peak memory during it.

`Steps.evaluate` scores every assignment, whoever made it. How well a figure is known is its accuracy: exact figures
come from the timeline and the peak of the assignment's program, others from a program of fewer copies of each segment,
with collectives unsplit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from autopar.cost import liveness
from autopar.cost.memory import Moment, Peak, moments, peak, phases
from autopar.cost.streams import TimelineCache, timeline
from autopar.cost.timeline import Timeline
from autopar.ir.program import Program
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.accumulate import Part
from autopar.passes.lower.lowering import LIMIT_BYTES
from autopar.passes.lower.shorten import KEPT, Short
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.profile.programs import Costs
from autopar.solve.effort import Effort

from .account import Account, account
from .bound import least_step_seconds
from .micro import in_sequence, parts_of
from .timing import Timing, timing
from .writer import LOOKED_AT, ProgramForm, Writer

T = TypeVar("T")

BUCKETS = (LIMIT_BYTES, LIMIT_BYTES // 8, LIMIT_BYTES // 64, LIMIT_BYTES // 512)
"""Bytes of a bucket; a plan takes the largest that keep the memory limit."""

HIDDEN_DIGITS = 2
"""Of the part that is hidden: a finer one would be another space with tables of its own."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well a step is known: by a program with at most so many `copies` of each run of equal ones (0: all), in a
    `form` (`Writer`). Under a limit buckets are as large as by the accuracy `sized_by`; those of all copies are then
    made smaller until their own peak keeps the limit. Without it, peaks of the same accuracy decide."""

    copies: int
    form: ProgramForm
    sized_by: Accuracy | None = None


ROUGH = Accuracy(KEPT, "rough")
"""Of peaks, in a fraction of the time: gathers are no further ahead than they must be."""

NEAR = Accuracy(LOOKED_AT, "unsplit")
"""Splitting collectives changes a peak little, and answers are checked with their own programs."""

QUICK = Accuracy(KEPT, "unsplit", ROUGH)
"""Of steps."""

PARTED = Accuracy(KEPT, "lowered", ROUGH)
"""Of steps with collectives in parts."""

EXACT = Accuracy(0, "lowered", NEAR)


def _timed(name: str) -> Callable[[Callable[[Estimate], T]], cached_property[T]]:
    """A figure that is computed when it is first read, in seconds that count under a name."""
    return lambda compute: cached_property(lambda self: self.steps.writer.flow.timed(name, compute, self))


@dataclass(frozen=True, eq=False)
class Estimate:
    """The step of an assignment with collectives in buckets of at most `bucket_bytes`, and at least `offload_bytes` of
    what is kept for backward on the host, as well as its `accuracy` knows it. A figure is computed when it is first
    read; programs and timelines are not kept."""

    steps: Steps = field(repr=False)
    assignment: Assignment = field(repr=False)
    accuracy: Accuracy
    bucket_bytes: int
    offload_bytes: int = 0

    @property
    def is_exact(self) -> bool:
        return not self.accuracy.copies

    @property
    def program(self) -> Program:
        """What the figures are of."""
        return self._written(self.accuracy.form)

    @property
    def account(self) -> Account:
        """What the assignment costs if nothing overlaps, item by item."""
        return self.steps.account(self.assignment)

    @property
    def rewrites(self) -> str:
        """What the program's lowerings wrote, as text (`passes.flow.rewrites`)."""
        return self.steps.writer.rewrites(self.assignment, self.bucket_bytes, self.offload_bytes)

    @property
    def seconds(self) -> float:
        """Of the step, with the optimizer's."""
        return self._seconds[0]

    @property
    def exposed_seconds(self) -> float:
        """The seconds of the step for which a rank stalls."""
        return self._seconds[1]

    @_timed("timeline")
    def _seconds(self) -> tuple[float, float]:
        steps, short, runs = self.steps, self._short, self._simulated(self.accuracy.form)
        told = sum(part.times * step.seconds for step, part in runs)
        whole = sum(part.times * short.seconds(step, part.program) for step, part in runs) if short else told
        ratio = steps.correction(self.assignment, self.bucket_bytes)
        exposed = sum(part.times * step.exposed_seconds for step, part in runs) * (whole / told if told else 1.0)
        return whole * ratio + self.account.optimizer_seconds, exposed * ratio

    @_timed("timeline")
    def hidden_part(self) -> float:
        """The part of what travels in buckets that passes while a rank computes, by a timeline with collectives
        unsplit: of the seconds of all collectives that are not exchanges."""
        total = hidden = 0.0
        for step, part in self._simulated("unsplit"):
            for row in step.communication:
                if row.kind != "all_to_all":
                    total, hidden = total + part.times * row.seconds, hidden + part.times * row.hidden_seconds
        return round(hidden / total, HIDDEN_DIGITS) if total else 0.0

    @property
    def timeline(self) -> Timeline:
        """Of all that the step runs."""
        return in_sequence([(step, part.times) for step, part in self._simulated(self.accuracy.form)])

    @property
    def timing(self) -> Timing:
        """Where the seconds of the step go."""
        return timing(self.timeline, self.account.optimizer_seconds, self.seconds)

    @_timed("estimate")
    def bytes(self) -> float:
        """Of a rank at the peak."""
        short, steps = self._short, self.steps
        if short is None:
            return self.peak.bytes
        optimizer = steps.space.optimizer
        of_step = optimizer, steps.kind_of_device, steps.memory
        parts = steps.parts(self.program)
        return short.most([(part, moments(part.program, *of_step, part.waiting)) for part in parts], optimizer)

    @_timed("peak")
    def peak(self) -> Peak:
        """A rank's memory when it is the most, by the program of all copies."""
        steps = self.steps
        if not self.is_exact:
            return steps.evaluate(self.assignment, EXACT, None, (self.bucket_bytes,)).peak
        of_step = steps.space.optimizer, steps.kind_of_device, steps.memory
        peaks = (peak(part.program, *of_step, part.waiting) for part in steps.parts(self.program) if part.times)
        return max(peaks, key=lambda one: one.bytes)

    @property
    def phases(self) -> list[Moment]:
        """The largest moments of each phase, of which the peak is the largest."""
        steps = self.steps
        return phases(self.program, steps.space.optimizer, steps.kind_of_device, steps.memory)

    def _simulated(self, form: ProgramForm) -> list[tuple[Timeline, Part]]:
        cluster, operators = self.steps.space.cluster, self.steps.operators
        parts = [part for part in self.steps.parts(self._written(form)) if part.times]
        return [(timeline(part.program, cluster, operators), part) for part in parts]

    def _written(self, form: ProgramForm) -> Program:
        of_program = self.bucket_bytes, self.accuracy.copies, form, self.offload_bytes
        return self.steps.writer.written(self.assignment, *of_program)

    @property
    def _short(self) -> Short | None:
        return self.steps.writer.short(self.assignment, self.accuracy.copies)


class Sized(Protocol):
    """What a limit reads of an estimate."""

    @property
    def bytes(self) -> float: ...


Evaluate = Callable[[Assignment, Accuracy], Sized]
"""`Steps.evaluate` within a limit."""


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
    estimates: dict[tuple[Any, ...], Estimate] = field(default_factory=dict)
    """All that were asked for, by all that they depend on: what was asked, and the registered lowerings."""
    accounts: dict[Assignment, Account] = field(default_factory=dict)
    latest: tuple[Program, tuple[Part, ...]] | None = None
    """The program whose parts were asked for last, with these."""

    def evaluate(
        self,
        assignment: Assignment,
        accuracy: Accuracy = EXACT,
        limit: float | None = None,
        buckets: tuple[int, ...] = BUCKETS,
        offload_bytes: int = 0,
    ) -> Estimate:
        """The step of an assignment with the largest of these `buckets` with which a rank's peak keeps the limit, or
        else with those with which it needs the least. It is exact where fewer copies would leave none out. What leaves
        for the host is looked at exactly, and with the first of the buckets."""
        if offload_bytes:
            return Estimate(self, assignment, EXACT, buckets[0], offload_bytes)
        accuracy = self._reached(assignment, accuracy)
        buckets = buckets[:1] if limit is None else buckets
        key = assignment, accuracy, limit if len(buckets) > 1 else None, buckets, tuple(LOWERINGS.values())
        if key not in self.estimates:
            self.estimates[key] = (
                Estimate(self, assignment, accuracy, *buckets)
                if limit is None or len(buckets) == 1
                else self._within(limit, assignment, accuracy, buckets)
            )
        return self.estimates[key]

    def _reached(self, assignment: Assignment, accuracy: Accuracy) -> Accuracy:
        return accuracy if self.writer.short(assignment, accuracy.copies) is not None else EXACT

    def _within(self, limit: float, assignment: Assignment, accuracy: Accuracy, buckets: tuple[int, ...]) -> Estimate:
        """With smaller and smaller buckets, up to the first that keep the limit, or to where they no longer matter."""
        if accuracy.sized_by is not None:
            before = self._reached(assignment, accuracy.sized_by)
            if before != accuracy:
                largest = self.evaluate(assignment, before, limit, buckets).bucket_bytes
                buckets = (largest,) if accuracy.copies else buckets[buckets.index(largest) :]
        tried: list[Estimate] = []
        for size in buckets:
            tried.append(self.evaluate(assignment, accuracy, None, (size,)))
            if len(buckets) == 1 or tried[-1].bytes <= limit:
                return tried[-1]
            if tried[-1].bytes > limit + self.effort.buckets_in_flight * size:
                break
        return min(tried, key=lambda one: one.bytes)

    def account(self, assignment: Assignment) -> Account:
        """What an assignment costs if nothing overlaps."""
        if assignment not in self.accounts:
            self.accounts[assignment] = account(self.space, assignment)
        return self.accounts[assignment]

    def parts(self, program: Program) -> tuple[Part, ...]:
        """What a step runs of a program."""
        if self.latest is None or self.latest[0] is not program:
            self.latest = program, parts_of(program, self.space.micro_batches, holds=self.space.holds)
        return self.latest[1]

    def correction(self, assignment: Assignment, bucket_bytes: int) -> float:
        """The factor from a timeline's seconds to those that its program takes, by measured programs."""
        if self.costs is None or not self.costs.with_links:
            return 1.0
        segment = self.writer.segment_program(assignment, bucket_bytes)
        return self.costs.correction(segment, self.space.cluster, self.operators)

    @cached_property
    def least_seconds(self) -> float:
        """Seconds that no step undercuts, or 0 where nobody knows: prices are measured, other packages have lowerings,
        or a compiler fuses operators."""
        is_known = self.costs is None and not LOWERINGS.added and not self.memory.fuses
        return least_step_seconds(self.space, self.effort) if is_known else 0.0
