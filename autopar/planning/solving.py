"""Exact solves over allowed options: the problem is built, solved, and read back as an assignment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from autopar.passes.blocks.partition import blocks
from autopar.passes.grouping.group import Groups, block_groups, group
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Allowed, Assignment, ProblemBuilder
from autopar.passes.space.space import Space
from autopar.passes.widen import widened
from autopar.solve import TooWide, solve
from autopar.solve.effort import Effort, Meter, Purse
from autopar.solve.problem import Problem, Score, Solution, evaluate, in_runs

Level = Literal["operator", "block", "cfp"]
"""What a variable of a problem is: an operator, a block that loses nothing (`passes.widen`), or a ParallelBlock as
the paper has it (`passes.group.block_groups`)."""


@dataclass(frozen=True, slots=True)
class Solved:
    """An assignment with its true score, and a bound on the problem that it was found in."""

    assignment: Assignment
    score: Score
    lower_bound: float
    work: float = 0.0
    """That finding it took."""
    cut_at: float | None = None
    """The work that it had, where more could have found another."""

    def is_of(self, work: float) -> bool:
        """Whether it is what would be found with so much work."""
        return self.work <= work if self.cut_at is None else self.cut_at == work


Question = tuple[tuple[tuple[str, tuple[SiteChoice, ...]], ...], str, float, float | None, bool]
"""The options allowed to each site, the solver, the price of memory, its limit, and whether a bound is asked for: all
that a solve depends on."""


class Solves:
    """Solves over one space. Every problem is built anew, from tables that the builder shares; what was solved before
    (descents from several starts meet) is not solved again. At `level` "cfp" the space is narrower, and a lower bound
    is that of what is left."""

    def __init__(self, space: Space, level: Level, log: Callable[[str], None], effort: Effort) -> None:
        self.space, self.level, self.log, self.effort = space, level, log, effort
        self.builder = ProblemBuilder(space)
        self.solved: dict[Question, Solved] = {}
        self.groups: list[Groups] = []
        if level == "cfp":
            found = blocks(space.graph, max(space.mesh), merge=False)
            self.groups = [block_groups(space, region, found) for region in space.regions()]

    def __call__(
        self,
        allowed: Allowed,
        solver: str,
        *,
        price: float = 0.0,
        bytes_limit: float | None = None,
        bounded: bool = True,
        purse: Purse,
    ) -> Solved:
        """The exact optimum of seconds + price * bytes over the allowed options. Not `bounded`: without a lower bound.
        The `purse` pays, for what was solved before too, so that answers do not depend on what else was asked.

        What is too wide for elimination under a limit is solved as an integer program, and what is too wide for that,
        operator by operator, as is what there is no work left for.
        """
        options = tuple((name, tuple(choices)) for name, choices in allowed.items())
        question = (options, solver, price, bytes_limit, bounded)
        solved = self.solved.get(question)
        if solved is None or not solved.is_of(purse.left):
            meter = Meter(most=purse.left, effort=self.effort)
            solved = self._solve(allowed, solver, price, bytes_limit, bounded, meter)
            solved = replace(solved, work=meter.done, cut_at=meter.most if meter.is_cut else None)
            self.solved[question] = solved
        if solved.cut_at is not None:
            self.log(f"no work is left of the {solved.cut_at:.2g} entries of this part of the search")
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
        meter: Meter,
    ) -> Solved:
        problem, decoder = self.builder.build(allowed)
        weighed = priced(problem, price) if price else problem
        if self.level == "operator":
            solution = self._solution(weighed, solver, bytes_limit, bounded, meter)
            choice = solution.choice
        else:
            limited = bytes_limit is not None
            if self.level == "block":
                grouped = widened(weighed, limited=limited)
            else:
                grouped = group(weighed, self.groups[0], self.groups[1:], limited=limited)
            if grouped.divided:
                self.log(f"divided, for fewer options: {', '.join(grouped.divided)}")
            solution = self._solution(grouped.problem, solver, bytes_limit, bounded, meter)
            choice = grouped.expand(solution.choice)
        choice = in_runs(problem, choice)
        return Solved(decoder.decode(choice), evaluate(problem, choice), solution.lower_bound)

    def _solution(
        self, problem: Problem, solver: str, bytes_limit: float | None, bounded: bool, meter: Meter
    ) -> Solution:
        try:
            return solve(problem, solver, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
        except TooWide as error:
            self.log(f"{error}; without dominated options:")
        presolved = group(problem, (), [()] * len(problem.repeats), limited=bytes_limit is not None)
        few = presolved.problem.option_count <= meter.effort.beam_options
        last = "beam" if few else "greedy"
        ways = dict.fromkeys((solver, last) if meter.is_cut else (solver, "ilp", last))
        for way, after in pairwise((*ways, "")):
            try:
                solution = solve(presolved.problem, way, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
                break
            except TooWide as error:
                if not after:
                    raise
                self.log(f"{error}; by {after}:")
        return replace(solution, choice=presolved.expand(solution.choice))


def priced(problem: Problem, price: float) -> Problem:
    """The problem with memory paid for in seconds."""
    return Problem(
        variables=tuple(
            replace(v, seconds=tuple(s + price * b for s, b in zip(v.seconds, v.bytes, strict=True)))
            for v in problem.variables
        ),
        tensors=tuple(
            replace(t, costs={state: (s + price * b, b) for state, (s, b) in t.costs.items()}) for t in problem.tensors
        ),
        repeats=tuple(replace(r, body=priced(r.body, price)) for r in problem.repeats),
    )
