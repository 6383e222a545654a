"""Comparisons and timelines as figures. Needs matplotlib: `pip install 'autopar[figure]'`."""

from pathlib import Path

from autopar.cost.timeline import COMPUTE, Timeline
from autopar.planning.plan import Plan, bytes_text

from .comparison import Comparison

PARTS = ("compute", "exposed communication", "copies", "optimizer")


def _seconds(plan: Plan, part: str) -> float:
    if part.startswith("exposed"):
        return plan.exposed_seconds
    seconds: float = getattr(plan.account, f"{'copy' if part == 'copies' else part}_seconds")
    return seconds


def draw(comparison: Comparison, path: str | Path) -> None:
    """Bars of predicted milliseconds by what they are spent on, best plan first, each with its memory. The file's
    ending says its format. Raises ValueError where matplotlib is missing, nothing is to be drawn, or no such format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a figure needs matplotlib: pip install 'autopar[figure]'") from error
    plans = [(name, p) for name, p in comparison.results.items() if isinstance(p, Plan)]
    if not plans:
        raise ValueError("there is nothing to draw: no solver found a plan")
    plans.sort(key=lambda row: row[1].seconds)
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(plans)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(plans)
    names = [name for name, _ in plans]
    for part in PARTS:
        width = [1e3 * _seconds(p, part) for _, p in plans]
        axes.barh(names, width, left=left, label=part)
        left = [start + more for start, more in zip(left, width, strict=True)]
    for row, (end, (_, p)) in enumerate(zip(left, plans, strict=True)):
        axes.text(end, row, f" {bytes_text(p.bytes)}", va="center", fontsize=8)
    axes.invert_yaxis()  # the best on top
    axes.margins(x=0.15)
    axes.set_xlabel("predicted step, ms (and memory of a rank)")
    axes.set_title(plans[0][1].model)
    figure.legend(loc="outside lower center", ncols=len(PARTS))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"the figure cannot be written to {path}: {error}") from error


COLOURS = {
    "compute": "#9aa5b1",
    "all_reduce": "#d1495b",
    "all_gather": "#30638e",
    "reduce_scatter": "#edae49",
    "all_to_all": "#66a182",
    "shift": "#8d6a9f",
    "exchange": "#2e4057",
}
"""Of what stands on the rows of a timeline."""

ZOOM = 12
"""The lower picture shows one part in so many of the step."""


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """The streams of a rank over the whole step, and over a part of it from where backward begins. The file's ending
    says its format. Raises ValueError where matplotlib is missing, or there is no such format."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError("a figure needs matplotlib: pip install 'autopar[figure]'") from error
    streams = [COMPUTE, *(axis for axis in timeline.axes if timeline.busy_seconds(axis))]
    figure = Figure(figsize=(11, 1.6 + 0.9 * len(streams)), layout="constrained")
    whole, part = figure.subplots(2, 1)
    backward = min((e.start_seconds for e in timeline.events if e.backward), default=0.0)
    ends = {whole: (0.0, timeline.seconds), part: (backward, backward + timeline.seconds / ZOOM)}
    kinds: dict[str, None] = {}
    for axes, (first, last) in ends.items():
        for row, stream in enumerate(streams):
            by_kind: dict[str, list[tuple[float, float]]] = {}
            for event in timeline.events:
                if event.stream == stream and event.start_seconds < last and event.end_seconds > first:
                    kind = COMPUTE if stream == COMPUTE else event.op.removeprefix("collective.")
                    by_kind.setdefault(kind, []).append((event.start_seconds * 1e3, event.seconds * 1e3))
            for kind, spans in by_kind.items():
                kinds[kind] = None
                axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        axes.set_yticks(range(len(streams)), streams)
        axes.set_ylim(len(streams) - 0.5, -0.5)  # operators on top
        axes.set_xlim(first * 1e3, max(last, first + 1e-9) * 1e3)
    whole.axvline(backward * 1e3, color="black", linewidth=0.8)
    whole.set_title(title or "one step of a rank: forward, then backward")
    part.set_title(f"from where backward begins, 1/{ZOOM} of the step", fontsize=9)
    part.set_xlabel("ms; white on the first row: the rank waits")
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
        loc="outside lower center",
        ncols=max(1, len(kinds)),
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"the figure cannot be written to {path}: {error}") from error
