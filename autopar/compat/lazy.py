"""DTensors whose local tensor is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

from .distributed import _spec

Computation = Callable[[torch.Tensor | None], torch.Tensor]
"""What this rank holds, from what it held before; None if that is nothing."""

_LOCAL: Any = vars(DTensor)["_local_tensor"]


class LazyDTensor(DTensor):
    """A DTensor whose local tensor is computed when it is first read, and which is a plain DTensor from then on. Its
    shape, dtype and placements are there at once; every operator, optimizer and method reads the local tensor."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        attributes = vars(self)
        computation, held = attributes.pop("_computation"), attributes.pop("_held")
        local: torch.Tensor = computation(held)
        _LOCAL.__set__(self, local)
        self.__class__ = DTensor  # type: ignore[assignment]
        return local

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        _LOCAL.__set__(self, local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        assert self._local_tensor is not None  # it is read
        return self.__reduce_ex__(protocol)


def later(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    local: torch.Tensor,
    computation: Computation,
) -> DTensor:
    """A DTensor of which this rank will hold a tensor like `local`."""
    nothing = local.new_empty(()).expand(local.shape)
    made = LazyDTensor(nothing, _spec(mesh, tuple(placements), shape, stride, local.dtype), requires_grad=False)  # type: ignore
    vars(made).update(_computation=computation, _held=None)
    return made


def postpone(dtensor: DTensor, computation: Computation) -> None:
    """Have a DTensor's local tensor computed of the present one when it is read next."""
    vars(dtensor).update(_computation=computation, _held=dtensor._local_tensor)
    dtensor.__class__ = LazyDTensor


def computation_of(tensor: torch.Tensor | None) -> Computation | None:
    """What a tensor waits for; None if it waits for nothing."""
    computation: Computation | None = vars(tensor)["_computation"] if type(tensor) is LazyDTensor else None
    return computation
