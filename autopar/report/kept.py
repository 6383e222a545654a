"""What is done is kept: answers in one SQLite file, by a key of everything that they depend on.

Several processes may read and write at once, and what was written survives an interruption.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

APPLICATION_ID = 0x6170_6674
BUSY_SECONDS = 30.0


@cache
def code_digest() -> str:
    """Of autopar's own code, which decides what a plan is."""
    digest = hashlib.sha256()
    for package in ("autopar", "autopar.passes", "autopar.runtime"):  # which a checkout has side by side
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        for file in sorted(Path(spec.origin).parent.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def key_of(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


class Kept:
    """Answers by key; without a path, those of this process alone. Raises ValueError for a file of something else, and
    for one that cannot be written."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.here: dict[str, Any] = {}
        if self.path is not None:
            with self._open() as database:
                database.execute("create table if not exists kept (key text primary key, answer text not null)")
                database.execute(f"pragma application_id = {APPLICATION_ID}")

    def get(self, key: str) -> Any:
        """The answer, or None."""
        if key not in self.here and self.path is not None:
            with self._open() as database:
                row = database.execute("select answer from kept where key = ?", (key,)).fetchone()
            if row is not None:
                self.here[key] = json.loads(row[0])
        return self.here.get(key)

    def put(self, key: str, answer: Any) -> None:
        self.here[key] = answer
        if self.path is not None:
            with self._open() as database:
                database.execute("insert or replace into kept values (?, ?)", (key, json.dumps(answer)))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as database, database:
                (of,) = database.execute("pragma application_id").fetchone()
                (tables,) = database.execute("select count(*) from sqlite_master").fetchone()
                if of != APPLICATION_ID and (of or tables):
                    raise ValueError(f"{self.path} is a database of something else: give another file")
                yield database
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"{self.path} cannot hold what is done ({error}): give another file") from error
