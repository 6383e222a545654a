"""The choice among candidates: the plan with the shortest step on its timeline.

Prices add up the seconds of operators and collectives, and overlap makes a step shorter than that. So the cheapest plan
competes with its rivals: on programs of few copies, and whole programs are written of the most promising.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.passes.flow import Flow
from autopar.passes.space.problem import Assignment
from autopar.solve.problem import Infeasible

from .account import least_seconds
from .beside import beside
from .known import Known
from .own import Own
from .plan import Plan
from .request import Request
from .rivals import OWN, Estimated, Rival, Rivals
from .search import Search, SearchResult
from .searches import Searches
from .shortfall import DoesNotFit
from .solving import Solved
from .steps import Steps

logger = logging.getLogger("autopar")


Describe = Callable[[SearchResult, Request], Plan]
"""Describes a search's result as a plan."""


class Choice:
    """Chooses among the candidates of one space. What a choice without a memory limit computed, a second one within a
    limit takes over: the cheapest plan, and what the presets leave."""

    def __init__(self, searches: Searches, steps: Steps, describe: Describe, flow: Flow) -> None:
        self.searches, self.steps, self.describe, self.flow = searches, steps, describe, flow
        self.space, self.effort = searches.space, searches.effort
        self.started = time.perf_counter()
        self.ends: list[Solved] = []
        self.rivals, self.known, self.own = Rivals(searches, steps, flow), Known(steps), Own(steps)

    def shortest(self, search: Search, request: Request, *, below: float = math.inf) -> Plan | None:
        """The plan with the shortest step on its timeline, of the search's own and its rivals. A forked process solves
        presets while this one applies the limit. None if the cheapest clearly needs more than `below` bytes."""
        cheapest = self.flow.timed("search", search.explore, bounded=False, known=self.ends)
        self.ends = search.descent.ends
        if below < math.inf:
            peak_bytes = self.steps.peaks_of(None).estimate(cheapest.assignment)
            if peak_bytes > below * (1 + self.effort.limit_unsure):
                return None
        with beside(lambda: self.rivals.of_presets(request), worthwhile=search.is_large) as find:
            own, error = self.flow.timed("search", self.own.within, search)
            self.known = Known(self.steps)
            found = [] if own is None else self.rivals.searched(own, self.ends, request, self._in_few)
            presets = self.rivals.presets = self.flow.timed("others", find)
        rivals = self._estimated(found, presets, replace(request, stage=request.stage.comparing))
        if rivals and rivals[0] not in found:
            rivals = self.rivals.with_near(rivals[0], request, self._in_few) + rivals[1:]
        if error is not None and not rivals and (limit := request.bytes_limit) is not None:
            raise self.own.least(error, limit, (other.assignment for _, other in presets))
        plan = self._best_of(rivals, search, request, error)
        free = {name: other.assignment for name, other in presets} if request.bytes_limit is None else {}
        plan = self.known.added(plan, free)
        return replace(plan, solve_seconds=time.perf_counter() - self.started)

    def _estimated(self, own: list[Estimated], presets: Sequence[Rival], request: Request) -> list[Estimated]:
        """The search's own results and those of the presets that may have a shorter step, under the limit, the shortest
        estimated step first."""
        limit, found = request.bytes_limit, [*own]
        tried: list[Assignment] = []
        objective = self.searches.found(own[-1].solved).score.objective if own else math.inf
        cheapest_first = sorted(presets, key=lambda item: item[1].score.objective)
        for (name, other), stage in zip(cheapest_first, request.stage.parts(len(presets)), strict=True):
            if self.effort.is_over and own and other.score.objective >= objective:
                continue  # what remains is to see that no preset is better by the prices
            least = min((one.seconds for one in found), default=math.inf)
            if (bound := least_seconds(self.space, other.assignment)) >= least or other.assignment in tried:
                self.known.tell(name, bound, "at least")
                continue
            if limit is not None:
                if not own and self._is_far(other, limit):
                    continue
                tried.append(other.assignment)
                asked = replace(request, stage=stage)
                if (within := self.rivals.preset_within(name, other, asked, least, self.known)) is None:
                    continue
                other = within
            if all(other.assignment != one.solved.assignment for one in found):
                found.append(self._in_few(name, other, limit, least))
        return sorted(found, key=lambda one: one.seconds)

    def _is_far(self, other: Solved, limit: float) -> bool:
        """Whether a rival needs so much more than the limit that it keeps none where the search does not."""
        return self.steps.peaks_of(limit).estimate(other.assignment) > limit * (1 + self.effort.limit_near)

    def _in_few(self, name: str, solved: Solved, limit: float | None, least: float) -> Estimated:
        """With the seconds of a program of few copies; in parts, if that may make the step shorter than `least`."""
        sure, assignment = 1 - self.effort.unsure, solved.assignment
        seconds, exposed = self.flow.timed("steps", self.steps.estimated_seconds, assignment, limit)
        # what is written in parts saves no more than what is exposed
        if (seconds - exposed) * sure <= least and seconds * (1 - self.effort.unsplit) <= least:
            seconds, _ = self.flow.timed("steps", self.steps.estimated_seconds, assignment, limit, split=True)
        logger.info("%s: a step of about %.3f ms", name, seconds * 1e3)
        self.known.tell(name, seconds, "estimated")
        return Estimated(name=name, solved=solved, seconds=seconds)

    def _best_of(self, rivals: Sequence[Estimated], search: Search, request: Request, error: Infeasible | None) -> Plan:
        """The plan with the shortest step. How far the estimate of the first was off says how far others may be. Raises
        the `error`, or what else the search's own plan raises, if none fits."""
        limit, best, doubt = request.bytes_limit, None, self.effort.unsure
        for rival, _ in zip(rivals, request.stage.writing.parts(len(rivals)), strict=True):
            if best is not None and (self.effort.is_over or rival.seconds * (1 - doubt) > best.seconds):
                break
            try:
                solved = self.flow.timed("search", self.own.confirmed, search) if rival.name == OWN else rival.solved
            except DoesNotFit as raised:
                error = raised
                continue
            result = self.searches.found(solved)
            plan = self.known.described(self.flow.timed("describe", self.describe, result, request), rival.name)
            if solved.assignment == rival.solved.assignment and plan.seconds:
                wrong = abs(rival.seconds / plan.seconds - 1)
                doubt = min(doubt, max(self.effort.least_doubt, self.effort.doubt_rise * wrong))
            logger.info("%s: a step of %.3f ms, %d bytes", rival.name, plan.seconds * 1e3, plan.bytes)
            if rival.name != OWN and limit is not None and plan.bytes > limit:
                continue
            if best is None or plan.seconds < best.seconds * (1 - self.effort.gain):
                best = plan
        if best is None:
            assert error is not None  # the search's own fits, or raises
            raise error
        return best
