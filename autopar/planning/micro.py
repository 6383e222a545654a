"""A step of several micro-batches whose gradients are added up and reduced once: its programs, seconds and peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.cost.liveness import PlacementCache
from autopar.cost.memory import Peak, peak
from autopar.cost.optimizers import Optimizer
from autopar.cost.streams import TimelineCache, timeline
from autopar.cost.timeline import Event, Stall, Timeline
from autopar.ir.program import Program
from autopar.passes.lower.accumulate import accumulation
from autopar.passes.lower.hold import held
from autopar.passes.space.space import Space

from .plan import Plan
from .training import Training

Span = TypeVar("Span", Event, Stall)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The programs of a step, each with how often it runs: the first micro-batches, those between, and the last one,
    which reduces. `pending_bytes` are those of the gradients that wait for that on a rank."""

    programs: tuple[tuple[Program, int], ...]
    pending_bytes: int

    @staticmethod
    def of(program: Program, count: int, *, holds: bool) -> MicroBatches:
        """`count` micro-batches of a program; `holds`: what forward gathers is gathered once a step."""
        parts = accumulation(program)
        pending = sum(program.metas[name].bytes for name in parts.names)
        if not holds:
            return MicroBatches(programs=((parts.micro, count - 1), (parts.last, 1)), pending_bytes=pending)
        first, micro, last = held(parts.micro).cold, held(parts.micro).warm, held(parts.last).warm
        between = ((micro, count - 2),) * (count > 2)
        return MicroBatches(programs=((first, 1), *between, (last, 1)), pending_bytes=pending)

    def collectives(self) -> Counter[tuple[str, str, int]]:
        """(kind, axis, bytes) of what a step issues -> how often."""
        issued: Counter[tuple[str, str, int]] = Counter()
        for program, times in self.programs:
            for one, count in Counter(program.collectives()).items():
                issued[one] += times * count
        return issued

    def timelines(self, timeline: Callable[[Program], Timeline]) -> list[tuple[Timeline, Program, int]]:
        return [(timeline(program), program, times) for program, times in self.programs]

    def peak(self, optimizer: Optimizer, device_type: str, cache: PlacementCache) -> Peak:
        """A rank's peak: of the micro-batch that needs the most. In all but the first, gradients wait."""
        peaks = []
        for number, (program, times) in enumerate(self.programs):
            is_last = number == len(self.programs) - 1
            waits = number > 0 or times > 1
            # those that wait are inputs of the last backward, which counts them itself
            phases = () if not waits else ("forward",) if is_last else ("forward", "backward", "end of backward")
            waiting = dict.fromkeys(phases, self.pending_bytes)
            peaks.append(peak(program, optimizer, device_type, cache, waiting))
        return max(peaks, key=lambda one: one.bytes)


@dataclass(frozen=True, slots=True)
class StepRun:
    """What a step of a space runs of a program: once, or in each of its micro-batches."""

    space: Space
    device_type: str
    operators: TimelineCache
    memory: PlacementCache

    def timelines(self, program: Program) -> list[tuple[Timeline, Program, int]]:
        """Of all that a step runs, each with its program and how often it runs."""

        def simulated(program: Program) -> Timeline:
            return timeline(program, self.space.cluster, self.operators)

        return [(simulated(program), program, 1)] if self._is_one else self._of(program).timelines(simulated)

    def timeline(self, program: Program) -> Timeline:
        """Of all that a step runs, in one."""
        parts = self.timelines(program)
        return parts[0][0] if len(parts) == 1 else step_of(parts)

    def peak(self, program: Program) -> Peak:
        """A rank's peak during a step."""
        if self._is_one:
            return peak(program, self.space.optimizer, self.device_type, self.memory)
        return self._of(program).peak(self.space.optimizer, self.device_type, self.memory)

    @property
    def _is_one(self) -> bool:
        return self.space.micro_batches == 1

    def _of(self, program: Program) -> MicroBatches:
        return MicroBatches.of(program, self.space.micro_batches, holds=self.space.holds)


def shortest(attempts: Sequence[Callable[[], Plan]]) -> Plan:
    """The plan with the shortest step that any of these ways leads to. Raises the first ValueError if none does."""
    plans: list[Plan] = []
    errors: list[ValueError] = []
    for attempt in attempts:
        try:
            plans.append(attempt())
        except ValueError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.seconds)


def check_measured(training: Training) -> None:
    """Raises ValueError for what programs that are measured know nothing of: several micro-batches, and a compiler."""
    if training.micro_batches > 1:
        raise ValueError(
            f"micro_batches is {training.micro_batches} with cost='profiled', which measures steps of one batch: use "
            f"'analytical' or 'hybrid'"
        )
    if training.compile:
        raise ValueError(
            f"compile is {training.compile!r} with measured costs, which time operators one by one: use 'analytical', "
            f"whose prices are those of fused kernels"
        )


def step_of(timelines: Sequence[tuple[Timeline, Program, int]]) -> Timeline:
    """The timelines of a step's micro-batches as one, one after the other."""
    events: list[Event] = []
    stalls: list[Stall] = []
    began = arithmetic = unfused = 0.0
    for one, _, times in timelines:
        for _ in range(times):
            events += [_later(event, began) for event in one.events]
            stalls += [_later(stall, began) for stall in one.stalls]
            began, arithmetic = began + one.seconds, arithmetic + one.peak_seconds
            unfused += one.unfused_seconds
    axes = timelines[0][0].axes
    return Timeline(
        axes=axes, events=tuple(events), stalls=tuple(stalls), peak_seconds=arithmetic, unfused_seconds=unfused
    )


def _later(interval: Span, seconds: float) -> Span:
    start, end = interval.start_seconds + seconds, interval.end_seconds + seconds
    return replace(interval, start_seconds=start, end_seconds=end)
