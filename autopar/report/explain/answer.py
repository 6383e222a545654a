"""The answer to a question about a plan, as a value and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.planning.texts import short_bytes, short_seconds, signed

from ..document import Document
from ..sections import Grid, Lines, Section
from ..words import legend

SAME_PART = 0.001
"""Steps that differ by less than this part are the same."""

FIGURE = 12
"""Columns of a figure with its unit, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The plan that is pinned to an alternative, or why there is none. `moved` says what else it places differently."""

    seconds: float | None = None
    bytes: int | None = None
    moved: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One choice, with all else as it is in the plan. `choice` is as in the plan's file, `words` as on its page.

    `seconds` and `bytes` are those of the step and its peak, `serial_seconds` those of the step as if nothing
    overlapped; `is_exact`: by the whole program, or estimated by one of fewer layers. `moves` are the collectives that
    it adds and spares. `refused` says why it is none.
    """

    choice: str
    words: str
    seconds: float | None = None
    bytes: float | None = None
    serial_seconds: float | None = None
    is_exact: bool = True
    moves: tuple[str, ...] = ()
    refused: str = ""
    against: str = ""
    """What speaks against it."""
    replanned: Replanned | None = None


@dataclass(frozen=True, kw_only=True)
class Explanation(Document):
    """What `name` is (`kind`: parameter, input, module, operator or collective), its choice in the plan, and the
    alternatives, the shortest step first. `facts` are sentences about it, `binds` what decides."""

    name: str
    kind: str
    facts: tuple[str, ...] = ()
    chosen: Alternative | None = None
    alternatives: tuple[Alternative, ...] = ()
    binds: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """A table of parts, if it has such: the first row names the columns."""
    omitted: int = 0
    """Alternatives that were not looked at closely, since they cost more as if nothing overlapped."""

    def sections(self) -> Iterator[Section]:
        yield Section(f"{self.name}: {self.kind}", [Lines(self.facts)])
        less = "take less time" if self.kind == "collective" else "cost more without overlap"
        more = Lines([f"and {self.omitted} more, which {less}"] * bool(self.omitted))
        if (chosen := self.chosen) is not None:
            rows = [(chosen.words, *_figures(chosen, chosen), "in the plan")]
            rows += [(other.words, *_figures(other, chosen), _changes(other)) for other in self.alternatives]
            yield Section("", [_grid("alternative", "what travels differently", rows), more])
            if again := [_again(other, chosen) for other in self.alternatives if other.replanned is not None]:
                yield Section("", [_grid("with all else planned again", "what else moves", again)])
        if self.rows:
            heads, *rows_ = self.rows
            right = [n for n in range(1, len(heads)) if all(len(row[n]) <= FIGURE for row in rows_)]
            yield Section("", [Grid(heads, rows_, keys=0, right=right), more])
        words = legend([other.words for other in (*self.alternatives, *([chosen] if chosen else []))])
        if self.binds or words:
            yield Section("", [Lines(self.binds, style="bold"), Lines(words, style="dim")])


def _grid(of: str, differs: str, rows: list[tuple[str, str, str, str]]) -> Grid:
    """A table of words, two figures, and words."""
    return Grid((of, "step", "peak", differs), [(f"  {words}", *cells) for words, *cells in rows], keys=0, right=(1, 2))


def _again(other: Alternative, chosen: Alternative) -> tuple[str, str, str, str]:
    """The plan that is pinned to an alternative."""
    again = other.replanned
    assert again is not None
    told = f"no plan: {again.refused}" if again.seconds is None else ", ".join(again.moved) or "nothing"
    return other.words, *_figures(again, chosen), told


def _figures(other: Alternative | Replanned, chosen: Alternative) -> tuple[str, str]:
    """The step and the peak, as differences from those of what the plan takes."""
    if other.seconds is None or other.bytes is None:
        return "-", "-"
    about = "~" if isinstance(other, Alternative) and not other.is_exact else ""
    if other is chosen or chosen.seconds is None or chosen.bytes is None:
        return about + short_seconds(other.seconds), about + short_bytes(other.bytes)
    longer = other.seconds - chosen.seconds
    return (
        about + ("same" if abs(longer) <= SAME_PART * chosen.seconds else signed(longer, short_seconds)),
        about + signed(other.bytes - chosen.bytes, short_bytes),
    )


def _changes(other: Alternative) -> str:
    parts = [other.against, *other.moves] if not other.refused else [other.refused]
    return "; ".join(part for part in parts if part) or "nothing travels differently"
