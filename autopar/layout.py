"""Who holds which elements of a tensor: placements per mesh axis, and how they travel through views.

A `Split(dim, period)` over an axis of n ranks gives index i of the dim to rank
(i mod period) // (period / n). Contiguous shards are the case period = size. A flattened [b*s, h]
split by sequence has period s, a fused [h, 3h] qkv weight split by heads has period h. In other
words an axis owns one digit, [period / n, period), of the mixed-radix index of one dim; axes that
split the same dim own disjoint digits, so the order in which they were split is part of the layout
and every axis can be changed without looking at the others. A rank holds its elements in ascending
order.

A `Layout` is a tuple with one placement for each mesh axis. All periods are global. Placements are
named tuples, since planning hashes them millions of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch

Shape = tuple[int, ...]


class Split(NamedTuple):
    """Along one mesh axis, `dim` is cut: index i belongs to rank (i mod period) // (period / n)."""

    dim: int
    period: int

    def __str__(self) -> str:
        return f"S({self.dim}%{self.period})"


class Replicate(NamedTuple):
    """Every rank of the axis holds the whole."""

    def __str__(self) -> str:
        return "R"


class Partial(NamedTuple):
    """The value is the reduction ("sum", "max", "min") of what the ranks of the axis hold."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Placement = Split | Replicate | Partial
Layout = tuple[Placement, ...]

REPLICATE = Replicate()
PARTIAL = Partial()


def describe(layout: Layout, axes: Sequence[str] | None = None) -> str:
    """ "dp:S(0%512) tp:R" """
    if axes is None:
        return " ".join(map(str, layout))
    return " ".join(f"{axis}:{placement}" for axis, placement in zip(axes, layout, strict=True))


@cache
def is_legal(shape: Shape, layout: Layout, mesh: Shape) -> bool:
    """Whether every split is even and no two axes claim the same digit of a dim."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split):
            size, period = shape[placement.dim], placement.period
            if period <= 0 or size % period or period % ranks:
                return False
            spans.setdefault(placement.dim, []).append((period // ranks, period))
    for digits in spans.values():
        digits.sort()
        for (_, below), (above, _) in pairwise(digits):
            # the inner digit's period must divide the outer digit's stride, or they interleave
            if above % below:
                return False
    return True


@cache
def local_shape(shape: Shape, layout: Layout, mesh: Shape) -> Shape:
    """Shape of what one rank holds."""
    local = list(shape)
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split):
            local[placement.dim] //= ranks
    return tuple(local)


@cache
def local_stride(layout: Layout, mesh: Shape, axis: int) -> int:
    """How many consecutive local indices of the split dim lie inside one digit of `axis`: the
    period / n of its split, without the digits that other axes took from below it."""
    split = layout[axis]
    assert isinstance(split, Split)
    stride = local = split.period // mesh[axis]
    for other, (placement, ranks) in enumerate(zip(layout, mesh, strict=True)):
        below = isinstance(placement, Split) and placement.dim == split.dim and placement.period <= stride
        if other != axis and below:
            local //= ranks
    return local


@cache
def nest(wanted: Layout, mesh: Shape) -> Layout:
    """Resolve axes that ask for the same digit: the first in mesh order takes it, the next takes
    what is left below, as DTensor does with [Shard(0), Shard(0)]."""
    taken: dict[tuple[int, int], int] = {}
    resolved: list[Placement] = []
    for placement, ranks in zip(wanted, mesh, strict=True):
        if isinstance(placement, Split):
            key = (placement.dim, placement.period)
            used = taken.get(key, 1)
            taken[key] = used * ranks
            resolved.append(Split(placement.dim, placement.period // used if placement.period % used == 0 else -1))
        else:
            resolved.append(placement)
    return tuple(resolved)


def reshape_split(source: Shape, target: Shape, split: Split, ranks: int) -> Split | None:
    """Where a split goes when a tensor of shape `source` is viewed, row-major, as `target`.

    Returns None where the digit of the split straddles dims of `target` (CFP Table 1: a reshape
    maps indices by floor and modulo, and a split survives if those keep its digit whole).
    """
    inner = math.prod(source[split.dim + 1 :])
    stride, period = split.period // ranks * inner, split.period * inner
    below = 1
    for dim in range(len(target) - 1, -1, -1):
        above = below * target[dim]
        if stride >= below and period <= above and target[dim] > 1:
            if stride % below or above % period:
                return None
            return Split(dim, period // below)
        below = above
    return None


def reshape_layout(source: Shape, target: Shape, layout: Layout, mesh: Shape) -> Layout | None:
    """The layout of a row-major view of a tensor, or None if it has none."""
    return _map_splits(layout, mesh, lambda split, ranks: reshape_split(source, target, split, ranks))


def permute_layout(order: Sequence[int], layout: Layout, mesh: Shape) -> Layout | None:
    """The layout of a tensor whose dim d is the source's dim order[d]."""
    return _map_splits(layout, mesh, lambda split, _: Split(order.index(split.dim), split.period))


def _map_splits(layout: Layout, mesh: Shape, function: Callable[[Split, int], Split | None]) -> Layout | None:
    mapped: list[Placement] = []
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split):
            split = function(placement, ranks)
            if split is None:
                return None
            mapped.append(split)
        else:
            mapped.append(placement)
    return tuple(mapped)


def shard(tensor: torch.Tensor, layout: Layout, mesh: Shape, coordinate: Shape) -> torch.Tensor:
    """What the rank at `coordinate` holds of a whole tensor. A Partial rank at coordinate 0 of its
    axis holds the value and the others hold the reduction's neutral element (for sums: zeros)."""
    local = tensor
    for axis, (placement, ranks) in enumerate(zip(layout, mesh, strict=True)):
        if isinstance(placement, Split):
            indices = torch.arange(tensor.shape[placement.dim], device=tensor.device)
            owned = (indices % placement.period) // (placement.period // ranks) == coordinate[axis]
            # an index into the whole: earlier axes of the same dim have already dropped some
            kept = _owned_before(tensor, layout, mesh, coordinate, axis, placement.dim)
            local = local.index_select(placement.dim, torch.nonzero(owned[kept]).flatten())
        elif isinstance(placement, Partial) and coordinate[axis] != 0 and placement.reduction == "sum":
            local = torch.zeros_like(local)
    return local.contiguous()


def unshard(shards: dict[Shape, torch.Tensor], shape: Shape, layout: Layout, mesh: Shape) -> torch.Tensor:
    """The whole tensor from what every rank holds: the inverse of `shard`, reducing Partials."""
    first = next(iter(shards.values()))
    reductions = {p.reduction for p in layout if isinstance(p, Partial)}
    assert len(reductions) <= 1, "mixed reductions have no single inverse"
    reduction = next(iter(reductions), "sum")
    whole = torch.zeros(shape, dtype=first.dtype, device=first.device)
    seen = torch.zeros(shape, dtype=torch.bool, device=first.device)
    for coordinate, local in shards.items():
        if any(isinstance(p, Replicate) and c for p, c in zip(layout, coordinate, strict=True)):
            continue  # replicas are equal; the first speaks for all
        empty = first.new_empty(shape)
        index = (
            torch.meshgrid(
                *(
                    torch.arange(size, device=first.device)[
                        _owned_before(empty, layout, mesh, coordinate, len(mesh), dim)
                    ]
                    for dim, size in enumerate(shape)
                ),
                indexing="ij",
            )
            if shape
            else ()
        )
        if reduction == "sum":
            whole[index] = whole[index] + local if index else whole + local
        else:
            combine = torch.maximum if reduction == "max" else torch.minimum
            whole[index] = torch.where(seen[index], combine(whole[index], local), local)
            seen[index] = True
    return whole


def _owned_before(
    tensor: torch.Tensor, layout: Layout, mesh: Shape, coordinate: Shape, axis: int, dim: int
) -> torch.Tensor:
    """Mask over the global indices of `dim` that axes before `axis` leave to this coordinate."""
    indices = torch.arange(tensor.shape[dim], device=tensor.device)
    kept = torch.ones_like(indices, dtype=torch.bool)
    for other in range(axis):
        placement = layout[other]
        if isinstance(placement, Split) and placement.dim == dim:
            kept &= (indices % placement.period) // (placement.period // mesh[other]) == coordinate[other]
    return kept
