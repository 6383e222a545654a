"""Coordinate descent over the axes of a mesh.

A descent fixes all axes but one and solves that one exactly (bytes, shapes and legality depend on the others), axis
after axis until nothing improves.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from itertools import cycle

from autopar.passes.space.choices import SiteChoice
from autopar.solve.effort import Effort, Purse
from autopar.solve.solvers import SOLVERS, TooWide

from .options import Options, slowest_first, taken
from .progress import Stage
from .solving import Solved, Solves, Ways

logger = logging.getLogger("autopar")

DESCENT_SOLVER = "dp"
"""Steps of a descent are many and small; the solver that was asked for solves what they end with."""


class Descent:
    """Descents over one space. `steps` solves their steps, `solver` what is one problem."""

    def __init__(self, options: Options, solves: Solves, solver: str, effort: Effort) -> None:
        self.options, self.solve, self.space = options, solves, options.space
        self.solver, self.steps = solver, DESCENT_SOLVER if SOLVERS[solver].exact else solver
        self.effort = effort

    def purse(self, share: float) -> Purse:
        return Purse(left=share * self.effort.work)

    def axes(self) -> list[int]:
        """The axes of more than one rank, the slowest first."""
        return slowest_first(self.space)

    def checked(self, best: Solved, purse: Purse) -> Solved:
        """What a solver that was asked for by name finds beside a solution with the first axis free, if that is better,
        and not too wide for it."""
        if self.solver == self.steps:
            return best
        axis, beside = self.axes()[0], taken(self.space, best.assignment)
        allowed = self._allowed(beside, axis)
        try:
            solved = self.solve(allowed, self.solver, bounded=False, ways="own", purse=purse)
        except TooWide as error:
            logger.info("%s: %s checks nothing", error, self.solver)
            return best
        return min(best, solved, key=lambda one: one.score.objective)

    def at_price(self, price: float, start: Solved, purse: Purse) -> Solved:
        return self.descend(taken(self.space, start.assignment, in_middle=True), self.axes(), price, purse=purse)

    def descend(
        self, start: Mapping[str, Iterable[SiteChoice]], order: list[int],
        price: float = 0.0, below: float = math.inf, *, purse: Purse, stage: Stage | None = None,
    ) -> Solved:  # fmt: skip
        """Frees axis after axis until nothing improves, or each axis once if the result is hopelessly above `below` or
        the purse is empty. Tells how far it is in a `stage`, if one is given: half of what is left, round by round."""
        current = {name: list(choices) for name, choices in start.items()}
        best: Solved | None = None
        unchanged = 0

        def objective(solved: Solved) -> float:
            return solved.score.objective + price * solved.score.bytes

        for number, axis in enumerate(cycle(order), 1):
            solved = self._freed(current, axis, price, best, purse)
            if stage is not None:
                stage.tell(number / (number + len(order)))
            if best is None or objective(solved) <= objective(best):
                current = taken(self.space, solved.assignment)
            if best is None or objective(solved) < objective(best) * (1 - self.effort.gain):
                best, unchanged = solved, 0
            unchanged += 1
            if unchanged == len(order):
                # no other axis has improved it since
                return best
            if number == len(order) and objective(best) > self.effort.hopeless * below:
                return best
            if number >= len(order) and (purse.is_empty or self.effort.is_over):
                return best
        raise AssertionError("a mesh has axes")

    def _freed(
        self, current: dict[str, list[SiteChoice]], axis: int, price: float, best: Solved | None, purse: Purse
    ) -> Solved:
        """The solution with one axis free, beside the choices on the others that are taken now; where these differ from
        copy to copy and are too many, beside those of middle copies; and where that is too wide, too, `best`, which is
        better than what a cheaper way of solving would find. Where there is none yet, the sites of most options stay as
        they are."""
        middle = current if best is None else taken(self.space, best.assignment, in_middle=True)
        for beside in (current, middle) if middle != current else (current,):
            try:
                return self._solved(self._allowed(beside, axis), price, purse, is_first=best is None)
            except TooWide as error:
                logger.info("%s: this axis stays as it is beside %d choices", error, sum(map(len, beside.values())))
        return best or self._held(current, axis, price, purse)

    def _held(self, current: dict[str, list[SiteChoice]], axis: int, price: float, purse: Purse) -> Solved:
        """Sites of equally many options stay together, since those of borders that are joined must have the same."""
        allowed = self._allowed(current, axis)
        for most in sorted({len(choices) for choices in allowed.values()}, reverse=True):
            narrower = {name: choices if len(choices) < most else current[name] for name, choices in allowed.items()}
            try:
                return self._solved(narrower, price, purse, is_first=True)
            except TooWide as error:
                logger.info("%s: sites of %d options and more stay as they are", error, most)
        return self._solved(current, price, purse, is_first=True)

    def _allowed(self, beside: Mapping[str, Iterable[SiteChoice]], axis: int) -> dict[str, list[SiteChoice]]:
        return {n: self.options.free(self.options.sites[n], choices, axis) for n, choices in beside.items()}

    def _solved(self, allowed: Mapping[str, list[SiteChoice]], price: float, purse: Purse, is_first: bool) -> Solved:
        ways: Ways = "any" if is_first else "own"
        return self.solve(allowed, self.steps, price=price, bounded=False, ways=ways, purse=purse)
