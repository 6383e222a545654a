"""States of optimizers in distributed checkpoints: whatever was stepped when one was written, and is when it is read.

PyTorch writes the states that there are, and reads those of all parameters that require gradients. So it cannot read
its own checkpoint if a parameter had no gradient before it was written, or was unfrozen since, and it drops what a
frozen one has. For the optimizers of a parallel module, checkpoints hold the states that PyTorch would read, and what
a checkpoint holds is what an optimizer has afterwards: no state stays none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.compat.calls import by_tensor
from autopar.compat.checkpoints import scattered_in_checkpoints
from autopar.compat.optimizing import Shapes, around_checkpoints, first_states
from autopar.compat.wrapping import plain_name

from .agreement import exchange
from .boxes import scattered

Optimizers = Sequence[torch.optim.Optimizer]


class StatesPlace(NamedTuple):
    """Where the states of a parameter belong."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    parameter: torch.Tensor


@dataclass(eq=False)
class Asked:
    """States of the optimizers of a model, to be written to a checkpoint or read from one. It keeps neither alive."""

    model: weakref.ref[nn.Module]
    optimizers: tuple[weakref.ref[torch.optim.Optimizer], ...]
    absent: set[str] = field(default_factory=set)
    """Parameters of which the checkpoint that was read has no states."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States that it has, which had not been asked for: of frozen parameters."""

    @staticmethod
    def of(model: nn.Module, optimizers: Optimizers) -> Asked:
        return Asked(weakref.ref(model), tuple(map(weakref.ref, optimizers)))

    def places(self) -> dict[str, StatesPlace]:
        """By each name that a parameter has, where its states belong."""
        model, optimizers = self.model(), [o for o in (each() for each in self.optimizers) if o is not None]
        named = () if model is None else model.named_parameters(remove_duplicate=False)
        places = {
            id(p): StatesPlace(o, group, p) for o in optimizers for group in o.param_groups for p in group["params"]
        }
        return {plain_name(name): places[id(p)] for name, p in named if id(p) in places}


ASKED = by_tensor()
"""A tensor that was got -> what it was got with, and the name of its parameter."""


@cache
def checkpoints_of(kind: type[nn.Module]) -> None:
    """Have states of optimizers that step parameters of such a module be read and written so, from now on."""

    def mesh_of(model: nn.Module) -> DeviceMesh | None:
        """None for a model that holds no such module, which PyTorch serves alone."""
        return next((module.mesh for module in model.modules() if isinstance(module, kind)), None)  # type: ignore

    def get(model: nn.Module, optimizers: Optimizers, by_torch: Callable[[], Any]) -> Any:
        if mesh_of(model) is None:
            return by_torch()
        never_stepped = [optimizer for optimizer in optimizers if not optimizer.state]
        with all_stepped(optimizers):
            states = by_torch()
        for optimizer in never_stepped:  # PyTorch has made one step without gradients
            optimizer.state.clear()
        asked = Asked.of(model, optimizers)
        for name, tensor in _tensors(states):
            ASKED[tensor] = asked, name
        return states

    def put(model: nn.Module, optimizers: Optimizers, states: Any, first: bool, by_torch: Callable[[Any], Any]) -> Any:
        mesh = mesh_of(model)
        if mesh is None:
            return by_torch(states)
        held = {name for name, _ in _tensors(states)}
        if first:
            held = set().union(*exchange(held, mesh))
        return set_states(Asked.of(model, optimizers).places(), optimizers, states, held, by_torch)

    around_checkpoints(get, put, to_read)
    scattered_in_checkpoints(scattered)


