"""Random points of a search space, and what plans and programs promise, as tests compare them."""

from collections import Counter
from collections.abc import Mapping

from autopar.testing.plans import Wanted, random_assignment

__all__ = ["Wanted", "count_collectives", "random_assignment"]


def count_collectives(items: list[tuple[str, str, int]]) -> Mapping[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (count, bytes), from `Program.collectives()`."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for kind, axis, size in items:
        counts[kind, axis] += 1
        sizes[kind, axis] += size
    return {key: (counts[key], sizes[key]) for key in sorted(counts)}
