"""The integer linear program."""

from __future__ import annotations

from autopar.problem import Problem, Solution


def solve_ilp(problem: Problem, *, bytes_limit: float | None = None) -> Solution:
    """Not written yet."""
    raise NotImplementedError
