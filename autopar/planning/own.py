"""The search's own plan within its limit: with the largest buckets that fit.

Smaller buckets need less memory, and hide less. So plans with the largest come first, and others only where none of
these fits.
"""

import logging
from collections.abc import Iterable

from autopar.passes.space.problem import Assignment
from autopar.solve.problem import Infeasible

from .search import Search
from .shortfall import DoesNotFit
from .solving import Solved
from .steps import BUCKETS, Steps

logger = logging.getLogger("autopar")


class Own:
    """Applies the limits of searches whose peaks `steps` computes."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def within(self, search: Search) -> tuple[Solved | None, DoesNotFit | None]:
        """The best under the limit by estimated peaks, or why there is none."""
        try:
            return self._within(search), None
        except DoesNotFit as error:
            logger.info("the search: %s", error)
            return None, error

    def confirmed(self, search: Search) -> Solved:
        """The best under the limit by exact peaks. Raises `DoesNotFit` if there is none."""
        limit = search.bytes_limit
        try:
            best = search.confirmed()
        except Infeasible as error:
            self._with_smaller_buckets(search, error)
            return search.confirmed()
        if limit is not None:
            self.steps.peaks = {key: peak for key, peak in self.steps.peaks.items() if peak[-1].bytes <= limit}
        return best

    def least(self, error: DoesNotFit, limit: float, others: Iterable[Assignment]) -> DoesNotFit:
        """The error where nothing fits, of that among other assignments which needs the least, if it needs less."""
        peaks = self.steps.peaks_of(limit)
        smallest = min(others, key=peaks.estimate, default=None)
        if smallest is not None and (needed := peaks.exact(smallest)) < error.smallest_bytes:
            error.smallest_bytes, error.smallest = needed, smallest
        return error

    def _within(self, search: Search) -> Solved:
        limit = search.bytes_limit
        if limit is None:
            return search.within(None)
        try:
            return search.within(self.steps.peaks_of(limit, BUCKETS[:1]))
        except Infeasible as error:
            return self._with_smaller_buckets(search, error)

    def _with_smaller_buckets(self, search: Search, error: Infeasible) -> Solved:
        logger.info("with buckets of %d MiB %s", BUCKETS[0] >> 20, error)
        self.steps.forget()
        return search.within(self.steps.peaks_of(search.bytes_limit))
