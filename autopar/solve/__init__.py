"""Solvers: functions from a `Problem` to a `Solution`."""

from __future__ import annotations

from autopar.problem import Problem, Solution
from autopar.solve.dp import solve_dp
from autopar.solve.elimination import TooWide
from autopar.solve.exhaustive import solve_exhaustive
from autopar.solve.ilp import solve_ilp

SOLVERS = {"dp": solve_dp, "ilp": solve_ilp, "exhaustive": solve_exhaustive}

__all__ = ["SOLVERS", "TooWide", "solve", "solve_dp", "solve_exhaustive", "solve_ilp"]


def solve(problem: Problem, solver: str = "dp", *, bytes_limit: float | None = None) -> Solution:
    """The cheapest choice for a problem, subject to bytes <= `bytes_limit` where one is given.

    Raises `Infeasible` where there is none, ValueError for an unknown solver or a problem too large for it.
    """
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; the solvers are {', '.join(SOLVERS)}")
    return SOLVERS[solver](problem, bytes_limit=bytes_limit)
