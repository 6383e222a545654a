"""Greedy and beam search: operator by operator, in the order of the program.

What people do by hand, and what the other solvers are measured against: no choice is taken back. `greedy` keeps one
partial choice, `beam` the `WIDTH` cheapest. A partial choice costs what its variables cost, and for every tensor
the least that it can still come to, whatever its other variables choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .effort import Meter
from .expand import Expanded, expand
from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Score,
    Solution,
    Tensor,
    TooWide,
    check,
    evaluate,
)
from .relax import lower_bound
from .rows import Row, tensor_rows, united

WIDTH = 64
WIDER = (1, 8, 64)
"""Times the width, where what was kept leads nowhere: tensors that can each be had need not go together."""
PRICES = 24
"""Prices of memory that are tried where there is a limit: doubled until a choice fits, then bisected."""


def solve_greedy(
    problem: Problem, *, bytes_limit: float | None = None, bounded: bool = True, meter: Meter | None = None
) -> Solution:
    """Each variable takes what is cheapest after those before it. `lower_bound` is that of message passing, and 0 if
    not `bounded`.

    Raises `Infeasible` where it reaches no choice, or none that fits in `bytes_limit`.
    """
    return _solve(problem, bytes_limit, 1, bounded, meter)


def solve_beam(
    problem: Problem, *, bytes_limit: float | None = None, bounded: bool = True, meter: Meter | None = None
) -> Solution:
    """As `solve_greedy`, with the `WIDTH` cheapest partial choices kept at each variable."""
    return _solve(problem, bytes_limit, WIDTH, bounded, meter)


def _solve(problem: Problem, bytes_limit: float | None, width: int, bounded: bool, meter: Meter | None) -> Solution:
    check(problem)
    expanded = expand(problem)
    order = _Order(expanded.problem)

    def at(price: float) -> tuple[Choice, Score]:
        weight = TIE_BREAK_SECONDS_PER_BYTE + price
        tries = (_search(expanded, order, weight, width * more) for more in WIDER)
        options = next((options for options in tries if options is not None), None)
        if options is None:
            raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
        choice = expanded.layout.choice(Choice(options=options))
        return choice, evaluate(problem, choice)

    choice, score = at(0.0)
    try:
        weights = 1.0, TIE_BREAK_SECONDS_PER_BYTE
        bound = lower_bound(expanded.problem, weights, meter=meter) if bounded else 0.0
    except TooWide:
        bound = 0.0  # nothing costs less
    if bytes_limit is not None and score.bytes > bytes_limit:
        smallest = score.bytes
        best: tuple[Choice, Score] | None = None
        low, high = 0.0, math.inf
        price = score.seconds / max(score.bytes, 1.0) / 16
        for _ in range(PRICES):
            candidate = at(price)
            smallest = min(smallest, candidate[1].bytes)
            if candidate[1].bytes <= bytes_limit:
                high = price
                if best is None or candidate[1].objective < best[1].objective:
                    best = candidate
            else:
                low = price
            price = math.sqrt(low * high) if low and high < math.inf else price * 4 if high == math.inf else high / 4
        if best is None:
            raise Infeasible(f"no choice fits in {bytes_limit:.0f} bytes: the smallest needs {smallest:.0f} bytes")
        choice, score = best
    return Solution(choice=choice, score=score, lower_bound=min(bound, score.objective))


class _Order:
    """What each variable, in its turn, changes: `touched[v]` are (tensor, position among its variables)."""

    def __init__(self, problem: Problem) -> None:
        self.rows = [sorted(row.items()) for row in tensor_rows(problem)]
        """Of each tensor: the variables on it in their order, each with the row of every option."""
        self.touched: list[list[tuple[int, int]]] = [[] for _ in problem.variables]
        for number, rows in enumerate(self.rows):
            for position, (variable, _) in enumerate(rows):
                self.touched[variable].append((number, position))


def _least(tensor: Tensor, rows: Sequence[tuple[int, list[Row]]], weight: float) -> list[dict[Row, float]]:
    """For each number of variables that have chosen, by state: the least that the tensor can come to."""
    states: list[list[Row]] = [[(None, 0)]]
    for _, kinds in rows:
        distinct = list(dict.fromkeys(kinds))
        states.append(list(dict.fromkeys(united(before, kind) for before in states[-1] for kind in distinct)))
    costs: dict[Row, float] = {}
    for layout, mask in states[-1]:
        cost = None if layout is None else tensor.costs.get((layout, mask))
        costs[layout, mask] = math.inf if cost is None else cost[0] + weight * cost[1]
    least = [costs]
    for (_, kinds), before in zip(reversed(rows), reversed(states[:-1]), strict=True):
        distinct = list(dict.fromkeys(kinds))
        least.append({state: min(least[-1][united(state, kind)] for kind in distinct) for state in before})
    return least[::-1]


@dataclass(frozen=True, slots=True)
class _Partial:
    """Options chosen so far, as a chain; the states of tensors that are not complete; the cost."""

    cost: float
    option: int
    before: _Partial | None
    states: dict[int, Row]


def _search(expanded: Expanded, order: _Order, weight: float, width: int) -> tuple[int, ...] | None:
    """An option for each variable, or None where all partial choices that were kept lead nowhere."""
    problem = expanded.problem
    least = [_least(tensor, rows, weight) for tensor, rows in zip(problem.tensors, order.rows, strict=True)]
    beam = [_Partial(math.fsum(costs[0][None, 0] for costs in least), -1, None, {})]
    for variable, touched in zip(problem.variables, order.touched, strict=True):
        grown: list[tuple[float, int, int]] = []
        for place, partial in enumerate(beam):
            for option, (seconds, size) in enumerate(zip(variable.seconds, variable.bytes, strict=True)):
                cost = partial.cost + seconds + weight * size
                for number, position in touched:
                    before = partial.states.get(number, (None, 0))
                    after = united(before, order.rows[number][position][1][option])
                    cost += least[number][position + 1][after] - least[number][position][before]
                if cost < math.inf:
                    grown.append((cost, place, option))
        if not grown:
            return None
        grown.sort()
        chosen: list[_Partial] = []
        for cost, place, option in grown[:width]:
            partial = beam[place]
            states = dict(partial.states)
            for number, position in touched:
                rows = order.rows[number]
                after = united(states.get(number, (None, 0)), rows[position][1][option])
                states[number] = after
                if position + 1 == len(rows):
                    del states[number]
            chosen.append(_Partial(cost, option, partial, states))
        beam = chosen
    options: list[int] = []
    last: _Partial | None = beam[0]
    while last is not None and last.before is not None:
        options.append(last.option)
        last = last.before
    return tuple(reversed(options))
