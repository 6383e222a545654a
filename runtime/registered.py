"""The parameters, buffers and modules that a parallel module has under its names, and whether they are still those that
its programs are for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.tensors import memory_of
from autopar.compat.wrapping import plain_name

Registry = dict[str, Any]


class RegisteredNames:
    """What is registered under each name. Programs read parameters as each rank holds them, so that a value that lies
    otherwise (plain, split along another dim, of another dtype) would be read as something else: whatever asks for a
    value gets one as it was put, or a ValueError that says what was found."""

    def __init__(self) -> None:
        self.owners: dict[str, tuple[Registry, str]] = {}
        """Name -> where it is registered."""
        self.aliases: dict[str, list[str]] = {}
        """Name of a value in the graph -> all names that it has, those without wrappers of modules included."""
        self.slots: dict[tuple[int, str], str] = {}
        """Where a value is registered -> its name in the graph."""
        self.read: set[str] = set()
        """What programs of the module read."""
        self._forms: dict[str, Any] = {}
        """Name -> the form of the tensor that was put there. It decides what may take its place."""
        self._shells: dict[str, tuple[torch.Tensor, int]] = {}
        """Name -> its tensor as it was seen last, with what `.data = ...` replaces of a DTensor."""
        self._empty: list[tuple[str, Registry, str]] = []
        self._modules: list[tuple[str, Registry, Registry]] = []
        """Of each module: the prefix of its names, the modules that it holds, and those that it held."""
        self._armed: tuple[Any, ...] | None = None

    def own(self, root: nn.Module, tied: Mapping[str, str]) -> None:
        """Find where each name is registered, and which names are one tensor. `tied` has the name that stands for
        another."""
        for table in (self.owners, self.aliases, self.slots, self._empty, self._modules):
            table.clear()
        self._armed = None
        first: dict[int, str] = {}
        places: dict[str, tuple[Registry, str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            if module._modules:
                self._modules.append((prefix, module._modules, dict(module._modules)))
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    if tensor is None:
                        self._empty.append((prefix + key, registry, key))
                    else:
                        places[prefix + key] = registry, key
        for name, (registry, key) in places.items():
            canonical = first.setdefault(id(registry[key]), tied.get(name, name))
            self.slots[id(registry), key] = canonical
            plain = plain_name(name)
            for each in (name,) if plain in places else (name, plain):
                self.owners[each] = (registry, key)
                self.aliases.setdefault(canonical, []).append(each)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Have a tensor under all names that it has."""
        for alias in self.aliases[name]:
            registry, key = self.owners[alias]
            registry[key] = tensor
        self._forms[name] = _form(tensor)
        self._see(name, tensor)

    def value(self, name: str) -> torch.Tensor:
        """The tensor of this name. Raises ValueError where it is not what was put there, nor alike."""
        if name not in self.owners:
            raise ValueError(
                f"{name} was registered after parallelize, and forward reads it: register it first, and parallelize "
                f"the model then"
            )
        registry, key = self.owners[name]
        value: Any = registry.get(key)
        if name in self._forms:
            seen = self._shells[name]
            if seen[0] is not value and self._is_needed(name):
                self._refuse(name, value)
                self._see(name, value)
            elif isinstance(value, DTensor) and seen[1] != memory_of(value):
                raise ValueError(
                    f"parameter {name} was given other .data, which a DTensor does not take over: write into it "
                    f"instead, with parameter.data.copy_(...) or under torch.no_grad()"
                )
            for alias in self.aliases[name]:
                registry, key = self.owners[alias]
                if registry.get(key) is not value:
                    raise ValueError(
                        f"{name} and {alias} were one tensor, and are two since one of them was replaced after "
                        f"parallelize: write into the one that there is, or give both names the same tensor"
                    )
        return value  # type: ignore[no-any-return]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Each parameter and buffer that is there, in the order of names."""
        for name in self.aliases:
            registry, key = self.owners[name]
            if isinstance(tensor := registry.get(key), torch.Tensor):
                yield tensor

    def check(self) -> None:
        """Raises ValueError where programs would read something else than they are for. It costs microseconds where
        all is the same objects."""
        if self._armed is not None:
            dicts, keys, values, split, shells, sizes = self._armed
            if (
                all(map(is_, map(dict.get, dicts, keys), values))
                and list(map(memory_of, split)) == shells
                and [len(now) for _, now, _ in self._modules] == sizes
            ):
                return
        for path, now, then in self._modules:
            for key in {**then, **now}:
                if then.get(key) is not now.get(key):
                    raise ValueError(
                        f"module {path}{key} was replaced, added or removed after parallelize: the program has the "
                        f"parameters of the model as it was. Change the model first, and parallelize it then"
                    )
        for name, registry, key in self._empty:
            if registry.get(key) is not None:
                raise ValueError(
                    f"{name}, which was None, was set after parallelize, and no program reads it: set it first, and "
                    f"parallelize the model then"
                )
        for name in self._forms:
            if self._is_needed(name):
                self.value(name)
        self._arm()

    def again(self) -> None:
        """Take what is registered for what was put: in a copy."""
        for name in self._forms:
            registry, key = self.owners[name]
            self._see(name, registry[key])

    def _see(self, name: str, value: torch.Tensor) -> None:
        self._shells[name] = value, memory_of(value) if isinstance(value, DTensor) else 0
        self._armed = None

    def _arm(self) -> None:
        entries: list[tuple[Registry, str, Any]] = [
            (*self.owners[alias], self._shells[name][0])
            for name in self._forms
            if self._is_needed(name)
            for alias in self.aliases[name]
        ]
        entries += [(registry, key, None) for _, registry, key in self._empty]
        entries += [(now, key, module) for _, now, then in self._modules for key, module in then.items()]
        dicts, keys, values = ([entry[k] for entry in entries] for k in range(3))
        split = [value for value in values if isinstance(value, DTensor)]
        shells, sizes = [*map(memory_of, split)], [len(then) for *_, then in self._modules]
        self._armed = dicts, keys, values, split, shells, sizes

    def _is_needed(self, name: str) -> bool:
        """Buffers that no program reads are the user's own."""
        return name in self.read or self._forms[name][0] is not None

    def _refuse(self, name: str, value: torch.Tensor | None) -> None:
        where, shape, dtype = self._forms[name]
        what = "buffer" if where is None else "parameter"
        if value is None:
            raise ValueError(
                f"{what} {name} is gone since parallelize (deleted, set to None, or taken over by a parametrization or "
                f"by pruning), and the program reads it: change the model first, and parallelize it then"
            )
        found = _form(value)
        if found != self._forms[name]:
            raise ValueError(
                f"{what} {name} was replaced after parallelize by {_described(*found)}, and the program reads "
                f"{_described(where, shape, dtype)}: give a tensor of that form, or give the whole value to "
                f"load_state_dict({{{name!r}: value}}, strict=False)"
            )
        for other in self._forms:
            registry, key = self.owners[other]
            if other != name and registry.get(key) is value:
                raise ValueError(
                    f"{what} {name} was tied to {other} after parallelize: the program has two values. Tie them first, "
                    f"and parallelize the model then"
                )


def _form(tensor: torch.Tensor) -> tuple[Any, tuple[int, ...], torch.dtype]:
    """What must be equal of a tensor that takes another one's place."""
    where = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return where, tuple(tensor.shape), tensor.dtype


def _described(where: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    what = f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
    return f"a plain tensor {what}" if where is None else f"a DTensor {what} placed {list(where[1])}"
