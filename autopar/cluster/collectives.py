"""What a collective costs on the links of one mesh axis.

An axis sees a `Link`: the levels of the cluster that its groups cross, from the outermost in, each with
the bandwidth that one group gets there while all other groups of the axis run the same collective (on
a mesh they always do). Each algorithm is a small function of (ranks, bytes, rate, latency); the price
of a collective is its launch overhead and the cheapest algorithm that its links allow.

Sources: Thakur, Rabenseifner, Gropp 2005 (rings, recursive doubling and halving); Sanders, Speck, Träff
2009 (two trees); ATP Eq. 3 and 4; Par4D Eq. 1 to 3 and 10; MeshSlice 3.2.2 (its printed formula has a
misplaced parenthesis: t_launch + (P - 1) (t_sync + shard / bw) is meant).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

Algorithm = Callable[[int, int, float, float], tuple[float, float]]
"""(rounds, ranks, bytes per second, latency) -> (fixed seconds, seconds a byte)."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "exchange")

LIKE = {"rotate": "shift", "broadcast": "all_gather", "reduce": "all_reduce"}
"""Kinds that are not measured, each with one that finds the same links and library."""

ALGORITHMS = ("ring", "tree", "halving", "hierarchical", "pairwise", "bruck", "message")
"""Of a library that has all."""

GLOO = tuple(
    {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("pairwise",),
        "all_to_all": ("pairwise",),
        "shift": ("message",),
        "exchange": ("pairwise",),
    }.items()
)
"""What runs on gloo for each kind. (Its own reduce-scatter is an all-reduce; `runtime.execute` sends parts instead.)"""

LATENCY_PART = 0.05
"""Of the time that a bucket's bytes travel, at most so much is added by latencies."""

LARGEST_BUCKET_BYTES = 25 * 2**20
"""DDP's buckets."""

SMALLEST_BUCKET_BYTES = 2**18

Names = tuple[str, ...] | tuple[tuple[str, tuple[str, ...]], ...]
"""Names of algorithms, or names for each kind of collective."""


Factors = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""Of kinds of collectives, by size in bytes, ascending: measured seconds over those of the formula."""


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Between two points on logarithmic scales, beyond the ends that of the nearest. Points ascend; there is one."""
    right = bisect_right(points, at, key=lambda point: point[0])
    if right == 0 or right == len(points):
        return points[max(right - 1, 0)][1]
    (small, low), (large, high) = points[right - 1], points[right]
    where = math.log(at / small) / math.log(large / small)
    return low * math.exp(where * math.log(high / low))


