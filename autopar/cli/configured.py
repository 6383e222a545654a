"""`autopar.toml` in the working directory: what one would type again and again. The command line takes precedence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from msgspec import Meta

from autopar.files import reading, text_of, toml_of
from autopar.files.typed import read
from autopar.planning.saved import is_plan

FILE = Path("autopar.toml")

Typed = Annotated[str | int | float, Meta(description="a text or a number, as the option takes it")]

Options = cast(Any, TypedDict)(
    "Options",
    {
        **dict.fromkeys(("batch", "cluster", "cost", "dtype", "headroom", "memory-limit", "optimizer"), Typed),
        **dict.fromkeys(("param-dtype", "reduce-dtype", "seq", "solver"), Typed),
        **dict.fromkeys(("devices", "mesh"), Typed | tuple[Typed, ...] | Mapping[str, Typed]),
        "pin": Typed | tuple[Typed, ...],
        "set": Annotated[Mapping[str, Any], Meta(description="a table, such as [set] and below num_hidden_layers = 4")],
    },
    total=False,
)
"""Options that the file may hold."""

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
    with reading(str(FILE), "correct it, or move it away"):
        values: dict[str, Any] = read(Options, toml_of(text_of(FILE)))
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


def _texts(key: str, value: Any) -> list[str]:
    """A value as it is typed: of the table `set` and of the list `pin`, several."""
    if key == "set":
        return [f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in value.items()]
    items = [f"{axis}={size}" for axis, size in value.items()] if isinstance(value, Mapping) else value
    texts = [str(item) for item in items] if isinstance(items, list | tuple) else [str(items)]
    return texts if key == "pin" else [",".join(texts)]
