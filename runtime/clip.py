"""The norm of split gradients, and clipping by it: local norms, and one number that travels."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.compat import full_tensor, local_tensor

from .agree import axis_name, coordinate_of, device_of, process_groups, watched


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for the parameters of a parallel module: scales gradients in place, so that
    their norm together is `max_norm` at most, and returns the norm that they had, a plain tensor, equal on all ranks.

    Each rank computes with what it holds, and one number is reduced over the mesh, however many gradients there are;
    torch decides and reduces for each of them. All ranks call it at once.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in given if p.grad is not None]
    split = [g for g in gradients if isinstance(g, DTensor)]
    meshes = {g.device_mesh for g in split}
    if len(meshes) != 1 or any(isinstance(p, Partial) for g in split for p in g.placements):
        norm = torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite)
        return full_tensor(norm) if isinstance(norm, DTensor) else norm
    norm = total_norm(gradients, meshes.pop(), float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}, and so cannot be clipped")
    held = [local_tensor(g) if isinstance(g, DTensor) else g for g in gradients]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for same in _by_device(held):
            torch._foreach_mul_(same, scale.to(same[0].device))
    return norm


def total_norm(gradients: Iterable[torch.Tensor], mesh: DeviceMesh, order: float) -> torch.Tensor:
    """Of gradients on one mesh, together. What several ranks hold counts on the first of them."""
    coordinate = coordinate_of(mesh)
    own = []
    with torch.no_grad():
        for gradient in gradients:
            if isinstance(gradient, DTensor):
                kept = zip(gradient.placements, coordinate, strict=True)
                if any(isinstance(placement, Replicate) and index for placement, index in kept):
                    continue
                gradient = local_tensor(gradient)
            elif any(coordinate):
                continue
            if gradient.numel():
                own.append(gradient)
        norms = [norm for same in _by_device(own) for norm in torch._foreach_norm(same, order)]
        device = device_of(mesh)
        if norms:
            norm = torch.linalg.vector_norm(torch.stack([n.to(device, torch.float32) for n in norms]), order)
        else:
            norm = torch.zeros((), device=device)
        return _over_mesh(norm, mesh, order)


def _over_mesh(norm: torch.Tensor, mesh: DeviceMesh, order: float) -> torch.Tensor:
    """The norm of the norms of all ranks."""
    largest = math.isinf(order)
    total = norm if largest else norm.pow(order)
    kind = (dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN) if largest else dist.ReduceOp.SUM
    for axis, group in enumerate(process_groups(mesh)):
        if group is not None:
            with watched("the reduction of the gradients' norm,", axis_name(mesh, axis), group):
                dist.all_reduce(total, op=kind, group=group)
    return total if largest else total.pow(1.0 / order)


def _by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What one foreach operator takes."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(alike.values())
