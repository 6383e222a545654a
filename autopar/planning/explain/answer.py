"""The answer to a question about a plan, as a value and as text."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.ir.graph import JointGraph
from autopar.ir.program import Program

from ..page.words import legend
from ..record import Record
from ..texts import short_bytes, short_seconds

SAME_PART = 0.001
"""Steps that differ by less than this part are the same."""

FIGURE = 12
"""Columns of a figure with its unit, at most."""


class Answers(Protocol):
    """What answers questions about plans of one model."""

    def explain(self, plan: Any, name: str, *, replan: int) -> Explanation: ...

    def anatomy(self, plan: Any) -> Any: ...

    def program(self, plan: Any, rewrites: str | None) -> Program: ...

    def joint_graph(self) -> JointGraph: ...


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
class Explanation:
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self, width: int = 80) -> str:
        """The answer in at most so many columns."""
        console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
        with console.capture() as capture:
            console.print(Text(f"{self.name}: {self.kind}", style="bold"))
            for fact in self.facts:
                console.print(Padding(Text(fact), (0, 0, 0, 2)))
            if self.chosen is not None:
                console.print()
                console.print(self._table(self.chosen))
                self._print_omitted(console)
                if (again := self._replanned(self.chosen)) is not None:
                    console.print()
                    console.print(again)
            if self.rows:
                console.print()
                console.print(_columns(self.rows))
                self._print_omitted(console)
            self._closing(console)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))

    def __str__(self) -> str:
        return self.text()

    def _print_omitted(self, console: Console) -> None:
        if self.omitted:
            less = "take less time" if self.kind == "collective" else "cost more without overlap"
            console.print(Text(f"  and {self.omitted} more, which {less}"))

    def _table(self, chosen: Alternative) -> Table:
        """The choice, and each alternative beside it."""
        table = _grid("alternative", "step", "peak", "what travels differently")
        for other in (chosen, *self.alternatives):
            last = "in the plan" if other is chosen else _changes(other)
            mark = "* " if other is chosen else "  "
            table.add_row(_hanging(mark, other.words), *map(Text, _figures(other, chosen)), Text(last))
        return table

    def _replanned(self, chosen: Alternative) -> Table | None:
        """Plans that are pinned to alternatives."""
        table = _grid("with all else planned again", "step", "peak", "what else moves")
        for other in self.alternatives:
            if (again := other.replanned) is None:
                continue
            if again.seconds is None or again.bytes is None:
                cells = ("-", "-", f"no plan: {again.refused}")
            else:
                figures = _figures(Alternative(choice="", words="", seconds=again.seconds, bytes=again.bytes), chosen)
                cells = (*figures, ", ".join(again.moved) or "nothing")
            table.add_row(_hanging("  ", other.words), *map(Text, cells))
        return table if table.row_count else None

    def _closing(self, console: Console) -> None:
        if self.binds:
            console.print()
        for line in self.binds:
            console.print(Padding(Text(line, style="bold"), (0, 0, 0, 2)))
        words = [other.words for other in self.alternatives] + ([self.chosen.words] if self.chosen else [])
        for line in legend(words):
            console.print(Padding(Text(line), (0, 0, 0, 2)))


def _grid(*heads: str) -> Table:
    """A table of words, two figures, and words."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    for number, head in enumerate(heads):
        is_figure = number in (1, 2)
        table.add_column(head, overflow="fold", no_wrap=is_figure, min_width=0 if is_figure else 26)
    return table


def _hanging(mark: str, words: str) -> Table:
    """Words whose further lines stand behind the mark."""
    grid = Table.grid()
    grid.add_column(width=2)
    grid.add_column(overflow="fold")
    grid.add_row(mark, Text(words))
    return grid


def _columns(rows: tuple[tuple[str, ...], ...]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    for number, head in enumerate(rows[0]):
        is_figure = number > 0 and all(len(row[number]) <= FIGURE for row in rows)
        table.add_column(head, overflow="fold", no_wrap=is_figure, justify="right" if is_figure else "left")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def _figures(other: Alternative, chosen: Alternative) -> tuple[str, str]:
    if other.seconds is None or other.bytes is None:
        return "-", "-"
    about = "" if other.is_exact else "~"
    if other is chosen or chosen.seconds is None or chosen.bytes is None:
        return about + short_seconds(other.seconds), about + short_bytes(other.bytes)
    longer = other.seconds - chosen.seconds
    return (
        about + ("same" if abs(longer) <= SAME_PART * chosen.seconds else signed(longer, short_seconds)),
        about + signed(other.bytes - chosen.bytes, short_bytes),
    )


def signed(difference: float, text: Any) -> str:
    """A difference with its sign; "same" for none."""
    if abs(difference) < 1e-9:
        return "same"
    return ("+" if difference > 0 else "-") + str(text(abs(difference)))


def _changes(other: Alternative) -> str:
    parts = [other.against, *other.moves] if not other.refused else [other.refused]
    return "; ".join(part for part in parts if part) or "nothing travels differently"


def of_plan(plan: Record, choice: str, words: str, serial_seconds: float) -> Alternative:
    """What the plan itself took."""
    return Alternative(
        choice=choice, words=words, seconds=plan.seconds, bytes=plan.bytes, serial_seconds=serial_seconds
    )
