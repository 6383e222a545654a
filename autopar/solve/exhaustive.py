"""Exhaustive search: every choice is scored. The oracle for the other solvers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .problem import Choice, Infeasible, Problem, Repeat, Score, Scored, Solution, check, evaluate, state_of

MAX_COMBINATIONS = 2_000_000


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
    for score, choice in _all(problem):
        smallest = min(smallest, score.bytes)
        if bytes_limit is not None and score.bytes > bytes_limit:
            continue
        if best is None or score.objective < best[0].objective:
            best = score, choice
    if best is None:
        if math.isinf(smallest):
            raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
        raise Infeasible(f"no choice fits in {bytes_limit:.0f} bytes: the smallest needs {smallest:.0f} bytes")
    score = evaluate(problem, best[1])
    assert math.isclose(score.objective, best[0].objective, rel_tol=1e-9, abs_tol=1e-18), (score, best)
    return Solution(choice=best[1], score=score, lower_bound=score.objective)


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
    for options, score in _options(problem):
        found: list[tuple[Score, tuple[Chain, ...]]] = [(score, ())]
        for repeat, of_repeat in zip(problem.repeats, chains, strict=True):
            key = (tuple(options[v] for v in repeat.left), tuple(options[v] for v in repeat.right))
            copies = of_repeat.get(key, [])
            found = [(before + more, (*repeats, chain)) for before, repeats in found for more, chain in copies]
        for total, repeats in found:
            yield total, Choice(options=options, repeats=repeats)


def _options(problem: Problem) -> Iterator[tuple[tuple[int, ...], Score]]:
    """Every joint option without blocked tensors, and what it costs. Repeats are left out."""
    count = len(problem.variables)
    ready: list[list[int]] = [[] for _ in range(count + 1)]
    for index, tensor in enumerate(problem.tensors):
        ready[max(tensor.producer, *tensor.consumers, tensor.producer)].append(index)
    options = [0] * count

    def walk(position: int, seconds: float, size: float) -> Iterator[tuple[tuple[int, ...], Score]]:
        if position == count:
            yield tuple(options), Score(seconds=seconds, bytes=size)
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

Chain = tuple[Choice, ...]
"""Copies in a row."""


def _chains(repeat: Repeat) -> dict[tuple[Border, Border], list[tuple[Score, Chain]]]:
    """For each pair of border options, the undominated chains of `count` copies."""
    single: dict[tuple[Border, Border], list[tuple[Score, Chain]]] = {}
    for score, copy in _all(repeat.body):
        key = (tuple(copy.options[v] for v in repeat.body_left), tuple(copy.options[v] for v in repeat.body_right))
        single.setdefault(key, []).append((score, (copy,)))
    single = {key: _undominated(chains) for key, chains in single.items()}
    chains = single
    for _ in range(repeat.count - 1):
        longer: dict[tuple[Border, Border], list[tuple[Score, Chain]]] = {}
        for (left, middle), heads in chains.items():
            for (start, right), tails in single.items():
                if start == middle:
                    longer.setdefault((left, right), []).extend(
                        (score + more, (*head, *tail)) for score, head in heads for more, tail in tails
                    )
        chains = {key: _undominated(candidates) for key, candidates in longer.items()}
        if sum(map(len, chains.values())) > MAX_COMBINATIONS:
            raise ValueError(f"{repeat.name}: more than {MAX_COMBINATIONS} chains to try: use dp or ilp")
    return chains


def _undominated(candidates: list[tuple[Score, Chain]]) -> list[tuple[Score, Chain]]:
    kept: list[tuple[Score, Chain]] = []
    for score, chain in sorted(candidates, key=lambda one: (one[0].seconds, one[0].bytes)):
        if not kept or score.bytes < kept[-1][0].bytes:
            kept.append((score, chain))
    return kept
