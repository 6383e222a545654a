"""What a mesh runs on: a device, and the links between devices.

A cluster is a device and levels of links, from the outermost in ("between nodes", "within a node").
A mesh of named axes lies on it in row-major order, the last axis innermost; an axis is as fast as
the slowest level that it crosses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`flops_per_second` by dtype name ("float32", "bfloat16"); what is not listed counts as the
    slowest listed. `seconds_per_op` is the fixed cost of running one operator."""

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    seconds_per_op: float

    def flops(self, dtype: torch.dtype) -> float:
        rates = self.flops_per_second
        return rates.get(str(dtype).removeprefix("torch."), min(rates.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """`size` children (devices at the innermost level), each sending and receiving
    `bytes_per_second`; `latency_seconds` is paid for each hop of a collective."""

    name: str
    size: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective along one mesh axis sees (alpha and beta)."""

    ranks: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Levels from the outermost in. The outermost may be larger or smaller than its size says: a
    mesh uses as much of it as it needs."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    source: str = ""

    def link(self, mesh: tuple[int, ...], axis: int) -> Link:
        """The link of a mesh axis. Neighbours on it are `stride` devices apart and the whole axis
        spans `stride * ranks` devices: the innermost level that holds that many carries it.

        Raises ValueError if no level but the outermost could, and even that is a single device.
        """
        stride = math.prod(mesh[axis + 1 :])
        span = stride * mesh[axis]
        held = 1
        for level in reversed(self.levels):
            held *= level.size
            if span <= held:
                return Link(mesh[axis], level.bytes_per_second, level.latency_seconds)
        outermost = self.levels[0]
        return Link(mesh[axis], outermost.bytes_per_second, outermost.latency_seconds)

    def links(self, mesh: tuple[int, ...]) -> tuple[Link, ...]:
        return tuple(self.link(mesh, axis) for axis in range(len(mesh)))


def _dgx(name: str, device: Device, nvlink: float, network: float, source: str) -> Cluster:
    return Cluster(
        name=name,
        device=device,
        levels=(
            Level(name="network", size=1024, bytes_per_second=network, latency_seconds=10e-6),
            Level(name="nvlink", size=8, bytes_per_second=nvlink, latency_seconds=3e-6),
        ),
        source=source,
    )


CLUSTERS: Mapping[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _dgx(
            "dgx-h100",
            Device(
                name="H100 SXM",
                flops_per_second={"bfloat16": 990e12 * 0.6, "float16": 990e12 * 0.6, "float32": 67e12 * 0.7},
                memory_bytes=80e9,
                memory_bytes_per_second=3.35e12 * 0.8,
                seconds_per_op=4e-6,
            ),
            nvlink=450e9 * 0.8,
            network=50e9 * 0.9,
            source="NVIDIA DGX H100 data sheet: 990 TFLOP/s dense bf16, 3.35 TB/s, NVLink 450 GB/s one way, "
            "one 400 Gbit/s InfiniBand port a GPU; rates derated to what GEMMs and rings reach",
        ),
        _dgx(
            "dgx-a100",
            Device(
                name="A100 SXM 80GB",
                flops_per_second={"bfloat16": 312e12 * 0.7, "float16": 312e12 * 0.7, "float32": 19.5e12 * 0.8},
                memory_bytes=80e9,
                memory_bytes_per_second=2.0e12 * 0.8,
                seconds_per_op=5e-6,
            ),
            nvlink=300e9 * 0.8,
            network=25e9 * 0.9,
            source="NVIDIA DGX A100 data sheet: 312 TFLOP/s dense bf16, 2.0 TB/s, NVLink 300 GB/s one way, "
            "one 200 Gbit/s InfiniBand port a GPU; derated likewise",
        ),
        Cluster(
            name="local",
            device=Device(
                name="CPU core",
                flops_per_second={"float32": 60e9, "bfloat16": 60e9, "float64": 30e9},
                memory_bytes=8e9,
                memory_bytes_per_second=8e9,
                seconds_per_op=4e-6,
            ),
            levels=(Level(name="loopback", size=1 << 20, bytes_per_second=0.8e9, latency_seconds=60e-6),),
            source="gloo ranks of one thread each on one machine's loopback; rates by order of magnitude",
        ),
    )
}


def named_cluster(cluster: str | Cluster | None, *, device_type: str = "cpu") -> Cluster:
    """The cluster itself, or the one of that name; None gives a default for the device type.

    Raises ValueError for a name that is not in the library.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        cluster = "local" if device_type == "cpu" else "dgx-h100"
    if cluster not in CLUSTERS:
        raise ValueError(f"unknown cluster {cluster!r}; known: {', '.join(sorted(CLUSTERS))}, or give a Cluster")
    return CLUSTERS[cluster]
