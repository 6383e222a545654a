"""What a mesh runs on: a device, and the links between devices.

A cluster is a device and levels of links, from the outermost in ("between nodes", "within a node"). A
mesh of named axes lies on it in row-major order, the last axis innermost (or in an order that the
caller gives). An axis may span several levels or share one with others; `Cluster.links` says what its
groups get of each level. `library` holds the clusters and reads files, `collectives` prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from msgspec import Meta

from autopar.files.kinds import NEEDED_IN_FILES, NOT_IN_FILES, Amount, Name, Part, Rate, Seconds, Share, Size

from .collectives import collective_seconds
from .links import ALGORITHMS, KINDS, Algorithms, Factors, Kind, Link, MeasuredKind, Stage, interpolated

if TYPE_CHECKING:  # a list of clusters does not wait for PyTorch
    import torch

    from autopar.ir.graph import TensorMeta

X = TypeVar("X")

ByKind = Annotated[
    Mapping[Kind, X], Meta(min_length=len(KINDS), description=f"a table of them by kind ({', '.join(KINDS)})")
]


def _lengthens(points: Sequence[tuple[float, float]]) -> bool:
    """Whether (size, part of a rate) ascend, and more nowhere takes less time."""
    return all(a[0] < b[0] and b[1] / a[1] <= b[0] / a[0] for a, b in pairwise(points))


def _links_all(rows: Sequence[Sequence[float]]) -> bool:
    """Whether a matrix is square and symmetric, links nobody to itself, and every child to another."""
    size = range(len(rows))
    square = all(len(row) == len(rows) and any(row) for row in rows)
    return square and all(rows[a][b] == rows[b][a] and (a != b or not rows[a][a]) for a in size for b in size)


BySize = Annotated[
    tuple[tuple[Rate, Part], ...],
    Meta(
        min_length=1,
        description="a list of [bytes, part], rising bytes with no less time for more, such as [[1e6, 1], [1e7, 0.3]]",
        extra={"rule": _lengthens},
    ),
]

Efficiency = Annotated[
    tuple[tuple[Rate, Part], ...],
    Meta(
        min_length=1,
        description="a list of [flops, part of the peak], rising, with no less time for more flops, such as "
        "[[1e9, 0.5], [1e12, 0.8]]",
        extra={"rule": lambda points: _lengthens(points) and all(a[1] <= b[1] for a, b in pairwise(points))},
    ),
]

Matrix = Annotated[
    tuple[tuple[Amount, ...], ...],
    Meta(
        description="a symmetric matrix of numbers above 0, with 0 where there is no link", extra={"rule": _links_all}
    ),
]

Times = Annotated[
    tuple[tuple[Size | Rate, Rate], ...],
    Meta(
        min_length=1,
        description="a list of [bytes, seconds], above 0, with rising bytes",
        extra={"rule": lambda points: all(a[0] < b[0] for a, b in pairwise(points))},
    ),
]

Range = Annotated[
    tuple[Rate, Rate],
    Meta(
        description="a list of two numbers above 0, the smaller first", extra={"rule": lambda ends: ends[0] <= ends[1]}
    ),
]

RESERVED_PART = 0.1
"""Of a device's memory, reserved where nothing says how much."""


