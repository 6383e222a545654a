"""The cheapest choice within a limit on bytes, from solves at prices of memory.

At a price, a choice is solved like one without a limit. Two choices are had so, at the one price that the limit has:
one within the limit, and one over it (`Edge`). No choice within the limit is cheaper than the line between them.
Identical layers flip together at that price, so what lies between is built of both: the first copies of a repeat are
those of one, the others those of the other (CFP 4.4, Fig. 11). What is then left of the limit goes to single
exchanges, those first that save most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Repeat,
    Score,
    Scored,
    evaluate,
    state_of,
)

SolveAt = Callable[[float], Choice]
"""The best choice at so many seconds a byte, beside those that break ties; at infinitely many, that of fewest bytes."""

Borders = tuple[tuple[int, ...], tuple[int, ...]]
"""The options of the left and the right border of a copy."""

Between = Callable[[float, Repeat, Borders], Choice | None]
"""The best copy of a repeat between two borders, at a price; None if there is none."""

PRICES = 25
"""Prices that are tried at most: each cuts off a corner, and few have more than ten."""

NEAR = 3e-4
"""A choice that is no further above the bound is not improved by exchanges."""

SAVES = 1e-5
"""The part of all seconds that an exchange saves at least: each makes one more copy differ from the others."""

EXCHANGES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Two choices that cost the same at the `price` of a limit, one `over` it and one `under` it (the same one where
    the cheapest of all is under it), and what no choice within it undercuts."""

    over: Scored
    under: Scored
    price: float
    lower_bound: float


def edge(problem: Problem, bytes_limit: float, solve_at: SolveAt) -> Edge:
    """The edge at a limit on bytes (Lagrange's dual): the line through two choices is lowered as long as a choice lies
    below it. Raises `Infeasible` where not even the smallest choice fits."""
    over = _scored(problem, solve_at(0.0))
    if over[0].bytes <= bytes_limit:
        return Edge(over=over, under=over, price=0.0, lower_bound=over[0].objective)
    under = _scored(problem, solve_at(math.inf))
    if under[0].bytes > bytes_limit:
        needed = under[0].bytes
        raise Infeasible(f"no choice fits in {bytes_limit:.0f} bytes: the smallest needs {needed:.0f} bytes")
    price, bound = 0.0, over[0].objective
    for _ in range(PRICES):
        slope = (under[0].objective - over[0].objective) / (over[0].bytes - under[0].bytes)
        price = max(slope, 1e-30)
        score, choice = _scored(problem, solve_at(price))
        value = score.objective + price * score.bytes
        bound = max(bound, value - price * bytes_limit)
        if value >= (over[0].objective + price * over[0].bytes) * (1 - 1e-9):
            break
        if score.bytes <= bytes_limit:
            under = score, choice
        else:
            over = score, choice
    return Edge(over=over, under=under, price=price, lower_bound=bound)


def within(
    problem: Problem, bytes_limit: float, solve_at: SolveAt, between: Between | None = None
) -> tuple[Choice, Edge]:
    """The best choice found that needs at most so many bytes, and the edge there."""
    at = edge(problem, bytes_limit, solve_at)
    if at.over is at.under:
        return at.over[1], at
    steps = [at.under, at.over, *_steps(problem, at, between)]
    best = min((one for one in steps if one[0].bytes <= bytes_limit), key=_objective)
    beyond = min((one for one in steps if one[0].bytes > bytes_limit), key=lambda one: one[0].bytes)
    if not any(repeat.body.repeats for repeat in problem.repeats):
        exchanges = _Exchanges(problem, bytes_limit, at.lower_bound * (1 + NEAR))
        for start in (best, beyond, at.over):
            found = exchanges.improved(start)
            if found[0].bytes <= bytes_limit:
                best = min(best, found, key=_objective)
    return best[1], at


def _objective(one: Scored) -> float:
    return one[0].objective


def _scored(problem: Problem, choice: Choice) -> Scored:
    return evaluate(problem, choice), choice


def _steps(problem: Problem, at: Edge, between: Between | None) -> Iterator[Scored]:
    """The first copies as in the choice under the limit and the others as in that over it, with what is in no repeat as
    in either. Where their borders differ, one copy leads `between` them."""
    leading: dict[tuple[str, Borders], Choice | None] = {}
    scores: dict[int, Scored] = {}  # the copies stay, and with them their identities
    for rest in (at.over[1], at.under[1]):
        of_rest = evaluate(replace(problem, repeats=()), Choice(options=rest.options))
        for first in range(sum(repeat.count for repeat in problem.repeats) + 1):
            seconds, size, left = of_rest.seconds, of_rest.bytes, first
            repeats: list[tuple[Choice, ...]] = []
            for repeat, over, under in zip(problem.repeats, at.over[1].repeats, at.under[1].repeats, strict=True):
                count = min(left, repeat.count)
                left -= count
                copies = _stepped(repeat, rest, (*under[:count], *over[count:]), (over, under), at, between, leading)
                if copies is None:
                    break
                for copy in copies:
                    if id(copy) not in scores:
                        scores[id(copy)] = evaluate(repeat.body, copy), copy
                    score = scores[id(copy)][0]
                    seconds, size = seconds + score.seconds, size + score.bytes
                repeats.append(copies)
            else:
                yield Score(seconds=seconds, bytes=size), replace(rest, repeats=tuple(repeats))


