"""The space: all sites of a graph on a mesh.

Data parallel, FSDP, tensor, sequence and vocabulary parallel plans and their combinations are points of this space;
nothing in it is special to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from autopar.ir.graph import JointGraph
from autopar.ir.layout import Layout, describe
from autopar.passes.segments.segment import Repeated, Segments

from .choices import KEEP, REGATHER, REPLICATED, AxisChoice, SiteChoice
from .collapse import Roots
from .gradients import gradients_of
from .making import Making
from .options import OPTION
from .setting import Setting
from .sites import Option, Region, Site


@dataclass(frozen=True, kw_only=True, eq=False)
class Space(Setting):
    """All sites of a graph on a mesh: the rest, and for each repeated segment one body.

    In the rest, each repeat appears as its border sites only: `rest_borders[r]` names (left, right).
    """

    graph: JointGraph
    axes: tuple[str, ...]
    roots: Roots
    rest: Region
    bodies: tuple[Region, ...]
    segments: Segments
    rest_borders: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    without_rule: Mapping[str, int]
    """Op -> how many nodes have no rule and are replicated."""
    without_rule_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Op -> the modules of those nodes, as paths, those of several layers as one with "*" for the number."""

    @cached_property
    def making(self) -> Making:
        """How values that depend on nothing are made where they are read."""
        return Making(self, (site for region in self.regions() for site in region.sites.values()))

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Gradients of parameters up to their reduction, where that is less frequent, or in a dtype of its own."""
        return gradients_of(self.regions()) if self.has_own_reductions else frozenset()

    @property
    def repeats(self) -> tuple[Repeated, ...]:
        return self.segments.repeats

    def regions(self) -> Iterator[Region]:
        yield self.rest
        yield from self.bodies

    def option(self, site: Site, choice: SiteChoice) -> Option | None:
        """What a choice means, or None if it is not legal."""
        if site.held and choice not in site.held:
            return None
        options = self.memo.options.setdefault(site.key, {})
        if choice not in options:
            options[choice] = OPTION[site.kind](self, site, choice)
        return options[choice]

    def decided(self, site: Site, choice: SiteChoice) -> Option:
        """What a choice means. Raises ValueError if it is not legal."""
        option = self.option(site, choice)
        if option is None:
            raise ValueError(f"{site.kind} {site.name} ({site.module}) cannot take {choice}")
        return option

    def replicated(self, site: Site) -> SiteChoice:
        """The choice that is always legal: everything replicated, or where it is held."""
        if site.held:
            return site.held[0]
        return SiteChoice((REPLICATED,) * len(self.mesh), KEEP if site.kind == "parameter" else "")

    def with_sites(self, changed: Callable[[Site], Site]) -> Space:
        """The space with each site changed so."""

        def of(region: Region) -> Region:
            return replace(region, sites={name: changed(site) for name, site in region.sites.items()})

        return replace(self, rest=of(self.rest), bodies=tuple(map(of, self.bodies)))


def held(space: Space, layouts: Mapping[str, Collection[Layout]]) -> Space:
    """The space in which parameters, by the names of their sites, take no other layouts at rest than these.

    Raises ValueError for one that is none of a parameter's own.
    """

    def changed(site: Site) -> Site:
        return _held(space, site, layouts[site.name]) if site.kind == "parameter" else site

    return space.with_sites(changed)


def _held(space: Space, site: Site, layouts: Collection[Layout]) -> Site:
    assert site.meta is not None
    # also those that it would not take of itself, as where every copy of a layer reads it
    every = (REPLICATED, *(AxisChoice("S", dim, size) for dim, size in enumerate(site.meta.shape) if size > 1))
    per_axis = [tuple(dict.fromkeys((*every, *site.choices[ranks]))) for ranks in space.mesh]
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
