"""What one elimination may take, and the work of a solve. It is counted and not timed: the same inputs give the same
answer on any machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

NODE_WORK = 40_000.0
"""Work of finding a node's place in an order of elimination: some 20 microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the tables of an elimination, in entries."""

    table_entries: int = 8_000_000
    """Of the largest table."""
    elimination_entries: float = 1e8
    """Of all tables."""
    tensor_entries: int = 32_000_000
    """Of the table of one tensor, over what its producer and its readers may take."""


LIMITS = Limits()


@dataclass(slots=True, kw_only=True)
class Work:
    """The work of one solve: what was done, of what may be."""

    most: float = math.inf
    done: float = 0.0
    is_cut: bool = False
    """Whether something was not done for want of work: with more, the answer could be another."""

    @property
    def limits(self) -> Limits:
        return LIMITS

    def takes(self, work: float) -> bool:
        """Whether there is so much left, which then is taken."""
        if self.done + work > self.most:
            self.is_cut = True
            return False
        self.done += work
        return True
