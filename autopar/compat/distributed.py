"""Groups of processes, and DTensors."""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def follow_world_timeout(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give a group the timeout of the world's group, unless it was made with one of its own: a mesh makes its groups
    with the default of 30 minutes (10 on NCCL), whatever `init_process_group` was told."""
    world = dist.distributed_c10d._get_default_group()
    wanted, present = _timeout(world, device), _timeout(group, device)
    default = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    if wanted is not None and present == default and present != wanted:
        dist.distributed_c10d._set_pg_timeout(wanted, group)


@contextmanager
def patient(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Within it, a group waits for the backend's default timeout at least."""
    present = _timeout(group, device)
    default = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    if present is None or present >= default:
        yield
        return
    dist.distributed_c10d._set_pg_timeout(default, group)
    try:
        yield
    finally:
        dist.distributed_c10d._set_pg_timeout(present, group)


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """That of a group's collectives on a kind of device; None if its backend does not say."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # none for that device
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """How ranks speak beside their programs: a group of gloo on the hosts, and notes in the store of the world."""

    group: dist.ProcessGroup
    prefix: str

    def write(self, name: str, text: str) -> None:
        """Leave a note, unless the store has ended with its rank."""
        try:
            dist.distributed_c10d._get_default_store().set(f"{self.prefix}/{name}", text)
        except RuntimeError:
            return

    def read(self, name: str) -> str | None:
        """The note of this name, if there is one, and the store has not ended."""
        store, key = dist.distributed_c10d._get_default_store(), f"{self.prefix}/{name}"
        try:
            return store.get(key).decode() if store.check([key]) else None
        except RuntimeError:
            return None


def control_channel(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> Channel:
    """The channel of these ranks, with the timeout of a group of the mesh. One for all meshes of the same ranks."""
    world = dist.distributed_c10d._get_default_group()
    key = (world.group_name, tuple(ranks), _timeout(like, device))
    known = _CHANNELS.get(key)
    if known is None or known.group not in dist.distributed_c10d._world.pg_map:
        group: Any = dist.new_group(list(ranks), timeout=key[-1], backend="gloo", use_local_synchronization=True)
        token = torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(time.time_ns()))
        dist.broadcast(token, group=group, group_src=0)
        known = _CHANNELS[key] = Channel(group, f"autopar/{int(token)}")
    return known


_CHANNELS: dict[Any, Channel] = {}


def keep_until_exit(group: dist.ProcessGroup) -> None:
    """Let a group outlive the interpreter. The end of a group of gloo waits for all that is under way on it, so a
    process that ends with an error would stay until the timeout of what it waits for."""
    if id(group) not in _KEPT:
        _KEPT.add(id(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_KEPT: set[int] = set()


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """What this rank holds of it, without the autograd node that `to_local()` makes."""
    return dtensor._local_tensor


class StageMesh(DeviceMesh):
    """The mesh of the ranks of one stage of a pipeline: those with coordinate `number` on the first axis of the `whole`
    mesh, whose DTensors are of this `kind`. It differs from a mesh of the same ranks that is no stage's: PyTorch caches
    what it derives of equal ones."""

    whole: DeviceMesh
    number: int
    kind: type[DTensor]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StageMesh) and super().__eq__(other))

    def __hash__(self) -> int:
        return hash((StageMesh, super().__hash__()))  # type: ignore[no-untyped-call]


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of all stages, of that of one; another is itself."""
    return mesh.whole if isinstance(mesh, StageMesh) else mesh


def mesh_of_some(mesh: DeviceMesh, number: int, kind: type[DTensor]) -> StageMesh:
    """The mesh of a stage, with the other axes; where there are none, with the first, of one rank. It has the groups of
    the whole, and none for ranks outside of it."""
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    coordinate = mesh.get_coordinate()
    if mesh.ndim > 1 and coordinate is not None and coordinate[0] == number:
        some = mesh[names[1:]]
    else:
        ranks = mesh.mesh[number] if mesh.ndim > 1 else mesh.mesh[number : number + 1]
        some = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names[1:] or names, _init_backend=False)
    some = copy.copy(some)
    some.__class__ = StageMesh
    assert isinstance(some, StageMesh)
    some.whole, some.number, some.kind = mesh, number, kind
    return some


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The DTensor of global `shape` and `stride` of which this rank holds `local`. Nothing is
    communicated and nothing is checked. It requires gradients if `local` does."""
    spec = _spec(mesh, tuple(placements), torch.Size(shape), tuple(stride), local.dtype)
    return _kind(mesh)(local.detach(), spec, requires_grad=local.requires_grad)


def dtensors_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Callable[[torch.Tensor], DTensor]:
    """`make_dtensor` for local tensors of one form that are nobody else's and require no gradients."""
    kind, spec = _kind(mesh), _spec(mesh, tuple(placements), torch.Size(shape), tuple(stride), dtype)
    return lambda local: kind(local, spec, requires_grad=False)


def _kind(mesh: DeviceMesh) -> type[DTensor]:
    if isinstance(mesh, StageMesh):
        return mesh.kind
    from torch.distributed.tensor import DTensor

    return DTensor


@cache
def _spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))
