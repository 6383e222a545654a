"""The planner: one captured model, its space on a mesh, and the plans and programs in it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack

import torch
from torch import nn

from autopar.cluster.library import named_cluster
from autopar.cluster.links import are_of_gloo
from autopar.cluster.machine import Cluster
from autopar.cluster.staged import StagedCluster, unstaged
from autopar.compat.wrapping import unwrapped
from autopar.cost import liveness
from autopar.cost.fusion import saved_part
from autopar.cost.streams import TimelineCache
from autopar.cost.timeline import Timeline
from autopar.ir.garbage import uncollected
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.ir.schedule import Schedule
from autopar.passes.capture.captured import Captured
from autopar.passes.flow import SEGMENTS, SPACE, Flow, lowered
from autopar.passes.lower.stages import Staged
from autopar.passes.segments.segment import Segments
from autopar.passes.space.held import nested
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.profile.programs import Costs, real_tensors
from autopar.solve.effort import EFFORT, Deadline, Effort
from autopar.solve.problem import Infeasible

from .advice import advised
from .at_rest import Decided, best_at_rest, with_layouts
from .capturing import captured_for_planning, check_autocast
from .checks import check_kernels, check_mesh, check_model
from .choice import Choice
from .costs import COSTS, priced_space
from .description import Subject
from .expressed import Expressed, expressed
from .foreign import TARGETS, Within, presets_within
from .meshes import best_over
from .micro import check_measured, shortest
from .offloading import check_offload, offloading
from .pipelines import Pipelines, axis_of_stages, first_count
from .plan import Plan
from .presets import Preset
from .provenance import ModelFacts
from .reports import report_captured, report_rows, report_without_rule
from .request import NAMES, Gathers, Options, Request, shown
from .search import SearchResult
from .searches import Searches, hidden_buckets
from .shortfalls import fitting
from .steps import EXACT, NEAR, Estimate, Steps
from .training import GATHERS, Training, named_optimizer
from .writer import Writer

logger = logging.getLogger("autopar")


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
        captured: Captured | None = None,
        request: Request | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`captured` is the step, if the caller has captured it already. `request` is what is asked, or its
        `options`."""
        self.asked = asked = Request(**options) if request is None else request
        check_mesh(mesh_shape)
        check_model(model, args, kwargs, loss_fn)
        model = unwrapped(model)
        self.example = model, args, kwargs or {}
        self.mesh = dict(mesh_shape)
        self.optimizer, self.training = named_optimizer(asked.optimizer), Training.of(asked)
        self.ways = GATHERS
        """How a step of several micro-batches may gather parameters."""
        self.device_type, self.effort = asked.device_type, replace(EFFORT, until=Deadline())
        self.memory = liveness.PlacementCache(fuses=bool(self.training.compile))
        """How operators' results lie in memory, on any mesh and cluster."""
        self.costs: Costs | None = None
        """Measured costs, if they are this planner's prices."""
        self.cluster = named_cluster(asked.cluster, device_type=asked.device_type or "cpu")
        self.seconds = Flow()
        """The seconds of each step."""
        self.captured: Captured = captured or captured_for_planning(
            model, args, kwargs, loss_fn=loss_fn, device_type=self.kind_of_device, flow=self.seconds,
            training=self.training,
        )  # fmt: skip
        self.captured_for = self.kind_of_device
        graph = self.captured.graph
        self.example_values = real_tensors(self.captured.bind(args, kwargs), model, self.captured.constants)
        self.facts = ModelFacts.of(model, self.captured)
        report_captured(self.captured)
        self.segments: Segments = self.seconds.run(SEGMENTS, graph)
        self._cut()
        self._place()
        report_without_rule(self.space)

    @property
    def batch(self) -> int:
        """The samples of the example."""
        return self.facts.batch

    def _cut(self) -> None:
        """Sets the axis of stages ("" without one), and into how many micro-batches these cut the batch."""
        asked = self.asked
        self.axis = axis_of_stages(asked, self.mesh)
        count = first_count(asked, self.batch, self.mesh[self.axis]) if self.axis else int(asked.micro_batches)
        self.training = replace(self.training, micro_batches=count)

    def _place(self) -> None:
        """Sets the space of the mesh on the cluster, and the writer of its programs."""
        graph, kind = self.captured.graph, self.kind_of_device
        self.cluster, mesh = unstaged(self.cluster).among(math.prod(self.mesh.values())), self.mesh
        if self.axis:
            self.cluster = StagedCluster.of(self.cluster, mesh[self.axis])
            mesh = {**mesh, self.axis: self.training.micro_batches}
        if self.memory.fuses:
            self.cluster = self.cluster.fusing(saved_part(graph, self.cluster.device))
        check_autocast(self.captured, self.captured_for, self.cluster, kind)
        check_kernels(graph, kind)
        space: Space = self.seconds.run(SPACE, graph, mesh, self.cluster, self.segments, self.optimizer)
        in_flight = min(self.mesh[self.axis], self.training.micro_batches) if self.axis else 1
        self.space = replace(space, **self.training.setting, in_flight=in_flight)
        self.writer = Writer(self.space, self.memory, self.seconds)
        self.operators = self.writer.operators
        self._gather()

    def _gather(self) -> None:
        """Sets what plans in the space at its prices."""
        self.steps = Steps(
            self.space, self.writer, self.operators, self.kind_of_device, self.memory, self.effort, self.costs
        )
        self.searches = Searches(self.space, self.steps, self.effort, self.training)
        self.search, self.preset, self.evaluate = self.searches.search, self.searches.preset, self.steps.evaluate
        self.subject = Subject(self.space, self.facts, self.training)
        self.check, self.assignment = self.subject.check, self.subject.assignment

    def on(self, mesh_shape: Mapping[str, int], cluster: str | Cluster | None, effort: Effort | None = None) -> Planner:
        """A planner for the same captured model on another mesh or cluster, or with another effort. Raises ValueError
        for a mesh on which what was asked cannot be."""
        check_mesh(mesh_shape)
        other = copy(self)
        other.mesh, other.cluster, other.seconds = dict(mesh_shape), named_cluster(cluster), Flow()
        other.effort = effort or self.effort
        other._cut()
        other._place()
        return other

    @property
    def pipelines(self) -> Pipelines:
        """What plans on a mesh with an axis of stages."""
        return Pipelines(self)

    def in_time(self, micro_batches: int) -> Planner:
        """A planner for the same stages with so many micro-batches."""
        if micro_batches == self.training.micro_batches or not self.axis:
            return self
        other = copy(self)
        other.training = replace(self.training, micro_batches=micro_batches)
        other._place()
        other.searches.blocks = self.searches.blocks  # of the graph, whatever its micro-batches
        return other

    def pipelined(self, plan: Plan) -> tuple[Staged, Schedule]:
        """The stages of a plan, and the schedule of their units. Raises ValueError as `program`."""
        with uncollected():
            return self.in_time(plan.training.micro_batches).pipelines.pipelined(plan)

    def gathering(self, gathers: Gathers) -> Self:
        """A planner for the same, with parameters gathered so in a step of several micro-batches."""
        return self.trained(replace(self.training, gathers=gathers))

    def holding(self, at_rest: Mapping[str, Layout], gathers: Gathers) -> Self:
        """A planner for the same, with parameters at rest in these layouts and gathered so. Raises ValueError as
        `best_at_rest`."""
        other = self.gathering(gathers)
        other.space, other.ways = with_layouts(other.space, at_rest), (gathers,)
        other._gather()
        return other

    def trained(self, training: Training) -> Self:
        """A planner for the same, which trains so."""
        other = copy(self)
        other.training, other.space = training, replace(self.space, **training.setting)
        if training.precision != self.training.precision:  # otherwise programs are the same
            other.writer = Writer(other.space, self.memory, self.seconds)
        other._gather()
        return other

    def profiled(self, costs: Costs) -> Planner:
        """A planner with measured prices. Plans keep their programs: the same routes, and the same lowerings."""
        other = self.on(self.mesh, costs.measured(self.space.mesh))
        routes = self.writer.space.redistributor
        other.space = replace(other.space, redistributor=hidden_buckets(other.space.redistributor, 0.0, routes))
        other.costs, other.writer, other.operators = costs, self.writer, TimelineCache(placements=self.memory)
        other._gather()
        return other

    @property
    def kind_of_device(self) -> str:
        return self.device_type or ("cpu" if are_of_gloo(self.cluster.algorithms) else "cuda")

    def over(self, candidates: Sequence[Mapping[str, int]], request: Request) -> Plan:
        """The best plan on any of several meshes of equally many devices. Raises ValueError as `plan` if no mesh has
        one."""
        devices = math.prod(candidates[0].values())
        report_rows(self.captured, devices)
        doing = f"{request.stage.doing} {len(candidates)} meshes of {devices:,} devices"
        request = replace(request, stage=replace(request.stage, doing=doing))
        with uncollected():
            return self._in_time(request, lambda on, request: best_over(on, candidates, request))

    def within(self, effort: Effort) -> Self:
        """A planner in the same space whose searches have this effort."""
        other = copy(self)
        other.effort = effort
        other._gather()
        return other

    def plan(self, **changes: Any) -> Plan:
        """The plan that answers what was asked, with changes of what is searched (and not of the space)."""
        return self.planned(replace(self.asked, **changes))

    def planned(self, request: Request) -> Plan:
        """The best plan that answers a request. Raises ValueError for impossible constraints, and if no plan keeps the
        limit."""
        if request.within is not None and (self.axis or request.cost == "profiled" or request.preset):
            other = f"stages on mesh axis {self.axis!r}" if self.axis else request.preset or request.cost
            raise ValueError(
                f"within is {shown(request.within)}, which does not go with {other}: leave one of them out"
            )
        check_offload(request, self.cluster, self.axis)
        if (by_measuring := COSTS.named(request.cost).plan) is not None:
            check_measured(self.training)
            return by_measuring(self, request)
        if self.axis:
            with uncollected():
                return self._in_time(request, lambda on, request: on.pipelines.planned(request))
        with uncollected():
            return self._advised(self._in_time(request, Planner._in_ways))

    def _in_time(self, request: Request, make: Callable[[Planner, Request], Plan]) -> Plan:
        """The plan that `make` gives, which says so if its search ended with the effort of a request, or by a person;
        so does the error if it found none. Where the seconds count already, as for one of several meshes, they go
        on."""
        seconds, on = request.effort, self
        if seconds is not None and self.effort.until.outer is None:
            on = self.within(replace(self.effort, until=self.effort.until.sooner(seconds)))
        try:
            plan = make(on, request)
        except Infeasible as error:
            if on is not self and on.effort.is_over:
                error.args = (f"{error}. The search ended with the effort of {seconds:g} s: give it more",)
            raise
        is_cut = on.effort.is_over
        if plan.provenance is None or not (seconds or is_cut):
            return plan
        return replace(plan, provenance=replace(plan.provenance, effort_seconds=seconds, is_cut=is_cut))

    def _in_ways(self, request: Request) -> Plan:
        """The best plan with each way of gathering for micro-batches, and with parameters that travel as they are used
        or, where they may, narrower."""
        if request.within is not None:
            return self._within(request, request.within)
        gathers = self.ways if self.training.micro_batches > 1 else (self.training.gathers,)
        widths = dict.fromkeys((self.training.travelling_as_used, self.training))
        ways = [replace(training, gathers=g) for training in widths for g in gathers]
        if ways == [self.training]:
            return self._planned(request, request.preset)
        stages = request.stage.parts(len(ways))

        def of(way: Training) -> Plan:
            return self.trained(way)._planned(replace(request, stage=next(stages)), request.preset)

        return shortest([partial(of, way) for way in ways])

    def _within(self, request: Request, within: Within) -> Plan:
        """The shortest plan inside of what a library can express: it splits no modules whose Python does not run on
        shards."""
        refused: set[str] = set()
        on, started = self.nested, time.perf_counter()

        def planned(within: Within) -> Plan:
            presets = presets_within(within, self.space, self.facts, refused)
            best = shortest([partial(on._planned, request, preset) for preset in presets])
            return replace(best, solve_seconds=time.perf_counter() - started)

        while True:
            plan = planned(within)
            if within not in NAMES["library"]:
                return plan
            said = self.expressed(plan, str(within))
            more = said.refused(*self.example)
            if not more:  # what is split is known now, and backward follows forward
                return planned(said.named) if said.styles else plan
            refused |= more

    @property
    def nested(self) -> Self:
        """A planner in the space that libraries have (`held.nested`)."""
        other = copy(self)
        other.space = nested(self.space)
        other._gather()
        return other

    def expressed(self, plan: Plan, library: str) -> Expressed:
        """A plan as a library says it, in the way that says the most of it. Raises ValueError as `program`."""
        on, assignment = self.nested, self.assignment(plan)

        def said(within: Within) -> Expressed:
            presets = presets_within(within, on.space, self.facts)
            each = [expressed(preset, on.searches, assignment, self.facts, TARGETS[library]) for preset in presets]
            return min(each, key=lambda one: len(one.missing))

        first = said(library)
        return min(first, said(first.named), key=lambda one: len(one.missing))

    def _advised(self, plan: Plan) -> Plan:
        """The plan, and what would shorten its waits."""
        if not plan.waits or self.costs is not None:
            return plan
        assignment = self.assignment(plan)
        return advised(
            plan,
            self.space,
            assignment,
            lambda training: self.trained(training).evaluate(assignment, NEAR).seconds,
        )

    def limit(self, request: Request) -> float | None:
        """The bytes that a rank may need: as requested, or what its device has for a step, less the headroom."""
        usable = self.cluster.device.usable_bytes
        if request.memory_limit_bytes is not None or usable is None:
            return request.bytes_limit
        return usable * (1.0 - request.free_part)

    def _planned(self, request: Request, preset: str | Preset | None) -> Plan:
        allowed = None if preset is None else self.seconds.timed("preset", self.preset, preset)
        mode = COSTS[request.cost]
        space = self.space if mode.space is None else self.seconds.timed("prices", priced_space, mode, self.space)
        # bounds hold only for rooflines of single operators
        bounded = space.cluster.device.operators is None and not self.memory.fuses
        choice = Choice(self.searches, self.steps, self.describe, self.seconds)

        def attempt(request: Request, below: float) -> Plan | None:
            if preset is None and mode.by_timeline:
                return choice.shortest(request, below=below)
            search = self.search(request, space, pinned=mode.pinned if preset is None else None)
            best: SearchResult = self.seconds.timed("search", search.run, allowed, bounded=bounded)
            if space is not self.space:
                logger.info("%s: %.6g, at least %.6g", request.cost, best.score.seconds, best.lower_bound)
                best = self.searches.priced(best)
            estimate = self.searches.evaluate(request)(best.assignment, EXACT)
            return self.seconds.timed("describe", self.describe, best, request, estimate)

        if not request.offload:
            return fitting(self.searches, request, self.limit(request), attempt)
        return self.seconds.timed("offload", offloading, self, request, attempt)

    def describe(self, result: SearchResult, request: Request, estimate: Estimate | None = None) -> Plan:
        """The result of a search as a plan, with its estimate (none given: within the request's limit)."""
        estimate = estimate or self.evaluate(result.assignment, limit=request.bytes_limit)
        least_seconds = self.seconds.timed("bound", lambda: self.steps.least_seconds)
        return self.subject.described(result, request, estimate, least_seconds)

    def program(self, plan: Plan, rewrites: str | None = None) -> Program:
        """The program that runs a plan, with its collectives in buckets; or, with other `rewrites`, as `Plan.program`.

        Raises ValueError if the plan does not fit the model or the mesh, or contradicts itself.
        """
        with uncollected():
            writer = self.trained(plan.training).writer
            if rewrites is None and self.axis:
                return writer.plain(self.assignment(plan))
            if rewrites is None:
                return writer.written(self.assignment(plan), plan.bucket_bytes, offload_bytes=plan.offload_bytes)
            return lowered(writer.plain(self.assignment(plan)), rewrites, self.cluster)

    def timeline(self, plan: Plan) -> Timeline:
        """When each instruction of a plan's step runs on the planner's cluster. Raises ValueError as `program`."""
        assignment, on = self.assignment(plan), self.trained(plan.training)
        with uncollected():
            return on.evaluate(assignment, **plan.fitted).timeline

    def layouts(self, plan: Plan) -> dict[str, Layout]:
        """Those of a plan's parameters at rest, by name. Raises ValueError as `program`."""
        return {i.target: i.layout for i in self.program(plan).inputs if i.role == "parameter"}

    def assignment_at(self, at_rest: Mapping[str, Layout], near: Decided | None = None) -> Assignment:
        """`best_at_rest` in this planner's space."""
        return best_at_rest(self.space, at_rest, near)
