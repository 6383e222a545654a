"""The joint options, on all axes, that constraints leave to each site, and the starts of descents."""

import math
from collections.abc import Iterable
from functools import cached_property
from itertools import chain, product

from autopar.passes.space.choices import KEEP, NO_POLICY, REGATHER, AxisChoice, Policy, SiteChoice
from autopar.passes.space.problem import Allowed, Assignment
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space

from .constraints import Pins


def slowest_first(space: Space) -> list[int]:
    """The axes of more than one rank."""
    links = space.redistributor.links
    wide = [axis for axis, ranks in enumerate(space.mesh) if ranks > 1]
    return sorted(wide, key=lambda axis: links[axis].bytes_per_second)


def unique_sites(space: Space) -> dict[str, Site]:
    """Name -> site; a border site of two regions appears once."""
    return {name: site for region in space.regions() for name, site in region.sites.items()}


def axis_choices(space: Space, site: Site, axis: int) -> tuple[AxisChoice, ...]:
    return site.choices[space.mesh[axis]]


def policies(site: Site, bytes_limit: float | None) -> tuple[Policy, ...]:
    """Gathering again costs time and saves memory: without a limit it never wins."""
    if site.kind != "parameter":
        return NO_POLICY
    return (KEEP,) if bytes_limit is None else (KEEP, REGATHER)


def joint(site: Site, per_axis: Iterable[Iterable[AxisChoice]], bytes_limit: float | None) -> list[SiteChoice]:
    return [SiteChoice(axes, policy) for axes in product(*per_axis) for policy in policies(site, bytes_limit)]


def taken(space: Space, assignment: Assignment, *, in_middle: bool = False) -> dict[str, list[SiteChoice]]:
    """Every choice that a site takes somewhere: once for the rest, and over all copies of a body, or in the middle one
    alone."""
    choices: dict[str, dict[SiteChoice, None]] = {}
    middles = [copies[len(copies) // 2 :][:1] for copies in assignment.copies]
    for decisions in chain([assignment.rest], *(middles if in_middle else assignment.copies)):
        for name, choice in decisions.items():
            choices.setdefault(name, {})[choice] = None
    # both ends of a run allow the same choices
    for joined in dict.fromkeys(space.twins.values()):
        union = dict.fromkeys(choice for name in joined for choice in choices.get(name, ()))
        choices.update({name: dict(union) for name in joined})
    return {name: list(of_site) for name, of_site in choices.items()}


def resting_bytes(space: Space, allowed: Allowed) -> float:
    """No plan of these options has a smaller peak: when the optimizer steps, parameters, their gradients and states lie
    side by side."""
    counts = [1, *(repeat.count for repeat in space.repeats)]
    least = 0.0
    for region, count in zip(space.regions(), counts, strict=True):
        for site in region.sites.values():
            if site.kind == "parameter":
                options = (space.option(site, choice) for choice in allowed[site.name])
                least += count * min(option.bytes for option in options if option is not None)
    return least


class Options:
    """The joint options that constraints leave to the sites of a space. Under a `bytes_limit`, parameters may be
    gathered again in backward."""

    def __init__(self, space: Space, pins: Pins | None = None, bytes_limit: float | None = None) -> None:
        self.space, self.pins, self.bytes_limit = space, pins or {}, bytes_limit
        self.sites = unique_sites(space)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many joint options each site has at most."""
        return {name: math.prod(map(len, per_axis)) for name, per_axis in self.everything().items()}

    def everything(self) -> dict[str, list[tuple[AxisChoice, ...]]]:
        """The choices of each site, axis by axis."""
        axes = range(len(self.space.mesh))
        return {name: [self.offered(site, axis) for axis in axes] for name, site in self.sites.items()}

    def offered(self, site: Site, axis: int) -> tuple[AxisChoice, ...]:
        """The choices on an axis that constraints leave to a site."""
        pinned = self.pins.get(site.name, {})
        return pinned[axis] if axis in pinned else axis_choices(self.space, site, axis)

    def _keeps(self, site: Site, choice: SiteChoice) -> bool:
        return all(choice.axes[axis] in left for axis, left in self.pins.get(site.name, {}).items())

    def keeping(self, site: Site, choices: Iterable[SiteChoice]) -> list[SiteChoice]:
        """The choices that keep the constraints on a site."""
        given = list(choices)
        kept = [c for c in given if self._keeps(site, c)]
        if not kept and site.name not in self.pins:
            raise ValueError(
                f"the preset leaves {site.kind} {site.module or site.name} none of its choices: take a solver, or "
                f"another preset"
            )
        if not kept:
            raise ValueError(
                f"no choice of {site.kind} {site.module or site.name} is both in the preset and in the constraints: "
                f"take a solver, or drop one of the constraints"
            )
        return kept

    def _pinned(self, site: Site, choice: SiteChoice) -> SiteChoice:
        """The choice, with another part on each axis where constraints forbid its own."""
        if self._keeps(site, choice):
            return choice
        pinned = self.pins[site.name]
        per_axis = [pinned.get(axis, (on_axis,)) for axis, on_axis in enumerate(choice.axes)]
        wider = [dict.fromkeys((*first, *self.offered(site, axis))) for axis, first in enumerate(per_axis)]
        for axes in chain(product(*per_axis), product(*wider)):
            if self.space.option(site, kept := SiteChoice(axes, choice.policy)) is not None:
                return kept
        raise ValueError(
            f"the constraints leave {site.kind} {site.module or site.name} no legal choice: drop one of them"
        )

    def replicated(self) -> dict[str, list[SiteChoice]]:
        """Every site replicated, as far as constraints let it."""
        return {name: [self._pinned(site, self.space.replicated(site))] for name, site in self.sites.items()}

    def free(self, site: Site, choices: Iterable[SiteChoice], axis: int) -> list[SiteChoice]:
        """The choices with one axis free."""
        freed: dict[SiteChoice, None] = {}
        allowed = policies(site, self.bytes_limit)
        for choice in choices:
            on_axes = list(choice.axes)
            for option in self.offered(site, axis):
                on_axes[axis] = option
                for policy in allowed:
                    freed[SiteChoice(tuple(on_axes), policy)] = None
        return [c for c in freed if self.space.option(site, c) is not None]
