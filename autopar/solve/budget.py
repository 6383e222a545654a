"""How much work a solve may do before it gives the best answer that it has."""

from __future__ import annotations

from dataclasses import dataclass


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
