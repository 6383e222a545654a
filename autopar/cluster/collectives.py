"""Prices a collective on the links of one mesh axis: its launch overhead, and the cheapest algorithm that the links
and the library allow.

Each algorithm is a small function of (ranks, bytes, rate, latency). Sources: Thakur, Rabenseifner, Gropp 2005 (rings,
recursive doubling and halving); Sanders, Speck, Träff 2009 (two trees); ATP Eq. 3 and 4; Par4D Eq. 1 to 3 and 10;
MeshSlice 3.2.2 (its printed formula has a misplaced parenthesis: t_launch + (P - 1) (t_sync + shard / bw) is meant).
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

from .links import KINDS, LIKE, Link, Stage, names_of

Algorithm = Callable[[int, int, float, float], tuple[float, float]]
"""(rounds, ranks, bytes per second, latency) -> (fixed seconds, seconds a byte)."""


def algorithms(kind: str, link: Link) -> Iterator[tuple[str, float, float]]:
    """(algorithm, latency, seconds a byte) of every algorithm that does this kind on these links."""
    if kind in ("shift", "rotate"):
        yield "message", *shift(link)
        return
    if kind in ("broadcast", "reduce"):
        yield "ring", *chain(link)
        return
    if kind == "exchange":
        yield "pairwise", *pairwise(link)
        return
    if kind == "all_to_all":
        yield "pairwise", *pairwise(link)
        if len(link.stages) > 1:
            yield "hierarchical", *staged_exchange(link)
        elif not link.stages[0].ring:
            yield "bruck", *bruck(link.ranks, link.stages[0].pair_bytes_per_second, link.latency_seconds)
        return
    if kind == "reduce_scatter":
        # every part goes straight to the rank that adds it up
        yield "pairwise", *pairwise(link)
    rounds = 2 if kind == "all_reduce" else 1
    yield "ring", *ring(rounds, link.ranks, link.bytes_per_second, link.hop_seconds)
    if all(not stage.ring for stage in link.stages):
        if kind == "all_reduce":
            yield "tree", *double_binary_tree(link)
        yield "halving", *hierarchical(recursive_halving, rounds, link)
    if len(link.stages) > 1:
        yield "hierarchical", *hierarchical(ring, rounds, link)


def ring(rounds: int, ranks: int, rate: float, latency: float) -> tuple[float, float]:
    """(latency, seconds a byte) of a ring: `rounds` x (n - 1) steps of one n-th of the bytes.

    All-reduce is two rounds, a reduce-scatter and an all-gather: 2 (n - 1) / n x bytes / rate (Par4D
    Eq. 1 to 3, ATP Eq. 4, MeshSlice 3.2.2 with their launch overheads).
    """
    steps = rounds * (ranks - 1)
    return steps * latency, steps / ranks / rate


def recursive_halving(rounds: int, ranks: int, rate: float, latency: float) -> tuple[float, float]:
    """(latency, seconds a byte) of recursive halving (reduce-scatter) or doubling (all-gather), or both
    (all-reduce): log2 n steps a round, with one partner at a time, and the bytes of a ring.

    Ranks that are no power of two are folded first onto the largest one below, and unfolded at the end
    (Thakur 2005, 4.5): two more steps of all bytes.
    """
    power = 1 << (ranks.bit_length() - 1)
    steps = rounds * (power.bit_length() - 1)
    moving = rounds * (power - 1) / power / rate
    if power != ranks:
        steps, moving = steps + 2, moving + 2 / rate
    return steps * latency, moving


def double_binary_tree(link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of an all-reduce on two binary trees, each with half of the bytes: a
    rank is a leaf in one and inner in the other, so that every rank sends the bytes once up and once
    down; 2 log2 w steps on each level (Sanders, Speck, Träff 2009)."""
    latency = sum(2 * math.ceil(math.log2(stage.width)) * stage.latency_seconds for stage in link.stages)
    return latency, 2 / min(stage.pair_bytes_per_second for stage in link.stages)


