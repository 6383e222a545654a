"""The one renderer of tables and pages: text of a given width, no line of which is longer."""

from __future__ import annotations

import io
import shutil
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH_LEAST, WIDTH_MOST = 60, 120


def page_width() -> int:
    """That of the terminal, within limits; 80 where there is none."""
    return max(WIDTH_LEAST, min(WIDTH_MOST, shutil.get_terminal_size((80, 24)).columns))


def rendered(parts: Iterable[RenderableType], width: int) -> str:
    """The parts as plain text of at most so many columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[int] = (), indent: int = 0
) -> Table:
    """A table without lines. Columns of the numbers `right` are figures, which are never broken."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for number, head in enumerate(heads):
        is_figure = number in right
        grid.add_column(head, overflow="fold", justify="right" if is_figure else "left", no_wrap=is_figure)
    for row in rows:
        grid.add_row(*(Text((" " * indent if number == 0 else "") + cell) for number, cell in enumerate(row)))
    return grid


def tables(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, keys: int, right: Collection[int] = ()
) -> list[Table]:
    """The table, or where it is wider than that, several with some of its columns each; all begin with the first
    `keys` columns."""
    widths = [max(map(len, (head, *(row[i] for row in rows)))) + 2 for i, head in enumerate(heads)]
    fixed = min(sum(widths[:keys]), width // 2)
    groups: list[list[int]] = [[]]
    for i in range(keys, len(heads)):
        if groups[-1] and fixed + sum(widths[j] for j in groups[-1]) + widths[i] - 2 > width:
            groups.append([])
        groups[-1].append(i)
    parts = []
    for group in groups:
        columns = [*range(keys), *group]
        figures = [k for k, i in enumerate(columns) if i in right]
        parts.append(table([heads[i] for i in columns], [[row[i] for i in columns] for row in rows], right=figures))
    return parts
