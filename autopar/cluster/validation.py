"""How well a cluster says what was measured: each collective and each product, as predicted and as measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import torch

from .collectives import price
from .machine import Cluster
from .measurements import Measurements, level_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective as predicted and as measured. `axis` names the levels that it spans, or its ranks; `fitted` says
    whether it is one whole level."""

    kind: str
    axis: str
    fitted: bool
    bytes: int
    predicted_seconds: float
    measured_seconds: float
    quartiles: tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def check(measured: Measurements, cluster: Cluster) -> list[Row]:
    """What a cluster predicts of what was measured, all groups of an axis at once.

    Raises ValueError where the cluster has other levels.
    """
    if tuple(level.size for level in cluster.levels) != measured.levels:
        theirs, ours = (" x ".join(map(str, sizes)) for sizes in ([v.size for v in cluster.levels], measured.levels))
        raise ValueError(f"cluster {cluster.name} is {theirs}, and {ours} was measured: give the same --levels")
    rows = []
    whole = level_axes(measured.levels)
    for sample in measured.samples:
        if not sample.alone:
            ranks, stride = sample.axis
            link = cluster.links((math.prod(measured.levels) // (ranks * stride), ranks, stride))[1]
            rows.append(
                Row(
                    kind=sample.kind,
                    axis=_axis_name(cluster, ranks, stride),
                    fitted=sample.axis in whole,
                    bytes=sample.bytes,
                    predicted_seconds=price(sample.kind, sample.bytes, link).seconds(),
                    measured_seconds=sample.seconds,
                    quartiles=sample.quartiles,
                )
            )
    return rows


def _axis_name(cluster: Cluster, ranks: int, stride: int) -> str:
    sizes = [level.size for level in cluster.levels]
    for first, last in combinations(range(len(sizes) + 1), 2):
        if (ranks, stride) == (math.prod(sizes[first:last]), math.prod(sizes[last:])):
            return "+".join(level.name for level in cluster.levels[first:last])
    return f"{ranks} ranks" + (f", {stride} apart" if stride > 1 else "")


def compute_check(measured: Measurements, cluster: Cluster) -> list[tuple[str, str, float, float]]:
    """(dtype, shape, predicted, measured seconds) of each product."""
    device = cluster.device
    found = []
    for dtype, m, k, n, seconds in measured.compute.matmuls:
        kind = getattr(torch, dtype)
        moved = device.moving_seconds((m * k + k * n + m * n) * kind.itemsize)
        predicted = device.seconds_per_op + max(device.compute_seconds(2.0 * m * k * n, kind), moved)
        found.append((dtype, f"{m} x {k} x {n}", predicted, seconds))
    return found
