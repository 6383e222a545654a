"""The search that measures: of all plans, those that may be the best (CFP 4.2, 4.3)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cost.streams import TimelineCache, timeline
from autopar.ir.program import Program
from autopar.passes import Flow
from autopar.profile.database import ProgramRow
from autopar.profile.programs import Costs, Measure, Order, segment_programs, structure

from .plan import Plan
from .presets import PRESETS
from .request import Request

if TYPE_CHECKING:
    from .planner import Planner

logger = logging.getLogger("autopar")


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What a search measured. `programs` is CFP's Eq. 7 for the model; `measured` of them were, `known` were in the
    database already, `pruned` were candidates that could not win. `phases` are seconds (CFP Fig. 12): of
    analysis (planning), compilation, measuring, composition."""

    programs: int
    measured: int
    known: int
    abandoned: int
    pruned: int
    phases: Mapping[str, float]

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        return (
            f"{self.programs} segment programs (CFP Eq. 7), {self.measured} measured ({self.abandoned} of them stopped "
            f"early), {self.known} known before, {self.pruned} candidates left out that could not win; {phases}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan with its program; two with the same `key` are one."""

    plan: Plan
    program: Program
    key: str


@dataclass
class Candidates:
    """Looks for the best plan by measuring the segment programs of those that may be the best.

    Candidates are the solver's plans and the presets'. The one predicted best is measured next. A candidate may win
    while its prediction, less what predictions may be off by, is below the best measured one. When none may, the solver
    looks again from the best one, with what is known now; the end is reached when that finds none that may either.
    """

    planner: Planner
    costs: Costs
    measure: Measure
    request: Request
    report: Callable[[float, str], None] = lambda part, what: None

    def run(self) -> tuple[Plan, Profiled]:
        """The best plan, and what it took to find it. Raises ValueError as `plan`."""
        self.costs = replace(self.costs, programs=(), collectives=frozenset())
        self.phases = Flow(dict.fromkeys(("analysis", "compile", "measure", "compose"), 0.0))
        self.counts = dict.fromkeys(("measured", "known", "abandoned"), 0)
        self.off = 0.0
        """The most by which a prediction was too high, of what was measured."""
        self.segments: dict[str, Program] = {}
        """The segment programs of those that were measured."""
        programs: int = self.phases.timed("analysis", self._programs)
        found = {c.key: c for c in self.phases.timed("analysis", self._first)}
        seconds = self.phases.timed("compose", self._seconds, found.values())
        done: dict[str, Candidate] = {}
        pruned = 0
        again = True
        """Whether something was measured since the solver looked for plans."""
        while len(done) < self.planner.effort.measured_programs:
            best = min((seconds[key] for key in done), default=math.inf)
            left = sorted((key for key in found if key not in done), key=seconds.__getitem__)
            doubt = max(self.off, self.planner.effort.doubt / math.sqrt(max(1, len(done))))
            may = [key for key in left if seconds[key] * (1 - doubt) < best]
            pruned = len(left) - len(may)
            if not may and not again:
                break
            if not may:
                nearest = done[min(done, key=seconds.__getitem__)]
                new: dict[str, Candidate] = {}
                for other in self.phases.timed("analysis", self._nearby, nearest):
                    if other.key not in found:
                        new.setdefault(other.key, other)
                found |= new
                seconds |= self.phases.timed("compose", self._seconds, new.values())
                again = False
                continue
            again = True
            key, predicted = may[0], seconds[may[0]]
            row = self._measured(found[key], predicted, best, len(done), len(may))
            done[key] = found[key]
            seconds = self.phases.timed("compose", self._seconds, found.values())
            if len(done) > 1:  # the first was predicted before anything was measured
                self.off = max(self.off, 1 - seconds[key] / predicted)
            logger.info(
                "%s plan: predicted %.1f ms, composed of what was measured %.1f ms; segment program %.1f ms in %d runs",
                done[key].plan.solver, predicted * 1e3, seconds[key] * 1e3, row.seconds * 1e3, row.runs,
            )  # fmt: skip
        best_of_all = done[min(done, key=seconds.__getitem__)]
        told = Profiled(programs=programs, pruned=pruned, phases=self.phases, **self.counts)
        logger.info("%s", told)
        plan = self.phases.timed("compose", lambda: self.planner.profiled(self.costs).again(best_of_all.plan))
        return replace(plan, cost=self.request.cost), told

    def _programs(self) -> int:
        planner = self.planner
        return segment_programs(planner.captured.graph, planner.segments, planner.space.mesh)

    def _candidate(self, plan: Plan) -> Candidate:
        planner = self.planner
        program = planner.writer.written(planner.assignment(plan), plan.bucket_bytes)
        return Candidate(plan=plan, program=program, key=structure(program))

    def _first(self) -> list[Candidate]:
        """The solver's plan, and the presets'."""
        plans, asked = [], self.request.solver
        for name in dict.fromkeys((asked, *(() if self.request.preset else PRESETS))):
            try:
                plans.append(self.planner.planned(replace(self.request, solver=name, cost="analytical")))
            except ValueError as error:
                if name == asked:
                    raise
                logger.info("%s is no candidate: %s", name, error)
        return [self._candidate(plan) for plan in plans if self._fits(plan)]

    def _nearby(self, start: Candidate) -> list[Candidate]:
        """What the solver finds from there with the costs known now."""
        if self.request.preset:
            return []
        plans = self.planner.profiled(self.costs).nearby(start.plan, replace(self.request, cost="analytical"))
        return [self._candidate(plan) for plan in plans if self._fits(plan)]

    def _fits(self, plan: Plan) -> bool:
        limit = self.request.memory_limit_bytes
        return limit is None or plan.bytes <= limit

    def _seconds(self, candidates: Iterable[Candidate]) -> dict[str, float]:
        """Of a step of each, by its key, as far as is known now."""
        cluster = self.costs.measured(self.planner.space.mesh)
        optimizer, known = self.planner.optimizer.name, TimelineCache(placements=self.planner.memory)
        usual = self.costs.usual_correction(self.planner.space.mesh)

        def seconds(c: Candidate) -> float:
            segment = self.segments.get(c.key)
            ratio = usual if segment is None else self.costs.correction(segment, cluster, known)
            updating = cluster.device.optimizer_seconds(optimizer, self.planner.moved_bytes(c.program))
            return timeline(c.program, cluster, known).seconds * ratio + updating

        return {c.key: seconds(c) for c in candidates}

    def _measured(self, candidate: Candidate, predicted: float, best: float, number: int, left: int) -> ProgramRow:
        """What a candidate's segment program takes, which is measured if it was not before."""
        plan, planner = candidate.plan, self.planner
        program: Program = self.phases.timed(
            "analysis", planner.writer.segment_program, planner.assignment(plan), plan.bucket_bytes
        )
        self.segments[candidate.key] = program
        row = self.costs.row(structure(program), program.mesh)
        if row is None:
            cluster = self.costs.measured(program.mesh)
            told = timeline(program, cluster, TimelineCache(placements=planner.memory))
            ratio = self.costs.usual_correction(program.mesh)
            than = "" if math.isinf(best) else f", best {best * 1e3:.0f} ms"
            self.report(
                number / self.planner.effort.measured_programs,
                f"{plan.solver} plan, predicted {predicted * 1e3:.0f} ms{than}, {left} left",
            )
            order = Order(
                program=program,
                cases=self.costs.unmeasured(program),
                limit_seconds=planner.effort.worthless * told.seconds * ratio * best / predicted,
            )
            found = self.phases.timed("measure", self.measure, order)
            self.phases["measure"] -= found.compile_seconds
            self.phases["compile"] += found.compile_seconds
            about = {
                "model": plan.model,
                "mesh": ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
                "label": plan.solver,
                "fingerprint": planner.fingerprints,
            }
            optimizer, moved = planner.optimizer.name, planner.moved_bytes(program)
            row = self.phases.timed("compose", self.costs.keep, program, found, optimizer, moved, about)
            self.counts["measured"] += 1
            self.counts["abandoned"] += found.abandoned
        else:
            self.counts["known"] += 1
        self.costs = self.costs.also(program)
        return row
