"""Files that people give: text, JSON, and dataclasses of it, read so that whatever is wrong is one ValueError."""

import json
import math
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST = 2**63 - 1
"""The largest integer that files may hold; the smallest is 0."""


def text_of(path: str | Path, what: str, give: str) -> str:
    """The text of a file. `what` names it in errors ("cluster file x"), and `give` says what to give instead."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{what}: cannot be read ({'Is a directory' if path.is_dir() else 'no file'}); {give}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what}: cannot be read ({error.strerror}); {give}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: is no text in UTF-8 ({error.reason} at byte {error.start}); {give}") from error


def json_of(text: str, what: str, give: str) -> Any:
    """The value of a JSON text; errors as for `text_of`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what}: it is not JSON ({error}); {give}") from error
    except RecursionError as error:
        raise ValueError(f"{what}: its JSON is nested too deep; {give}") from error


def record(kind: type[T], data: Any, where: str = "") -> T:
    """A dataclass of what JSON or a database holds, each field of the type that it is annotated with: text, truth
    values, integers from 0 to `MOST`, numbers, words of a `Literal`, tuples (JSON's lists), mappings, and dataclasses
    of these.

    Raises ValueError that names the first field that is missing, unknown, or of another type. `where` says where the
    dataclass is.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where or 'it'} is {_shown(data)}: a table of {kind.__name__}")
    types_of = _types(cast(Hashable, kind))
    prefix = f"{where}." if where else ""
    if unknown := [name for name in data if name not in types_of]:
        raise ValueError(f"{prefix}{cut(unknown[0])} is unknown; the fields here are {', '.join(types_of)}")
    values = {}
    for name, (annotation, required) in types_of.items():
        if name in data:
            values[name] = _value(annotation, data[name], prefix + name)
        elif required:
            raise ValueError(f"{prefix}{name} is missing")
    return kind(**values)


@cache
def _types(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Field of a dataclass -> its annotation, and whether it must be given."""
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind)}


def _value(annotation: Any, value: Any, where: str) -> Any:
    if annotation in _PLAIN:
        is_valid, meaning = _PLAIN[annotation]
        if not is_valid(value):
            raise ValueError(f"{where} is {_shown(value)}: {meaning}")
        return value
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else _value(inner[0], value, where)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{where} is {_shown(value)}: one of {', '.join(inner)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is {_shown(value)}: a list")
        each = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(each) != len(value):
            raise ValueError(f"{where} has {len(value)} items: {len(each)} belong there")
        return tuple(_value(one, item, f"{where}[{n}]") for n, (one, item) in enumerate(zip(each, value, strict=True)))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {_shown(value)}: a table")
        key, item = inner
        return {_value(key, k, f"a key of {where}"): _value(item, v, f"{where}[{_shown(k)}]") for k, v in value.items()}
    return record(annotation, value, where)


def is_number(value: Any) -> bool:
    """An integer or a floating number that is not NaN; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer beyond floating numbers
        return False


_PLAIN: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: isinstance(value, str), "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST,
        f"an integer, at least 0 and at most {MOST}",
    ),
    float: (is_number, "a number"),
}


def _shown(value: Any) -> str:
    """A value, cut if it is long; of what holds others, its type."""
    if isinstance(value, list | tuple | Mapping):
        return "a table" if isinstance(value, Mapping) else "a list"
    if isinstance(value, int) and abs(value) > MOST:
        return "an integer beyond 64 bits"
    return cut(repr(value))


def cut(text: str) -> str:
    """A text short enough for an error."""
    return text if len(text) <= 120 else text[:117] + "..."
