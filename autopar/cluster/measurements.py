"""Measurements of ranks: collectives, arithmetic, and both at once. `runtime.measure` takes them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
from msgspec import Meta

from autopar.files import json_of, reading, text_of
from autopar.files.kinds import Count, Size
from autopar.files.typed import read

from .links import KINDS, Kind

RANKS_MOST = 2**20

MOST = 1e30

Figure = Annotated[float, Meta(ge=1 / MOST, le=MOST, description=f"a number above 0, between {1 / MOST} and {MOST}")]
"""No figure is larger, nor smaller than its inverse, so that their products are numbers."""

FigureOr0 = Annotated[float, Meta(ge=0, le=MOST, description="a number, 0 or more")]

Dtype = Annotated[
    str,
    Meta(
        description="a dtype of torch, such as float32",
        extra={"rule": lambda name: isinstance(getattr(torch, name, None), torch.dtype)},
    ),
]

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
class Sample(Case[tuple[Size, Size]]):
    """Median and quartiles of the seconds of a case. `axis` is (ranks of a group, stride)."""

    kind: Kind
    axis: tuple[Size, Size]
    bytes: Size
    seconds: Figure
    quartiles: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Seconds of matrix products alone, of one collective alone on the axis (ranks, stride), and of both started at
    once."""

    axis: tuple[Count, Count]
    compute_seconds: Figure
    collective_seconds: Figure
    seconds: Figure

    @property
    def share(self) -> float:
        """The part of the shorter that the longer did not hide."""
        alone = self.compute_seconds, self.collective_seconds
        return min(1.0, max(0.0, (self.seconds - max(alone)) / min(alone)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A rank's arithmetic while all ranks are busy. `operators` are (op, flops, bytes read and written, seconds),
    `matmuls` (dtype, rows, features in, features out, seconds). `seconds_per_op` is the fixed cost of an operator that
    runs again and again, as these do, and `seconds_per_op_apart` that of one behind a large one, as in a program, which
    found nothing of its code in caches (0: not measured)."""

    seconds_per_op: FigureOr0
    seconds_per_op_apart: FigureOr0 = 0.0
    memory_bytes: Figure
    operators: tuple[tuple[str, FigureOr0, Size, Figure], ...]
    matmuls: tuple[tuple[Dtype, Size, Size, Size, Figure], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """`levels` are sizes from the outermost in."""

    levels: Annotated[
        tuple[Annotated[int, Meta(ge=2)], ...], Meta(min_length=1, description="a list of sizes of 2 or more")
    ]
    device: str
    backend: str
    rounds: Size
    compute: Compute
    samples: tuple[Sample, ...]
    together: tuple[Together, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, path: str | Path) -> Measurements:
        """Raises ValueError if the file is not what `calibrate --save` wrote."""
        with reading(f"{path} is not what calibrate --save wrote", "give the path of such a file"):
            return read(cls, json_of(text_of(path)))

    @classmethod
    def from_json(cls, data: Any) -> Measurements:
        """Raises ValueError for what measuring cannot have given, or what `calibration.fit` has no use for."""
        with reading("the measurements", "measure again with calibrate --save"):
            return read(cls, data)

    def __post_init__(self) -> None:
        """Raises ValueError for what types do not say."""
        ranks = math.prod(self.levels)
        if ranks > RANKS_MOST:
            raise ValueError(f"levels are {list(self.levels)}: sizes of at most {RANKS_MOST} ranks together")
        for n, sample in enumerate(self.samples):
            size, stride = sample.axis
            if size < 2 or ranks % (size * stride):
                raise ValueError(
                    f"samples[{n}].axis is {list(sample.axis)}: ranks and stride that divide {ranks} ranks"
                )
        there = {(sample.kind, sample.axis) for sample in self.samples if not sample.alone}
        for kind, axis in itertools.product(KINDS, level_axes(self.levels)):
            if (kind, axis) not in there:
                raise ValueError(f"samples lack {kind} on the axis {list(axis)} of a level")
        sizes: dict[str, int] = {}
        for op, flops, _, _ in self.compute.operators:
            sizes[op] = sizes.get(op, 0) + (not flops)
        if len({count for count in sizes.values() if count}) != 1:
            raise ValueError("compute.operators: those without flops must be some, at equally many sizes each")
        usual = usual_dtype(self.backend)
        if usual not in {dtype for dtype, *_ in self.compute.matmuls}:
            raise ValueError(f"compute.matmuls lack {usual}")


def usual_dtype(backend: str) -> str:
    """That in which devices that communicate by it compute, whose efficiency is the device's."""
    return "float32" if backend == "gloo" else "bfloat16"


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
