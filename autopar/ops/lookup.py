"""One dim in which elements are addressed: its factor, and its elements at global places when it is split."""

from collections.abc import Sequence

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.layout import digits_of

from .expansions import LocalCall, local_indices
from .families import DIMS
from .rule import Call

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


def dims_of(call: Call, meta: TensorMeta) -> tuple[Sequence[str], int]:
    """Names of a tensor's dims, and which of them is the argument `dim`."""
    names = DIMS[: len(meta.shape)]
    return names, dim_of(call, len(names))


def held(emitter: Emitter, local: LocalCall, places: Ref, dim: int) -> tuple[Ref, Ref]:
    """Global indices into a dim of the first operand as local indices, and which of them belong to other ranks."""
    shape, layout = local.call.inputs[0].shape, local.operands[0]
    digits = digits_of(layout, dim, emitter.ranks)
    above = [shape[dim], *(stride for stride, _ in digits)]
    if all(stride * emitter.ranks(axis) >= size for (stride, axis), size in zip(digits, above, strict=False)):
        places, mine = local_indices(emitter, places, tuple(axis for _, axis in digits), digits[-1][0])
        return places, emitter.op("aten.logical_not.default", mine)
    mine = emitter.op("aten.ge.Scalar", places, 0)
    for stride, axis in digits:
        # each axis takes one digit of the mixed-radix index; those above and below it close the gap
        ranks = emitter.ranks(axis)
        digit = emitter.op("aten.remainder.Scalar", emitter.op("aten.floor_divide.Scalar", places, stride), ranks)
        here = emitter.op("aten.eq.Scalar", digit, emitter.coordinate(axis))
        mine = emitter.op("aten.logical_and.default", mine, here)
        higher = emitter.op("aten.floor_divide.Scalar", places, stride * ranks)
        lower = emitter.op("aten.remainder.Scalar", places, stride)
        places = emitter.op("aten.add.Tensor", emitter.op("aten.mul.Scalar", higher, stride), lower)
    return places, emitter.op("aten.logical_not.default", mine)


def along_dim(emitter: Emitter, vector: Ref, rank: int, dim: int) -> Ref:
    """A vector along one dim of a tensor of this rank."""
    return emitter.op("aten.reshape.default", vector, tuple(-1 if d == dim else 1 for d in range(rank)))


def looked_up(emitter: Emitter, local: LocalCall, source: Ref, dim: int, places: Ref) -> Ref:
    """The elements at places (a vector of global indices) along a split dim: zeros for other ranks' places."""
    shape = emitter.meta(source).shape
    row, other = held(emitter, local, places, dim)
    elements = emitter.op(
        "aten.index_select.default", source, dim, emitter.op("aten.masked_fill.Scalar", row, other, 0)
    )
    return emitter.op("aten.masked_fill.Scalar", elements, along_dim(emitter, other, len(shape), dim), 0)
