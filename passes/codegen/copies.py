"""Copies: the sites of all copies of repeated segments, made from those of the first one by renaming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.passes.segments.segment import Repeated
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Assignment
from autopar.passes.space.recompute import reacquired, remade
from autopar.passes.space.sites import Option, Site, border_name, output_name, output_numbers
from autopar.passes.space.space import Space


@dataclass(frozen=True, slots=True)
class Placed:
    """A site of one copy: its option, and how names of the first copy read in this one."""

    site: Site
    option: Option
    rename: Mapping[str, str]
    order: int
    again: bool = False
    """Whether it is recomputed in backward."""

    def name(self, value: str) -> str:
        return self.rename.get(value, value)


def placed(space: Space, assignment: Assignment) -> Iterator[Placed]:
    """Every site of every copy with its option; borders once, where they are read."""
    producer, nothing = space.graph.producer, dict[str, str]()

    def order(site: Site, rename: Mapping[str, str]) -> int:
        if site.kind != "op":
            return -1
        return producer[rename.get(site.name, site.name)]

    for site in space.rest.sites.values():
        option = _option(space, site, assignment.rest[site.name])
        yield Placed(site, option, nothing, order(site, nothing))
    bodies = zip(space.repeats, space.bodies, assignment.copies, strict=True)
    for number, (repeat, region, copies) in enumerate(bodies):
        twice, again = remade(region), assignment.again(number)
        for k, decisions in enumerate(copies):
            rename = _rename(space, repeat, k)
            for site in region.sites.values():
                if site.kind == "shared":
                    continue
                if site.kind == "border" and not site.reads:
                    # made on the other side: by the neighbour's border site that reads it
                    continue
                option = _option(space, site, decisions[site.name])
                yield Placed(site, option, rename, order(site, rename), again[k] and site.name in twice)


def reacquired_roots(space: Space, assignment: Assignment) -> set[str]:
    """Names of the roots that are brought to their layouts again in backward."""
    found: set[str] = set()
    for number, (repeat, region) in enumerate(zip(space.repeats, space.bodies, strict=True)):
        for k, again in enumerate(assignment.again(number)):
            if again:
                rename = _rename(space, repeat, k)
                found.update(rename.get(root, root) for root in reacquired(region))
    return found


def _rename(space: Space, repeat: Repeated, k: int) -> dict[str, str]:
    nodes = space.graph.nodes
    rename = {}
    for first, here in zip(repeat.copies[0], repeat.copies[k], strict=True):
        for a, b in zip(nodes[first].outputs, nodes[here].outputs, strict=True):
            if a:
                rename[a] = b
    rename.update(zip(repeat.own[0], repeat.own[k], strict=True))
    numbers = output_numbers(space.graph)
    for first_value, value in zip(repeat.results[0], repeat.results[k], strict=True):
        places = zip(numbers.get(first_value, ()), numbers.get(value, ()), strict=True)
        rename.update({output_name(a): output_name(b) for a, b in places})
    for border in repeat.borders:
        rename[border_name(border.values[0])] = border_name(border.values[k])
        rename[border_name(border.values[1])] = border_name(border.values[k + 1])
        rename.setdefault(border.values[0], border.values[k])
        rename.setdefault(border.values[1], border.values[k + 1])
    return rename


def _option(space: Space, site: Site, choice: SiteChoice) -> Option:
    option = space.option(site, choice)
    if option is None:
        raise ValueError(f"{site.kind} {site.name} ({site.module}) cannot take {choice}")
    return option
