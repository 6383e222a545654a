"""DTensors that lie on the ranks of one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, Replicate

from .distributed import StageMesh, local_tensor, make_dtensor, whole_mesh
from .redistributing import full_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

READS = frozenset(
    {
        *("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__complex__"),
        *("is_nonzero", "equal", "allclose", "argmax", "argmin"),
    }
)
"""Functions and methods that are computed of whole tensors on the ranks of all stages: those whose result is a number,
and indices, whose handler in DTensor fails on a rank that has no part."""

ACROSS_STAGES = frozenset({"__get__", "__set__", "backward", "grad"})
"""What takes tensors of several stages and computes nothing of them together."""


class StageTensor(DTensor):
    """A DTensor on the mesh of one stage. Operators run on the ranks of the stage. A number that Python reads, what
    `argmax` and `argmin` give, and the whole tensor go to the ranks of all stages, which ask for it at once. Lists of
    tensors are computed stage by stage; any other operator on tensors of several stages raises a ValueError, on all
    ranks alike."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in READS:
            with torch.no_grad():
                args, kwargs = pytree.tree_map_only(DTensor, full_tensor, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                return _unscaled(func, *args, **kwargs)
            tensors = list(_dtensors((args, kwargs)))
            alone = name in ACROSS_STAGES or name.startswith("_fused_")  # which is one step on what a rank holds
            if alone or all(x.device_mesh == tensors[0].device_mesh for x in tensors):
                return staged(func(*args, **kwargs))
            if name.startswith("_foreach_"):
                return staged(_by_mesh(func, args, kwargs))
        places = ", ".join(dict.fromkeys(_place(x) for x in tensors))
        raise ValueError(
            f"{name} is given tensors of several stages of a pipeline, each of which lies on the ranks of its stage: "
            f"{places}. Give full_tensor() of each, on all ranks at once; for the norm of gradients call "
            f"autopar.clip_grad_norm_, and compute a penalty on parameters in forward or in loss_fn="
        )

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on the ranks of all stages."""
        return full_tensor(self)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """On the mesh of its stage; replicated, it lies on that of all stages."""
        within = device_mesh is None or device_mesh == self.device_mesh
        if within and placements is not None and all(placement.is_replicate() for placement in placements):
            mesh = self.device_mesh
            assert isinstance(mesh, StageMesh)
            return DTensor.from_local(full_tensor(self), mesh.whole, [Replicate()] * mesh.whole.ndim, run_check=False)
        made: DTensor = staged(super().redistribute(device_mesh, placements, **options))
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        held = "nothing" if self.device_mesh.get_coordinate() is None else local_tensor(self)
        return f"StageTensor({_place(self)}, {self.dtype}, placed {list(self.placements)}; this rank holds {held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """As that of a DTensor, which its copy has to be while it is made."""
        self.__class__ = DTensor  # type: ignore[assignment]
        try:
            copied: DTensor = DTensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
        finally:
            self.__class__ = StageTensor
        return staged(copied)  # type: ignore[no-any-return]


torch.serialization.add_safe_globals([StageTensor, StageMesh])  # as DTensor and DeviceMesh are


def staged(result: Any) -> Any:
    """What an operator returned, in which DTensors of a stage are `StageTensor`s. autograd knows them as before."""
    if type(result) is DTensor:
        if isinstance(result.device_mesh, StageMesh):
            result.__class__ = StageTensor
    elif isinstance(result, list | tuple):
        for each in result:
            staged(each)
    return result


def _dtensors(values: Any) -> Iterator[DTensor]:
    if isinstance(values, DTensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _dtensors(value)
    elif isinstance(values, dict):
        yield from _dtensors(list(values.values()))


def _place(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    return f"{list(tensor.shape)} on {f'stage {mesh.number}' if isinstance(mesh, StageMesh) else mesh}"


def _by_mesh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists of equal lengths, called once for the tensors of each mesh."""
    first = args[0] if args else kwargs["self"]
    groups: dict[DeviceMesh | None, list[int]] = {}
    for k, tensor in enumerate(first):
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(k)
    results: list[Any] = [None] * len(first)

    def some(value: Any, where: list[int]) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == len(first)
        return [value[k] for k in where] if is_list else value

    for where in groups.values():
        found = func(*(some(x, where) for x in args), **{name: some(x, where) for name, x in kwargs.items()})
        for k, value in zip(where, found or (), strict=found is not None):
            results[k] = value
    return None if found is None else tuple(results)


def _unscaled(func: Any, gradients: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
    """The step of a `GradScaler` on what this rank holds, and whether any rank found an infinity."""
    func([local_tensor(g) if isinstance(g, DTensor) else g for g in gradients], found, scale)
    whole = whole_mesh(next(g.device_mesh for g in gradients if isinstance(g, DTensor)))
    for axis in range(whole.ndim):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=whole.get_group(axis))


@cache
def whole_states_in_stages() -> None:
    """Have `torch.distributed.checkpoint` set what whole state_dicts hold (`full_state_dict`, `broadcast_from_rank0`)
    on the ranks of a tensor's stage alone, in all of the process: it asks the others for their part, too."""
    from torch.distributed import _state_dict_utils
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    utils: Any = _state_dict_utils
    distribute_one, distribute_all = utils.distribute_tensor, utils._distribute_tensors

    def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *options: Any) -> DTensor:
        if not isinstance(mesh, StageMesh):
            made: DTensor = distribute_one(whole, mesh, placements, *options)
            return made
        local = whole.new_empty(0)
        if mesh.get_coordinate() is not None:
            sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
            local = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            local = local.clone(memory_format=torch.contiguous_format)
        return make_dtensor(local, mesh, placements, whole.shape, whole.stride())

    def distributed_each(states: dict[str, Any], keys: Sequence[str], *options: Any) -> None:
        for key in keys:
            if isinstance(pair := states.get(key), tuple) and isinstance(pair[0], StageTensor):
                present, whole = pair
                states[key] = distributed(whole, present.device_mesh, present.placements)
        distribute_all(states, keys, *options)

    utils.distribute_tensor, utils._distribute_tensors = distributed, distributed_each
