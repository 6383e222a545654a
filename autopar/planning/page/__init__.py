"""A plan on one page: what people see first. It fits into 80 columns, and into a screen for any number of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..record import Record
from ..rendering import page_width, rendered
from ..texts import short_bytes
from . import sections
from .full import full_text

SHADES = "█▓▒░▞·"
"""One for each part of the bar of memory, in its order."""

SCALED_BEYOND = 4
"""A limit of more than so many times the peak is not drawn: the bar is then the peak."""

LABEL = 9
"""Columns of the labels on the left."""


def page_text(plan: Record, width: int) -> str:
    """The page as plain text of at most so many columns."""
    return rendered(page(plan, width), width)


def page(plan: Record, width: int) -> Iterator[RenderableType]:
    """The parts of the page, from top to bottom."""
    yield Text(sections.title(plan), style="bold")
    yield _labelled(sections.verdict(plan))
    if bars := sections.step_bars(plan):
        yield _heading("where the step goes")
        yield _bars(bars, width)
    yield _heading("memory of a rank at its peak")
    yield from _memory(plan, width)
    yield _heading("communication of a step, by mesh axis")
    yield _labelled(sections.communication(plan))
    yield _heading("where parameters and inputs live")
    rows, legend = sections.placements(plan)
    yield _two_columns(rows, width)
    for line in legend:
        yield Padding(Text(line, style="dim"), (0, 0, 0, 2))
    if warnings := list(sections.warnings(plan)):
        yield Text("")
        yield _labelled(("warning", text) for text in warnings)


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _labelled(rows: Iterator[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=LABEL, no_wrap=True, style="cyan")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(f"  {label}", style="bold red" if label in ("NO FIT", "warning") else ""), Text(text))
    return grid


def _bars(bars: list[sections.Bar], width: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    room = max(10, width - max(len(bar.label) for bar in bars) - max(len(bar.text) for bar in bars) - 6)
    for bar in bars:
        grid.add_row(f"  {bar.label}", "█" * max(1, round(min(bar.part, 1.0) * room)), bar.text)
    return grid


def _memory(plan: Record, width: int) -> Iterator[RenderableType]:
    parts = sections.memory_parts(plan)
    whole = max(plan.memory_limit_bytes or 0.0, plan.bytes)
    whole = whole if whole <= SCALED_BEYOND * plan.bytes else plan.bytes
    if whole:
        room = width - 6
        cells, used, shown = "", 0.0, 0
        for shade, (_, size) in zip(SHADES, parts, strict=False):
            used += size / whole * room
            cells += shade * (round(used) - shown)
            shown = max(shown, round(used))
        yield Text(f"  |{cells.ljust(room)}|")
    legend = [f"{shade} {label} {short_bytes(size)}" for shade, (label, size) in zip(SHADES, parts, strict=False)]
    lines = [*_filled(legend, width - 2), *sections.notes(plan)]
    for line in (*lines, f"the peak is at {_short(plan.peak.at)}"):
        yield Padding(Text(line), (0, 0, 0, 2))


def _filled(items: list[str], width: int) -> Iterator[str]:
    """Items on as few lines as they need, none of them broken."""
    line = ""
    for item in items:
        if line and len(line) + 3 + len(item) > width:
            yield line
            line = ""
        line = f"{line}   {item}" if line else item
    if line:
        yield line


def _short(at: str) -> str:
    """When the peak is, without the instruction's arguments."""
    match = re.match(r"(?P<phase>[\w ]+), `[^`]*? = (?P<op>[\w.]+)\(.*`(?: of module '(?P<module>[^']*)')?", at)
    if match is None:
        return at
    where = f" of {match['module']}" if match["module"] else ""
    return f"{match['op'].removesuffix('.default')}{where}, in {match['phase'].removeprefix('in ')}"


def _two_columns(rows: list[tuple[str, str]], width: int) -> Table:
    grid = Table.grid(padding=(0, 2), expand=False)
    room = round(width * 0.45)
    left = max(16, min(max(map(len, (name for name, _ in rows)), default=16) + 2, room))
    grid.add_column(width=left, overflow="fold", style="cyan")
    grid.add_column(overflow="fold")
    for name, words in rows:
        depth = 2 + len(name) - len(name.lstrip())
        grid.add_row(Padding(Text(name.strip()), (0, 0, 0, depth)), Text(words))
    return grid


__all__ = ["full_text", "page", "page_text", "page_width"]
