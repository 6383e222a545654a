"""The profile database: measurements in one SQLite file.

A key holds everything that a figure depends on: of an operator, the machine (device, processor, ranks and threads,
versions) and `operator_key` (op, local shapes, dtypes); of a collective, the machine, links, kind and size; of a
segment program, the machine, the links of all axes and `structure` (the program without names, but with local shapes,
placements and lowerings). Several processes may read and write at once; what was written survives a crash.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from autopar.cluster.links import Link

APPLICATION_ID = 0x6175_7470
VERSION = 1
BUSY_SECONDS = 30.0


class DatabaseError(ValueError):
    """The file is no profile database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """Mean seconds of an operator over runs and ranks, and the mean deviation from it between runs. `flops` and `bytes`
    give its roofline on any device."""

    machine: str
    program: str
    key: str
    seconds: float
    spread: float
    runs: int
    flops: float
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Median seconds of one collective, of all groups of an axis at once."""

    machine: str
    links: str
    kind: str
    bytes: int
    seconds: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRow:
    """One segment program. `seconds` are those of forward and backward on the slowest rank (the median over runs;
    `spread` is half of the range between quartiles), and `composed_seconds` those of a timeline of its measured
    operators and collectives. Ranks compute and wait for `compute_seconds` and `waiting_seconds` on average.
    `peak_bytes` are the most bytes alive. `abandoned` programs were stopped early, since they could not win."""

    machine: str
    links: str
    structure: str
    fingerprint: str
    model: str
    mesh: str
    label: str
    seconds: float
    composed_seconds: float
    spread: float
    runs: int
    abandoned: bool
    compute_seconds: float
    waiting_seconds: float
    optimizer: str
    optimizer_seconds: float
    optimizer_bytes: int
    peak_bytes: int
    measured_at: float


Row = OperatorRow | CollectiveRow | ProgramRow

TABLES: Mapping[str, tuple[type[Row], tuple[str, ...]]] = {
    "operators": (OperatorRow, ("machine", "program", "key")),
    "collectives": (CollectiveRow, ("machine", "links", "kind", "bytes")),
    "programs": (ProgramRow, ("machine", "links", "structure")),
}
"""Table -> the type of its rows, and the columns of its key."""

TYPES = {str: "TEXT", float: "REAL", int: "INTEGER", bool: "INTEGER"}


def default_path() -> Path:
    """The file in the user's cache directory (`XDG_CACHE_HOME`, or `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autopar" / "profiles.sqlite"


def links_key(links: Sequence[Link]) -> str:
    """Equal for links of equal ranks, rates, latencies and algorithms."""
    plain = [(link.ranks, link.stages, link.launch_seconds, link.algorithms) for link in links]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


class Profiles:
    """The database in a file, which is created if it is missing.

    Raises `DatabaseError` if the file is something else, or broken. It is then set aside under another name, so that
    the next run begins a new one and nothing is lost.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"{self.path.parent}: {error.strerror}; give a profile database in a folder that can be written"
            ) from error
        try:
            with self._connected() as connection:
                self._prepare(connection)
        except sqlite3.OperationalError as error:
            raise DatabaseError(
                f"{self.path}: {error}; give a profile database that can be opened and written"
            ) from error
        except (sqlite3.DatabaseError, _ForeignError) as error:
            aside = self._set_aside()
            raise DatabaseError(
                f"{self.path} is no profile database of this version ({error}): it was set aside as {aside}; run "
                "again, and a new one is begun"
            ) from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if application == APPLICATION_ID and version == VERSION and tables.issuperset(TABLES):
            return
        if application or version or tables:
            raise _ForeignError(
                f"application {application:#x}, version {version}, tables {sorted(tables)[:4] or 'none'}"
            )
        connection.execute("BEGIN IMMEDIATE")
        for name, (row, key) in TABLES.items():
            columns = ", ".join(f"{n} {TYPES[kind]} NOT NULL" for n, kind in get_type_hints(row).items())
            connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}, PRIMARY KEY ({', '.join(key)}))")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")

    def _set_aside(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.aside-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection, closed at the end. Statements outside of BEGIN and COMMIT commit by themselves."""
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()

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
        make: Callable[..., Row] = kind
        # SQLite has no truth values
        return [make(**{n: types[n](v) for n, v in zip(types, row, strict=True)}) for row in selected]

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
        return json.dumps({"application": "autopar profiles", "version": VERSION, **tables}, indent=1)

    def read(self, text: str) -> int:
        """Adds what `export` wrote; returns how many rows. Raises ValueError for anything else."""
        try:
            data = json.loads(text)
            if data["application"] != "autopar profiles" or data["version"] != VERSION:
                raise ValueError(f"application {data['application']!r}, version {data['version']!r}")
            rows = [kind(**row) for table, (kind, _) in TABLES.items() for row in data[table]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"not what autopar profiles export wrote: {type(error).__name__}: {error}; give such a file of version "
                f"{VERSION}"
            ) from error
        self.add(rows)
        return len(rows)


class _ForeignError(Exception):
    """The file is of another application or version."""
