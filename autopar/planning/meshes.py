"""The search over meshes: all ways to write a number of devices as a product of axes.

Axes lie on a cluster from the outermost in, so (2, 512) and (512, 2) are two meshes. Each gets one descent, and the
best few a thorough search. (Bounds of several axes are too far below the plans to rule out a mesh, and take longer than
a descent.) Where ranks of the best wait for others, or nothing fits, stages of a pipeline are looked at in the place of
its outermost axes, 2, 4, 8, ..., as long as more of them promise a shorter step. The best two get a thorough search.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.machine import Cluster
from autopar.passes.space.problem import Assignment
from autopar.solve.effort import EFFORT, Effort
from autopar.solve.problem import Infeasible

from .costs import COSTS
from .plan import Plan
from .provenance import STAGED, UNSTAGED, Candidate
from .request import AUTO, STAGES, Request
from .search import Search, SearchResult
from .steps import NEAR, Estimate

logger = logging.getLogger("autopar")

AXES = ("a", "b", "c", "d")
"""Names of axes, from the outermost in."""

SEARCH_LOOKS = 5
"""Looks at a mesh that a thorough search takes as long as."""

PLAIN = 0.9
"""What is done of a search when the meshes without stages are."""

STAGES_WORTH = 0.1
"""Stages are looked at where ranks wait for more of the step: so much of it a pipeline idles, with micro-batches for
each device as many times as `pipelines.FEW`."""


def meshes(devices: int, most: int = EFFORT.mesh_axes, count: int = EFFORT.meshes) -> list[dict[str, int]]:
    """The meshes of so many devices with at most `most` axes of two ranks or more: at most `count` of them, those with
    the narrowest axes."""
    every = list(_products(devices, most))
    chosen = {axes for _, axes in zip(range(count), sorted(every, key=max), strict=False)}
    sizes = [axes for axes in every if axes in chosen]
    return [dict(zip(AXES, axes, strict=False)) for axes in sizes] or [{AXES[0]: 1}]


def _products(number: int, most: int) -> Iterator[tuple[int, ...]]:
    if number > 1 and most:
        yield (number,)
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                yield from ((first, *rest) for rest in _products(number // first, most - 1))


def promising(
    candidates: Sequence[Mapping[str, int]],
    look: Callable[[Mapping[str, int], float], float],
    finalists: int = EFFORT.mesh_finalists,
) -> list[Mapping[str, int]]:
    """The meshes on which a quick look finds the least seconds, the best first. It gets a mesh and the seconds that it
    must undercut to matter, and returns those of some plan's step, or infinity.

    Meshes without a wide axis come first: they are mostly the best, and take the least time."""
    looks: list[tuple[float, Mapping[str, int]]] = []
    for mesh in sorted(candidates, key=lambda mesh: max(mesh.values())):
        known = sorted(seconds for seconds, _ in looks)
        looks.append((look(mesh, known[finalists - 1] if len(known) >= finalists else math.inf), mesh))
        logger.info("mesh %s: %.3f ms", dict(mesh), looks[-1][0] * 1e3)
    return [mesh for _, mesh in sorted(looks, key=lambda one: one[0])[:finalists]]


def in_stages(mesh: Mapping[str, int], most: int) -> Iterator[dict[str, int]]:
    """The meshes of as many devices that have 2, 4, 8, ... stages, at most so many, in the place of parts of the mesh's
    outermost axes."""
    stages = 2
    while stages <= most:
        left, others = stages, dict[str, int]()
        for axis, size in mesh.items():
            part = math.gcd(left, size)
            left //= part
            if part < size:
                others[axis] = size // part
        if left > 1:
            return
        yield {STAGES: stages, **others}
        stages *= 2


class LooksAtStages(Protocol):
    """What plans pipelines."""

    def quick_seconds(self, request: Request) -> float: ...


class OnMeshes(Protocol):
    """A planner, and those of the same model on other meshes."""

    cluster: Cluster
    effort: Effort

    @property
    def batch(self) -> int: ...

    @property
    def pipelines(self) -> LooksAtStages: ...

    def on(self, mesh_shape: Mapping[str, int], cluster: Any, effort: Effort | None = None) -> OnMeshes: ...

    def planned(self, request: Request) -> Plan: ...

    def limit(self, request: Request) -> float | None: ...

    @property
    def evaluate(self) -> Callable[..., Estimate]: ...

    @property
    def search(self) -> Callable[..., Search]: ...


def best_over(planner: OnMeshes, candidates: Sequence[Mapping[str, int]], request: Request) -> Plan:
    """The plan with the shortest step on any of these meshes: on those that a quick look finds promising, or, by a
    preset, on all; and in stages, where these may be worth it. Where no time is left, the first that has one. Raises
    what planning raises if none has."""
    best, error = None, ValueError("no mesh")
    try:
        best = _best_of(planner, candidates, replace(request, stage=request.stage.part(0.0, PLAIN)))
    except ValueError as raised:
        error = raised
    mesh = min(candidates, key=lambda mesh: max(mesh.values())) if best is None else best.mesh
    if best is None or (may_gain(best) and not planner.effort.is_over):
        on = partial(planner.on, cluster=planner.cluster)
        meshes = with_stages(on, mesh, planner.batch, request)
        found: list[Plan] = []
        for staged, stage in zip(meshes, request.stage.part(PLAIN, 1.0).parts(len(meshes)), strict=True):
            try:
                found.append(on(staged).planned(replace(request, stage=replace(stage, mesh=staged))))
                logger.info("mesh %s, thoroughly: %.3f ms", staged, found[-1].seconds * 1e3)
            except ValueError as raised:
                logger.info("mesh %s: %s", staged, raised)
        if found:
            shortest = min(found, key=lambda plan: plan.seconds)
            return shortest if best is None else _shorter(best, shortest)
    if best is None:
        raise error
    return best


def _shorter(plan: Plan, staged: Plan) -> Plan:
    """The shorter of a plan without and one in stages, with the other among its candidates."""
    best, other, lost = (staged, plan, UNSTAGED) if staged.seconds < plan.seconds else (plan, staged, STAGED)
    assert best.provenance is not None and plan.provenance is not None
    rival = Candidate(name=lost, seconds=other.seconds, precision="simulated", bytes=other.bytes)
    known = tuple(sorted((rival, *plan.provenance.candidates), key=lambda one: one.seconds))
    winner = STAGED if best is staged else best.provenance.winner
    return replace(best, provenance=replace(best.provenance, winner=winner, candidates=known))


def may_gain(plan: Plan) -> bool:
    """Whether stages may make a plan's step shorter: where ranks wait, or backward makes anew what memory lacks."""
    waits = plan.exposed_seconds > STAGES_WORTH * plan.seconds
    return waits or any(run.recompute for segment in plan.segments for run in segment.runs)


