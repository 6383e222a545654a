"""The norm of split gradients, and clipping by it: of each gradient, ranks exchange the norm of what they hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.compat.distributed import whole_mesh
from autopar.compat.redistributing import redistributed

from .agreement import device_of, shared_axes
from .collectives import all_gather, wait
from .failures import watched
from .places import local_part


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for the parameters of a parallel module: scales gradients in place, so that
    their norm together is `max_norm` at most, and returns the norm that they had. That is the plain tensor that one
    process gets, the same on all ranks, for every order that torch takes.

    Each rank computes with what it holds, and one collective for each mesh axis carries a number for each gradient;
    torch decides and reduces for each of them. All ranks call it at once. `parameters`, `norm_type`,
    `error_if_nonfinite` and `foreach` are those of torch's function.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in given if p.grad is not None]
    order = float(norm_type)
    norms = whole_norms(gradients, order, foreach)
    norm = torch.linalg.vector_norm(torch.stack(norms), order) if norms else torch.tensor(0.0)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}, and so cannot be clipped")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    held = [*map(local_part, gradients)]
    for alike in _alike(held, foreach):
        torch._foreach_mul_([held[k] for k in alike], scale.to(held[alike[0]].device))
    return norm


def whole_norms(gradients: Sequence[torch.Tensor], order: float, foreach: bool | None = None) -> list[torch.Tensor]:
    """The norm of each gradient as one process computes it, in the dtype of the gradient. Plain ones go with the first
    mesh: they count as they are on its first rank."""
    meshes = list(dict.fromkeys(whole_mesh(g.device_mesh) for g in gradients if isinstance(g, DTensor)))
    norms = _local_norms(gradients, order, foreach)
    on = [whole_mesh(g.device_mesh) if isinstance(g, DTensor) else meshes[0] for g in gradients]
    for mesh in meshes:
        there = [k for k, other in enumerate(on) if other == mesh]
        whole = _over_mesh([gradients[k] for k in there], [norms[k] for k in there], mesh, order)
        for k, norm in zip(there, whole, strict=True):
            norms[k] = norm
    # torch has all on the device of the first
    return [n.to(gradients[0].device, g.dtype.to_real()) for n, g in zip(norms, gradients, strict=True)]


def _copies(gradient: torch.Tensor, mesh: DeviceMesh) -> tuple[bool, ...]:
    """On each axis of the mesh, whether all ranks hold the same. Stages hold nothing of one another's."""
    if not isinstance(gradient, DTensor):
        return (True,) * mesh.ndim
    copies = tuple(placement.is_replicate() or placement.is_partial() for placement in gradient.placements)
    return copies if gradient.device_mesh == mesh else (False, *copies)[: mesh.ndim]


def _local_norms(gradients: Sequence[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """The norm of what this rank holds of each. That of nothing changes no norm of norms, unless no rank has more."""
    held = [local_part(_summed(g)) for g in gradients]
    norms = [torch.full((), 0.0 if order >= 0 else math.inf, device=x.device) for x in held]
    for alike in _alike(held, foreach):
        full = [k for k in alike if held[k].numel() or not gradients[k].numel()]
        dtype = None if held[alike[0]].is_complex() else _wide(held[alike[0]])
        found = torch._foreach_norm([held[k] for k in full], order, dtype=dtype) if full else ()
        for k, norm in zip(full, found, strict=True):
            norms[k] = norm
    return norms


def _over_mesh(
    gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], mesh: DeviceMesh, order: float
) -> list[torch.Tensor]:
    """The norms of whole gradients, of those of the ranks' parts. Of copies, the first counts."""
    wide = torch.float64 if any(_wide(g) == torch.float64 for g in gradients) else torch.float32
    of_axes = [_copies(gradient, mesh) for gradient in gradients]
    whole = torch.stack([norm.to(device_of(mesh), wide) for norm in norms])
    for axis, name, group in reversed(shared_axes(mesh)):
        with watched("the exchange of the gradients' norms,", name, group):
            parts = wait(all_gather(whole, group)).view(group.size(), len(norms))
        together = torch.linalg.vector_norm(parts, order, dim=0) if order else parts.sum(0)
        copies = _flags(tuple(of[axis] for of in of_axes), whole.device)
        whole = torch.where(copies, parts[0], together)
    return list(whole)


@lru_cache(maxsize=64)
def _flags(values: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """Made once, since a host waits for a device that takes them."""
    return torch.tensor(values, device=device)


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    """One whose parts are yet to be added up, added up."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return redistributed(gradient, gradient.device_mesh, whole)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which torch computes a norm."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def _alike(tensors: Sequence[torch.Tensor], foreach: bool | None) -> list[list[int]]:
    """Indices of what one foreach operator takes: of one device and dtype, or one tensor."""
    alike: dict[object, list[int]] = {}
    for k, tensor in enumerate(tensors):
        alike.setdefault(k if foreach is False else (tensor.device, tensor.dtype), []).append(k)
    return list(alike.values())
