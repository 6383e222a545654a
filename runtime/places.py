"""Places: where a module's parameters lie, what this rank holds of a tensor, and what all ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.distributed import local_tensor, make_dtensor, mesh_of_some
from autopar.compat.redistributing import full_tensor, redistributed
from autopar.compat.stages import StageTensor
from autopar.ir.layout import Layout, Replicate, Shape, is_chunked, valid_shape

from .placements import contiguous_stride, is_strided, local_slice, placements_of, unpadded


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, without the autograd node that `to_local()` makes; a plain tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global tensor: a DTensor is gathered from all ranks at once, and a plain tensor is one already."""
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the global tensor."""
    return whole(tensor).clone()


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """A layout on a mesh, and this rank's coordinate there: None if it holds nothing."""

    mesh: DeviceMesh
    layout: Layout
    coordinate: Shape | None

    @property
    def sizes(self) -> Shape:
        return tuple(self.mesh.shape)

    def placements(self, shape: Shape) -> tuple[Placement, ...]:
        return placements_of(self.layout, shape, self.sizes)

    def held(self, shape: Shape) -> Shape:
        """The shape of what this rank holds of a value, without padding."""
        if self.coordinate is None:
            return (0,)
        return valid_shape(shape, self.layout, self.sizes, self.coordinate)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a whole value, contiguous. Not a copy where it need not be."""
        if self.coordinate is None:
            return whole.new_empty(0)
        return self.unpadded(local_slice(whole, self.layout, self.sizes, self.coordinate), tuple(whole.shape))

    def unpadded(self, local: torch.Tensor, shape: Shape) -> torch.Tensor:
        """What this rank holds, of what its program has."""
        if self.coordinate is None:
            return local
        return unpadded(local, shape, self.layout, self.sizes, self.coordinate)

    def placed(self, value: DTensor) -> torch.Tensor:
        """What this rank holds here of a DTensor, contiguous and without padding; communicates unless it is here
        already."""
        shape = tuple(value.shape)
        wanted = self.placements(shape)
        as_in_torch = is_chunked(shape, self.layout, self.sizes)
        if value.device_mesh == self.mesh and value.placements == wanted and as_in_torch:
            return local_tensor(value).contiguous()
        if value.device_mesh != self.mesh or is_strided((*value.placements, *wanted)) or not as_in_torch:
            # torch's redistribution of strided shards is not to be relied on, beside gathering them
            return self.part(full_tensor(value))
        return local_tensor(redistributed(value, self.mesh, wanted)).contiguous()

    def form(self, shape: Shape) -> tuple[DeviceMesh, tuple[Placement, ...], torch.Size, Shape]:
        """The mesh, placements, shape and stride of a DTensor of this shape."""
        return self.mesh, self.placements(shape), torch.Size(shape), contiguous_stride(shape)

    def dtensor(self, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
        """The DTensor of which this rank holds `local`. Nothing is communicated."""
        return make_dtensor(local, *self.form(tuple(shape)))


def device_meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, ...]:
    """The meshes of the ranks of each stage of a pipeline: those with the same coordinate on the first axis. On a mesh
    of stages alone, each is one rank."""
    return tuple(mesh_of_some(mesh, number, StageTensor) for number in range(mesh.shape[0]))


def within_stage(layout: Layout) -> Layout:
    """A layout of a mesh whose first axis are stages, on the mesh of one of them."""
    return layout[1:] or (Replicate(),)