def operator_key(op: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> str:
    """The key of measured seconds: an operator on one rank's tensors."""
    return f"{op} {', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}"


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Measurements of a device's operators: `seconds` of each, by `operator_key`. `ratios` divides an op's measured
    seconds by those of the device's rates; "" holds the ratio of ops that were not measured. `seconds_per_byte` is, by
    optimizer, for the bytes that its step reads and writes."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    seconds_per_byte: Mapping[str, float] = field(default_factory=dict)

    def ratio(self, op: str) -> float:
        return self.ratios.get(op, self.ratios.get("", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device whose `name` a cluster gives. `memory_bytes` is None where nothing says how much there is.
    `reserved_bytes` of it are not for tensors: the context, the communication library's buffers, fragmentation (None:
    `RESERVED_PART`).

    `flops_per_second` is the peak by dtype name ("float32", "bfloat16"); a dtype that is not listed counts as the
    slowest listed. `has_peak` is False where that was measured or made up, and is no peak that the maker publishes:
    an MFU says nothing then. `efficiency` are points (flops of one operator, part of the peak that it reaches),
    interpolated on logarithmic scales and constant beyond the ends; `memory_efficiency` likewise (bytes that one
    operator reads and writes, part of `memory_bytes_per_second`): small tensors fit into caches. `seconds_per_op` is
    the fixed cost of one operator. `operator_ratios` multiplies the seconds of an op, or of its arithmetic if it has
    any. `fused_part` is the part of the seconds of operators without arithmetic to speak of (element-wise ones, norms,
    copies) that a compiler saves by fusing them; 0 in eager. Devices of one kind differ: `spread` is the standard
    deviation of their seconds, as a part of the mean, and `slowdown` what the slowest of a mesh takes longer
    (`Cluster.among`), and `saved_part` is the `fused_part` of the model at hand, where its programs are compiled.
    `memory_bytes_per_link_byte` is what a collective reads and writes in memory for each byte that a rank sends, and
    takes from operators that run meanwhile; with 0 they do not disturb each other. `host_bytes_per_second` is the rate
    of copies to the host's memory, or from there, while all devices of a host copy, and `host_memory_bytes` is a
    device's part of that memory. `operators` holds measurements of single operators, which take precedence over all of
    this.

    `source` cites where each figure is from, by field.
    """

    name: Name
    flops_per_second: Annotated[
        Mapping[str, Rate], Meta(min_length=1, description="a table of numbers above 0 by dtype")
    ]
    efficiency: Efficiency = ((1.0, 1.0),)
    memory_bytes_per_second: Rate
    seconds_per_op: Seconds
    has_peak: bool = True
    memory_bytes: Rate | None = None
    reserved_bytes: Amount | None = None
    memory_efficiency: Part | BySize = ((1.0, 1.0),)
    operator_ratios: Mapping[str, Rate] = field(default_factory=dict)
    memory_bytes_per_link_byte: Amount = 0.0
    host_bytes_per_second: Rate | None = None
    host_memory_bytes: Rate | None = None
    fused_part: Share = 0.0
    spread: Share = 0.0
    source: Mapping[str, Name] = field(default_factory=dict, compare=False, repr=False)
    slowdown: float = field(default=1.0, metadata=NOT_IN_FILES)
    saved_part: float = field(default=0.0, metadata=NOT_IN_FILES)
    operators: Operators | None = field(default=None, metadata=NOT_IN_FILES)

    def __post_init__(self) -> None:
        """Raises ValueError for a reserve that is not of the memory."""
        reserved, memory = self.reserved_bytes, self.memory_bytes
        if reserved is not None and reserved >= (memory or 0.0):
            less = "remove it, or write memory_bytes" if memory is None else f"a number below memory_bytes = {memory}"
            raise ValueError(f"reserved_bytes is {reserved}: {less}")

    @property
    def memory_curve(self) -> Sequence[tuple[float, float]]:
        """Points of `memory_efficiency`: one where it is a number."""
        part = self.memory_efficiency
        return part if isinstance(part, tuple) else ((1.0, part),)

    @property
    def usable_bytes(self) -> float | None:
        """What a step's tensors may take: the memory less the reserve, or None where nothing says how much there is."""
        if self.memory_bytes is None:
            return None
        reserved = RESERVED_PART * self.memory_bytes if self.reserved_bytes is None else self.reserved_bytes
        return self.memory_bytes - reserved

    def measured_seconds(self, op: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> float | None:
        """Measured seconds of one operator on local shapes, or None."""
        return None if self.operators is None else self.operators.seconds.get(operator_key(op, inputs, outputs))

    def operator_seconds(
        self,
        op: str,
        inputs: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
        flops: float,
        inside_bytes: float = 0.0,
    ) -> float:
        """Seconds of one operator on local shapes: as measured, or by the roofline of its arithmetic and its bytes,
        those within it too."""
        if (measured := self.measured_seconds(op, inputs, outputs)) is not None:
            return measured
        tensors = (*inputs, *outputs)
        dtype = tensors[0].dtype if tensors else "float32"
        moved = sum(tensor.bytes for tensor in tensors) + inside_bytes
        if self.operators is not None:
            return self.roofline_seconds(flops, moved, dtype) * self.operators.ratio(op)
        return self.roofline_seconds(flops, moved, dtype, self.ratio(op))

    def roofline_seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype | str, ratio: float = 1.0) -> float:
        """Seconds of an operator by its arithmetic or its bytes, whichever takes longer, where the arithmetic, or all
        of an operator without any, takes `ratio` times as long."""
        moving = self.moving_seconds(moved_bytes)
        if not flops:
            return ratio * (self.seconds_per_op + moving) * (1.0 - max(self.fused_part, self.saved_part))
        return self.seconds_per_op + max(ratio * self.compute_seconds(flops, dtype), moving)

    def moving_seconds(self, moved_bytes: float) -> float:
        """Seconds in which an operator reads and writes so many bytes."""
        part = interpolated(self.memory_curve, moved_bytes)
        return moved_bytes / self.memory_bytes_per_second / part * self.slowdown

    def copying_seconds(self, moved_bytes: float, operators: float) -> float:
        """Seconds of so many operators that together read and write so many bytes."""
        return operators * self.seconds_per_op + self.moving_seconds(moved_bytes)

    def ratio(self, op: str) -> float:
        """The factor between an op's measured seconds and its roofline, or of its arithmetic if it has any."""
        return self.operator_ratios.get(op, 1.0) if self.operators is None else self.operators.ratio(op)

    def host_seconds(self, copied_bytes: float) -> float:
        """Seconds of a copy to or from the host's memory. Raises ValueError where nothing says its rate."""
        if self.host_bytes_per_second is None:
            raise ValueError(
                f"nothing says how quickly {self.name} copies to its host: give host_bytes_per_second in the cluster's "
                f"file (autopar clusters --help)"
            )
        return self.seconds_per_op + copied_bytes / self.host_bytes_per_second

    def view_seconds(self, op: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> float:
        """Seconds of an operator that moves nothing."""
        measured = self.measured_seconds(op, inputs, outputs)
        return self.seconds_per_op if measured is None else measured

    def optimizer_seconds(self, name: str, moved_bytes: float) -> float:
        """Seconds of an optimizer's step that reads and writes so many bytes."""
        measured = self.operators.seconds_per_byte.get(name) if self.operators is not None else None
        return self.moving_seconds(moved_bytes) if measured is None else moved_bytes * measured

    def peak_flops(self, dtype: torch.dtype | str) -> float:
        """FLOP/s at the peak."""
        rates = self.flops_per_second
        return rates.get(str(dtype).removeprefix("torch."), min(rates.values()))

    def flops(self, dtype: torch.dtype | str) -> float:
        """FLOP/s of the largest operators."""
        return self.peak_flops(dtype) * self.efficiency[-1][1]

    def compute_seconds(self, flops: float, dtype: torch.dtype | str) -> float:
        """Seconds of the arithmetic of one operator."""
        return flops / self.flops(dtype) * self.efficiency[-1][1] / self.reached(flops) * self.slowdown

    def reached(self, flops: float) -> float:
        """The part of its peak that the device reaches on an operator of that size."""
        return interpolated(self.efficiency, flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Links that join `size` children: devices at the innermost level, elsewhere the levels below. `name` is that of
    the links, such as "nvlink".

    All rates are one way, in bytes a second. `bytes_per_second` is what two children reach between them (ATP's
    point-to-point matrix: a number, or one for each pair), `group_bytes_per_second` what a child can send out to all
    others together (ATP's group bandwidth). The links out of a child are shared by `devices_per_link` of its devices
    each: a device alone cannot use those of others. With the `topology` "ring" (a dim of a torus) only neighbours are
    linked, and a child sends both ways; with "switch" all are. A collective costs `launch_seconds` once and
    `latency_seconds` a step, and reaches the part `efficiency` of the rates: a number, or one for each kind of
    collective. The part `overlap` of these seconds passes while bytes travel: slow links spend most of them
    waiting for bytes. A collective under way takes the part `compute_share` of its ranks' processors: CPU cores that
    copy what arrives, or a GPU's multiprocessors. `source` cites where each figure is from, by field.
    """

    name: Name
    size: Size
    topology: Annotated[
        Literal["switch", "full", "ring"],
        Meta(description="one of switch, full, ring (a torus is one ring level for each of its dims)"),
    ] = field(default="switch", metadata=NEEDED_IN_FILES)
    bytes_per_second: Rate | Matrix
    group_bytes_per_second: Rate
    devices_per_link: Size = 1
    latency_seconds: Seconds | ByKind[Seconds]
    launch_seconds: Seconds = 0.0
    overlap: Share = 0.0
    compute_share: Share = 0.0
    efficiency: Part | ByKind[Part] = 1.0
    source: Mapping[str, Name] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a matrix that is not of this level."""
        if isinstance(self.bytes_per_second, tuple):
            if self.topology != "full":
                raise ValueError('bytes_per_second is a matrix: write topology = "full", or one number for all links')
            if (rows := len(self.bytes_per_second)) != self.size:
                raise ValueError(f"bytes_per_second has {rows} rows: {self.size}, one for each child")

    @property
    def most_latency_seconds(self) -> float:
        """The latency of the slowest kind of collective."""
        latency = self.latency_seconds
        return max(latency.values()) if isinstance(latency, Mapping) else latency

    @property
    def measured(self) -> tuple[MeasuredKind, ...]:
        """What each kind of collective reaches; nothing where all reach all of the rates."""
        if self.efficiency == 1.0 and not isinstance(self.latency_seconds, Mapping):
            return ()
        figures = (self.efficiency, self.latency_seconds)
        by_kind = ({kind: f[kind] if isinstance(f, Mapping) else f for kind in KINDS} for f in figures)
        parts, latencies = by_kind
        return tuple(MeasuredKind(kind=k, efficiency=parts[k], latency_seconds=latencies[k]) for k in KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Measured seconds of collectives in groups of `ranks` devices, `stride` apart, all groups at once: by kind, (bytes
    of the larger of a rank's input and output, seconds), by size."""

    ranks: Size
    stride: Size
    seconds: Annotated[Mapping[Kind, Times], Meta(min_length=1)]
    source: Mapping[str, Name] = field(default_factory=dict, compare=False, repr=False)

    def factors(self, link: Link) -> Factors:
        """Measured seconds over those of the formulas."""
        return tuple(
            (kind, tuple((size, seconds / collective_seconds(kind, size, link)) for size, seconds in points))
            for kind, points in self.seconds.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A machine or many, which `cluster=` calls by its `name`: a `device`, and `levels` of links from the outermost in
    (ATP 3.4, the hierarchical communication matrix). A mesh of fewer devices fills the innermost levels first. `source`
    says where the figures are from. `algorithms` are those of `links.ALGORITHMS` that the communication library has;
    the cheapest is taken. `groups` are measurements of axes, which take precedence over the levels. `factors` takes
    precedence over both: of meshes (by their sizes) on which the collectives of programs were measured, those of the
    links of each axis. `step_range` says how well steps are known: of those that were compared, 8 of 10 took from so
    many to so many times what was predicted."""

    name: Name
    device: Device
    levels: tuple[Level, ...]
    source: Name = ""
    algorithms: Algorithms = ALGORITHMS
    groups: tuple[Groups, ...] = ()
    factors: Mapping[tuple[int, ...], tuple[Factors, ...]] = field(default_factory=dict)
    step_range: Range | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for groups that the devices cannot form."""
        for number, groups in enumerate(self.groups):
            if self.devices % (groups.ranks * groups.stride):
                raise ValueError(
                    f"groups[{number}] are of {groups.ranks} ranks, {groups.stride} apart, which do not divide "
                    f"{self.devices} devices"
                )

    def within(self, seconds: float) -> tuple[float, float] | None:
        """The range of a step that is predicted to take so many seconds, if it is known."""
        return None if self.step_range is None else (self.step_range[0] * seconds, self.step_range[1] * seconds)

    @property
    def devices(self) -> int:
        """The product of the levels' sizes."""
        return math.prod(level.size for level in self.levels)

    def among(self, ranks: int) -> Cluster:
        """The cluster with the device for which a mesh of so many waits: the slowest, by the mean of the largest of as
        many normal deviates (Blom 1958)."""
        largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return replace(self, device=replace(self.device, slowdown=1.0 + self.device.spread * largest))

    def fusing(self, saved_part: float) -> Cluster:
        """The cluster on which programs are compiled, by which operators without arithmetic save so much."""
        return replace(self, device=replace(self.device, saved_part=saved_part))

    def links(self, mesh: tuple[int, ...], order: Sequence[int] | None = None) -> tuple[Link, ...]:
        """What each axis of a mesh sees. `order` are the axes from the outermost in, if they do not lie on
        the cluster in the mesh's own order.

        Raises ValueError if the mesh has more ranks than the cluster has devices, or `order` is no permutation.
        """
        order = tuple(order or range(len(mesh)))
        if sorted(order) != list(range(len(mesh))):
            raise ValueError(f"order {order} of a mesh of {len(mesh)} axes: give each of 0..{len(mesh) - 1} once")
        ranks = math.prod(mesh)
        if ranks > self.devices:
            sizes = " x ".join(str(level.size) for level in self.levels)
            raise ValueError(
                f"a mesh of {' x '.join(map(str, mesh))} = {ranks} ranks does not fit cluster {self.name} of "
                f"{sizes} = {self.devices} devices: give a smaller mesh, or a cluster with a larger outermost level"
            )
        strides = {axis: math.prod(mesh[inner] for inner in order[k + 1 :]) for k, axis in enumerate(order)}
        links = [self._link(size, strides[axis], ranks) for axis, size in enumerate(mesh)]
        by_axis = {(groups.ranks, groups.stride): groups for groups in self.groups}
        own = self.factors.get(mesh, ((),) * len(mesh))
        for axis, link in enumerate(links):
            measured = by_axis.get((link.ranks, strides[axis]))
            if factors := own[axis] or (measured.factors(link) if measured is not None else ()):
                links[axis] = replace(link, factors=factors)
        return tuple(links)

    def _link(self, ranks: int, stride: int, all_ranks: int) -> Link:
        """The link of groups of `ranks` devices, `stride` apart."""
        stages = []
        launch = 0.0
        below = self.devices
        for number, level in enumerate(self.levels):
            above, below = below, below // level.size
            members, there = _members(ranks, stride, below), _members(ranks, stride, above)
            width = math.ceil(there / members)
            sending = members
            if width == 1 and _straddles(ranks, stride, below, min(above, all_ranks)):
                width, sending = 2, 1
            if width > 1:
                stages.append(_stage(number, level, width, members, sending, stride, below))
                launch = max(launch, level.launch_seconds)
        has = self.algorithms
        return Link(ranks, tuple(stages), launch, tuple(has.items()) if isinstance(has, Mapping) else has)


def _members(ranks: int, stride: int, devices: int) -> int:
    """How many ranks of a group lie within `devices` devices."""
    return min(ranks, max(1, devices // stride))


def _straddles(ranks: int, stride: int, devices: int, among: int) -> bool:
    """Whether some group that would fit into that many devices lies across a border between such: three
    ranks in nodes of four."""
    span = ranks * stride
    return 1 < span <= devices < among and devices % span != 0


def _stage(number: int, level: Level, width: int, members: int, sending: int, stride: int, below: int) -> Stage:
    """What one group gets of a level, with the links of `sending` of its devices.

    `min(below, stride)` groups leave each child and share what leaves it (Par4D Eq. 10, ATP Eq. 3).
    Where the axis jumps over children, the groups in between share the links of a ring.
    """
    sharing, apart = min(below, stride), max(1, stride // below)
    group = level.group_bytes_per_second / sharing
    of_one = level.group_bytes_per_second * min(1.0, level.devices_per_link / below)
    ring, wrapped = level.topology == "ring", False
    if ring:
        assert not isinstance(level.bytes_per_second, tuple)
        wrapped = width * apart >= level.size
        pair = level.bytes_per_second / sharing / apart
        rate = min(group / apart if wrapped else pair, sending * of_one)
    else:
        everyone, one = _reach(level, width, apart)
        group = min(group, sending * of_one)
        pair, rate = min(group, one / sharing), min(group, everyone / sharing)
    return Stage(
        name=level.name,
        width=width,
        members=members,
        bytes_per_second=rate,
        pair_bytes_per_second=pair,
        rank_bytes_per_second=min(pair, of_one),
        latency_seconds=level.most_latency_seconds,
        measured=level.measured,
        overlap=level.overlap,
        compute_share=level.compute_share,
        ring=ring,
        wrapped=wrapped,
        level=number,
        part=min(1.0, rate * sharing * (apart if ring else 1) / level.group_bytes_per_second),
    )


def _reach(level: Level, width: int, apart: int) -> tuple[float, float]:
    """The lowest rate from a child to all others of its group together, and to one other, by the point-to-point matrix
    (ATP 3.4). Children without a link between them go by way of a third, at half of the rate."""
    links = level.bytes_per_second
    if not isinstance(links, tuple):
        return links * (width - 1), links
    groups = [
        [first + apart * k for k in range(width)]
        for first in range(level.size - apart * (width - 1))
        if first % (apart * width) < apart
    ]
    everyone = min(sum(links[a][b] for b in group) for group in groups for a in group)
    pair = min(links[a][b] for group in groups for a in group for b in group if a != b)
    relayed = min(level.group_bytes_per_second, max(max(row) for row in links)) / 2
    return everyone or relayed, pair or relayed
