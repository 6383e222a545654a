"""Pipelines: plans whose mesh has an axis of stages."""

from __future__ import annotations

from autopar.passes.space.choices import REPLICATED, AxisChoice, SiteChoice
from autopar.passes.space.sites import Site, joined_sites

from .constraints import Pins
from .options import policies
from .presets.axis import data
from .presets.context import Context

TIME = 0
"""The axis of a mesh that lies in time."""


def time_pins(context: Context) -> Pins:
    """What sites may choose on the axis in time: micro-batches split the batch wherever it can be split. What depends on
    no parameter may be computed of the whole batch, of which a micro-batch takes its part."""
    space = context.space
    trained = set(space.graph.parameters.values())
    for node in space.graph.nodes:
        if not trained.isdisjoint(node.inputs):
            trained.update(filter(None, node.outputs))
    joined = joined_sites(space.regions(), space.twins)

    def is_legal(site: Site, choice: AxisChoice) -> bool:
        axes = (choice, *(REPLICATED for _ in space.mesh[1:]))
        return all(
            any(space.option(at, SiteChoice(axes, policy)) is not None for policy in policies(at, None))
            for at in joined[site.name]
        )

    def left(site: Site) -> tuple[AxisChoice, ...]:
        if site.kind == "input":  # a rank has the whole batch, and takes the part of a micro-batch where it reads it
            return (REPLICATED,)
        legal = tuple(c for c in data(context, site, TIME) if is_legal(site, c))
        is_free = site.kind == "op" and trained.isdisjoint(site.makes)
        return tuple(dict.fromkeys((*legal, REPLICATED))) if is_free or not legal else legal

    return {name: {TIME: left(site)} for name, site in context.sites.items()}
