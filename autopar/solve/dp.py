"""The dynamic program: exact min-sum elimination, and min-plus powers for what repeats."""

from __future__ import annotations

import math
from dataclasses import replace

from .effort import Meter
from .elimination import ALL_ORDERS, FEW_ORDERS
from .exhaustive import solve_exhaustive
from .expand import expanded_options
from .network import Weights
from .pricing import Library, Pricing
from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Repeat,
    Scored,
    Solution,
    TooWide,
    check,
    evaluate,
)
from .relax import relaxed
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
        score, choice = priced(problem, library, 0.0)
    except TooWide:
        if bytes_limit is not None:
            raise
        return solve_relaxed(problem, library, bounded=bounded)
    if bytes_limit is None or score.bytes <= bytes_limit:
        return Solution(choice=choice, score=score, lower_bound=score.objective)
    choice, at = within_limit(problem, library, bytes_limit)
    if bounded and _joint_options(problem) <= TRIED_OPTIONS:
        return replace(solve_exhaustive(problem, bytes_limit=bytes_limit), price=at.price)
    score = evaluate(problem, choice)
    return Solution(choice=choice, score=score, lower_bound=min(at.lower_bound, score.objective), price=at.price)


def solve_relaxed(
    problem: Problem, library: Library, *, bytes_limit: float | None = None, bounded: bool = True
) -> Solution:
    """As `solve_dp`, by message passing, which answers with whatever work is left: without any, node after node takes
    the state that costs least beside those taken before. A limit gives bytes a price, as there, and `lower_bound` is
    that without a limit.

    Raises `Infeasible` where nothing that it comes to is within the limit, `TooWide` where it comes to nothing, or the
    table of one tensor is too large.
    """
    bounds: list[float] = []

    def solve_at(price: float) -> Choice:
        weights = (0.0, 1.0) if math.isinf(price) else (1.0, TIE_BREAK_SECONDS_PER_BYTE + price)
        choice, bound = _relaxed(problem, weights, library, bounded)
        bounds.append(bound)
        return choice

    choice, at = within(problem, math.inf if bytes_limit is None else bytes_limit, solve_at)
    score = evaluate(problem, choice)
    return Solution(choice=choice, score=score, lower_bound=min(bounds[0], score.objective), price=at.price)


def _relaxed(problem: Problem, weights: Weights, library: Library, bounded: bool) -> tuple[Choice, float]:
    if not bounded:
        try:
            return relaxed(problem, weights, library, folded=True)[0], 0.0
        except TooWide:
            if expanded_options(problem) > library.meter.effort.written_options:
                raise
            # no choice with a repeated middle fits
    return relaxed(problem, weights, library)


def priced(problem: Problem, library: Library, price: float) -> Scored:
    """The choice with the least seconds + (tie-break + price) * bytes, or `Infeasible`."""
    pricing = Pricing(library, (1.0, TIE_BREAK_SECONDS_PER_BYTE + price))
    objective = float(pricing.table(problem, ()))
    if math.isinf(objective):
        raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
    choice = pricing.choice(problem)
    score = evaluate(problem, choice)
    evaluated = score.objective + price * score.bytes
    assert math.isclose(evaluated, objective, rel_tol=1e-9, abs_tol=1e-18), (evaluated, objective)
    return score, choice


def within_limit(problem: Problem, library: Library, bytes_limit: float) -> tuple[Choice, Edge]:
    """The best choice within the limit by eliminations at prices of memory, and the edge there (`within`)."""
    pricings: dict[float, Pricing] = {}

    def solve_at(price: float) -> Choice:
        if math.isinf(price):
            return Pricing(library, (0.0, 1.0)).choice(problem)
        return priced(problem, library, price)[1]

    def between(price: float, repeat: Repeat, borders: Borders) -> Choice | None:
        if price not in pricings:
            pricings[price] = Pricing(library, (1.0, TIE_BREAK_SECONDS_PER_BYTE + price))
        return pricings[price].copy_between(repeat, borders)

    return within(problem, bytes_limit, solve_at, between)


def _joint_options(problem: Problem) -> int:
    """Of the part that has most: of the problem, or of the copies of a body in it, each for itself."""
    own = math.prod(len(variable.options) for variable in problem.variables)
    return max(own, *(repeat.count * _joint_options(repeat.body) for repeat in problem.repeats), 1)
