"""Solvers: functions from a `Problem` to a `Solution`."""

from __future__ import annotations

from collections.abc import Callable

from .beam import solve_beam, solve_greedy
from .budget import Meter
from .dp import solve_dp
from .exhaustive import solve_exhaustive
from .ilp import solve_ilp
from .problem import Problem, Solution, TooWide

SOLVERS: dict[str, Callable[..., Solution]] = {
    "dp": solve_dp,
    "ilp": solve_ilp,
    "exhaustive": solve_exhaustive,
    "greedy": solve_greedy,
    "beam": solve_beam,
}

EXACT = ("dp", "ilp", "exhaustive")
"""Those that look for the optimum; the others take no choice back."""

__all__ = [
    "EXACT",
    "SOLVERS",
    "TooWide",
    "solve",
    "solve_beam",
    "solve_dp",
    "solve_exhaustive",
    "solve_greedy",
    "solve_ilp",
]


def solve(
    problem: Problem,
    solver: str = "dp",
    *,
    bytes_limit: float | None = None,
    bounded: bool = True,
    meter: Meter | None = None,
) -> Solution:
    """The cheapest choice that a solver finds for a problem, subject to bytes <= `bytes_limit` where one is given. Not
    `bounded`: no lower bound is asked for, which may save time (`solve_dp`). `meter`: the work that may
    be done, which `dp`, `beam` and `greedy` count.

    Raises `Infeasible` where there is none, ValueError for an unknown solver or a problem too large for it.
    """
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; the solvers are {', '.join(SOLVERS)}")
    if solver == "dp":
        return solve_dp(problem, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
    if solver in ("beam", "greedy"):
        return SOLVERS[solver](problem, bytes_limit=bytes_limit, meter=meter)
    return SOLVERS[solver](problem, bytes_limit=bytes_limit)
