"""The one renderer of tables and pages: text of a given width, no line of which is longer."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .texts import UNITS

Row = Mapping[str, float | str | None]
"""Figures and texts by name. A figure's name is its unit, or ends in it: `step_seconds` (`texts.UNITS`)."""

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


def of_rows(rows: Sequence[Row], width: int, *, keys: int = 1) -> list[RenderableType]:
    """Rows as people read them: `tables`, with figures at the right and a line between two of them."""
    if not rows:
        return []
    right = [i for i, name in enumerate(rows[0]) if not any(isinstance(row[name], str) for row in rows)]
    first, *others = tables(list(map(_head, rows[0])), list(map(_cells, rows)), width, keys=keys, right=right)
    return [first, *(part for other in others for part in (Text(""), other))]


def markdown(rows: Sequence[Row]) -> str:
    """Rows as people read them, as a table of Markdown, without columns that are empty in all of them."""
    rows = [{name: value for name, value in row.items() if any(other[name] != "" for other in rows)} for row in rows]
    lines = [list(map(_head, rows[0])), ["---"] * len(rows[0]), *map(_cells, rows)] if rows else []
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def comma_separated(rows: Sequence[Row]) -> str:
    """Rows for programs, as CSV: figures in the units that the names in the first line end in."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([rows[0].keys(), *(row.values() for row in rows)] if rows else [])
    return file.getvalue().rstrip("\n")


def _unit(name: str) -> str | None:
    return next((unit for unit in UNITS if name == unit or name.endswith(f"_{unit}")), None)


def _head(name: str) -> str:
    """What a column of such figures is called: "step" of `step_seconds`, "tokens/s" of `tokens_per_second`."""
    unit = _unit(name)
    if unit is None or unit == name:
        return name.replace("_", " ")
    return name.removesuffix(f"_{unit}").replace("_", " ") + ("/s" if unit == "per_second" else "")


def _cells(row: Row) -> list[str]:
    def cell(name: str, value: float | str | None) -> str:
        unit = _unit(name)
        return "-" if value is None else str(value) if isinstance(value, str) or unit is None else UNITS[unit](value)

    return [cell(name, value) for name, value in row.items()]
