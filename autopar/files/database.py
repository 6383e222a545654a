"""Rows of dataclasses in one SQLite file. Several processes may read and write at once; what was written survives a
crash."""

import contextlib
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from .typed import read

BUSY_SECONDS = 30.0

COLUMNS = {str: "TEXT", float: "REAL", int: "INTEGER", bool: "INTEGER"}


class DatabaseError(ValueError):
    """The file is no such database."""


class Database:
    """A database of some `tables`: each by its name, the type of its rows, and the columns of its key. It is called
    `what` in errors, whose `remedy` is what to do about a row that is broken. The file is created if it is missing or
    empty.

    Raises `DatabaseError` if the file is something else, which is left as it is. A database of ours that is broken, or
    of another version, is an error too, and is set aside under another name, so that the next run begins a new one and
    nothing is lost. Every method raises `DatabaseError` for what turns out to be broken later.
    """

    what: ClassVar[str]
    application_id: ClassVar[int]
    version: ClassVar[int]
    tables: ClassVar[Mapping[str, tuple[type, tuple[str, ...]]]]
    remedy: ClassVar[str]

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"{self.path.parent}: {error.strerror}; give a {self.what} in a folder that can be written"
            ) from error
        self._recognize()
        try:
            with contextlib.closing(self._connection()) as connection:
                self._prepare(connection)
        except sqlite3.OperationalError as error:
            raise DatabaseError(f"{self.path}: {error}; give a {self.what} that can be opened and written") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError, _ForeignError) as error:
            aside = self._set_aside()
            raise DatabaseError(
                f"{self.path} is no {self.what} of this version ({error}): it was set aside as {aside}; run "
                "again, and a new one is begun"
            ) from error

    def _recognize(self) -> None:
        """Raises `DatabaseError` for a file that autopar did not write, before SQLite touches it."""
        try:
            if not self.path.exists():
                return
            if not self.path.is_file():
                raise DatabaseError(
                    f"{self.path} is {'a folder' if self.path.is_dir() else 'no file'}; give a {self.what} that "
                    "can be opened and written"
                )
            with self.path.open("rb") as file:
                header = file.read(_HEADER.size)
        except OSError as error:
            raise DatabaseError(
                f"{self.path}: {error.strerror}; give a {self.what} that can be opened and written"
            ) from error
        if header and not self._is_ours(header):
            raise DatabaseError(
                f"{self.path} is no {self.what}, and was left as it is; give the path of one, or a new path"
            )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if application == self.application_id:
            if version != self.version or not tables.issuperset(self.tables):
                raise _ForeignError(f"version {version}, tables {sorted(tables)[:4] or 'none'}")
            for name, (row, _) in self.tables.items():
                found = [column for _, column, *_ in connection.execute(f"PRAGMA table_info({name})")]
                if found != list(get_type_hints(row)):
                    raise _ForeignError(f"columns {found[:4]} of table {name}")
            return
        connection.execute("BEGIN IMMEDIATE")
        for name, (row, key) in self.tables.items():
            columns = ", ".join(f"{n} {COLUMNS[kind]} NOT NULL" for n, kind in get_type_hints(row).items())
            connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}, PRIMARY KEY ({', '.join(key)}))")
        connection.execute(f"PRAGMA application_id = {self.application_id}")
        connection.execute(f"PRAGMA user_version = {self.version}")
        connection.execute("COMMIT")

    def _set_aside(self) -> Path:
        """Renames the file and its journal, which would be taken for the next file's."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.aside-{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
            journal = self.path.with_name(f"{self.path.name}-journal")
            if journal.exists():
                journal.rename(aside.with_name(f"{aside.name}-journal"))
        except OSError as error:
            raise DatabaseError(
                f"{self.path} is broken, and cannot be set aside ({error.strerror}); move it"
            ) from error
        return aside

    def _connection(self) -> sqlite3.Connection:
        """Statements outside of BEGIN and COMMIT commit by themselves."""
        return sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection, closed at the end."""
        try:
            with contextlib.closing(self._connection()) as connection:
                yield connection
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise DatabaseError(f"{self.path}: {error}; {self.remedy}") from error

    def add(self, rows: Iterable[Any]) -> None:
        """Adds all rows or none; a row replaces an older one with its key."""
        names = {row: table for table, (row, _) in self.tables.items()}
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for row in rows:
                values = asdict(row)
                marks = ", ".join("?" * len(values))
                connection.execute(
                    f"INSERT OR REPLACE INTO {names[type(row)]} ({', '.join(values)}) VALUES ({marks})",
                    tuple(values.values()),
                )
            connection.execute("COMMIT")

    def rows(self, table: str, **where: Any) -> list[Any]:
        """Rows of a table with these values, in the order of their keys."""
        kind, key = self.tables[table]
        types = get_type_hints(kind)
        condition = " AND ".join(f"{column} = ?" for column in where) or "1"
        query = f"SELECT {', '.join(types)} FROM {table} WHERE {condition} ORDER BY {', '.join(key)}"
        with self._connected() as connection:
            selected = connection.execute(query, tuple(where.values())).fetchall()
        truth = {name for name, type_ in types.items() if type_ is bool}  # which SQLite has as 0 and 1

        def of(row: Sequence[Any]) -> Any:
            values = dict(zip(types, row, strict=True))
            return read(kind, {n: v == 1 if n in truth and v in (0, 1) else v for n, v in values.items()}, table)

        try:
            return [of(row) for row in selected]
        except ValueError as error:
            raise DatabaseError(f"{self.path}: {error}; {self.remedy}") from error

    def _is_ours(self, header: bytes) -> bool:
        if len(header) < _HEADER.size:
            return False
        text, application = _HEADER.unpack(header)
        return bool(text == b"SQLite format 3\0" and application == self.application_id)


_HEADER = struct.Struct(">16s52xI")
"""How a SQLite file begins: a text, and at byte 68 the application's number."""


class _ForeignError(Exception):
    """The file is of another version."""
