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
from typing import Any

import torch
from torch import nn

from autopar import compat
from autopar.compat import first_states, plain_name

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(eq=False)
class Asked:
    """The states that were got of optimizers, for a checkpoint to be written, or to be read into them. It keeps neither
    alive."""

    model: weakref.ref[nn.Module]
    optimizers: tuple[weakref.ref[torch.optim.Optimizer], ...]
    absent: set[str] = field(default_factory=set)
    """Parameters of which the checkpoint that was read has no states."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States that it has, which had not been asked for: of frozen parameters."""

    def places(self) -> dict[str, tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
        """Name -> optimizer, group and parameter, of each that an optimizer has."""
        model, optimizers = self.model(), [o for o in (each() for each in self.optimizers) if o is not None]
        named = () if model is None else model.named_parameters(remove_duplicate=False)
        groups = {id(p): (o, group, p) for o in optimizers for group in o.param_groups for p in group["params"]}
        return {plain_name(name): groups[id(p)] for name, p in named if id(p) in groups}


ASKED = compat.by_tensor()
"""A tensor that was got -> what it was got with, and the name of its parameter."""


@cache
def checkpoints_of(kind: type[nn.Module]) -> None:
    """Have states of optimizers that step parameters of such a module be read and written so, from now on."""

    def serves(model: nn.Module) -> bool:
        return any(isinstance(module, kind) for module in model.modules())

    def get(model: nn.Module, optimizers: Optimizers, by_torch: Callable[[], Any]) -> Any:
        if not serves(model):
            return by_torch()
        never_stepped = [optimizer for optimizer in optimizers if not optimizer.state]
        with all_stepped(optimizers):
            states = by_torch()
        for optimizer in never_stepped:  # PyTorch has made one step without gradients
            optimizer.state.clear()
        asked = Asked(weakref.ref(model), tuple(map(weakref.ref, optimizers)))
        for name, tensor in _tensors(states):
            ASKED[tensor] = asked, name
        return states

    def put(model: nn.Module, optimizers: Optimizers, states: Any, by_torch: Callable[[Any], Any]) -> Any:
        return set_states(optimizers, states, by_torch) if serves(model) else by_torch(states)

    compat.around_checkpoints(get, put, to_read)


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


def to_read(state_dict: dict[str, Any], there: compat.Shapes) -> dict[str, Any]:
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
    stored: compat.Shapes, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
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


def set_states(optimizers: Optimizers, states: Any, by_torch: Callable[[Any], Any]) -> Any:
    """Set what `states` hold, by torch's way, of frozen parameters too; and no states where a checkpoint had none."""
    tokens = {id(asked): asked for asked, _ in (ASKED[x] for _, x in _tensors(states) if x in ASKED)}
    found = {name: held for asked in tokens.values() for name, held in asked.found.items()}
    places = {name: place for asked in tokens.values() for name, place in asked.places().items()}
    held = {name for name, _ in _tensors(states)} | found.keys()
    frozen = [p for name, (_, _, p) in places.items() if name in held and not p.requires_grad]
    if "state" in states:
        states = {**states, "state": {**states["state"], **found}}
    else:
        states = {**states, **{f"state.{n}.{key}": x for n, values in found.items() for key, x in values.items()}}
    with requiring(frozen), all_stepped(optimizers), without_empty_groups(optimizers, states) as filled:
        result = by_torch(filled)
    for asked in tokens.values():
        for name in asked.absent & places.keys():
            optimizer, _, parameter = places[name]
            if not isinstance(optimizer, torch.optim.Adagrad):  # which has states from the start
                optimizer.state.pop(parameter, None)
        asked.found.clear()
    return result


@contextmanager
def requiring(frozen: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, these parameters require gradients. PyTorch sets no states of others."""
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


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
