"""Measurements of ranks: collectives, arithmetic, and both at once. `runtime.measure` takes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

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
    def from_json(cls, data: Mapping[str, Any]) -> Measurements:
        compute, samples = data["compute"], data["samples"]
        rows = {key: tuple(tuple(row) for row in compute[key]) for key in ("operators", "matmuls")}
        return cls(
            **{
                **data,
                "levels": tuple(data["levels"]),
                "compute": Compute(**{**compute, **rows}),
                "samples": tuple(
                    Sample(**{**row, "axis": tuple(row["axis"]), "quartiles": tuple(row["quartiles"])})
                    for row in samples
                ),
                "together": tuple(Together(**{**row, "axis": tuple(row["axis"])}) for row in data.get("together", ())),
            }
        )


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
