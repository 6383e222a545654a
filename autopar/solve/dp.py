"""The dynamic program: exact min-sum elimination, and min-plus powers for what repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .effort import Meter
from .elimination import ALL_ORDERS, FEW_ORDERS
from .exhaustive import solve_exhaustive
from .expand import expanded_options
from .pricing import Library, Pricing
from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Repeat,
    Score,
    Solution,
    TooWide,
    check,
    evaluate,
)
from .relax import relaxed
from .rows import Floats
from .within import Borders, Edge, within

TRIED_OPTIONS = 20_000
"""A problem whose parts have so few joint options is tried in full where a limit binds."""


def solve_dp(
    problem: Problem, *, bytes_limit: float | None = None, bounded: bool = True, meter: Meter | None = None
) -> Solution:
    """Minimise seconds + tie-break * bytes, subject to bytes <= bytes_limit, by min-sum variable elimination.

    Variables: one per op, group, parameter or border, each with its options. A tensor is a table over the classes of
    options of its producer and its readers (or a chain of accumulators of (produced, wanted set)); a repeat is a table
    over its left and right variables: the min-plus power of its body's matrix, so that depth costs its logarithm.
    Objective: the sum of all tables. Ties go to the lowest option index.

    Exact without a limit, where the limit does not bind, and where it does for few joint options (`TRIED_OPTIONS`):
    `lower_bound` is the objective. Elsewhere a limit gives bytes a price, and mixes what is cheapest at it (`within`);
    `lower_bound` is Lagrange's, so that the gap is honest, not 0.

    Where elimination needs too large a table, message passing (`relax`) gives a choice and a bound, mostly equal. Not
    `bounded`: it gives a choice alone, of those in which the middle of a repeat comes again and again, in a fraction of
    the time, and `lower_bound` is 0. Nor is what is within a limit then tried in full.

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
        choice, at = within_limit(problem, library, bytes_limit)
        if bounded and _joint_options(problem) <= TRIED_OPTIONS:
            return replace(solve_exhaustive(problem, bytes_limit=bytes_limit), price=at.price)
        solution = Priced(choice=choice, score=evaluate(problem, choice), price=at.price)
        bound, price, exact = at.lower_bound, at.price, False
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


def within_limit(problem: Problem, library: Library, bytes_limit: float) -> tuple[Choice, Edge]:
    """The best choice within the limit by eliminations at prices of memory, and the edge there (`within`)."""
    pricings: dict[float, Pricing] = {}

    def solve_at(price: float) -> Choice:
        return (smallest_bytes(problem, library) if math.isinf(price) else priced(problem, library, price)).choice

    def between(price: float, repeat: Repeat, borders: Borders) -> Choice | None:
        if price not in pricings:
            pricings[price] = Pricing(library, _weights(price))
        return pricings[price].copy_between(repeat, borders, 0)

    return within(problem, bytes_limit, solve_at, between)


def _joint_options(problem: Problem) -> int:
    """Of the part that has most: of the problem, or of the copies of a body in it, each for itself."""
    own = math.prod(len(variable.options) for variable in problem.variables)
    return max(own, *(repeat.count * _joint_options(repeat.body) for repeat in problem.repeats), 1)
