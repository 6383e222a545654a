"""Optimizers that step on what this rank holds.

A stock optimizer works on DTensors too, and torch then derives placements anew for every operator on every parameter.
Those in `ELEMENTWISE` treat each element alone: here their own step runs on local tensors, and decides nothing. States
are DTensors between steps, so that `state_dict`, `torch.distributed.checkpoint` and schedulers see what they see of a
stock one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat import bare_step, local_tensor, make_dtensor

ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States that are one number for a parameter, not one for each of its elements."""


@cache
def on_shards(kind: type[Any]) -> type[Any]:
    """A subclass whose step runs on local tensors. Raises ValueError for an optimizer that is not known to treat each
    element alone."""
    if kind not in ELEMENTWISE:
        raise ValueError(
            f"{kind.__name__} is not known to step element by element: make it of parallel.parameters(), as of any "
            f"model's, or give one of Muon, {', '.join(each.__name__ for each in ELEMENTWISE)}"
        )
    local_step = bare_step(kind)

    class OnShards(kind):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with held_locally(self):
                local_step(self)
            return loss

    OnShards.__name__, OnShards.__qualname__ = kind.__name__, kind.__qualname__
    OnShards.__module__, OnShards.__doc__ = kind.__module__, kind.__doc__
    return OnShards


@contextmanager
def held_locally(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, the optimizer has local tensors in the place of DTensors: parameters, gradients and states."""
    twins: dict[DTensor, Twin] = vars(optimizer).setdefault("_local_twins", {})
    groups, states = optimizer.param_groups, optimizer.state
    given = [group["params"] for group in groups]
    inside: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    used: list[Twin] = []
    for group, parameters in zip(groups, given, strict=True):
        group["params"] = held = []
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                held.append(parameter)
                if parameter in states:
                    inside[parameter] = states[parameter]
                continue
            twin = twins.get(parameter)
            if twin is None:
                twin = twins[parameter] = Twin(parameter)
            if parameter.grad is not None:
                twin.held.grad = local_gradient(parameter)
            if parameter in states:
                inside[twin.held] = twin.local(states[parameter])
            held.append(twin.held)
            used.append(twin)
    amp = {name: vars(optimizer)[name] for name in ("grad_scale", "found_inf") if name in vars(optimizer)}
    vars(optimizer).update((name, x.full_tensor()) for name, x in amp.items() if isinstance(x, DTensor))
    optimizer.state = inside
    try:
        yield
    finally:
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters
        optimizer.state = states
        vars(optimizer).update(amp)
        for twin in used:
            if twin.held in inside:
                twin.give_back(states[twin.parameter], inside[twin.held])
            twin.held.grad = None


class Twin:
    """What this rank holds of a parameter, and of the states that an optimizer has for it. Both are the same from step
    to step, and are looked at only where they are not."""

    __slots__ = ("globals", "held", "inside", "locals", "parameter")

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.held = nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)
        self.inside: dict[str, Any] = {}
        self.globals: tuple[Any, ...] = ()
        """The states, and what this rank holds of each, as they were seen last."""
        self.locals: tuple[Any, ...] = ()

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank holds of states."""
        if not _are(self.globals, state):
            self.inside = {k: local_tensor(v) if isinstance(v, DTensor) else v for k, v in state.items()}
            self.globals, self.locals = tuple(state.values()), tuple(self.inside.values())
        return self.inside

    def give_back(self, state: dict[str, Any], inside: dict[str, Any]) -> None:
        """Have states after a step, as DTensors that are placed as the parameter is."""
        if inside is self.inside and _are(self.locals, inside):
            return
        for name, value in inside.items():
            present = state.get(name)
            if not (isinstance(present, DTensor) and local_tensor(present) is value):
                splits = isinstance(value, torch.Tensor) and name not in NUMBERS and value.shape == self.held.shape
                state[name] = like(self.parameter, value) if splits else value
        self.inside, self.globals, self.locals = inside, tuple(state.values()), tuple(inside.values())


def _are(seen: tuple[Any, ...], state: dict[str, Any]) -> bool:
    return len(seen) == len(state) and all(map(is_, seen, state.values()))


def local_gradient(parameter: DTensor) -> torch.Tensor:
    """That of what this rank holds. One that is placed otherwise, such as a partial sum, is redistributed."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        raise ValueError(
            f"a gradient of a split parameter of {list(parameter.shape)} is a plain tensor: give it as a DTensor"
        )
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_tensor(gradient)


def like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """What ranks hold, as a DTensor of the parameter's shape and placements."""
    return make_dtensor(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
