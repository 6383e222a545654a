"""The schema of a plan's file: a plan conforms to it, and what `Plan.load` refuses does not."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from test_explain import planned

from autopar.planning.plan import Plan


@cache
def saved() -> str:
    return json.dumps(planned("tower").to_json())


def conforms(value: Any, rule: dict[str, Any], whole: dict[str, Any]) -> bool:
    """As JSON Schema says it, for the words that the schema uses; another word is an error of this test."""
    rule = {word: said for word, said in rule.items() if word not in ("default", "description")}
    if (name := rule.pop("$ref", None)) is not None:
        return conforms(value, whole["$defs"][name.removeprefix("#/$defs/")], whole)
    if (any_of := rule.pop("anyOf", None)) is not None:
        return any(conforms(value, one, whole) for one in any_of)
    if "const" in rule or "enum" in rule:
        return value in rule.get("enum", [rule.get("const")])
    kind = rule.pop("type")
    if isinstance(kind, list):
        return any(conforms(value, {**rule, "type": one}, whole) for one in kind)
    types = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "null": type(None)}
    if kind in types:
        rule.pop("minimum", None), rule.pop("maximum", None)
        assert not rule
        return isinstance(value, types[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if kind == "array":
        each = rule.get("prefixItems") or [rule["items"]] * len(value)
        assert rule.keys() <= {"items", "prefixItems", "minItems", "maxItems"}
        pairs = isinstance(value, list) and len(value) == len(each)
        return pairs and all(conforms(item, one, whole) for item, one in zip(value, each, strict=True))
    assert kind == "object" and rule.keys() <= {
        "properties", "required", "additionalProperties", "$defs", "$schema", "title",
    }  # fmt: skip
    known, more = rule.get("properties", {}), rule["additionalProperties"]
    if not isinstance(value, dict) or not value.keys() >= set(rule.get("required", ())):
        return False
    if more is False and not value.keys() <= known.keys():
        return False
    return all(conforms(item, known.get(key, more), whole) for key, item in value.items())


def test_a_plan_conforms_to_its_schema() -> None:
    schema = Plan.schema()
    assert json.loads(json.dumps(schema)) == schema
    assert conforms(json.loads(saved()), schema, schema)


@pytest.mark.parametrize(
    "path", ["model", "peak.bytes_", "segments.0.runs.0.count", "mesh.dp", "parameters.head.weight"]
)
def test_what_a_file_may_not_say_does_not_conform(path: str) -> None:
    data, schema = copy.deepcopy(json.loads(saved())), Plan.schema()
    *way, last = ["parameters", "head.weight"] if path.startswith("parameters") else path.split(".")
    at = data
    for part in way:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[last] = [0.5]
    assert not conforms(data, schema, schema)
    with pytest.raises(ValueError, match="is no plan"):
        Plan.from_json(data)


def test_fields_without_a_default_are_required() -> None:
    data, schema = json.loads(saved()), Plan.schema()
    for name in ("format", "model", "decisions"):
        assert name in schema["required"]
        assert not conforms({key: value for key, value in data.items() if key != name}, schema, schema)
