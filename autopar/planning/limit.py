"""The memory limit: the cheapest plan whose peak keeps it.

A problem limits a sum of bytes, but what must fit is a rank's peak: that sum, and an excess that differs from plan to
plan. So the search tries prices of memory, solves the pool of their options under limits on the sum, and recomputes
copies of segments in backward, until the peak fits. It estimates peaks, and computes the exact peak of the answer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Assignment, Decisions
from autopar.passes.space.space import Space
from autopar.solve.effort import Purse
from autopar.solve.problem import Infeasible, Score

from .account import recomputation
from .descent import Descent
from .options import taken
from .shortfall import DoesNotFit
from .solving import Solved

Peaks = Callable[[Assignment], float]
"""Assignment -> the bytes of its peak, or an estimate of them."""

SolveAt = Callable[[float, Solved, Purse], Solved]
"""Solves at a price of memory, from another solution, with a purse that pays."""


class Limit:
    """A limit on the peak of an assignment; without `peaks` (exact and estimated ones), on its sum of bytes. `several`
    says that the cheapest plan is that of descents from several starts."""

    def __init__(
        self,
        descent: Descent,
        limit_bytes: float,
        peaks: tuple[Peaks, Peaks] | None,
        *,
        several: bool,
        log: Callable[[str], None],
    ) -> None:
        self.descent, self.space, self.several, self.log = descent, descent.space, several, log
        self.effort = descent.effort
        self.bytes_limit = self.aim = limit_bytes
        """`aim` is the limit on estimates, so that the exact peak keeps `bytes_limit`."""
        self.peak: Peaks | None = None
        self.estimate: Peaks | None = None
        if peaks is not None:
            self.peak, self.estimate = peaks
        self.estimated: dict[Assignment, tuple[Solved, float]] = {}

    def best(self, cheapest: Solved, solve_at: SolveAt, *, sure: bool) -> Solved:
        """The best that keeps the limit by its estimated peak, or, if it is to be `sure`, by its exact one. If the
        answer's exact peak is over, the next round aims below the limit by as much; the last round estimates nothing.
        """
        for _ in range(self.effort.confirmations):
            best = self._within_limit(cheapest, solve_at) if self._is_over(cheapest) else cheapest
            if not sure or (true := self._true_peak(best)) <= self.bytes_limit:
                return best
            self.log(f"estimated peak {self._peak(best):.0f} bytes, exact peak {true:.0f}")
            nearer = min(self.aim, self.bytes_limit - (true - self._peak(best)))
            self.aim = nearer - max(true - self.bytes_limit, self.effort.limit_margin * self.bytes_limit)
        self.aim, self.estimate, self.estimated = self.bytes_limit, self.peak, {}
        return self._within_limit(cheapest, solve_at) if self._is_over(cheapest) else cheapest

    def _within_limit(self, cheapest: Solved, solve_at: SolveAt) -> Solved:
        """The best that keeps the limit. Solves at rising prices of memory, each from the one before, and a descent
        from the start at the last price, fill a pool of options. The pool is then solved under the limit, and layers of
        one structure mix their options.

        A solver limits a sum of bytes. The peak is that sum and an excess (temporaries, less what is not alive at
        once), and the excess of one plan says which sum to allow the next.

        The lower bound is Lagrange's, over the prices that were tried; for a limit on the peak, which is no sum, it is
        the bound without a limit.
        """
        limit, score = self.aim, cheapest.score
        unit = score.seconds / score.bytes
        purse = self.descent.purse(self.effort.limit)
        tried: list[tuple[float, Solved]] = [(0.0, cheapest)]
        price, fits, excess = 0.02 * unit, None, self._excess(cheapest)
        while fits is None and price <= self.effort.price_most * unit:
            solved = solve_at(price, tried[-1][1], purse)
            tried.append((price, solved))
            if solved.score.bytes + excess <= (1 + self.effort.limit_surely) * limit:
                fits = None if self._is_over(solved) else price
                excess = self._excess(solved)
            price *= 5
        kept: list[Solved] = []
        if fits is not None:
            kept.append(tried[-1][1])
            below, above = tried[-2][0], fits
            for _ in range(self.effort.price_bisections):
                middle = math.sqrt(below * above) if below else above / 5
                if purse.is_empty:
                    break
                solved = solve_at(middle, tried[-1][1], purse)
                tried.append((middle, solved))
                over = solved.score.bytes + excess > limit
                below, above = (middle, above) if over else (below, middle)
            # the cheapest plan without a limit may lie far from the cheapest within it
            if self.several and not purse.is_empty:
                descent, start = self.descent, self.descent.options.replicated()
                tried.append((above, descent.descend(start, descent.axes(), above, purse=purse)))
            kept += self._mixed([solved for _, solved in tried], limit, excess, purse)
        kept += self._recomputing([solved for _, solved in tried], kept, limit)
        if not kept:
            kept.append(self._smallest([solved for _, solved in tried]))
        best = min(kept, key=lambda solved: solved.score.objective)
        bound = cheapest.lower_bound
        if self.peak is None:
            bound = max(solved.lower_bound - price * limit for price, solved in tried)
        self.log(f"within {limit:.0f} bytes: {best.score.seconds * 1e3:.3f} ms, {self._peak(best):.0f} bytes")
        return replace(best, lower_bound=min(bound, best.score.objective))

    def _smallest(self, tried: Sequence[Solved]) -> Solved:
        """The solution with the smallest peak of all. Raises `Infeasible` if that, too, is over the limit."""
        smallest = min([*(solved for solved, _ in self.estimated.values()), *tried], key=self._peak)
        true = self._true_peak(smallest)
        if true > self.bytes_limit:
            error = DoesNotFit(f"no plan fits in {self.bytes_limit:.0f} bytes: the smallest needs {true:.0f} bytes")
            error.smallest_bytes, error.smallest = true, smallest.assignment
            raise error
        return smallest

    def _mixed(self, tried: Sequence[Solved], limit: float, excess: float, purse: Purse) -> list[Solved]:
        """The best mixtures of the options that were taken, under limits on their sum, whose peak keeps the limit."""
        pool: dict[str, dict[SiteChoice, None]] = {name: {} for name in self.descent.options.sites}
        for solved in tried:
            for name, choices in taken(self.space, solved.assignment).items():
                pool[name].update(dict.fromkeys(choices))
        options = {name: list(choices) for name, choices in pool.items()}
        kept = []
        row, most_kept, least_over = limit - excess, -math.inf, math.inf
        for _ in range(self.effort.limit_rounds):
            if purse.is_empty:
                break
            try:
                solved = self.descent.solve(options, self.descent.solver, bytes_limit=row, purse=purse)
            except Infeasible:
                break
            over = self._is_over(solved)
            self.log(f"at most {row:.0f} bytes in sum: peak {self._peak(solved):.0f}, {'over' if over else 'within'}")
            if over:
                least_over = row
            else:
                kept.append(solved)
                most_kept = row
            row = limit - self._excess(solved)
            if not most_kept < row < least_over:  # bisect between what fits and what does not
                row = (most_kept + least_over) / 2 if most_kept > 0 else 0.95 * least_over
            if row - most_kept <= self.effort.limit_slack * limit or row <= 0 or math.isinf(row):
                break
        return kept

    def _recomputing(self, candidates: Sequence[Solved], kept: Sequence[Solved], limit: float) -> list[Solved]:
        """The best candidates with copies of segments recomputed in backward, if they beat what is `kept` without: as
        few copies as keep the limit, those first that save the most bytes a second, and of these the earliest, which
        are held the longest."""
        if self.peak is None or not self.space.repeats:
            return []
        best = min((solved.score.objective for solved in kept), default=math.inf)
        excess = self._excess((*candidates, *kept)[-1])
        unique: list[Solved] = []
        for solved in candidates:
            if all(solved.assignment != other.assignment for other in unique):
                unique.append(solved)
        ways = [Recomputation(self.space, solved) for solved in unique]
        ways.sort(key=lambda way: way.score(way.needed(limit - excess)).objective)
        within: list[Solved] = []
        smallest = min(ways, key=lambda way: way.score(len(way.copies)).bytes)
        for way in dict.fromkeys((*ways[: self.effort.recompute_plans], smallest)):
            count, most = way.needed(limit - excess), len(way.copies)
            for last in range(self.effort.recompute_rounds):
                if not way.score(count).objective < best:
                    break
                solved = way.solved(count)
                over = self._is_over(solved)
                self.log(f"{count} of {most} copies recomputed: peak {self._peak(solved):.0f}")
                if not over:
                    within.append(solved)
                    best = solved.score.objective
                nearer = way.needed(limit - self._excess(solved))
                nearer = max(nearer, count + 1) if over else min(nearer, count - 1)
                count = most if over and last == self.effort.recompute_rounds - 2 else nearer
                if not 0 < count <= most:
                    break
        return within

    def _excess(self, solved: Solved) -> float:
        """The peak less the sum of bytes."""
        return self._peak(solved) - solved.score.bytes

    def _is_over(self, solved: Solved) -> bool:
        return self._peak(solved) > self.aim

    def _peak(self, solved: Solved) -> float:
        """As estimated, which takes writing a program."""
        if self.estimate is None:
            return solved.score.bytes
        assignment = solved.assignment
        if assignment not in self.estimated:
            self.estimated[assignment] = solved, self.estimate(assignment)
        return self.estimated[assignment][1]

    def _true_peak(self, solved: Solved) -> float:
        return solved.score.bytes if self.peak is None else self.peak(solved.assignment)


class Recomputation:
    """A solution some of whose copies of segments may be recomputed in backward."""

    def __init__(self, space: Space, solution: Solved) -> None:
        self.solution = solution
        self.copies: list[tuple[float, int, int, float, float]] = []
        """(seconds a byte, repeat, copy, seconds, bytes saved), the cheapest byte first."""
        for number, (region, copies) in enumerate(zip(space.bodies, solution.assignment.copies, strict=True)):
            priced: list[tuple[Decisions, tuple[float, float]]] = []
            for k, decisions in enumerate(copies):
                cost = next((cost for same, cost in priced if same == decisions), None)
                if cost is None:
                    cost = recomputation(space, region, decisions)
                    priced.append((decisions, cost))
                seconds, size = cost
                if size > 0:
                    self.copies.append((seconds / size, number, k, seconds, size))
        self.copies.sort()

    def needed(self, row: float) -> int:
        """How many copies to recompute for a sum of bytes of at most `row`; all, if that is not enough."""
        over = self.solution.score.bytes - row
        saved = accumulate((size for *_, size in self.copies), initial=0.0)
        return next((count for count, size in enumerate(saved) if size >= over), len(self.copies))

    def score(self, count: int) -> Score:
        score, first = self.solution.score, self.copies[:count]
        return Score(
            seconds=score.seconds + sum(seconds for *_, seconds, _ in first),
            bytes=score.bytes - sum(size for *_, size in first),
        )

    def solved(self, count: int) -> Solved:
        chosen = {(number, k) for _, number, k, _, _ in self.copies[:count]}
        assignment = self.solution.assignment
        flags = tuple(
            tuple((number, k) in chosen for k in range(len(copies))) for number, copies in enumerate(assignment.copies)
        )
        return replace(self.solution, assignment=replace(assignment, recompute=flags), score=self.score(count))
