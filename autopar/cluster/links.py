"""What a collective along one mesh axis sees: the levels of the cluster that its groups cross, and the library.

Each level comes with the bandwidth that one group gets there while all other groups of the axis run the same collective
(on a mesh they always do). `Cluster.links` (`machine`) computes them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from msgspec import Meta

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "exchange"]

KINDS: tuple[Kind, ...] = get_args(Kind)

LIKE = {"rotate": "shift", "broadcast": "all_gather", "reduce": "all_reduce"}
"""Kinds that are not measured, each with the kind whose links and algorithms it shares."""

Algorithm = Literal["ring", "tree", "halving", "hierarchical", "pairwise", "bruck", "message"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
"""The algorithms of a library that has all."""

BASIC: Mapping[Kind, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring",),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring", "pairwise"),
    "all_to_all": ("pairwise",),
    "shift": ("message",),
    "exchange": ("pairwise",),
}
"""Kind -> the algorithms that do it on any links. A library has one of them for each."""

GLOO: Mapping[Kind, tuple[Algorithm, ...]] = {**BASIC, "reduce_scatter": ("pairwise",)}
"""Kind -> algorithms on gloo. (Its own reduce-scatter is an all-reduce: `runtime.collectives` sends parts.)"""

ON_ANY_LINKS = dict.fromkeys(name for names in BASIC.values() for name in names)

Algorithms = (
    Annotated[
        tuple[Algorithm, ...],
        Meta(
            description=f"a list of {', '.join(ALGORITHMS)}, with at least {', '.join(ON_ANY_LINKS)}",
            extra={"rule": set(ON_ANY_LINKS).issubset},
        ),
    ]
    | Annotated[
        Mapping[Kind, tuple[Algorithm, ...]],
        Meta(
            min_length=len(KINDS),
            description=f"a table of lists by kind ({', '.join(KINDS)}), with one of {', '.join(ON_ANY_LINKS)} that "
            f"does the kind in each",
            extra={"rule": lambda table: all(set(names) & {*BASIC[kind]} for kind, names in table.items())},
        ),
    ]
)
"""Names of algorithms, or names for each kind of collective."""

Factors = tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
"""Of kinds of collectives, by size in bytes, ascending: measured seconds over those of the formula."""


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at`: between two points on logarithmic scales, beyond the ends that of the nearest point. Points
    ascend, and there is at least one."""
    right = bisect_right(points, at, key=lambda point: point[0])
    if right == 0 or right == len(points):
        return points[max(right - 1, 0)][1]
    (small, low), (large, high) = points[right - 1], points[right]
    where = math.log(at / small) / math.log(large / small)
    return low * math.exp(where * math.log(high / low))


def are_of_gloo(algorithms: Algorithms) -> bool:
    """Whether gloo has all algorithms of a library: its ranks are on CPUs."""
    names = algorithms.values() if isinstance(algorithms, Mapping) else (algorithms,)
    return set().union(*names) <= set().union(*GLOO.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKind:
    """What one kind of collective reaches on a level, as measured: a part of its rates, and a latency of its own."""

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
    measured: tuple[MeasuredKind, ...] = ()
    overlap: float = 0.0
    compute_share: float = 0.0
    level: int = 0
    part: float = 1.0

    def of_kind(self, kind: str) -> Stage:
        """The stage with what this kind of collective reaches on it."""
        measured = next((m for m in self.measured if m.kind == LIKE.get(kind, kind)), None)
        if measured is None:
            return self
        return replace(self.widened(measured.efficiency), latency_seconds=measured.latency_seconds)

    def widened(self, factor: float) -> Stage:
        """The same, `factor` times as wide."""
        return replace(
            self,
            bytes_per_second=self.bytes_per_second * factor,
            pair_bytes_per_second=self.pair_bytes_per_second * factor,
            rank_bytes_per_second=self.rank_bytes_per_second * factor,
        )


Entries = tuple[str, ...] | tuple[tuple[str, tuple[str, ...]], ...]
"""`Algorithms` that can be hashed."""


def names_of(algorithms: Entries, kind: str) -> tuple[str, ...]:
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
    algorithms: Entries = ALGORITHMS
    factors: Factors = field(default=(), hash=False)
    in_time: bool = False
    """Whether the ranks are micro-batches, one after the other, which only add up."""

    def factor(self, kind: str, size: float) -> float:
        """Measured seconds of collectives of that size over those of the formula, by `interpolated`."""
        points = dict(self.factors).get(kind, ())
        return interpolated(points, size) if points else 1.0

    def of_kind(self, kind: str) -> Link:
        """The link with what this kind of collective reaches on its stages."""
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
        """The mean latency of the hops of one ring over all ranks. No rank waits for all others after a step: a chunk
        pays for the hops on its way round, most of which stay within the innermost level. (NCCL's own model counts
        steps within and between nodes apart, too: src/graph/tuning.cc.)"""
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

    def widened(self, factor: float) -> Link:
        """The same links, `factor` times as wide."""
        stages = tuple(stage.widened(factor) for stage in self.stages)
        return replace(self, stages=stages)
