"""How much work solves and searches may do before they give the best answer that they have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one solve, counted in work and not in seconds: the same inputs give the same plan on any machine.

    What is spent ends one way of solving and begins the next, cheaper one: elimination, message passing, the integer
    program, operator by operator. Whichever answers, the lower bound is what was proved until then.
    """

    elimination_entries: float = 1e9
    """Of all tables that elimination makes."""
    message_entries: float = 4e9
    """Of all tables that message passing goes through, each time that it does, once for each of their nodes."""
    program_columns: int = 200_000
    """Of an integer program."""
    program_work: float = 2e7
    """Columns times nodes of branch and bound."""
    program_iterations: int = 1_000_000
    """Of the simplex method."""
    beam_options: int = 20_000
    """Of all variables: up to so many, several partial choices are kept operator by operator, and one beyond."""


BUDGET = Budget()

ELIMINATED_WORK = 2.0
"""Work of an entry that elimination makes: several tables are added up for it."""

NODE_WORK = 20_000.0
"""Work of finding a node's place in an order of elimination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """The work of a whole search, in table entries that are read, and the shares of its parts.

    Each part has its share alone, whatever the others leave, so that an answer does not depend on which part comes
    first, or in which process. A part that has spent its share answers with the best that it has; one that has
    nothing yet gets a choice by the cheapest ways of solving.
    """

    work: float = 6e10
    """Of all parts: some 30 seconds of one core, of which usual models need a tenth."""
    descents: float = 0.4
    """From several starts, in equal parts: what they end with is the plan, mostly."""
    pool: float = 0.1
    """The options that descents ended with, as one problem, and the descents that follow."""
    limit: float = 0.1
    """Solves at prices of memory, and under its limit."""
    bound: float = 0.1
    """The lower bound: without it the gap is not known, and the plan is the same."""
    hidden: float = 0.1
    """The second search, with most of what travels in buckets hidden: one descent and its limit."""
    presets: float = 0.2
    """What each preset leaves, in equal parts, beside a search."""

    def __post_init__(self) -> None:
        total = self.descents + self.pool + self.limit + self.bound + self.hidden + self.presets
        assert math.isclose(total, 1.0), total


SEARCH_BUDGET = SearchBudget()


@dataclass(slots=True, kw_only=True)
class Meter:
    """The work of one solve: what was done, of what may be."""

    most: float = math.inf
    done: float = 0.0
    is_cut: bool = field(default=False)
    """Whether something was not done for want of work: with more, the answer could be another."""

    def takes(self, work: float) -> bool:
        """Whether there is so much left, which then is taken."""
        if self.done + work > self.most:
            self.is_cut = True
            return False
        self.done += work
        return True


@dataclass(slots=True, kw_only=True)
class Purse:
    """What a part of a search has left of its share."""

    left: float = math.inf

    def spend(self, work: float) -> None:
        self.left = max(0.0, self.left - work)

    @property
    def is_empty(self) -> bool:
        return self.left <= 0.0
