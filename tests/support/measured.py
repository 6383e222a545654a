"""What would be measured on a cluster that costs what is predicted, and rows of profiles."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from autopar.cluster.links import GLOO, KINDS
from autopar.cluster.loads import price
from autopar.cluster.machine import Cluster, Device, Level
from autopar.cluster.measurements import Compute, Measurements, Sample, Together, axes, level_axes
from autopar.profile.database import OperatorRow, ProgramRow

SIZES = [4**k << 10 for k in range(8)]


EFFICIENCY = {"all_reduce": 1.0, "all_gather": 0.8, "reduce_scatter": 0.7, "all_to_all": 0.5, "shift": 0.9}


def measured_level(
    name: str, size: int, rate: float, latency: float, devices_per_link: int, overlap: float, compute_share: float
) -> Level:
    return Level(
        name=name,
        size=size,
        bytes_per_second=rate,
        group_bytes_per_second=rate,
        latency_seconds={kind: latency * (1 - 0.1 * k) for k, kind in enumerate(KINDS)},
        devices_per_link=devices_per_link,
        overlap=overlap,
        compute_share=compute_share,
        efficiency={kind: EFFICIENCY.get(kind, 0.6) for kind in KINDS},
    )


CLUSTER = Cluster(
    name="known",
    device=Device(
        name="a core",
        flops_per_second={"float32": 40e9, "float64": 20e9},
        memory_bytes=8e9,
        memory_bytes_per_second=20e9,
        seconds_per_op=2e-6,
        efficiency=((1e4, 0.25), (1e6, 0.5), (1e8, 1.0)),
        has_peak=False,
        memory_efficiency=((1e5, 0.5), (1e6, 1.0), (1e7, 0.2)),
        operator_ratios={
            "aten.add.Tensor": 0.8,
            "aten.neg.default": 1.0,
            "aten._softmax.default": 2.0,
            "attention": 1.5,
        },
    ),
    levels=(
        measured_level("nodes", 2, 50e6, 1e-3, 4, 1.0, 0.25),
        measured_level("ranks", 4, 750e6, 5e-4, 1, 0.25, 0.0),
    ),
    source="made up",
    algorithms=GLOO,
)


def measurements(cluster: Cluster) -> Measurements:
    """What would be measured on a cluster that costs what is predicted."""
    outer, inner = (level.size for level in cluster.levels)
    world = outer * inner
    links = {axis: cluster.links((world // math.prod(axis), *axis))[1] for axis in axes(world)}
    samples = []
    for (axis, link), kind, size in itertools.product(links.items(), KINDS, SIZES):
        seconds = price(kind, size, link).seconds()
        one = Sample(kind=kind, axis=axis, bytes=size, alone=False, seconds=seconds, quartiles=(seconds, seconds))
        samples.append(one)
        if axis == (outer, inner):  # a group has the nodes' link to itself
            samples.append(replace(one, alone=True, seconds=seconds / inner))
    device = cluster.device
    matmuls = []
    for dtype, n in itertools.product(device.flops_per_second, (17, 79, 368)):
        seconds = device.seconds_per_op + device.compute_seconds(2 * n**3, getattr(torch, dtype))
        matmuls.append((dtype, n, n, n, seconds))
    compute = Compute(
        seconds_per_op=device.seconds_per_op,
        operators=tuple(
            (op, flops, moved, factor * device.roofline_seconds(flops, moved, torch.float32))
            for op, factor in device.operator_ratios.items()
            for flops, moved in ([(1e8, 100)] if op == "attention" else [(0.0, 10**k) for k in (5, 6, 7)])
        ),
        memory_bytes=device.memory_bytes,
        matmuls=tuple(matmuls),
    )
    # two seconds of products beside a second of a collective, which takes its share of them
    together = tuple(
        Together(
            axis=level_axes((outer, inner))[number],
            compute_seconds=2.0,
            collective_seconds=1.0,
            seconds=2.0 + level.compute_share,
        )
        for number, level in enumerate(cluster.levels)
    )
    return Measurements(
        levels=(outer, inner),
        device="a core",
        backend="gloo",
        rounds=1,
        compute=compute,
        samples=tuple(samples),
        together=together,
    )


ROW = OperatorRow(
    machine="one", program="abc", key="aten.mm", seconds=1.0, spread=0.1, runs=3, flops=8.0, bytes=16, dtype="float32"
)


PROGRAM = ProgramRow(
    machine="one",
    links="l",
    structure="abc",
    fingerprint="f",
    model="MLP",
    mesh="tp=2",
    label="dp",
    seconds=0.2,
    composed_seconds=0.1,
    spread=0.01,
    runs=10,
    abandoned=True,
    compute_seconds=0.05,
    waiting_seconds=0.1,
    optimizer="sgd",
    optimizer_seconds=0.01,
    optimizer_bytes=1000,
    peak_bytes=100,
    measured_at=1.0,
)
