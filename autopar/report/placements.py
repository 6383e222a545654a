"""Rows of placements: parameters that live alike, of layers that are equal, stand on one row with their count."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.planning.plan import Plan
from autopar.planning.texts import called, grouped, layer_of, module_of, starred

from .words import input_words, parameter_words

W = TypeVar("W", bound=Hashable)

MOST_ROWS = 24
"""Rows of a page; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow(Generic[W]):
    """Parameters of the module `layers`, or of several whose names differ in numbers, that live alike: the ends of
    their names, and where they live in words. All these modules together are called `module`."""

    module: str
    layers: tuple[str, ...]
    names: tuple[str, ...]
    words: W

    @property
    def count(self) -> int:
        return len(self.layers)


def words_of(plan: Plan) -> dict[str, str]:
    """Where each parameter lives, in words."""
    return {name: parameter_words(placed, tuple(plan.mesh)) for name, placed in plan.parameters.items()}


def placement_rows(words: Mapping[str, W]) -> list[PlacementRow[W]]:
    """Parameters by what is said of them, in the order of the model, rows of one repeated module together."""
    split = {name: _split(name) for name in words}
    groups = grouped(((starred(split[name][0]), said), name) for name, said in words.items())
    found: list[tuple[int, PlacementRow[W]]] = []
    places = {name: place for place, name in enumerate(words)}
    first: dict[str, int] = {}
    for (_, said), alike in groups.items():
        names = grouped((split[name][1], name) for name in alike)
        for ends in grouped((len(every), end) for end, every in names.items()).values():
            layers = tuple(split[name][0] for name in names[ends[0]])
            module = called(layers)
            place = min(places[names[end][0]] for end in ends)
            first[module] = min(place, first.get(module, place))
            row = PlacementRow(module=module, layers=layers, names=tuple(ends), words=said)
            found.append((place, row))
    return [row for place, row in sorted(found, key=lambda one: first[one[1].module] if one[1].module else one[0])]


def _split(name: str) -> tuple[str, str]:
    """Of "model.layers.7.mlp.up_proj.weight": "model.layers.7" and "mlp.up_proj"; what is not in a numbered layer
    belongs to the module ""."""
    layer = layer_of(module_of(name))
    parts = name.removeprefix(f"{layer}.").split(".")
    return layer, starred(".".join([part for part in parts if part != "weight"] or parts[-1:]))


def shortened(names: tuple[str, ...]) -> tuple[str, ...]:
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
    shorter = {name: name.removeprefix("kwargs.") for name in plan.inputs}
    told = grouped(
        (
            input_words(placements, tuple(plan.mesh), shapes.get(shorter[name], "")),
            re.sub(r"^args\.(\d+)$", r"input \1", shorter[name]),
        )
        for name, placements in plan.inputs.items()
    )
    return [(", ".join(names), words) for words, names in told.items()]
