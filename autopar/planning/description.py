"""Assignments as plans, which people read and edit, and plans as assignments."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from autopar.cluster.staged import StagedCluster
from autopar.cost.memory import Peak
from autopar.ir.layout import Layout, Split
from autopar.ops.experts import PRODUCTS
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.held import nested_choices
from autopar.passes.space.layers import border_name
from autopar.passes.space.parsing import parse_choice
from autopar.passes.space.problem import Assignment, Decisions
from autopar.passes.space.sites import Region, Site
from autopar.passes.space.space import Space

from .account import Account, parameter_layouts
from .plan import ParameterPlan, Plan, Run, Segment, graph_digest
from .provenance import ModelFacts
from .request import Request
from .search import SearchResult
from .timing import Timing
from .training import Training


class PlanFigures(Protocol):
    """What a plan says of an estimate."""

    @property
    def account(self) -> Account: ...
    @property
    def peak(self) -> Peak: ...
    @property
    def bucket_bytes(self) -> int: ...
    @property
    def offload_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def timing(self) -> Timing: ...
    @property
    def rewrites(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """What plans are for: the model, and its space on a mesh of a cluster."""

    space: Space
    facts: ModelFacts
    training: Training

    @property
    def model(self) -> str:
        return self.facts.name

    @property
    def mesh(self) -> dict[str, int]:
        cluster, mesh = self.space.cluster, self.space.mesh
        if isinstance(cluster, StagedCluster):  # in whose place there are micro-batches
            mesh = (cluster.stages, *mesh[1:])
        return dict(zip(self.space.axes, mesh, strict=True))

    @property
    def graph(self) -> str:
        return graph_digest(self.space.graph)

    def described(
        self,
        result: SearchResult,
        request: Request,
        estimate: PlanFigures,
        least_seconds: float,
    ) -> Plan:
        """The result of a search as the plan that answers a request, with its estimate, and what no step
        undercuts."""
        space, assignment, within = self.space, result.assignment, request.within
        times = 1 if isinstance(space.cluster, StagedCluster) else self.training.micro_batches
        provenance = self.facts.provenance(space.cluster, math.prod(self.mesh.values())).times(times)
        plan = Plan(
            model=self.model,
            graph=self.graph,
            mesh=self.mesh,
            cluster=space.cluster.name,
            solver=request.solver,
            cost=request.cost,
            memory_limit_bytes=request.bytes_limit,
            memory_limit_from=request.limit_from,
            constraints=request.pinned,
            decisions={name: str(choice) for name, choice in assignment.rest.items()},
            segments=tuple(
                Segment(name=repeat.name, runs=_runs(copies, assignment.again(number)))
                for number, (repeat, copies) in enumerate(zip(space.repeats, assignment.copies, strict=True))
            ),
            parameters={
                name: ParameterPlan(
                    at_rest=_placements(space, name, rest),
                    in_use=tuple(_placements(space, name, u) for u in uses),
                    gather=gather,
                    shape=space.graph.metas[space.graph.parameters[name]].shape,
                    kind=self.facts.kinds.get(name, ""),
                )
                for name, rest, uses, gather in parameter_layouts(space, assignment)
            },
            inputs={
                site.module: texts(option.makes[0], site.meta.shape, space.mesh)
                for site in space.rest.sites.values()
                if site.kind == "input" and site.meta is not None
                if (option := space.option(site, assignment.rest[site.name])) is not None
            },
            optimizer=space.optimizer.name,
            training=self.training,
            checkpoints=self.facts.captured.checkpoints,
            experts=sum(node.op in PRODUCTS for node in self.facts.captured.graph.nodes),
            account=estimate.account,
            peak=estimate.peak,
            bucket_bytes=estimate.bucket_bytes,
            offload_bytes=estimate.offload_bytes,
            seconds=estimate.seconds,
            range_seconds=space.cluster.within(estimate.seconds),
            exposed_seconds=estimate.exposed_seconds,
            objective_seconds=result.score.objective,
            lower_bound_seconds=least_seconds,
            objective_bound_seconds=result.lower_bound,
            solve_seconds=result.seconds,
            without_rule=dict(space.without_rule),
            timing=estimate.timing,
            rewrites=estimate.rewrites,
            within=json.dumps(dict(within)) if isinstance(within, Mapping) else str(within or ""),
            provenance=replace(provenance, winner=request.preset or provenance.winner),
        )
        return replace(plan, described=plan.digest)

    def check(self, plan: Plan) -> None:
        """Raises ValueError where a plan is for another mesh or another model."""
        if list(plan.mesh.items()) != list(self.mesh.items()):
            raise ValueError(f"the plan is for mesh {dict(plan.mesh)}, and this mesh is {self.mesh}: plan again for it")
        if plan.training.asked not in (self.training.asked, self.training.asked.travelling_as_used):
            was, now = (training.asked.given or "the default" for training in (plan.training, self.training))
            raise ValueError(f"the plan is for training with {was}, and this is {now}: plan again for it")
        if plan.graph != self.graph:
            raise ValueError(
                f"the plan is for another model or other input shapes ({plan.model}, graph {plan.graph}); this is "
                f"{self.model}, graph {self.graph}: plan again for it"
            )

    def assignment(self, plan: Plan) -> Assignment:
        """A plan's decisions. Raises ValueError for a missing or unknown site, for a choice that a site lacks, and
        where two neighbours choose otherwise for what crosses their border."""
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
        again = again if any(map(any, again)) else ()  # as a search leaves it, whose program may be cached
        assignment = Assignment(rest=self._read(space.rest, plan.decisions), copies=tuple(copies), recompute=again)
        _check_borders(space, assignment)
        return assignment

    def _read(self, region: Region, decisions: Mapping[str, str]) -> dict[str, SiteChoice]:
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
                raise ValueError(f"{site.kind} {name} ({site.module}): {error}; {self._choices(site)}") from error
            if not _offered(self.space, site, choice) or self.space.option(site, choice) is None:
                raise ValueError(
                    f"{site.kind} {name} ({site.module}) cannot take {decisions[name]!r}; {self._choices(site)}"
                )
            read[name] = choice
        return read

    def _choices(self, site: Site) -> str:
        """What a decision of the site is written of."""
        on = (
            f"on {axis} {', '.join(map(str, site.choices[ranks]))}"
            for axis, ranks in zip(self.space.axes, self.space.mesh, strict=True)
        )
        policy = "; then keep or regather" if site.kind == "parameter" else ""
        return f"write one choice for each axis: {'; '.join(on)}{policy}"


def _check_borders(space: Space, assignment: Assignment) -> None:
    """Raises ValueError where a value leaves a copy of a layer in another layout than it enters the next one."""
    rest = assignment.rest
    parts = zip(space.repeats, space.bodies, space.rest_borders, assignment.copies, strict=True)
    for repeat, body, (left, right), copies in parts:
        before = [[rest[name] for name in left], *([copy[name] for name in body.right] for copy in copies)]
        after = [*([copy[name] for name in body.left] for copy in copies), [rest[name] for name in right]]
        for k, sides in enumerate(zip(before, after, strict=True)):
            for border, one, other in zip(repeat.borders, *sides, strict=True):
                if one != other:
                    where = f"copy {k} of segment {repeat.name}" if k < len(copies) else f"what follows {repeat.name}"
                    raise ValueError(
                        f"border {border_name(border.values[k])} of the plan is {str(other)!r} in {where} and "
                        f"{str(one)!r} before it: write the same choice on both sides"
                    )


def _offered(space: Space, site: Site, choice: SiteChoice) -> bool:
    """Whether the site offers each axis's part of a choice, and the choice has a policy if it is a parameter's."""
    choices = nested_choices(space, site)
    return (
        len(choice.axes) == len(space.mesh)
        and all(part in choices[ranks] for part, ranks in zip(choice.axes, space.mesh, strict=True))
        and bool(choice.policy) == (site.kind == "parameter")
    )


def _runs(copies: Sequence[Decisions], recompute: Sequence[bool]) -> tuple[Run, ...]:
    return tuple(
        Run(count=len(list(same)), decisions={name: str(c) for name, c in decisions.items()}, recompute=again)
        for (decisions, again), same in groupby(zip(copies, recompute, strict=True))
    )


def _placements(space: Space, parameter: str, layout: Layout) -> tuple[str, ...]:
    return texts(layout, space.graph.metas[space.graph.parameters[parameter]].shape, space.mesh)


def texts(layout: Layout, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[str, ...]:
    """Placements as people write them: S(0) for contiguous shards."""
    written = []
    owned: dict[int, int] = {}
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split):
            left = shape[placement.dim] // owned.get(placement.dim, 1)
            contiguous = placement.period == left
            owned[placement.dim] = owned.get(placement.dim, 1) * ranks
            written.append(f"S({placement.dim})" if contiguous else f"S({placement.dim}%{placement.period})")
        else:
            written.append(str(placement))
    return tuple(written)
