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


class Kept(Database):
    """Answers by key. Raises ValueError as `Database`."""

    what, application_id, version = "file of answers", 0x6170_6674, 0
    tables = {"kept": (KeptAnswer, ("key",))}  # noqa: RUF012
    remedy = "give another file"

    def get(self, key: str) -> Any:
        """The answer, or None."""
        return next((json.loads(row.answer) for row in self.rows("kept", key=key)), None)

    def put(self, key: str, answer: Any) -> None:
        self.add([KeptAnswer(key=key, answer=json.dumps(answer))])
