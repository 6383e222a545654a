"""The dynamic program: exact min-sum elimination, and min-plus powers for what repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .effort import Meter
from .elimination import ALL_ORDERS, FEW_ORDERS
from .expand import expanded_options
from .fronts import ProblemFronts, Window
from .pricing import Library, Pricing
from .problem import TIE_BREAK_SECONDS_PER_BYTE, Choice, Infeasible, Problem, Score, Solution, TooWide, check, evaluate
from .relax import relaxed
from .rows import Floats

FRONT_POINTS = (32, 256)
"""Points that a front of (seconds, bytes) may have, in one round after the other."""

BATCH_ENTRIES = 20_000_000
"""Entries that the largest table may have at all prices of a batch together."""

LIMITED_GAP = 1e-4
"""Relative gap under a memory limit at which problems too large to be solved exactly are done."""


def solve_dp(
    problem: Problem, *, bytes_limit: float | None = None, bounded: bool = True, meter: Meter | None = None
) -> Solution:
    """Minimise seconds + tie-break * bytes, subject to bytes <= bytes_limit, by min-sum variable elimination.

    Variables: one per op, group, parameter or border, each with its options. A tensor is a table over the classes of
    options of its producer and its readers (or a chain of accumulators of (produced, wanted set)); a repeat is a table
    over its left and right variables: the min-plus power of its body's matrix, so that depth costs its logarithm.
    Objective: the sum of all tables. Ties go to the lowest option index.

    Exact without a limit, and where the limit does not bind: `lower_bound` is the objective. Where it binds, bytes get
    a price. The price that gives the best Lagrangian bound is found by bisection; what a sweep of prices around it
    chooses for each body, border state by border state, is a pool of (seconds, bytes) points, and the chain of copies
    is put together from the pool point by point, so that identical copies may choose differently. Exact only where
    every problem in it has at most `fronts.ALL_STATES` joint options and no front needed thinning; elsewhere choices
    between two supported prices within one copy can be missed, and `lower_bound` is the Lagrangian bound: the gap is
    honest, not 0.

    Where elimination needs too large a table, message passing (`relax`) gives a choice and a bound, mostly equal. Not
    `bounded`: it gives a choice alone, of those in which the middle of a repeat comes again and again, in a fraction of
    the time, and `lower_bound` is 0.

    `meter` limits the work, and counts what is done.

    Raises `Infeasible` where no choice is feasible, `TooWide` where tables are too large and there is a limit.
    """
    check(problem)
    meter = meter or Meter()
    messages_follow = bytes_limit is None and not bounded and meter.effort.message_entries > 0
    library = Library(meter, orders=FEW_ORDERS if messages_follow else ALL_ORDERS)
    try:
        cheapest = priced(problem, library, 0.0)
        solution, bound, price, exact = cheapest, cheapest.score.objective, 0.0, True
    except TooWide:
        if bytes_limit is not None:
            raise
        choice, bound = _relaxed(problem, library, bounded)
        solution, exact = Priced(choice=choice, score=evaluate(problem, choice), price=0.0), False
        price = 0.0
    if bytes_limit is not None and solution.score.bytes > bytes_limit:
        solution, bound, exact = _limited(problem, library, solution, bytes_limit)
        price = solution.price
    objective = solution.score.objective
    return Solution(
        choice=solution.choice,
        score=solution.score,
        lower_bound=objective if exact else min(bound, objective),
        price=price,
    )


def _relaxed(problem: Problem, library: Library, bounded: bool) -> tuple[Choice, float]:
    weights = 1.0, TIE_BREAK_SECONDS_PER_BYTE
    if not bounded:
        try:
            return relaxed(problem, weights, library, folded=True)[0], 0.0
        except TooWide:
            if expanded_options(problem) > library.meter.effort.written_options:
                raise
            # no choice with a repeated middle fits
    return relaxed(problem, weights, library)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    choice: Choice
    score: Score
    price: float
    """seconds per byte beyond the tie-break"""


def _weights(*prices: float) -> Floats:
    return np.array([[1.0, TIE_BREAK_SECONDS_PER_BYTE + price] for price in prices])


def pool_weights(prices: list[float]) -> Floats:
    """The prices tried, and bytes alone, so that what fits at all is in the pool."""
    return np.concatenate((_weights(*prices), [[0.0, 1.0]]))


def _scored(problem: Problem, choice: Choice, price: float, objective: float) -> Priced:
    """A choice with its score, which must agree with the objective of the elimination."""
    score = evaluate(problem, choice)
    evaluated = score.objective + price * score.bytes
    assert math.isclose(evaluated, objective, rel_tol=1e-9, abs_tol=1e-18), (evaluated, objective)
    return Priced(choice=choice, score=score, price=price)


def priced(problem: Problem, library: Library, price: float) -> Priced:
    """The choice with the least seconds + (tie-break + price) * bytes, or `Infeasible`."""
    pricing = Pricing(library, _weights(price))
    objective = float(pricing.table(problem, ())[0])
    if math.isinf(objective):
        raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
    return _scored(problem, pricing.choice(problem, (), (), 0), price, objective)


def smallest_bytes(problem: Problem, library: Library) -> Priced:
    """The choice that needs the fewest bytes."""
    pricing = Pricing(library, np.array([[0.0, 1.0]]))
    choice = pricing.choice(problem, (), (), 0)
    return Priced(choice=choice, score=evaluate(problem, choice), price=math.inf)


def _limited(problem: Problem, library: Library, cheapest: Priced, bytes_limit: float) -> tuple[Priced, float, bool]:
    """The best choice within the limit, the Lagrangian bound, and whether the choice is proved optimal."""
    prices, fits, bound = lagrangian(problem, library, cheapest, bytes_limit)
    pricing = Pricing(library, pool_weights(prices))
    # Few points first: a better choice narrows the window, and with it the work on many points.
    for points in FRONT_POINTS:
        fronts = ProblemFronts(problem, (), pricing, window(fits, bound, bytes_limit, points))
        (root,) = fronts.fronts
        objectives = root.seconds + TIE_BREAK_SECONDS_PER_BYTE * root.bytes
        for point in objectives.argsort(kind="stable").tolist():
            if objectives[point] >= fits.score.objective:
                break
            mixed = _scored(problem, fronts.choice(0, point), 0.0, float(objectives[point]))
            if mixed.score.bytes <= bytes_limit:
                fits = mixed
                break
        if fronts.exact:
            return replace(fits, price=bound.price), fits.score.objective, True
        if not fronts.complete and fits.score.objective - bound.objective <= LIMITED_GAP * fits.score.objective:
            break
    return replace(fits, price=bound.price), bound.objective, False


def window(fits: Priced, bound: Bound, bytes_limit: float, points: int) -> Window:
    """At the price of the bound a useful point exceeds the best of its cell by at most the gap, and rounding."""
    gap = fits.score.objective - bound.objective
    return Window(
        price=TIE_BREAK_SECONDS_PER_BYTE + bound.price,
        slack=gap * (1 + 1e-6) + 1e-9 * abs(fits.score.objective),
        points=points,
        bytes_limit=bytes_limit * (1 + 1e-12),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least of seconds + price * (bytes - limit): no choice within the limit is cheaper than `objective`."""

    price: float
    objective: float


