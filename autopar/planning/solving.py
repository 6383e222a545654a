"""Exact solves over allowed options: builds the problem, solves it, and reads the solution back as an assignment."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Literal

from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Allowed, Assignment, ProblemBuilder
from autopar.solve.dp import solve_relaxed
from autopar.solve.effort import Effort, Meter, Purse
from autopar.solve.pricing import Library, priced_at
from autopar.solve.problem import Infeasible, Problem, Score, Solution, evaluate, in_runs
from autopar.solve.solvers import TooWide, solve

logger = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class Solved:
    """An assignment with its exact score, and a bound on its problem."""

    assignment: Assignment
    score: Score
    lower_bound: float
    price: float = 0.0
    """Seconds a byte that a limit on bytes is worth, if there is one."""
    work: float = 0.0
    """The work that the solve took."""
    cut_at: float | None = None
    """The work that the solve was given, if more work could lead to another solution."""

    def is_of(self, work: float) -> bool:
        """Whether a solve with so much work would lead to the same solution."""
        return self.work <= work if self.cut_at is None else self.cut_at == work


LAST_RESORT = "dp"
"""Solves what is too wide for the solver that was asked for. What is too wide for it under a limit, or comes when no
work is left, is solved by message passing alone, which always ends (`solve_relaxed`)."""

Ways = Literal["any", "own", "narrow"]
"""The ways in which a problem may be solved that is too wide for its solver: by the solver's own, by message passing
too, or by `any`, `LAST_RESORT` among them; `narrow` is no such problem."""

Question = tuple[tuple[tuple[str, tuple[SiteChoice, ...]], ...], str, float, float | None, bool, Ways]
"""All that a solve depends on: each site's allowed options, the solver, the price of memory, its limit, whether to
compute a bound, and the ways of solving."""


class Solves:
    """Solves over one space. It builds every problem anew from tables that the builder shares, and caches solutions,
    since descents from several starts meet. Where memory has a price or a limit, copies of segments may be recomputed
    in backward, if it is said so."""

    def __init__(self, builder: ProblemBuilder, effort: Effort, *, recompute: bool = False) -> None:
        self.builder, self.effort, self.recompute = builder, effort, recompute
        self.is_wide = False
        """Whether recomputation made a problem at a price too wide: the next ones are solved without it."""
        self.solved: dict[Question, Solved] = {}
        self.unfit: dict[Question, tuple[float, float, str]] = {}
        """Of a question without its limit: the largest limit that nothing keeps, the work of finding that, and what it
        says."""

    def __call__(
        self,
        allowed: Allowed,
        solver: str,
        *,
        price: float = 0.0,
        bytes_limit: float | None = None,
        bounded: bool = True,
        ways: Ways = "any",
        purse: Purse,
    ) -> Solved:
        """The exact optimum of seconds + price * bytes over the allowed options, `bounded` with a lower bound. The
        `purse` pays for cached solutions too, so that answers do not depend on earlier questions.

        A problem that is too wide for its solver, or has no work left, is solved in another of the `ways`, or raises
        `TooWide`. Where recomputation makes a problem too wide, a price of memory leads to a solution without.
        """
        if purse.is_empty and ways == "own":
            raise TooWide("no work is left")
        options = tuple((name, tuple(choices)) for name, choices in allowed.items())
        question = (options, solver, price, bytes_limit, bounded, ways)
        solved = self.solved.get(question)
        if solved is None or not solved.is_of(purse.left):
            unlimited = (*question[:3], None, *question[4:])
            least, work, why = self.unfit.get(unlimited, (0.0, 0.0, ""))
            if bytes_limit is not None and bytes_limit <= least and work <= purse.left:
                raise Infeasible(why)
            meter = Meter(most=purse.left, effort=self.effort)
            try:
                solved = self._solve(allowed, solver, price, bytes_limit, bounded, ways, meter)
            except TooWide:
                purse.spend(meter.done)
                raise
            except Infeasible as error:
                if bytes_limit is not None and not meter.is_cut:
                    self.unfit[unlimited] = max(bytes_limit, least), meter.done, str(error)
                raise
            solved = replace(solved, work=meter.done, cut_at=meter.most if meter.is_cut else None)
            self.solved[question] = solved
        if solved.cut_at is not None:
            logger.info("no work is left of the %.2g entries of this part of the search", solved.cut_at)
            purse.spend(math.inf)
        purse.spend(solved.work)
        return solved

    def _solve(
        self,
        allowed: Allowed,
        solver: str,
        price: float,
        bytes_limit: float | None,
        bounded: bool,
        ways: Ways,
        meter: Meter,
    ) -> Solved:
        is_narrow = ways == "narrow"
        recompute = self.recompute and (bytes_limit is not None or (price > 0 and (is_narrow or not self.is_wide)))
        problem, decoder = self.builder.build(allowed, recompute=recompute)
        weighed = priced_at(problem, price) if price else problem
        if is_narrow or (recompute and bytes_limit is None):
            effort = meter.effort
            meter.effort = replace(effort, message_entries=0.0)
            try:
                solution = solve(weighed, solver, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
            except TooWide:
                if is_narrow:
                    raise
                self.is_wide = True
                problem, decoder = self.builder.build(allowed)
                meter.effort = effort
                solution = self._solution(priced_at(problem, price), solver, bytes_limit, bounded, ways, meter)
            finally:
                meter.effort = effort
        else:
            solution = self._solution(weighed, solver, bytes_limit, bounded, ways, meter)
        choice = in_runs(problem, solution.choice)
        return Solved(decoder.decode(choice), evaluate(problem, choice), solution.lower_bound, solution.price)

    def _solution(
        self, problem: Problem, solver: str, bytes_limit: float | None, bounded: bool, ways: Ways, meter: Meter
    ) -> Solution:
        """By the solver; if the problem is too wide for it, and any way will do, by `LAST_RESORT`, and then by message
        passing."""
        for way in dict.fromkeys((solver, LAST_RESORT)):
            try:
                return solve(problem, way, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
            except TooWide as error:
                if ways != "any":
                    raise
                logger.info("too wide for %s, solved otherwise: %s", way, error)
        return solve_relaxed(problem, Library(meter), bytes_limit=bytes_limit, bounded=bounded)
