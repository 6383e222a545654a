"""Rows of placements: parameters that live alike, of layers that are equal, stand on one row with their count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..record import ParameterPlan, Record
from .words import input_words, parameter_words

MOST_ROWS = 24
"""Rows of a page; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Parameters of one module, or of `count` modules whose names differ in numbers, that live alike: the ends of their
    names, and where they live in words."""

    module: str
    count: int
    names: tuple[str, ...]
    words: str


@dataclass(slots=True)
class _Group:
    names: dict[str, int] = field(default_factory=dict)
    """End of a name -> how many parameters have it."""


def parameter_rows(parameters: Mapping[str, ParameterPlan], axes: tuple[str, ...]) -> list[Row]:
    """In the order of the model."""
    groups: dict[tuple[str, str], _Group] = {}
    for name, plan in parameters.items():
        module, end = _split(name)
        group = groups.setdefault((module, parameter_words(plan, axes)), _Group())
        group.names[end] = group.names.get(end, 0) + 1
    rows: list[Row] = []
    for (module, words), group in groups.items():
        for count in dict.fromkeys(group.names.values()):
            names = tuple(end for end, number in group.names.items() if number == count)
            rows.append(Row(module=module, count=count, names=_shortened(names), words=words))
    return _in_order(rows, list(parameters))


def _in_order(rows: list[Row], parameters: list[str]) -> list[Row]:
    """Rows in the order in which the model has them, those of one repeated module together."""
    first: dict[str, int] = {}
    for place, name in enumerate(parameters):
        module, end = _split(name)
        first.setdefault(module or f".{end}", place)
    return sorted(rows, key=lambda row: first.get(row.module) or first.get(f".{row.names[0]}", 0))


def _split(name: str) -> tuple[str, str]:
    """Of "model.layers.7.mlp.up_proj.weight": "model.layers.*" and "mlp.up_proj"; what is not in a numbered layer
    belongs to the module ""."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    last = max((i for i, part in enumerate(parts) if part == "*"), default=-1)
    end = [part for part in parts[last + 1 :] if part != "weight"] or parts[-1:]
    return ".".join(parts[: last + 1]), ".".join(end)


def _shortened(names: tuple[str, ...]) -> tuple[str, ...]:
    """A layer with its bias is one name: "fc" for "fc, fc.bias"."""
    return tuple(name for name in names if not (name.endswith("bias") and _weight_of(name) in names))


def _weight_of(bias: str) -> str:
    """What the weight beside a bias is called: "fc" for "fc.bias"."""
    return "weight" if bias == "bias" else bias.removesuffix(".bias") if bias.endswith(".bias") else ""


def joined(names: tuple[str, ...]) -> str:
    """Names with commas between; what a name shares with the one before it is left out: "attn.q, k, v, mlp.up"."""
    told, before = [], ""
    for name in names:
        module, _, end = name.rpartition(".")
        told.append(end if module and module == before else name)
        before = module
    return ", ".join(told)


def input_rows(plan: Record) -> list[tuple[str, str]]:
    """Inputs that arrive alike, and how."""
    shapes = plan.provenance.inputs if plan.provenance is not None else {}
    told: dict[str, list[str]] = {}
    for name, placements in plan.inputs.items():
        short = name.removeprefix("kwargs.")
        short = re.sub(r"^args\.(\d+)$", r"input \1", short)
        words = input_words(placements, tuple(plan.mesh), shapes.get(name.removeprefix("kwargs."), ""))
        told.setdefault(words, []).append(short)
    return [(", ".join(names), words) for words, names in told.items()]
