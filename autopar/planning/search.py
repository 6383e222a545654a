"""Search over meshes of several axes, on top of the exact solvers.

On one axis the whole space is one problem. On several axes its options multiply, so the space is searched by coordinate
descent (`descent`), within the memory limit where there is one (`limit`). Problems that can be eliminated are solved to
a proved optimum, wider ones to within a percent (`solve.relax`); the whole is not, and the gap that is reported is
against a lower bound of the whole (`bound`).
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from autopar.passes.blocks.block import Blocks
from autopar.passes.blocks.partition import blocks
from autopar.passes.space.problem import Allowed, Assignment
from autopar.passes.space.space import Space
from autopar.solve.effort import EFFORT, Effort
from autopar.solve.problem import Score

from .beside import beside
from .bound import lower_bound_seconds
from .constraints import Pins
from .descent import Descent
from .limit import Limit, Peaks, SolveAt
from .options import Options, joint, taken
from .solving import Solved, Solves


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An assignment with its score. `lower_bound` is in seconds and holds for the whole space that
    was searched, or is 0 where none was computed."""

    assignment: Assignment
    score: Score
    lower_bound: float
    seconds: float


class Search:
    """A search over one space. `bytes_limit` bounds the peak of an assignment, or, if no `peaks` are given (true ones,
    and estimates of them), its sum of bytes."""

    def __init__(
        self,
        space: Space,
        solver: str,
        bytes_limit: float | None,
        log: Callable[[str], None],
        pins: Pins | None = None,
        peaks: tuple[Peaks, Peaks] | None = None,
        effort: Effort = EFFORT,
        found: Callable[[], Blocks] | None = None,
    ) -> None:
        """`found` gives the graph's blocks, where they are there already."""
        self.space, self.bytes_limit, self.peaks, self.log, self.effort = space, bytes_limit, peaks, log, effort
        self.options = Options(space, pins or {}, bytes_limit)
        self.sites = self.options.sites
        self.solve = Solves(space, log, effort)
        self.descent = Descent(
            self.options,
            self.solve,
            solver,
            blocks=found or partial(blocks, space.graph, max(space.mesh)),
            effort=effort,
            log=log,
        )
        self.cheapest: tuple[Solved, SolveAt] | None = None
        """What was found without a limit, and what solves at a price of memory, from another solution."""
        self.proved = False
        """Whether that is all that the solver proves: the space is one problem."""
        self.several = False
        """Whether the cheapest came of descents from several starts."""

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
        thorough: bool = True,
        below: float = math.inf,
    ) -> Found:
        """The best assignment that was found, of the whole space or of `allowed`; `bounded` asks for a lower bound.
        Not `thorough`: of one descent, from `start`, which is cut short, or over the memory limit, if that costs
        `below` seconds or more, and over it where its peak is more than was estimated.

        Raises `Infeasible` where nothing keeps the memory limit.
        """
        started = time.perf_counter()
        best = self.explore(allowed, start=start, bounded=bounded, thorough=thorough, below=below)
        if not best.score.objective < below:
            return self._found(best, started)
        with self.bounding(bounded) as bound:
            found = self._found(self._limited(self.peaks, sure=thorough), started)
            found = replace(found, lower_bound=max(found.lower_bound, bound()))
        return replace(found, seconds=time.perf_counter() - started)

    def explore(
        self,
        allowed: Allowed | None = None,
        *,
        start: Assignment | None = None,
        bounded: bool = True,
        thorough: bool = True,
        below: float = math.inf,
    ) -> Solved:
        """The cheapest without the memory limit, with its bound where the space is one problem."""
        if allowed is not None:
            allowed = {name: self.options.keeping(self.sites[name], choices) for name, choices in allowed.items()}
        elif (
            sum(1 for n in self.space.mesh if n > 1) <= 1
            or max(self.options.counts.values()) <= self.effort.joint_options
        ):
            everything = self.options.everything()
            allowed = {n: joint(self.sites[n], p, self.bytes_limit) for n, p in everything.items()}
        self.proved, self.several = allowed is not None, allowed is None and thorough
        descent = self.descent
        if allowed is not None:
            options = allowed
            purse = descent.purse(self.effort.descents + self.effort.pool)
            best = self.solve(options, descent.solver, bounded=bounded, purse=purse)
            self.cheapest = best, lambda price, _, purse: self.solve(options, descent.steps, price=price, purse=purse)
        else:
            first = self.options.whole() if start is None else taken(self.space, start)
            one = descent.purse(self.effort.descents)
            best = (
                descent.from_all_starts(side_by_side=self.is_large)
                if thorough
                else descent.descend(first, descent.axes(), below=below, purse=one)
            )
            self.cheapest = best, descent.at_price
        return best

    def bounding(self, bounded: bool) -> AbstractContextManager[Callable[[], float]]:
        """Finds, beside this process where that is worth one, seconds that no assignment undercuts: 0 where a solver
        proves them, or they are not asked for."""
        wanted = bounded and not self.proved
        return beside(self._bound if wanted else lambda: 0.0, worthwhile=wanted and self.is_large)

    def _bound(self) -> float:
        bound = lower_bound_seconds(self.space, self.effort)
        self.log(f"lower bound {bound * 1e3:.3f} ms")
        return bound

    def within(self, peaks: tuple[Peaks, Peaks] | None) -> Found:
        """The best that keeps the limit, if there is one, with such peaks, from the cheapest that was found. Raises
        `Infeasible` as `run`."""
        started = time.perf_counter()
        return self._found(self._limited(peaks, sure=True), started)

    def _limited(self, peaks: tuple[Peaks, Peaks] | None, *, sure: bool) -> Solved:
        assert self.cheapest is not None
        if self.bytes_limit is None:
            return self.cheapest[0]
        limit = Limit(self.descent, self.bytes_limit, peaks, several=self.several, log=self.log)
        return limit.best(*self.cheapest, sure=sure)

    def _found(self, best: Solved, started: float) -> Found:
        return Found(
            assignment=best.assignment,
            score=best.score,
            lower_bound=best.lower_bound if self.proved else 0.0,  # not that of a part of the space
            seconds=time.perf_counter() - started,
        )
