"""Optimizers on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from .distributed import local_tensor
from .redistributing import redistributed

FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Steps of optimizers as one operator on lists: parameters, their gradients, and states of each."""


def fused_steps_on_shards() -> None:
    """Run a fused step of an optimizer at once on what this rank holds of its DTensors, in all of the process.

    A step is element by element, and parameter, gradient and states are placed alike: nothing is to be decided. torch
    derives the placements of every tensor anew in every step, and has no rule for those of SGD and Adagrad.
    """
    from torch.distributed.tensor import DTensor

    handlers: MutableMapping[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for name in FUSED:
        for overload in ("default", "tensor_lr"):
            handlers.setdefault(getattr(getattr(torch.ops.aten, name), overload), _on_shards)


def _on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The step on local tensors. Gradients that are placed as their parameters are not, such as partial sums, are
    redistributed. Numbers, as of steps, are the same on every rank."""
    from torch.distributed.tensor import DTensor

    def placed(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            return gradient
        if gradient.placements == parameter.placements:
            return gradient
        return redistributed(gradient, parameter.device_mesh, parameter.placements)

    parameters, gradients, *states = args
    lists = [parameters, list(map(placed, gradients, parameters)), *states]
    local = [[local_tensor(x) if isinstance(x, DTensor) else x for x in values] for values in lists]
    held = [x.shape for x in local[0]]
    for values in local[1:]:
        for shape, x in zip(held, values, strict=bool(values)):
            if x.shape != shape and x.dim():
                raise RuntimeError(
                    f"this rank holds {list(shape)} of a parameter that a fused optimizer got, and a gradient or "
                    f"state of {list(x.shape)}: place them alike, as DTensors on one mesh"
                )
    named = {name: local_tensor(x) if isinstance(x, DTensor) else x for name, x in kwargs.items()}
    op(*local, **named)
    torch.autograd.graph.increment_version([p for p in parameters if isinstance(p, DTensor)])  # they do not learn it


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer's class without the hooks that torch wraps around it once it has made one: a subclass
    gets its own."""
    step = kind.step
    bare: Callable[[torch.optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore
    return bare


def orthogonalized(update: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """A matrix as Muon's iteration leaves it, in bfloat16; `group` has the iteration's options. Writes `update`."""
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])


def muon_rate(rate: float, adjusts: str | None, shape: torch.Size) -> float:
    """Muon's learning rate for a matrix of this shape."""
    from torch.optim import _muon

    return float(_muon._adjust_lr(rate, adjusts, shape))
