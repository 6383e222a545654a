"""Buffers that no checkpoint holds, computed as the model computes them: frequencies of rotary embeddings, for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .held import State

FILLS = (0x55, 0xAA)
"""Bytes that buffers are filled with before they are computed. What comes out the same from both is computed."""


def unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and key of each buffer that a state_dict does not hold."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for key, buffer in each._buffers.items():
            if buffer is not None and key in each._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), each, key


def computed_anew(root: nn.Module) -> dict[str, torch.Tensor]:
    """The values of those buffers on meta that a state_dict does not hold, as far as the model says how to compute
    them: by `root._init_weights(module)`, which the models of Hugging Face have, or by `module.reset_parameters()`.
    They run on a twin of each module, whose parameters are on meta: nothing of the model is changed."""
    values: dict[str, torch.Tensor] = {}
    missing: dict[int, tuple[nn.Module, list[tuple[str, str]]]] = {}
    for name, module, key in unsaved_buffers(root):
        if module._buffers[key].device.type == "meta":  # type: ignore[union-attr]
            missing.setdefault(id(module), (module, []))[1].append((name, key))
    for module, names in missing.values():
        for way in (getattr(root, "_init_weights", None), _reset):
            made = {} if way is None else _computed(module, way)
            values.update((name, made[key]) for name, key in names if key in made)
    return values


def anew_of(state: State, root: nn.Module) -> dict[str, torch.Tensor]:
    """`computed_anew`, by the names that the state has for values."""
    computed = computed_anew(root)
    return {
        name: next(computed[alias] for alias in aliases if alias in computed)
        for name, aliases in state.aliases.items()
        if any(alias in computed for alias in aliases)
    }


def _reset(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _computed(module: nn.Module, way: Callable[[nn.Module], Any]) -> Mapping[str, torch.Tensor]:
    """The buffers of a twin that `way` computes."""
    outcomes: list[dict[str, torch.Tensor]] = []
    for fill in FILLS:
        twin = _twin(module, fill)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
                torch.manual_seed(0)
                way(twin)
        except Exception:  # it is not meant for such a module: others may be, and what nobody computes is told
            return {}
        outcomes.append({k: b for k, b in twin._buffers.items() if b is not None and b.device.type != "meta"})
    first, second = outcomes
    return {k: b for k, b in first.items() if k in second and _bits(b).equal(_bits(second[k]))}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _twin(module: nn.Module, fill: int) -> nn.Module:
    """A module of the same class and attributes, with parameters on meta and buffers that hold nothing yet."""
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update(vars(module))
    parameters = {key: None if p is None else _meta(p) for key, p in module._parameters.items()}
    buffers = {key: None if b is None else _filled(b, fill) for key, b in module._buffers.items()}
    modules = {key: None if m is None else _twin(m, fill) for key, m in module._modules.items()}
    vars(twin).update(_parameters=parameters, _buffers=buffers, _modules=modules)
    return twin


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, requires_grad=parameter.requires_grad)


def _filled(like: torch.Tensor, fill: int) -> torch.Tensor:
    held = torch.empty(like.shape, dtype=like.dtype)
    _bits(held).fill_(fill)
    return held
