"""The choice among candidates: the plan with the shortest step on its timeline.

Prices add up the seconds of operators and collectives, and overlap makes a step shorter than that. So the cheapest plan
competes with the plan of a second search, in which most of the traffic in buckets is hidden, and with those of the
presets.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from autopar.passes import Flow
from autopar.passes.space.problem import Allowed
from autopar.solve import SOLVERS
from autopar.solve.problem import Infeasible

from .account import account, least_seconds
from .beside import beside
from .plan import Plan
from .presets import PRESETS
from .request import Request
from .rivals import Rivals
from .search import Search, SearchResult
from .searches import Searches
from .solving import Solved
from .steps import BUCKETS, Steps

logger = logging.getLogger("autopar")


class Describe(Protocol):
    """Describes a search's result as a plan."""

    def __call__(self, result: SearchResult, request: Request) -> Plan: ...


Rival = tuple[str, SearchResult]


class Choice:
    """Chooses among the candidates of one space. What a choice without a memory limit computed, a second one within a
    limit takes over: the cheapest plan, the bound, and what the presets leave."""

    def __init__(self, searches: Searches, steps: Steps, describe: Describe, flow: Flow) -> None:
        self.searches, self.steps, self.describe, self.flow = searches, steps, describe, flow
        self.space, self.effort = searches.space, searches.effort
        self.started = time.perf_counter()
        self.cheapest: Solved | None = None
        self.bound: float | None = None
        self.presets: list[Rival] | None = None

    def shortest(self, search: Search, request: Request, *, bounded: bool) -> Plan:
        """The plan with the shortest step on its timeline, of the search's own and `_others`. Forked processes compute
        the others and the bound while this one applies the limit and writes the first plan's program."""
        cheapest = self.flow.timed("search", search.explore, bounded=bounded, known=self.cheapest)
        with (
            self._bounding(search, bounded) as bound,
            beside(lambda: self._others(cheapest, request), worthwhile=search.is_large) as others,
        ):
            best: SearchResult = self.flow.timed("search", self._within, search)
            self.bound = self.flow.timed("bound", bound)
            best = replace(best, lower_bound=max(best.lower_bound, self.bound))
            plan = self.flow.timed("describe", self.describe, best, request)
            hidden, self.presets = self.flow.timed("others", others)
            plan = self._shorter(best, plan, [*hidden, *self.presets], request)
        self.cheapest = cheapest
        seconds = time.perf_counter() - self.started
        return replace(plan, lower_bound_seconds=best.lower_bound, solve_seconds=seconds)

    def _bounding(self, search: Search, bounded: bool) -> AbstractContextManager[Callable[[], float]]:
        known = self.bound
        return search.bounding(bounded) if known is None else nullcontext(lambda: known)

    def _within(self, search: Search) -> SearchResult:
        """The search's best under its limit, if it has one: with the largest buckets, or, if nothing fits beside those,
        with smaller ones, which need less memory and hide less."""
        limit = search.bytes_limit
        if limit is None:
            return search.within(None)
        try:
            best = search.within(self.steps.peaks_of(limit, BUCKETS[:1]))
        except Infeasible as error:
            logger.info("with buckets of %d MiB %s", BUCKETS[0] >> 20, error)
            self.steps.forget()
            return search.within(self.steps.peaks_of(limit))
        self.steps.peaks = {key: peak for key, peak in self.steps.peaks.items() if peak[-1].bytes <= limit}
        return best

    def _shorter(self, first: SearchResult, plan: Plan, others: Sequence[Rival], request: Request) -> Plan:
        """The plan of `first`, or of one of the others with a shorter step on its timeline."""
        limit, known = request.bytes_limit, Rivals(self.steps)
        best, seen = known.described(plan, "search"), [first.assignment]
        rivals: list[tuple[float, float, str, SearchResult]] = []
        for name, other in sorted(others, key=lambda item: item[1].score.objective):
            if (least := least_seconds(self.space, other.assignment)) >= plan.seconds:
                known.tell(name, least, "at least")
                continue
            if name in PRESETS and limit is not None:
                free, _ = self.flow.timed("steps", self.steps.estimated_seconds, other.assignment, None)
                known.tell(name, free, "at least")
                if free * (1 - self.effort.unsure) > best.seconds:  # and a limit makes no step shorter
                    logger.info("%s: a step of about %.3f ms without a limit", name, free * 1e3)
                    continue
                try:
                    search = self.searches.search(replace(request, solver="dp"), share=self.effort.limited_preset)
                    other = self.flow.timed("others", search.run, self.searches.preset(name), bounded=False, sure=False)
                except Infeasible as error:
                    logger.info("no plan by %s: %s", name, error)
                    known.forget(name)
                    continue
                other = self.searches.priced(other)
            if other.assignment in seen:
                continue
            seen.append(other.assignment)
            nearly, exposed = self.flow.timed("steps", self.steps.estimated_seconds, other.assignment, limit)
            known.tell(name, nearly, "estimated")
            rivals.append((nearly, exposed, name, other))
        sure = 1 - self.effort.unsure
        # whole programs are written of few: the most promising first
        for nearly, exposed, name, other in sorted(rivals, key=lambda rival: rival[0]):
            # what is written in parts saves no more than what is exposed
            if (nearly - exposed) * sure <= best.seconds and nearly * (1 - self.effort.unsplit) <= best.seconds:
                nearly, _ = self.flow.timed("steps", self.steps.estimated_seconds, other.assignment, limit, split=True)
            if nearly * sure > best.seconds:
                logger.info("%s: a step of about %.3f ms", name, nearly * 1e3)
                continue
            rival = known.described(self.flow.timed("describe", self.describe, other, request), name)
            if rival.seconds < best.seconds * (1 - self.effort.gain) and (limit is None or rival.bytes <= limit):
                logger.info("%s: a step of %.3f ms instead of %.3f", name, rival.seconds * 1e3, best.seconds * 1e3)
                best = rival
        return known.added(best, {name: other.assignment for name, other in others} if limit is None else {})

    def _others(self, cheapest: Solved, request: Request) -> tuple[list[Rival], list[Rival]]:
        """Rivals that overlap may favour, by name, at the prices of the first search: the result, under the limit, of a
        second search from the cheapest plan, in which most of the traffic in buckets is hidden; and those of the
        presets, some of which hide much, without a limit yet."""
        hidden = list(self._hidden(cheapest, request))
        return hidden, list(self._of_presets(request)) if self.presets is None else self.presets

    def _hidden(self, cheapest: Solved, request: Request) -> Iterator[Rival]:
        priced = account(self.space, cheapest.assignment)
        if priced.communication_seconds >= self.effort.hidden_worth * priced.seconds:
            search = self.searches.search(
                request, self.searches.hiding(self.effort.hidden_part), self.effort.hidden_share
            )
            try:
                hidden = search.run(start=cheapest.assignment, bounded=False, thorough=False)
                yield "hidden buckets", self.searches.priced(hidden)
            except Infeasible as error:
                logger.info("no plan with most of the traffic in buckets hidden: %s", error)

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
                    yield name, self.searches.priced(search.run(allowed, bounded=False))
            except ValueError as error:
                logger.info("no plan by %s: %s", name, error)
