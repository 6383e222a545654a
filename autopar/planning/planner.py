"""The planner: one captured model, its space on a mesh, and the plans and programs in it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cluster.collectives import are_of_gloo
from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.cost import liveness
from autopar.cost.memory import Peak, moments, peak
from autopar.cost.optimizers import Optimizer, named_optimizer
from autopar.cost.redistribute import Redistributor
from autopar.cost.timeline import Known, Timeline, timeline
from autopar.ir.garbage import uncollected
from autopar.ir.layout import REPLICATE, Layout, Split, local_shape
from autopar.ir.program import Program
from autopar.ops import rule_of
from autopar.ops.routing import in_token_order
from autopar.passes.blocks.block import Blocks
from autopar.passes.blocks.partition import blocks
from autopar.passes.capture.trace import Captured, capture
from autopar.passes.lower.bucket import LIMIT_BYTES
from autopar.passes.lower.shorten import KEPT, shortened
from autopar.passes.seeds import seeds
from autopar.passes.segments.fingerprint import fingerprint
from autopar.passes.segments.search import segments
from autopar.passes.segments.segment import Segments
from autopar.passes.space.build import strategies
from autopar.passes.space.choices import KEEP, REGATHER, SiteChoice, parse_choice, str_choice
from autopar.passes.space.problem import Allowed, Assignment
from autopar.passes.space.sites import Region, Site
from autopar.passes.space.space import Space, hold
from autopar.profile.programs import Costs, real_tensors
from autopar.solve import EXACT, SOLVERS
from autopar.solve.budget import SEARCH_BUDGET
from autopar.solve.problem import Infeasible, Score

from .account import account, least_seconds, parameter_layouts
from .beside import beside
from .constraints import Constraints, pins
from .costs import COSTS
from .given import check_mesh, check_model, check_options, check_profiles
from .meshes import best_mesh
from .phases import Phases
from .plan import ParameterPlan, Plan, Run, Segment, graph_digest
from .presets import PRESETS, preset
from .search import Found, Peaks, Search, Solved, unique_sites
from .volume import volumes, with_arithmetic_split
from .writer import Writer

logger = logging.getLogger("autopar")

HIDDEN = 0.8
"""The part of what travels in buckets that the second plan takes to pass while the rank computes."""

WORTH = 0.02
"""A second search is made where communication has at least this part of the first one's step."""

LEAST_GAIN = 1e-6
"""Relative gain for which another plan is taken."""

UNSURE = 0.2
"""The part of a step that fewer copies tell, with nothing in parts, by which it may be shorter in truth."""