def hierarchical(algorithm: Algorithm, rounds: int, link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of a reduce-scatter within each child, the collective between children
    on the parts, and an all-gather within: each level moves (w - 1) / w of what is left of the bytes.

    A rank then has 1 / members of the bytes, and the group's `members` ranks of a child share its rate:
    the two cancel, and a level costs what one rank with all bytes and the group's full rate would. On
    one level this is the algorithm itself.
    """
    latency = moving = 0.0
    for stage in link.stages:
        rate = stage.bytes_per_second if algorithm is ring else stage.pair_bytes_per_second
        steps, part = algorithm(rounds, stage.width, rate, stage.latency_seconds)
        latency, moving = latency + steps, moving + part
    return latency, moving


def pairwise(link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of an all-to-all in n - 1 messages a rank, straight to where they belong:
    all levels carry their part at once, and the slowest decides."""
    inside = 1.0
    slowest = 0.0
    for stage in link.stages:
        # of a rank's bytes, `inside` stays in its child of the level above; of that, 1 / width stays here
        slowest = max(slowest, inside * exchanged(stage))
        inside /= stage.width
    return (link.ranks - 1) * link.latency_seconds, slowest


def staged_exchange(link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of an all-to-all level by level: fewer and larger messages, but all bytes
    travel on every level."""
    latency = sum((stage.width - 1) * stage.latency_seconds for stage in link.stages)
    return latency, sum(exchanged(stage) for stage in link.stages)


def bruck(ranks: int, rate: float, latency: float) -> tuple[float, float]:
    """(latency, seconds a byte) of an all-to-all in log2 n steps with half of the bytes each (Bruck 1997,
    Thakur 2005, 4.3)."""
    steps = math.ceil(math.log2(ranks))
    return steps * latency, steps / 2 / rate


def exchanged(stage: Stage) -> float:
    """Seconds a byte (of one rank's local bytes) of an exchange between the children of a level.

    Out of each child go `members` x (w - 1) / w of the bytes. On a ring a message to the child d places
    away takes d links: sum of min(d, w - d) over d, in both directions; on a line, half of the
    bytes of half of the children cross the middle.
    """
    w = stage.width
    if not stage.ring:
        load = (w - 1) / w
    elif stage.wrapped:
        load = sum(min(d, w - d) for d in range(1, w)) / w
    else:
        load = (w // 2) * (w - w // 2) / w
    return stage.members * load / stage.bytes_per_second


def chain(link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of a broadcast from one rank to the next, or of a reduction the other way, in packets
    so small that all links are busy at once: the bytes pass each link once."""
    return (link.ranks - 1) * link.latency_seconds, 1 / link.bytes_per_second


def shift(link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of one message from each rank to the next on the axis: one of a group's
    ranks in a child sends out of it, the others within."""
    return link.latency_seconds, max(1 / stage.rank_bytes_per_second for stage in link.stages)


def together(fixed: float, moving: float, overlap: float) -> float:
    """Seconds of both, if the part `overlap` of the fixed ones passes while bytes move."""
    return max(fixed, fixed * (1.0 - overlap) + moving)


def collective_seconds(kind: str, size: float, link: Link, share: float = 1.0) -> float:
    """Seconds of one collective over `link.ranks` ranks, by the cheapest algorithm.

    `size` is the larger of a rank's input and output in bytes: the tensor itself for all_reduce, the
    gathered one for all_gather, the one to be scattered for reduce_scatter, the local one for
    all_to_all and for an exchange; a shift or rotation is one message, of its operand. `share` scales what does not
    depend on the size: a tensor that shares a bucket with others pays only its part of it.
    """
    if link.ranks == 1:
        return 0.0
    overlap = link.overlap
    seconds = min(together(fixed * share, moving * size, overlap) for _, fixed, moving in candidates(kind, link))
    return seconds * link.factor(kind, size / share if share else size) if link.factors else seconds


NEVER_SECONDS = 1e3
"""The price of what ranks cannot have from others that come later: more than any step takes."""


@cache
def candidates(kind: str, link: Link) -> tuple[tuple[str, float, float], ...]:
    """(algorithm, fixed seconds, seconds a byte)."""
    if link.in_time:
        return (("in time", 0.0 if kind == "all_reduce" else NEVER_SECONDS, 0.0),)
    if kind not in KINDS and kind not in LIKE:
        raise ValueError(f"no collective is called {kind!r}; known: {', '.join(KINDS)}")
    names = names_of(link.algorithms, LIKE.get(kind, kind))
    possible = [entry for entry in algorithms(kind, link.of_kind(kind)) if entry[0] in names]
    if not possible:
        raise ValueError(f"none of the algorithms {', '.join(names)} does {kind} over {link.ranks} ranks")
    return tuple((name, link.launch_seconds + fixed, moving) for name, fixed, moving in possible)
