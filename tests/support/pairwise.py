"""Fewer cases than a full product that still hold every pair of values of two parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*values: Sequence[Any], where: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Cases of the product of `values`, those for which `where` holds, such that every pair of two parameters' values
    that stands in one of these stands in one of the chosen. Greedy, and the same each time."""
    places = [case for case in product(*(range(len(v)) for v in values)) if where(*_at(values, case))]
    pairs = {case: set(combinations(enumerate(case), 2)) for case in places}
    open_pairs = set().union(*pairs.values())
    chosen = []
    while open_pairs:
        best = max(places, key=lambda case: len(pairs[case] & open_pairs))
        chosen.append(best)
        open_pairs -= pairs[best]
    return [_at(values, case) for case in sorted(chosen)]


def _at(values: Sequence[Sequence[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(of[index] for of, index in zip(values, case, strict=True))
