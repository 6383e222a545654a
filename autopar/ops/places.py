"""Places along a split dim: how the dims of an indexed tensor are named, and which places a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.layout import digits_of

from .bounds import checked
from .expansions import LocalCall, local_indices
from .families import DIMS
from .rule import Call, Emitter, OpRule
from .template import assemble

PLACE = "place"
"""The factor of the dim in which places are addressed."""


def place_of(meta: TensorMeta) -> str | None:
    """The factor of a dim in which elements are looked up, unless the dtype has no sums."""
    return None if meta.dtype is torch.bool else PLACE


def with_dim(names: Sequence[str | None], dim: int, *inserted: str | None) -> list[str | None]:
    """The names with others in the place of one dim."""
    return [*names[:dim], *inserted, *names[dim + 1 :]]


def dim_of(call: Call, rank: int) -> int:
    return int(call.argument("dim")) % rank if rank else 0


def common_dims(call: Call) -> tuple[list[str | None], int]:
    """For gather and scatter: names of the dims, without those that differ in size from operand to operand (a
    1 is not broadcast), and the dim of the places. No names if a number stands for a tensor."""
    rank = len(call.inputs[0].shape)
    if any(len(meta.shape) != rank for meta in call.inputs) or not rank:
        return [], 0
    equal = [len({meta.shape[d] for meta in call.inputs}) == 1 for d in range(rank)]
    return [name if same else None for name, same in zip(DIMS, equal, strict=False)], dim_of(call, rank)


def all_whole(call: Call) -> OpRule:
    return assemble(
        call, [[None] * len(m.shape) for m in call.inputs], [[None] * len(m.shape) if m else () for m in call.outputs]
    )


def indices_of(call: Call) -> tuple[tuple[int, ...], bool, int] | None:
    """The dims that are indexed, whether they stand side by side (the dims of the indices then come in their place,
    else first), and the number of dims of the indices. None for masks, whose results have sizes that depend
    on the data."""
    places = tuple(d for d, index in enumerate(call.argument("indices")) if index is not None)
    indices = call.inputs[1 : 1 + len(places)]
    if not places or any(not meta.dtype.is_signed for meta in indices):
        return None
    return places, places[-1] - places[0] == len(places) - 1, max(len(meta.shape) for meta in indices)


def result_dims(rank: int, places: tuple[int, ...], adjacent: bool, index: Sequence[str | None]) -> list[str | None]:
    """Names of the dims of x[indices], for x with the names `DIMS`."""
    rest = [name for d, name in enumerate(DIMS[:rank]) if d not in places]
    before = places[0] if adjacent else 0
    return [*rest[:before], *index, *rest[before:]]


def place_names(rank: int, places: tuple[int, ...], allowed: bool = True) -> list[str | None]:
    return [(f"{PLACE}{d}" if allowed else None) if d in places else DIMS[d] for d in range(rank)]


def held(emitter: Emitter, local: LocalCall, places: Ref, dim: int) -> tuple[Ref, Ref]:
    """Global indices into a dim of the first operand as indices of what this rank holds of it, and which of
    them it holds."""
    shape, layout = local.call.inputs[0].shape, local.operands[0]
    digits = digits_of(layout, dim, emitter.ranks)
    above = [shape[dim], *(stride for stride, _ in digits)]
    if all(stride * emitter.ranks(axis) >= whole for (stride, axis), whole in zip(digits, above, strict=False)):
        return local_indices(emitter, places, tuple(axis for _, axis in digits), digits[-1][0])
    mine = emitter.op("aten.ge.Scalar", places, 0)
    for stride, axis in digits:
        # each axis takes one digit of the mixed-radix index, what is above and below it moves together
        ranks = emitter.ranks(axis)
        digit = emitter.op("aten.remainder.Scalar", emitter.op("aten.floor_divide.Scalar", places, stride), ranks)
        here = emitter.op("aten.eq.Scalar", digit, emitter.coordinate(axis))
        mine = emitter.op("aten.logical_and.default", mine, here)
        higher = emitter.op("aten.floor_divide.Scalar", places, stride * ranks)
        lower = emitter.op("aten.remainder.Scalar", places, stride)
        places = emitter.op("aten.add.Tensor", emitter.op("aten.mul.Scalar", higher, stride), lower)
    return places, mine


def counted_from_start(emitter: Emitter, places: Ref, size: int) -> Ref:
    """Places in [-size, size), of which -1 is the last, as places in [0, size)."""
    return emitter.op("aten.remainder.Scalar", checked(emitter, places, size, from_end=True), size)


def split_places(
    emitter: Emitter, local: LocalCall, source: Ref, outside: Callable[[int], int]
) -> tuple[list[Ref | None], list[Ref], list[int]]:
    """The indices relative to this rank's first element, with `outside(size)` for other ranks' places; where those
    are, one mask for each split dim; and the split dims."""
    indices: list[Ref | None] = list(local.args[1])
    shape = emitter.meta(source).shape
    masks, dims = [], []
    for d, index in enumerate(indices):
        if index is not None and f"{PLACE}{d}" in local.splits:
            row, mine = held(emitter, local, counted_from_start(emitter, index, local.call.inputs[0].shape[d]), d)
            other = emitter.op("aten.logical_not.default", mine)
            indices[d] = emitter.op("aten.masked_fill.Scalar", row, other, outside(shape[d]))
            masks.append(other)
            dims.append(d)
    return indices, masks, dims


def along_dim(emitter: Emitter, vector: Ref, rank: int, dim: int) -> Ref:
    """A vector along one dim of a tensor of this rank."""
    return emitter.op("aten.reshape.default", vector, tuple(-1 if d == dim else 1 for d in range(rank)))
