"""Collectives of a program, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def count_collectives(items: list[tuple[str, str, int]]) -> Mapping[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (count, bytes), from `Program.collectives()`."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for kind, axis, size in items:
        counts[kind, axis] += 1
        sizes[kind, axis] += size
    return {key: (counts[key], sizes[key]) for key in sorted(counts)}
