"""Layouts as `torch.distributed.tensor` placements, and a rank's slice of a global tensor."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.redistributing import strided_shard
from autopar.ir.layout import (
    Layout,
    Partial,
    Replicate,
    Shape,
    Split,
    describe,
    is_chunked,
    is_even,
    pad,
    padded_shape,
    valid_shape,
)
from autopar.ir.program import Program


@cache
def placements_of(layout: Layout, shape: Shape, mesh: Shape) -> tuple[Placement, ...]:
    """The placements that give every rank what `layout` gives it.

    DTensor cuts axis after axis in mesh order. Where an axis owns the outermost digit of what is
    left of the dim, that is `Shard(dim)`. Where digits above it are still there, and so its share is
    every `split_factor`-th piece, it is torch's strided shard. Optimizers, clipping and `full_tensor` take
    that as they take a Shard, and so does `torch.distributed.checkpoint` once it is told of the boxes (`scattered`).
    """
    placements: list[Placement] = [
        TorchPartial(placement.reduction) if isinstance(placement, Partial) else TorchReplicate()
        for placement in layout
    ]
    for digit in _digits(layout, shape, mesh):
        is_outermost = digit.outer == 1
        placements[digit.axis] = Shard(digit.dim) if is_outermost else strided_shard(digit.dim, digit.outer)
    return tuple(placements)


@cache
def is_gatherable(layout: Layout, shape: Shape, mesh: Shape) -> bool:
    """Whether torch gathers a DTensor of these placements right. As of 2.13 it silently does not where
    several axes cut a dim and one of them, not the last, is cut in more pieces than later axes own.
    """
    if not is_chunked(shape, layout, mesh):
        return False
    digits = _digits(layout, shape, mesh)
    for number, digit in enumerate(digits):
        later = [other for other in digits[number + 1 :] if other.dim == digit.dim]
        if later and digit.outer != math.prod(mesh[other.axis] for other in later if other.period > digit.period):
            return False
    return True


@cache
def contiguous_stride(shape: Shape) -> Shape:
    """Of a tensor in row-major order."""
    return torch.empty(shape, device="meta").stride()


def is_strided(placements: Sequence[Placement]) -> bool:
    """Whether any of them is torch's strided shard."""
    return any(not isinstance(p, Shard | TorchReplicate | TorchPartial) for p in placements)


def local_slice(tensor: torch.Tensor, layout: Layout, mesh: Shape, coordinate: Shape) -> torch.Tensor:
    """What the rank at `coordinate` holds of a global tensor, contiguous. Not a copy where it need not be.

    As `autopar.layout.shard`, without index tensors. The layout has no Partial. Padding is zero.
    """
    assert not any(isinstance(placement, Partial) for placement in layout), "a Partial value has no slice"
    digits = _digits(layout, tuple(tensor.shape), mesh)
    tensor = pad(tensor, padded_shape(tuple(tensor.shape), layout))
    for axis, dim, _, outer, inner in digits:
        if outer == 1:
            tensor = tensor.narrow(dim, coordinate[axis] * inner, inner)
        else:
            parts = torch.unflatten(tensor, dim, (outer, mesh[axis], inner))
            tensor = parts.select(dim + 1, coordinate[axis]).flatten(dim, dim + 1)
    return tensor.contiguous()


def held_indices(size: int, dim: int, layout: Layout, mesh: Shape, coordinate: Shape) -> torch.Tensor:
    """The indices of a dim of this size that a rank holds, in its order; -1 for padding."""
    along = tuple(Split(0, p.period) if isinstance(p, Split) and p.dim == dim else Replicate() for p in layout)
    return local_slice(torch.arange(1, size + 1), along, mesh, coordinate) - 1  # what is padded is zero


def unpadded(local: torch.Tensor, shape: Shape, layout: Layout, mesh: Shape, coordinate: Shape) -> torch.Tensor:
    """What a rank holds without its padding, contiguous: what a DTensor's rank holds."""
    if is_even(shape, layout):
        return local
    valid = valid_shape(shape, layout, mesh, coordinate)
    return local[tuple(map(slice, valid))].contiguous()


class _Digit(NamedTuple):
    """What an axis takes of a dim that it splits: in mesh order, what is left of the dim before the axis is cut is
    outer x ranks x inner indices, and the axis takes one of the middle."""

    axis: int
    dim: int
    period: int
    outer: int
    inner: int


@cache
def _digits(layout: Layout, shape: Shape, mesh: Shape) -> tuple[_Digit, ...]:
    """Those of the axes that split, in mesh order."""
    digits: list[_Digit] = []
    padded = padded_shape(shape, layout)
    for axis, split in enumerate(layout):
        if isinstance(split, Split):
            size, period = padded[split.dim], split.period
            for other in digits:
                if other.dim == split.dim:
                    size //= mesh[other.axis]
                    if other.period < split.period:
                        period //= mesh[other.axis]
            digits.append(_Digit(axis, split.dim, split.period, size // period, period // mesh[axis]))
    return tuple(digits)


def is_replicated(layout: Layout) -> bool:
    return all(isinstance(placement, Replicate) for placement in layout)


def check_fits(program: Program, mesh: DeviceMesh) -> None:
    """Raises ValueError where the program does not fit the mesh or the module."""
    if tuple(mesh.shape) != program.mesh:
        raise ValueError(f"the plan is for a mesh of {program.mesh}, and this mesh is {tuple(mesh.shape)}")
    for i in program.inputs:
        if i.role == "parameter" and not is_gatherable(i.layout, i.meta.shape, program.mesh):
            raise _unserved("parameter", i.target, i.layout, program)
    at_rest = {i.target: i.layout for i in program.inputs if i.role == "parameter"}
    for o in program.outputs:
        if o.name is None:
            continue
        if o.role == "gradient" and (rest := at_rest.get(o.target, o.layout)) != o.layout:
            raise ValueError(
                f"the gradient of {o.target} is {describe(o.layout, program.axes)} and the parameter "
                f"{describe(rest, program.axes)} at rest: they must be equal"
            )
        if o.role == "output" and o.meta is not None and not is_gatherable(o.layout, o.meta.shape, program.mesh):
            raise _unserved("output", o.target, o.layout, program)
        if o.role in ("mutation", "update") and not is_replicated(o.layout):
            raise ValueError(
                f"{o.target} is written as {describe(o.layout, program.axes)}: what forward writes is replicated"
            )
        if any(isinstance(placement, Partial) for placement in o.layout):
            raise ValueError(
                f"{o.role} {o.target} is {describe(o.layout, program.axes)}: what leaves a program is not partial"
            )


def _unserved(role: str, target: str, layout: Layout, program: Program) -> ValueError:
    return ValueError(
        f"{role} {target} is {describe(layout, program.axes)}, which a DTensor can express and cannot gather: "
        f"let only the last mesh axis that splits a dim take scattered pieces of it"
    )
