"""The best plan on any of several meshes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from autopar.cluster.machine import Cluster
from autopar.passes.space.problem import Assignment
from autopar.solve.effort import Effort
from autopar.solve.problem import Infeasible

from .costs import COSTS
from .meshes import best_mesh
from .plan import Plan
from .request import Request
from .search import Search, SearchResult
from .steps import Steps

logger = logging.getLogger("autopar")


SEARCH_LOOKS = 5
"""Looks at a mesh that a thorough search takes as long as."""


class OnMeshes(Protocol):
    """A planner, and those of the same model on other meshes."""

    cluster: Cluster
    effort: Effort
    steps: Steps

    def on(self, mesh_shape: Mapping[str, int], cluster: Any, effort: Effort | None = None) -> OnMeshes: ...

    def planned(self, request: Request) -> Plan: ...

    def limit(self, request: Request) -> float | None: ...

    @property
    def search(self) -> Callable[..., Search]: ...


def best_over(planner: OnMeshes, candidates: Sequence[Mapping[str, int]], request: Request) -> Plan:
    planners = {tuple(mesh.items()): planner.on(mesh, planner.cluster) for mesh in candidates}
    mode = COSTS[request.cost]
    searched = len(candidates) if request.preset else min(len(candidates), planner.effort.mesh_finalists)
    looks = 0.0 if request.preset else len(candidates) / (len(candidates) + SEARCH_LOOKS * searched)
    looking = request.stage.part(0.0, looks).parts(len(candidates))
    searching = request.stage.part(looks, 1.0).parts(searched)

    @cache
    def of(axes: tuple[tuple[str, int], ...]) -> Plan:
        return planners[axes].planned(replace(request, stage=replace(next(searching), mesh=dict(axes))))

    def planned(mesh: Mapping[str, int]) -> tuple[float, Plan]:
        plan = of(tuple(mesh.items()))
        return plan.seconds if mode.by_timeline or mode.plan is not None else plan.objective_seconds, plan

    def quick(mesh: Mapping[str, int], below: float) -> float:
        stage = replace(next(looking), mesh=mesh)
        asked = replace(request, stage=stage)
        seconds = quick_seconds(planners[tuple(mesh.items())], asked, len(candidates), below)
        stage.found(seconds, is_serial=True)
        return seconds

    def preset_seconds(mesh: Mapping[str, int], _: float) -> float:
        try:
            return planned(mesh)[0]
        except ValueError:
            return math.inf

    first = preset_seconds if request.preset else quick
    return best_mesh(
        candidates, first, planned, logger.info, planner.effort.mesh_finalists, lambda: planner.effort.is_over
    )


def quick_seconds(on: OnMeshes, request: Request, meshes: int, below: float) -> float:
    """The seconds of what one descent ends with on a planner's mesh, or infinity if nothing fits: what is looked at
    on each of so many `meshes`, before the best are searched thoroughly. The descent ends early where the seconds are
    clearly not `below`, and none begins that has no seconds left."""
    if on.effort.is_over and math.isfinite(below):
        return math.inf
    share, limit = min(1.0, on.effort.meshes_work / meshes), on.limit(request)

    def descent(limit: float | None, start: Assignment | None = None) -> SearchResult:
        asked = replace(request, solver="dp", memory_limit_bytes=math.inf if limit is None else limit)
        return on.search(asked, share=share).run(bounded=False, sure=False, below=below, start=start)

    start = None
    if request.memory_limit_bytes is None:
        free = descent(None)
        matters = limit is not None and free.score.objective < below
        if limit is None or not matters or on.steps.peaks_of(limit).estimate(free.assignment) <= limit:
            return free.score.objective
        start = free.assignment
    try:
        return descent(limit, start).score.objective
    except Infeasible:
        return math.inf
