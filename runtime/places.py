"""Places: where a module's parameters lie, and what this rank holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.distributed import make_dtensor, mesh_of_some
from autopar.compat.stages import StageTensor
from autopar.ir.layout import Layout, Replicate, Shape, valid_shape

from .placements import contiguous_stride, local_slice, placements_of, unpadded


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

    def dtensor(self, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
        """The DTensor of which this rank holds `local`. Nothing is communicated."""
        size = torch.Size(shape)
        return make_dtensor(local, self.mesh, self.placements(tuple(size)), size, contiguous_stride(tuple(size)))


def device_meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, ...]:
    """The meshes of the ranks of each stage of a pipeline: those with the same coordinate on the first axis. On a mesh
    of stages alone, each is one rank."""
    return tuple(mesh_of_some(mesh, number, StageTensor) for number in range(mesh.shape[0]))


def within_stage(layout: Layout) -> Layout:
    """A layout of a mesh whose first axis are stages, on the mesh of one of them."""
    return layout[1:] or (Replicate(),)
