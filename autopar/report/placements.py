"""Rows of placements: parameters that live alike, of layers that are equal, stand on one row with their count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planning.plan import ParameterPlan, Plan
from autopar.planning.texts import starred, together

from .words import input_words, parameter_words

MOST_ROWS = 24
"""Rows of a page; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow:
    """Parameters of one module, or of `count` modules whose names differ in numbers, that live alike: the ends of their
    names, and where they live in words."""

    module: str
    count: int
    names: tuple[str, ...]
    words: str


def parameter_rows(parameters: Mapping[str, ParameterPlan], axes: tuple[str, ...]) -> list[PlacementRow]:
    """In the order of the model, rows of one repeated module together."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, plan in parameters.items():
        module, end = _split(name)
        groups.setdefault((starred(module), parameter_words(plan, axes)), {}).setdefault(end, []).append(name)
    found: list[tuple[int, PlacementRow]] = []
    places = {name: place for place, name in enumerate(parameters)}
    first: dict[str, int] = {}
    for (_, words), names in groups.items():
        for count in dict.fromkeys(map(len, names.values())):
            ends = [end for end, every in names.items() if len(every) == count]
            layers = [_split(name)[0] for name in names[ends[0]]]
            module = _called(layers)
            place = min(places[names[end][0]] for end in ends)
            first[module] = min(place, first.get(module, place))
            found.append((place, PlacementRow(module=module, count=count, names=_shortened(tuple(ends)), words=words)))
    return [row for place, row in sorted(found, key=lambda one: first[one[1].module] if one[1].module else one[0])]


def _called(layers: list[str]) -> str:
    """What equal modules are called; one that differs has the name of those that it is one of."""
    return together(layers) if starred(layers[0]).startswith("*") else starred(layers[0])


def _split(name: str) -> tuple[str, str]:
    """Of "model.layers.7.mlp.up_proj.weight": "model.layers.7" and "mlp.up_proj"; what is not in a numbered layer
    belongs to the module ""."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts[:-1]) if part.isdigit()), default=-1)
    end = [part for part in parts[last + 1 :] if part != "weight"] or parts[-1:]
    return ".".join(parts[: last + 1]), starred(".".join(end))


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


def input_rows(plan: Plan) -> list[tuple[str, str]]:
    """Inputs that arrive alike, and how."""
    shapes = plan.provenance.inputs if plan.provenance is not None else {}
    told: dict[str, list[str]] = {}
    for name, placements in plan.inputs.items():
        short = name.removeprefix("kwargs.")
        short = re.sub(r"^args\.(\d+)$", r"input \1", short)
        words = input_words(placements, tuple(plan.mesh), shapes.get(name.removeprefix("kwargs."), ""))
        told.setdefault(words, []).append(short)
    return [(", ".join(names), words) for words, names in told.items()]
