"""Search over meshes of several axes, on top of the exact solvers.

On one axis the space is one problem. On several axes its options multiply, so coordinate descent (`descent`) searches
the space, within the memory limit if there is one (`limit`). Problems that can be eliminated are solved to a proved
optimum, wider ones to within a percent (`solve.relax`). The search proves no optimum of the space.
"""

import math
import time
from dataclasses import dataclass, replace

from autopar.passes.space.problem import Allowed, Assignment, ProblemBuilder
from autopar.passes.space.space import Space
from autopar.solve.effort import EFFORT, Effort
from autopar.solve.problem import Score

from .account import account
from .descent import Descent
from .limit import Limit, SolveAt
from .options import Options, joint, taken
from .progress import WHOLE, Stage
from .solving import Solved, Solves
from .steps import Evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """An assignment with its score. No assignment of the space that was searched has an objective below `lower_bound`,
    if the solver proved that, or else 0. The search took `seconds`."""

    assignment: Assignment
    score: Score
    lower_bound: float
    seconds: float


class Search:
    """A search over one space. The limit of its options bounds the peak of an assignment; if nothing can `evaluate`
    it, its sum of bytes."""

    def __init__(
        self,
        builder: ProblemBuilder,
        solver: str,
        options: Options | None = None,
        evaluate: Evaluate | None = None,
        effort: Effort = EFFORT,
        recompute: bool = True,
        stage: Stage = WHOLE,
    ) -> None:
        """Of the space of a builder, whose tables several searches share, with these of its options (all, if none are
        given). `recompute`: copies of segments may be."""
        self.space, self.options = builder.space, options or Options(builder.space)
        self.bytes_limit, self.sites = self.options.bytes_limit, self.options.sites
        self.evaluate, self.effort, self.stage = evaluate, effort, stage
        recompute = recompute and self.bytes_limit is not None and evaluate is not None
        self.solve = Solves(builder, effort, recompute=recompute)
        self.descent = Descent(self.options, self.solve, solver, effort)
        self.cheapest: tuple[Solved, SolveAt] | None = None
        """The cheapest solution without a limit, and a function that solves at a price of memory."""
        self.limited: tuple[Limit | None, Solved] | None = None
        """The best within the limit by estimated peaks."""
        self.proved = False
        """Whether the space is one problem, so that its bound holds for the space."""
        self.allowed: Allowed | None = None
        """The options that the solution is restricted to, if it is."""

    @property
    def is_large(self) -> bool:
        """Whether parts of the search are worth a process of their own."""
        return sum(self.options.counts.values()) >= self.effort.apart_options

    def run(
        self,
        allowed: Allowed | None = None,
        *,
        start: Assignment | None = None,
        bounded: bool = True,
        sure: bool = True,
        below: float = math.inf,
    ) -> SearchResult:
        """The best assignment of the space, or of `allowed`; `bounded` asks a solver for its bound. A descent
        from `start` ends early if it costs `below` seconds or more. If it is not `sure`, the result may exceed the
        limit, as it does if its peak exceeds the estimate.

        Raises `Infeasible` if nothing keeps the memory limit.
        """
        started = time.perf_counter()
        best = self.explore(allowed, start=start, bounded=bounded, below=below)
        if not best.score.objective < below:
            return self._result(best, started)
        result = self._result(self._limited(sure=sure), started)
        if sure:
            result = self._result(self.confirmed(), started)
        return replace(result, seconds=time.perf_counter() - started)

    def explore(
        self,
        allowed: Allowed | None = None,
        *,
        start: Assignment | None = None,
        bounded: bool = True,
        below: float = math.inf,
        known: Solved | None = None,
    ) -> Solved:
        """The cheapest solution without the memory limit, with its bound if the space is one problem, or else that of
        one descent from `start` (not given: all replicated); `known`, if a search of the same space without a limit
        gave that."""
        if allowed is not None:
            allowed = {name: self.options.keeping(self.sites[name], choices) for name, choices in allowed.items()}
        elif (
            sum(1 for n in self.space.mesh if n > 1) <= 1
            or max(self.options.counts.values()) <= self.effort.joint_options
        ):
            everything = self.options.everything()
            allowed = {n: joint(self.sites[n], p, self.bytes_limit) for n, p in everything.items()}
        self.allowed, self.proved = allowed, allowed is not None
        descent = self.descent
        purse = descent.purse(self.effort.descents)
        if allowed is not None:
            options = allowed
            best = known or self.solve(options, descent.solver, bounded=bounded, purse=purse)
            self.cheapest = best, lambda price, _, purse: self.solve(options, descent.steps, price=price, purse=purse)
        else:
            first = self.options.replicated() if start is None else taken(self.space, start)
            best = known or descent.checked(
                descent.descend(first, descent.axes(), below=below, purse=purse, stage=self.stage.exploring), purse
            )
            self.cheapest = best, descent.at_price
        return best

    def mixed(self, cheapest: Solved, allowed: Allowed | None) -> Solved:
        """What keeps the limit of the options of the `cheapest` of those `allowed`; of others where these do not. Its
        peak is estimated, roughly. Raises `Infeasible` as `run`."""
        self.explore(allowed, bounded=False, known=cheapest)
        return self._limited(sure=False, quick=True)

    def smallest(self, cheapest: Solved, allowed: Allowed | None) -> Solved:
        """What needs the fewest bytes of the options of the `cheapest` of those `allowed`."""
        self.explore(allowed, bounded=False, known=cheapest)
        assert self.cheapest is not None
        return self._limit(self.cheapest, quick=True).smallest()

    def near(self, start: Solved | None, weighed: Space, *, fast_first: bool = False) -> Solved | None:
        """What one descent finds from a solution of another search of the space, or from all replicated, with slow axes
        freed first or fast ones; what mixes its options within the limit, where it is over that. Its peak is estimated,
        roughly. None if it is much dearer than where it began, at the price that memory has there, or its first mixture
        is dearer, at the prices of `weighed`. Raises `Infeasible` as `run`."""
        descent, purse = self.descent, self.descent.purse(self.effort.descents)
        first = self.options.replicated() if start is None else taken(self.space, start.assignment)
        found = descent.descend(first, descent.axes()[:: -1 if fast_first else 1], purse=purse)
        self.cheapest = found, descent.at_price
        if self.bytes_limit is None or start is None:
            return self._limited(sure=False, quick=True)
        if start.price:
            prices = (
                account(self.space, one.assignment).seconds + start.price * one.score.bytes for one in (found, start)
            )
            if next(prices) > self.effort.near_price * next(prices):
                return None
        mixed = self._limit(self.cheapest, quick=True).first()
        if mixed is not None:
            seconds = (account(weighed, one.assignment).seconds for one in (mixed, start))
            if next(seconds) > self.effort.near_mixed * next(seconds):
                return None
        return self._limited(sure=False, quick=True)

    def within(self, evaluate: Evaluate) -> Solved:
        """The best that keeps the limit, if any, by such estimates, after `explore`. Raises `Infeasible` as `run`."""
        self.evaluate = evaluate
        return self._limited(sure=True)

    def confirmed(self) -> Solved:
        """What `within` returned if its exact peak keeps the limit, or the best that does. Raises `Infeasible` as
        `run`."""
        assert self.limited is not None
        limit, best = self.limited
        self.limited = limit, best if limit is None else limit.confirmed(best)
        return self.limited[1]

    def _limited(self, *, sure: bool, quick: bool = False) -> Solved:
        assert self.cheapest is not None
        best, limit = self.cheapest[0], None
        if self.bytes_limit is not None:
            limit = self._limit(self.cheapest, quick=quick)
            best = limit.best(sure=sure)
        self.limited = limit, best
        return best

    def _limit(self, cheapest: tuple[Solved, SolveAt], *, quick: bool = False) -> Limit:
        assert self.bytes_limit is not None
        of_limit = self.descent, self.bytes_limit, self.evaluate, cheapest
        return Limit(*of_limit, quick=quick, allowed=self.allowed, stage=self.stage.limiting)

    def _result(self, best: Solved, started: float) -> SearchResult:
        return SearchResult(
            assignment=best.assignment,
            score=best.score,
            lower_bound=best.lower_bound if self.proved else 0.0,  # a part of the space has another
            seconds=time.perf_counter() - started,
        )
