"""The memory limit: the cheapest plan whose peak keeps it.

A problem limits a sum of bytes, but what must fit is a rank's peak: that sum, and an excess that differs from plan to
plan. So the search collects options that are worth having at the price that the limit puts on memory, solves them under
a limit on the sum, and corrects that limit by the excess of the solution, until the peak fits. It estimates peaks, and
computes the exact peak of the answer.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.passes.space.choices import KEEP, REGATHER, SiteChoice
from autopar.passes.space.problem import Allowed, Assignment
from autopar.solve.effort import Purse
from autopar.solve.problem import Infeasible
from autopar.solve.solvers import TooWide

from .descent import Descent
from .options import taken
from .progress import WHOLE, Stage
from .shortfall import DoesNotFit
from .solving import Solved, Ways
from .steps import EXACT, NEAR, ROUGH, Evaluate

logger = logging.getLogger("autopar")

PRICE_DIGITS = 9
"""Of a price of memory that a pool gives: prices that differ by rounding lead to the same solves."""

SolveAt = Callable[[float, Solved, Purse], Solved]
"""Solves at a price of memory, from another solution, with a purse that pays."""


class Limit:
    """A limit on the peak of an assignment; if nothing can `evaluate` it, on its sum of bytes. Without a limit the plan
    is the `cheapest`, given with what solves at a price; `allowed` says that the options of sites are restricted.
    `quick` mixes the options of the cheapest plan, and looks at no others if that keeps the limit."""

    def __init__(
        self,
        descent: Descent,
        limit_bytes: float,
        evaluate: Evaluate | None,
        cheapest: tuple[Solved, SolveAt],
        *,
        quick: bool,
        allowed: Allowed | None,
        stage: Stage = WHOLE,
    ) -> None:
        (self.cheapest, self.solve_at), self.allowed = cheapest, allowed
        self.descent, self.quick, self.stage = descent, quick, stage
        self.effort, self.evaluate = descent.effort, evaluate
        self.bytes_limit = self.aim = limit_bytes
        """`aim` is the limit on estimates, so that the exact peak keeps `bytes_limit`."""
        self.correction = 0.0
        """What rough estimates leave out."""
        self.estimated: dict[Assignment, Solved] = {}
        """The solutions whose peaks were asked for."""

    def best(self, *, sure: bool) -> Solved:
        """The best that keeps the limit, by estimated peaks; `sure` estimates them better."""
        return self._within_limit(sure=sure) if self._is_over(self.cheapest) else self.cheapest

    def first(self) -> Solved | None:
        """What a first mixture of the options of the cheapest plan comes to, if any is within the limit: that leaves
        for the sum of bytes what the excess of the cheapest plan does."""
        if not self._is_over(self.cheapest):
            return self.cheapest
        pool = _Pool(self.descent, self.cheapest, self.allowed)
        return pool.solved(self.aim - self._excess(self.cheapest), self.descent.purse(self.effort.limit))

    def smallest(self) -> Solved:
        """What needs the fewest bytes, by the sum."""
        return self.solve_at(self._most, self.cheapest, self.descent.purse(self.effort.limit))

    def confirmed(self, best: Solved) -> Solved:
        """`best` if its exact peak keeps the limit, or the best whose exact peak does. If a peak is over, the next
        round aims below the limit by as much; the last round estimates nothing."""
        for left in reversed(range(self.effort.confirmations)):
            if (true := self._true_peak(best)) <= self.bytes_limit:
                return best
            logger.info("estimated peak %.0f bytes, exact peak %.0f", self._peak(best), true)
            self.aim = min(self.aim, self.bytes_limit - (true - self._peak(best))) - (true - self.bytes_limit)
            if left:
                best = self.best(sure=True)
        if (evaluate := self.evaluate) is not None:
            self.evaluate = lambda assignment, _: evaluate(assignment, EXACT)
        self.aim, self.correction, self.estimated = self.bytes_limit, 0.0, {}
        return self.best(sure=True)

    def _within_limit(self, *, sure: bool) -> Solved:
        """The best that keeps the limit: of a pool of options, solved under a limit on the sum of bytes, where layers
        of one structure mix their options. The peak is that sum and an excess (temporaries, less what is not alive at
        once), and the excess of one solution says which sum to allow the next.

        The lower bound is Lagrange's, over the prices that were tried; for a limit on the peak, which is no sum, it is
        the bound without a limit.
        """
        purse = self.descent.purse(self.effort.limit)
        pool = _Pool(self.descent, self.cheapest, self.allowed)
        excess, bound = self._generate(pool, purse, sure=sure)
        kept = self._mixed(pool, excess, purse)
        if not kept and self.evaluate is not None:  # another excess may lead to sums that can be had
            least = min(map(self._excess, self.estimated.values()))
            kept = self._mixed(pool, least, self.descent.purse(self.effort.limit))
        if not kept:  # sums fit, and peaks do not: what needs the least memory, and what lies between
            smallest = self.solve_at(self._most, pool.solutions[-1], purse)
            pool.price = self._most
            if pool.add(smallest):
                kept = self._mixed(pool, self._excess(smallest), self.descent.purse(self.effort.limit))
        best = min(kept, key=lambda solved: solved.score.objective) if kept else self._smallest(pool, sure=sure)
        logger.info("within %.0f bytes: %.3f ms, %.0f bytes", self.aim, best.score.seconds * 1e3, self._peak(best))
        return replace(best, lower_bound=min(bound, best.score.objective))

    def _generate(self, pool: "_Pool", purse: Purse, *, sure: bool) -> tuple[float, float]:
        """Fills the pool with what is worth having at the price that the limit puts on memory in it (column
        generation), and gives the excess of the last solution, and a lower bound.

        Where nothing in the pool fits, prices rise until something does.
        """
        excess, bound = self._excess(self.cheapest), self.cheapest.lower_bound
        price, fits, corrected = 0.0, False, False
        while True:
            self.stage.part(0.0, 0.5).tell(purse.spent)
            row = self.aim - excess
            solved = pool.solved(row, purse)
            if solved is None and fits:  # at the excess of the last solution nothing does any more
                break
            if solved is None:
                if price >= self._most:
                    break
                first = self.effort.price_first * _unit(self.cheapest)
                price = min(self._most, max(first, self.effort.price_rise * price))
                if self._is_spent(purse):  # what needs the least memory is looked for in any case
                    price, purse = self._most, self.descent.purse(self.effort.descents)
            else:
                price, fits = pool.price, True
            if solved is not None and (self.quick or self._is_spent(purse)):
                if not corrected:
                    excess = self._corrected(solved, sure=sure)
                break
            pool.price = price
            further = self.solve_at(price, solved or pool.solutions[-1], purse)
            if self.evaluate is None:
                bound = max(bound, further.lower_bound - price * row)
            is_new = pool.add(further)
            if solved is None:
                excess = self._excess(further)
                continue
            least = min(_weighed(solved, price), solved.lower_bound + price * row)
            is_done = not is_new or _weighed(further, price) >= least * (1 - self.effort.gain)
            if is_done and (corrected or self.evaluate is None):
                break
            if not corrected and self.evaluate is not None:
                excess, corrected = self._corrected(solved, sure=sure), True
        # the cheapest plan without a limit may lie far from the cheapest within it
        if self.allowed is None and price and not self._is_spent(purse):
            start = self.descent.options.replicated()
            pool.add(self.descent.descend(start, self.descent.axes(), price, purse=purse))
        return excess, bound

    def _is_spent(self, purse: Purse) -> bool:
        return purse.is_empty or self.effort.is_over

    def _corrected(self, solved: Solved, *, sure: bool) -> float:
        """The excess of a solution at the price of the limit, and not that of the cheapest one; `sure` learns from it
        what rough estimates leave out."""
        if sure and self.evaluate is not None:
            self.correction += self.evaluate(solved.assignment, NEAR).bytes - self._peak(solved)
        return self._excess(solved)

    def _mixed(self, pool: "_Pool", excess: float, purse: Purse) -> list[Solved]:
        """The best mixtures of the pool's options, under limits on their sum, whose peak keeps the limit."""
        kept: list[Solved] = []
        limit, row, most_kept, least_over = self.aim, self.aim - excess, 0.0, math.inf
        for _ in self.stage.part(0.5, 1.0).parts(self.effort.limit_rounds):
            solved = pool.solved(row, purse, thorough=True)
            if solved is None:
                if kept or math.isinf(least_over):
                    break
                most_kept = row  # no sum is as small, and none that was larger fitted
            elif self._is_over(solved):
                least_over = row
            else:
                kept.append(solved)
                most_kept = row
            if solved is not None:
                logger.info("at most %.0f bytes in sum: a peak of %.0f, of %.0f", row, self._peak(solved), limit)
                row = limit - self._excess(solved)
            if self._is_spent(purse) and kept:
                break
            if not most_kept < row < least_over:  # bisect between what fits and what does not
                row = (most_kept + least_over) / 2 if most_kept > 0 else 0.95 * least_over
            if row - most_kept <= self.effort.limit_slack * limit or row <= 0 or math.isinf(row):
                break
        return kept

    def _smallest(self, pool: "_Pool", *, sure: bool) -> Solved:
        """The solution with the smallest peak of all. Raises `Infeasible` if that, too, is over the limit."""
        pool.price = self._most
        least = pool.at_price()
        smallest = min([*self.estimated.values(), *pool.solutions, *least], key=self._peak)
        true = self._true_peak(smallest) if sure else self._peak(smallest)
        if true > self.bytes_limit:
            error = DoesNotFit(f"no plan fits in {self.bytes_limit:.0f} bytes: the smallest needs {true:.0f} bytes")
            error.smallest_bytes, error.smallest = true, smallest.assignment
            raise error
        return smallest

    @property
    def _most(self) -> float:
        """The highest price of a byte: at it, what needs the fewest bytes is the best."""
        return self.effort.price_most * _unit(self.cheapest)

    def _excess(self, solved: Solved) -> float:
        """The peak less the sum of bytes."""
        return self._peak(solved) - solved.score.bytes

    def _is_over(self, solved: Solved) -> bool:
        return self._peak(solved) > self.aim

    def _peak(self, solved: Solved) -> float:
        """As estimated, which takes writing a program."""
        if self.evaluate is None:
            return solved.score.bytes
        self.estimated.setdefault(solved.assignment, solved)
        return self.evaluate(solved.assignment, ROUGH).bytes + self.correction

    def _true_peak(self, solved: Solved) -> float:
        return solved.score.bytes if self.evaluate is None else self.evaluate(solved.assignment, EXACT).bytes


