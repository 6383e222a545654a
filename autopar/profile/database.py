"""The profile database: measurements in one SQLite file.

A key holds everything that a figure depends on: of an operator, the machine (device, processor, ranks and threads,
versions) and `operator_key` (op, local shapes, dtypes); of a collective, the machine, links, kind and size; of a
segment program, the machine, the links of all axes and `structure` (the program without names, but with local shapes,
placements and lowerings). Several processes may read and write at once; what was written survives a crash.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from autopar.cluster.links import Link
from autopar.files import cached, json_of, reading
from autopar.files.database import Database
from autopar.files.kinds import Amount, Count, Text
from autopar.files.typed import read

APPLICATION = "autopar profiles"
VERSION = 1
FILE = "profiles.sqlite"
"""The user's own, in the cache directory."""


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


def links_key(links: Sequence[Link]) -> str:
    """Equal for links of equal ranks, rates, latencies and algorithms."""
    plain = [(link.ranks, link.stages, link.launch_seconds, link.algorithms) for link in links]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


class Profiles(Database):
    """The database in a file, or in the user's own."""

    what, application_id, version, tables = "profile database", 0x6175_7470, VERSION, TABLES
    remedy = "remove what is broken with autopar profiles prune, or give another profile database"

    def __init__(self, path: Path | str | None = None) -> None:
        super().__init__(cached(FILE) if path is None else path)

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
