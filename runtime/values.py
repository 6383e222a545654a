"""Values for a parallel module: from a model, a state dict, or a function that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from .held import State

InitFunction = Callable[[str, torch.Tensor], torch.Tensor | None]


def values_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def values_from(source: Mapping[str, torch.Tensor], state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor's value in a state_dict, under any of its names."""
    missing = []
    for name, aliases in state.aliases.items():
        present = state.value(name)
        found = next((alias for alias in aliases if alias in source), None)
        if found is None:
            if present.device.type == "meta":
                missing.append(name)
            continue
        value = source[found]
        if value.shape != present.shape:
            raise ValueError(f"{found} is {list(value.shape)} in the state_dict and {list(present.shape)} in the model")
        yield name, value.to(present.dtype)
    if missing:
        raise ValueError(
            f"the state_dict lacks {', '.join(missing)}, which are on meta (buffers that the model's own state_dict "
            f"does not hold may be added to it)"
        )


def values_made(function: InitFunction, state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor on meta, filled by `function`."""
    for name in state.aliases:
        present = state.value(name)
        if present.device.type != "meta":
            continue
        whole = torch.empty(present.shape, dtype=present.dtype)
        with torch.no_grad():
            returned = function(name, whole)
        whole = whole if returned is None else returned
        if whole.shape != present.shape:
            raise ValueError(f"init_fn made {list(whole.shape)} for {name}, which is {list(present.shape)}")
        yield name, whole.to(present.dtype)
