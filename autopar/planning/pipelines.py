"""Pipelines: plans whose mesh has an axis of stages.

Micro-batches are the ranks of an axis in time, which stands in the place of the axis of stages: on that mesh an
assignment is searched as on any other, and its program is cut into stages. A candidate is a number of micro-batches, an
assignment, cuts and a schedule:

- For each number of micro-batches an assignment is searched, and its step and its memory estimated from the account,
  with none or some of its layers recomputed; where none fits, one is searched within the limit.
- The program of the most promising ones is written, and priced operator by operator. For each schedule an exact dynamic
  program cuts it (`solve.cuts`), within the memory of a device and what the schedule has in flight.
- The best cuts are made, their units timed as programs of their own, and all schedules simulated with them.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Protocol

from autopar.cluster.collectives import NEVER_SECONDS, collective_seconds
from autopar.cluster.links import Link
from autopar.cluster.machine import Cluster
from autopar.cluster.staged import StagedCluster
from autopar.cost.memory import Peak
from autopar.cost.pipeline import simulate
from autopar.cost.streams import TimelineCache, alone_seconds
from autopar.cost.timeline import Communication
from autopar.extensions import nearest
from autopar.ir.program import Program
from autopar.ir.schedule import Schedule
from autopar.passes.capture.captured import Captured
from autopar.passes.flow import Flow
from autopar.passes.lower.stages import Kinds, Staged, check_loss, staged, unstacked
from autopar.passes.segments.segment import Segments
from autopar.passes.space.choices import KEEP, REGATHER, REPLICATED, AxisChoice, SiteChoice
from autopar.passes.space.problem import Allowed, Assignment, ProblemBuilder
from autopar.passes.space.sites import Site, joined_sites
from autopar.passes.space.space import Space
from autopar.solve.cuts import Span, cut
from autopar.solve.effort import Effort
from autopar.solve.problem import Infeasible, Score
from autopar.solve.schedules import SCHEDULES, PipelineCosts, Scheduler, scheduled

from .account import Account, account, gathered_once
from .bound import least_step_seconds
from .constraints import Pins, matches, pins
from .description import Subject
from .micro import in_sequence
from .options import Options, policies, taken, unique_sites
from .pieces import ForwardPieces, pieces
from .plan import Plan
from .presets import PRESETS
from .presets.axis import data
from .presets.context import Context
from .provenance import ModelFacts
from .request import AUTO, STAGES, Request
from .search import Search, SearchResult
from .searches import Searches
from .solving import Solved
from .stages import Figures, Pipeline, PipelineStep, StagePlan, figures
from .steps import BUCKETS, Accuracy
from .texts import short_bytes
from .timing import Timing, timing
from .training import Training
from .writer import Writer

logger = logging.getLogger("autopar")

TIME = 0
"""The axis of a mesh that lies in time."""

MANY = 6
"""The most numbers of micro-batches that are looked at."""

CHUNKS = (1, 2, 4)
"""Stages on a device, where a schedule takes any number."""

WORK = 12_000
"""Operators of all programs that are written for the best numbers of micro-batches; of larger models, of one."""

CUT = 2
"""Cuts that are made of each program: those with the shortest estimated steps."""

SEARCHED_UNITS = 6_000
"""Up to so many units, a schedule is searched for the stages that were chosen."""

NEAR = 2
"""Assignments near which others are searched that need less."""

AIMS = (0.85, 0.7, 0.55)
"""Parts of the memory that assignments are to take, in estimates that leave out what units need while they run."""

TRIES = 3
"""Cuts under a smaller and smaller limit, where stages need more than was estimated."""

RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
"""Parts of the copies of layers that are recomputed in backward, where memory is scarce."""

FEW = 4
"""Micro-batches for each device that schedules are compared on before stages are cut."""

CLOSE = 1.1
"""Schedules are simulated that were estimated to take no more than so many times as long as the best."""


def time_pins(context: Context) -> Pins:
    """What sites may choose on the axis in time: micro-batches split the batch wherever it can be split. What depends
    on no parameter may be computed of the whole batch, of which a micro-batch takes its part."""
    space = context.space
    if space.mesh[TIME] == 1:
        return {}
    trained = set(space.graph.parameters.values())
    for node in space.graph.nodes:
        if not trained.isdisjoint(node.inputs):
            trained.update(filter(None, node.outputs))
    joined = joined_sites(space.regions(), space.twins)

    def is_legal(site: Site, choice: AxisChoice) -> bool:
        axes = (choice, *(REPLICATED for _ in space.mesh[1:]))
        return all(
            any(space.option(at, SiteChoice(axes, policy)) is not None for policy in policies(at, None))
            for at in joined[site.name]
        )

    def left(site: Site) -> tuple[AxisChoice, ...]:
        if site.kind == "input":  # a rank has the whole batch, and takes the part of a micro-batch where it reads it
            return (REPLICATED,)
        legal = tuple(c for c in data(context, site, TIME) if is_legal(site, c))
        is_free = site.kind == "op" and trained.isdisjoint(site.makes)
        return tuple(dict.fromkeys((*legal, REPLICATED))) if is_free or not legal else legal

    return {name: {TIME: left(site)} for name, site in context.sites.items()}


def axis_of_stages(request: Request, mesh: Mapping[str, int]) -> str:
    """The mesh axis whose devices are stages; "" without one. Raises ValueError for one that is none, and for what
    needs one."""
    axis = request.pipeline or (STAGES if STAGES in mesh else "")
    if axis and axis not in mesh:
        raise ValueError(
            f"pipeline is {axis!r}{nearest(axis, mesh)}, and the mesh has {', '.join(mesh)}: give its outermost axis"
        )
    axis = axis if mesh.get(axis, 1) > 1 else ""
    if axis and request.cost != "analytical":
        raise ValueError(
            f"cost is {request.cost!r} with stages on {axis!r}, whose prices are 'analytical': leave it out"
        )
    if axis and axis != next(iter(mesh)):
        raise ValueError(f"axis {axis!r} of stages is not the first of {', '.join(mesh)}: make it the outermost")
    for name in mesh if not axis and not request.pipeline else ():
        if name.lower() in (STAGES, "pipe", "pipeline", "stage", "stages") and mesh[name] > 1:
            logger.warning(
                "axis %r has no stages: tensors are split over it as over any other. For a pipeline call it %r, or "
                "pass pipeline=%r",
                *(name, STAGES, name),
            )
    if not axis and (request.micro_batches == AUTO or request.schedule != AUTO):
        said = "micro_batches is 'auto'" if request.micro_batches == AUTO else f"schedule is {request.schedule!r}"
        raise ValueError(f"{said}, and the mesh has no axis of stages: name one {STAGES!r}, or give pipeline its name")
    return axis


def is_auto(request: Request) -> bool:
    """Whether the number of micro-batches is chosen: one, the default, would leave all stages but one idle."""
    return request.micro_batches in (AUTO, 1)


def divisors(batch: int) -> list[int]:
    """The numbers of micro-batches that divide a batch, the smallest first."""
    return [n for n in range(1, batch + 1) if batch % n == 0]


def first_count(request: Request, batch: int, stages: int) -> int:
    """How many micro-batches there are, if that is said, or those to begin with. Raises ValueError for too many."""
    if is_auto(request):
        return min(batch, stages)
    count = int(request.micro_batches)
    if count > batch:
        raise ValueError(
            f"micro_batches is {count}, and the batch, which stages share, has {batch} samples: give at most {batch}"
        )
    return count


class StagePlanner(Protocol):
    """A planner on a mesh with an axis of stages, and those for other numbers of micro-batches."""

    axis: str
    mesh: dict[str, int]
    cluster: Cluster
    captured: Captured
    segments: Segments
    facts: ModelFacts
    training: Training
    effort: Effort
    space: Space
    searches: Searches
    writer: Writer
    operators: TimelineCache
    subject: Subject
    seconds: Flow

    @property
    def preset(self) -> Callable[[str], Allowed]: ...

    @property
    def assignment(self) -> Callable[[Plan], Assignment]: ...

    @property
    def batch(self) -> int: ...

    @property
    def kind_of_device(self) -> str: ...

    def in_time(self, micro_batches: int) -> StagePlanner: ...

    def limit(self, request: Request) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Look:
    """An assignment for a number of micro-batches. Its step takes about so many `seconds`, and a device needs about so
    many `bytes`."""

    on: StagePlanner
    solved: Solved
    pinned: Pins
    seconds: float = 0.0
    bytes: float = 0.0
    rest_bytes: float = 0.0
    """At the least, a device has so many of them at rest."""

    @property
    def micro_batches(self) -> int:
        return self.on.training.micro_batches

    @property
    def recomputes(self) -> bool:
        return any(map(any, self.solved.assignment.recompute))

    @property
    def key(self) -> tuple[int, float, float]:
        """Looks with one key are alike."""
        return self.micro_batches, self.seconds, self.bytes


@dataclass(frozen=True, kw_only=True)
class Made:
    """A step of an assignment, whose stages begin with these operators."""

    look: Look
    cuts: tuple[str, ...]
    chunks: int
    step: PipelineStep

    @property
    def peak(self) -> int:
        return self.step.largest.bytes


@dataclass(frozen=True, slots=True)
class Size:
    """About the bytes that a device needs."""

    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What a plan says of a step in stages (`description.Figures`)."""

    account: Account
    peak: Peak
    seconds: float
    exposed_seconds: float
    timing: Timing
    bucket_bytes: int = BUCKETS[0]
    offload_bytes: int = 0
    rewrites: str = ""


