"""One dim in which elements are addressed: its factor, and its elements at global places when it is split."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import digits_of

from .expansions import LocalCall, local_indices
from .families import DIMS
from .rule import Call
from .template import Dim

PLACE = "place"
"""The factor of the dim in which places are addressed."""

PADDED = Dim(expands=True, even=False)
"""An expansion splits such a dim, unevenly too."""

PLACED: Mapping[str, Dim] = MappingProxyType({PLACE: PADDED})
"""What is said of the dims of an op that addresses places in one of them."""


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


def held(local: LocalCall, places: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Global indices into a dim of the first operand as local indices, and which of them belong to other ranks."""
    shape, layout, mesh = local.call.inputs[0].shape, local.operands[0], local.emitter.mesh
    digits = digits_of(layout, dim, mesh.__getitem__)
    above = [shape[dim], *(stride for stride, _ in digits)]
    if all(stride * mesh[axis] >= size for (stride, axis), size in zip(digits, above, strict=False)):
        places, mine = local_indices(local, places, tuple(axis for _, axis in digits), digits[-1][0])
        return places, mine.logical_not()
    mine = places >= 0
    for stride, axis in digits:
        # each axis takes one digit of the mixed-radix index; those above and below it close the gap
        digit = places // stride % mesh[axis]
        mine = torch.logical_and(mine, digit == local.coordinate(axis))
        higher, lower = places // (stride * mesh[axis]), places % stride
        places = higher * stride + lower
    return places, mine.logical_not()


def along_dim(vector: Tensor, rank: int, dim: int) -> Tensor:
    """A vector along one dim of a tensor of this rank."""
    return vector.reshape([-1 if d == dim else 1 for d in range(rank)])


def looked_up(local: LocalCall, source: Tensor, dim: int, places: Tensor) -> Tensor:
    """The elements at places (a vector of global indices) along a split dim: zeros for other ranks' places."""
    row, other = held(local, places, dim)
    elements = source.index_select(dim, row.masked_fill(other, 0))
    return elements.masked_fill(along_dim(other, source.ndim, dim), 0)
