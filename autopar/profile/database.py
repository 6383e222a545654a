"""The profile database: measurements in one SQLite file.

A key holds everything that a figure depends on: of an operator, the machine (device, processor, ranks and threads,
versions) and `operator_key` (op, local shapes, dtypes); of a collective, the machine, links, kind and size; of a
segment program, the machine, the links of all axes and `structure` (the program without names, but with local shapes,
placements and lowerings). Several processes may read and write at once; what was written survives a crash.
"""

import contextlib
import hashlib
import json
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from autopar.cluster.links import Link
from autopar.files import cached, json_of, reading
from autopar.files.kinds import Amount, Count, Text
from autopar.files.typed import read

APPLICATION = "autopar profiles"
APPLICATION_ID = 0x6175_7470
VERSION = 1
FILE = "profiles.sqlite"
"""The user's own, in the cache directory."""

BUSY_SECONDS = 30.0
REMEDY = "remove what is broken with autopar profiles prune, or give another profile database"


class DatabaseError(ValueError):
    """The file is no profile database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """Mean seconds of an operator over runs and ranks, and the mean deviation from it between runs. `flops` and `bytes`
    give its roofline on any device."""

    machine: Text
    program: Text
    key: Text
    seconds: Amount
    spread: Amount
    runs: Count
    flops: Amount
    bytes: Count
    dtype: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Median seconds of one collective, of all groups of an axis at once."""

    machine: Text
    links: Text
    kind: Text
    bytes: Count
    seconds: Amount
    runs: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRow:
    """One segment program. `seconds` are those of forward and backward on the slowest rank (the median over runs;
    `spread` is half of the range between quartiles), and `composed_seconds` those of a timeline of its measured
    operators and collectives. Ranks compute and wait for `compute_seconds` and `waiting_seconds` on average.
    `peak_bytes` are the most bytes alive. `abandoned` programs were stopped early, since they could not win."""

    machine: Text
    links: Text
    structure: Text
    fingerprint: Text
    model: Text
    mesh: Text
    label: Text
    seconds: Amount
    composed_seconds: Amount
    spread: Amount
    runs: Count
    abandoned: bool
    compute_seconds: Amount
    waiting_seconds: Amount
    optimizer: Text
    optimizer_seconds: Amount
    optimizer_bytes: Count
    peak_bytes: Count
    measured_at: Amount


Row = OperatorRow | CollectiveRow | ProgramRow

TABLES: Mapping[str, tuple[type[Row], tuple[str, ...]]] = {
    "operators": (OperatorRow, ("machine", "program", "key")),
    "collectives": (CollectiveRow, ("machine", "links", "kind", "bytes")),
    "programs": (ProgramRow, ("machine", "links", "structure")),
}
"""Table -> the type of its rows, and the columns of its key."""

COLUMNS = {str: "TEXT", float: "REAL", int: "INTEGER", bool: "INTEGER"}


def links_key(links: Sequence[Link]) -> str:
    """Equal for links of equal ranks, rates, latencies and algorithms."""
    plain = [(link.ranks, link.stages, link.launch_seconds, link.algorithms) for link in links]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


