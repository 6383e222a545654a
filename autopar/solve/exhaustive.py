"""Exhaustive search: every choice is scored. The oracle for the other solvers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Repeat,
    Solution,
    check,
    evaluate,
    state_of,
)

MAX_COMBINATIONS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A choice for a problem, or for a part of it, and what it costs."""

    seconds: float
    bytes: float
    choices: tuple[Choice, ...]

    @property
    def objective(self) -> float:
        return self.seconds + TIE_BREAK_SECONDS_PER_BYTE * self.bytes

    def __add__(self, other: Scored) -> Scored:
        return Scored(
            seconds=self.seconds + other.seconds,
            bytes=self.bytes + other.bytes,
            choices=self.choices + other.choices,
        )


def solve_exhaustive(problem: Problem, *, bytes_limit: float | None = None) -> Solution:
    """Minimise seconds + tie-break * bytes subject to bytes <= bytes_limit by trying everything.

    Variables: one option index each. Every joint option of a problem is walked; the copies of a repeat are
    walked body by body, and of the chains between the same border states those are kept that no other
    matches in both seconds and bytes, which loses nothing. The result is exact.

    Raises `Infeasible` where no choice is feasible, ValueError above `MAX_COMBINATIONS` joint options.
    """
    check(problem)
    _check_size(problem)
    best: Scored | None = None
    smallest = math.inf
    for scored in _all(problem):
        smallest = min(smallest, scored.bytes)
        if bytes_limit is not None and scored.bytes > bytes_limit:
            continue
        if best is None or scored.objective < best.objective:
            best = scored
    if best is None:
        if math.isinf(smallest):
            raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
        raise Infeasible(f"no choice fits in {bytes_limit:.0f} bytes: the smallest needs {smallest:.0f} bytes")
    choice = best.choices[0]
    score = evaluate(problem, choice)
    assert math.isclose(score.objective, best.objective, rel_tol=1e-9, abs_tol=1e-18), (score, best)
    return Solution(choice=choice, score=score, lower_bound=score.objective)


def _check_size(problem: Problem) -> None:
    combinations = math.prod(len(variable.options) for variable in problem.variables)
    if combinations > MAX_COMBINATIONS:
        raise ValueError(
            f"{combinations} combinations of options are too many to try, at most {MAX_COMBINATIONS}: use dp or ilp"
        )
    for repeat in problem.repeats:
        _check_size(repeat.body)


def _all(problem: Problem) -> Iterator[Scored]:
    """Every feasible choice, but of the chains of a repeat only the undominated ones."""
    chains = [_chains(repeat) for repeat in problem.repeats]
    for options, seconds, size in _options(problem):
        partial = [Scored(seconds=seconds, bytes=size, choices=())]
        parts: list[tuple[tuple[Choice, ...], ...]] = [()]
        for repeat, chain in zip(problem.repeats, chains, strict=True):
            key = (tuple(options[v] for v in repeat.left), tuple(options[v] for v in repeat.right))
            tails = chain.get(key, [])
            parts = [(*part, other.choices) for part in parts for other in tails]
            partial = [one + other for one in partial for other in tails]
        for scored, repeats in zip(partial, parts, strict=True):
            choice = Choice(options=options, repeats=repeats)
            yield Scored(seconds=scored.seconds, bytes=scored.bytes, choices=(choice,))


def _options(problem: Problem) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Every joint option without blocked tensors: options, seconds, bytes. Repeats are left out."""
    count = len(problem.variables)
    ready: list[list[int]] = [[] for _ in range(count + 1)]
    for index, tensor in enumerate(problem.tensors):
        ready[max(tensor.producer, *tensor.consumers, tensor.producer)].append(index)
    options = [0] * count

    def walk(position: int, seconds: float, size: float) -> Iterator[tuple[tuple[int, ...], float, float]]:
        if position == count:
            yield tuple(options), seconds, size
            return
        variable = problem.variables[position]
        for option in range(len(variable.options)):
            options[position] = option
            now, more = seconds + variable.seconds[option], size + variable.bytes[option]
            for index in ready[position]:
                cost = problem.tensors[index].costs.get(state_of(problem.tensors[index], options))
                if cost is None:
                    break
                now, more = now + cost[0], more + cost[1]
            else:
                yield from walk(position + 1, now, more)

    yield from walk(0, 0.0, 0.0)


Border = tuple[int, ...]


def _chains(repeat: Repeat) -> dict[tuple[Border, Border], list[Scored]]:
    """For each pair of border options, the undominated chains of `count` copies."""
    single: dict[tuple[Border, Border], list[Scored]] = {}
    for scored in _all(repeat.body):
        options = scored.choices[0].options
        key = (tuple(options[v] for v in repeat.body_left), tuple(options[v] for v in repeat.body_right))
        single.setdefault(key, []).append(scored)
    single = {key: _undominated(scored) for key, scored in single.items()}
    chains = single
    for _ in range(repeat.count - 1):
        longer: dict[tuple[Border, Border], list[Scored]] = {}
        for (left, middle), heads in chains.items():
            for (start, right), tails in single.items():
                if start == middle:
                    longer.setdefault((left, right), []).extend(head + tail for head in heads for tail in tails)
        chains = {key: _undominated(scored) for key, scored in longer.items()}
        if sum(map(len, chains.values())) > MAX_COMBINATIONS:
            raise ValueError(f"{repeat.name}: more than {MAX_COMBINATIONS} chains to try: use dp or ilp")
    return chains


def _undominated(candidates: list[Scored]) -> list[Scored]:
    kept: list[Scored] = []
    for scored in sorted(candidates, key=lambda s: (s.seconds, s.bytes)):
        if not kept or scored.bytes < kept[-1].bytes:
            kept.append(scored)
    return kept