def with_stages(
    on: Callable[[Mapping[str, int]], OnMeshes], mesh: Mapping[str, int], most: int, request: Request
) -> list[dict[str, int]]:
    """The two meshes with as many stages, `most` at most, in the place of its outermost axes as promise the shortest
    steps; none where the model takes no stages, or the request is not for them. `on` gives the planner of a mesh."""
    looks: list[tuple[float, dict[str, int]]] = []
    if request.solver != AUTO or request.within or request.micro_batches != 1:
        return []
    for staged in in_stages(mesh, most):
        try:
            looks.append((on(staged).pipelines.quick_seconds(request), staged))
        except ValueError as raised:
            logger.info("mesh %s: %s", staged, raised)
            break
        logger.info("mesh %s: about %.3f ms", staged, looks[-1][0] * 1e3)
        if looks[-1][0] > min(seconds for seconds, _ in looks):
            break
    return [staged for _, staged in sorted(looks, key=lambda look: look[0])[:2]]


def _best_of(planner: OnMeshes, candidates: Sequence[Mapping[str, int]], request: Request) -> Plan:
    """The plan with the shortest step without stages."""
    by_seconds = COSTS[request.cost].by_timeline or COSTS[request.cost].plan is not None
    bound = request.preset or request.within
    finalists = len(candidates) if bound else min(len(candidates), planner.effort.mesh_finalists)
    looks = 0.0 if bound else len(candidates) / (len(candidates) + SEARCH_LOOKS * finalists)
    looking = request.stage.part(0.0, looks).parts(len(candidates))
    planners = {tuple(mesh.items()): planner.on(mesh, planner.cluster) for mesh in candidates}

    def look(mesh: Mapping[str, int], below: float) -> float:
        stage = replace(next(looking), mesh=mesh)
        on = planners[tuple(mesh.items())]
        seconds = quick_seconds(on, replace(request, stage=stage), len(candidates), below)
        stage.found(seconds, is_serial=True)
        return seconds

    searched = candidates if bound else promising(candidates, look, finalists)
    errors: list[ValueError] = []
    plans: list[Plan] = []
    for mesh, stage in zip(searched, request.stage.part(looks, 1.0).parts(finalists), strict=True):
        if plans and planner.effort.is_over:
            break
        try:
            on = planners[tuple(mesh.items())]
            plans.append(on.planned(replace(request, stage=replace(stage, mesh=mesh))))
            logger.info("mesh %s, thoroughly: %.3f ms", dict(mesh), plans[-1].seconds * 1e3)
        except ValueError as raised:
            errors.append(raised)
    if not plans:
        raise min(errors, key=lambda error: getattr(error, "smallest_bytes", math.inf))
    return min(plans, key=lambda plan: plan.seconds if by_seconds else plan.objective_seconds)


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
        if limit is None or not matters or on.evaluate(free.assignment, NEAR, limit).bytes <= limit:
            return free.score.objective
        start = free.assignment
    try:
        return descent(limit, start).score.objective
    except Infeasible:
        return math.inf


def mesh_of(mesh: DeviceMesh) -> dict[str, int]:
    """Axis name -> size of a torch mesh. Raises ValueError for a mesh without axis names."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"the mesh of shape {tuple(mesh.shape)} has no axis names: make it with "
            'init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        )
    return dict(zip(names, mesh.shape, strict=True))
