"""The search that measures the plans that may be the best (CFP 4.2, 4.3)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cost.streams import TimelineCache, timeline
from autopar.ir.layout import local_meta
from autopar.ir.program import Program
from autopar.passes.flow import Flow
from autopar.passes.segments.facts import fingerprint
from autopar.profile.database import ProgramRow
from autopar.profile.programs import Costs, Measure, Order, segment_programs, structure

from .plan import Plan
from .presets import PRESETS
from .repriced import nearby, repriced
from .request import Request

if TYPE_CHECKING:
    from .planner import Planner

logger = logging.getLogger("autopar")


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What a search measured. CFP's Eq. 7 counts the `programs` of the model. The search `measured` some of them, took
    those `recorded` in the database from there, and left out the `pruned`, which could not win. `phases` are seconds
    (CFP Fig. 12) of analysis (planning), compilation, measuring and composition."""

    programs: int
    measured: int
    recorded: int
    abandoned: int
    pruned: int
    phases: Mapping[str, float]

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        return (
            f"{self.programs} segment programs (CFP Eq. 7), {self.measured} measured ({self.abandoned} of them stopped "
            f"early), {self.recorded} recorded before, {self.pruned} candidates left out that could not win; {phases}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A plan; candidates whose programs have the same `key` are the same."""

    plan: Plan
    key: str


@dataclass
class Candidates:
    """Searches for the best plan by measuring the segment programs of candidates.

    The solver and the presets give the candidates, and the one with the best prediction is measured next. A candidate
    may win while its prediction, less the error of predictions so far, is below the best measurement. When none may
    win, the solver searches again from the best one at the measured prices; the search ends when that adds none that
    may win.
    """

    planner: Planner
    costs: Costs
    measure: Measure
    request: Request
    report: Callable[[float, str], None] = lambda part, what: None

    def run(self) -> tuple[Plan, Profiled]:
        """The best plan, and what was measured for it. Raises ValueError as `plan`."""
        self.costs = replace(self.costs, programs=(), collectives=frozenset())
        self.phases = Flow(dict.fromkeys(("analysis", "compile", "measure", "compose"), 0.0))
        self.counts = dict.fromkeys(("measured", "recorded", "abandoned"), 0)
        self.off = 0.0
        """The largest share by which a prediction exceeded its measurement."""
        planner = self.planner
        programs: int = self.phases.timed(
            "analysis", segment_programs, planner.captured.graph, planner.segments, planner.space.mesh
        )
        candidates = {c.key: c for c in self.phases.timed("analysis", self._first)}
        seconds = self.phases.timed("compose", self._seconds, candidates.values())
        done: dict[str, Contender] = {}
        pruned = 0
        again = True
        """Whether something was measured since the solver's last search."""
        while len(done) < planner.effort.measured_programs:
            best = min((seconds[key] for key in done), default=math.inf)
            left = sorted((key for key in candidates if key not in done), key=seconds.__getitem__)
            doubt = max(self.off, planner.effort.doubt / math.sqrt(max(1, len(done))))
            may = [key for key in left if seconds[key] * (1 - doubt) < best]
            pruned = len(left) - len(may)
            if not may and not again:
                break
            if not may:
                nearest = done[min(done, key=seconds.__getitem__)]
                new: dict[str, Contender] = {}
                for other in self.phases.timed("analysis", self._nearby, nearest):
                    if other.key not in candidates:
                        new.setdefault(other.key, other)
                candidates |= new
                seconds |= self.phases.timed("compose", self._seconds, new.values())
                again = False
                continue
            again = True
            key, predicted = may[0], seconds[may[0]]
            row = self._measured(candidates[key], predicted, best, len(done), len(may))
            done[key] = candidates[key]
            seconds = self.phases.timed("compose", self._seconds, candidates.values())
            if len(done) > 1:  # the first prediction rests on no measurement
                self.off = max(self.off, 1 - seconds[key] / predicted)
            logger.info(
                "%s plan: predicted %.1f ms, composed of measurements %.1f ms; segment program %.1f ms in %d runs",
                done[key].plan.solver, predicted * 1e3, seconds[key] * 1e3, row.seconds * 1e3, row.runs,
            )  # fmt: skip
        best_of_all = done[min(done, key=seconds.__getitem__)]
        summary = Profiled(programs=programs, pruned=pruned, phases=self.phases, **self.counts)
        logger.info("%s", summary)
        plan = self.phases.timed("compose", lambda: repriced(planner.profiled(self.costs), best_of_all.plan))
        return replace(plan, cost=self.request.cost), summary

    def _candidates(self, plans: Iterable[Plan]) -> list[Contender]:
        """Those of the plans that keep the memory limit."""
        planner, limit = self.planner, self.planner.limit(self.request)
        candidates = []
        for plan in plans:
            if limit is None or plan.bytes <= limit:
                program = planner.writer.written(planner.assignment(plan), plan.bucket_bytes)
                candidates.append(Contender(plan=plan, key=structure(program)))
        return candidates

    def _first(self) -> list[Contender]:
        """The solver's plan, and the presets'."""
        plans, asked = [], self.request.solver
        for name in dict.fromkeys((asked, *(() if self.request.preset else PRESETS))):
            try:
                plans.append(self.planner.planned(replace(self.request, solver=name, cost="analytical")))
            except ValueError as error:
                if name == asked:
                    raise
                logger.info("%s is no candidate: %s", name, error)
        return self._candidates(plans)

    def _nearby(self, start: Contender) -> list[Contender]:
        """The solver's plans from there, at the measured prices."""
        if self.request.preset:
            return []
        plans = nearby(self.planner.profiled(self.costs), start.plan, replace(self.request, cost="analytical"))
        return self._candidates(plans)

    def _seconds(self, candidates: Iterable[Contender]) -> dict[str, float]:
        """Key of a candidate -> the seconds of its step, at the measured prices."""
        measured = self.planner.profiled(self.costs)

        def seconds(plan: Plan) -> float:
            return measured.evaluate(measured.assignment(plan), buckets=(plan.bucket_bytes,)).seconds

        return {c.key: seconds(c.plan) for c in candidates}

    def _measured(self, candidate: Contender, predicted: float, best: float, number: int, left: int) -> ProgramRow:
        """The row of a candidate's segment program, which is measured unless the database has it."""
        plan, planner = candidate.plan, self.planner
        program: Program = self.phases.timed(
            "analysis", planner.writer.segment_program, planner.assignment(plan), plan.bucket_bytes
        )
        row = self.costs.row(structure(program), program.mesh)
        if row is None:
            cluster = self.costs.measured(program.mesh)
            step = timeline(program, cluster, TimelineCache(placements=planner.memory)).seconds
            ratio = self.costs.usual_correction(program.mesh)
            than = "" if math.isinf(best) else f", best {best * 1e3:.0f} ms"
            self.report(
                number / self.planner.effort.measured_programs,
                f"{plan.solver} plan, predicted {predicted * 1e3:.0f} ms{than}, {left} left",
            )
            order = Order(
                program=program,
                cases=self.costs.unmeasured(program),
                limit_seconds=planner.effort.worthless * step * ratio * best / predicted,
            )
            measurement = self.phases.timed("measure", self.measure, order)
            self.phases["measure"] -= measurement.compile_seconds
            self.phases["compile"] += measurement.compile_seconds
            copies = (repeat.copies[0] for repeat in planner.segments.repeats)
            about = {
                "model": plan.model,
                "mesh": ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
                "label": plan.solver,
                "fingerprint": " ".join(fingerprint(planner.captured.graph, copy) for copy in copies),
            }
            optimizer, moved = planner.optimizer.name, moved_bytes(planner, program)
            row = self.phases.timed("compose", self.costs.keep, program, measurement, optimizer, moved, about)
            self.counts["measured"] += 1
            self.counts["abandoned"] += measurement.abandoned
        else:
            self.counts["recorded"] += 1
        self.costs = self.costs.also(program)
        return row


def moved_bytes(planner: Planner, program: Program) -> int:
    """The bytes that a step of the optimizer reads and writes."""
    return sum(
        planner.optimizer.moved_bytes(local_meta(i.meta, i.layout, program.mesh))
        for i in program.inputs
        if i.role == "parameter" and i.target in program.trained
    )
