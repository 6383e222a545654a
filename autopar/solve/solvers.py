"""The table of solvers, and `solve`."""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.extensions import Table

from .dp import solve_dp
from .effort import Meter
from .exhaustive import solve_exhaustive
from .expand import border_states, expand, expanded_options
from .ilp import solve_ilp
from .problem import Choice, Problem, Repeat, Solution, TooWide, evaluate

BOUND_DIGITS = 1e-9
"""How far a bound may be above a cost, relative to it: sums in other orders differ so."""

TAKES = ("bounded", "meter")
"""Arguments of `solve` that a solver may take beside the problem and `bytes_limit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """A way to solve, which `solver=` calls by its `name`. `run(problem, bytes_limit=...)`, with those of `TAKES` that
    are in `takes`, gives a `Solution`. It raises `Infeasible` where there is none, and `TooWide` for a problem that is
    too large for it."""

    name: str
    run: Callable[..., Solution]
    exact: bool = False
    """Whether it looks for the optimum, and does not only improve on what it has. On several axes the many small
    steps of an exact solver's search are `dp`'s; those of another one are its own."""
    takes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.takes).difference(TAKES):
            raise ValueError(f"solver {self.name!r} takes {', '.join(unknown)}: give some of {', '.join(TAKES)}")
        run: Any = self.run
        if not callable(run):
            return  # which the table says
        try:
            inspect.signature(run).bind("problem", bytes_limit=None, **dict.fromkeys(self.takes))
        except TypeError as error:
            takes = ", ".join(("problem", "*", "bytes_limit=None", *(f"{name}=None" for name in self.takes)))
            raise ValueError(f"solver {self.name!r} runs a function that is not run({takes}): {error}") from error


AUTO = "auto"
"""The default by name: the dynamic program, and whatever else may be as good. What a plan says of who chose it."""

SOLVERS: Table[Solver] = Table(
    "solver",
    Solver,
    (
        Solver(name=AUTO, run=solve_dp, exact=True, takes=("bounded", "meter")),
        Solver(name="dp", run=solve_dp, exact=True, takes=("bounded", "meter")),
        Solver(name="ilp", run=solve_ilp, exact=True, takes=("meter",)),
        Solver(name="exhaustive", run=solve_exhaustive, exact=True),
    ),
    functions=("run",),
)


def register_solver(solver: Solver, *, replace: bool = False) -> None:
    """Adds a solver, which `solver=` then names. Raises ValueError for what is none, and for a name that is taken
    unless it is to `replace` that one."""
    SOLVERS.add(solver, replace=replace)


def solve(
    problem: Problem,
    solver: str = "dp",
    *,
    bytes_limit: float | None = None,
    bounded: bool = True,
    meter: Meter | None = None,
) -> Solution:
    """The cheapest choice of a solver for a problem, subject to bytes <= `bytes_limit` where one is given. Not
    `bounded`: no lower bound is asked for, which may save time (`solve_dp`). `meter`: the work that may
    be done, which `dp` counts, and the effort. Copies of a repeat that meet in very many states
    are written out for the solver, if there are few.

    Raises `Infeasible` where there is none, ValueError for an unknown solver or a problem too large for it.
    """
    row = SOLVERS.named(solver)
    given: dict[str, Any] = {"bounded": bounded, "meter": meter}
    began = time.perf_counter()
    effort = (meter or Meter()).effort
    is_deep = expanded_options(problem) > effort.written_options

    def stays(part: Problem, repeat: Repeat) -> bool:
        # written out, a body that branches no longer does, and is wider
        return is_deep or repeat.body.branch is not None or border_states(part, repeat) <= effort.border_states

    written = expand(problem, stays)
    solution = row.run(written.problem, bytes_limit=bytes_limit, **{name: given[name] for name in row.takes})
    if solver in SOLVERS.added:
        _check_solution(written.problem, solution, solver)
    if written.problem is not problem:
        choice = written.layout.choice(solution.choice)
        score = evaluate(problem, choice)  # to the last digit
        bound = min(solution.lower_bound, score.objective) if solution.gap else score.objective
        solution = replace(solution, choice=choice, score=score, lower_bound=bound)
    return replace(solution, solver=solver, seconds_to_solve=time.perf_counter() - began)


def _check_solution(problem: Problem, solution: Any, solver: str) -> None:
    """Raises ValueError for what a solver of another package returned, if it is no solution of the problem."""
    if not isinstance(solution, Solution):
        raise ValueError(f"solver {solver!r} returned a {type(solution).__name__}: it is to return a Solution")
    _check_options(problem, solution.choice, solver)
    score = evaluate(problem, solution.choice)
    if solution.lower_bound > score.objective * (1 + BOUND_DIGITS):
        raise ValueError(
            f"solver {solver!r} gives a lower bound of {solution.lower_bound:g} s, and its own choice costs "
            f"{score.objective:g} s: no choice may cost less than the bound, and 0 is always one"
        )


def _check_options(problem: Problem, choice: Choice, solver: str) -> None:
    if len(choice.options) != len(problem.variables) or [*map(len, choice.repeats)] != [
        repeat.count for repeat in problem.repeats
    ]:
        raise ValueError(
            f"solver {solver!r} chose {len(choice.options)} options, and copies of {len(choice.repeats)} repeats: the "
            f"problem has {len(problem.variables)} variables, and {len(problem.repeats)} repeats"
        )
    for variable, option in zip(problem.variables, choice.options, strict=True):
        if not 0 <= option < len(variable.options):
            raise ValueError(
                f"solver {solver!r} chose option {option} of {variable.name}, which has {len(variable.options)}"
            )
    for repeat, copies in zip(problem.repeats, choice.repeats, strict=True):
        for copy in {id(copy): copy for copy in copies}.values():
            _check_options(repeat.body, copy, solver)


__all__ = ["AUTO", "SOLVERS", "Solver", "TooWide", "register_solver", "solve"]
