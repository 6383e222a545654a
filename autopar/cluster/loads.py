"""What a collective takes by each algorithm, and what it uses of the links meanwhile."""

import math
from dataclasses import dataclass
from functools import cache

from .collectives import algorithms, candidates, exchanged, recursive_halving, ring, together
from .links import Link


def sent_bytes(kind: str, algorithm: str, link: Link) -> list[float]:
    """Of each byte, how many a group sends out of one child of each stage."""
    rounds = 2 if kind == "all_reduce" else 1
    if algorithm == "message" or kind in ("broadcast", "reduce"):
        return [1.0] * len(link.stages)
    if algorithm == "tree":
        return [2.0] * len(link.stages)
    if algorithm == "ring":
        return [rounds * (link.ranks - 1) / link.ranks] * len(link.stages)
    if algorithm == "bruck":
        return [math.ceil(math.log2(link.ranks)) / 2]
    if algorithm == "halving":
        return [recursive_halving(rounds, stage.width, 1.0, 0.0)[1] for stage in link.stages]
    between = [exchanged(stage) * stage.bytes_per_second for stage in link.stages]
    if algorithm == "hierarchical":
        return between if kind == "all_to_all" else [ring(rounds, s.width, 1.0, 0.0)[1] for s in link.stages]
    inside = [1.0]
    for stage in link.stages:
        inside.append(inside[-1] / stage.width)
    return [part * size for part, size in zip(inside, between, strict=False)]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one collective: `fixed` (launch and synchronisation) and `moving` (bytes on links). The part `overlap`
    of the fixed seconds passes while bytes move."""

    algorithm: str
    fixed: float
    moving: float
    overlap: float = 0.0

    def seconds(self, share: float = 1.0) -> float:
        return together(self.fixed * share, self.moving, self.overlap)


def price(kind: str, size: float, link: Link) -> Price:
    """The cheapest algorithm and its seconds."""
    if link.ranks == 1:
        return Price("none", 0.0, 0.0)
    return min(prices(kind, size, link).values(), key=Price.seconds)


def prices(kind: str, size: float, link: Link) -> dict[str, Price]:
    """Every algorithm that these links allow, by name."""
    factor, overlap = link.factor(kind, size), link.overlap
    return {
        name: Price(name, fixed * factor, moving * size * factor, overlap)
        for name, fixed, moving in candidates(kind, link)
    }


@cache
def loads(kind: str, algorithm: str, link: Link) -> tuple[tuple[int, float], ...]:
    """(level of the cluster, part of a child's outgoing rate that all groups of the axis use while their bytes move),
    of one algorithm. On all but its slowest level it uses less than the axis could."""
    link = link.of_kind(kind)
    moving = next(seconds for name, _, seconds in algorithms(kind, link) if name == algorithm)
    sent = sent_bytes(kind, algorithm, link)
    return tuple(
        (stage.level, min(1.0, size / moving / stage.bytes_per_second) * stage.part)
        for stage, size in zip(link.stages, sent, strict=True)
        if size
    )
