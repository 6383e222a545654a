"""The shape of a lab: how many children each level has, and how fast the link of a child is."""

import math
import re
from dataclasses import dataclass

from autopar.cluster.machine import Cluster

UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SLOWEST, FASTEST = 1e3, 125e9
"""The rates of a token bucket, in bytes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """One level: `size` children, each behind a link of its own, `bytes_per_second` either way."""

    size: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a level of {self.size} children: give at least 1")
        if not SLOWEST <= self.bytes_per_second <= FASTEST:
            raise ValueError(
                f"a link of {self.bytes_per_second:.3g} bytes/s cannot be emulated: give {SLOWEST:.0e} to {FASTEST:.3g}"
            )


@dataclass(frozen=True, slots=True)
class Shape:
    """Levels from the outermost in; at the innermost one a child is a rank. Ranks are numbered in order, so
    that the last mesh axis lies innermost."""

    levels: tuple[Links, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("a lab without levels: give at least one")
        if self.ranks > 250:
            raise ValueError(f"a lab of {self.ranks} ranks: give at most 250")

    @property
    def ranks(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def ranks_per_node(self) -> int:
        """Children of an innermost level."""
        return self.levels[-1].size

    def __str__(self) -> str:
        return " x ".join(f"{level.size} at {level.bytes_per_second * 8e-6:.4g} Mbit/s" for level in self.levels)


def nodes(nodes: int, ranks: int, inter: str | float, intra: str | float) -> Shape:
    """Nodes of ranks. Rates are bytes a second, or text such as "400mbit"."""
    return Shape((Links(size=nodes, bytes_per_second=rate(inter)), Links(size=ranks, bytes_per_second=rate(intra))))


def flat(ranks: int, link: str | float) -> Shape:
    """Ranks behind equal links."""
    return Shape((Links(size=ranks, bytes_per_second=rate(link)),))


def rate(text: str | float) -> float:
    """Bytes a second. Raises ValueError for a text that is no rate such as "400mbit"."""
    if not isinstance(text, str):
        return float(text)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?bit)(?:/s)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no rate: give a number and one of {', '.join(UNITS)}, such as 400mbit")
    return float(match[1]) * UNITS[match[2]] / 8


def part_of(cluster: Cluster, sizes: tuple[int, ...], divisor: float) -> Shape:
    """A part of a cluster as a lab, with its rates divided.

    `sizes` are the children to take of each level, the outermost first. The rates are those devices' share of the
    cluster's links: if few devices share each link out of a child, fewer devices get fewer links. Levels of one child
    are left out. Raises ValueError for sizes that do not fit the cluster.
    """
    check_part(cluster, sizes)
    levels = []
    devices, ranks = cluster.devices, math.prod(sizes)
    for level, size in zip(cluster.levels, sizes, strict=True):
        devices, ranks = devices // level.size, ranks // size
        part = min(1.0, ranks * level.devices_per_link / devices)
        if size > 1:
            levels.append(Links(size=size, bytes_per_second=level.group_bytes_per_second * part / divisor))
    return Shape(tuple(levels))


def check_part(cluster: Cluster, sizes: tuple[int, ...]) -> None:
    full = tuple(level.size for level in cluster.levels)
    if len(sizes) != len(full) or any(not 1 <= part <= most for part, most in zip(sizes, full, strict=False)):
        names = " x ".join(f"{level.name} {level.size}" for level in cluster.levels)
        raise ValueError(
            f"a lab of {' x '.join(map(str, sizes))} does not fit cluster {cluster.name}, which is {names}: "
            f"give {len(full)} sizes, each at least 1 and at most the cluster's"
        )


def divisor(cluster: Cluster, flops_per_second: float, dtype: str = "bfloat16") -> float:
    """The divisor of a cluster's rates that keeps the ratio between an operator's arithmetic and the transfer of its
    operands: here with ranks of `flops_per_second` in float32, there with elements of `dtype`. Raises
    ValueError for a dtype that the cluster has no rate of."""
    rates = cluster.device.flops_per_second
    if dtype not in rates or dtype not in _ITEMSIZES:
        raise ValueError(f"cluster {cluster.name} has no rate for {dtype}; it has {', '.join(rates)}")
    there = rates[dtype] * cluster.device.efficiency[-1][1]
    return there / flops_per_second * _ITEMSIZES[dtype] / _ITEMSIZES["float32"]


_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
