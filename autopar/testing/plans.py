"""Random points of a search space, to test what is claimed of every plan."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product

from autopar.ir.layout import Layout
from autopar.passes.space.choices import KEEP, NO_POLICY, PASSES_PARTIAL, REGATHER, REPLICATED, SiteChoice
from autopar.passes.space.layers import border_name
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import Option, Region, Site
from autopar.passes.space.space import Space

TRIED = 12
"""Options of a site that are tried before it is left unsplit."""

QUIET = 0.7
"""How often a site looks for an option that reads everything as it is laid out."""

DRAWS = 5
"""Draws before borders pass on no partial sums, and rows do not travel to their experts: not everything can make
the one, or read the other."""

Wanted = Callable[[Site], Sequence[SiteChoice] | None]


def random_assignment(
    space: Space, seed: int, wanted: Wanted = lambda site: None, *, alike: bool = False
) -> Assignment:
    """A random feasible assignment, in which the copies of a repeat differ, unless they are `alike`. Every option of
    every site can come up; mostly those that need no redistribution, so that digits travel some way. `wanted` may leave
    a site no others than the given ones.

    Raises ValueError where no draw of this seed is feasible."""
    generator = random.Random(seed)
    for draw in range(DRAWS + 1):
        plain = draw == DRAWS
        limited = partial(_staying, wanted, space) if plain else wanted
        assignment = _draw(space, generator, limited, partial_borders=not plain, alike=alike)
        if assignment is not None:
            return assignment
    raise ValueError(f"no random plan of seed {seed} is feasible in {DRAWS + 1} draws: take another seed")


def _staying(wanted: Wanted, space: Space, site: Site) -> Sequence[SiteChoice] | None:
    """What is wanted of a site, or, if its rows may travel, the choices in which they do not."""
    chosen = wanted(site)
    every = [SiteChoice(axes) for axes in product(*(site.choices[ranks] for ranks in space.mesh))]
    stay = [choice for choice in every if not any(on_axis.routes for on_axis in choice.axes)]
    return chosen if chosen is not None or len(stay) == len(every) else stay


def _draw(
    space: Space, generator: random.Random, wanted: Wanted, *, partial_borders: bool, alike: bool
) -> Assignment | None:
    """One draw: what the borders pass on first, then copy by copy and the rest."""
    legal = _Border(space, partial_borders)
    rest_borders: dict[str, SiteChoice] = {}
    copies: list[tuple[dict[str, SiteChoice], ...]] = []
    for repeat, region in zip(space.repeats, space.bodies, strict=True):
        # what one run makes and the next one reads is drawn once
        ends = [[rest_borders.get(border_name(b.values[end])) for b in repeat.borders] for end in (0, -1)]
        within: list[SiteChoice | None] = [None] * len(repeat.borders)
        drawn = [ends[0], *[within] * (repeat.count - 1), ends[1]]
        crossing = [
            [c or legal.draw(border_name(b.values[0]), generator) for c, b in zip(choices, repeat.borders, strict=True)]
            for choices in (drawn[:1] if alike else drawn)
        ]
        crossing = crossing * len(drawn) if alike else crossing
        drawn_copies: list[dict[str, SiteChoice]] = []
        for entering, leaving in pairwise(crossing):
            if alike and drawn_copies:
                drawn_copies *= repeat.count
                break
            borders = dict(zip((*region.left, *region.right), (*entering, *leaving), strict=True))
            decisions = _Drawing(space, region, generator, wanted).decisions(borders)
            if decisions is None:
                return None
            drawn_copies.append(decisions)
        copies.append(tuple(drawn_copies))
        for border, first, last in zip(repeat.borders, crossing[0], crossing[-1], strict=True):
            rest_borders[border_name(border.values[0])] = first
            rest_borders[border_name(border.values[-1])] = last
    rest = _Drawing(space, space.rest, generator, wanted).decisions(rest_borders)
    return None if rest is None else Assignment(rest=rest, copies=tuple(copies))


def _choices(space: Space, site: Site, generator: random.Random) -> Iterator[SiteChoice]:
    """A few choices of a site, legal or not, in random order, and then the unsplit one; the others come last, for
    reads that cannot be replicated: rows that are with their experts."""
    policies = (KEEP, REGATHER) if site.kind == "parameter" else NO_POLICY
    every = [SiteChoice(axes, p) for axes in product(*(site.choices[n] for n in space.mesh)) for p in policies]
    yield from generator.sample(every, min(TRIED, len(every)))
    yield space.replicated(site)
    yield from generator.sample(every, len(every))


class _Border:
    """What a border may pass on: what all sites of its name, and of the names that are one with it, can."""

    def __init__(self, space: Space, partial_sums: bool) -> None:
        self.space, self.partial_sums = space, partial_sums
        self.sites: dict[str, list[Site]] = {}
        by_name: dict[str, list[Site]] = {}
        for region in space.regions():
            for site in region.sites.values():
                by_name.setdefault(site.name, []).append(site)
        for name, ends in space.twins.items():
            self.sites[name] = [site for end in sorted(ends) for site in by_name[end]]

    def draw(self, name: str, generator: random.Random) -> SiteChoice:
        sites = self.sites[name]
        return next(
            choice
            for choice in _choices(self.space, sites[0], generator)
            if (self.partial_sums or PASSES_PARTIAL not in choice.axes)
            and all(self.space.option(site, choice) is not None for site in sites)
        )


class _Drawing:
    """Draws options site by site, in an order in which what is read is drawn before."""

    def __init__(self, space: Space, region: Region, generator: random.Random, wanted: Wanted) -> None:
        self.space, self.region, self.generator, self.wanted = space, region, generator, wanted
        self.layouts: dict[str, Layout] = {}
        self.promised: dict[str, list[Layout]] = {}

    def decisions(self, borders: Mapping[str, SiteChoice]) -> dict[str, SiteChoice] | None:
        """A choice for every site, those of the borders given; None where one cannot be had."""
        taken: dict[str, SiteChoice] = {}
        sites = self.region.sites.values()
        for stored in (True, False):
            for site in (s for s in sites if (s.kind not in ("op", "output")) is stored):
                option = self._option(site, borders.get(site.name))
                if option is None:
                    return None
                taken[site.name] = option.choice
                outputs = zip(site.makes, option.makes, strict=True)
                self.layouts.update((root, layout) for root, layout in outputs if root)
                if stored:  # reads what is drawn later: a gradient, or what crosses a border
                    for read, layout in zip(site.reads, option.reads, strict=True):
                        self.promised.setdefault(read.alias.root, []).append(layout)
        return {name: taken[name] for name in self.region.sites}

    def _option(self, site: Site, given: SiteChoice | None) -> Option | None:
        chosen = (given,) if given is not None else self.wanted(site)
        choices = _choices(self.space, site, self.generator) if chosen is None else iter(chosen)
        quiet = self.generator.random() < QUIET
        second: Option | None = None
        for choice in choices:
            option = self.space.option(site, choice)
            if option is None:
                continue
            taken = not quiet or self._is_quiet(site, option)
            if (taken or second is None) and self._is_feasible(site, option):
                if taken:
                    return option
                second = option
        return second

    def _is_feasible(self, site: Site, option: Option) -> bool:
        """Whether all that it reads can be had, and what others read of it already."""
        reads = [(self.layouts[r.alias.root], layout, r.alias.root) for r, layout in self._read(site, option)]
        produced = zip(site.makes, option.makes, strict=True)
        reads += [(here, there, root) for root, here in produced for there in self.promised.get(root, ())]
        return all(self._is_had(root, here, there) for here, there, root in reads)

    def _read(self, site: Site, option: Option):  # type: ignore[no-untyped-def]
        return [(r, layout) for r, layout in zip(site.reads, option.reads, strict=True) if r.alias.root in self.layouts]

    def _is_had(self, root: str, here: Layout, there: Layout) -> bool:
        meta = self.space.metas[root]
        return here == there or self.space.redistributor.route(meta.shape, meta.dtype, here, there) is not None

    def _is_quiet(self, site: Site, option: Option) -> bool:
        """Whether it reads all as it is laid out; where there is nothing to read, whether it splits."""
        read = self._read(site, option)
        if not read:
            return any(on_axis != REPLICATED for on_axis in option.choice.axes)
        return all(self.layouts[r.alias.root] == layout for r, layout in read)
