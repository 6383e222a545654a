"""A comparison as a figure. Needs matplotlib: `pip install 'autopar[figure]'`."""

from __future__ import annotations

from pathlib import Path

from .comparison import Comparison
from .plan import Plan, bytes_text

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
