"""Rivals of the search's own plan: those that overlap may favour.

Prices add up the seconds of operators and collectives, and overlap makes a step shorter than that. Where more or less
of the traffic in buckets is hidden, another plan may be the quickest, and what some presets leave hides much.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.passes import Flow
from autopar.passes.space.problem import Allowed
from autopar.passes.space.space import Space
from autopar.solve import SOLVERS
from autopar.solve.problem import Infeasible

from .known import Known
from .options import resting_bytes
from .presets import PRESETS
from .request import Request
from .searches import Searches
from .solving import Solved
from .steps import Steps

logger = logging.getLogger("autopar")

Rival = tuple[str, Solved]


class Rivals:
    """Finds the rivals of one space, at the prices of its first search. What presets leave without a limit is found
    once."""

    def __init__(self, searches: Searches, steps: Steps, flow: Flow) -> None:
        self.searches, self.steps, self.flow = searches, steps, flow
        self.effort = searches.effort
        self.presets: list[Rival] | None = None

    @property
    def _space(self) -> Space:
        return self.searches.hiding(self.effort.hidden_part)

    def near(self, part: float, start: Solved, request: Request) -> Solved | None:
        """The best near another plan if so much of the traffic in buckets is hidden; None if it needs more memory."""
        search = self.searches.search(request, self.searches.hiding(part), self.effort.hidden_share)
        return self.flow.timed("others", search.near, start)

    def of_presets(self, request: Request) -> list[Rival]:
        """Of each preset the best without a limit."""
        return list(self._of_presets(request)) if self.presets is None else self.presets

    def _of_presets(self, request: Request) -> Iterator[Rival]:
        free = replace(request, solver="dp", memory_limit_bytes=math.inf)
        search = self.searches.search(free, self._space, self.effort.preset_share)
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

    def preset_within(
        self, name: str, free: Solved, request: Request, least: float, known: Known
    ) -> Solved | None:
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
        search = self.searches.search(replace(request, solver="dp"), self._space, self.effort.limited_preset)
        try:
            return self.flow.timed("others", search.mixed, free, allowed)
        except Infeasible as error:
            logger.info("no plan by %s: %s", name, error)
            known.forget(name)
            return None
