"""Rivals of the search's own plan: those that overlap may favour.

Prices add up the seconds of operators and collectives, and overlap makes a step shorter than that. What another descent
ended with may overlap better. Where more or less of the traffic in buckets is hidden, another plan may be the quickest,
and what some presets leave hides much.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.passes.flow import Flow
from autopar.passes.space.problem import Allowed
from autopar.solve.problem import Infeasible
from autopar.solve.solvers import SOLVERS

from .account import account, least_seconds
from .known import Known
from .options import resting_bytes
from .presets import PRESETS
from .provenance import ELSEWHERE
from .request import Request
from .searches import Searches
from .solving import Solved
from .steps import Steps

logger = logging.getLogger("autopar")

Rival = tuple[str, Solved]

OWN = "search"
"""The name of the search's own result among its rivals."""

AGAIN = "search again"
"""The name of the best near another one, where more or less of the traffic in buckets is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """A rival with the seconds of its step, estimated from a program of few copies."""

    name: str
    solved: Solved
    seconds: float


Estimate = Callable[[str, Solved, float | None, float], Estimated]
"""Of a name, a solution, a limit, and the seconds of a step that it should undercut."""


class Rivals:
    """Finds the rivals of one space, at the prices of its first search. What presets leave without a limit is found
    once."""

    def __init__(self, searches: Searches, steps: Steps, flow: Flow) -> None:
        self.searches, self.steps, self.flow = searches, steps, flow
        self.effort = searches.effort
        self.presets: list[Rival] | None = None

    def searched(self, own: Solved, ends: Sequence[Solved], request: Request, estimate: Estimate) -> list[Estimated]:
        """The search's own result, which comes last, and before it what other descents of it ended with; first the best
        near the shortest of all, if that has a shorter step."""
        limit, others = request.bytes_limit, list[Estimated]()
        own_rival = estimate(OWN, own, limit, math.inf)
        for end in self._others(own, ends):
            least = min(rival.seconds for rival in (own_rival, *others))
            may_be_shorter = least_seconds(self.searches.space, end.assignment) < least
            if may_be_shorter and (limit is None or self.steps.peaks_of(limit).rough(end.assignment) <= limit):
                others.append(estimate(ELSEWHERE, end, limit, least))
        others.sort(key=lambda rival: rival.seconds)
        shortest = min((own_rival, *others), key=lambda rival: rival.seconds)
        near = [rival for rival in self.with_near(shortest, request, estimate) if rival is not shortest]
        return [*near, *others, own_rival]

    def _others(self, own: Solved, ends: Sequence[Solved]) -> Iterator[Solved]:
        """The other ends that are not much dearer, the cheapest first, one of those that cost the same. Where memory
        has a price, they need too much of it."""
        least, most = own.score.objective, own.score.objective * (1 + self.effort.ends_within)
        for end in () if own.price else sorted(ends, key=lambda end: end.score.objective):
            if self.effort.is_over or end.score.objective > most:
                return
            if end.score.objective > least * (1 + self.effort.gain):
                least = end.score.objective
                yield end

    def with_near(self, rival: Estimated, request: Request, estimate: Estimate) -> list[Estimated]:
        """A rival, and before it the best near it, if that has a shorter step: what a descent finds with less of the
        traffic in buckets hidden, or with more. Where memory has a price, none was found that was worth its search."""
        priced, best = account(self.searches.space, rival.solved.assignment), rival
        if rival.solved.price or priced.communication_seconds < self.effort.hidden_worth * priced.seconds:
            return [rival]
        first = () if rival.name in (OWN, ELSEWHERE) else ((self.effort.hidden_part,),)
        for parts in (*first, *self.effort.hidden_parts):
            for part in parts:
                near = None if self.effort.is_over else self._near(part, best.solved, request)
                if near is None or near.assignment in (best.solved.assignment, rival.solved.assignment):
                    break
                other = estimate(AGAIN, near, request.bytes_limit, best.seconds)
                if other.seconds >= best.seconds * (1 - self.effort.gain):
                    break
                best = other
            if best is not rival:
                return [best, rival]
        return [rival]

    def _near(self, part: float, start: Solved, request: Request) -> Solved | None:
        """The best near another plan if so much of the traffic in buckets is hidden; None if it needs more memory."""
        search = self.searches.search(request, self.searches.hiding(part), self.effort.hidden_share)
        return self.flow.timed("others", search.near, start)

    def of_presets(self, request: Request) -> list[Rival]:
        """Of each preset the best without a limit."""
        return list(self._of_presets(request)) if self.presets is None else self.presets

    def _of_presets(self, request: Request) -> Iterator[Rival]:
        free = replace(request, solver="dp", memory_limit_bytes=math.inf)
        search = self.searches.search(free, share=self.effort.preset_share)
        tried: list[Allowed] = []
        for name in PRESETS if SOLVERS[request.solver].exact else ():
            try:
                allowed = self.searches.preset(name)
                options = sum(map(len, allowed.values())) / len(allowed)
                if options > self.effort.preset_options:
                    logger.info("no plan by %s: it leaves %.0f options a site", name, options)
                elif allowed not in tried:
                    tried.append(allowed)
                    yield name, search.explore(allowed, bounded=False)
            except ValueError as error:
                logger.info("no plan by %s: %s", name, error)

    def preset_within(self, name: str, free: Solved, request: Request, least: float, known: Known) -> Solved | None:
        """The best of a preset under the limit, if there is one and its step may be shorter than `least` seconds, which
        its best without a limit says."""
        limit, allowed = request.bytes_limit, self.searches.preset(name)
        if limit is not None and (needed := resting_bytes(self.searches.space, allowed)) > limit:
            logger.info("%s: no less than %.0f bytes", name, needed)
            known.forget(name)
            return None
        seconds, _ = self.flow.timed("steps", self.steps.estimated_seconds, free.assignment, None)
        known.tell(name, seconds, "at least")
        if seconds * (1 - self.effort.unsure) > least:  # and a limit makes no step shorter
            logger.info("%s: a step of about %.3f ms without a limit", name, seconds * 1e3)
            return None
        search = self.searches.search(replace(request, solver="dp"), share=self.effort.limited_preset)
        try:
            return self.flow.timed("others", search.mixed, free, allowed)
        except Infeasible as error:
            logger.info("no plan by %s: %s", name, error)
            known.forget(name)
            return None
