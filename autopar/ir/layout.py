"""Who holds which elements of a tensor: placements per mesh axis, and how they travel through views.

A `Split(dim, period)` over an axis of n ranks gives index i of the dim to rank
(i mod period) // (period / n). Contiguous shards are the case period = size. A flattened [b*s, h]
split by sequence has period s, a fused [h, 3h] qkv weight split by heads has period h. In other
words an axis owns one digit, [period / n, period), of the mixed-radix index of one dim; axes that
split the same dim own disjoint digits, so the order in which they were split is part of the layout
and every axis can be changed without looking at the others. A rank holds its elements in ascending
order.

A dim that an axis does not divide is padded: its outermost split may have a period above the size, every
rank then holds period / n elements, and those beyond the end are padding. Padding stands last in what a rank
holds, and its content means nothing (`ops.emit` fills it where an op would see it). So all ranks have the
same local shapes and run the same program, however few rows there are.

A `Layout` is a tuple with one placement for each mesh axis. All periods are global. Placements are
named tuples, since planning hashes them millions of times.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import torch

from autopar.compat.tensors import unmodified

from .graph import TensorMeta

Shape = tuple[int, ...]


class Split(NamedTuple):
    """Along one mesh axis, `dim` is cut: index i belongs to rank (i mod period) // (period / n)."""

    dim: int
    period: int

    def __str__(self) -> str:
        return f"S({self.dim}%{self.period})"


class Replicate(NamedTuple):
    """Every rank of the axis holds all of the tensor."""

    def __str__(self) -> str:
        return "R"


class Partial(NamedTuple):
    """The value is the reduction ("sum", "max", "min") of what the ranks of the axis hold."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


class Routed(NamedTuple):
    """Along one mesh axis, the indices that `Split(dim, period)` would give to the ranks of a group are held
    by those ranks, but by others: each lies with the expert that its row wants. Which they are, and how many
    a rank has, turns out at run time; shapes assume that the fullest rank has `imbalance` times the mean."""

    dim: int
    period: int
    imbalance: float = 1.0

    def __str__(self) -> str:
        more = "" if self.imbalance == 1.0 else f"*{self.imbalance!r}"
        return f"X({self.dim}%{self.period}){more}"


Placement = Split | Replicate | Partial | Routed
Layout = tuple[Placement, ...]

REPLICATE = Replicate()
PARTIAL = Partial()


def describe(layout: Layout, axes: Sequence[str] | None = None) -> str:
    """ "dp:S(0%512) tp:R" """
    if axes is None:
        return " ".join(map(str, layout))
    return " ".join(f"{axis}:{placement}" for axis, placement in zip(axes, layout, strict=True))


@cache
def period_of(size: int, ranks: int) -> int:
    """The period of a contiguous split of a dim of this size: the size, or the next multiple of `ranks`."""
    return -(-size // ranks) * ranks


@cache
def periods_of(size: int, ranks: int, mesh: Shape) -> tuple[int, ...]:
    """The periods to consider for a contiguous split over `ranks`, an axis of the mesh: as even as can be, or,
    where that costs next to nothing, such that the other axes can split further what a rank holds."""
    own, joint = period_of(size, ranks), period_of(size, math.prod(mesh))
    if joint > own + own // 20:
        return (own,)
    return (joint,) if own > size else tuple(dict.fromkeys((own, joint)))


@cache
def padded_shape(shape: Shape, layout: Layout) -> Shape:
    """The shape with every unevenly split dim as long as the ranks' shares together."""
    padded = list(shape)
    for placement in layout:
        if isinstance(placement, Split):
            padded[placement.dim] = max(padded[placement.dim], placement.period)
    return tuple(padded)


