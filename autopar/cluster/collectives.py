"""What a collective costs on the links of one mesh axis: its launch overhead, and the cheapest algorithm that its
links and its library allow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from .algorithms import algorithms, sent_bytes
from .links import KINDS, LIKE, Link, names_of

LATENCY_PART = 0.05
"""Of the time that a bucket's bytes travel, at most so much is added by latencies."""

LARGEST_BUCKET_BYTES = 25 * 2**20
"""DDP's buckets."""

SMALLEST_BUCKET_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one collective: `fixed` (launch and synchronisation) and `moving` (bytes on links), of which
    the part `overlap` of the fixed ones passes at the same time."""

    algorithm: str
    fixed: float
    moving: float
    overlap: float = 0.0

    def seconds(self, share: float = 1.0) -> float:
        return together(self.fixed * share, self.moving, self.overlap)


def together(fixed: float, moving: float, overlap: float) -> float:
    """Seconds of both, if `overlap` of what is fixed passes while bytes move."""
    return max(fixed, fixed * (1.0 - overlap) + moving)


def collective_seconds(kind: str, size: float, link: Link, share: float = 1.0) -> float:
    """Seconds of one collective over `link.ranks` ranks, by the cheapest algorithm.

    `size` is the larger of a rank's input and output in bytes: the whole tensor for all_reduce, the
    gathered one for all_gather, the one to be scattered for reduce_scatter, the local one for
    all_to_all and for an exchange; a shift or rotation is one message, of its operand. `share` scales what does not
    depend on the size: a tensor that travels in a bucket with others pays only its part of it.
    """
    if link.ranks == 1:
        return 0.0
    overlap = link.overlap
    seconds = min(together(fixed * share, moving * size, overlap) for _, fixed, moving in _candidates(kind, link))
    return seconds * link.factor(kind, size / share if share else size) if link.factors else seconds


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
        for name, fixed, moving in _candidates(kind, link)
    }


def bucket_bytes(link: Link) -> int:
    """What is worth waiting for: all-reduces of so many bytes spend a small part of their time on latencies.
    Buckets that hold more hide no more of a latency and start later."""
    if link.ranks == 1:
        return LARGEST_BUCKET_BYTES
    _, fixed, moving = min(_candidates("all_reduce", link), key=lambda candidate: (candidate[2], candidate[1]))
    size = fixed / moving / LATENCY_PART if moving else math.inf
    return int(max(SMALLEST_BUCKET_BYTES, min(LARGEST_BUCKET_BYTES, size)))


@cache
def _candidates(kind: str, link: Link) -> tuple[tuple[str, float, float], ...]:
    """(algorithm, fixed seconds, seconds a byte)."""
    if kind not in KINDS and kind not in LIKE:
        raise ValueError(f"no collective is called {kind!r}; known: {', '.join(KINDS)}")
    names = names_of(link.algorithms, LIKE.get(kind, kind))
    found = [entry for entry in algorithms(kind, link.of_kind(kind)) if entry[0] in names]
    if not found:
        raise ValueError(f"none of the algorithms {', '.join(names)} does {kind} over {link.ranks} ranks")
    return tuple((name, link.launch_seconds + fixed, moving) for name, fixed, moving in found)


@cache
def loads(kind: str, algorithm: str, link: Link) -> tuple[tuple[int, float], ...]:
    """(level of the cluster, part of what leaves a child there that all groups of the axis use while their bytes
    move), of one algorithm. On levels that are not its slowest it uses less than the axis could."""
    link = link.of_kind(kind)
    moving = next(seconds for name, _, seconds in algorithms(kind, link) if name == algorithm)
    sent = sent_bytes(kind, algorithm, link)
    return tuple(
        (stage.level, min(1.0, size / moving / stage.bytes_per_second) * stage.part)
        for stage, size in zip(link.stages, sent, strict=True)
        if size
    )