class Profiles:
    """The database in a file, which is created if it is missing or empty.

    Raises `DatabaseError` if the file is something else, which is left as it is. A database of ours that is broken, or
    of another version, is an error too, and is set aside under another name, so that the next run begins a new one and
    nothing is lost. Every method raises `DatabaseError` for what turns out to be broken later.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else cached(FILE)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"{self.path.parent}: {error.strerror}; give a profile database in a folder that can be written"
            ) from error
        self._recognize()
        try:
            with contextlib.closing(self._connection()) as connection:
                self._prepare(connection)
        except sqlite3.OperationalError as error:
            raise DatabaseError(
                f"{self.path}: {error}; give a profile database that can be opened and written"
            ) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError, _ForeignError) as error:
            aside = self._set_aside()
            raise DatabaseError(
                f"{self.path} is no profile database of this version ({error}): it was set aside as {aside}; run "
                "again, and a new one is begun"
            ) from error

    def _recognize(self) -> None:
        """Raises `DatabaseError` for a file that autopar did not write, before SQLite touches it."""
        try:
            if not self.path.exists():
                return
            if not self.path.is_file():
                raise DatabaseError(
                    f"{self.path} is {'a folder' if self.path.is_dir() else 'no file'}; give a profile database that "
                    "can be opened and written"
                )
            with self.path.open("rb") as file:
                header = file.read(_HEADER.size)
        except OSError as error:
            raise DatabaseError(
                f"{self.path}: {error.strerror}; give a profile database that can be opened and written"
            ) from error
        if header and not _is_ours(header):
            raise DatabaseError(
                f"{self.path} is no profile database, and was left as it is; give the path of one, or a new path"
            )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if application == APPLICATION_ID:
            if version != VERSION or not tables.issuperset(TABLES):
                raise _ForeignError(f"version {version}, tables {sorted(tables)[:4] or 'none'}")
            for name, (row, _) in TABLES.items():
                found = [column for _, column, *_ in connection.execute(f"PRAGMA table_info({name})")]
                if found != list(get_type_hints(row)):
                    raise _ForeignError(f"columns {found[:4]} of table {name}")
            return
        connection.execute("BEGIN IMMEDIATE")
        for name, (row, key) in TABLES.items():
            columns = ", ".join(f"{n} {COLUMNS[kind]} NOT NULL" for n, kind in get_type_hints(row).items())
            connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}, PRIMARY KEY ({', '.join(key)}))")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
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
            raise DatabaseError(f"{self.path}: {error}; {REMEDY}") from error

    def add(self, rows: Iterable[Row]) -> None:
        """Adds all rows or none; a row replaces an older one with its key."""
        names = {row: table for table, (row, _) in TABLES.items()}
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
        kind, key = TABLES[table]
        types = get_type_hints(kind)
        condition = " AND ".join(f"{column} = ?" for column in where) or "1"
        query = f"SELECT {', '.join(types)} FROM {table} WHERE {condition} ORDER BY {', '.join(key)}"
        with self._connected() as connection:
            selected = connection.execute(query, tuple(where.values())).fetchall()
        truth = {name for name, type_ in types.items() if type_ is bool}  # which SQLite has as 0 and 1

        def of(row: Sequence[Any]) -> Row:
            values = dict(zip(types, row, strict=True))
            return read(kind, {n: v == 1 if n in truth and v in (0, 1) else v for n, v in values.items()}, table)

        try:
            return [of(row) for row in selected]
        except ValueError as error:
            raise DatabaseError(f"{self.path}: {error}; {REMEDY}") from error

    def machines(self) -> dict[str, dict[str, int]]:
        """How many rows each machine has in each table."""
        counts: dict[str, dict[str, int]] = {}
        with self._connected() as connection:
            for table in TABLES:
                for machine, count in connection.execute(
                    f"SELECT machine, COUNT(*) FROM {table} GROUP BY machine ORDER BY machine"
                ):
                    counts.setdefault(machine, dict.fromkeys(TABLES, 0))[table] = count
        return counts

    def prune(self, *, machine: str | None = None, older_than_days: float | None = None) -> int:
        """Removes rows of machines whose name contains `machine`, or segment programs that are older; returns how many
        rows."""
        removed = 0
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                conditions, values = [], []
                if machine is not None:
                    conditions.append("instr(machine, ?) > 0")
                    values.append(machine)
                if older_than_days is not None:
                    if table != "programs":
                        continue
                    conditions.append("measured_at < CAST(? AS REAL)")
                    values.append(str(time.time() - 86400.0 * older_than_days))
                removed += connection.execute(
                    f"DELETE FROM {table} WHERE {' AND '.join(conditions) or '1'}", tuple(values)
                ).rowcount
            connection.execute("COMMIT")
            connection.execute("VACUUM")
        return removed

    def export(self) -> str:
        """Everything, as JSON."""
        tables = {table: [asdict(row) for row in self.rows(table)] for table in TABLES}
        return json.dumps({"application": APPLICATION, "version": VERSION, **tables}, indent=1)

    def read(self, text: str) -> int:
        """Adds what `export` wrote; returns how many rows. Raises ValueError for anything else."""
        with reading("not what autopar profiles export wrote", f"give such a file of version {VERSION}"):
            exported = read(_Exported, json_of(text))
        rows: list[Row] = [*exported.operators, *exported.collectives, *exported.programs]
        self.add(rows)
        return len(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    application: Literal["autopar profiles"]
    version: Literal[1]
    operators: tuple[OperatorRow, ...]
    collectives: tuple[CollectiveRow, ...]
    programs: tuple[ProgramRow, ...]


_HEADER = struct.Struct(">16s52xI")
"""How a SQLite file begins: a text, and at byte 68 the application's number."""


def _is_ours(header: bytes) -> bool:
    if len(header) < _HEADER.size:
        return False
    text, application = _HEADER.unpack(header)
    return bool(text == b"SQLite format 3\0" and application == APPLICATION_ID)


class _ForeignError(Exception):
    """The file is of another version."""
