"""The numbers of checkpoints, in a record and in copies of one layer."""

import itertools
from collections.abc import Iterator, Sequence

Region = tuple[int, ...]
"""The numbers of the checkpoints around a call or a node, the outermost first."""


def entered(regions: Sequence[Region]) -> Iterator[tuple[bool, ...]]:
    """Of each checkpoint around a call, whether the call is its first: a period holds checkpoints from end to end."""
    before: Region = ()
    for around in regions:
        yield tuple(number not in before for number in around)
        before = around


def are_numbered_on(regions: Sequence[Region], middle: int, periods: int) -> bool:
    """Whether the checkpoints around one node of each copy are numbered on from copy to copy by as many as lie in a
    period, or lie around all copies. Between the middle copy and the next one there are so many periods."""
    by = further(regions[middle], regions[middle + 1], periods)
    pairs = enumerate(itertools.pairwise(regions))
    return all(moved(one, by, periods if k == middle else 1) == other for k, (one, other) in pairs)


def further(region: Region, other: Region, periods: int) -> Region:
    """By how much the numbers of checkpoints grow in a period, if these are so many apart."""
    return tuple((b - a) // periods for a, b in zip(region, other, strict=False))


def moved(region: Region, by: Region, periods: int) -> Region:
    return tuple(number + periods * each for number, each in zip(region, by, strict=False))
