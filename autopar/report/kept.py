"""What is done is kept: answers in one SQLite file, by a key of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autopar.files.database import Database


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """An answer as JSON."""

    key: str
    answer: str


class Answers(Database):
    """Answers by key."""

    what, application_id, version = "file of answers", 0x6170_6674, 0
    tables = {"kept": (KeptAnswer, ("key",))}  # noqa: RUF012
    remedy = "give another file"


class Kept:
    """Answers by key; without a path, those of this process alone. Raises ValueError as `Database`."""

    def __init__(self, path: str | Path | None) -> None:
        self.database = None if path is None else Answers(path)
        self.here: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """The answer, or None."""
        if key not in self.here and self.database is not None:
            for row in self.database.rows("kept", key=key):
                self.here[key] = json.loads(row.answer)
        return self.here.get(key)

    def put(self, key: str, answer: Any) -> None:
        self.here[key] = answer
        if self.database is not None:
            self.database.add([KeptAnswer(key=key, answer=json.dumps(answer))])
