"""Plans that let the host hold some of what is kept for backward.

Nothing of it is a choice of the search: a plan that needs more than the limit sends to the host what it needs too much.
Where it makes less again, or splits more, it has less to send: so plans within larger limits are looked at, too, and
the shortest of all is taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from autopar.cluster.machine import Cluster
from autopar.passes.lower.offload import host_bytes
from autopar.passes.space.problem import Assignment
from autopar.solve.problem import Infeasible, Score

from .plan import Plan
from .request import Request
from .search import SearchResult
from .searches import Searches
from .shortfalls import fitting
from .steps import EXACT, Estimate, Steps
from .texts import short_bytes

logger = logging.getLogger("autopar")

BETWEEN = (0.5, 0.25)
"""Limits between the one asked for and what the plan without one needs: other plans have less to send."""

TRIES = 8
"""Amounts that are tried: peaks do not fall by all that leaves."""

LEAST_MORE = 0.125
"""Of the amount before: whole values leave."""


class OffloadPlanner(Protocol):
    """What plans without offload, and describes an assignment with it."""

    searches: Searches
    steps: Steps

    def limit(self, request: Request) -> float | None: ...
    def assignment(self, plan: Plan) -> Assignment: ...
    def describe(self, result: SearchResult, request: Request, estimate: Estimate) -> Plan: ...


def check_offload(request: Request, cluster: Cluster, axis: str) -> None:
    """Raises ValueError where copies to the host cannot be planned."""
    if not request.offload:
        return
    cluster.device.host_seconds(0)
    for name, other in (("pipeline", axis), ("within", request.within)):
        if other:
            raise ValueError(f"offload does not go with {name}={other!r}: leave one of them out")
    if request.cost != "analytical":
        raise ValueError(f"offload does not go with cost={request.cost!r}: leave one of them out")


def offloading(planner: OffloadPlanner, request: Request, attempt: Callable[[Request, float], Plan | None]) -> Plan:
    """The shortest plan within the limit, with what the host holds or without. Raises `Infeasible` where nothing
    fits."""
    limit = planner.limit(request)
    free = attempt(replace(request, memory_limit_bytes=math.inf), math.inf)
    assert free is not None
    found, error = [], None
    try:
        found.append(fitting(planner.searches, request, limit, attempt))
    except Infeasible as raised:
        error = raised
    if limit is None or free.bytes <= limit:
        return found[0]
    plans = [free]
    for part in BETWEEN:
        bound = limit + part * (free.bytes - limit)
        try:
            plans.append(attempt(replace(request, memory_limit_bytes=bound), math.inf) or free)
        except Infeasible as raised:
            logger.info("within %d bytes: %s", bound, raised)
    too_small = ""
    for plan in plans:
        try:
            found += _moved(planner, plan, request, limit)
        except Infeasible as raised:
            too_small = f" {raised}"
            logger.info("%s", raised)
    if not found:
        assert error is not None
        error.args = (f"{error}{too_small}",)
        raise error
    return min(found, key=lambda plan: plan.seconds)


def _moved(planner: OffloadPlanner, plan: Plan, request: Request, limit: float) -> list[Plan]:
    """The plan with so much on the host that it keeps the limit; none where all that can leave is not enough. Raises
    `Infeasible` where the host has not the memory for it."""
    device = planner.searches.space.cluster.device
    assignment, size, peak = planner.assignment(plan), 0, plan.bytes
    priced = planner.steps.account(assignment)
    score = Score(seconds=priced.seconds, bytes=priced.bytes)
    result = SearchResult(assignment=assignment, score=score, lower_bound=0.0, seconds=plan.solve_seconds)
    for _ in range(TRIES):
        if size > plan.peak.activations:
            break
        size += max(math.ceil(peak - limit), int(LEAST_MORE * size))
        estimate = planner.steps.evaluate(assignment, EXACT, None, (plan.bucket_bytes,), size)
        peak = estimate.peak.bytes
        logger.info("%d bytes on the host: a step of %.3f ms, %d bytes", size, estimate.seconds * 1e3, peak)
        needed = host_bytes(estimate.program, planner.steps.space.optimizer)
        if device.host_memory_bytes is not None and needed > device.host_memory_bytes:
            raise Infeasible(
                f"With offload a rank would need {short_bytes(needed)} of its host's memory or more, and {device.name} "
                f"has {short_bytes(device.host_memory_bytes)} of it (host_memory_bytes in the cluster's file)."
            )
        if peak <= limit:
            moved = replace(planner.describe(result, request, estimate), provenance=plan.provenance)
            if request.memory_limit_bytes is not None:
                return [moved]
            usable, free = device.usable_bytes, request.free_part
            return [replace(moved, memory_limit_bytes=usable, memory_limit_from="device", headroom=free)]
    return []
