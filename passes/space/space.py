"""The space: all sites of a graph on a mesh.

Data parallel, FSDP, tensor, sequence and vocabulary parallel plans and their combinations are points of this space;
nothing in it is special to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from autopar.ir.graph import JointGraph, TensorMeta
from autopar.ir.layout import Layout

from .choices import KEEP, REPLICATED, SiteChoice
from .collapse import Roots
from .items import Item
from .options import OPTION
from .setting import Setting
from .sites import Option, Region, Site


class Making:
    """Values that are made where they are read: here there are none."""

    sites: Mapping[str, Site] = MappingProxyType({})
    """Root -> the operator that makes it."""

    def option(self, root: str, layout: Layout) -> Option | None:
        """The option that makes a root in this layout; None where it is made in full, and cut."""
        raise KeyError(root)

    def seconds(self, root: str, layouts: Iterable[Layout]) -> float:
        """Seconds of having a root in all these layouts, made from nothing."""
        raise KeyError(root)


@dataclass(frozen=True, kw_only=True, eq=False)
class Space(Setting):
    """All sites of a graph on a mesh: the rest, and for each repeated segment one body (`layers`).

    In the rest, each repeat appears as its border sites only: `rest_borders[r]` names (left, right).
    """

    graph: JointGraph
    axes: tuple[str, ...]
    roots: Roots
    rest: Region
    bodies: tuple[Region, ...] = ()
    rest_borders: tuple[tuple[tuple[str, ...], ...], ...] = ()
    without_rule_in: Mapping[str, Sequence[str]]
    """Op that has no rule and is replicated -> the modules of its nodes, as paths."""

    @property
    def repeats(self) -> Sequence[Any]:
        """What each body stands for; of each its `name`, its `count` and its `copies`."""
        return ()

    @property
    def twins(self) -> Mapping[str, tuple[str, ...]]:
        """Names of border sites -> the names of all that take the same options."""
        return {}

    @property
    def making(self) -> Making:
        """How values are made that are made where they are read: here there are none."""
        return Making()

    @property
    def gradients(self) -> frozenset[str]:
        """Gradients of parameters up to their reduction, where that is less frequent, or in a dtype of its own."""
        return frozenset()

    @property
    def travels(self) -> Mapping[str, TensorMeta]:
        """Root that travels in another dtype than its own -> what travels of it."""
        return {}

    def travel_items(self, moved: Any, phases: Sequence[Sequence[Any]]) -> Iterable[Item]:
        """The items, beside its routes, of such a root (`tensors.MovedKind`), of which each layout is acquired so
        often."""
        return ()

    def names(self, repeat: int, copy: int) -> Mapping[str, str]:
        """Names of the first copy of a repeat -> those of another copy."""
        raise IndexError(repeat)

    @property
    def without_rule(self) -> Mapping[str, int]:
        """Op -> how many nodes have no rule and are replicated."""
        return {op: len(modules) for op, modules in self.without_rule_in.items()}

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

    def with_sites(self, changed: Callable[[Site], Site]) -> Self:
        """The space with each site changed so."""

        def of(region: Region) -> Region:
            return replace(region, sites={name: changed(site) for name, site in region.sites.items()})

        return replace(self, rest=of(self.rest), bodies=tuple(map(of, self.bodies)))