BUCKETS = (LIMIT_BYTES, LIMIT_BYTES // 8, LIMIT_BYTES // 64, LIMIT_BYTES // 512)
"""Bytes of a bucket, of which the largest is taken that keeps the memory limit."""

PRESET_OPTIONS = 20
"""A preset that leaves more options a site than this, as some do on four axes, is not looked at beside a search: solved
as one problem, it takes longer than that."""

HIDDEN_SHARE = SEARCH_BUDGET.hidden / (SEARCH_BUDGET.descents + SEARCH_BUDGET.limit)
"""Of the work of a search: the second one is one descent, and what the limit takes."""

PRESET_SHARE = SEARCH_BUDGET.presets / len(PRESETS) / (SEARCH_BUDGET.descents + SEARCH_BUDGET.pool)
"""Of the work of a search: what a preset leaves is solved as one problem."""

MESHES_WORK = 8.0
"""Searches whose work the first looks at all meshes may take together, where the mesh is chosen too."""

IN_FLIGHT = 8
"""A peak that is over the limit by so many buckets will not keep it with smaller ones."""


def captured_for_planning(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device_type: str | None = None,
) -> Captured:
    """What `capture` returns, with random operators that read keys and experts' rows in the order of tokens."""
    captured = capture(model, args, kwargs, loss_fn=loss_fn, device_type=device_type)
    return replace(captured, graph=in_token_order(seeds(captured.graph), rule_of))


class Planner:
    """Captures a model once, and plans and writes programs for it."""

    def __init__(
        self,
        model: nn.Module,
        mesh_shape: Mapping[str, int],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        cluster: str | Cluster | None = None,
        optimizer: str | float | Optimizer = "adamw",
        device_type: str | None = None,
        profiles: str | Path | None = None,
        captured: Captured | None = None,
    ) -> None:
        """`captured` is the step, where it has been captured already."""
        check_mesh(mesh_shape)
        check_model(model, args, kwargs, loss_fn)
        check_profiles(profiles)
        self.mesh = dict(mesh_shape)
        self.optimizer = named_optimizer(optimizer)
        self.device_type = device_type
        self.peaks: dict[int, tuple[Assignment, int, Peak]] = {}
        """Of one search, by the identity of the assignment."""
        self.memory = liveness.Known()
        """How results of operators lie in memory, whatever the mesh and the cluster."""
        self.profiles = profiles
        """The database of what is measured; the user's own if None."""
        self.costs: Costs | None = None
        """Where programs that were measured are found, if this planner's prices are measured ones."""
        self.presets: dict[str, Allowed] = {}
        """What each preset that was asked for leaves, and the blocks that presets need, once they were."""
        self.blocks: list[Blocks] = []
        self.model_name = type(model).__name__
        self.cluster = named_cluster(cluster, device_type=device_type or "cpu")
        self.seconds = Phases()
        """What each step took, for the benchmarks."""
        self.captured: Captured = captured or self.seconds.timed(
            "capture", captured_for_planning, model, args, kwargs, loss_fn=loss_fn, device_type=device_type
        )
        graph = self.captured.graph
        self.known = real_tensors(self.captured.bind(args, kwargs), model, self.captured.constants)
        if names := self.captured.without_gradient:
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            logger.warning(
                "%d trainable parameters get no gradient, since nothing that is differentiated depends on them: %s",
                len(names),
                shown,
            )
        if self.captured.pinned:
            logger.warning(
                "the model's Python reads %s: a program is right for inputs of which it reads the same, and "
                "parallelize captures and plans again for others",
                self.captured.pinned,
            )
        self.segments: Segments = self.seconds.timed("segments", segments, graph)
        self._place()
        if self.space.without_rule:
            modules = self.space.without_rule_in
            ops = "; ".join(
                f"{count} x {op} in {', '.join(path or 'the model' for path in modules[op])}"
                for op, count in self.space.without_rule.items()
            )
            logger.warning("replicated, since the op has no rule: %s", ops)

    def _place(self) -> None:
        """The space of the mesh on the cluster, and what writes its programs."""
        graph = self.captured.graph
        self.space: Space = self.seconds.timed(
            "strategies", strategies, graph, self.mesh, self.cluster, self.segments, self.optimizer
        )
        self.writer = Writer(self.space, self.cluster, self.memory, self.seconds)
        self.operators = self.writer.known
        """What timelines found out about the device's operators."""

    def on(self, mesh_shape: Mapping[str, int], cluster: str | Cluster | None) -> Planner:
        """A planner for the same captured model on another mesh or cluster."""
        check_mesh(mesh_shape)
        other = copy(self)
        other.mesh, other.cluster, other.seconds = dict(mesh_shape), named_cluster(cluster), Phases()
        other.peaks, other.presets, other.blocks = {}, {}, []
        other._place()
        return other

    def profiled(self, costs: Costs) -> Planner:
        """A planner with what was measured as prices. Plans stay the programs that they are: with the same routes, and
        lowered as before."""
        other = self.on(self.mesh, costs.measured(self.space.mesh))
        other.space = replace(other.space, redistributor=other._redistributor(routes=self.writer.space.redistributor))
        other.costs, other.writer, other.operators = costs, self.writer, Known(made=self.memory)
        return other

    def _redistributor(self, *, hidden: float = 0.0, routes: Redistributor | None = None) -> Redistributor:
        """Of the space, with a part of what travels in buckets at no price."""
        given = self.space.redistributor
        return Redistributor(given.mesh, given.links, given.device, hidden, routes=routes or given.routes)

    def nearby(
        self,
        plan: Plan,
        *,
        solver: str,
        memory_limit_bytes: float | None = None,
        constraints: Constraints | None = None,
    ) -> list[Plan]:
        """What one descent from a plan finds with the prices of this planner, as if nothing overlapped and as if most
        of what travels in buckets did."""
        start = self.assignment(plan)
        found: list[Plan] = []
        for hidden in (0.0, HIDDEN):
            search = self.search(solver, memory_limit_bytes, constraints, self._hiding(hidden))
            try:
                other = self._priced(search.run(start=start, bounded=False, thorough=False))
            except Infeasible as error:
                logger.info("nothing near: %s", error)
                continue
            near = self.describe(replace(other, lower_bound=0.0), solver, "analytical")
            found.append(_asked(near, memory_limit_bytes, constraints))
        return found

    def again(self, plan: Plan) -> Plan:
        """A plan with the prices of this planner."""
        assignment = self.assignment(plan)
        self.peaks = {id(assignment): (assignment, plan.bucket_bytes, plan.peak)}
        priced = account(self.space, assignment)
        score = Score(seconds=priced.seconds, bytes=priced.bytes)
        found = Found(assignment=assignment, score=score, lower_bound=0.0, seconds=plan.solve_seconds)
        return _asked(self.describe(found, plan.solver, plan.cost), plan.memory_limit_bytes, plan.constraints)

    def moved_bytes(self, program: Program) -> int:
        """Read and written by a step of the optimizer."""
        return sum(
            self.optimizer.moved_bytes(math.prod(local_shape(i.meta.shape, i.layout, program.mesh)), i.meta.dtype)
            for i in program.inputs
            if i.role == "parameter" and i.target in program.trained
        )

    @property
    def fingerprints(self) -> str:
        """Of the model's repeated segments."""
        return " ".join(fingerprint(self.captured.graph, repeat.copies[0]) for repeat in self.segments.repeats)

    def over(
        self,
        candidates: Sequence[Mapping[str, int]],
        *,
        solver: str = "dp",
        cost: str = "analytical",
        memory_limit_bytes: float | None = None,
        constraints: Constraints | None = None,
    ) -> Plan:
        """The best plan on any of several meshes. Raises ValueError as `plan`, where no mesh has one."""
        with uncollected():
            return self._over(candidates, solver, cost, memory_limit_bytes, constraints)

    def _over(
        self,
        candidates: Sequence[Mapping[str, int]],
        solver: str,
        cost: str,
        memory_limit_bytes: float | None,
        constraints: Constraints | None,
    ) -> Plan:
        check_options(solver, cost, memory_limit_bytes, constraints)
        planners = {tuple(mesh.items()): self.on(mesh, self.cluster) for mesh in candidates}

        @cache
        def of(axes: tuple[tuple[str, int], ...]) -> Plan:
            return planners[axes].plan(
                solver=solver, cost=cost, memory_limit_bytes=memory_limit_bytes, constraints=constraints
            )

        def planned(mesh: Mapping[str, int]) -> tuple[float, Plan]:
            made = of(tuple(mesh.items()))
            return made.objective_seconds if cost in ("serial", "volume") else made.seconds, made

        def quick(mesh: Mapping[str, int], below: float) -> float:
            on = planners[tuple(mesh.items())]
            search = on.search("dp", memory_limit_bytes, constraints, share=min(1.0, MESHES_WORK / len(candidates)))
            try:
                return search.run(bounded=False, thorough=False, below=below).score.objective
            except Infeasible:
                return math.inf

        def preset_seconds(mesh: Mapping[str, int], _: float) -> float:
            try:
                return planned(mesh)[0]
            except ValueError:
                return math.inf

        return best_mesh(candidates, preset_seconds if solver in PRESETS else quick, planned, logger.info)

    def plan(
        self,
        *,
        solver: str = "dp",
        cost: str = "analytical",
        memory_limit_bytes: float | None = None,
        constraints: Constraints | None = None,
    ) -> Plan:
        """Raises ValueError for an unknown solver or cost, for constraints that cannot be, and where nothing keeps the
        limit."""
        check_options(solver, cost, memory_limit_bytes, constraints)
        if (by_measuring := COSTS[cost].plan) is not None:
            return by_measuring(self, solver=solver, memory_limit_bytes=memory_limit_bytes, constraints=constraints)
        with uncollected():
            made = self._plan(solver, cost, memory_limit_bytes, constraints)
        return _asked(made, memory_limit_bytes, constraints)

    def _plan(self, solver: str, cost: str, memory_limit_bytes: float | None, constraints: Constraints | None) -> Plan:
        allowed = None
        if solver in PRESETS:
            allowed = self.seconds.timed("preset", self.preset, solver)
        space = self.seconds.timed("strategies", volumes, self.space) if cost == "volume" else self.space
        search = self.search(solver if solver in SOLVERS else "dp", memory_limit_bytes, constraints, space)
        if cost == "volume" and solver not in PRESETS:
            search.pins = with_arithmetic_split(space, search.pins)
        bounded = space.cluster.device.operators is None  # bounds hold for rooflines alone
        if solver not in PRESETS and cost == "analytical":
            return self._overlapped(search, solver, memory_limit_bytes, constraints, bounded)
        found: Found = self.seconds.timed("search", search.run, allowed, bounded=bounded)
        if space is not self.space:
            logger.info("%.6g GB on a rank's links, at least %.6g", found.score.seconds, found.lower_bound)
            found = replace(self._priced(found), lower_bound=0.0)
        return self.seconds.timed("describe", self.describe, found, solver, cost, memory_limit_bytes)

    def _overlapped(
        self, search: Search, solver: str, limit: float | None, constraints: Constraints | None, bounded: bool
    ) -> Plan:
        """The plan with the shortest step on its timeline, of what the search finds and of `_others`: these, and the
        bound, are looked for beside what the limit takes, and the writing of the first plan's program."""
        started = time.perf_counter()
        cheapest = self.seconds.timed("search", search.explore, bounded=bounded)
        looked_for = self._others(cheapest, solver, limit, constraints)
        with (
            search.bounding(bounded) as bound,
            beside(lambda: list(looked_for), worthwhile=search.is_large) as others,
        ):
            found: Found = self.seconds.timed("search", self._within, search, cheapest)
            found = replace(found, lower_bound=max(found.lower_bound, self.seconds.timed("bound", bound)))
            plan = self.seconds.timed("describe", self.describe, found, solver, "analytical", limit)
            plan = self._shortest(found, plan, self.seconds.timed("others", others), limit, constraints)
        return replace(plan, lower_bound_seconds=found.lower_bound, solve_seconds=time.perf_counter() - started)

    def _within(self, search: Search, cheapest: Solved) -> Found:
        """What a search finds under its limit, if it has one: with the largest buckets, or with smaller ones, that
        leave more memory to all else and hide less, whichever makes the shorter step. (What a preset says is kept, and
        smaller buckets are taken first.)"""
        limit = search.bytes_limit
        if limit is None:
            return search.within(None, sure=False)
        largest, any_size = self._told(limit, BUCKETS[:1]), self._told(limit)

        def parted() -> Found | None:
            try:
                return search.within(any_size, sure=False)
            except Infeasible:  # by what is estimated alone
                return None

        try:
            whole = search.within(largest, sure=False)
            free = whole.assignment == cheapest.assignment
            with beside(parted, worthwhile=search.is_large and not free) as found:
                if largest[0](whole.assignment) > limit:
                    whole = search.within(largest, sure=True)
                other = None if whole.assignment == cheapest.assignment else found()
        except Infeasible as error:
            logger.info("with buckets of %d MiB %s", BUCKETS[0] >> 20, error)
            self.peaks = {}
            return search.within(any_size, sure=True)
        self.peaks = {key: known for key, known in self.peaks.items() if known[-1].bytes <= limit}
        if other is not None and other.assignment != whole.assignment:
            quick = self._short_seconds(other.assignment, limit) < self._short_seconds(whole.assignment, limit)
            if quick and self.peak(other.assignment, limit)[1].bytes <= limit:
                return other
        return whole

    def _shortest(
        self,
        found: Found,
        plan: Plan,
        others: Sequence[tuple[str, Found]],
        limit: float | None,
        constraints: Constraints | None,
    ) -> Plan:
        """The plan, or one of the others with a shorter step on its timeline."""
        best, seen = plan, [found.assignment]
        for name, other in sorted(others, key=lambda item: item[1].score.objective):
            if least_seconds(self.space, other.assignment) >= best.seconds:
                continue
            if name in PRESETS and limit is not None:
                try:
                    search = self.search("dp", limit, constraints, share=PRESET_SHARE)
                    other = self.seconds.timed("others", search.run, self.preset(name), bounded=False)
                except Infeasible as error:
                    logger.info("no plan by %s: %s", name, error)
                    continue
                other = self._priced(other)
            if other.assignment in seen:
                continue
            seen.append(other.assignment)
            nearly = self.seconds.timed("steps", self._short_seconds, other.assignment, limit, in_parts=False)
            if nearly * (1 - UNSURE) > best.seconds:
                logger.info("%s: a step of about %.3f ms", name, nearly * 1e3)
                continue
            made = self.seconds.timed("describe", self.describe, other, plan.solver, plan.cost, limit)
            if made.seconds < best.seconds * (1 - LEAST_GAIN) and (limit is None or made.bytes <= limit):
                logger.info("%s: a step of %.3f ms instead of %.3f", name, made.seconds * 1e3, best.seconds * 1e3)
                best = made
        return best

    def _others(
        self, cheapest: Solved, solver: str, limit: float | None, constraints: Constraints | None
    ) -> Iterator[tuple[str, Found]]:
        """Plans that some prices do not foretell: what a second search finds, from the cheapest of the first, with most
        of what travels in buckets hidden, under the limit; and what the presets leave, of which some hide much, without
        a limit yet. At the prices of the first search."""
        priced = account(self.space, cheapest.assignment)
        if priced.communication_seconds >= WORTH * priced.seconds:
            search = self.search(solver, limit, constraints, self._hiding(HIDDEN), HIDDEN_SHARE)
            try:
                hidden = search.run(start=cheapest.assignment, bounded=False, thorough=False)
                yield "hidden buckets", self._priced(hidden)
            except Infeasible as error:
                logger.info("no plan where most of what travels in buckets is hidden: %s", error)
        search = self.search("dp", None, constraints, share=PRESET_SHARE)
        tried: list[Allowed] = []
        for name in PRESETS if solver in EXACT else ():
            try:
                allowed = self.preset(name)
                options = sum(map(len, allowed.values())) / len(allowed)
                if options > PRESET_OPTIONS:
                    logger.info("no plan by %s: it leaves %.0f options a site", name, options)
                elif allowed not in tried:
                    tried.append(allowed)
                    yield name, self._priced(search.run(allowed, bounded=False))
            except ValueError as error:
                logger.info("no plan by %s: %s", name, error)

    def _hiding(self, part: float) -> Space:
        """The space with a part of what travels in buckets at no price."""
        return replace(self.space, redistributor=self._redistributor(hidden=part))

    def _priced(self, found: Found) -> Found:
        """At the prices of the space, in which nothing is hidden."""
        score = Score(seconds=account(self.space, found.assignment).seconds, bytes=found.score.bytes)
        return replace(found, score=score)

    def _step_seconds(self, assignment: Assignment, limit: float | None) -> float:
        """The step of an assignment on its timeline, infinite where that is over the limit."""
        bucket_bytes = BUCKETS[0]
        if limit is not None:
            bucket_bytes, most = self.peak(assignment, limit)
            if most.bytes > limit:
                return math.inf
        return self._step(assignment, bucket_bytes)[0]

    def _step(self, assignment: Assignment, bucket_bytes: int) -> tuple[float, float]:
        """Seconds of an assignment's step by its timeline, and for how many of them a rank stands still."""
        told = timeline(self.writer.written(assignment, bucket_bytes), self.cluster, self.operators)
        ratio = self._correction(assignment, bucket_bytes)
        updating = account(self.space, assignment).optimizer_seconds
        return told.seconds * ratio + updating, told.exposed_seconds * ratio

    def _correction(self, assignment: Assignment, bucket_bytes: int) -> float:
        """By what a timeline is multiplied: what measured programs took over theirs."""
        if self.costs is None or not self.costs.with_links:
            return 1.0
        segment = self.writer.segment_program(assignment, bucket_bytes)
        return self.costs.correction(segment, self.cluster, self.operators)

    def preset(self, name: str) -> Allowed:
        """The options that a preset leaves. Raises ValueError where it does not fit the mesh or the model."""
        if name not in self.presets:
            if not self.blocks:
                self.blocks.append(blocks(self.captured.graph, max(self.space.mesh)))
            self.presets[name] = preset(self.space, self.blocks[0], name)
        return self.presets[name]

    def search(
        self,
        solver: str,
        memory_limit_bytes: float | None,
        constraints: Constraints | None,
        space: Space | None = None,
        share: float = 1.0,
    ) -> Search:
        """A search of the planner's space, or of one with other prices, with a share of the work of a search."""
        self.peaks = {}
        return Search(
            space or self.space,
            solver,
            memory_limit_bytes,
            logger.info,
            pins=pins(self.space, constraints or {}),
            peaks=self._told(memory_limit_bytes),
            work=share * SEARCH_BUDGET.work,
        )

    def _told(self, limit: float | None, buckets: Sequence[int] = BUCKETS) -> tuple[Peaks, Peaks]:
        """Peaks of assignments with such buckets, true and estimated."""
        return (
            lambda assignment: self.peak(assignment, limit, buckets)[1].bytes,
            lambda assignment: self.seconds.timed("estimate", self._estimate, assignment, limit, buckets),
        )

    def peak(
        self, assignment: Assignment, memory_limit_bytes: float | None = None, buckets: Sequence[int] = BUCKETS
    ) -> tuple[int, Peak]:
        """The largest buckets with which the program of an assignment keeps the limit (else those with which it needs
        the least), and the most memory that a rank then needs during a training step."""
        key = id(assignment)
        if key not in self.peaks:
            found = self.seconds.timed("peak", lambda: list(self._peaks(assignment, memory_limit_bytes, buckets)))
            fits = memory_limit_bytes is None or found[-1][1].bytes <= memory_limit_bytes
            best = found[-1] if fits else min(found, key=lambda item: item[1].bytes)
            self.peaks[key] = assignment, *best
        return self.peaks[key][1:]

    def _estimate(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> float:
        """The peak of `peak`, told from the program of fewer copies, in which nothing runs in parts: what these would
        change of it is looked at where it counts, on the programs of answers."""
        told = list(self._estimates(assignment, limit, buckets))
        return min(told) if told else self.peak(assignment, limit, buckets)[1].bytes

    def _estimates(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> Iterator[float]:
        """With smaller and smaller buckets, as `_peaks`; none where there are no fewer copies."""
        if (short := shortened(self.writer.space, assignment)) is None:
            return
        for size in buckets:
            bucketed = self.writer.whole(assignment, size, KEPT)
            found = moments(bucketed, self.optimizer, self.kind_of_device, self.memory)
            most = short.most(found, bucketed, self.optimizer)
            yield most
            if _is_settled(most, size, limit):
                return

    def _short_seconds(self, assignment: Assignment, limit: float | None, *, in_parts: bool = True) -> float:
        """Nearly what `_step_seconds` says, told from the program of fewer copies, if there are fewer."""
        short = shortened(self.writer.space, assignment)
        if short is None:
            return self._step_seconds(assignment, limit)
        tried = 1 if limit is None else len(list(self._estimates(assignment, limit, BUCKETS)))
        bucket_bytes = BUCKETS[tried - 1]
        write = self.writer.written if in_parts else self.writer.whole
        program = write(assignment, bucket_bytes, KEPT)
        step = short.seconds(timeline(program, self.cluster, self.operators), program)
        return step * self._correction(assignment, bucket_bytes) + account(self.space, assignment).optimizer_seconds

    @property
    def kind_of_device(self) -> str:
        return self.device_type or ("cpu" if are_of_gloo(self.cluster.algorithms) else "cuda")

    def _peaks(self, assignment: Assignment, limit: float | None, buckets: Sequence[int]) -> Iterator[tuple[int, Peak]]:
        """With smaller and smaller buckets, up to the first that keep the limit, or where it is not up to them; from
        the first on of which that is estimated."""
        told = [] if limit is None else list(self._estimates(assignment, limit, buckets))
        for size in buckets[max(0, len(told) - 1) :]:
            bucketed = self.writer.written(assignment, size)
            found = peak(bucketed, self.optimizer, self.kind_of_device, self.memory)
            yield size, found
            if _is_settled(found.bytes, size, limit):
                return

    def describe(self, found: Found, solver: str, cost: str, memory_limit_bytes: float | None = None) -> Plan:
        """The plan that an assignment is."""
        space, assignment = self.space, found.assignment
        bucket_bytes, most = self.peak(assignment, memory_limit_bytes)
        priced = account(space, assignment)
        seconds, exposed = self.seconds.timed("timeline", self._step, assignment, bucket_bytes)
        return Plan(
            model=self.model_name,
            graph=graph_digest(self.captured.graph),
            mesh=dict(self.mesh),
            cluster=self.cluster.name,
            solver=solver,
            cost=cost,
            decisions={name: str_choice(choice) for name, choice in assignment.rest.items()},
            segments=tuple(
                Segment(name=repeat.name, runs=_runs(copies, assignment.again(number)))
                for number, (repeat, copies) in enumerate(zip(space.repeats, assignment.copies, strict=True))
            ),
            parameters={
                name: ParameterPlan(
                    at_rest=_placements(space, name, rest),
                    in_use=tuple(_placements(space, name, u) for u in uses),
                    gather=gather,
                )
                for name, rest, uses, gather in parameter_layouts(space, assignment)
            },
            inputs={
                site.module: _texts(option.makes[0], site.meta.shape, space.mesh)
                for site in space.rest.sites.values()
                if site.kind == "input" and site.meta is not None
                if (option := space.option(site, assignment.rest[site.name])) is not None
            },
            optimizer=self.optimizer.name,
            account=priced,
            peak=most,
            bucket_bytes=bucket_bytes,
            seconds=seconds,
            exposed_seconds=exposed,
            objective_seconds=found.score.objective,
            lower_bound_seconds=found.lower_bound,
            solve_seconds=found.seconds,
            without_rule=dict(space.without_rule),
        )

    def check(self, plan: Plan) -> None:
        """Raises ValueError where a plan is for another mesh or another model."""
        if dict(plan.mesh) != self.mesh or list(plan.mesh) != list(self.mesh):
            raise ValueError(f"the plan is for mesh {dict(plan.mesh)}, and this mesh is {self.mesh}: plan again for it")
        if plan.graph != graph_digest(self.captured.graph):
            raise ValueError(
                f"the plan is for another model or other input shapes ({plan.model}, graph {plan.graph}); this is "
                f"{self.model_name}, graph {graph_digest(self.captured.graph)}: plan again for it"
            )

    def assignment(self, plan: Plan) -> Assignment:
        """A plan's decisions. Raises ValueError for a site that is missing, unknown or cannot do as told."""
        self.check(plan)
        space = self.space
        if [s.name for s in plan.segments] != [r.name for r in space.repeats]:
            raise ValueError(
                f"the plan has segments {[s.name for s in plan.segments]}, the model {[r.name for r in space.repeats]}"
            )
        copies = []
        for segment, region, repeat in zip(plan.segments, space.bodies, space.repeats, strict=True):
            runs = [(run.count, self._read(region, run.decisions)) for run in segment.runs]
            if sum(count for count, _ in runs) != repeat.count:
                raise ValueError(
                    f"segment {segment.name} has {repeat.count} copies, and the plan's runs do not add up to it"
                )
            copies.append(tuple(decisions for count, decisions in runs for _ in range(count)))
        again = tuple(tuple(run.recompute for run in s.runs for _ in range(run.count)) for s in plan.segments)
        return Assignment(rest=self._read(space.rest, plan.decisions), copies=tuple(copies), recompute=again)

    def _read(self, region: Region, decisions: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
        missing, extra = region.sites.keys() - decisions.keys(), decisions.keys() - region.sites.keys()
        if missing or extra:
            raise ValueError(
                f"the plan does not fit {region.name}: missing {sorted(missing)[:3] or 'none'}, "
                f"unknown {sorted(extra)[:3] or 'none'}"
            )
        read = {}
        for name, site in region.sites.items():
            try:
                choice = parse_choice(decisions[name])
            except ValueError as error:
                raise ValueError(f"{site.kind} {name} ({site.module}): {error}") from error
            if not _offered(self.space, site, choice) or self.space.option(site, choice) is None:
                words = [str_choice(c) for axis in site.choices.values() for c in [axis]]
                raise ValueError(
                    f"{site.kind} {name} ({site.module}) cannot take {decisions[name]!r}; "
                    f"choices on an axis: {', '.join(dict.fromkeys(words))}"
                )
            read[name] = choice
        return read

    def program(self, plan: Plan) -> Program:
        """The program that runs a plan, with its collectives in buckets.

        Raises ValueError where the plan does not fit the model or the mesh, or contradicts itself.
        """
        with uncollected():
            return self.writer.written(self.assignment(plan), plan.bucket_bytes)

    def timeline(self, plan: Plan) -> Timeline:
        """When each instruction of a plan's program runs on the planner's cluster. Raises ValueError as `program`."""
        program = self.program(plan)
        with uncollected():
            return timeline(program, self.cluster, self.operators)

    def assignment_at(self, at_rest: Mapping[str, Layout]) -> Assignment:
        """The best decisions with parameters in these layouts, by name; those not named are replicated.

        Raises ValueError for a layout that a parameter cannot have.
        """
        space, parameters = self.space, self.captured.graph.parameters
        whole = (REPLICATE,) * len(space.mesh)
        layouts = {value: at_rest.get(name, whole) for name, value in parameters.items()}
        copies = {names[0]: names for repeat in space.repeats for names in zip(*repeat.own, strict=True)}
        for name, site in unique_sites(space).items():
            if site.kind == "parameter":
                hold(space, site, [layouts[copy] for copy in copies.get(name, (name,))])
        found = Search(space, "dp", None, logger.info).run(bounded=False)
        # what is best for all copies of a layer is not where every one of them is
        held = tuple(
            tuple(
                {**decisions, **_held(space, region, decisions, repeat.own[0], [layouts.get(n) for n in own])}
                for decisions, own in zip(decided, repeat.own, strict=True)
            )
            for repeat, region, decided in zip(space.repeats, space.bodies, found.assignment.copies, strict=True)
        )
        return Assignment(rest=found.assignment.rest, copies=held)


def _asked(plan: Plan, limit: float | None, constraints: Constraints | None) -> Plan:
    """With what was asked of it."""
    pinned = {pattern: dict(placements) for pattern, placements in (constraints or {}).items()}
    return replace(plan, memory_limit_bytes=limit, constraints=pinned)


def _is_settled(peak_bytes: float, bucket_bytes: int, limit: float | None) -> bool:
    """Whether smaller buckets are not needed, or would not do."""
    return limit is None or peak_bytes <= limit or peak_bytes > limit + IN_FLIGHT * bucket_bytes


def _offered(space: Space, site: Site, choice: tuple[Any, ...]) -> bool:
    """Whether a choice has a part for each axis that the site offers there, and for a parameter a policy."""
    width = len(space.mesh)
    return (
        len(choice) == len(space.whole(site))
        and all(part in site.choices[ranks] for part, ranks in zip(choice[:width], space.mesh, strict=True))
        and all(part in (KEEP, REGATHER) for part in choice[width:])
    )


def _held(
    space: Space,
    region: Region,
    decisions: Mapping[str, SiteChoice],
    names: Sequence[str],
    layouts: Sequence[Layout | None],
) -> dict[str, SiteChoice]:
    """The choices that hold the parameters of a copy in these layouts. `names` are those of the first copy."""
    found = {}
    for name, layout in zip(names, layouts, strict=True):
        site = region.sites[name]
        if site.kind == "parameter":
            options = [o for c in site.held if (o := space.option(site, c)) is not None]
            fits = [o.choice for o in options if o.makes[0] == layout]
            alike = [c for c in fits if c[-1] == decisions[name][-1]]
            found[name] = decisions[name] if decisions[name] in fits else [*alike, *fits][0]
    return found


def _runs(copies: Sequence[Mapping[str, tuple[Any, ...]]], recompute: Sequence[bool]) -> tuple[Run, ...]:
    runs: list[tuple[int, Mapping[str, tuple[Any, ...]], bool]] = []
    for decisions, again in zip(copies, recompute, strict=True):
        if runs and runs[-1][1:] == (decisions, again):
            runs[-1] = (runs[-1][0] + 1, decisions, again)
        else:
            runs.append((1, decisions, again))
    return tuple(
        Run(count=count, decisions={name: str_choice(c) for name, c in decisions.items()}, recompute=again)
        for count, decisions, again in runs
    )


def _placements(space: Space, parameter: str, layout: Layout) -> tuple[str, ...]:
    return _texts(layout, space.graph.metas[space.graph.parameters[parameter]].shape, space.mesh)


def _texts(layout: Layout, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[str, ...]:
    """Placements as people write them: S(0) for contiguous shards."""
    texts = []
    owned: dict[int, int] = {}
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split):
            left = shape[placement.dim] // owned.get(placement.dim, 1)
            contiguous = placement.period == left
            owned[placement.dim] = owned.get(placement.dim, 1) * ranks
            texts.append(f"S({placement.dim})" if contiguous else f"S({placement.dim}%{placement.period})")
        else:
            texts.append(str(placement))
    return tuple(texts)
