"""What a variable of a problem is: an operator, a block that loses nothing (`widen`), or a ParallelBlock as CFP's
paper has it (`group`)."""

from __future__ import annotations

import time
from typing import Literal

from autopar.passes.blocks.partition import blocks
from autopar.passes.space.problem import Allowed
from autopar.passes.space.space import Space
from autopar.planning.options import axis_choices, joint, unique_sites
from autopar.planning.search import SearchResult
from autopar.solve.problem import Problem, evaluate, in_runs
from autopar.solve.solvers import solve

from .free import FreeBuilder
from .group import block_groups, group
from .grouped import Grouped
from .widen import widened

Level = Literal["operator", "block", "cfp"]


def everything(space: Space, bytes_limit: float | None = None) -> Allowed:
    """The joint options of all axes, of every site."""
    axes = range(len(space.mesh))
    return {
        name: joint(site, [axis_choices(space, site, axis) for axis in axes], bytes_limit)
        for name, site in unique_sites(space).items()
    }


def operator_level(space: Space, bytes_limit: float | None = None) -> Problem:
    """The whole space of a mesh as one problem."""
    return FreeBuilder(space).build(everything(space, bytes_limit))[0]


def at_level(space: Space, problem: Problem, level: Level, *, limited: bool) -> Grouped | None:
    """The problem in groups; at operator level there are none."""
    if level == "operator":
        return None
    if level == "block":
        return widened(problem, limited=limited)
    grouped = blocks(space.graph, max(space.mesh), merge=False)
    groups = [block_groups(space, region, grouped) for region in space.regions()]
    return group(problem, groups[0], groups[1:], limited=limited)


def best(space: Space, level: Level) -> SearchResult:
    """The optimum of a space at a level, for meshes whose whole space is one problem."""
    started = time.perf_counter()
    problem, decoder = FreeBuilder(space).build(everything(space))
    grouped = at_level(space, problem, level, limited=False)
    solution = solve(problem if grouped is None else grouped.problem, "dp")
    choice = in_runs(problem, solution.choice if grouped is None else grouped.expand(solution.choice))
    return SearchResult(
        assignment=decoder.decode(choice),
        score=evaluate(problem, choice),
        lower_bound=0.0,
        seconds=time.perf_counter() - started,
    )
