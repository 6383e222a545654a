"""A cluster from measurements.

Each level is fitted by itself, from the collectives of the axis that spans this level alone, with all of its groups at
once. The fit gives each kind a latency a step and a rate, and the level the part of the latencies that passes while
bytes travel, by the same formula that later prices collectives; and what operators lose while a collective is under
way. Axes that span several levels, or a part of one, are not fitted: `check` shows how well the formulas predict them.
The measured curve of every axis is kept too, and prices the axes that a mesh has.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from .collectives import together
from .links import ALGORITHMS, GLOO, KINDS, Algorithms, Kind, Link, interpolated
from .loads import price
from .machine import Cluster, Device, Groups, Level
from .measurements import Compute, Measurements, Sample, level_axes, usual_dtype

LEVELS = ("racks", "nodes", "ranks")
"""Names of levels, the last one the innermost."""

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Candidates for each level; all kinds share one."""

SMALLEST_PART = 0.25

LEAST_BYTES = 1 << 20
"""Collectives of so many bytes are bound by rates, not by latencies."""


def fit(measured: Measurements, name: str) -> Cluster:
    """The cluster that these measurements describe."""
    algorithms = GLOO if measured.backend == "gloo" else ALGORITHMS
    levels = tuple(_level(measured, number, algorithms) for number in range(len(measured.levels)))
    cluster = Cluster(
        name=name,
        device=_device(measured),
        levels=levels,
        source=f"{measured.backend} on {math.prod(measured.levels)} ranks, measured by autopar calibrate",
        algorithms=algorithms,
        groups=_curves(measured),
    )
    known = step_range(measured, cluster)
    apart = _digits(max(measured.compute.seconds_per_op, measured.compute.seconds_per_op_apart))
    return replace(cluster, step_range=known, device=replace(cluster.device, seconds_per_op=apart))


def step_range(measured: Measurements, cluster: Cluster) -> tuple[float, float]:
    """From how many to how many times the predicted seconds a step takes, by what was measured over what the cluster
    predicts. Of products, of other operators and of large collectives (with their quartiles, since their medians are
    the cluster's) these are the 10th and the 90th percentile, and of a step their mean: as if it spent a third on each,
    and all of them erred to one side together."""
    usual, device = usual_dtype(measured.backend), cluster.device
    large = [row for row in check(measured, cluster) if row.bytes >= LEAST_BYTES]
    kinds = (
        [seconds / predicted for dtype, _, predicted, seconds in compute_check(measured, cluster) if dtype == usual],
        [
            seconds / device.roofline_seconds(flops, moved, "float32", device.ratio(op))
            for op, flops, moved, seconds in measured.compute.operators
        ],
        [quartile / row.predicted_seconds for row in large for quartile in row.quartiles],
    )
    several = (ratios * 2 if len(ratios) == 1 else ratios for ratios in kinds)
    ends = [statistics.quantiles(ratios, n=10, method="inclusive") for ratios in several if ratios]
    low, high = (statistics.fmean(end) for end in zip(*((every[0], every[-1]) for every in ends), strict=True))
    return _digits(low), _digits(high)


def _curves(measured: Measurements) -> tuple[Groups, ...]:
    """The measured curves of each axis."""
    by_axis: dict[tuple[int, int], dict[Kind, dict[int, float]]] = {}
    for sample in measured.samples:
        if not sample.alone:
            curve = by_axis.setdefault(sample.axis, {}).setdefault(sample.kind, {})
            curve[sample.bytes] = _digits(sample.seconds)
    return tuple(
        Groups(
            ranks=ranks,
            stride=stride,
            seconds={kind: tuple(sorted(curve.items())) for kind, curve in curves.items()},
        )
        for (ranks, stride), curves in by_axis.items()
    )