class Pipelines:
    """Plans pipelines for one captured model."""

    def __init__(self, planner: StagePlanner) -> None:
        self.planner, self.axis, self.devices = planner, planner.axis, planner.mesh[planner.axis]
        self.smallest = self.estimated = math.inf
        """The least bytes of a device that were reached, and those that estimates came to."""
        self.working: dict[int, int] = defaultdict(int)
        """Number of micro-batches -> what units of stages that were cut need beside what is held."""
        self.accounts: dict[tuple[int, Assignment], Account] = {}
        """Of assignments, by their numbers of micro-batches."""

    def planned(self, request: Request) -> Plan:
        """The plan with the shortest step. Raises ValueError where nothing can be cut so, and `Infeasible` where no
        stages keep the limit."""
        planner, started = self.planner, time.perf_counter()
        if planner.batch < 2:
            raise ValueError(
                f"the batch, which stages share, has {planner.batch} sample: give two or more, or a mesh without stages"
            )
        check_loss(planner.captured.graph)
        limit, usable = planner.limit(request), planner.cluster.device.usable_bytes
        best = self._best(request, limit)
        if best is None and request.memory_limit_bytes is None and usable is not None and request.free_part:
            best, request = self._best(request, usable), replace(request, headroom=0.0)
        if best is None:
            assert limit is not None
            smallest = self.smallest if math.isfinite(self.smallest) else max(limit, self.estimated)
            error = Infeasible(
                f"no pipeline of {self.devices} stages was found that fits in {short_bytes(limit)} a device: the "
                f"smallest needs {short_bytes(smallest)}. Give more devices, more memory, or more micro-batches"
            )
            error.smallest_bytes = smallest
            raise error
        plan = self.described(best, request, time.perf_counter() - started)
        assert plan.pipeline is not None
        if idle := sum(not stage.forward_seconds for stage in plan.pipeline.stages):
            logger.warning(
                "%d of the %d stages on %s have nothing to do: %s is quickest so, and fewer stages are as quick",
                idle, len(plan.pipeline.stages), self.axis, planner.facts.name,
            )  # fmt: skip
        if request.memory_limit_bytes is not None or usable is None:
            return plan
        return replace(plan, memory_limit_bytes=usable, memory_limit_from="device", headroom=request.free_part)

    def quick_seconds(self, request: Request) -> float:
        """About the seconds of a step with a few micro-batches for each device, before anything is cut, the longer the
        less evenly its layers can be shared; what needs more than the limit counts as so many times longer. Raises
        ValueError where there is none."""
        planner = self.planner
        check_loss(planner.captured.graph)
        limit = planner.limit(request)
        counts = self._counts() or [planner.batch]
        count = min(counts, key=lambda count: abs(count - FEW * self.devices))
        looks = self._looks(planner.in_time(count), replace(request, solver="dp"), limit, math.inf)
        layers = max((len(repeat.copies) for repeat in planner.segments.repeats), default=self.devices)
        uneven = math.ceil(layers / self.devices) * self.devices / layers
        return uneven * min(look.seconds * max(1.0, look.bytes / (limit or math.inf)) for look in looks)

    def _best(self, request: Request, limit: float | None) -> Made | None:
        """The best stages of all numbers of micro-batches. Within a limit, assignments that need less and less are
        searched until the stages of one keep it."""
        counts = self._counts() if is_auto(request) else [self.planner.training.micro_batches]
        looks: list[Look] = []
        errors: list[Infeasible] = []
        for count, _ in zip(counts, request.stage.part(0.0, 0.4).parts(len(counts)), strict=True):
            try:
                looks += self._looks(self.planner.in_time(count), request, limit, _quickest(looks, limit))
            except Infeasible as error:
                logger.info("%d micro-batches: %s", count, error)
                errors.append(self._uncut(count) or error)
        if not looks:
            raise errors[0]
        # where micro-batches need one another in all assignments, stages refuse by name
        looks = [look for look in looks if look.seconds * self.devices < NEVER_SECONDS] or looks[:1]
        return self._best_of(looks, request, limit, None) if limit is None else self._kept(looks, request, limit)

    def _kept(self, looks: Sequence[Look], request: Request, limit: float) -> Made | None:
        """The best that keeps a limit: of what is estimated to, with what is found near the quickest; of what is found
        near that with less and less memory; of what is estimated to need more; and of what all options come to."""
        possible, near = [look for look in looks if look.rest_bytes <= limit], list[Look]()
        for look in sorted(looks, key=lambda look: look.seconds):
            if len(near) < NEAR and not look.recomputes and look.seconds < _quickest([*possible, *near], limit):
                near += self._within(look, request, AIMS[0] * limit, self._near(look))
        fitting = [look for look in possible if look.bytes <= AIMS[0] * limit]
        best = self._best_of([*fitting, *near], request, limit, None)
        for aim in AIMS[1:]:
            starts = [look for look in near if _may_beat(look, best)]
            near = [found for look in starts for found in self._within(look, request, aim * limit, self._near(look))]
            best = self._best_of(near, request, limit, best)
        larger = [look for look in possible if look not in fitting and (best is None or look.bytes <= limit)]
        best = self._best_of(larger, request, limit, best)
        quickest = min(looks, key=lambda look: look.seconds)
        for aim in AIMS:
            if best is None:
                best = self._best_of([*self._within(quickest, request, aim * limit, None)], request, limit, None)
        return best

    def _best_of(self, looks: Sequence[Look], request: Request, limit: float | None, best: Made | None) -> Made | None:
        """The best stages of these assignments, the quickest first, if they beat the best of others: as far as there is
        work left, and further where an estimate promises much."""
        done, known = 0, best
        ranked = sorted({look.key: look for look in reversed(looks)}.values(), key=lambda look: look.seconds)
        for look, stage in zip(ranked, request.stage.part(0.4, 1.0).parts(len(ranked)), strict=False):
            is_over = done > TRIES * WORK or (best is not None and self.planner.effort.is_over)
            if is_over or ((known is not None or done > WORK) and not _may_beat(look, best)):
                break
            done += len(self.planner.captured.graph.nodes)
            made = self._made_within(look, request, limit, math.inf if best is None else best.step.seconds)
            if made is not None and (best is None or made.step.seconds < best.step.seconds):
                best = made
                stage.found(best.step.seconds)
        return best

    def _uncut(self, count: int) -> Infeasible | None:
        """Why a batch cannot be cut into so many micro-batches, if they do not divide it."""
        batch = self.planner.batch
        if batch % count == 0:
            return None
        numbers = ", ".join(str(n) for n in divisors(batch) if n > 1)
        return Infeasible(
            f"{self.planner.facts.name} cannot cut its batch of {batch} into {count} micro-batches, which do not "
            f"divide it: some layer joins samples with another dim. Give micro_batches one of {numbers}"
        )

    def _counts(self) -> list[int]:
        """Numbers of micro-batches: a batch's divisors near the stages, twice as many, and so on; first those whose
        samples more of the other axes can share evenly."""
        batch, counts = self.planner.batch, list[int]()
        sizes = [size for axis, size in self.planner.mesh.items() if axis != self.axis]
        shares = {math.prod(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)}
        shared = {n: max(d for d in shares if batch % (n * d) == 0) for n in divisors(batch)}
        wanted = self.devices
        while wanted <= batch:
            away = {n: abs(math.log2(n / wanted)) for n in shared}
            near = [n for n in shared if away[n] <= 0.5]
            counts.append(min(near, key=lambda n: (-shared[n], away[n]), default=wanted))
            wanted *= 2
        return sorted({*counts, batch} - {1})[-MANY:]

    # ---- assignments

    def _looks(self, on: StagePlanner, request: Request, limit: float | None, least: float) -> Iterator[Look]:
        """The cheapest assignment for a number of micro-batches, and what presets leave at its cheapest, unless no step
        is shorter than `least` seconds; and, where a limit asks for it, those that recompute a part of the copies of
        each layer: the first ones, whose stages have the most in flight."""
        space = on.space
        context = Context(space, self.planner.searches.blocks())
        pinned = _both(time_pins(context), pins(space, _placed(request, self.axis)))
        builder = ProblemBuilder(space)
        again = [bool(body.again.operators) for body in space.bodies]
        seen: list[Assignment] = []
        parts = RECOMPUTED if limit is not None and on.training.recompute == "auto" and any(again) else ()
        for preset in [request.preset] if request.preset else [None, *(PRESETS if request.solver == AUTO else ())]:
            search = Search(builder, request.exact_solver, Options(space, pinned), effort=on.effort)
            try:
                allowed = None if preset is None else self._of_preset(on, preset, pinned)
                solved: Solved = on.seconds.timed("search", search.explore, allowed, bounded=False)
            except ValueError as error:
                if preset == request.preset:
                    raise
                logger.info("no plan by %s: %s", preset, error)
                continue
            if solved.assignment in seen:
                continue
            seen.append(solved.assignment)
            look = self._estimate(Look(on=on, solved=solved, pinned=pinned))
            yield look
            if look.seconds >= least:
                if preset is None:
                    return
                continue
            variants = [look]
            for part in parts:
                if limit is None or variants[-1].bytes <= AIMS[-1] * limit:
                    break
                assignment = solved.assignment
                recompute = tuple(
                    tuple(is_able and k < math.ceil(part * len(copies)) for k in range(len(copies)))
                    for is_able, copies in zip(again, assignment.copies, strict=True)
                )
                variant = replace(solved, assignment=replace(assignment, recompute=recompute))
                variants.append(self._estimate(replace(look, solved=variant)))
                yield variants[-1]
            least = min(least, _quickest(variants, limit))

    def _account(self, on: StagePlanner, assignment: Assignment) -> Account:
        key = on.training.micro_batches, assignment
        if key not in self.accounts:
            self.accounts[key] = account(on.space, assignment)
        return self.accounts[key]

    def _estimate(self, look: Look) -> Look:
        items, m = self._account(look.on, look.solved.assignment), look.micro_batches
        bubble = 1 + (self.devices - 1) / m / 2
        return replace(
            look, seconds=items.seconds / self.devices * bubble, bytes=self._bytes(look.on, look.solved.assignment),
            rest_bytes=_rest_bytes(items) / self.devices,
        )  # fmt: skip

    def _bytes(self, on: StagePlanner, assignment: Assignment) -> float:
        """About what a device needs: its share of what is at rest, and of the micro-batches in flight, which are the
        fewer the later its stage, and of which stages before `recomputed` keep the less; and what its units need while
        they run, as far as that is known."""
        copies = [again for number in range(len(assignment.copies)) for again in assignment.again(number)]
        part = sum(copies) / max(1, len(copies))
        items, of_all = (self._account(on, one) for one in (assignment, replace(assignment, recompute=())))
        held, kept = (of.activation_bytes / on.space.in_flight for of in (items, of_all))
        less = (held - (1 - part) * kept) / part if part else kept
        shares = [min(1.0, max(0.0, part * self.devices - k)) for k in range(self.devices)]
        flights = [min(on.training.micro_batches, self.devices - k) for k in range(self.devices)]
        apart = [
            on.space.decided(site, assignment.rest[name]).bytes
            for name, site in on.space.rest.sites.items()
            if site.kind == "parameter"
        ]  # outside of layers, where a stage has one of those that are large
        resting = _rest_bytes(items) - sum(apart) + self.devices * max(apart, default=0.0)
        most = max(n * (share * less + (1 - share) * kept) for n, share in zip(flights, shares, strict=True))
        return (resting + most) / self.devices + self.working[on.training.micro_batches]

    def _within(self, look: Look, request: Request, limit: float, allowed: Allowed | None) -> Iterator[Look]:
        """An assignment of which a device needs no more than the limit, if there is one of the options that are allowed
        (None: all) with layers recomputed."""
        on = look.on

        def sized(assignment: Assignment, accuracy: Accuracy) -> Size:
            """Of all devices together, as the sum of bytes that is searched."""
            return Size(self.devices * self._bytes(on, assignment))

        search = Search(
            ProblemBuilder(on.space), request.exact_solver, Options(on.space, look.pinned, self.devices * limit),
            evaluate=sized, effort=on.effort, recompute=on.training.recompute == "auto", stage=request.stage,
        )  # fmt: skip
        try:
            search.explore(allowed, bounded=False, known=look.solved)
            solved: Solved = on.seconds.timed("limit", search.within, sized)
        except Infeasible as error:
            logger.info("%d micro-batches: %s", look.micro_batches, error)
            self.estimated = min(self.estimated, error.smallest_bytes / self.devices)
            return
        yield self._estimate(replace(look, solved=solved))

    def _near(self, look: Look) -> Allowed:
        """What an assignment chose, and for parameters the same with a split at rest on each axis where they are
        replicated."""
        space = look.on.space
        near = taken(space, look.solved.assignment)
        for name, site in unique_sites(space).items():
            for choice in near[name] if site.kind == "parameter" else ():
                for axis, on_axis in enumerate(choice.axes[1:], 1):
                    splits = site.choices[space.mesh[axis]] if on_axis == REPLICATED else ()
                    for split in [c for c in splits if c.splits and c.factor < 2]:
                        axes = (*choice.axes[:axis], split, *choice.axes[axis + 1 :])
                        near[name] = [*near[name], *(SiteChoice(axes, policy) for policy in (KEEP, REGATHER))]
        return {name: list(dict.fromkeys(choices)) for name, choices in near.items()}

    def _of_preset(self, on: StagePlanner, preset: str, pinned: Pins) -> Allowed:
        """The options that a preset leaves on all axes but the one in time."""
        return {
            name: list(
                dict.fromkeys(SiteChoice((at, *c.axes[1:]), c.policy) for c in choices for at in pinned[name][TIME])
            )
            for name, choices in on.preset(preset).items()
        }

    # ---- stages

    def _made_within(self, look: Look, request: Request, limit: float | None, least: float) -> Made | None:
        """The best stages of an assignment that keep the limit, if any do. No schedule is searched that cannot undercut
        a step of `least` seconds."""
        on = look.on
        program = on.writer.plain(look.solved.assignment)
        pieces_of = self._pieces(look, program, request)
        beyond = [0.0] * self.devices
        for _ in range(TRIES):
            found = [*self._made(look, request, pieces_of, program, limit, beyond, least)]
            if not found:
                logger.info("%d micro-batches: no cuts within %s bytes", look.micro_batches, limit)
                return None
            made, estimated = min(found, key=lambda one: _order(one[0], limit))
            self.smallest = min(self.smallest, made.peak)
            working = max(stage.working for stage in made.step.figures.stages)
            self.working[look.micro_batches] = max(self.working[look.micro_batches], working)
            what = f"{look.micro_batches} micro-batches, {made.step.run.schedule.name}"
            logger.info("%s: %.4g s, about %.4g", what, made.step.seconds, look.seconds)
            logger.info("%s: %.3g bytes, about %.3g", what, made.peak, look.bytes)
            if limit is None or made.peak <= limit:
                return made
            beyond = [max(0.0, peak.bytes - about) for peak, about in zip(made.step.peaks, estimated, strict=True)]
        return None

    def _made(
        self,
        look: Look,
        request: Request,
        pieces_of: tuple[ForwardPieces, list[Span] | None],
        program: Program,
        limit: float | None,
        beyond: Sequence[float],
        least: float,
    ) -> Iterator[tuple[Made, list[float]]]:
        """Steps of an assignment by the best schedules and a searched one, with cuts whose stages are estimated to keep
        the limit, less what devices need `beyond` estimates; and these estimates."""
        on, m, (parts, spans) = look.on, look.micro_batches, pieces_of
        assert isinstance(on.cluster, StagedCluster)
        link = on.cluster.between_stages(on.space.mesh)
        chain, most = parts.chain(m), math.inf if limit is None else limit
        found: list[tuple[float, tuple[int, ...], Scheduler, int]] = []
        for row, chunks in self._schedules(request, spans is not None, len(parts.names)):
            few = min(m, FEW * self.devices)
            schedule = scheduled(row.name, self.devices, few, chunks=chunks)
            flight = [min(m, n) if n < few else m for n in schedule.in_flight(range(schedule.stages))]
            limits = [(most - beyond[device]) / chunks for device in schedule.devices]
            if (places := cut(chain, flight, limits, spans)) is not None:
                found.append((self._estimated(parts, places, schedule, link, m), tuple(places), row, chunks))
        if not found and self.devices > len(parts.names):
            raise ValueError(
                f"the mesh has {self.devices} stages on {self.axis!r}, and {on.facts.name} can be cut into "
                f"{len(parts.names)} pieces: give fewer stages"
            )
        found.sort(key=lambda one: one[0])
        few_cuts = CUT if len(program.nodes) < WORK else 1
        for cuts in list(dict.fromkeys(cuts for _, cuts, _, _ in found))[:few_cuts]:
            names = tuple(parts.names[at] for at in cuts)
            of_stages = self.figures(look, program, names)
            best: Made | None = None
            for seconds, other, row, chunks in found:
                if len(other) == len(cuts) and (best is None or seconds < CLOSE * found[0][0]):
                    schedule = scheduled(row.name, self.devices, m, chunks=chunks)
                    made = Made(look=look, cuts=names, chunks=chunks, step=of_stages.step(schedule))
                    peaks = PipelineCosts(stages=tuple(parts.costs(cuts)[0])).peaks(schedule)
                    yield made, [size for size, _ in peaks]
                    best = min(filter(None, (best, made)), key=lambda made: _order(made, limit))
            assert best is not None
            if limit is None or best.peak <= limit:
                least = min(least, best.step.seconds)
            yield from ((made, [0.0] * self.devices) for made in self._searched(best, request, limit, least))

    def _searched(self, made: Made, request: Request, limit: float | None, least: float) -> Iterator[Made]:
        """The step by a schedule that is searched for these stages, if that was asked for, or is soon done and may
        undercut a step of `least` seconds."""
        units = 3 * made.look.micro_batches * len(made.step.figures.stages)
        is_soon_done = request.schedule == AUTO and units <= SEARCHED_UNITS
        if request.schedule == "searched" or (is_soon_done and made.step.bound_seconds < least):
            try:
                yield replace(made, step=made.step.figures.step(self.searched(made, limit)))
            except ValueError as error:
                logger.info("%s", error)

    def searched(self, made: Made, limit: float | None) -> Schedule:
        return scheduled(
            "searched", self.devices, made.look.micro_batches, chunks=made.chunks, costs=made.step.figures.costs,
            limit_bytes=math.inf if limit is None else limit - made.step.figures.inputs,
        )  # fmt: skip

    def figures(self, look: Look, program: Program, names: Sequence[str]) -> Figures:
        on = look.on
        cut_up = on.seconds.timed("stages", staged, program, names, gathered_once(on.space, look.solved.assignment))
        return on.seconds.timed("units", figures, cut_up, on.space, on.operators, on.kind_of_device)

    def _schedules(self, request: Request, is_pinned: bool, most: int) -> Iterator[tuple[Scheduler, int]]:
        """Schedules that are simulated, with the stages that a device holds in each; with stages that are pinned, those
        of one."""
        name = "1f1b" if request.schedule == "searched" else request.schedule
        if is_pinned and name != AUTO and SCHEDULES.named(name).chunks != 1:
            raise ValueError(
                f"schedule {name!r} puts several stages on a device, and constraints on {self.axis!r} pin modules to "
                f"the one stage of each: leave out one of them"
            )
        for row in SCHEDULES.values() if name == AUTO else [SCHEDULES.named(name)]:
            if "costs" in row.takes:
                continue
            for chunks in CHUNKS if row.chunks is None else (row.chunks,):
                several = row.chunks is not None or chunks > 1  # with one, it is another schedule
                if several and chunks * self.devices <= most and not (is_pinned and chunks > 1):
                    yield row, chunks

    def _estimated(
        self, parts: ForwardPieces, cuts: Sequence[int], schedule: Schedule, link: Link, micro_batches: int
    ) -> float:
        """The seconds of a step before anything is cut, from a schedule of the first micro-batches: with each of the
        others the busiest device goes on for as long as with those."""
        costs, once = parts.costs(cuts)
        devices = schedule.devices
        seconds = [collective_seconds("shift", parts.crosses[at], link) for at in cuts]
        edges = {(k, k + 1, "F"): s for k, s in enumerate(seconds)}
        edges |= {(b, a, "B"): s for (a, b, _), s in edges.items()}
        run = simulate(schedule, PipelineCosts(stages=tuple(costs), transfers=edges, shared_links=True))
        more = micro_batches / schedule.micro_batches - 1
        after = [sum(o for o, at in zip(once, devices, strict=True) if at == d) for d in range(self.devices)]
        return max(ends[-1] + o for ends, o in zip(run.ends, after, strict=True)) + more * max(run.busy_seconds)

    # ---- pins of stages

    def _pieces(self, look: Look, program: Program, request: Request) -> tuple[ForwardPieces, list[Span] | None]:
        """The pieces of a program, and where cuts may be so that modules are on the stages that they are pinned to."""
        on, kept = look.on, gathered_once(look.on.space, look.solved.assignment)
        seconds = on.seconds.timed("prices", alone_seconds, program, on.cluster, on.operators)
        pinned = self._pinned(program, request)
        wanted = {at for first, last, _, _ in pinned for at in (first, last + 1)}
        parts: ForwardPieces = on.seconds.timed("pieces", pieces, program, seconds, on.space, kept, wanted)
        if not pinned:
            return parts, None
        spans = [[1, len(parts.names) - 1] for _ in range(self.devices - 1)]
        for first, last, stage, _ in pinned:
            begin, end = (bisect_right(parts.positions, place) - 1 for place in (first, last))
            for number in range(self.devices - 1):
                if number < stage:
                    spans[number][1] = min(spans[number][1], begin)
                else:
                    spans[number][0] = max(spans[number][0], end + 1)
        for (_, _, stage, text), (_, _, later, other) in pairwise(sorted(pinned)):
            if later < stage:
                raise ValueError(
                    f"constraint {other} is a stage before that of {text}, which comes first in forward: pin modules "
                    f"to stages in the order in which the model calls them"
                )
        if any(low > high for low, high in spans):
            raise ValueError(f"constraints on {self.axis!r} leave some stage nothing: pin fewer modules")
        return parts, [(low, high) for low, high in spans]

    def _pinned(self, program: Program, request: Request) -> list[tuple[int, int, int, str]]:
        """Of each pin the first and the last place of the module in forward, the stage, and what was said."""
        asked = [(p, str(axes[self.axis])) for p, axes in (request.constraints or {}).items() if self.axis in axes]
        places: dict[str, list[int]] = {}
        if asked:
            kinds = Kinds(unstacked(program))
            for place, node in enumerate(kinds.program.forward):
                if kinds.is_of_stage(node):
                    places.setdefault(node.module, []).append(place)
        found = []
        for pattern, text in asked:
            said = f"{pattern!r}: {self.axis}={text}"
            if not text.isdecimal() or int(text) >= self.devices:
                raise ValueError(f"constraint {said} is no stage: give 0 to {self.devices - 1}")
            own = sorted(place for module, some in places.items() if matches(module, pattern) for place in some)
            if not own:
                raise ValueError(f"constraint {said} names no module of forward{nearest(pattern, places)}")
            found.append((own[0], own[-1], int(text), said))
        return found

    # ---- plans

    def again(self, plan: Plan) -> Made:
        """The step that a plan says, with its own cuts. Raises ValueError for cuts that are none."""
        on, said = self.planner, plan.pipeline
        assert said is not None
        solved = Solved(on.assignment(plan), Score(seconds=plan.objective_seconds, bytes=0.0), 0.0)
        look = Look(on=on, solved=solved, pinned={})
        if said.micro_batches != on.training.micro_batches:
            raise ValueError(
                f"the plan's stages have {said.micro_batches} micro-batches, and its training has "
                f"{on.training.micro_batches}: give both the same"
            )
        if len(said.cuts) != said.chunks * self.devices - 1:
            raise ValueError(
                f"the plan has {len(said.cuts)} cuts, and {said.chunks} stages on each of {self.devices} devices: give "
                f"{said.chunks * self.devices - 1}"
            )
        of_stages = self.figures(look, on.writer.plain(solved.assignment), tuple(said.cuts))
        first = "1f1b" if said.chunks == 1 else "interleaved"
        schedule = said.schedule if said.schedule != "searched" else first
        run = scheduled(schedule, self.devices, said.micro_batches, chunks=said.chunks)
        made = Made(look=look, cuts=tuple(said.cuts), chunks=said.chunks, step=of_stages.step(run))
        if said.schedule == "searched":
            limit = plan.memory_limit_bytes
            within = None if limit is None else limit * (1 - plan.headroom)
            made = replace(made, step=of_stages.step(self.searched(made, within)))
        return made

    def repriced(self, plan: Plan) -> Plan:
        """The plan with its figures computed again."""
        limit = math.inf if plan.memory_limit_bytes is None else plan.memory_limit_bytes
        request = Request(
            solver=plan.solver, cost=plan.cost, memory_limit_bytes=limit, constraints=plan.constraints or None
        )
        return replace(
            self.described(self.again(plan), request, plan.solve_seconds),
            memory_limit_from=plan.memory_limit_from,
            headroom=plan.headroom,
        )

    def described(self, made: Made, request: Request, spent: float) -> Plan:
        """A step as a plan."""
        on, step, solved = made.look.on, made.step, made.look.solved
        busiest = max(range(self.devices), key=lambda device: step.run.busy_seconds[device])
        stages, cut_up = [step.figures.stages[s] for s in step.held[busiest]], step.figures.staged
        unit = in_sequence([(line, 1) for stage in stages for line in stage.timelines])
        m, after = made.look.micro_batches, sum(stage.after for stage in stages)
        where = timing(unit, after, after + m * unit.seconds)
        idle = max(0.0, step.seconds - after - m * unit.seconds)
        sent = [x.name for x in cut_up.messages if x.source in step.held[busiest]]
        travels = sum(seconds for edge, seconds in step.figures.transfers.items() if edge[0] in step.held[busiest])
        waits = Communication(
            kind="send", axis=self.axis, count=m * len(sent),
            bytes=m * sum(cut_up.program.metas[name].bytes for name in sent),
            seconds=max(m * travels, idle), exposed_seconds=idle,
        )  # fmt: skip
        least = least_step_seconds(on.space, on.effort) / self.devices
        plan = on.subject.described(
            SearchResult(assignment=solved.assignment, score=solved.score, lower_bound=0.0, seconds=spent),
            request,
            StepFigures(
                account=account(on.space, solved.assignment), peak=step.largest, seconds=step.seconds,
                exposed_seconds=m * unit.exposed_seconds + idle,
                timing=replace(where, communication=(*where.communication, waits)),
            ),
            min(least, step.seconds),
        )  # fmt: skip
        plan = replace(plan, pipeline=self._record(made))
        return replace(plan, described=plan.digest)

    def _record(self, made: Made) -> Pipeline:
        step, forward = made.step, made.step.figures.staged.program.forward
        kinds = Kinds(made.step.figures.staged.program)
        begins = [next(k for k, node in enumerate(forward) if node.serves == name) for name in made.cuts]
        stages = []
        for number, (a, b) in enumerate(pairwise((0, *begins, len(forward)))):
            figures = step.figures.stages[number]
            modules = [node.module for node in forward[a:b] if kinds.is_of_stage(node)]
            stages.append(
                StagePlan(
                    device=step.run.schedule.devices[number], first=modules[0] if modules else "",
                    last=modules[-1] if modules else "",
                    layers=len({name for node in forward[a:b] if (name := self._layer.get(node.serves)) is not None}),
                    forward_seconds=figures.cost.forward_seconds, inputs_seconds=figures.cost.inputs_seconds,
                    weights_seconds=figures.cost.weights_seconds, once_seconds=figures.before + figures.after,
                    rest_bytes=round(figures.cost.rest_bytes), held_bytes=round(figures.cost.held_bytes),
                    kept_bytes=round(figures.cost.kept_bytes),
                )
            )  # fmt: skip
        return Pipeline(
            axis=self.axis, schedule=step.run.schedule.name, micro_batches=made.look.micro_batches, chunks=made.chunks,
            cuts={name: forward[at].module for name, at in zip(made.cuts, begins, strict=True)},
            stages=tuple(stages), bubble_rate=step.run.bubble_rate, idle_rate=step.run.idle_rate,
            in_flight=tuple(step.run.in_flight), peak_bytes=tuple(peak.bytes for peak in step.peaks),
        )  # fmt: skip

    @cached_property
    def _layer(self) -> Mapping[str, tuple[int, int]]:
        """Operator of forward that a copy of a repeat begins with -> the repeat and the copy."""
        graph = self.planner.captured.graph
        return {
            graph.nodes[copy[0]].name: (number, k)
            for number, repeat in enumerate(self.planner.segments.repeats)
            for k, copy in enumerate(repeat.copies)
        }

    def pipelined(self, plan: Plan) -> tuple[Staged, Schedule]:
        """The stages of a plan, and their schedule of units."""
        made = self.again(plan)
        return made.step.figures.staged, made.step.run.schedule