@contextmanager
def all_stepped(optimizers: Optimizers) -> Iterator[None]:
    """Within it, every parameter that requires a gradient has states: where its optimizer has none, those that it has
    before its first step. So a checkpoint holds what PyTorch reads, and PyTorch steps no optimizer to make states."""
    added: list[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                lacks = parameter.requires_grad and not optimizer.state.get(parameter)
                if lacks and (states := first_states(optimizer, group, parameter)):
                    added.append((optimizer, parameter, states))
    for optimizer, parameter, states in added:
        optimizer.state[parameter] = states
    try:
        yield
    finally:
        for optimizer, parameter, states in added:
            if optimizer.state.get(parameter) is states:
                del optimizer.state[parameter]


def to_read(state_dict: dict[str, Any], there: Shapes) -> dict[str, Any]:
    """What is to be read of a checkpoint that has the keys `there`: of parameters whose states it lacks, none, and of
    frozen ones whose states it has, those too, which `state_dict` gets. A checkpoint that has no states at all, or some
    of a parameter and not others, is PyTorch's to refuse."""
    known = {key: ASKED[x] for key, x in state_dict.items() if isinstance(x, torch.Tensor) and x in ASKED}
    if not known.keys() & there.keys():
        return state_dict
    sections: dict[str, Asked] = {}
    """Where the states of an optimizer begin: a prefix of keys."""
    prefixes: dict[str, tuple[Asked, str]] = {}
    for key, (asked, name) in known.items():
        section = key[: key.rindex(f"{name}.")]
        sections[section] = asked
        prefixes[f"{section}{name}."] = asked, name
    keys: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for key in state_dict:
        if (prefix := _prefix(key)) in keys:
            keys[prefix].append(key)
    lacking = {prefix for prefix, all_keys in keys.items() if not any(key in there for key in all_keys)}
    for prefix, (asked, name) in prefixes.items():
        (asked.absent.add if prefix in lacking else asked.absent.discard)(name)
    for section, asked in sections.items():
        places, stored = asked.places(), {_prefix(key) for key in there if key.startswith(section)} - keys.keys()
        for prefix in sorted(stored):
            name = prefix[len(section) : -1]
            if name in places and (
                states := room_for({k: there[k] for k in there if _prefix(k) == prefix}, *places[name])
            ):
                state_dict.update((f"{prefix}{key}", value) for key, value in states.items())
                asked.found[name] = states
    return {key: value for key, value in state_dict.items() if _prefix(key) not in lacking}


def room_for(
    stored: Shapes, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any] | None:
    """Tensors for the states that a checkpoint has of a parameter. None where some of them are no tensors."""
    shapes = {key.rpartition(".")[-1]: shape for key, shape in stored.items()}
    states = first_states(optimizer, group, parameter) or {}
    if states.keys() == shapes.keys():
        return states
    made: dict[str, Any] = {}
    for key, shape in shapes.items():
        if shape is None:
            return None
        alike = shape[0] == tuple(parameter.shape)
        made[key] = (
            torch.zeros_like(parameter.detach(), dtype=shape[1]) if alike else torch.zeros(shape[0], dtype=shape[1])
        )
    return made


def set_states(
    places: Mapping[str, StatesPlace],
    optimizers: Optimizers,
    states: Any,
    held: set[str],
    by_torch: Callable[[Any], Any],
) -> Any:
    """Set what `states` hold, by torch's way, of frozen parameters too; and no states where a checkpoint had none.
    `held` are the parameters of which they hold some, on any rank."""
    tokens = {id(asked): asked for asked, _ in (ASKED[x] for _, x in _tensors(states) if x in ASKED)}
    absent = {name for asked in tokens.values() for name in asked.absent}
    found = {name: values for asked in tokens.values() for name, values in asked.found.items()}
    if "state" in states:
        states = {**states, "state": {**states["state"], **found}}
    elif found:
        states = {**states, **{f"state.{n}.{key}": x for n, values in found.items() for key, x in values.items()}}
    stated = {id(places[name].parameter) for name in held | found.keys() if name in places}
    parameters = {id(place.parameter): place.parameter for place in places.values()}
    wrong = [p for key, p in parameters.items() if stated and p.requires_grad != (key in stated)]
    with inverted(wrong), all_stepped(optimizers), without_empty_groups(optimizers, states) as filled:
        result = by_torch(filled)
    for name, place in places.items():
        lacks = name in absent or (stated and id(place.parameter) not in stated)
        if lacks and not isinstance(place.optimizer, torch.optim.Adagrad):  # which has states from the start
            place.optimizer.state.pop(place.parameter, None)
    for asked in tokens.values():
        asked.found.clear()
    return result


@contextmanager
def inverted(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, these require gradients if they do not, and do not if they do. PyTorch sets the states of all that do,
    and of no others."""
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(not parameter.requires_grad)


@contextmanager
def without_empty_groups(optimizers: Optimizers, states: Any) -> Iterator[Any]:
    """Within it, optimizers have no groups without parameters, and neither have the states that it gives. PyTorch tells
    groups by what they hold. Afterwards the groups have the options that they had in the states."""
    empty = [(o, index, group) for o in optimizers for index, group in enumerate(o.param_groups) if not group["params"]]
    for optimizer in optimizers:
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    given = states.get("param_groups") if isinstance(states, Mapping) and "state" in states else None
    stored = [group for group in given or () if not group["params"]]
    try:
        yield states if given is None else {**states, "param_groups": [group for group in given if group["params"]]}
        if len(stored) == len(empty):
            for (_, _, group), other in zip(empty, stored, strict=True):
                group.update({**other, "params": []})
    finally:
        for optimizer, index, group in empty:
            optimizer.param_groups.insert(index, group)


def _tensors(states: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that optimizers have for each parameter, by its name, in either form that PyTorch gives them."""
    by_name = states.get("state") if isinstance(states, Mapping) else None
    if by_name is not None:
        items = ((name, value) for name, held in by_name.items() for value in held.values())
    else:
        items = ((_prefix(key)[len("state.") : -1], x) for key, x in states.items() if key.startswith("state."))
    return ((name, value) for name, value in items if isinstance(value, torch.Tensor))


def _prefix(key: str) -> str:
    """That of all states of a parameter, of the key of one."""
    return key[: key.rfind(".") + 1]
