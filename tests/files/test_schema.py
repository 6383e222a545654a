"""Files are read by their types. A plan's JSON Schema is made of them: what `Plan.load` refuses does not conform."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta
from tower import planned

from autopar.files.kinds import NEEDED_IN_FILES, NOT_IN_FILES, Name, Rate, Size
from autopar.files.typed import read
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


FROM_BEFORE = sorted((Path(__file__).parents[1] / "saved").glob("plan-format-2*.json"))
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


def ascends(points: tuple[float, ...]) -> bool:
    return list(points) == sorted(points)


@dataclass(frozen=True, kw_only=True)
class Port:
    kind: Literal["copper", "glass"]
    rate: Rate | tuple[Rate, ...]
    lanes: Size = 1

    def __post_init__(self) -> None:
        if self.kind == "copper" and self.lanes > 4:
            raise ValueError(f"lanes is {self.lanes}: at most 4 of copper")


@dataclass(frozen=True, kw_only=True)
class Switch:
    name: Name
    ports: Mapping[str, Port]
    curve: Annotated[tuple[float, ...], Meta(description="a list that ascends", extra={"rule": ascends})] = ()
    place: tuple[int, int] | None = None
    label: str = field(default="", metadata=NEEDED_IN_FILES)
    heat: float = field(default=0.0, metadata=NOT_IN_FILES)


GOOD = {
    "name": "s",
    "label": "",
    "ports": {"a.b": {"kind": "glass", "rate": [1, 2.5]}},
    "curve": [1, 2],
    "place": [0, 1],
}


def test_a_value_is_read_by_its_type() -> None:
    port = Port(kind="glass", rate=(1.0, 2.5))
    assert read(Switch, GOOD) == Switch(name="s", ports={"a.b": port}, curve=(1.0, 2.0), place=(0, 1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nam": 1}, "nam is unknown (did you mean 'name'?); the fields here are name, ports, curve, place, label"),
        ({"heat": 1.0}, "heat is unknown; the fields"),
        ({"name": " "}, "name is ' ': a text that is not empty"),
        ({"label": None}, "label is None: a text"),
        ({"ports": [1]}, "ports is [1]: a table"),
        (
            {"ports": {"x": {"kind": "glas", "rate": 1}}},
            "ports['x'].kind is 'glas' (did you mean 'glass'?): one of",
        ),
        ({"ports": {"x": {"kind": "glass"}}}, "ports['x'].rate is missing: a number above 0, or a list"),
        ({"ports": {"x": {"kind": "glass", "rate": -1}}}, "ports['x'].rate is -1: a number above 0, or a list"),
        ({"ports": {"x": {"kind": "glass", "rate": [1, 0]}}}, "ports['x'].rate[1] is 0: a number above 0"),
        (
            {"ports": {"x": {"kind": "glass", "rate": 1, "lanes": 2**63}}},
            "lanes is an integer beyond 64 bits",
        ),
        ({"ports": {"x": {"kind": "copper", "rate": 1, "lanes": 8}}}, "ports['x'].lanes is 8: at most 4 of copper"),
        ({"curve": [2, 1]}, "curve is [2, 1]: a list that ascends"),
        ({"curve": [float("nan")]}, "curve[0] is nan: a number"),
        ({"place": [1]}, "place is [1]: a list of 2"),
        ({"place": [1, True]}, "place[1] is True: an integer"),
    ],
)
def test_the_innermost_fault_is_said_with_its_place_and_its_value(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read(Switch, {**GOOD, **change})


def test_a_field_with_a_default_may_be_one_that_files_must_give() -> None:
    with pytest.raises(ValueError, match="label is missing: a text"):
        read(Switch, {name: value for name, value in GOOD.items() if name != "label"})