def _level(measured: Measurements, number: int, algorithms: Algorithms) -> Level:
    sizes, axis = measured.levels, level_axes(measured.levels)[number]
    shared = _devices_per_link(measured, number)
    link = _unit_link(sizes, number, shared, algorithms)
    fits: dict[float, dict[Kind, _Line]] = {overlap: {} for overlap in OVERLAPS}
    for kind in KINDS:
        samples = [s for s in measured.samples if (s.kind, s.axis, s.alone) == (kind, axis, False)]
        steps, moving = (price(kind, size, link) for size in (0.0, 1.0))
        for overlap, lines in fits.items():
            lines[kind] = _line(samples, steps.fixed, moving.moving, overlap)
    overlap = min(OVERLAPS, key=lambda overlap: sum(line.error for line in fits[overlap].values()))
    fitted = {kind: (line.latency, line.rate) for kind, line in fits[overlap].items()}
    rate = max(rate for _, rate in fitted.values())
    return Level(
        name=LEVELS[number - len(sizes)] if len(sizes) <= len(LEVELS) else f"level {number}",
        size=sizes[number],
        bytes_per_second=_digits(rate),
        group_bytes_per_second=_digits(rate),
        latency_seconds={kind: _digits(latency) for kind, (latency, _) in fitted.items()},
        devices_per_link=shared,
        overlap=overlap,
        compute_share=max((_digits(both.share) for both in measured.together if both.axis == axis), default=0.0),
        efficiency={kind: min(1.0, _digits(own / rate)) for kind, (_, own) in fitted.items()},
    )


def _unit_link(sizes: Sequence[int], number: int, shared: int, algorithms: Algorithms) -> Link:
    """The link of one level's axis, if the level had a rate of one byte a second and a latency of a second."""
    levels = tuple(
        Level(
            name="",
            size=size,
            bytes_per_second=1.0,
            group_bytes_per_second=1.0,
            latency_seconds=1.0,
            devices_per_link=shared if level == number else 1,
        )
        for level, size in enumerate(sizes)
    )
    device = Device(
        name="", flops_per_second={"float32": 1.0}, memory_bytes=1.0, memory_bytes_per_second=1.0, seconds_per_op=0.0
    )
    return Cluster(name="", device=device, levels=levels, algorithms=algorithms).links(tuple(sizes))[number]


def _devices_per_link(measured: Measurements, number: int) -> int:
    """How many devices share a link out of a child: by how many times all groups at once are slower than one."""
    axis = level_axes(measured.levels)[number]
    below = axis[1]
    seconds = {(s.kind, s.bytes, s.alone): s.seconds for s in measured.samples if s.axis == axis}
    ratios = [
        together / seconds[kind, size, True]
        for (kind, size, alone), together in seconds.items()
        if not alone and size >= LEAST_BYTES and (kind, size, True) in seconds
    ]
    return max(1, min(below, round(statistics.median(ratios)))) if ratios else below


@dataclass(frozen=True, slots=True)
class _Line:
    error: float
    latency: float
    rate: float


def _line(samples: Sequence[Sample], steps: float, moving: float, overlap: float) -> _Line:
    """The latency and the rate that fit steps x latency and bytes x moving / rate, added with that overlap, with
    the least sum of |log(predicted / measured)|: a size that something disturbed does not bend the line.

    Such a line goes through two of the points, or through one and the origin; all of them are tried.
    """
    latencies = {0.0, *(s.seconds / steps for s in samples)}
    for one, other in combinations(samples, 2):
        if other.bytes != one.bytes and (slope := (other.seconds - one.seconds) / (other.bytes - one.bytes)) > 0:
            latencies.add(max(0.0, one.seconds - slope * one.bytes) / steps / max(1.0 - overlap, SMALLEST_PART))
    lines = []
    for latency in latencies:
        fixed = steps * latency
        for through in samples:
            if (left := through.seconds - fixed * (1.0 - overlap)) > 0:
                slope = left / through.bytes
                predicted = [(together(fixed, slope * s.bytes, overlap), s.seconds) for s in samples]
                error = sum(abs(math.log(one / other)) for one, other in predicted)
                lines.append(_Line(error, latency, moving / slope))
    return min(lines, key=lambda line: (line.error, line.latency))


def _device(measured: Measurements) -> Device:
    compute = measured.compute
    rates: dict[str, list[tuple[float, float]]] = {}
    for dtype, m, k, n, seconds in compute.matmuls:
        flops = 2.0 * m * k * n
        rates.setdefault(dtype, []).append((flops, flops / _work_seconds(compute, seconds)))
    curves = {dtype: _rising(points) for dtype, points in rates.items()}
    memory = _memory(compute)
    device = Device(
        name=measured.device,
        flops_per_second={dtype: _digits(curve[-1][1]) for dtype, curve in curves.items()},
        has_peak=False,
        memory_bytes=_digits(compute.memory_bytes),
        memory_bytes_per_second=_digits(max(rate for _, rate in memory)),
        memory_efficiency=_parts(memory),
        seconds_per_op=_digits(compute.seconds_per_op),
        efficiency=_parts(curves[usual_dtype(measured.backend)]),
    )
    return replace(device, operator_ratios=_ratios(compute, device))