def lagrangian(
    problem: Problem, library: Library, cheapest: Priced, bytes_limit: float
) -> tuple[list[float], Priced, Bound]:
    """The prices tried, the best choice among theirs that fits, and the best bound.

    Raises `Infeasible` where not even the smallest choice fits.
    """
    smallest = smallest_bytes(problem, library)
    if smallest.score.bytes > bytes_limit:
        raise Infeasible(
            f"no choice fits in {bytes_limit:.0f} bytes: the smallest needs {smallest.score.bytes:.0f} bytes"
        )
    slope = (smallest.score.seconds - cheapest.score.seconds) / (cheapest.score.bytes - smallest.score.bytes)
    slope = max(slope, 1e-30)
    fits = smallest
    bound = Bound(price=0.0, objective=cheapest.score.objective)
    tried = [0.0]
    low, high = 0.0, math.inf
    over, under = cheapest, smallest
    room = BATCH_ENTRIES // library.largest(problem)
    steps = max(4, min(16, room))
    candidates = [slope * 2.0 ** (16 * k / steps) for k in range(-steps, steps + 1)]
    for _ in range(3):
        pricing = Pricing(library, _weights(*candidates))
        values = pricing.table(problem, ())
        tried += candidates
        for price, value in zip(candidates, values, strict=True):
            if value - price * bytes_limit > bound.objective:
                bound = Bound(price=price, objective=float(value - price * bytes_limit))
        first, last = 0, len(candidates)
        while first < last:
            middle = (first + last) // 2
            candidate = _scored(
                problem, pricing.choice(problem, (), (), middle), candidates[middle], float(values[middle])
            )
            if candidate.score.bytes <= bytes_limit:
                last, high, under = middle, candidates[middle], candidate
                if candidate.score.objective < fits.score.objective:
                    fits = candidate
            else:
                first, low, over = middle + 1, candidates[middle], candidate
        if math.isinf(high) or low == 0.0:
            break
        candidates = [low * (high / low) ** (k / (steps + 1)) for k in range(1, steps + 1)]
        kink = (under.score.seconds - over.score.seconds) / (over.score.bytes - under.score.bytes)
        if low < kink - TIE_BREAK_SECONDS_PER_BYTE < high:
            candidates = sorted([*candidates, kink - TIE_BREAK_SECONDS_PER_BYTE])
    nearest = sorted(set(tried), key=lambda price: abs(math.log((price + 1e-30) / (bound.price + 1e-30))))
    return sorted(nearest[: max(4, room)]), fits, bound
