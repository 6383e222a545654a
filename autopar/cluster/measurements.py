"""Measurements of ranks: collectives, arithmetic, and both at once. `runtime.measure` takes them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from autopar.files import json_of, record, text_of

from .links import KINDS

RANKS_MOST = 2**20

MOST = 1e30
"""No figure is larger, nor smaller than its inverse, so that their products are numbers."""

Axis = TypeVar("Axis", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Case(Generic[Axis]):
    """One collective of `bytes` (the larger of input and output) on one axis, `alone` in one of its groups or in all
    at once."""

    kind: str
    axis: Axis
    bytes: int
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample(Case[tuple[int, int]]):
    """Median and quartiles of the seconds of a case. `axis` is (ranks of a group, stride)."""

    axis: tuple[int, int]
    seconds: float
    quartiles: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Seconds of matrix products alone, of one collective alone on the axis (ranks, stride), and of both started at
    once."""

    axis: tuple[int, int]
    compute_seconds: float
    collective_seconds: float
    seconds: float

    @property
    def share(self) -> float:
        """The part of the shorter that the longer did not hide."""
        alone = self.compute_seconds, self.collective_seconds
        return min(1.0, max(0.0, (self.seconds - max(alone)) / min(alone)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A rank's arithmetic while all ranks are busy. `operators` are (op, flops, bytes read and written, seconds),
    `matmuls` (dtype, rows, features in, features out, seconds)."""

    seconds_per_op: float
    memory_bytes: float
    operators: tuple[tuple[str, float, int, float], ...]
    matmuls: tuple[tuple[str, int, int, int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """`levels` are sizes from the outermost in."""

    levels: tuple[int, ...]
    device: str
    backend: str
    rounds: int
    compute: Compute
    samples: tuple[Sample, ...]
    together: tuple[Together, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, path: str | Path) -> Measurements:
        """Raises ValueError if the file is not what `calibrate --save` wrote."""
        what, give = f"{path} is not what calibrate --save wrote", "give the path of such a file"
        try:
            return cls.from_json(json_of(text_of(path, what, give), what, give))
        except ValueError as error:
            raise error if str(error).startswith(what) else ValueError(f"{what}: {error}") from error

    @classmethod
    def from_json(cls, data: Any) -> Measurements:
        """Raises ValueError for what measuring cannot have given, or what `calibration.fit` has no use for."""
        measured = record(cls, data)
        for complaint in measured._complaints():
            raise ValueError(f"{complaint}; measure again with calibrate --save")
        return measured

    def _complaints(self) -> Iterator[str]:
        if not self.levels or min(self.levels) < 2 or math.prod(self.levels) > RANKS_MOST:
            yield f"levels are {list(self.levels)}: sizes of at least 2, of at most {RANKS_MOST} ranks together"
        if not self.rounds:
            yield "rounds are 0: at least 1"
        ranks = math.prod(self.levels)
        for n, sample in enumerate(self.samples):
            size, stride = sample.axis
            if sample.kind not in KINDS:
                yield f"samples[{n}].kind is {sample.kind!r}: one of {', '.join(KINDS)}"
            if size < 2 or stride < 1 or ranks % (size * stride):
                yield f"samples[{n}].axis is {list(sample.axis)}: ranks and stride that divide {ranks} ranks"
            yield from _not_above_0(f"samples[{n}]", bytes=sample.bytes, seconds=sample.seconds)
        there = {(sample.kind, sample.axis) for sample in self.samples if not sample.alone}
        for kind, axis in itertools.product(KINDS, level_axes(self.levels)):
            if (kind, axis) not in there:
                yield f"samples lack {kind} on the axis {list(axis)} of a level"
        for n, both in enumerate(self.together):
            alone = both.compute_seconds, both.collective_seconds
            yield from _not_above_0(
                f"together[{n}]", seconds=both.seconds, compute_seconds=alone[0], collective=alone[1]
            )
        compute = self.compute
        yield from _not_above_0("compute", memory_bytes=compute.memory_bytes)
        if not 0 <= compute.seconds_per_op <= MOST:
            yield f"compute.seconds_per_op is {compute.seconds_per_op}: a number of seconds, 0 or more"
        for n, (_, flops, moved, seconds) in enumerate(compute.operators):
            yield from _not_above_0(f"compute.operators[{n}]", bytes=moved, seconds=seconds)
            if not 0 <= flops <= MOST:
                yield f"compute.operators[{n}] has {flops} flops: a number, 0 or more"
        sizes: dict[str, int] = {}
        for op, flops, _, _ in compute.operators:
            sizes[op] = sizes.get(op, 0) + (not flops)
        if len({count for count in sizes.values() if count}) != 1:
            yield "compute.operators: those without flops must be some, at equally many sizes each"
        for n, (dtype, *shape, seconds) in enumerate(compute.matmuls):
            yield from _not_above_0(f"compute.matmuls[{n}]", least_size=min(shape), seconds=seconds)
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                yield f"compute.matmuls[{n}] is of dtype {dtype!r}: one of torch's, such as float32"
        usual = usual_dtype(self.backend)
        if usual not in {dtype for dtype, *_ in compute.matmuls}:
            yield f"compute.matmuls lack {usual}"


def usual_dtype(backend: str) -> str:
    """That in which devices that communicate by it compute, whose efficiency is the device's."""
    return "float32" if backend == "gloo" else "bfloat16"


def _not_above_0(where: str, **values: float) -> Iterator[str]:
    for name, value in values.items():
        if not 1 / MOST <= value <= MOST:
            yield f"{where} has {name.replace('_', ' ')} {value}: a number above 0, between {1 / MOST} and {MOST}"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def level_axes(levels: Sequence[int]) -> list[tuple[int, int]]:
    """(ranks, stride) of the axis that spans each level alone."""
    return [(size, math.prod(levels[number + 1 :])) for number, size in enumerate(levels)]


def axes(ranks: int) -> list[tuple[int, int]]:
    """(ranks, stride) of every axis that a mesh of this many ranks may have."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [(size, stride) for stride in divisors for size in divisors[1:] if ranks % (size * stride) == 0]
