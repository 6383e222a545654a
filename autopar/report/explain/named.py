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
from autopar.planning.texts import pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A site, and the names that people know it by, one for each copy of a repeated layer. `body` is the number of the
    layer's body, or None for the rest of the model."""

    site: Site
    names: tuple[str, ...]
    body: int | None

    @property
    def pattern(self) -> str:
        """One name for all copies, with * where they differ."""
        return pattern(self.names)


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
    for region in space.regions():
        number = next((k for k, body in enumerate(space.bodies) if body is region), None)
        for site in region.sites.values():
            if site.kind in ("parameter", "input") or (site.kind == "op" and not site.fixed):
                yield Location(site=site, names=tuple(names_of(space, region, site)), body=number)


def named(space: Space, name: str, tied: Mapping[str, str]) -> Named:
    """What a name stands for. Raises ValueError, with the nearest names, if nothing is called so."""
    if (collective := _collective(space, name)) is not None:
        return Named(name=name, kind="collective", collective=collective)
    every = list(places(space))
    asked = tied.get(name, name).removeprefix("kwargs.")
    for kind in ("parameter", "input"):
        for place in every:
            if place.site.kind == kind and asked in (*place.names, place.pattern):
                return Named(name=name, kind=kind, places=(place,))
    for place in every:
        if place.site.kind == "op" and asked == place.site.name:
            return Named(name=name, kind="operator", places=(place,))
    inside = tuple(place for place in every if any(_lies_in(one, asked) for one in (*place.names, place.pattern)))
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
    names = dict.fromkeys(name for place in every for name in (*place.names, place.pattern) if name)
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    known = [*names, *(module for module in modules if module), *(f"{kind} {a}" for kind in COLLECTIVES
                                                                  for a in space.axes)]  # fmt: skip
    known += [place.site.name for place in every if place.site.kind == "op"]
    known = list(dict.fromkeys(known))
    return nearest(asked, known) or f": names are such as {', '.join(known[:3])}"
