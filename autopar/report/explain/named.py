"""What a name in a question stands for: sites of the space, or a collective."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.extensions import nearest
from autopar.ir.program import COLLECTIVES
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.planning.constraints import names_of
from autopar.planning.texts import module_of, pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A site, and the names that people know it by, one for each copy of a repeated layer. `region` is the number
    of the region that it lies in: 0 for the rest of the model, and those of repeated layers' bodies."""

    site: Site
    names: tuple[str, ...]
    region: int

    @property
    def pattern(self) -> str:
        """One name for all copies, with * where they differ."""
        return pattern(self.names)

    @property
    def called(self) -> tuple[str, ...]:
        """All names that it answers to."""
        return *self.names, self.pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """`kind`: parameter, input, module, operator or collective; the places that it has, or the collective's kind
    ("" for all) and axis."""

    name: str
    kind: str
    places: tuple[Location, ...] = ()
    collective: tuple[str, str] = ("", "")


def places(space: Space) -> Iterator[Location]:
    """Of all sites that people can name."""
    for number, region in enumerate(space.regions()):
        for site in region.sites.values():
            if site.kind in ("parameter", "input") or (site.kind == "op" and not site.fixed):
                yield Location(site=site, names=tuple(names_of(space, region, site)), region=number)


def named(space: Space, name: str, tied: Mapping[str, str]) -> Named:
    """What a name stands for. Raises ValueError, with the nearest names, if nothing is called so."""
    if (collective := _collective(space, name)) is not None:
        return Named(name=name, kind="collective", collective=collective)
    every = list(places(space))
    asked = tied.get(name, name).removeprefix("kwargs.")
    for kind in ("parameter", "input", "op"):
        for place in every:
            names = (place.site.name,) if kind == "op" else place.called
            if place.site.kind == kind and asked in names:
                return Named(name=name, kind="operator" if kind == "op" else kind, places=(place,))
    inside = tuple(place for place in every if any(_lies_in(one, asked) for one in place.called))
    if inside and asked:
        return Named(name=name, kind="module", places=inside)
    raise ValueError(f"nothing in the model is called {name!r}{_nearest(space, every, asked)}")


def _lies_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _collective(space: Space, name: str) -> tuple[str, str] | None:
    """Of "all_gather tp", "all_gather on tp" or "tp"."""
    words = [word for word in re.split(r"[\s,:]+", name.strip()) if word and word != "on"]
    kinds, axes = [w for w in words if w in COLLECTIVES], [w for w in words if w in space.axes]
    if len(words) != len(kinds) + len(axes) or not words or len(kinds) > 1 or len(axes) > 1:
        return None
    return (kinds or [""])[0], (axes or [""])[0]


def _nearest(space: Space, every: list[Location], asked: str) -> str:
    """The name most like one that nothing has, or what names there are."""
    names = dict.fromkeys(name for place in every for name in place.called if name)
    modules = dict.fromkeys(module_of(name) for name in names)
    known = [*names, *(module for module in modules if module), *(f"{kind} {a}" for kind in COLLECTIVES
                                                                  for a in space.axes)]  # fmt: skip
    known += [place.site.name for place in every if place.site.kind == "op"]
    known = list(dict.fromkeys(known))
    return nearest(asked, known) or f": names are such as {', '.join(known[:3])}"
