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

from autopar.compat.distributed import local_tensor, make_dtensor
from autopar.compat.optimizing import bare_step
from autopar.compat.redistributing import full_tensor, redistributed
from autopar.extensions import Plug, Table

from .places import local_part

ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip

OPTIMIZERS = Table("optimizer", Plug)
"""Those that need more of a parameter than a rank holds: subclasses of torch's, which are given layouts and mesh."""

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States that are one number for a parameter, not one for each of its elements."""

_LOCAL = "_local"
"""The attribute of an optimizer that is its `Local`."""

NONE: dict[str, Any] = {}
"""The states of what has none."""


@cache
def on_shards(kind: type[Any]) -> type[Any]:
    """A subclass whose step runs on local tensors. Raises ValueError for an optimizer that is not known to treat each
    element alone."""
    if kind not in ELEMENTWISE:
        raise ValueError(
            f"{kind.__name__} is not known to step element by element: create it from parallel.parameters(), as for "
            f"any model, or give one of {', '.join([*OPTIMIZERS, *(each.__name__ for each in ELEMENTWISE)])}"
        )
    local_step = bare_step(kind)

    class OnShards(kind):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = loss_of(closure)
            with held_locally(self):
                local_step(self)
            return loss

    OnShards.__name__, OnShards.__qualname__ = kind.__name__, kind.__qualname__
    OnShards.__module__, OnShards.__doc__ = kind.__module__, kind.__doc__
    return OnShards


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step returns, which may call backward; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@contextmanager
def held_locally(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, the optimizer has local tensors in the place of DTensors: parameters, gradients and states."""
    local: Local = vars(optimizer).setdefault(_LOCAL, Local())
    groups, states = optimizer.param_groups, optimizer.state
    given = [group["params"] for group in groups]
    held = local.of(given)
    for parameter in local.plain:
        local.states[parameter] = states[parameter]
    written = [twin.parameter for twin in local.twins.values() if twin.take(states)]
    scaling = ("grad_scale", "found_inf")
    amp: dict[str, Any] = {name: vars(optimizer)[name] for name in scaling if name in vars(optimizer)}
    vars(optimizer).update((name, full_tensor(x)) for name, x in amp.items() if isinstance(x, DTensor))
    for group, parameters in zip(groups, held, strict=True):
        group["params"] = parameters
    optimizer.state = local.states
    try:
        yield
    finally:
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters
        optimizer.state = states
        vars(optimizer).update(amp)
        torch.autograd.graph.increment_version(written)  # of which DTensors do not learn
        for twin in local.twins.values():
            twin.give_back(states)


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Lets go of what this rank holds of states, which others take the place of."""
    vars(optimizer).pop(_LOCAL, None)


class Local:
    """What this rank holds of what an optimizer has. It is the same from step to step, unless groups change."""

    def __init__(self) -> None:
        self.twins: dict[DTensor, Twin] = {}
        self.plain: list[torch.Tensor] = []
        """Parameters that are no DTensors."""
        self.states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._given: list[list[torch.Tensor]] = []
        self._held: list[list[torch.Tensor]] = []

    def of(self, groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The parameters of each group."""
        same = len(groups) == len(self._given) and all(
            len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(groups, self._given, strict=True)
        )
        if not same:
            asked = [p for group in groups for p in group]
            self.plain = [p for p in asked if not isinstance(p, DTensor)]
            self.twins = {p: self.twins.get(p) or Twin(p, self.states) for p in asked if isinstance(p, DTensor)}
            self._given = [[*group] for group in groups]
            self._held = [[self.twins[p].held if isinstance(p, DTensor) else p for p in group] for group in groups]
        return self._held


class Twin:
    """What this rank holds of a parameter, and of the states that an optimizer has for it."""

    __slots__ = ("globals", "held", "inside", "locals", "parameter")

    def __init__(self, parameter: DTensor, states: defaultdict[Any, dict[str, Any]]) -> None:
        self.parameter = parameter
        self.held = nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)
        self.inside = states[self.held]
        self.globals: tuple[Any, ...] = ()
        """States, and what this rank holds of each, as they were after the last step."""
        self.locals: tuple[Any, ...] = ()

    def take(self, states: Any) -> bool:
        """Have the gradient and the states of before a step. Whether there is a gradient."""
        gradient = self.parameter.grad
        if gradient is not None:
            self.held.grad = local_gradient(self.parameter, gradient)
        state = states.get(self.parameter, NONE)
        if not _are(self.globals, state):
            self.inside.clear()
            self.inside.update((k, local_part(v)) for k, v in state.items())
            self.globals, self.locals = tuple(state.values()), tuple(self.inside.values())
        return gradient is not None

    def give_back(self, states: Any) -> None:
        """Have those of after it, as DTensors that are placed as the parameter is."""
        self.held.grad = None
        if _are(self.locals, self.inside):
            return
        state = states[self.parameter]
        for name, value in self.inside.items():
            present = state.get(name)
            if not (isinstance(present, DTensor) and local_tensor(present) is value):
                splits = isinstance(value, torch.Tensor) and name not in NUMBERS and value.shape == self.held.shape
                state[name] = like(self.parameter, value) if splits else value
        self.globals, self.locals = tuple(state.values()), tuple(self.inside.values())


def _are(seen: tuple[Any, ...], state: dict[str, Any]) -> bool:
    return len(seen) == len(state) and all(map(is_, seen, state.values()))


def local_gradient(parameter: DTensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """That of what this rank holds. One that is placed otherwise, such as a partial sum, is redistributed."""
    if not isinstance(gradient, DTensor):
        raise ValueError(
            f"a gradient of a split parameter of {list(parameter.shape)} is a plain tensor: give it as a DTensor"
        )
    if gradient.placements is not parameter.placements and gradient.placements != parameter.placements:
        gradient = redistributed(gradient, parameter.device_mesh, parameter.placements)
    return local_tensor(gradient)


def like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """What ranks hold, as a DTensor of the parameter's shape and placements."""
    return make_dtensor(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