def _may_beat(look: Look, best: Made | None) -> bool:
    """Whether stages of a look may well have a shorter step than the best."""
    return best is None or CLOSE * look.seconds < best.step.seconds


def _rest_bytes(items: Account) -> float:
    return items.parameter_bytes + items.gradient_bytes + items.optimizer_bytes


def _quickest(looks: Iterable[Look], limit: float | None) -> float:
    """The shortest step of those that are estimated to keep a limit."""
    most = math.inf if limit is None else AIMS[0] * limit
    return min((look.seconds for look in looks if look.bytes <= most), default=math.inf)


def _order(made: Made, limit: float | None) -> tuple[bool, float]:
    """What fits comes first: the shortest; of what does not, the smallest."""
    fits = limit is None or made.peak <= limit
    return not fits, made.step.seconds if fits else made.peak


def _both(one: Pins, other: Pins) -> Pins:
    """The pins of both, of which the latter are on other axes."""
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in {**one, **other}}


def _placed(request: Request, axis: str) -> Mapping[str, Mapping[str, str]]:
    """The constraints but for those that pin modules to stages."""
    constraints = request.constraints or {}
    placed = {name: {a: text for a, text in axes.items() if a != axis} for name, axes in constraints.items()}
    return {name: axes for name, axes in placed.items() if axes}
