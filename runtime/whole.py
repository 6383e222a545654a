"""The model on one device again: a copy of a parallel module's model that holds whole values on each rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.redistributing import full_tensor
from autopar.passes.capture.fakes import skeleton

from .agree import together
from .mirrors import is_mirror
from .values import Values, all_slots


def whole_model(values: Values) -> nn.Module:
    """All ranks at once. One value after the other is gathered."""
    with together(values.mesh):
        if on_meta := values.on_meta():
            raise ValueError(f"{on_meta[0]} is on meta, and has no value: call materialize or load_pretrained first")
    model, _ = skeleton(values.root)
    for module in model.modules():
        if is_mirror(type(module)):
            module.__class__ = type(module).__mro__[1]
    slots = {slot.name: slot for slot in all_slots(model)}
    with torch.no_grad():
        for name, aliases in values.aliases.items():
            value = values[name]
            held = full_tensor(value) if isinstance(value, DTensor) else value.detach()
            whole = held.clone(memory_format=torch.contiguous_format)
            if isinstance(value, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=value.requires_grad)
            for alias in slots.keys() & aliases:
                slots[alias].registry[slots[alias].key] = whole
    return model
