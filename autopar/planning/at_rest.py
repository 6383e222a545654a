"""The best decisions with parameters at rest in given layouts: those of another mode of a module, or a checkpoint."""

import logging
from collections.abc import Mapping, Sequence

from autopar.ir.layout import REPLICATE, Layout
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import Region
from autopar.passes.space.space import Space, held

from .search import Search

logger = logging.getLogger("autopar")


def best_at_rest(space: Space, at_rest: Mapping[str, Layout]) -> Assignment:
    """The best decisions with parameters in these layouts, by name; those not named are replicated.

    Raises ValueError for a layout that a parameter cannot have.
    """
    parameters = space.graph.parameters
    replicated = (REPLICATE,) * len(space.mesh)
    layouts = {value: at_rest.get(name, replicated) for name, value in parameters.items()}
    copies = {names[0]: names for repeat in space.repeats for names in zip(*repeat.own, strict=True)}
    space = held(space, {value: [layouts[copy] for copy in copies.get(value, (value,))] for value in layouts})
    best = Search(space, "dp", None, logger.info).run(bounded=False).assignment
    # the search decides for all copies of a layer together, and each copy has its own layouts
    decided = tuple(
        tuple(
            {**decisions, **_held(space, region, decisions, repeat.own[0], [layouts.get(n) for n in own])}
            for decisions, own in zip(copies_of, repeat.own, strict=True)
        )
        for repeat, region, copies_of in zip(space.repeats, space.bodies, best.copies, strict=True)
    )
    return Assignment(rest=best.rest, copies=decided)


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