def _work_seconds(compute: Compute, seconds: float) -> float:
    """Seconds of an operator's arithmetic or bytes, without the fixed cost of an operator."""
    return max(seconds - compute.seconds_per_op, seconds / 10)


def _memory(compute: Compute) -> list[tuple[float, float]]:
    """(bytes, bytes a second) of the median operator among those with hardly any arithmetic. Some, such as a softmax,
    take longer than their bytes: `_ratios` accounts for them."""
    rates: dict[str, list[tuple[float, float]]] = {}
    for op, flops, moved, seconds in compute.operators:
        if not flops:
            rates.setdefault(op, []).append((float(moved), moved / _work_seconds(compute, seconds)))
    curves = [sorted(points) for points in rates.values()]
    sizes = [statistics.median(size for size, _ in points) for points in zip(*curves, strict=True)]
    return [(size, statistics.median(interpolated(curve, size) for curve in curves)) for size in sizes]


def _ratios(compute: Compute, device: Device) -> dict[str, float]:
    """Op -> its measured seconds over those by the device's rates, or of its arithmetic if it has any, the mean of its
    sizes."""
    ratios: dict[str, list[float]] = {}
    for op, flops, moved, seconds in compute.operators:
        if flops:
            ratio = _work_seconds(compute, seconds) / device.compute_seconds(flops, torch.float32)
        else:
            ratio = seconds / device.roofline_seconds(flops, moved, torch.float32)
        ratios.setdefault(op, []).append(ratio)
    return {op: _digits(statistics.geometric_mean(of_op)) for op, of_op in ratios.items()}


def _rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(flops, FLOP/s), smoothed to rise with size: neighbours that fall get their mean (pool adjacent violators)."""
    sizes = {flops: [rate for size, rate in points if size == flops] for flops, _ in sorted(points)}
    pools: list[tuple[float, list[float]]] = []
    for flops, same in sizes.items():
        mean = statistics.geometric_mean(same)
        pool = [flops]
        while pools and pools[-1][0] >= mean:
            before, others = pools.pop()
            mean = math.exp((math.log(before) * len(others) + math.log(mean) * len(pool)) / (len(others) + len(pool)))
            pool = others + pool
        pools.append((mean, pool))
    return [(flops, mean) for mean, pool in pools for flops in pool]


def _parts(curve: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(size, part of the best rate), with no less time for more; without points within 2% of the one before."""
    peak = max(rate for _, rate in curve)
    parts: list[tuple[float, float]] = []
    for size, rate in curve:
        part = _digits(rate / peak)
        if parts:
            part = min(part, parts[-1][1] * size / parts[-1][0])
        if not parts or abs(part / parts[-1][1] - 1) > 0.02:
            parts.append((size, min(1.0, part)))
    return tuple(parts)


def _digits(value: float) -> float:
    """Three digits: measurements support no more."""
    return float(f"{value:.3g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One collective, predicted and measured. `axis` names the levels that it spans, or its ranks; `fitted` says
    whether the axis is exactly one level."""

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


def check(measured: Measurements, cluster: Cluster) -> list[Prediction]:
    """Predicted beside measured seconds, with all groups of an axis at once.

    Raises ValueError if the cluster has other levels.
    """
    if tuple(level.size for level in cluster.levels) != measured.levels:
        theirs, ours = (" x ".join(map(str, sizes)) for sizes in ([v.size for v in cluster.levels], measured.levels))
        raise ValueError(f"cluster {cluster.name} is {theirs}, and {ours} was measured: give the same --levels")
    rows = []
    fitted = level_axes(measured.levels)
    for sample in measured.samples:
        if not sample.alone:
            ranks, stride = sample.axis
            link = cluster.links((math.prod(measured.levels) // (ranks * stride), ranks, stride))[1]
            rows.append(
                Prediction(
                    kind=sample.kind,
                    axis=_axis_name(cluster, ranks, stride),
                    fitted=sample.axis in fitted,
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
    rows = []
    for dtype, m, k, n, seconds in measured.compute.matmuls:
        kind = getattr(torch, dtype)
        moved = device.moving_seconds((m * k + k * n + m * n) * kind.itemsize)
        predicted = measured.compute.seconds_per_op + max(device.compute_seconds(2.0 * m * k * n, kind), moved)
        rows.append((dtype, f"{m} x {k} x {n}", predicted, seconds))
    return rows
