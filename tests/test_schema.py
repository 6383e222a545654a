"""The schema of a plan's file: a plan conforms to it, and what `Plan.load` refuses does not."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_explain import planned

from autopar.planning.plan import Plan


@cache
def saved() -> str:
    return json.dumps(planned("tower").to_json())


def conforms(value: Any, rule: dict[str, Any], whole: dict[str, Any]) -> bool:
    """As JSON Schema says it, for the words that the schema uses; another word is an error of this test."""
    rule = dict(rule)
    if (name := rule.pop("$ref", None)) is not None:
        return conforms(value, whole["$defs"][name.removeprefix("#/$defs/")], whole)
    if (any_of := rule.pop("anyOf", None)) is not None:
        return any(conforms(value, one, whole) for one in any_of)
    if "const" in rule or "enum" in rule:
        return value in rule.get("enum", [rule.get("const")])
    kind = rule.pop("type")
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


FROM_BEFORE = sorted((Path(__file__).parent / "saved").glob("plan-format-2*.json"))
"""Written by earlier versions, and never again."""


@pytest.mark.parametrize("path", FROM_BEFORE, ids=lambda path: path.name)
def test_a_file_from_before_is_read(path: Path) -> None:
    """As docs/files.md promises of every file of this format. Where this fails, what changed needs a default, or
    another number of the format."""
    data, schema = json.loads(path.read_text()), Plan.schema()
    assert conforms(data, schema, schema)
    plan = Plan.load(path)
    assert not plan.is_edited
    assert within(data, json.loads(json.dumps(plan.to_json())))
    assert plan.text() and plan.text(full=True)


def within(old: Any, new: Any) -> bool:
    """Whether all of a file is in another one, which may say more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and within(value, new[name]) for name, value in old.items())
    return bool(old == new)


def test_a_field_that_is_added_within_a_format_has_a_default() -> None:
    """The least that a file of format 2 has is read, and decides the same."""
    data, schema = json.loads(FROM_BEFORE[0].read_text()), Plan.schema()
    least = {name: value for name, value in data.items() if name in schema["required"]}
    assert set(least) == {
        *("format", "model", "graph", "mesh", "cluster", "solver", "cost", "decisions", "segments", "parameters"),
        *("inputs", "optimizer", "account", "peak", "bucket_bytes", "seconds", "exposed_seconds"),
        *("objective_seconds", "lower_bound_seconds", "solve_seconds"),
    }
    read, whole = Plan.from_json(least), Plan.load(FROM_BEFORE[0])
    assert (read.decisions, read.segments, read.bucket_bytes) == (whole.decisions, whole.segments, whole.bucket_bytes)
