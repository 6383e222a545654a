"""Submodules of a parallel module, called by themselves: `parallel.lm_head(h)`.

Their parameters are DTensors, and a plain tensor beside one is an error deep in torch. A call gathers them, and runs
the submodule whole on every rank, on what every rank must give it alike: right, differentiable, and no faster than on
one device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor


def _call(cls: type[nn.Module], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    split = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    if not split:  # called by a submodule that has gathered them, or there are none
        return super(cls, module).__call__(*args, **kwargs)  # type: ignore[misc]
    meta = [name for name, p in split.items() if p.device.type == "meta"]
    if meta:
        raise ValueError(f"parameter {meta[0]} is on meta: call materialize(init_fn or state_dict) first")
    args, kwargs = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), (args, kwargs))
    whole = {name: p.full_tensor() for name, p in split.items()}
    return torch.func.functional_call(module, whole, args, kwargs)


def empty_submodule(kind: type[nn.Module]) -> nn.Module:
    """A module of a class that passes for this one, with calls that gather its parameters, and without attributes."""
    made: nn.Module = object.__new__(_callable_alone(kind))  # type: ignore[arg-type]
    return made


@cache
def _callable_alone(kind: type[Any]) -> type[Any]:
    class Submodule(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _call(Submodule, self, args, kwargs)

    Submodule.__name__, Submodule.__qualname__ = kind.__name__, kind.__qualname__
    Submodule.__module__, Submodule.__doc__ = kind.__module__, kind.__doc__
    return Submodule


def mirrored(mirrors: dict[int, nn.Module], module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with tensors of its own to come."""
    if id(module) not in mirrors:
        made = empty_submodule(type(module))
        vars(made).update(vars(module))
        vars(made).update(
            _parameters=dict(module._parameters),
            _buffers=dict(module._buffers),
            _modules={},
            _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
        )
        mirrors[id(module)] = made
        made._modules.update({n: None if m is None else mirrored(mirrors, m) for n, m in module._modules.items()})
    return mirrors[id(module)]
