"""The stages of a plan as a person reads them: a row for each, and a chart of their schedule."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.pipeline import simulate
from autopar.planning.stages import Pipeline
from autopar.planning.texts import listed, short_bytes
from autopar.solve.schedules import PipelineCosts, scheduled

from .sections import Grid, Lines, Row, Section

COLUMNS = 66
"""Of a chart, in each of which a device does one unit, or idles."""

CHARTED = 2
"""Micro-batches for each device that a chart shows."""


def stages(pipeline: Pipeline) -> Iterator[Section]:
    """The stages, and when devices do what."""
    rows: list[Row] = [
        {
            "stage": str(number),
            "device": str(stage.device),
            "begins with": stage.first or ("nothing" if not stage.forward_seconds else "the model"),
            "layers": str(stage.layers),
            "forward_seconds": stage.forward_seconds,
            "inputs_seconds": stage.inputs_seconds,
            "weights_seconds": stage.weights_seconds,
            "rest_bytes": float(stage.rest_bytes),
            "each_bytes": float(stage.held_bytes),
        }
        for number, stage in enumerate(pipeline.stages)
    ]
    peaks = listed([*map(short_bytes, pipeline.peak_bytes)])
    told = [
        f"{pipeline.schedule} of {pipeline.micro_batches} micro-batches: devices idle {pipeline.idle_rate:.1%} of it, "
        f"the busiest one {pipeline.bubble_rate:.1%} of its own time",
        f"in flight at most: {listed([*map(str, pipeline.in_flight)])}; peaks: {peaks}",
    ]
    yield Section(f"stages on {pipeline.axis}", [Grid.of(rows, indent=2), Lines(told)])
    yield Section("their first micro-batches: F forward, B backward, I and W its halves", [Lines([*chart(pipeline)])])


def chart(pipeline: Pipeline) -> Iterator[str]:
    """A line for each device; without transfers."""
    costs = PipelineCosts(stages=tuple(stage.cost for stage in pipeline.stages))
    devices = len(pipeline.peak_bytes)
    few = min(pipeline.micro_batches, CHARTED * devices)
    given = {"costs": costs} if pipeline.schedule == "searched" else {}
    run = simulate(scheduled(pipeline.schedule, devices, few, chunks=pipeline.chunks, **given), costs)
    step = run.seconds / COLUMNS
    for device in range(devices):
        spans = [*run.intervals(device)]
        columns = [
            next((action.kind for action, start, end in spans if start <= at < end), "·")
            for at in ((column + 0.5) * step for column in range(COLUMNS))
        ]
        yield f"{device:3} {''.join(columns)}"
