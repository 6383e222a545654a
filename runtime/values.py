"""The parameters and buffers of a parallel module: where each is registered, how it lies at rest and what this rank
holds of it, and whether they are still those that its programs are for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.compat.tensors import is_real, memory_of, take_notes
from autopar.compat.wrapping import plain_name
from autopar.ir.layout import Layout, Replicate, Shape
from autopar.passes.capture.ledger import Ledger

from .agreement import all_alike, coordinate_of, device_of, digest, together
from .boxes import Box, boxes
from .pieces import MeshRanks
from .places import ValuePlace, device_meshes, local_part, whole, within_stage
from .whole_gradient import whole_gradient

Registry = dict[str, Any]


class Slot(NamedTuple):
    """Where a module has a parameter or buffer. `name` is its path in the whole model."""

    name: str
    module: nn.Module
    registry: Registry
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.registry.get(self.key)

    def hold(self, tensor: torch.Tensor) -> None:
        self.registry[self.key] = tensor

    @property
    def is_unsaved(self) -> bool:
        """Whether it is for a buffer that a state_dict does not hold."""
        module = self.module
        return self.registry is module._buffers and self.key in module._non_persistent_buffers_set


def slots_of(module: nn.Module, path: str = "") -> Iterator[Slot]:
    """Those of a module itself, taken or not."""
    prefix = f"{path}." if path else ""
    for registry in (module._parameters, module._buffers):
        for key in registry:
            yield Slot(prefix + key, module, registry, key)


def all_slots(root: nn.Module) -> Iterator[Slot]:
    """Where each parameter and buffer is, under each name that it has."""
    for path, module in root.named_modules(remove_duplicate=False):
        yield from (slot for slot in slots_of(module, path) if slot.tensor is not None)


@dataclass(eq=False)
class ModuleValues:
    """The parameters and buffers under each name of the model `root`, of which parameters lie `at_rest` on a mesh.

    Programs read parameters as each rank holds them, so that a value that lies otherwise (plain, split along another
    dim, of another dtype) would be read as something else: whatever asks for a value gets one as it was put, or a
    ValueError that says what was found."""

    root: nn.Module
    mesh: DeviceMesh
    at_rest: Mapping[str, Layout]
    tied: Mapping[str, str]
    """Name -> the name that stands for it."""
    hooked: Collection[str] = ()
    """Parameters whose gradients hooks of the model see."""
    homes: Mapping[str, int] | None = None
    """Of a pipeline, the device that holds a parameter."""
    owners: dict[str, Slot] = field(default_factory=dict)
    """Name -> where it is registered."""
    aliases: dict[str, list[str]] = field(default_factory=dict)
    """Name of a value in the graph -> all names that it has, those without wrappers of modules included."""
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    """Where a value is registered, by the registry's identity and the key -> its name in the graph."""
    read: set[str] = field(default_factory=set)
    """What programs of the module read."""
    _forms: dict[str, Any] = field(default_factory=dict)
    """Name -> the form of the tensor that was put there. It decides what may take its place."""
    _shells: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Name -> its tensor as it was seen last, with what `.data = ...` replaces of a DTensor."""
    _empty: list[Slot] = field(default_factory=list)
    """Where there is nothing."""
    _modules: list[tuple[str, Registry, Registry]] = field(default_factory=list)
    """Of each module: the prefix of its names, the modules that it holds, and those that it held."""
    _ledger: Ledger | None = None
    """What stood everywhere when it was checked last."""

    def __post_init__(self) -> None:
        self.coordinate, self.device = coordinate_of(self.mesh), device_of(self.mesh)
        self.ranks = MeshRanks(self.mesh)
        self.own()

    def own(self) -> None:
        """Find where each name is registered, and which names are one tensor."""
        for table in (self.owners, self.aliases, self.names, self._empty, self._modules):
            table.clear()
        self._ledger = None
        first: dict[int, str] = {}
        slots: dict[str, Slot] = {}
        for path, module in self.root.named_modules(remove_duplicate=False):
            if module._modules:
                self._modules.append((f"{path}." if path else "", module._modules, dict(module._modules)))
            for slot in slots_of(module, path):
                if slot.tensor is None:
                    self._empty.append(slot)
                else:
                    slots[slot.name] = slot
        for name, slot in slots.items():
            canonical = first.setdefault(id(slot.tensor), self.tied.get(name, name))
            self.names[id(slot.registry), slot.key] = canonical
            plain = plain_name(name)
            for each in (name,) if plain in slots else (name, plain):
                self.owners[each] = slot
                self.aliases.setdefault(canonical, []).append(each)

    def name(self, slot: Slot) -> str | None:
        """The name in the graph of what is registered there; None for what was added since."""
        return self.names.get((id(slot.registry), slot.key))

    def canonical(self, alias: str) -> str | None:
        """The name in the graph of a value, by any of its names; None for no name of one."""
        slot = self.owners.get(alias)
        return None if slot is None else self.name(slot)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Have a tensor under all names that it has."""
        for alias in self.aliases[name]:
            self.owners[alias].hold(tensor)
        self._forms[name] = _form(tensor)
        self._see(name, tensor)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of this name. Raises ValueError where it is not what was put there, nor alike."""
        if name not in self.owners:
            raise ValueError(
                f"{name} was registered after parallelize, and forward reads it: register it first, and parallelize "
                f"the model then"
            )
        value: Any = self.owners[name].tensor
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
                if alias != name and self.owners[alias].tensor is not value:
                    raise ValueError(
                        f"{name} and {alias} were one tensor, and are two since one of them was replaced after "
                        f"parallelize: write into the one that there is, or give both names the same tensor"
                    )
        return value  # type: ignore[no-any-return]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Each parameter and buffer that is there, in the order of names."""
        for name in self.aliases:
            if isinstance(tensor := self.owners[name].tensor, torch.Tensor):
                yield tensor

    def check(self) -> None:
        """Raises ValueError where programs would read something else than they are for. It costs microseconds where
        all is the same objects."""
        if self._ledger is not None and self._ledger.holds():
            return
        for path, now, then in self._modules:
            for key in {**then, **now}:
                if then.get(key) is not now.get(key):
                    raise ValueError(
                        f"module {path}{key} was replaced, added or removed after parallelize: the program has the "
                        f"parameters of the model as it was. Change the model first, and parallelize it then"
                    )
        for slot in self._empty:
            if slot.tensor is not None:
                raise ValueError(
                    f"{slot.name}, which was None, was set after parallelize, and no program reads it: set it first, "
                    f"and parallelize the model then"
                )
        for name in self._forms:
            if self._is_needed(name):
                self[name]
        self._ledger = self._look()

    def again(self) -> None:
        """Take what is registered for what was put: in a copy."""
        self.own()
        for name in self._forms:
            slot = self.owners[name]
            self._see(name, slot.registry[slot.key])

    # -- what this rank holds

    def on_meta(self, names: Iterable[str] | None = None) -> list[str]:
        """Those of the names, or of all, that have no value."""
        return [name for name in (self.aliases if names is None else names) if self[name].device.type == "meta"]

    def layout(self, name: str) -> Layout:
        """At rest. What the graph does not read, and a buffer, is replicated."""
        for alias in (name, self.tied.get(name, name)):
            if alias in self.at_rest:
                return self.at_rest[alias]
        return (Replicate(),) * self.mesh.ndim

    def place(self, name: str, coordinate: Shape | None = None) -> ValuePlace:
        """Where a parameter lies at rest, on this rank or another."""
        at = coordinate or self.coordinate
        if self.homes is None:
            return self.whole_place(self.layout(name), at)
        number = self.homes.get(name, self.homes.get(self.tied.get(name, name), 0))
        within = (at[1:] or (0,)) if number == at[0] else None
        return ValuePlace(self.meshes[number], within_stage(self.layout(name)), within)

    def whole_place(self, layout: Layout, coordinate: Shape | None = None) -> ValuePlace:
        """Where all ranks hold something."""
        return ValuePlace(self.mesh, layout, coordinate or self.coordinate)

    @cached_property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """Those of a pipeline's devices."""
        return device_meshes(self.mesh)

    def place_of(self, name: str, coordinate: Shape | None = None) -> ValuePlace:
        """At rest; buffers are whole on every rank."""
        if isinstance(self[name], DTensor):
            return self.place(name, coordinate)
        return self.whole_place(self.layout(name), coordinate)

    def boxes(self, name: str, coordinate: Shape) -> tuple[Box, ...]:
        """Where what a rank holds of a value belongs in the global tensor."""
        place = self.place_of(name, coordinate)
        if place.coordinate is None:
            return ()
        return boxes(tuple(self[name].shape), place.layout, place.sizes, place.coordinate)

    def held(self, name: str, value: torch.Tensor) -> tuple[torch.Tensor, tuple[Box, ...]]:
        """What this rank holds of a value, and where that belongs in the global tensor."""
        return local_part(value).detach(), self.boxes(name, self.coordinate)

    def distribute(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take this rank's part of each value, and compare the global values with the other ranks'.

        One global value is in memory at a time. Nothing is changed if any rank raises.
        """
        parts: dict[str, torch.Tensor] = {}
        digests: dict[str, int] = {}
        with together(self.mesh):
            for name, value in values:
                parts[name] = self.part(name, value)
                if not isinstance(value, DTensor) and is_real(value):
                    digests[name] = digest(value)
        all_alike(
            digests,
            self.mesh,
            "the ranks have different values for '{name}': seed every rank equally before building the model, or build "
            "it on meta and call materialize(state_dict)",
        )
        for name, tensor in parts.items():
            self.adopt(name, tensor)

    def part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a value, in memory of its own."""
        if not isinstance(value, DTensor) and not is_real(value):
            return self.empty(name, torch.device("meta"), value.dtype)
        if not isinstance(self[name], nn.Parameter):
            return whole(value).detach().to(self.device, copy=True)
        place = self.place(name)
        if isinstance(value, DTensor):
            with torch.no_grad():
                local = place.placed(value).clone(memory_format=torch.contiguous_format)
        else:
            local = place.part(value.detach()).to(self.device)
            storage = local.untyped_storage()
            if storage.data_ptr() == value.untyped_storage().data_ptr() or storage.nbytes() > local.nbytes:
                local = local.clone(memory_format=torch.contiguous_format)
        return place.dtensor(local, value.shape).requires_grad_(self[name].requires_grad)

    def empty(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory for this rank's part of a value."""
        present = self[name]
        dtype = dtype or present.dtype
        if not isinstance(present, nn.Parameter):
            return torch.empty(present.shape, dtype=dtype, device=device)
        place = self.place(name)
        local = torch.empty(place.held(tuple(present.shape)), dtype=dtype, device=device)
        return place.dtensor(local, present.shape).requires_grad_(present.requires_grad)

    def adopt(self, name: str, tensor: torch.Tensor) -> None:
        """Have this rank's part of a value under all names that it has."""
        is_parameter = isinstance(self[name], nn.Parameter)
        new = nn.Parameter(tensor, requires_grad=tensor.requires_grad) if is_parameter else tensor
        take_notes(new, self[name])
        self.put(name, new)
        if name in self.hooked and new.requires_grad:
            whole_gradient(name, new)

    # -- whether they are still the same

    def _see(self, name: str, value: torch.Tensor) -> None:
        self._shells[name] = value, memory_of(value) if isinstance(value, DTensor) else 0
        self._ledger = None

    def _look(self) -> Ledger:
        """What stands now wherever a program's values are registered, or modules of the model."""
        needed = [name for name in self._forms if self._is_needed(name)]
        slots = [*(self.owners[alias] for name in needed for alias in self.aliases[name]), *self._empty]
        registered = [(slot.registry, slot.key) for slot in slots]
        registered += [(now, key) for _, now, then in self._modules for key in then]
        shells = [value for name in needed if isinstance(value := self._shells[name][0], DTensor)]
        ledger = Ledger()
        for registry, key in registered:
            ledger.enter("", partial(registry.get, key), alike=is_)
        for shell in shells:
            ledger.enter("", partial(memory_of, shell))
        for _, now, _ in self._modules:
            ledger.enter("", partial(len, now))
        return ledger

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
            if other != name and self.owners[other].tensor is value:
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