def _stepped(
    repeat: Repeat,
    rest: Choice,
    wanted: Sequence[Choice],
    others: Sequence[Sequence[Choice]],
    at: Edge,
    between: Between | None,
    leading: dict[tuple[str, Borders], Choice | None],
) -> tuple[Choice, ...] | None:
    """Copies that meet: those wanted, but where a copy does not lead from the border before it to the next one."""
    borders = [
        tuple(rest.options[v] for v in repeat.left),
        *(tuple(copy.options[v] for v in repeat.body_right) for copy in wanted[:-1]),
        tuple(rest.options[v] for v in repeat.right),
    ]
    copies = []
    for k, (copy, here) in enumerate(zip(wanted, pairwise(borders), strict=True)):
        fitting = next((c for c in (copy, *(of[k] for of in others)) if _borders(repeat, c) == here), None)
        if fitting is None and between is not None:
            if (repeat.name, here) not in leading:
                leading[repeat.name, here] = between(at.price, repeat, here)
            fitting = leading[repeat.name, here]
        if fitting is None:
            return None
        copies.append(fitting)
    return tuple(copies)


def _borders(repeat: Repeat, copy: Choice) -> Borders:
    return tuple(copy.options[v] for v in repeat.body_left), tuple(copy.options[v] for v in repeat.body_right)


class _Exchanges:
    """Changes of one variable of a choice, in one copy or in what is in no repeat, beside borders that stay."""

    def __init__(self, problem: Problem, bytes_limit: float, enough: float) -> None:
        """A choice that costs `enough` or less is not improved."""
        self.bytes_limit, self.enough = bytes_limit, enough
        ends = [v for repeat in problem.repeats for v in (*repeat.left, *repeat.right)]
        bodies = [_Region(r.body, (*r.body_left, *r.body_right)) for r in problem.repeats]
        self.regions = [_Region(replace(problem, repeats=()), ends), *bodies]

    def improved(self, start: Scored) -> Scored:
        """After exchanges that make the most of what is left of the limit; one over it loses least for what it saves
        until it fits, if that leads there."""
        seconds, size = start[0].seconds, start[0].bytes
        copies = [[start[1].options], *([copy.options for copy in of] for of in start[1].repeats)]
        for _ in range(EXCHANGES):
            over = size - self.bytes_limit
            if over <= 0 and seconds + TIE_BREAK_SECONDS_PER_BYTE * size <= self.enough:
                break
            found = self._best(copies, over, seconds)
            if found is None:
                break
            (more_seconds, more_bytes, variable, option), region, copy = found
            seconds, size = seconds + more_seconds, size + more_bytes
            options = copies[region][copy]
            copies[region][copy] = (*options[:variable], option, *options[variable + 1 :])
        repeats = tuple(
            tuple(old if old.options == new else Choice(options=new) for old, new in zip(of, options, strict=True))
            for of, options in zip(start[1].repeats, copies[1:], strict=True)
        )
        return Score(seconds=seconds, bytes=size), Choice(options=copies[0][0], repeats=repeats)

    def _best(
        self, copies: Sequence[Sequence[tuple[int, ...]]], over: float, seconds: float
    ) -> tuple[tuple[float, float, int, int], int, int] | None:
        best, least = None, math.inf
        for number, (region, of_region) in enumerate(zip(self.regions, copies, strict=True)):
            for copy in {options: k for k, options in reversed(list(enumerate(of_region)))}.values():
                for change in region.changes(of_region[copy]):
                    more_seconds, more_bytes = change[:2]
                    if over > 0:
                        worth = max(more_seconds, 0.0) / min(-more_bytes, over) if more_bytes < 0 else math.inf
                    elif more_seconds >= -SAVES * seconds or more_bytes > -over:
                        continue
                    else:
                        worth = more_seconds
                    if worth < least:
                        best, least = (change, number, copy), worth
        return best


class _Region:
    """The variables of a body, or of what is in no repeat, and what changes of one of them cost."""

    def __init__(self, problem: Problem, fixed: Sequence[int]) -> None:
        self.problem = problem
        self.free = [v for v, x in enumerate(problem.variables) if len(x.options) > 1 and v not in fixed]
        self.tensors = [[t for t in problem.tensors if v == t.producer or v in t.consumers] for v in self.free]
        self._changes: dict[tuple[int, ...], list[tuple[float, float, int, int]]] = {}

    def changes(self, options: tuple[int, ...]) -> list[tuple[float, float, int, int]]:
        """(more seconds, more bytes, variable, its option) of each change."""
        if options not in self._changes:
            found = []
            now = list(options)
            for number, v in enumerate(self.free):
                before = self._cost(number, now)
                assert before is not None
                for option in range(len(self.problem.variables[v].options)):
                    now[v] = option
                    if option != options[v] and (after := self._cost(number, now)) is not None:
                        found.append((after[0] - before[0], after[1] - before[1], v, option))
                now[v] = options[v]
            self._changes[options] = found
        return self._changes[options]

    def _cost(self, number: int, options: Sequence[int]) -> tuple[float, float] | None:
        v = self.free[number]
        variable = self.problem.variables[v]
        seconds, size = variable.seconds[options[v]], variable.bytes[options[v]]
        for tensor in self.tensors[number]:
            cost = tensor.costs.get(state_of(tensor, options))
            if cost is None:
                return None
            seconds, size = seconds + cost[0], size + cost[1]
        return seconds, size
