"""Which parts of a global tensor a rank holds, as boxes: what files are read and written by."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from operator import add, sub
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.checkpoints import Part
from autopar.compat.distributed import local_tensor
from autopar.compat.redistributing import strided_shard
from autopar.ir.layout import Layout, Shape, Split

from .placements import held_indices, is_strided


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """`sizes` elements of a global tensor from `offsets` on, which lie at `local` in what the rank holds."""

    offsets: Shape
    sizes: Shape
    local: Shape

    def of(self, held: torch.Tensor) -> torch.Tensor:
        """The box as a view of what the rank holds."""
        return self._at(self.local, held)

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The box as a view of the global tensor."""
        return self._at(self.offsets, whole)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box:
        """Those of these elements that another box has too: none, maybe."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        local = map(add, self.local, map(sub, begins, self.offsets))
        return Box(offsets=begins, sizes=tuple(max(0, n) for n in map(sub, ends, begins)), local=tuple(local))

    def part(self, number: int, of: int) -> Box:
        """One of so many parts of the longest dim, which differ by an index at most."""
        size = max(self.sizes)
        dim, begin = self.sizes.index(size), size * number // of
        offsets = changed(self.offsets, dim, self.offsets[dim] + begin)
        sizes = changed(self.sizes, dim, size * (number + 1) // of - begin)
        return self.overlap(replace(self, offsets=offsets, sizes=sizes))

    def _at(self, begins: Shape, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(at, at + size) for at, size in zip(begins, self.sizes, strict=True))]


def changed(shape: Shape, dim: int, size: int) -> Shape:
    """With another size, or offset, in a dim."""
    return (*shape[:dim], size, *shape[dim + 1 :])


@cache
def boxes(shape: Shape, layout: Layout, mesh: Shape, coordinate: Shape) -> tuple[Box, ...]:
    """What the rank at `coordinate` holds of a tensor of this shape, without padding. One box, unless an axis takes
    scattered pieces of a dim."""
    return _of_runs([_runs(size, dim, layout, mesh, coordinate) for dim, size in enumerate(shape)])


def scattered(tensor: DTensor) -> list[Part]:
    """What this rank holds of a DTensor, if that may be several boxes: where each begins, its sizes, and its values."""
    if not is_strided(tensor.placements):
        return []
    runs = []
    for dim, size in enumerate(tensor.shape):
        along = [_first(p) if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
        held = distribute_tensor(torch.arange(size), tensor.device_mesh, along, src_data_rank=None).to_local()
        runs.append(_in_a_row(held))
    return [(box.offsets, box.sizes, box.of(local_tensor(tensor))) for box in _of_runs(runs)]


def _first(placement: Any) -> Placement:
    """The same, of dim 0."""
    return strided_shard(0, placement.split_factor) if is_strided([placement]) else Shard(0)


def _of_runs(runs: list[list[tuple[int, int, int]]]) -> tuple[Box, ...]:
    return tuple(
        Box(offsets=tuple(r[0] for r in each), sizes=tuple(r[1] for r in each), local=tuple(r[2] for r in each))
        for each in itertools.product(*runs)
    )


def _runs(size: int, dim: int, layout: Layout, mesh: Shape, coordinate: Shape) -> list[tuple[int, int, int]]:
    """The indices of a dim that a rank holds: (first, how many in a row, where they begin in the rank's part)."""
    if not any(isinstance(p, Split) and p.dim == dim for p in layout):
        return [(0, size, 0)] if size else []
    held = held_indices(size, dim, layout, mesh, coordinate)
    return _in_a_row(held[held >= 0])


def _in_a_row(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    if not len(indices):
        return []
    breaks = (torch.diff(indices) != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist(), len(indices)]
    return [(int(indices[a]), b - a, a) for a, b in itertools.pairwise(starts)]


def is_owner(number: int, layout: Layout, mesh: Shape, coordinate: Shape) -> bool:
    """Whether this rank, among those that hold the same part of tensor `number`, is the one that writes it: another one
    for each tensor in turn."""
    copies = [(mesh[axis], coordinate[axis]) for axis, p in enumerate(layout) if not isinstance(p, Split)]
    place = 0
    for ranks, index in copies:
        place = place * ranks + index
    return place == number % math.prod(ranks for ranks, _ in copies)
