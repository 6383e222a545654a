"""What people read of an answer, as values: sections of lines, labelled rows, bars and tables.

They know no width and no colour: `rendering` writes them as text, and `hypertext` as HTML.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.planning.texts import UNITS

Row = Mapping[str, float | str | None]
"""Figures and texts by name. A figure's name is its unit, or ends in it: `step_seconds` (`texts.UNITS`)."""

BAD = ("NO FIT", "warning")
"""Labels of what a reader must not miss."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences; `style` is "", "bold" or "dim"."""

    texts: Sequence[str]
    indent: int = 2
    style: str = ""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Labels, and what they say; they are names of any length in `wide` rows."""

    rows: Sequence[tuple[str, str]]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """(label, seconds, text) of parts of so many seconds."""

    rows: Sequence[tuple[str, float, str]]
    whole: float
    strong: str = ""
    """The label of the one that counts, beside which others are pale."""


@dataclass(frozen=True, slots=True)
class Stack:
    """(label, bytes) of what is held, in a bar of so many bytes."""

    parts: Sequence[tuple[str, int]]
    whole: float


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. Columns of the numbers `right` are figures, which are never broken. One that is too wide is several,
    each with the first `keys` columns; with no `keys` its words go on in further lines."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1
    right: Collection[int] = ()
    indent: int = 0

    @staticmethod
    def of(rows: Sequence[Row], *, keys: int = 1, indent: int = 0) -> Grid:
        """Rows as people read them: with their units, and figures at the right."""
        names = list(rows[0]) if rows else []
        right = [i for i, name in enumerate(names) if not any(isinstance(row[name], str) for row in rows)]
        return Grid([*map(head, names)], [[*map(cell, row.items())] for row in rows], keys, right, indent)


Part: TypeAlias = Lines | Labelled | Bars | Stack | Grid


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and the parts under it."""

    heading: str
    parts: Sequence[Part]


def without(row: Row, *names: str) -> Row:
    """A row less some columns."""
    return {name: value for name, value in row.items() if name not in names}


def _unit(name: str) -> str | None:
    return next((unit for unit in UNITS if name == unit or name.endswith(f"_{unit}")), None)


def head(name: str) -> str:
    """What a column of such figures is called: "step" of `step_seconds`, "tokens/s" of `tokens_per_second`."""
    unit = _unit(name)
    if unit is None or unit == name:
        return name.replace("_", " ")
    return name.removesuffix(f"_{unit}").replace("_", " ") + ("/s" if unit == "per_second" else "")


def cell(named: tuple[str, float | str | None]) -> str:
    """A figure with its unit, by its name; a text as it is."""
    name, value = named
    unit = _unit(name)
    return "-" if value is None else str(value) if isinstance(value, str) or unit is None else UNITS[unit](value)
