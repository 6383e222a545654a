"""Types of what files hold, with their ranges and their meanings; how a value of one is read; and its JSON Schema.

A file's type is a dataclass or a TypedDict: of texts, truth values, numbers, words of a `Literal`, tuples, mappings,
and such types again. msgspec reads it by its annotations. Here, what it refuses becomes one sentence, which ends with
`Meta.description`; a rule that ranges cannot say is a function, `Meta(extra={"rule": ...})`.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from msgspec import ValidationError, convert
from msgspec.json import schema_components

from autopar.extensions import nearest

from . import cut
from .kinds import MOST, NEEDED_IN_FILES, NOT_IN_FILES

T = TypeVar("T")


def read(kind: type[T], data: Any, where: str = "") -> T:
    """A value of a type, from what JSON, TOML or a database holds. Raises ValueError for a part that is unknown,
    missing or wrong, with its place below `where`, its value, and what may stand there."""
    for fault in _faults(kind, data, where):
        raise ValueError(fault)
    return convert(data, kind)


def schema(kind: type, **more: Any) -> dict[str, Any]:
    """JSON Schema of a dataclass that may have `more` properties; dataclasses that it holds are under `$defs`, by their
    names."""
    _, named = schema_components([kind], ref_template="#/$defs/{name}")
    for table in named.values():
        table["additionalProperties"] = False
    whole = named.pop(kind.__name__)
    whole["properties"] = {**more, **whole["properties"]}
    whole |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": named}
    return json.loads(json.dumps(whole))  # type: ignore[no-any-return]


def allowed(kind: Any) -> str:
    """What may stand where a value of a type belongs."""
    inner = get_args(kind)
    for meta in reversed(getattr(kind, "__metadata__", ())):
        if meta.description:
            return str(meta.description)
    if _is_union(kind):
        return ", or ".join(allowed(member) for member in inner if member is not types.NoneType)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if get_origin(kind) is tuple:
        return "a list" if ... in inner else f"a list of {len(inner)}"
    return f"a table of {', '.join(_fields(kind))}" if _is_table(kind) else _PLAIN.get(kind, "a table")


_PLAIN: Mapping[Any, str] = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


def _faults(kind: Any, data: Any, where: str) -> Iterator[str]:
    """What is wrong with a value, in sentences: its parts come before itself."""
    inner, rule = kind, None
    if get_origin(kind) is Annotated:
        inner = kind.__origin__
        rule = next((meta.extra["rule"] for meta in kind.__metadata__ if meta.extra), None)
    yield from _faults_of_parts(inner, data, where)
    try:
        value = convert(data, kind)
    except ValidationError as error:
        because = error.__cause__
    else:
        if not _is_nan(value) and (rule is None or rule(value)):
            return
        because = None
    if isinstance(because, ValueError):
        yield f"{_prefix(where)}{because}"
    of_words = get_origin(inner) is Literal and isinstance(data, str)
    near = nearest(data, map(str, get_args(inner))) if of_words else ""
    yield f"{where or 'it'} is {shown(data)}{near}: {allowed(kind)}"


def _prefix(where: str) -> str:
    return f"{where}." if where else ""


def _faults_of_parts(inner: Any, data: Any, where: str) -> Iterator[str]:
    members, prefix = get_args(inner), _prefix(where)
    if _is_union(inner):
        there = [member for member in members if member is not types.NoneType]
        fitting = [member for member in there if _holds(member, data)] or there[: len(there) == 1]
        for member in fitting if data is not None else ():
            yield from _faults(member, data, where)
    elif _is_table(inner) and isinstance(data, Mapping):
        table = _fields(inner)
        for name in data:
            if name not in table:
                near = nearest(str(name), table)
                yield f"{prefix}{cut(str(name))} is unknown{near}; the fields here are {', '.join(table)}"
        for name, (part, is_required) in table.items():
            if name in data:
                yield from _faults(part, data[name], prefix + name)
            elif is_required:
                yield f"{prefix}{name} is missing: {allowed(part)}"
    elif _holds(inner, data):
        if isinstance(data, Mapping):
            places = [(members[1], f"{where}[{_SHORT.repr(key)}]", item) for key, item in data.items()]
            places += [(members[0], f"a key of {where}", key) for key in data]
        else:
            parts = members[:1] * len(data) if ... in members else members
            places = [(part, f"{where}[{n}]", item) for n, (part, item) in enumerate(zip(parts, data, strict=False))]
        for part, place, item in places:
            yield from _faults(part, item, place)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _is_table(kind: Any) -> bool:
    return is_dataclass(kind) or is_typeddict(kind)


def _holds(kind: Any, data: Any) -> bool:
    """Whether a value has the form of a type that holds others."""
    kind = kind.__origin__ if get_origin(kind) is Annotated else kind
    if isinstance(data, Mapping):
        return _is_table(kind) or get_origin(kind) is Mapping
    return get_origin(kind) is tuple and isinstance(data, list | tuple)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Field of a table -> its type, and whether it must be given."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        return {name: (hint, name in kind.__required_keys__) for name, hint in hints.items()}
    return {
        f.name: (hints[f.name], f.metadata == NEEDED_IN_FILES or f.default is f.default_factory)  # both are missing
        for f in fields(kind)
        if f.metadata != NOT_IN_FILES
    }


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """A value, cut if it is long."""
    return "an integer beyond 64 bits" if isinstance(value, int) and abs(value) > MOST else _SHORT.repr(value)
