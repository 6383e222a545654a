"""Spaces with other choices of parameters at rest: in which they stay where they are, or lie inside of other splits."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product

from autopar.ir.layout import Layout, describe

from .choices import KEEP, REGATHER, REPLICATED, AxisChoice, SiteChoice
from .sites import Site
from .space import Space


def held(space: Space, layouts: Mapping[str, Collection[Layout]]) -> Space:
    """The space in which parameters, by the names of their sites, take no other layouts at rest than these.

    Raises ValueError for one that is none of a parameter's own.
    """

    def changed(site: Site) -> Site:
        return _held(space, site, layouts[site.name]) if site.kind == "parameter" else site

    return space.with_sites(changed)


def nested(space: Space) -> Space:
    """The space in which a dim of a parameter may rest split by an axis inside of what another axis gives a rank, as
    FSDP shards what tensor parallelism has split."""
    return space.with_sites(lambda site: replace(site, choices=nested_choices(space, site)))


def nested_choices(space: Space, site: Site) -> Mapping[int, tuple[AxisChoice, ...]]:
    """A site's choices by the size of an axis, in that space."""
    if site.kind != "parameter" or site.meta is None:
        return site.choices
    inside = {
        ranks: [
            AxisChoice("S", dim, size // n)
            for dim, size in enumerate(site.meta.shape)
            for n in {n for n in space.mesh if n > 1}
            if size % (n * ranks) == 0
        ]
        for ranks in site.choices
        if ranks > 1
    }
    return {ranks: tuple(dict.fromkeys((*here, *inside.get(ranks, ())))) for ranks, here in site.choices.items()}


def _held(space: Space, site: Site, layouts: Collection[Layout]) -> Site:
    assert site.meta is not None
    # also those that it would not take of itself, as where every copy of a layer reads it
    every = (REPLICATED, *(AxisChoice("S", dim, size) for dim, size in enumerate(site.meta.shape) if size > 1))
    choices = nested_choices(space, site)
    per_axis = [tuple(dict.fromkeys((*every, *choices[ranks]))) for ranks in space.mesh]
    choices_of: dict[Layout, list[SiteChoice]] = {layout: [] for layout in layouts}
    for axes in product(*per_axis):
        for policy in (KEEP, REGATHER):
            option = space.option(site, SiteChoice(axes, policy))
            if option is not None and option.makes[0] in choices_of:
                choices_of[option.makes[0]].append(option.choice)
    if missing := [layout for layout, choices in choices_of.items() if not choices]:
        raise ValueError(f"parameter {site.module} cannot be {describe(missing[0], space.axes)} at rest")
    kept = tuple(choice for choices in choices_of.values() for choice in choices)
    on_axes = {
        ranks: tuple(dict.fromkeys(c.axes[axis] for c in kept for axis, n in enumerate(space.mesh) if n == ranks))
        for ranks in set(space.mesh)
    }
    return replace(site, held=kept, choices=on_axes)
