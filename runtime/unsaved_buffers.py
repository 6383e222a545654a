"""Buffers that no checkpoint holds, computed as the model computes them: frequencies of rotary embeddings, for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.passes.capture.fakes import skeleton

from .values import ModuleValues, Slot, all_slots

FILLS = (0x55, 0xAA)
"""Bytes that buffers are filled with before they are computed. What comes out the same from both is computed."""


def unsaved_buffers(root: nn.Module) -> Iterator[Slot]:
    """Those that a state_dict does not hold."""
    return (slot for slot in all_slots(root) if slot.is_unsaved)


def computed_anew(values: ModuleValues) -> dict[str, torch.Tensor]:
    """The values of those buffers on meta that a state_dict does not hold, as far as the model says how to compute
    them: by `root._init_weights(module)`, which the models of Hugging Face have, or by `module.reset_parameters()`.
    They run on a twin of each module, whose parameters are on meta: nothing of the model is changed."""
    computed: dict[str, torch.Tensor] = {}
    missing: dict[int, list[Slot]] = {}
    for slot in unsaved_buffers(values.root):
        if slot.registry[slot.key].device.type == "meta" and values.name(slot) is not None:
            missing.setdefault(id(slot.module), []).append(slot)
    for slots in missing.values():
        for way in (getattr(values.root, "_init_weights", None), _reset):
            made = {} if way is None else _computed(slots[0].module, way)
            computed.update((str(values.name(slot)), made[slot.key]) for slot in slots if slot.key in made)
    return computed


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
    """A copy of the module, with parameters on meta and buffers that hold nothing yet."""
    twin, _ = skeleton(module)
    for buffers in (each._buffers for each in twin.modules()):
        buffers.update((key, _filled(b, fill)) for key, b in buffers.items() if b is not None)
    return twin


def _filled(like: torch.Tensor, fill: int) -> torch.Tensor:
    held = torch.empty(like.shape, dtype=like.dtype)
    _bits(held).fill_(fill)
    return held
