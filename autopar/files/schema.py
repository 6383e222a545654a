"""JSON Schema of the files that `record` reads, generated from the same types."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from . import MOST

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PLAIN: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0, "maximum": MOST},
    float: {"type": "number"},
}


def schema(kind: type) -> dict[str, Any]:
    """Of a dataclass; those that it holds are under `$defs`, by their names."""
    defined: dict[str, Any] = {}
    whole = _table(kind, defined)
    return {"$schema": DIALECT, "title": kind.__name__, **whole, "$defs": dict(sorted(defined.items()))}


def _table(kind: Any, defined: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return {
        "type": "object",
        "properties": {field.name: _of(hints[field.name], defined) for field in fields(kind)},
        "required": needed,
        "additionalProperties": False,
    }


def _of(annotation: Any, defined: dict[str, Any]) -> dict[str, Any]:
    if annotation in _PLAIN:
        return dict(_PLAIN[annotation])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):  # X | None
        return {"anyOf": [_of(inner[0], defined), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return {"type": "array", "items": _of(inner[0], defined)}
        items = [_of(one, defined) for one in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of(inner[1], defined)}
    assert isinstance(annotation, type) and is_dataclass(annotation), annotation
    name = annotation.__name__
    if name not in defined:
        defined[name] = {}  # it may hold itself
        defined[name] = _table(annotation, defined)
    return {"$ref": f"#/$defs/{name}"}