class _Pool:
    """Options that solutions took. Parameters may be gathered again in backward as well, if that is `allowed` (None:
    all is)."""

    def __init__(self, descent: Descent, first: Solved, allowed: Allowed | None) -> None:
        self.descent, self.allowed = descent, allowed
        self.solutions: list[Solved] = []
        self.price = 0.0
        """Of a byte: the solutions that cost least at it are the best."""
        self.took: list[dict[str, list[SiteChoice]]] = []
        """What each solution took, and may take of a parameter instead."""
        self.add(first)

    def add(self, solved: Solved) -> bool:
        """Whether that adds an option."""
        took = {
            name: list(dict.fromkeys(c for choice in choices for c in (choice, *self._policies(name, choice))))
            for name, choices in taken(self.descent.space, solved.assignment).items()
        }
        is_new = any(all(c not in before[name] for before in self.took) for name, new in took.items() for c in new)
        self.solutions.append(solved)
        self.took.append(took)
        return is_new

    def _policies(self, name: str, choice: SiteChoice) -> list[SiteChoice]:
        """The choice of a parameter with each policy that is allowed."""
        policies = (choice._replace(policy=policy) for policy in (KEEP, REGATHER) if choice.policy)
        return [c for c in policies if self.allowed is None or c in self.allowed[name]]

    def _smaller(self) -> Iterator[tuple[int, Allowed]]:
        """(number of solutions, the options that they took): of all, then of the best."""
        ranked = sorted(range(len(self.solutions)), key=lambda number: _weighed(self.solutions[number], self.price))
        names = self.descent.options.sites
        for count in dict.fromkeys((len(ranked), min(2, len(ranked)), 1)):
            took = [self.took[number] for number in sorted(ranked[:count])]
            yield count, {name: list(dict.fromkeys(c for of_one in took for c in of_one[name])) for name in names}

    def at_price(self) -> list[Solved]:
        """The cheapest of the pool, or of its best solutions, at its price of memory; none if even that is too wide."""
        descent = self.descent
        for _, options in self._smaller():
            purse = descent.purse(descent.effort.limit)
            try:
                solve, steps = descent.solve, descent.steps
                return [solve(options, steps, price=self.price, bounded=False, ways="narrow", purse=purse)]
            except TooWide:
                continue
        return []

    def solved(self, row: float, purse: Purse, *, thorough: bool = False) -> Solved | None:
        """The cheapest of the pool with at most `row` bytes in sum, or None if there is none; `thorough`: by the solver
        that was asked for. A pool that is too wide is solved for its best solutions; that of one is small, and solved
        when the purse is empty too."""
        descent = self.descent
        solver = descent.solver if thorough else descent.steps
        for count, options in self._smaller():
            if purse.is_empty and count > 1:
                continue
            if count == 1 and len(self.solutions) > 1:
                purse = descent.purse(descent.effort.limit)
            try:
                ways: Ways = "narrow" if count > 1 else "any"
                solved = descent.solve(options, solver, bytes_limit=row, bounded=False, ways=ways, purse=purse)
            except TooWide:
                continue
            except Infeasible:
                return None
            self.price = float(f"{solved.price:.{PRICE_DIGITS}g}")
            return solved
        raise AssertionError("one solution is not too wide")


def _unit(solved: Solved) -> float:
    """Seconds a byte, in which prices of memory are counted."""
    return solved.score.seconds / max(1, solved.score.bytes)


def _weighed(solved: Solved, price: float) -> float:
    return solved.score.objective + price * solved.score.bytes
