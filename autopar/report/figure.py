"""Comparisons and timelines as figures. Needs matplotlib: `pip install 'autopar[figure]'`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cost.timeline import COMPUTE, Timeline
from autopar.planning.texts import grouped, short_bytes
from autopar.planning.timing import OPERATOR_KINDS, operator_kind

from .comparison import Comparison
from .facts import COLUMNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {
    "compute": "compute_seconds",
    "exposed communication": "exposed_seconds",
    "copies": "copies_seconds",
    "optimizer": "optimizer_seconds",
}
"""Parts of a bar, and the figures that they are (`facts.COLUMNS`)."""


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a figure needs matplotlib: pip install 'autopar[figure]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: str | Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"the figure cannot be written to {path}: {error}") from error


def draw(comparison: Comparison, path: str | Path) -> None:
    """Draws a bar for each plan, the best first: its predicted milliseconds by part, and its memory. The file's ending
    says its format. Raises ValueError if matplotlib is missing, there is no plan, or no such format."""
    plans = comparison.plans
    if not plans:
        raise ValueError("there is nothing to draw: no solver found a plan")
    figure = _figure(8, 1.2 + 0.4 * len(plans))
    axes = figure.subplots()
    left = [0.0] * len(plans)
    for part, column in PARTS.items():
        width: list[float] = [1e3 * COLUMNS[column](p) for p in plans.values()]  # type: ignore[operator]
        axes.barh([*plans], width, left=left, label=part)
        left = [start + more for start, more in zip(left, width, strict=True)]
    for row, (end, p) in enumerate(zip(left, plans.values(), strict=True)):
        axes.text(end, row, f" {short_bytes(p.bytes)}", va="center", fontsize=8)
    axes.invert_yaxis()  # the best on top
    axes.margins(x=0.15)
    axes.set_xlabel("predicted step, ms (and memory of a rank)")
    axes.set_title(p.model)
    figure.legend(loc="outside lower center", ncols=len(PARTS))
    _save(figure, path)


COLOURS = {
    **dict(zip(OPERATOR_KINDS, ("#3b6fb6", "#14a3a0", "#a8b1bd"), strict=True)),
    "all_reduce": "#d1495b",
    "all_gather": "#e0912f",
    "reduce_scatter": "#3c9d6d",
    "all_to_all": "#d670a8",
    "shift": "#6b5bd2",
    "rotate": "#6b5bd2",
    "exchange": "#52796f",
}
"""The colours of a timeline's events, which the page of `autopar report` has too."""

ZOOM = 12
"""The lower picture shows one part in so many of the step."""


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Draws the streams of a rank over the step, and over a part of it from where backward begins. The file's ending
    says its format. Raises ValueError if matplotlib is missing, or there is no such format."""
    streams = [COMPUTE, *(axis for axis in timeline.axes if timeline.busy_seconds(axis))]
    figure = _figure(11, 1.6 + 0.9 * len(streams))
    from matplotlib.patches import Patch  # which `_figure` has made sure of

    step, part = figure.subplots(2, 1)
    backward = min((e.start_seconds for e in timeline.events if e.backward), default=0.0)
    ends = {step: (0.0, timeline.seconds), part: (backward, backward + timeline.seconds / ZOOM)}
    kinds: dict[str, None] = {}
    for axes, (first, last) in ends.items():
        for row, stream in enumerate(streams):
            spans_of = grouped(
                (
                    operator_kind(event) if stream == COMPUTE else event.op.removeprefix("collective."),
                    (event.start_seconds * 1e3, event.seconds * 1e3),
                )
                for event in timeline.events
                if event.stream == stream and event.start_seconds < last and event.end_seconds > first
            )
            for kind, spans in spans_of.items():
                kinds[kind] = None
                axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        axes.set_yticks(range(len(streams)), streams)
        axes.set_ylim(len(streams) - 0.5, -0.5)  # operators on top
        axes.set_xlim(first * 1e3, max(last, first + 1e-9) * 1e3)
    step.axvline(backward * 1e3, color="black", linewidth=0.8)
    step.set_title(title or "one step of a rank: forward, then backward")
    part.set_title(f"from where backward begins, 1/{ZOOM} of the step", fontsize=9)
    part.set_xlabel("ms; white on the first row: the rank waits")
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
        loc="outside lower center",
        ncols=max(1, len(kinds)),
    )
    _save(figure, path)
