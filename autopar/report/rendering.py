"""Sections as text of a given width, no line of which is longer; rows as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.planning.texts import short_bytes

from .sections import BAD, Bars, Grid, Labelled, Lines, Part, Row, Section, Stack, cell, head

WIDTH_LEAST, WIDTH_MOST = 60, 120

SHADES = "█▓▒░▞·"
"""One for each part of a stack, in its order."""

LABEL = 9
"""Columns of labels."""


def page_width() -> int:
    """That of the terminal, within limits; 80 where there is none."""
    return max(WIDTH_LEAST, min(WIDTH_MOST, shutil.get_terminal_size((80, 24)).columns))


def rendered(sections: Iterable[Section], width: int | None) -> str:
    """Sections as plain text of at most so many columns; None: those of the terminal."""
    width = page_width() if width is None else width
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        for part in renderables(sections, width):
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def renderables(sections: Iterable[Section], width: int) -> Iterator[RenderableType]:
    """Sections as what `rich` prints in so many columns."""
    for number, section in enumerate(sections):
        if number or section.heading:
            yield Text("\n" * (number > 0 and bool(section.heading)) + section.heading, style="bold")
        for part in section.parts:
            yield from _renderables(part, width)


def _renderables(part: Part, width: int) -> Iterator[RenderableType]:
    match part:
        case Lines(texts, indent, style):
            yield from (Padding(Text(text, style=style), (0, 0, 0, indent)) for text in texts)
        case Labelled(rows, wide):
            yield _labelled(rows, wide, width)
        case Bars(rows, whole):
            room = max(10, width - max(len(label) for label, *_ in rows) - max(len(text) for *_, text in rows) - 6)
            bars = Table.grid(padding=(0, 1))
            bars.add_column(no_wrap=True, style="cyan")
            bars.add_column(no_wrap=True)
            bars.add_column(no_wrap=True, justify="right")
            for label, seconds, text in rows:
                bars.add_row(f"  {label}", "█" * max(1, round(min(seconds / whole, 1.0) * room)), text)
            yield bars
        case Stack(parts, whole):
            yield from _stack(parts, whole, width)
        case Grid():
            yield from _tables(part, width)


def _labelled(rows: Sequence[tuple[str, str]], wide: bool, width: int) -> Table:
    grid = Table.grid(padding=(0, 2 if wide else 1))
    longest = max((len(name) for name, _ in rows), default=16) + 2
    left = max(16, min(longest, round(width * 0.45))) if wide else None
    grid.add_column(no_wrap=not wide, width=left, min_width=LABEL, overflow="fold", style="cyan")
    grid.add_column(overflow="fold")
    for name, words in rows:
        grid.add_row(_hanging(f"  {name}", "bold red" if name in BAD else ""), Text(words))
    return grid


def _hanging(text: str, style: str = "") -> RenderableType:
    """A text whose further lines begin where it does."""
    words = text.lstrip()
    return Padding(Text(words, style), (0, 0, 0, len(text) - len(words)))


def _stack(parts: Sequence[tuple[str, int]], whole: float, width: int) -> Iterator[RenderableType]:
    room, line, shown, used = width - 6, "", 0, 0.0
    shaded = list(zip(SHADES, parts, strict=False))
    if whole:
        cells = ""
        for shade, (_, size) in shaded:
            used += size / whole * room
            cells += shade * (round(used) - shown)
            shown = max(shown, round(used))
        yield Text(f"  |{cells.ljust(room)}|")
    for shade, (label, size) in shaded:
        item = f"{shade} {label} {short_bytes(size)}"
        if line and len(line) + 3 + len(item) > width - 2:
            yield Text(f"  {line}")
            line = ""
        line = f"{line}   {item}" if line else item
    yield Text(f"  {line}")


def _tables(grid: Grid, width: int) -> Iterator[RenderableType]:
    """The table, or several with some of its columns each, and an empty line between two."""
    keys, room = grid.keys, width - grid.indent
    widths = [max(map(len, (head, *(row[i] for row in grid.rows)))) + 2 for i, head in enumerate(grid.heads)]
    fixed = min(sum(widths[:keys]), room // 2)
    groups: list[list[int]] = [[]]
    for i in range(keys, len(widths)):
        if keys and groups[-1] and fixed + sum(widths[j] for j in groups[-1]) + widths[i] - 2 > room:
            groups.append([])
        groups[-1].append(i)
    for number, group in enumerate(groups if widths else ()):
        if number:
            yield Text("")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
        columns = [*range(keys), *group]
        for i in columns:
            is_figure = i in grid.right
            justify = "right" if is_figure else "left"
            table.add_column(grid.heads[i], overflow="fold", justify=justify, no_wrap=is_figure)  # type: ignore[arg-type]
        for row in grid.rows:
            table.add_row(*(_hanging(row[i]) for i in columns))
        yield Padding(table, (0, 0, 0, grid.indent))


def markdown(rows: Sequence[Row]) -> str:
    """Rows as people read them, as a table of Markdown, without columns that are empty in all of them."""
    rows = [{name: value for name, value in row.items() if any(other[name] != "" for other in rows)} for row in rows]
    lines = (
        [[*map(head, rows[0])], ["---"] * len(rows[0]), *([*map(cell, row.items())] for row in rows)] if rows else []
    )
    escaped = ([text.replace("|", r"\|") for text in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def comma_separated(rows: Sequence[Row]) -> str:
    """Rows for programs, as CSV: figures in the units that the names in the first line end in."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([rows[0].keys(), *(row.values() for row in rows)] if rows else [])
    return file.getvalue().rstrip("\n")
