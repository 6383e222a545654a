"""Layouts as `torch.distributed.tensor` placements, and a rank's slice of a global tensor."""

import math
from collections.abc import Sequence
from functools import cache

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
    that as they take a Shard; `torch.distributed.checkpoint` refuses it where a rank's share is not one box.
    """
    placements: list[Placement] = []
    for axis, placement in enumerate(layout):
        if isinstance(placement, Split):
            outer, _ = _digit(layout, padded_shape(shape, layout), mesh, axis)
            placements.append(Shard(placement.dim) if outer == 1 else strided_shard(placement.dim, outer))
        elif isinstance(placement, Partial):
            placements.append(TorchPartial(placement.reduction))
        else:
            placements.append(TorchReplicate())
    return tuple(placements)


@cache
def is_gatherable(layout: Layout, shape: Shape, mesh: Shape) -> bool:
    """Whether torch gathers a DTensor of these placements right. As of 2.13 it silently does not where
    several axes cut a dim and one of them, not the last, is cut in more pieces than later axes own.
    """
    if not is_chunked(shape, layout, mesh):
        return False
    for axis, placement in enumerate(layout):
        if isinstance(placement, Split):
            outer, _ = _digit(layout, padded_shape(shape, layout), mesh, axis)
            later = [
                (other.period, mesh[axis + 1 + i])
                for i, other in enumerate(layout[axis + 1 :])
                if isinstance(other, Split) and other.dim == placement.dim
            ]
            if later and outer != math.prod(ranks for period, ranks in later if period > placement.period):
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
    shape = padded_shape(tuple(tensor.shape), layout)
    tensor = pad(tensor, shape)
    for axis, placement in enumerate(layout):
        assert not isinstance(placement, Partial), "a Partial value has no slice"
        if isinstance(placement, Split):
            outer, inner = _digit(layout, shape, mesh, axis)
            dim = placement.dim
            if outer == 1:
                tensor = tensor.narrow(dim, coordinate[axis] * inner, inner)
            else:
                digits = torch.unflatten(tensor, dim, (outer, mesh[axis], inner))
                tensor = digits.select(dim + 1, coordinate[axis]).flatten(dim, dim + 1)
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


@cache
def _digit(layout: Layout, shape: Shape, mesh: Shape, axis: int) -> tuple[int, int]:
    """(outer, inner): what is left of the split dim before `axis` is cut, in mesh order, is
    outer x mesh[axis] x inner indices, and the axis takes one of the middle."""
    split = layout[axis]
    assert isinstance(split, Split)
    size, period = shape[split.dim], split.period
    for other in range(axis):
        placement = layout[other]
        if isinstance(placement, Split) and placement.dim == split.dim:
            size //= mesh[other]
            if placement.period < split.period:
                period //= mesh[other]
    return size // period, period // mesh[axis]


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