def are_of_gloo(names: Names) -> bool:
    """Whether a library has no algorithm that gloo has not: its ranks are on CPUs."""
    everything = {name for item in names for name in ((item,) if isinstance(item, str) else item[1])}
    return everything <= {name for _, algorithms in GLOO for name in algorithms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one kind of collective was measured to reach on a level: a part of its rates, and a latency of its own."""

    kind: str
    efficiency: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One level as one group of an axis sees it: the group has ranks in `width` children of that level,
    `members` in each.

    `bytes_per_second` is what the group can send out of one child to all others at once,
    `pair_bytes_per_second` to one other, and `rank_bytes_per_second` what one of its ranks alone can send to
    one other child. On a `ring`, only neighbours talk; it is `wrapped` if the group goes all the way around.
    """

    name: str
    width: int
    members: int
    bytes_per_second: float
    pair_bytes_per_second: float
    rank_bytes_per_second: float
    latency_seconds: float
    ring: bool = False
    wrapped: bool = False
    measured: tuple[Measured, ...] = ()
    overlap: float = 0.0
    compute_share: float = 0.0
    level: int = 0
    part: float = 1.0

    def of_kind(self, kind: str) -> Stage:
        """As a kind of collective finds it."""
        found = next((m for m in self.measured if m.kind == LIKE.get(kind, kind)), None)
        if found is None:
            return self
        return replace(self.widened(found.efficiency), latency_seconds=found.latency_seconds)

    def widened(self, factor: float) -> Stage:
        """The same, `factor` times as wide."""
        return replace(
            self,
            bytes_per_second=self.bytes_per_second * factor,
            pair_bytes_per_second=self.pair_bytes_per_second * factor,
            rank_bytes_per_second=self.rank_bytes_per_second * factor,
        )


def names_of(algorithms: Names, kind: str) -> tuple[str, ...]:
    """The algorithms that a library has for one kind."""
    for entry in algorithms:
        if isinstance(entry, tuple) and entry[0] == kind:
            return entry[1]
    return tuple(entry for entry in algorithms if isinstance(entry, str))


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective along one mesh axis sees: the levels that it crosses, from the outermost in, and
    the algorithms that the communication library has."""

    ranks: int
    stages: tuple[Stage, ...]
    launch_seconds: float = 0.0
    algorithms: Names = ALGORITHMS
    factors: Factors = field(default=(), hash=False)

    def factor(self, kind: str, size: float) -> float:
        """What was measured of collectives of that size, over what the formula says: between two sizes in between on
        logarithmic scales, beyond the ends that of the nearest."""
        points = next((points for known, points in self.factors if known == kind), ())
        return interpolated(points, size) if points else 1.0

    def of_kind(self, kind: str) -> Link:
        """As a kind of collective finds it."""
        return replace(self, stages=tuple(stage.of_kind(kind) for stage in self.stages))

    @property
    def bytes_per_second(self) -> float:
        """The rate of one ring over all ranks: that of the slowest level that it crosses (ATP Eq. 3)."""
        return min((stage.bytes_per_second for stage in self.stages), default=math.inf)

    @property
    def latency_seconds(self) -> float:
        return max((stage.latency_seconds for stage in self.stages), default=0.0)

    @property
    def hop_seconds(self) -> float:
        """The mean latency of the hops of one ring over all ranks. Nobody waits for all others after a step: what a
        chunk meets on its way round counts, and most of its hops stay within the innermost level. (NCCL's own model
        counts steps within and between nodes apart, too: src/graph/tuning.cc.)"""
        seconds, before, behind = 0.0, 0, 1
        for stage in self.stages:
            behind *= stage.width
            seconds += (behind - before) * stage.latency_seconds
            before = behind
        return seconds / behind

    @property
    def overlap(self) -> float:
        """The part of the latency that passes while bytes travel: that of the slowest level."""
        return 0.0 if self.slowest is None else self.slowest.overlap

    @property
    def compute_share(self) -> float:
        """The part of what ranks compute with that a collective takes: that of the slowest level."""
        return 0.0 if self.slowest is None else self.slowest.compute_share

    @property
    def slowest(self) -> Stage | None:
        return min(self.stages, key=lambda stage: stage.bytes_per_second, default=None)

    @property
    def bucket_bytes(self) -> int:
        """What is worth waiting for: all-reduces of so many bytes spend a small part of their time on latencies.
        Buckets that hold more hide no more of a latency and start later."""
        if self.ranks == 1:
            return LARGEST_BUCKET_BYTES
        _, fixed, moving = min(_candidates("all_reduce", self), key=lambda candidate: (candidate[2], candidate[1]))
        size = fixed / moving / LATENCY_PART if moving else math.inf
        return int(max(SMALLEST_BUCKET_BYTES, min(LARGEST_BUCKET_BYTES, size)))

    def widened(self, factor: float) -> Link:
        """The same links, `factor` times as wide."""
        stages = tuple(stage.widened(factor) for stage in self.stages)
        return replace(self, stages=stages)


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


@cache
def _candidates(kind: str, link: Link) -> tuple[tuple[str, float, float], ...]:
    """(algorithm, fixed seconds, seconds a byte)."""
    if kind not in KINDS and kind not in LIKE:
        raise ValueError(f"no collective is called {kind!r}; known: {', '.join(KINDS)}")
    names = names_of(link.algorithms, LIKE.get(kind, kind))
    found = [entry for entry in _algorithms(kind, link.of_kind(kind)) if entry[0] in names]
    if not found:
        raise ValueError(f"none of the algorithms {', '.join(names)} does {kind} over {link.ranks} ranks")
    return tuple((name, link.launch_seconds + fixed, moving) for name, fixed, moving in found)


def _algorithms(kind: str, link: Link) -> Iterator[tuple[str, float, float]]:
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


@cache
def loads(kind: str, algorithm: str, link: Link) -> tuple[tuple[int, float], ...]:
    """(level of the cluster, part of what leaves a child there that all groups of the axis use while their bytes
    move), of one algorithm. On levels that are not its slowest it uses less than the axis could."""
    link = link.of_kind(kind)
    moving = next(seconds for name, _, seconds in _algorithms(kind, link) if name == algorithm)
    sent = _sent(kind, algorithm, link)
    return tuple(
        (stage.level, min(1.0, size / moving / stage.bytes_per_second) * stage.part)
        for stage, size in zip(link.stages, sent, strict=True)
        if size
    )


def _sent(kind: str, algorithm: str, link: Link) -> list[float]:
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
    exchanged = [_exchanged(stage) * stage.bytes_per_second for stage in link.stages]
    if algorithm == "hierarchical":
        return exchanged if kind == "all_to_all" else [ring(rounds, s.width, 1.0, 0.0)[1] for s in link.stages]
    inside = [1.0]
    for stage in link.stages:
        inside.append(inside[-1] / stage.width)
    return [part * size for part, size in zip(inside, exchanged, strict=False)]


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
    the two cancel, and a level costs what one rank with all bytes and the group's whole rate would. On
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
        slowest = max(slowest, inside * _exchanged(stage))
        inside /= stage.width
    return (link.ranks - 1) * link.latency_seconds, slowest


def staged_exchange(link: Link) -> tuple[float, float]:
    """(latency, seconds a byte) of an all-to-all level by level: fewer and larger messages, but all bytes
    travel on every level."""
    latency = sum((stage.width - 1) * stage.latency_seconds for stage in link.stages)
    return latency, sum(_exchanged(stage) for stage in link.stages)


def bruck(ranks: int, rate: float, latency: float) -> tuple[float, float]:
    """(latency, seconds a byte) of an all-to-all in log2 n steps with half of the bytes each (Bruck 1997,
    Thakur 2005, 4.3)."""
    steps = math.ceil(math.log2(ranks))
    return steps * latency, steps / 2 / rate


def _exchanged(stage: Stage) -> float:
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
