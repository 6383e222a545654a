"""The model's own `state_dict` and `load_state_dict`, hooks, extra state and overrides included, on a parallel module's
tensors: values may be global tensors, of which this rank takes its part, or DTensors."""

from __future__ import annotations

import re
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autopar.compat.distributed import local_tensor
from autopar.compat.tensors import memory_of
from autopar.compat.wrapping import plain_name

from .places import whole
from .values import ModuleValues, Slot, all_slots, slots_of

MIRRORED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModuleValues]] = weakref.WeakKeyDictionary()
"""What each mirror of a module has values of."""


def belong(values: ModuleValues) -> None:
    """Have the mirrors of a model's modules load values as they are placed."""
    for module in values.root.modules():
        MIRRORED[module] = weakref.ref(values)


@contextmanager
def taking_parts(module: nn.Module) -> Iterator[None]:
    """Within it, a mirror loads its own values as the model's module would: by torch's way, before which what this rank
    holds of each takes its place, after all hooks of the model; by writing a global value into a parameter; or by
    putting another parameter in its place."""
    reference = MIRRORED.get(module)
    values = None if reference is None else reference()
    if values is None:  # a copy that somebody made of a part of the module
        yield
        return
    there = [
        _Loaded(name=name, slot=slot, present=slot.tensor)
        for slot in slots_of(module)
        if slot.tensor is not None and (name := values.name(slot)) is not None
    ]
    handle = module.register_load_state_dict_pre_hook(partial(_take_parts, values, there))  # type: ignore[no-untyped-call]
    try:
        with _Writes(values, there):
            yield
    finally:
        handle.remove()
        for loaded in there:
            _place(values, loaded)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loaded:
    """A value that a mirror loads, and what it has there before."""

    name: str
    slot: Slot
    present: torch.Tensor


def _take_parts(
    values: ModuleValues,
    there: Sequence[_Loaded],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *rest: Any,
) -> None:
    """The last hook: hooks of the model see the values as they were given."""
    assign = rest[0].get("assign_to_params_buffers", False)
    for loaded in there:
        key = prefix + loaded.slot.key
        value = state_dict.get(key)
        if isinstance(value, torch.Tensor):
            if value.shape == (1,) and loaded.present.shape == ():
                value = value.reshape(())  # as torch does, for files of its first versions
            if value.shape == loaded.present.shape:
                state_dict[key] = _part(values, loaded.name, value, assign=assign)


class _Writes(TorchFunctionMode):
    """Global values that are copied into what a rank holds of a parameter."""

    def __init__(self, values: ModuleValues, there: Sequence[_Loaded]) -> None:
        super().__init__()
        self.values = values
        held = ((loaded.name, loaded.present) for loaded in there if isinstance(loaded.present, DTensor))
        self.names = {memory_of(local_tensor(present)): name for name, present in held}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[0], DTensor):
            target, value = args[:2]
            name = self.names.get(memory_of(local_tensor(target)))
            if name is not None and not isinstance(value, DTensor) and value.shape == target.shape:
                args = (target, _part(self.values, name, value, assign=False), *args[2:])
        return func(*args, **(kwargs or {}))


def _place(values: ModuleValues, loaded: _Loaded) -> None:
    """Take this rank's part of a global value that was put in the place of a parameter."""
    value, present = loaded.slot.tensor, loaded.present
    if not isinstance(present, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return
    loaded.slot.hold(present)
    if value.shape != present.shape:
        raise ValueError(
            f"{plain_name(loaded.name)} is {list(value.shape)} in the state_dict and {list(present.shape)} in the "
            f"model, whose program has that size"
        )
    _part(values, loaded.name, value, assign=True)


def _part(values: ModuleValues, name: str, value: torch.Tensor, *, assign: bool) -> torch.Tensor:
    """What this rank holds of a value. With `assign`, the module has it already, under all names of that value."""
    present = values[name]
    if not assign and not isinstance(present, DTensor):
        return whole(value)
    if not assign and isinstance(value, DTensor) and _alike(value, present):
        return value
    value = value.detach()
    if assign or not (value.is_floating_point() or value.is_complex()):
        value = value.to(present.dtype)
    part = values.part(name, value)
    if assign:
        values.adopt(name, part)
        return values[name]
    return part


def _alike(value: DTensor, present: torch.Tensor) -> bool:
    assert isinstance(present, DTensor)
    return value.device_mesh == present.device_mesh and value.placements == present.placements


def to_load(state_dict: Any, root: nn.Module) -> Any:
    """A state_dict as the modules of `root` look for it: values by their names without `torch.compile` and
    `checkpoint_wrapper`, versions by the paths of modules. It is the same object if nothing is called otherwise."""
    paths = [path for path, _ in root.named_modules() if plain_name(path) != path]
    if not isinstance(state_dict, Mapping) or (not paths and all(plain_name(key) == key for key in state_dict)):
        return state_dict
    renamed: Any = OrderedDict((plain_name(key), value) for key, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        plain = {plain_name(path): held for path, held in metadata.items()}
        renamed._metadata = OrderedDict(plain, **{path: plain.get(plain_name(path), {}) for path in paths})
    return renamed


def rename_versions(state_dict: Any, prefix: str) -> None:
    """Give the versions of modules that a state_dict holds the names that values have, without wrappers."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    for path in [path for path in metadata if path.startswith(prefix) and plain_name(path) != path]:
        metadata[plain_name(path)] = metadata.pop(path)


def names_in_state_dict(root: nn.Module) -> dict[int, list[str]]:
    """What the hooks of a model's `state_dict` call each of its tensors, by the tensor's id."""
    called: dict[int, list[str]] = {}
    for key, tensor in nn.Module.state_dict(root, keep_vars=True).items():
        called.setdefault(id(tensor), []).append(plain_name(key))
    return called


def saved_names(values: ModuleValues) -> dict[str, str]:
    """Value -> the name to save it under, for each parameter and persistent buffer: what the model's own state_dict
    calls it, or what its modules do where hooks left it out. Of tied weights that is the one that Hugging Face's model
    ties the others to. Raises ValueError for what has no value, and for what the module has not held since it was
    made."""
    root = values.root
    called = names_in_state_dict(root)
    patterns = [re.compile(pattern) for pattern in getattr(root, "_tied_weights_keys", None) or ()]
    present: dict[str, list[str]] = {}
    for slot in all_slots(root):
        value = values.name(slot)
        if value is None:
            raise ValueError(f"{slot.name} was added after parallelize, and cannot be saved: add it before")
        found = called.get(id(slot.tensor), [] if slot.is_unsaved else [plain_name(slot.name)])
        present.setdefault(value, []).extend(found)
    names: dict[str, str] = {}
    for value in values.aliases:
        if value not in present:
            raise ValueError(f"{value} was removed after parallelize, and cannot be saved: remove it before")
        if found := present[value]:
            own = [name for name in found if not any(p.search(name) for p in patterns)]
            name = names[value] = (own or found)[0]
            if values[value].device.type == "meta":
                raise ValueError(
                    f"{name} is on meta, and has no value to save: call materialize or load_pretrained first"
                )
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        both = " and ".join(value for value, name in names.items() if name == twice[0])
        raise ValueError(f"{both} would both be saved as {twice[0]}: have the model's state_dict call them differently")
    return names
