"""Tables of named rows to which people add, and the entry points by which installed packages add theirs.

There is a table for each thing that a person may add: rules of operators, presets, clusters, cost modes, solvers,
lowerings. Tables belong to the process, as the operators of `torch.library` do. autopar's own rows cannot be replaced,
and others only with `replace=True`. docs/extending.md adds a row to each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

GROUP = "autopar.extensions"
"""The group of entry points: functions without arguments that register what a package adds."""

EXTRAS: Mapping[str, Sequence[str]] = {
    "rule": ("autopar.extras.ctc", "autopar.extras.upsampling"),
    "override": ("autopar.extras.selected_labels",),
    "optimizer": ("autopar.extras.muon",),
    "watch": ("autopar.extras.finite",),
}
"""Kind of table -> modules of autopar that add rows to it, and that nothing imports until the table is first read."""


Row = TypeVar("Row", bound=Any)


def nearest(word: object, words: Iterable[str]) -> str:
    """A hint at the word that a person meant, for errors: " (did you mean 'megatron'?)", or nothing."""
    close = get_close_matches(word, list(words), n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(kind: str, word: object, names: Iterable[str] | Mapping[str, Iterable[str]]) -> str:
    """The error for a word that is none of the `names`, which may stand under headings."""
    headed = names if isinstance(names, Mapping) and not isinstance(names, Table) else {"known": names}
    every = {heading: list(group) for heading, group in headed.items()}
    close = nearest(word, [name for group in every.values() for name in group])
    listed = "; ".join(f"{heading}: {', '.join(group)}" for heading, group in every.items())
    return f"unknown {kind} {word!r}{close}; {listed}"


class Table(Mapping[str, Row]):
    """Rows of one kind, dataclasses with a name: autopar's own first, then registered ones. `functions` are the fields
    that hold functions, or None if that is their default. A table `beside` another shares no name with it, as those of
    solvers and presets."""

    def __init__(
        self,
        kind: str,
        form: type[Row],
        rows: Iterable[Row] = (),
        *,
        functions: Sequence[str] = (),
        beside: Table[Any] | None = None,
    ) -> None:
        self.kind, self.form, self.functions = kind, form, functions
        self.plugged = {row.name: row for row in rows}
        self.extras = [*EXTRAS.get(kind, ())]
        self.added: dict[str, Row] = {}
        self.beside = beside
        if beside is not None:
            beside.beside = self
        TABLES.append(self)

    @property
    def own(self) -> dict[str, Row]:
        """autopar's own rows."""
        while self.extras:
            import_module(self.extras.pop())
        return self.plugged

    def know(self, *rows: Row) -> None:
        """Plugs rows of autopar's own in."""
        self.plugged.update((row.name, row) for row in rows)

    def add(self, row: Row, *, replace: bool = False) -> None:
        """Adds a row; adding an equal one again is fine. Raises ValueError for an object that is no such row, and for a
        row whose name is missing, malformed or taken."""
        if not isinstance(row, self.form):
            raise ValueError(f"{self.kind} {row!r} is a {type(row).__name__}: give a {self.form.__name__}")
        name = row.name
        for field in fields(row):
            function = getattr(row, field.name)
            if field.name in self.functions and not callable(function) and (function, field.default) != (None, None):
                raise ValueError(f"{self.kind} {name!r}: {field.name} is {function!r}: give a function")
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"{self.kind} has the name {name!r}: give one of letters, digits, and _ . - between them")
        for table in (self, self.beside):
            if table is not None and (name in table.own or (table is not self and name in table.added)):
                raise ValueError(
                    f"there is a {table.kind} {name!r} already, which cannot be replaced: take another name"
                )
        before = self.added.get(name)
        if before is not None and before != row and not replace:
            raise ValueError(
                f"{self.kind} {name!r} is registered already, as {before}, and again as {row}: register a name once, "
                f"or pass replace=True"
            )
        self.added[name] = row

    def named(self, name: Any) -> Row:
        """The row of this name. Raises ValueError if there is none."""
        if not isinstance(name, str) or name not in self:
            raise ValueError(unknown(self.kind, name, self))
        return self[name]

    def __getitem__(self, name: str) -> Row:
        INSTALLED.load()
        return self.own[name] if name in self.own else self.added[name]

    def __contains__(self, name: object) -> bool:
        INSTALLED.load()
        return name in self.own or name in self.added

    def __iter__(self) -> Iterator[str]:
        INSTALLED.load()
        return iter((*self.own, *self.added))

    def __len__(self) -> int:
        INSTALLED.load()
        return len(self.own) + len(self.added)


TABLES: list[Table[Any]] = []


@contextmanager
def scoped() -> Iterator[None]:
    """Removes at its end what the block registers: for tests, and to compare with and without."""
    INSTALLED.load()  # what packages add stays
    before = {id(table): dict(table.added) for table in TABLES}
    try:
        yield
    finally:
        for table in TABLES:
            table.added = before.get(id(table), {})


class Installed:
    """The entry points of installed packages. The first read of a table calls each of them once; no earlier, because a
    package may import autopar while it is being imported itself."""

    def __init__(self) -> None:
        self.waiting: list[EntryPoint] | None = None
        self.is_loading = False

    def load(self) -> None:
        """Calls those that are waiting. Raises ValueError for one that fails."""
        if self.waiting == [] or self.is_loading:
            return
        self.is_loading = True
        try:
            if self.waiting is None:
                self.waiting = sorted(entry_points(group=GROUP), key=lambda point: point.name)
            while self.waiting:
                self._call(self.waiting[0])
                del self.waiting[0]
        finally:
            self.is_loading = False

    def _call(self, point: EntryPoint) -> None:
        try:
            point.load()()
        except Exception as error:
            package = point.dist.name if point.dist is not None else "an installed package"
            raise ValueError(
                f"the extension {point.name} = {point.value} of {package} fails: {error!r}: correct or uninstall it"
            ) from error


INSTALLED = Installed()


@dataclass(frozen=True, slots=True)
class Plug:
    """A row of one thing: what `name` stands for."""

    name: str
    value: Any
