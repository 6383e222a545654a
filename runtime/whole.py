"""The model on one device again: a copy of a parallel module's model that holds whole values on each rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.redistributing import full_tensor
from autopar.passes.capture.fakes import skeleton

from .agree import together
from .held import State
from .mirrors import is_mirror
from .state_dicts import registered


def whole_model(state: State, root: nn.Module) -> nn.Module:
    """All ranks at once. One value after the other is gathered."""
    with together(state.mesh):
        on_meta = next((name for name in state.aliases if state.value(name).device.type == "meta"), None)
        if on_meta is not None:
            raise ValueError(f"{on_meta} is on meta, and has no value: call materialize or load_pretrained first")
    model, _ = skeleton(root)
    for module in model.modules():
        if is_mirror(type(module)):
            module.__class__ = type(module).__mro__[1]
    registries = {name: (registry, key) for name, registry, key in registered(model)}
    with torch.no_grad():
        for name, aliases in state.aliases.items():
            value = state.value(name)
            held = full_tensor(value) if isinstance(value, DTensor) else value.detach()
            whole = held.clone(memory_format=torch.contiguous_format)
            if isinstance(value, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=value.requires_grad)
            for alias in registries.keys() & aliases:
                registry, key = registries[alias]
                registry[key] = whole
    return model
