"""`autopar.toml` in the working directory: what one would type again and again. The command line takes precedence."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from msgspec import Meta

from autopar.files import reading, text_of, toml_of
from autopar.files.typed import read
from autopar.planning.request import Request, Source, options_of
from autopar.planning.saved import is_plan

FILE = Path("autopar.toml")

Typed = Annotated[str | int | float, Meta(description="a text or a number, as the option takes it")]

_OPTIONS: Mapping[str, Any] = {
    **{
        option.flag_of(name)[2:]: bool if option.typed is bool else Typed
        for record in (Request, Source)
        for field, option in options_of(record).items()
        for name in option.parts or (field,)
        if field != "model"
    },
    **dict.fromkeys(("devices", "mesh"), Typed | tuple[Typed, ...] | Mapping[str, Typed]),
    "pin": Typed | tuple[Typed, ...],
    "set": Annotated[Mapping[str, Any], Meta(description="a table, such as [set] and below num_hidden_layers = 4")],
}
Options = cast(Any, TypedDict)("Options", dict(sorted(_OPTIONS.items())), total=False)
"""Options that the file may hold."""

READERS = ("plan", "fit", "compare", "simulate", "profile")
"""Commands that read it: those that are given a model and plan it."""


def configured(command: str, options: Collection[str], typed: Sequence[str]) -> list[str]:
    """What the file says for a command that has these `options` (without dashes), as it would be typed, where no option
    was; nothing for `simulate` of a saved plan, which has its own. Settings are merged. Raises ValueError for a file
    that cannot be read, and for a key that no option has."""
    if command not in READERS or not FILE.is_file() or (command == "simulate" and any(map(is_plan, typed))):
        return []
    given = {word.partition("=")[0].removeprefix("--") for word in typed if word.startswith("--")} - {"set"}
    with reading(str(FILE), "correct it, or move it away"):
        values: dict[str, Any] = read(Options, toml_of(text_of(FILE)))
    kept = {key: value for key, value in values.items() if key in options and key not in given}
    words = ((f"--{key}", text) for key, value in kept.items() for text in _texts(key, value))
    return [word for pair in words for word in pair if word]


def _texts(key: str, value: Any) -> list[str]:
    """A value as it is typed: of the table `set` and of the list `pin`, several; of a switch nothing, once if it is
    on."""
    if isinstance(value, bool):
        return [""] * value
    if key == "set":
        return [f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in value.items()]
    items = [f"{axis}={size}" for axis, size in value.items()] if isinstance(value, Mapping) else value
    texts = [str(item) for item in items] if isinstance(items, list | tuple) else [str(items)]
    return texts if key == "pin" else [",".join(texts)]
