"""PyTorch's context parallel around a model, `torch.distributed.tensor.experimental.context_parallel`, as its tutorial
calls it: each rank has two pieces of the sequence, one from either end, and keys and values come by all-gather or go
around. As of 2.13 it knows the attention kernels of CUDA alone; `with_cpu_kernel` adds the CPU's to its table, and its
ring is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

METHODS = ("allgather", "alltoall")
"""What `set_rotate_method` takes. Gradients of keys and values go around by either."""


def with_cpu_kernel() -> None:
    """Makes it run on a CPU. Without this it says "Operator aten._scaled_dot_product_flash_attention_for_cpu.default
    does not have a sharding strategy registered"."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def ring(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = 3 if op is forward else 6
        spec = args[tensors - 3]._spec
        local = [x.to_local() for x in args[:tensors]]
        dropout, causal = (*args[tensors:], *(0.0, False)[len(args) - tensors :])
        named = {"is_causal": causal, "dropout_p": dropout, "scale": kwargs.get("scale")}
        group = spec.mesh.get_group()
        if op is forward:
            made = torchs._templated_ring_attention(group, 2, op, *local, **named)
        else:
            names = ("grad_out", "query", "key", "value", "out", "logsumexp")
            operands = dict(zip(names, local, strict=True))
            made = torchs._templated_ring_attention_backward(
                group, 2, op, grad_out_name="grad_out", **operands, **named
            )
        return tuple(DTensor.from_local(x, spec.mesh, spec.placements, run_check=False) for x in made)

    torchs.custom_ops.update({forward: ring, backward: ring})


def loss_and_backward(model: nn.Module, batch: Mapping[str, torch.Tensor], mesh: DeviceMesh, method: str) -> float:
    """The mean loss of a batch of tensors [batch, sequence], of which `model` is called with this rank's part, and the
    gradients of the mean over that part."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)
    mine = {name: x.clone() for name, x in batch.items()}
    buffers = list(mine.values())
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
        output = model(**mine)
        loss = getattr(output, "loss", output)
        loss.backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=mesh.get_group())
    return float(whole) / mesh.size()
