"""`autopar.toml` in the working directory: what one would type again and again. The command line takes precedence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from autopar.extensions import nearest
from autopar.planning.request import Request, Source, options_of
from autopar.planning.saved import is_plan

FILE = Path("autopar.toml")

KEYS = sorted(
    ["devices", "mesh"]
    + [
        option.flag_of(name)[2:]
        for record in (Request, Source)
        for field, option in options_of(record).items()
        for name in option.parts or (field,)
        if field != "model"
    ]
)
"""Options that the file may hold. `set` is a table of its own."""

READERS = ("plan", "fit", "compare", "simulate", "profile")
"""Commands that read it: those that are given a model and plan it."""


def configured(command: str, options: Collection[str], typed: Sequence[str]) -> list[str]:
    """What the file says for a command that has these `options` (without dashes), as it would be typed, where no option
    was; nothing for `simulate` of a saved plan, which has its own. Settings are merged. Raises ValueError for a file
    that cannot be read, and for a key that no option has."""
    if command not in READERS or not FILE.is_file() or (command == "simulate" and any(map(is_plan, typed))):
        return []
    given = {word.partition("=")[0].removeprefix("--") for word in typed if word.startswith("--")} - {"set"}
    values = {key: value for key, value in _values().items() if key in options and key not in given}
    return [word for key, value in values.items() for text in _texts(key, value) for word in (f"--{key}", text)]


def _values() -> dict[str, Any]:
    try:
        values = tomllib.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{FILE}: {error}; correct it, or move it away") from error
    for key in values:
        if key not in KEYS:
            hint = nearest(key.replace("_", "-"), KEYS)
            raise ValueError(f"{FILE}: there is no option {key!r}{hint}; it may hold {', '.join(KEYS)}")
    return values


def _texts(key: str, value: Any) -> list[str]:
    """A value as it is typed: of the table `set` and of lists, several."""
    if key == "set":
        if not isinstance(value, dict):
            raise ValueError(f"{FILE}: set is {value!r}: write a table, such as [set] and below num_hidden_layers = 4")
        return [f"{name}={text if isinstance(text, str) else json.dumps(text)}" for name, text in value.items()]
    if key in ("mesh", "devices") and isinstance(value, (dict, list)):
        parts = [f"{axis}={size}" for axis, size in value.items()] if isinstance(value, dict) else map(str, value)
        return [",".join(parts)]
    if isinstance(value, (dict, bool)) or (isinstance(value, list) and key != "pin"):
        raise ValueError(f"{FILE}: {key} is {value!r}: write a text or a number, as the option --{key} takes it")
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
