"""The choice among candidates: the plan with the shortest step on its timeline.

A candidate is an assignment, and the seconds of its step as well as they are known. Prices lead to candidates, and
candidates to prices:

- *Starts.* One descent from all replicated, as if nothing overlapped, and what each preset leaves at its cheapest.
- *Within a limit* (`limit`) bytes have a price, too. The first descent's plan is brought within it, with half of what
  its timeline hides taken as hidden, and so is each preset's.
- *Prices.* The timeline of the shortest says which part of what travels in buckets hides. At that price descents lead
  on from it, and from all replicated, as long as the step gets shorter.
- *Programs* of few copies estimate steps. Of the quickest whole programs are written, until no other may be quicker.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.passes.flow import Flow
from autopar.passes.space.problem import Allowed, Assignment
from autopar.solve.problem import Infeasible
from autopar.solve.solvers import SOLVERS

from .account import account, least_seconds
from .forked import forked
from .options import resting_bytes
from .plan import Plan
from .presets import PRESETS
from .progress import WHOLE
from .provenance import Candidate
from .request import Request
from .search import Search, SearchResult
from .searches import Searches
from .shortfall import DoesNotFit
from .solving import Solved
from .steps import BUCKETS, EXACT, NEAR, PARTED, QUICK, ROUGH, Accuracy, Estimate, Steps

logger = logging.getLogger("autopar")

Describe = Callable[[SearchResult, Request, Estimate], Plan]
"""Describes a search's result, and its estimate, as a plan."""

Rival = tuple[str, Solved]

OWN = "search"
"""The name of the search's own result."""

AGAIN = "search again"
"""The name of what a descent found at the prices that a timeline gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """A candidate with the seconds of its step, estimated from a program of few copies."""

    name: str
    solved: Solved
    seconds: float
    search: Search | None = None
    """Of the search's own: that which confirms its peak."""


