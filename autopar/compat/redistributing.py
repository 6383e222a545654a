"""Redistribution of DTensors, and the strided shard."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from .collectives import from_host_alone
from .distributed import StageMesh, local_tensor, make_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """`dtensor.full_tensor()`, on the host where gloo would end the process; differentiable, as that is. Over one mesh
    axis after the other: PyTorch warns where it is asked for several at once. What a stage of a pipeline holds goes to
    all other stages, too."""
    if isinstance(dtensor.device_mesh, StageMesh):
        whole: torch.Tensor = _OfStage.apply(dtensor)  # type: ignore[no-untyped-call]
        return whole
    return _gathered(dtensor)


def _gathered(dtensor: DTensor) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, Shard

    if _on_gloo(dtensor):
        return _gathered(_moved(dtensor, "cpu")).to(dtensor.device)
    placements: list[Placement] = list(dtensor.placements)
    if all(type(placement) in (Replicate, Shard) for placement in placements):
        for axis in reversed(range(len(placements))):
            if placements[axis].is_shard():
                placements[axis] = Replicate()
                dtensor = dtensor.redistribute(placements=placements)
    return dtensor.full_tensor()


class _OfStage(torch.autograd.Function):
    """Gathers what the ranks of one stage hold, and gives it to those of all. Its gradient is the same on all ranks, of
    which each takes its part."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        stage, local = dtensor.device_mesh, local_tensor(dtensor)
        assert isinstance(stage, StageMesh)
        ctx.spec, coordinate = dtensor._spec, stage.whole.get_coordinate()
        ctx.is_here = coordinate is not None and coordinate[0] == stage.number
        if ctx.is_here:
            value = _gathered(DTensor(local, dtensor._spec, requires_grad=False))  # type: ignore[no-untyped-call]
            value = value.clone(memory_format=torch.contiguous_format)
        else:
            value = local.new_empty(dtensor.shape)
        value = value.to(stage.device_type)  # an operator's result is on the host where a rank has no part of it
        dist.broadcast(value, group=stage.whole.get_group(0), group_src=stage.number)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor, Replicate

        mesh, meta = ctx.spec.mesh, ctx.spec.tensor_meta
        placements = [Replicate() if p.is_partial() else p for p in ctx.spec.placements]  # each part gets the gradient
        if not ctx.is_here:
            return make_dtensor(gradient.new_empty(0), mesh, placements, meta.shape, meta.stride)
        whole = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return redistributed(whole, mesh, placements)


def redistributed(dtensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`dtensor.redistribute(mesh, placements)`, on the host where gloo would end the process; differentiable, as that
    is. What lies on the mesh of a stage stays there."""
    from torch.distributed.tensor import DTensor

    move = (DTensor if isinstance(mesh, StageMesh) else type(dtensor)).redistribute
    if not _on_gloo(dtensor):
        return move(dtensor, mesh, placements)
    return _moved(move(_moved(dtensor, "cpu"), mesh, placements), dtensor.device)


def _moved(dtensor: DTensor, device: torch.device | str) -> DTensor:
    """With what this rank holds of it on a device; its mesh stays."""
    return cast("DTensor", dtensor.to(device))


def _on_gloo(dtensor: DTensor) -> bool:
    """Whether gloo carries an accelerator's tensors over an axis of its mesh. DTensors are gathered by the functional
    all-gather, of which gloo has one for a host's memory alone: it reads a GPU's as if it were that, and the process
    ends with SIGSEGV (pytorch issue 152645; 2.11 to 2.13). The all-gather that programs use is another."""
    mesh, device = dtensor.device_mesh, dtensor.device
    axes = () if device.type == "cpu" else [axis for axis, size in enumerate(mesh.shape) if size > 1]
    return any(from_host_alone(mesh.get_group(axis), device) for axis in axes)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A split of `dim` in `split_factor` contiguous pieces, each of them sharded over the mesh axis.

    Seen on torch 2.11 to 2.13 with gloo, for a dim that no other axis splits by `_StridedShard`: `from_local`,
    `distribute_tensor`, `full_tensor` and `redistribute` from Shard and to and from Replicate are right, beside a
    Shard of the same or another dim too; with one on each of two axes of the same dim it is not. AdamW and
    clipping by norm are right. `redistribute` to Shard is right from 2.12 on, and raises NotImplementedError before.

    Distributed checkpoints are not right by themselves: saving one alone on its dim raises ("overlapping chunks"),
    and loading into one gives wrong values silently, since a checkpoint takes the local tensor for one contiguous
    chunk. `compat.checkpoints.scattered_in_checkpoints` says what it is.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    _redistribute_undecodable()
    return _StridedShard(dim, split_factor=split_factor)


@cache
def _redistribute_undecodable() -> None:
    """Have torch 2.11 redistribute strided shards that stand for no order of mesh axes as 2.12 and 2.13 do: axis after
    axis. It raises ValueError for them, and for whatever is derived from such a DTensor, as by `detach`."""
    from torch.distributed.tensor import _dtensor_spec
    from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

    if hasattr(_dtensor_spec, "_StridedShardNotDecodableError"):  # since 2.12
        return
    spec = _dtensor_spec.DTensorSpec
    redistribution: Any = DTensorRedistributePlanner
    by_graph = redistribution.generate_graph_based_transform_infos

    def is_order(given: Any) -> bool:
        known = spec._maybe_convert_StridedShard_to_shard_order(given.placements, given.mesh)
        return known is not None or not given.use_strided_shard_as_shard_order

    def transforms(planner: Any, source: Any, target: Any, shape: tuple[int, ...]) -> Any:
        if is_order(source) and is_order(target):
            return by_graph(planner, source, target, shape)
        return planner.generate_greedy_transform_infos(source, target)

    redistribution.generate_graph_based_transform_infos = transforms


def numbers_of_shards() -> None:
    """Have Python read numbers of whole DTensors, in all of the process, which all ranks do at once: torch gives each
    rank that of its own part (`p.norm().item()`, `bool((p > 0).all())`), and has no rule for what
    `torch.autograd.set_detect_anomaly` asks of each gradient."""
    from torch.distributed.tensor import DTensor

    handlers: MutableMapping[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for read in (torch.ops.aten._is_any_true.default, torch.ops.aten._local_scalar_dense.default):
        handlers.setdefault(read, lambda op, args, kwargs: op(full_tensor(args[0])))
