"""Collectives that have another name in another version of torch, and what carries them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_single(output: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start gathering `x` along dim 0 into `output`. Until 2.12 the function has another name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, x, group=group, async_op=True)
    return work


def reduce_scatter_single(
    output: torch.Tensor, x: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Start reducing `x` and scattering it along dim 0 into `output`. Until 2.12 the function has another name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(output, x, op=op, group=group, async_op=True)
    return work


def from_host_alone(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group carries tensors of this device by gloo, and it is not the host. gloo copies them where it knows
    of CUDA. Where it does not, it takes their addresses for the host's, and the process ends with SIGSEGV."""
    return device.type not in ("cpu", "meta") and group._get_backend(device).name() == "gloo"
