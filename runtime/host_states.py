"""Optimizers whose states wait in the host's memory between steps (`optimizer="adamw_on_host"` of a plan)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.ops.host import Copy, from_host, to_host

from .places import local_part
from .sharded_optimizers import forget, like


def states_on_host(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same `optimizer`, whose states lie in pinned memory of the host, and on the device while it takes a step.

    All that has dims is moved, whatever the optimizer is, and is another tensor afterwards. `state_dict()` brings it to
    the device, where it stays until the next step ends. Each step waits for two copies of what the rank has of states;
    a plan with the optimizer `adamw_on_host` or `adamw_fp32_on_host` counts them. Raises ValueError for what is no
    optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"states_on_host is given {optimizer!r} ({type(optimizer).__name__}): give a torch.optim.Optimizer"
        )
    optimizer.register_step_pre_hook(lambda optimizer, *_: _moved(optimizer, from_host))
    optimizer.register_step_post_hook(lambda optimizer, *_: _moved(optimizer, to_host))
    optimizer.register_state_dict_pre_hook(lambda optimizer: _moved(optimizer, from_host))
    return optimizer


def _moved(optimizer: torch.optim.Optimizer, start: Callable[[torch.Tensor], tuple[torch.Tensor, Copy]]) -> None:
    """Has a copy in the place of each state."""
    forget(optimizer)
    copies: list[tuple[dict[str, Any], str, torch.Tensor, Copy]] = []
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            held = local_part(value) if isinstance(value, torch.Tensor) else None
            if held is not None and held.dim() and (held.device == parameter.device) == (start is to_host):
                copies.append((values, name, *start(held)))
    for values, name, copied, copy in copies:
        copy.finish()
        value = values[name]
        values[name] = like(value, copied) if isinstance(value, DTensor) else copied
