"""A step of several micro-batches whose gradients are added up and reduced once: what it runs of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.cost.timeline import Event, Stall, Timeline
from autopar.ir.program import Program
from autopar.passes.lower.accumulate import LATE, Part, accumulation
from autopar.passes.lower.hold import held

from .plan import Plan
from .training import Training

Span = TypeVar("Span", Event, Stall)


def parts_of(program: Program, count: int, *, holds: bool) -> tuple[Part, ...]:
    """What a step of `count` micro-batches of a program runs: the first ones, those between (if any), and the last one,
    which reduces. `holds`: what forward gathers is gathered once a step."""
    if count == 1:
        return (Part(program),)
    parts = accumulation(program)
    pending = sum(program.metas[name].bytes for name in parts.names)
    # those that wait are inputs of the last backward, which counts them itself
    waiting = dict.fromkeys(("forward", *LATE), pending)
    if not holds:
        return Part(parts.micro, count - 1, waiting), Part(parts.last, 1, {"forward": pending})
    micro, last = held(parts.micro), held(parts.last)
    return Part(micro.cold), Part(micro.warm, count - 2, waiting), Part(last.warm, 1, {"forward": pending})


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


def in_sequence(timelines: Sequence[tuple[Timeline, int]]) -> Timeline:
    """Timelines, each so many times, as one."""
    if [times for _, times in timelines] == [1]:
        return timelines[0][0]
    events: list[Event] = []
    stalls: list[Stall] = []
    began = arithmetic = unfused = 0.0
    for one, times in timelines:
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
