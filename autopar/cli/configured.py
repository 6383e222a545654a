"""`autopar.toml` in the working directory: what one would type again and again. The command line takes precedence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.extensions import nearest
from autopar.planning.saved import is_plan

FILE = Path("autopar.toml")

KEYS = (
    "batch", "cluster", "cost", "devices", "dtype", "headroom", "memory-limit", "mesh", "optimizer", "param-dtype",
    "pin", "reduce-dtype", "seq", "set", "solver",
)  # fmt: skip
"""Options that the file may hold. `set` is a table of its own."""

READERS = ("plan", "fit", "compare", "simulate", "profile")
"""Commands that read it: those that are given a model and plan it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """`defaults` are values by parameter of a command, `arguments` go before those that were typed, and `words` say
    what of the file is used, as options."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


def configured(command: str, options: Mapping[str, Any], typed: Sequence[str]) -> Configured:
    """What the file says for a command, whose `options` are parameters by option name without dashes, where no option
    was `typed`; nothing for `simulate` of a saved plan, which has its own. Raises ValueError for a file that cannot be
    read, and for a key that no option has."""
    if command not in READERS or not FILE.is_file() or (command == "simulate" and any(map(is_plan, typed))):
        return Configured()
    values = _values()
    given = {word.partition("=")[0].removeprefix("--") for word in typed if word.startswith("--")}
    defaults, arguments, words = dict[str, Any](), list[str](), list[str]()
    for key, value in values.items():
        parameter = options.get(key)
        if parameter is None or (key in given and key != "set"):
            continue
        texts = _texts(key, value)
        if key == "set":
            arguments += [word for text in texts for word in ("--set", text)]
        else:
            defaults[parameter.name] = texts if parameter.multiple else texts[0]
        words += [word for text in texts for word in (f"--{key}", text)]
    return Configured(defaults=defaults, arguments=tuple(arguments), words=tuple(words))


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