class Choice:
    """Chooses among the candidates of one space. What a choice without a memory limit computed, a second one within a
    limit takes over: the cheapest plan, and what the presets leave."""

    def __init__(self, searches: Searches, steps: Steps, describe: Describe, flow: Flow) -> None:
        self.searches, self.steps, self.describe, self.flow = searches, steps, describe, flow
        self.space, self.effort = searches.space, searches.effort
        self.started = time.perf_counter()
        self.cheapest: Solved | None = None
        self.presets: list[Rival] | None = None
        """Of each preset the cheapest without a limit."""
        self.smallest: dict[str, Assignment] = {}
        """What presets leave that needs the fewest bytes, where the search finds nothing within the limit."""
        self.known: dict[str, Candidate] = {}
        self.stage = WHOLE

    def shortest(self, request: Request, *, below: float = math.inf) -> Plan | None:
        """The plan with the shortest step. None if the cheapest clearly needs more than `below` bytes. A forked process
        solves presets while this one searches."""
        search, self.stage = self.searches.search(request), request.stage
        self.cheapest = cheapest = self.flow.timed("search", search.explore, bounded=False, known=self.cheapest)
        if self.steps.evaluate(cheapest.assignment, ROUGH).bytes > below:
            return None
        self.known, self.smallest, limit = {}, {}, request.bytes_limit
        with forked(lambda: self._of_presets(request), worthwhile=search.is_large, until=self.effort.until) as find:
            found, error = self._own(search, cheapest, request)
            self.presets = self.flow.timed("others", find)
        found += self._rivals(found, replace(request, stage=request.stage.comparing))
        if error is not None and not found:
            raise self._least(error, request)
        plan = self._best_of(self._again(found, request), request, error)
        if limit is None:
            self._estimate_best()
        others = [one for name, one in self.known.items() if plan.provenance and name != plan.provenance.winner]
        assert plan.provenance is not None
        origin = replace(plan.provenance, candidates=tuple(sorted(others, key=lambda one: one.seconds)))
        return replace(plan, provenance=origin, solve_seconds=time.perf_counter() - self.started)

    # ---- the search's own

    def _own(self, search: Search, cheapest: Solved, request: Request) -> tuple[list[Estimated], DoesNotFit | None]:
        """The best within the limit by estimated peaks, or why there is none. If the cheapest needs too much, bytes
        have a price, and less traffic hides than by the cheapest's timeline: what hides it needs bytes."""
        limit = request.bytes_limit
        if limit is not None and self.steps.evaluate(cheapest.assignment, ROUGH).bytes > limit:
            hidden = self._hidden(cheapest)
            search = self.searches.search(request, self.searches.hiding(self.effort.hidden_within * hidden))
            self.flow.timed("search", search.explore, start=cheapest.assignment, bounded=False)
        try:
            solved = self.flow.timed("search", self._within, search)
        except DoesNotFit as error:
            logger.info("the search: %s", error)
            return [], error
        return [self._estimated(OWN, solved, limit, math.inf, search)], None

    def _hidden(self, one: Solved) -> float:
        return self.steps.evaluate(one.assignment, NEAR).hidden_part

    def _within(self, search: Search) -> Solved:
        """With the largest buckets, which hide most, and with smaller ones where none of these fits."""
        limit = search.bytes_limit
        try:
            return search.within(self._evaluate(limit, BUCKETS[:1]))
        except DoesNotFit as error:
            if limit is None or error.smallest_bytes > limit + self.effort.buckets_in_flight * BUCKETS[0]:
                raise
            return self._with_smaller_buckets(search, error)
        except Infeasible as error:
            return self._with_smaller_buckets(search, error)

    def _confirmed(self, search: Search) -> Solved:
        """The best within the limit by exact peaks. Raises `DoesNotFit` if there is none."""
        try:
            return search.confirmed()
        except Infeasible as error:
            self._with_smaller_buckets(search, error)
            return search.confirmed()

    def _with_smaller_buckets(self, search: Search, error: Infeasible) -> Solved:
        logger.info("with buckets of %d MiB %s", BUCKETS[0] >> 20, error)
        return search.within(self._evaluate(search.bytes_limit))

    def _evaluate(
        self, limit: float | None, buckets: tuple[int, ...] = BUCKETS
    ) -> Callable[[Assignment, Accuracy], Estimate]:
        return partial(self.steps.evaluate, limit=limit, buckets=buckets)

    def _least(self, error: DoesNotFit, request: Request) -> DoesNotFit:
        """The error where nothing fits, of the preset's plan that needs the least, if it needs less."""
        evaluate, presets = self._evaluate(request.bytes_limit), self.presets or ()
        may = [(name, one) for name, one in presets if self._resting_bytes(name) < error.smallest_bytes]
        least = [self._smallest(name, one, request) for name, one in may]
        smallest = min(least, key=lambda one: evaluate(one, ROUGH).bytes, default=None)
        if smallest is not None and (needed := evaluate(smallest, EXACT).bytes) < error.smallest_bytes:
            error.smallest_bytes, error.smallest = needed, smallest
        return error

    # ---- presets

    def _of_presets(self, request: Request) -> list[Rival]:
        return list(self._cheapest_of_presets(request)) if self.presets is None else self.presets

    def _cheapest_of_presets(self, request: Request) -> Iterator[Rival]:
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

    def _rivals(self, own: Sequence[Estimated], request: Request) -> Iterator[Estimated]:
        """Of the presets those whose step may be shorter, within the limit, the cheapest first."""
        assert self.presets is not None
        limit, found = request.bytes_limit, [*own]
        at_prices = self._priced_at(min(found, key=_estimate, default=None))
        priced = [(at_prices(other.assignment), name, other) for name, other in self.presets]
        priced.sort(key=lambda item: item[0])
        for (seconds, name, other), stage in zip(priced, request.stage.parts(len(priced)), strict=True):
            least = min((one.seconds for one in found), default=math.inf)
            bound = 0.0 if self.steps.memory.fuses else least_seconds(self.space, other.assignment)
            if any(other.assignment == one.solved.assignment for one in found):
                continue
            if bound >= least or seconds > self.effort.rival * least:
                self._tell(name, bound, "at least")
                continue
            if limit is not None:
                if not own and not self._may_keep(name, other, request, limit):
                    continue
                within = self._preset_within(name, other, replace(request, stage=stage), least)
                if within is None:
                    continue
                other = within
            found.append(self._estimated(name, other, limit, least))
            yield found[-1]

    def _priced_at(self, shortest: Estimated | None) -> Callable[[Assignment], float]:
        """The seconds of assignments at the prices of a candidate's timeline, times what its step is longer or shorter;
        without one, as if nothing overlapped."""
        if shortest is None:
            return lambda assignment: self.steps.account(assignment).seconds
        space = self.searches.hiding(self._hidden(shortest.solved))
        ratio = shortest.seconds / account(space, shortest.solved.assignment).seconds
        return lambda assignment: ratio * account(space, assignment).seconds

    def _resting_bytes(self, name: str) -> float:
        """Bytes that no plan of a preset goes below."""
        return resting_bytes(self.space, self.searches.preset(name))

    def _may_keep(self, name: str, free: Solved, request: Request, limit: float) -> bool:
        """Whether a preset may have something within the limit that the search did not find: what it leaves that needs
        the fewest bytes."""
        if self._resting_bytes(name) > limit:
            return False
        return self.steps.evaluate(self._smallest(name, free, request), ROUGH, limit).bytes <= limit

    def _smallest(self, name: str, free: Solved, request: Request) -> Assignment:
        if name not in self.smallest:
            search = self.searches.search(replace(request, solver="dp"), share=self.effort.limited_preset)
            self.smallest[name] = search.smallest(free, self.searches.preset(name)).assignment
        return self.smallest[name]

    def _preset_within(self, name: str, free: Solved, request: Request, least: float) -> Solved | None:
        """The best of a preset under the limit, if there is one and its step may be shorter than `least` seconds, which
        its best without a limit says."""
        limit, allowed = request.bytes_limit, self.searches.preset(name)
        if limit is not None and (needed := self._resting_bytes(name)) > limit:
            logger.info("%s: no less than %.0f bytes", name, needed)
            return None
        seconds = self.steps.evaluate(free.assignment, QUICK).seconds
        if seconds * (1 - self.effort.unsure) > least:  # and a limit makes no step shorter
            logger.info("%s: a step of about %.3f ms without a limit", name, seconds * 1e3)
            self._tell(name, seconds, "at least")
            return None
        search = self.searches.search(replace(request, solver="dp"), share=self.effort.limited_preset)
        try:
            return self.flow.timed("others", search.mixed, free, allowed)
        except Infeasible as error:
            logger.info("no plan by %s: %s", name, error)
            return None

    # ---- prices that come back

    def _again(self, found: list[Estimated], request: Request) -> list[Estimated]:
        """The candidates, and what descents find at the prices that the timeline of the shortest gives, the shortest
        first. Without a limit descents from all replicated, with either axis first, lead elsewhere, too; within one a
        descent at serial prices, where the first leads nowhere: what hides traffic needs bytes."""
        limit = request.bytes_limit
        found.sort(key=_estimate)
        for number in range(self.effort.rounds):
            shortest = found[0]
            priced = self.steps.account(shortest.solved.assignment)
            if priced.communication_seconds < self.effort.hidden_worth * priced.seconds:
                break
            part = self._hidden(shortest.solved)
            ways: list[tuple[float, Solved | None, bool]] = [(part, shortest.solved, False)]
            if number == 0:
                anew = [(part, None, False), (part, None, True)]
                ways += anew if limit is None else [(0.0, shortest.solved, False)]
            for at, start, fast_first in ways:
                near = None if self.effort.is_over else self._near(at, start, request, part, fast_first=fast_first)
                if near is None or any(near.assignment == one.solved.assignment for one in found):
                    continue
                found.append(self._estimated(AGAIN, near, limit, shortest.seconds))
                if limit is not None and found[-1].seconds < shortest.seconds * (1 - self.effort.gain):
                    break
            found.sort(key=_estimate)
            if found[0].seconds >= shortest.seconds * (1 - self.effort.round_gain):
                break
        return found

    def _near(
        self, part: float, start: Solved | None, request: Request, hidden: float, *, fast_first: bool
    ) -> Solved | None:
        """What a descent from another solution (None: from all replicated) finds if so much of the traffic in buckets
        is hidden; None if nothing of it keeps the limit, or it pays not where a part of `hidden` is."""
        share = self.effort.hidden_share if request.bytes_limit is None else self.effort.limited_preset
        search = self.searches.search(request, self.searches.hiding(part), share)
        try:
            weighed = self.searches.hiding(hidden)
            return self.flow.timed("others", search.near, start, weighed, fast_first=fast_first)
        except Infeasible as error:
            logger.info("no plan at a part of %.2f hidden: %s", part, error)
            return None

    # ---- how long steps take

    def _estimated(
        self, name: str, solved: Solved, limit: float | None, least: float, search: Search | None = None
    ) -> Estimated:
        """With the seconds of a program of few copies; in parts, if that may make the step shorter than `least`."""
        sure, assignment = 1 - self.effort.unsure, solved.assignment
        estimate = self.steps.evaluate(assignment, QUICK, limit)
        # what is written in parts saves no more than what is exposed
        if (estimate.seconds - estimate.exposed_seconds) * sure <= least and self.steps.writer.is_split(assignment):
            estimate = self.steps.evaluate(assignment, PARTED, limit)
        is_over = estimate.is_exact and limit is not None and estimate.bytes > limit
        seconds = math.inf if is_over else estimate.seconds
        logger.info("%s: a step of about %.3f ms", name, seconds * 1e3)
        self.stage.found(seconds)
        self._tell(name, seconds, "estimated")
        return Estimated(name=name, solved=solved, seconds=seconds, search=search)

    def _best_of(self, candidates: list[Estimated], request: Request, error: Infeasible | None) -> Plan:
        """The plan with the shortest step: of candidates that are estimated to be longer no whole program is written.
        Raises the `error`, or what else the search's own plan raises, if none fits."""
        limit, best = request.bytes_limit, None
        for one, _ in zip(candidates, request.stage.writing.parts(len(candidates)), strict=True):
            if best is not None and (self.effort.is_over or one.seconds >= best.seconds):
                break
            try:
                solved = self.flow.timed("search", self._confirmed, one.search) if one.search else one.solved
            except DoesNotFit as raised:
                error = raised
                continue
            estimate = self._evaluate(limit)(solved.assignment, EXACT)
            plan = self.flow.timed("describe", self.describe, self.searches.found(solved), request, estimate)
            self._tell(one.name, plan.seconds, "simulated", plan.bytes)
            logger.info("%s: a step of %.3f ms, %d bytes", one.name, plan.seconds * 1e3, plan.bytes)
            if one.search is None and limit is not None and plan.bytes > limit:
                continue
            if best is None or plan.seconds < best.seconds * (1 - self.effort.gain):
                assert plan.provenance is not None
                best = replace(plan, provenance=replace(plan.provenance, winner=one.name))
        if best is None:
            assert error is not None  # the search's own fits, or raises
            raise error
        return best

    def _tell(self, name: str, seconds: float, precision: str, size: float | None = None) -> None:
        """Of candidates of one name that are estimated, the shortest counts."""
        known = self.known.get(name)
        is_longer = known is not None and known.precision == precision == "estimated" and known.seconds <= seconds
        if math.isfinite(seconds) and not is_longer:
            self.known[name] = Candidate(name=name, seconds=seconds, precision=precision, bytes=size)

    def _estimate_best(self) -> None:
        """Estimates the preset with the shortest step, if only a bound of it is known. It may turn out longer than the
        bound of another, which then is what a plan says of presets: each estimate writes programs."""
        presets: Mapping[str, Solved] = dict(self.presets or ())
        best = min((self.known[name] for name in presets if name in self.known), key=_seconds, default=None)
        if best is not None and best.precision == "at least":
            quick, near = (self.steps.evaluate(presets[best.name].assignment, how) for how in (QUICK, NEAR))
            self._tell(best.name, max(quick.seconds, best.seconds), "estimated", near.bytes)


def _seconds(one: Candidate) -> float:
    return one.seconds


def _estimate(one: Estimated) -> float:
    return one.seconds