@cache
def is_legal(shape: Shape, layout: Layout, mesh: Shape) -> bool:
    """Whether no two axes claim the same digit of a dim, and every split is even, or the outermost one of
    its dim and more than one rank's share."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split | Routed):
            period = placement.period
            if period <= 0 or period % ranks:
                return False
            spans.setdefault(placement.dim, []).append((period // ranks, period))
    for dim, digits in spans.items():
        digits.sort()
        size, (stride, outermost) = shape[dim], digits[-1]
        if outermost > size:
            if stride >= size:
                return False
        elif size % outermost:
            return False
        for (_, below), (above, _) in pairwise(digits):
            # the inner digit's period must divide the outer digit's stride, or they interleave
            if above % below:
                return False
    # padding would go where experts take it for rows
    return not is_routed(layout) or is_even(shape, settled(layout))


def is_even(shape: Shape, layout: Layout) -> bool:
    """Whether no rank holds padding."""
    return padded_shape(shape, layout) == shape


@cache
def local_shape(shape: Shape, layout: Layout, mesh: Shape) -> Shape:
    """Shape of what one rank holds, padding included; of routed rows, the fullest rank."""
    local = list(padded_shape(shape, layout))
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split):
            local[placement.dim] //= ranks
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Routed):
            rows = local[placement.dim]
            local[placement.dim] = min(rows, math.ceil(round(rows // ranks * placement.imbalance, 6)))
    return tuple(local)


def local_meta(meta: TensorMeta, layout: Layout, mesh: Shape) -> TensorMeta:
    """What one rank holds of a tensor, padding included."""
    return TensorMeta(local_shape(meta.shape, layout, mesh), meta.dtype)


def digits_of(layout: Layout, dim: int, ranks: Callable[[int], int]) -> list[tuple[int, int]]:
    """(stride, axis) of each axis that splits a dim, outermost first: the axis owns the digit
    [stride, stride * ranks(axis))."""
    split = ((axis, p) for axis, p in enumerate(layout) if isinstance(p, Split) and p.dim == dim)
    return sorted(((p.period // ranks(axis), axis) for axis, p in split), reverse=True)


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
        if isinstance(placement, Split | Routed):
            key = (placement.dim, placement.period)
            used = taken.get(key, 1)
            taken[key] = used * ranks
            resolved.append(placement._replace(period=placement.period // used if placement.period % used == 0 else -1))
        else:
            resolved.append(placement)
    return tuple(resolved)


def reshape_split(source: Shape, target: Shape, split: Split, ranks: int) -> Split | None:
    """The split of `target` that a split of `source` becomes when the tensor is viewed, row-major, as `target`.

    Returns None where the digit of the split straddles dims of `target` (CFP Table 1: a reshape
    maps indices by floor and modulo, and a split survives if these keep its digit in one piece).
    """
    if 0 in source:
        return None  # no element has a place
    inner = math.prod(source[split.dim + 1 :])
    stride, period = split.period // ranks * inner, split.period * inner
    end = source[split.dim] * inner
    below = 1
    for dim in range(len(target) - 1, -1, -1):
        above = below * target[dim]
        if stride >= below and target[dim] > 1 and (period <= above or end == above):
            if stride % below or (above % period and end != above):
                return None
            return Split(dim, period // below)
        below = above
    return None


def reshape_layout(source: Shape, target: Shape, layout: Layout, mesh: Shape) -> Layout | None:
    """The layout of a row-major view of a tensor, or None if it has none."""
    for placement, ranks in zip(layout, mesh, strict=True):
        if isinstance(placement, Split) and placement.period > source[placement.dim]:
            # the view of the padded tensor: both dims are longer
            split = reshape_split(source, target, placement, ranks)
            if split is None or split.period <= target[split.dim]:
                return None
            source = _with(source, placement.dim, placement.period)
            target = _with(target, split.dim, split.period)

    def function(split: Split, ranks: int) -> Split | None:
        return reshape_split(source, target, split, ranks)

    mapped = _map_splits(layout, mesh, function)
    for before, after in zip(layout, mapped or (), strict=False):
        if isinstance(before, Routed) and isinstance(after, Routed) and source[before.dim] != target[after.dim]:
            return None  # rows come in any number: a dim of them is not cut, nor joined to another
    return mapped


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


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
        elif isinstance(placement, Routed):
            split = function(Split(placement.dim, placement.period), ranks)
            if split is None or split.period != placement.period:
                return None
            mapped.append(placement._replace(dim=split.dim))
        else:
            mapped.append(placement)
    return tuple(mapped)


def is_routed(layout: Layout) -> bool:
    """Whether the run decides what a rank holds."""
    return any(isinstance(placement, Routed) for placement in layout)


def settled(layout: Layout) -> Layout:
    """The layout that the rows had before they went to their experts."""
    return tuple(Split(p.dim, p.period) if isinstance(p, Routed) else p for p in layout)


@cache
def valid_shape(shape: Shape, layout: Layout, mesh: Shape, coordinate: Shape) -> Shape:
    """The shape of what the rank at `coordinate` holds, without padding."""
    return tuple(_valid(size, dim, layout, mesh, coordinate) for dim, size in enumerate(shape))


def _valid(size: int, dim: int, layout: Layout, mesh: Shape, coordinate: Shape) -> int:
    """How many of the first `size` indices of a dim a rank holds: digit by digit, the outermost first."""
    owned = digits_of(layout, dim, lambda axis: mesh[axis])
    digits = [(stride, mesh[axis], coordinate[axis]) for stride, axis in owned if mesh[axis] > 1]
    count, rest = 0, size
    for number, (stride, ranks, index) in enumerate(digits):
        inner = stride // math.prod(ranks for _, ranks, _ in digits[number + 1 :])
        periods, rest = divmod(rest, stride * ranks)
        blocks, rest = divmod(rest, stride)
        count += (periods + (index < blocks)) * inner
        if index != blocks:
            return count
    return count + rest


@cache
def is_chunked(shape: Shape, layout: Layout, mesh: Shape) -> bool:
    """Whether every rank holds what `torch.chunk`, axis after axis in mesh order, gives it: what DTensor
    takes uneven shards to be. True for even layouts."""
    if is_even(shape, layout):
        return True
    padded = padded_shape(shape, layout)
    if not all(_is_outermost_left(padded, layout, mesh, axis) for axis in range(len(mesh))):
        return False
    return all(_is_chunked(size, dim, layout, mesh) for dim, size in enumerate(shape) if padded[dim] != size)


def _is_chunked(size: int, dim: int, layout: Layout, mesh: Shape) -> bool:
    splits = [axis for axis, p in enumerate(layout) if isinstance(p, Split) and p.dim == dim]
    coordinate = [0] * len(mesh)
    for indices in product(*(range(mesh[axis]) for axis in splits)):
        left = size
        for axis, index in zip(splits, indices, strict=True):
            each = -(-left // mesh[axis])
            left = min(each, max(0, left - index * each))
            coordinate[axis] = index
        if left != _valid(size, dim, layout, mesh, tuple(coordinate)):
            return False
    return True


def _is_outermost_left(padded: Shape, layout: Layout, mesh: Shape, axis: int) -> bool:
    """Whether an axis cuts the outermost digit of what axes before it left."""
    split = layout[axis]
    if not isinstance(split, Split):
        return True
    left = padded[split.dim]
    for placement, ranks in zip(layout[:axis], mesh, strict=False):
        if isinstance(placement, Split) and placement.dim == split.dim:
            left //= ranks
    return split.period == left


def pad(tensor: torch.Tensor, shape: Shape, value: float = 0) -> torch.Tensor:
    """The tensor with `value` behind its end, up to this shape."""
    if tuple(tensor.shape) == shape:
        return tensor
    behind = [padding for have, want in zip(tensor.shape, shape, strict=True) for padding in (want - have, 0)]
    return torch.nn.functional.pad(tensor, behind[::-1], value=value)


def shard(tensor: torch.Tensor, layout: Layout, mesh: Shape, coordinate: Shape, padding: float = 0) -> torch.Tensor:
    """What the rank at `coordinate` holds of a global tensor, with `padding` behind its end. Of a Partial axis, rank 0
    holds the value; the others hold zeros for a sum, and the value too for a maximum or minimum."""
    local = pad(tensor, padded_shape(tuple(tensor.shape), layout), padding)
    shape = tuple(local.shape)
    for dim in {p.dim for p in layout if isinstance(p, Split)}:
        owned = owned_indices(shape[dim], owned_digits(layout, mesh, coordinate, dim))
        local = local.index_select(dim, owned.to(tensor.device))
    for placement, index in zip(layout, coordinate, strict=True):
        if isinstance(placement, Partial) and index != 0 and placement.reduction == "sum":
            local = torch.zeros_like(local)
    return local.contiguous()


def owned_digits(layout: Layout, mesh: Shape, coordinate: Shape, dim: int) -> tuple[tuple[int, int, int], ...]:
    """(period, ranks, rank) of every axis that splits the dim."""
    axes = zip(layout, mesh, coordinate, strict=True)
    return tuple([(p.period, ranks, index) for p, ranks, index in axes if isinstance(p, Split) and p.dim == dim])


@lru_cache(maxsize=1 << 10)
def owned_indices(size: int, digits: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """The global indices of a dim that a rank holds which has these digits of them."""
    with unmodified():
        indices = torch.arange(size)
        kept = torch.ones_like(indices, dtype=torch.bool)
        for period, ranks, index in digits:
            kept &= (indices % period) // (period // ranks) == index
        return indices[kept]
