"""Optimizers on DTensors."""

from __future__ import annotations

import inspect
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


def first_states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any] | None:
    """The states that a parameter has before its first step, as one of torch's optimizers makes them in that step; none
    where it keeps none. None where that is not known: another's optimizer, or SGD with dampening, which takes the first
    gradient as it is, and so tells a first step from one on a momentum of zero."""
    maker = next((kind for kind in type(optimizer).__mro__ if "_init_group" in vars(kind)), object)
    if not maker.__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.Adagrad):
        return None
    if maker is torch.optim.SGD:
        if group["momentum"] and group["dampening"]:
            return None
        return {"momentum_buffer": torch.zeros_like(parameter.detach())} if group["momentum"] else {}
    twin = torch.nn.Parameter(parameter.detach())
    twin.grad = parameter.detach()  # is there, and read by nobody
    lists = len(inspect.signature(maker._init_group).parameters) - 2  # type: ignore[attr-defined]
    with torch.no_grad():
        optimizer._init_group({**group, "params": [twin]}, *([] for _ in range(lists)))  # type: ignore[attr-defined]
    return dict(optimizer.state.pop(twin))


Get = Callable[[torch.nn.Module, Any, Callable[[], Any]], Any]
"""Of a model and its optimizers, what the third, which is torch's way, returns."""
Set = Callable[[torch.nn.Module, Any, Any, bool, Callable[[Any], Any]], Any]
"""Into the optimizers of a model, a state_dict, which the first rank alone may have, by torch's way with one."""
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
"""Key of a checkpoint -> shape and dtype of a tensor, None for what is no tensor."""
Read = Callable[[dict[str, Any], Shapes], dict[str, Any]]
"""Of a flat state_dict, what is to be read from a checkpoint."""


def around_checkpoints(get: Get, set_: Set, read: Read) -> None:
    """Have `torch.distributed.checkpoint` go through these functions, in all of the process: where states of optimizers
    are got (`get_optimizer_state_dict`, `get_state_dict`), where they are set, and where a checkpoint is read."""
    from torch.distributed.checkpoint import default_planner, state_dict

    states: Any = state_dict
    planner: Any = default_planner
    got, put = states._get_optim_state_dict, states._load_optim_state_dict
    planned = planner.create_default_local_load_plan

    def get_states(model: torch.nn.Module, optimizers: Any, info: Any) -> Any:
        return get(model, optimizers, lambda: got(model, optimizers, info))

    def put_states(model: torch.nn.Module, optimizers: Any, held: Any, info: Any) -> Any:
        return set_(
            model, optimizers, held, info.broadcast_from_rank0, lambda other: put(model, optimizers, other, info)
        )

    def plan(held: dict[str, Any], metadata: Any, *strict: bool) -> Any:
        stored = metadata.state_dict_metadata.items()
        tensors = {k: (tuple(m.size), m.properties.dtype) if hasattr(m, "properties") else None for k, m in stored}
        return planned(read(held, tensors), metadata, *strict)

    states._get_optim_state_dict, states._load_optim_state_dict = get_states, put_states
    planner.create_default_local_load_plan = plan
