"""The values on the way of a plan, computed again from its model: what docs/kernel.md prints of the kernel."""

from __future__ import annotations

from typing import Any

from autopar.ir.layout import describe
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import ProblemBuilder
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.planning.options import Options, slowest_first, taken
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner


def history(planner: Planner, plan: Plan) -> dict[str, Any]:
    """As `Plan.history`."""
    space, assignment = planner.space, planner.assignment(plan)
    chosen, options = taken(space, assignment), Options(space, {}, plan.memory_limit_bytes)
    slowest, sites = slowest_first(space)[:1], options.sites
    allowed = {name: options.free(sites[name], own, slowest[0]) if slowest else own for name, own in chosen.items()}
    return {
        "graph": planner.captured.graph,
        "layouts": {name: {str(c): _layouts(space, sites[name], c) for c in own} for name, own in allowed.items()},
        "problem": ProblemBuilder(space).build(allowed)[0],
        "solution": assignment,
        "program": planner.program(plan),
    }


def _layouts(space: Space, site: Site, choice: SiteChoice) -> str:
    """What a site reads and makes by a choice: "S(0%8), R -> S(0%8)"."""
    option = space.option(site, choice)
    assert option is not None
    sides = (option.reads, option.makes)
    return " -> ".join(", ".join(describe(layout, space.axes) for layout in side) or "-" for side in sides)
