"""The best decisions with parameters at rest in given layouts: those of a module in another mode or with inputs of
another form, or a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.layout import REPLICATE, Layout
from autopar.passes.space.choices import AxisChoice, SiteChoice
from autopar.passes.space.held import held
from autopar.passes.space.problem import Assignment, ProblemBuilder
from autopar.passes.space.sites import Region, Site
from autopar.passes.space.space import Space

from .constraints import Pins
from .options import Options, taken, unique_sites
from .search import Search


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions of operators and borders, in words that mean the same for tensors of other sizes: on every axis the
    kind and factor of a choice, and its place among the site's choices of that kind and factor. By site."""

    words: Mapping[str, tuple[tuple[tuple[str, int, int], ...], ...]]

    @staticmethod
    def of(space: Space, assignment: Assignment) -> "Decided":
        sites = {name: site for name, site in unique_sites(space).items() if site.kind in ("op", "border")}
        choices = taken(space, assignment)
        return Decided(
            {
                name: tuple(_words(space, site, choice) for choice in choices.get(name, ()))
                for name, site in sites.items()
            }
        )

    def choices(self, space: Space, site: Site) -> list[SiteChoice]:
        """Those that a site of another space has: replicated where none fits."""
        fitting: dict[SiteChoice, None] = {}
        for words in self.words.get(site.name, ()):
            choice = space.replicated(site)
            for axis, word in enumerate(words):
                wider = choice.on(axis, on_axis) if (on_axis := _said(space, site, axis, word)) else choice
                choice = wider if space.option(site, wider) is not None else choice
            fitting[choice] = None
        return list(fitting) or [space.replicated(site)]


def _alike(space: Space, site: Site, axis: int, kind: str, factor: int) -> list[AxisChoice]:
    return [c for c in site.choices[space.mesh[axis]] if (c.kind, c.factor) == (kind, factor)]


def _words(space: Space, site: Site, choice: SiteChoice) -> tuple[tuple[str, int, int], ...]:
    def word(axis: int, on_axis: AxisChoice) -> tuple[str, int, int]:
        alike = _alike(space, site, axis, on_axis.kind, on_axis.factor)
        return on_axis.kind, on_axis.factor, alike.index(on_axis) if on_axis in alike else 0

    return tuple(word(axis, on_axis) for axis, on_axis in enumerate(choice.axes))


def _said(space: Space, site: Site, axis: int, word: tuple[str, int, int]) -> AxisChoice | None:
    kind, factor, place = word
    alike = _alike(space, site, axis, kind, factor)
    return alike[min(place, len(alike) - 1)] if alike else None


def best_at_rest(
    space: Space, at_rest: Mapping[str, Layout], near: Decided | None = None, pins: Pins | None = None
) -> Assignment:
    """The best decisions with parameters in these layouts, by name; those not named are replicated, and sites choose
    what `pins` leave them. On a mesh of several axes, where no solver is exact, they are what one descent finds from
    those of `near`, if given.

    Raises ValueError for a layout that a parameter cannot have.
    """
    space = with_layouts(space, at_rest)
    search = Search(ProblemBuilder(space), "dp", Options(space, pins))
    if near is None or sum(ranks > 1 for ranks in space.mesh) < 2:
        best = search.run(bounded=False).assignment
    else:
        descent = search.descent
        start = {**search.options.replicated(), **dict(_start(space, near))}
        best = descent.descend(start, descent.axes(), purse=descent.purse(search.effort.descents)).assignment
    return in_layouts(space, best, at_rest)


def with_layouts(space: Space, at_rest: Mapping[str, Layout]) -> Space:
    """The space in which the parameters of a layer take no other layouts at rest than those of its copies. Raises
    ValueError as `best_at_rest`."""
    layouts = _layouts(space, at_rest)
    copies = {names[0]: names for repeat in space.repeats for names in zip(*repeat.own, strict=True)}
    return held(space, {value: [layouts[copy] for copy in copies.get(value, (value,))] for value in layouts})


def in_layouts(space: Space, best: Assignment, at_rest: Mapping[str, Layout]) -> Assignment:
    """The assignment with each copy's parameters in its own layouts: a search decides for all copies of a layer
    together."""
    layouts = _layouts(space, at_rest)
    decided = tuple(
        tuple(
            {**decisions, **_held(space, region, decisions, repeat.own[0], [layouts.get(n) for n in own])}
            for decisions, own in zip(copies_of, repeat.own, strict=True)
        )
        for repeat, region, copies_of in zip(space.repeats, space.bodies, best.copies, strict=True)
    )
    return replace(best, copies=decided)


def _layouts(space: Space, at_rest: Mapping[str, Layout]) -> dict[str, Layout]:
    replicated = (REPLICATE,) * len(space.mesh)
    return {value: at_rest.get(name, replicated) for name, value in space.graph.parameters.items()}


def _start(space: Space, near: Decided) -> Iterator[tuple[str, list[SiteChoice]]]:
    for name, site in unique_sites(space).items():
        if site.kind in ("op", "border"):
            yield name, near.choices(space, site)


def _held(
    space: Space,
    region: Region,
    decisions: Mapping[str, SiteChoice],
    names: Sequence[str],
    layouts: Sequence[Layout | None],
) -> dict[str, SiteChoice]:
    """The choices that hold the parameters of a copy in these layouts. `names` are those of the first copy."""
    choices = {}
    for name, layout in zip(names, layouts, strict=True):
        site = region.sites[name]
        if site.kind == "parameter":
            options = [o for c in site.held if (o := space.option(site, c)) is not None]
            fits = [o.choice for o in options if o.makes[0] == layout]
            alike = [c for c in fits if c.policy == decisions[name].policy]
            choices[name] = decisions[name] if decisions[name] in fits else [*alike, *fits][0]
    return choices
