"""Plans at other prices: those near a plan, and the plan itself."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.solve.problem import Infeasible, Score

from .plan import Plan
from .request import Request
from .search import SearchResult
from .shortfalls import fitting
from .steps import NEAR

if TYPE_CHECKING:
    from .planner import Planner

logger = logging.getLogger("autopar")


def nearby(planner: Planner, plan: Plan, request: Request) -> list[Plan]:
    """The results of two descents from a plan at a planner's prices: one as if nothing overlapped, the other as
    if as much of the traffic in buckets did as does in the plan's timeline."""
    start = planner.assignment(plan)
    plans: list[Plan] = []

    def near(space: Space, request: Request, _: float) -> Plan:
        result = planner.search(request, space).run(start=start, bounded=False, sure=False)
        return planner.describe(planner.searches.priced(result), request)

    for hidden in dict.fromkeys((0.0, planner.evaluate(start, NEAR).hidden_part)):
        try:
            attempt = partial(near, planner.searches.hiding(hidden))
            plans.append(fitting(planner.searches, request, planner.limit(request), attempt))
        except Infeasible as error:
            logger.info("nothing near: %s", error)
    return plans


def repriced(planner: Planner, plan: Plan, assignment: Assignment | None = None) -> Plan:
    """The plan at a planner's prices, with the decisions of an assignment if one is given."""
    assignment = assignment or planner.assignment(plan)
    priced = planner.steps.account(assignment)
    score = Score(seconds=priced.seconds, bytes=priced.bytes)
    result = SearchResult(assignment=assignment, score=score, lower_bound=0.0, seconds=plan.solve_seconds)
    request = Request(
        solver=plan.solver,
        cost=plan.cost,
        memory_limit_bytes=math.inf if plan.memory_limit_bytes is None else plan.memory_limit_bytes,
        constraints=plan.constraints,
        offload=bool(plan.offload_bytes),
    )
    described = planner.describe(result, request, planner.evaluate(assignment, **plan.fitted))
    return replace(described, memory_limit_from=plan.memory_limit_from, headroom=plan.headroom, lengths=plan.lengths)
