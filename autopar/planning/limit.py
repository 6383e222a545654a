"""The memory limit: the cheapest plan whose peak keeps it.

Problems limit a sum of bytes, and a rank is limited by its peak, which is that sum and an excess of its own. So prices
of memory are tried, a pool of what they lead to is solved under limits on the sum, and copies of segments are computed
again in backward, until the peak fits. Peaks are estimated, and that of the answer is looked at.
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
from .solving import Solved

Peaks = Callable[[Assignment], float]
"""The bytes that an assignment needs at its peak, or an estimate of them."""

SolveAt = Callable[[float, "Solved", Purse], "Solved"]
"""What solves at a price of memory, from another solution, with a purse that pays."""


class Limit:
    """A limit on the peak of an assignment, or, if no `peaks` are given (true ones, and estimates of them), on its sum
    of bytes. `several` says that the cheapest plan came of descents from several starts."""

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
        """`aim` is what estimates are to keep, so that the limit is kept."""
        self.peak: Peaks | None = None
        self.estimate: Peaks | None = None
        if peaks is not None:
            self.peak, self.estimate = peaks
        self.peaks: dict[Assignment, tuple[Solved, float]] = {}
        """As estimated."""

    def best(self, cheapest: Solved, solve_at: SolveAt, *, sure: bool) -> Solved:
        """The best that keeps the limit, if there is one, as estimated or, if that is to be `sure`, in truth. Where the
        answer is over it by more than was estimated, the next one is to be as much below; at last nothing is
        estimated any more."""
        for _ in range(self.effort.confirmations):
            best = self._within_limit(cheapest, solve_at) if self._is_over(cheapest) else cheapest
            if not sure or (true := self._true_peak(best)) <= self.bytes_limit:
                return best
            self.log(f"estimated to need {self._peak(best):.0f} bytes, and needs {true:.0f}")
            nearer = min(self.aim, self.bytes_limit - (true - self._peak(best)))
            self.aim = nearer - max(true - self.bytes_limit, self.effort.limit_margin * self.bytes_limit)
        self.aim, self.estimate, self.peaks = self.bytes_limit, self.peak, {}
        return self._within_limit(cheapest, solve_at) if self._is_over(cheapest) else cheapest

    def _within_limit(self, cheapest: Solved, solve_at: SolveAt) -> Solved:
        """The best that keeps the limit: solves at rising prices of memory, each from the one before, and a descent
        from the start at the last of them, fill a pool of options, in which the limit is then kept exactly, layers of
        one structure mixing their options.

        A solver limits a sum of bytes. The peak is that sum and an excess (temporaries, less what is not there at
        once), which differs from plan to plan: what it is for one plan says what sum the next may have.

        The lower bound is Lagrange's, over the prices that were tried; where a peak is limited, which is no sum, it is
        that without a limit.
        """
        limit, score = self.aim, cheapest.score
        unit = score.seconds / score.bytes
        purse = self.descent.purse(self.effort.limit)
        tried: list[tuple[float, Solved]] = [(0.0, cheapest)]
        price, fits, excess = 0.02 * unit, None, self._excess(cheapest)
        while fits is None and price <= self.effort.price_most * unit:
            found = solve_at(price, tried[-1][1], purse)
            tried.append((price, found))
            if found.score.bytes + excess <= (1 + self.effort.limit_surely) * limit:
                fits = None if self._is_over(found) else price
                excess = self._excess(found)
            price *= 5
        kept: list[Solved] = []
        if fits is not None:
            kept.append(tried[-1][1])
            below, above = tried[-2][0], fits
            for _ in range(self.effort.price_bisections):
                middle = math.sqrt(below * above) if below else above / 5
                if purse.is_empty:
                    break
                found = solve_at(middle, tried[-1][1], purse)
                tried.append((middle, found))
                over = found.score.bytes + excess > limit
                below, above = (middle, above) if over else (below, middle)
            # what is cheapest without a limit may lie far from what is cheapest within it
            if self.several and not purse.is_empty:
                descent, start = self.descent, self.descent.options.whole()
                tried.append((above, descent.descend(start, descent.axes(), above, purse=purse)))
            kept += self._mixed([found for _, found in tried], limit, excess, purse)
        again = self._recomputing([found for _, found in tried], kept, limit)
        if not kept and not again:
            kept.append(self._smallest([found for _, found in tried]))
        best = min(kept + again, key=lambda found: found.score.objective)
        bound = cheapest.lower_bound
        if self.peak is None:
            bound = max(found.lower_bound - price * limit for price, found in tried)
        self.log(f"within {limit:.0f} bytes: {best.score.seconds * 1e3:.3f} ms, {self._peak(best):.0f} bytes")
        return replace(best, lower_bound=min(bound, best.score.objective))

    def _smallest(self, tried: Sequence[Solved]) -> Solved:
        """Of all plans that were looked at. Raises `Infeasible` where that, too, is over the limit."""
        looked_at = [found for found, _ in self.peaks.values()]
        smallest = min([*looked_at, *tried], key=self._peak)
        true = self._true_peak(smallest)
        if true > self.bytes_limit:
            error = Infeasible(
                f"no choice fits in {self.bytes_limit:.0f} bytes: the smallest needs {true:.0f} bytes; "
                f"give more memory, more ranks or a smaller batch"
            )
            error.smallest_bytes = true
            raise error
        return smallest

    def _mixed(self, tried: Sequence[Solved], limit: float, excess: float, purse: Purse) -> list[Solved]:
        """The best of the options that were taken, under limits on their sum, of which the peak keeps the limit."""
        pool: dict[str, dict[SiteChoice, None]] = {name: {} for name in self.descent.options.sites}
        for found in tried:
            for name, choices in taken(self.space, found.assignment).items():
                pool[name].update(dict.fromkeys(choices))
        options = {name: list(choices) for name, choices in pool.items()}
        kept = []
        row, most_kept, least_over = limit - excess, -math.inf, math.inf
        for _ in range(self.effort.limit_rounds):
            if purse.is_empty:
                break
            try:
                found = self.descent.solve(options, self.descent.solver, bytes_limit=row, purse=purse)
            except Infeasible:
                break
            over = self._is_over(found)
            self.log(f"at most {row:.0f} bytes in sum: peak {self._peak(found):.0f}, {'over' if over else 'within'}")
            if over:
                least_over = row
            else:
                kept.append(found)
                most_kept = row
            row = limit - self._excess(found)
            if not most_kept < row < least_over:  # it went back: between what fits and what does not
                row = (most_kept + least_over) / 2 if most_kept > 0 else 0.95 * least_over
            if row - most_kept <= self.effort.limit_slack * limit or row <= 0 or math.isinf(row):
                break
        return kept

    def _recomputing(self, candidates: Sequence[Solved], kept: Sequence[Solved], limit: float) -> list[Solved]:
        """The best of these with copies of segments recomputed in backward: as few as keep the limit, those that save
        the most bytes a second first, and of these the earliest, which are held the longest.

        Better than what is `kept` without, if there is any.
        """
        if not self._may_recompute:
            return []
        best = min((found.score.objective for found in kept), default=math.inf)
        excess = self._excess((*candidates, *kept)[-1])
        unique: list[Solved] = []
        for found in candidates:
            if all(found.assignment != other.assignment for other in unique):
                unique.append(found)
        again = [Recomputation(self.space, found) for found in unique]
        again.sort(key=lambda way: way.objective(way.needed(limit - excess)))
        made: list[Solved] = []
        smallest = min(again, key=lambda way: way.score(len(way.copies)).bytes)
        for way in dict.fromkeys((*again[: self.effort.recompute_plans], smallest)):
            count, most = way.needed(limit - excess), len(way.copies)
            for last in range(self.effort.recompute_rounds):
                if not way.objective(count) < best:
                    break
                found = way.solved(count)
                over = self._is_over(found)
                self.log(f"{count} of {most} copies recomputed: peak {self._peak(found):.0f}")
                if not over:
                    made.append(found)
                    best = found.score.objective
                nearer = way.needed(limit - self._excess(found))
                nearer = max(nearer, count + 1) if over else min(nearer, count - 1)
                count = most if over and last == self.effort.recompute_rounds - 2 else nearer
                if not 0 < count <= most:
                    break
        return made

    @property
    def _may_recompute(self) -> bool:
        return self.peak is not None and bool(self.space.repeats)

    def _excess(self, found: Solved) -> float:
        """What the peak is above the sum of bytes."""
        return self._peak(found) - found.score.bytes

    def _is_over(self, found: Solved) -> bool:
        return self._peak(found) > self.aim

    def _peak(self, found: Solved) -> float:
        """Of an assignment: its program, or one of fewer copies, is written for that."""
        if self.estimate is None:
            return found.score.bytes
        assignment = found.assignment
        if assignment not in self.peaks:
            self.peaks[assignment] = found, self.estimate(assignment)
        return self.peaks[assignment][1]

    def _true_peak(self, found: Solved) -> float:
        return found.score.bytes if self.peak is None else self.peak(found.assignment)


class Recomputation:
    """An assignment of which copies may be recomputed in backward."""

    def __init__(self, space: Space, found: Solved) -> None:
        self.space, self.found = space, found
        self.copies: list[tuple[float, int, int, float, float]] = []
        """(seconds a byte, repeat, copy, seconds, bytes saved), the cheapest byte first."""
        for number, (region, copies) in enumerate(zip(space.bodies, found.assignment.copies, strict=True)):
            priced: list[tuple[Decisions, tuple[float, float]]] = []
            for k, decisions in enumerate(copies):
                known = next((cost for same, cost in priced if same == decisions), None)
                if known is None:
                    known = recomputation(space, region, decisions)
                    priced.append((decisions, known))
                seconds, size = known
                if size > 0:
                    self.copies.append((seconds / size, number, k, seconds, size))
        self.copies.sort()

    def needed(self, row: float) -> int:
        """How many copies are recomputed for a sum of bytes of at most `row`; all, where that is not enough."""
        over = self.found.score.bytes - row
        saved = accumulate((size for *_, size in self.copies), initial=0.0)
        return next((count for count, size in enumerate(saved) if size >= over), len(self.copies))

    def objective(self, count: int) -> float:
        return self.score(count).objective

    def score(self, count: int) -> Score:
        score, first = self.found.score, self.copies[:count]
        return Score(
            seconds=score.seconds + sum(seconds for *_, seconds, _ in first),
            bytes=score.bytes - sum(size for *_, size in first),
        )

    def solved(self, count: int) -> Solved:
        chosen = {(number, k) for _, number, k, _, _ in self.copies[:count]}
        assignment = self.found.assignment
        flags = tuple(
            tuple((number, k) in chosen for k in range(len(copies))) for number, copies in enumerate(assignment.copies)
        )
        return replace(self.found, assignment=replace(assignment, recompute=flags), score=self.score(count))
