"""Which parts of a global tensor a rank holds, as boxes: what files are read and written by."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.compat.checkpoints import Part
from autopar.compat.distributed import local_tensor
from autopar.ir.layout import Layout, Shape, Split

from .placements import held_indices, is_strided

T = TypeVar("T")


class IndexRange(NamedTuple):
    """`size` indices of a dim from `first` on, which lie at `local` in what a rank holds."""

    first: int
    size: int
    local: int

    def overlap(self, other: IndexRange) -> IndexRange:
        """Those of these indices that another run has too: none, maybe."""
        first = max(self.first, other.first)
        size = min(self.first + self.size, other.first + other.size) - first
        return IndexRange(first, max(0, size), self.local + first - self.first)


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a global tensor: those of a run of indices of each dim."""

    runs: tuple[IndexRange, ...]

    @property
    def offsets(self) -> Shape:
        return tuple(run.first for run in self.runs)

    @property
    def sizes(self) -> Shape:
        return tuple(run.size for run in self.runs)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def of(self, held: torch.Tensor) -> torch.Tensor:
        """The box as a view of what the rank holds."""
        return held[tuple(slice(run.local, run.local + run.size) for run in self.runs)]

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The box as a view of the global tensor."""
        return whole[tuple(slice(run.first, run.first + run.size) for run in self.runs)]

    def overlap(self, other: Box) -> Box:
        """Those of these elements that another box has too: none, maybe."""
        return Box(tuple(map(IndexRange.overlap, self.runs, other.runs)))

    def part(self, number: int, of: int) -> Box:
        """One of so many parts of the longest dim, which differ by an index at most."""
        dim, (first, size, local) = max(enumerate(self.runs), key=lambda run: run[1].size)
        begin, end = size * number // of, size * (number + 1) // of
        return Box(changed(self.runs, dim, IndexRange(first + begin, end - begin, local + begin)))


def changed(each: tuple[T, ...], dim: int, other: T) -> tuple[T, ...]:
    """With another size, or run, in a dim."""
    return (*each[:dim], other, *each[dim + 1 :])


@cache
def boxes(shape: Shape, layout: Layout, mesh: Shape, coordinate: Shape) -> tuple[Box, ...]:
    """What the rank at `coordinate` holds of a tensor of this shape, without padding. One box, unless an axis takes
    scattered pieces of a dim."""
    runs = [_runs(size, dim, layout, mesh, coordinate) for dim, size in enumerate(shape)]
    return tuple(map(Box, itertools.product(*runs)))


def scattered(tensor: DTensor) -> list[Part]:
    """What this rank holds of a DTensor, if that may be several boxes: where each begins, its sizes, and its values."""
    if not is_strided(tensor.placements):
        return []
    runs = []
    for dim, size in enumerate(tensor.shape):
        along = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
        indices = torch.arange(size).view([size if other == dim else 1 for other in range(tensor.ndim)])
        held = distribute_tensor(indices, tensor.device_mesh, along, src_data_rank=None).to_local()
        runs.append(_in_a_row(held.flatten()))
    return [(box.offsets, box.sizes, box.of(local_tensor(tensor))) for box in map(Box, itertools.product(*runs))]


def _runs(size: int, dim: int, layout: Layout, mesh: Shape, coordinate: Shape) -> list[IndexRange]:
    """The indices of a dim that a rank holds."""
    if not any(isinstance(p, Split) and p.dim == dim for p in layout):
        return [IndexRange(0, size, 0)] if size else []
    held = held_indices(size, dim, layout, mesh, coordinate)
    return _in_a_row(held[held >= 0])


def _in_a_row(indices: torch.Tensor) -> list[IndexRange]:
    if not len(indices):
        return []
    breaks = (torch.diff(indices) != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist(), len(indices)]
    return [IndexRange(int(indices[a]), b - a, a) for a, b in itertools.pairwise(starts)]


def is_owner(number: int, layout: Layout, mesh: Shape, coordinate: Shape) -> bool:
    """Whether this rank, among those that hold the same part of tensor `number`, is the one that writes it: another one
    for each tensor in turn."""
    copies = [(mesh[axis], coordinate[axis]) for axis, p in enumerate(layout) if not isinstance(p, Split)]
    place = 0
    for ranks, index in copies:
        place = place * ranks + index
    return place == number % math.prod(ranks for ranks, _ in copies)
