"""Mirrors of a model's modules: of the same classes and attributes, with tensors of their own. What stands for one, and
the model that one is made of again."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.redistributing import full_tensor
from autopar.passes.capture.fakes import STANDS_FOR, skeleton

from .agreement import together
from .places import whole
from .state import State
from .state_dicts import rename_versions, taking_parts, to_load
from .values import ModuleValues, all_slots


def _call(cls: type[nn.Module], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A submodule called by itself: `parallel.lm_head(h)`. Its parameters are DTensors, and a plain tensor beside one
    is an error deep in torch. So it gathers them, and every rank runs all of it, on inputs that are equal on all:
    right, differentiable, and no faster than on one device."""
    split = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    if not split:  # called by a submodule that has gathered them, or there are none
        return super(cls, module).__call__(*args, **kwargs)  # type: ignore[misc]
    meta = [name for name, p in split.items() if p.device.type == "meta"]
    if meta:
        raise ValueError(f"parameter {meta[0]} is on meta: call materialize(init_fn or state_dict) first")
    args, kwargs = pytree.tree_map_only(DTensor, full_tensor, (args, kwargs))
    gathered = {name: full_tensor(p) for name, p in split.items()}
    return torch.func.functional_call(module, gathered, args, kwargs)


def refuse_moved(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises ValueError if `fn`, tried on tensors like those of the module, gives other tensors, or shares them."""
    held = {(t.dtype, t.device, t.dim()): name for name, t in chain(module.named_parameters(), module.named_buffers())}
    for (dtype, device, dims), name in held.items():
        like = torch.empty((2,) * dims, dtype=dtype, device=device)
        was_shared = like.untyped_storage().is_shared()
        cause: Exception | None = None
        try:
            stays = fn(like) is like and like.untyped_storage().is_shared() == was_shared
        except Exception as error:  # of torch, such as: no CUDA here
            stays, cause = False, error
        if not stays:
            raise ValueError(
                f"a parallel module keeps its device and dtype ({name}: {dtype} on {device}), which are part of its "
                f"program: move or cast the model before parallelize, and use materialize() for a model on meta"
            ) from cause


_MIRRORS: set[type[Any]] = set()


@cache
def _callable_alone(kind: type[Any]) -> type[Any]:
    """A class that passes for this one, whose calls gather the parameters, which keeps its device and dtype, and loads
    what this rank holds of values."""

    class Submodule(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _call(Submodule, self, args, kwargs)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            refuse_moved(self, fn)
            return self

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            with taking_parts(self):
                super()._load_from_state_dict(state_dict, prefix, *rest)

    Submodule.__name__, Submodule.__qualname__ = kind.__name__, kind.__qualname__
    Submodule.__module__, Submodule.__doc__ = kind.__module__, kind.__doc__
    _MIRRORS.add(Submodule)
    return Submodule


def mirrored(mirrors: dict[int, nn.Module], module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with tensors of its own to come."""
    if id(module) not in mirrors:
        mirror: nn.Module = object.__new__(_callable_alone(type(module)))  # type: ignore[arg-type]
        vars(mirror).update(vars(module))
        vars(mirror).update(
            _parameters=dict(module._parameters),
            _buffers=dict(module._buffers),
            _modules={},
            _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
            _compiled_call_impl=None,  # of the original's parameters
        )
        vars(mirror)[STANDS_FOR] = weakref.ref(module)
        mirrors[id(module)] = mirror
        mirror._modules.update({n: None if m is None else mirrored(mirrors, m) for n, m in module._modules.items()})
    return mirrors[id(module)]


def whole_model(values: ModuleValues) -> nn.Module:
    """The model on one device again: a copy that holds whole values on each rank. All ranks call it at once, and one
    value after the other is gathered."""
    with together(values.mesh):
        if on_meta := values.on_meta():
            raise ValueError(f"{on_meta[0]} is on meta, and has no value: call materialize or load_pretrained first")
    model, _ = skeleton(values.root)
    for module in model.modules():
        if type(module) in _MIRRORS:
            module.__class__ = type(module).__mro__[1]
    slots = {slot.name: slot for slot in all_slots(model)}
    with torch.no_grad():
        for name, aliases in values.aliases.items():
            value = values[name]
            copied = whole(value).clone(memory_format=torch.contiguous_format)
            if isinstance(value, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=value.requires_grad)
            for alias in slots.keys() & aliases:
                slots[alias].hold(copied)
    return model


class MirrorModule(nn.Module):
    """A module that is to others what its `_root` is, the mirror of a model, and runs what it wants."""

    _root: nn.Module
    _state: State

    def train(self, mode: bool = True) -> Self:
        """As on the model, whose class may keep parts of it as they are (a frozen BatchNorm in evaluation)."""
        self._root.train(mode)
        self.training = self._root.training
        return self

    def eval(self) -> Self:
        """As on the model, whose class may write its own."""
        self._root.eval()
        self.training = self._root.training
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As on the model, with its hooks, its extra state, and what its class makes of it."""
        made = self._root.state_dict(*args, **kwargs)
        rename_versions(made, kwargs.get("prefix", ""))
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As on the model, with its hooks, its extra state, and what its class makes of it. Values may be global
        tensors, of which this rank takes its part, or DTensors; names those of the model within `torch.compile` and
        `checkpoint_wrapper`, or without. With `assign`, values are cast to the dtypes of the model, and parameters are
        new objects. All ranks call it at once; what any of them raises, all raise."""
        values = self._state.values
        with together(values.mesh):
            return values.root.load_state_dict(to_load(state_dict, values.root), *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Where a module that holds this one is loaded."""
        self._root._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = vars(self).get("_root")
            if root is None or name.startswith("__"):
                raise
        value = getattr(root, name)
        if inspect.ismethod(value) and value.__self__ is root:
            raise AttributeError(
                f"{type(root).__name__}.{name} is a method of the model on one device; only the captured call runs in "
                f"parallel: call it on gathered(), a copy with whole values"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model are set there, where its Python reads them."""
        root = vars(self).get("_root")
        own = name in vars(self) or hasattr(type(self), name) or isinstance(value, (nn.Parameter, nn.Module))
        if root is None or own:
            super().__setattr__(name, value)
        else:
            setattr(root, name, value)

    def __copy__(self) -> Self:
        raise ValueError("a parallel module has no shallow copy: use copy.deepcopy for one with values of its own")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a parallel module cannot be pickled, since it belongs to the process groups of its mesh: save its "
            "state_dict() with torch.distributed.checkpoint, or its full tensors with torch.save, and load "
            "them into a module that parallelize makes"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`to`, `cpu`, `float` and the like. Whoever holds a module calls them; they do nothing where device and dtype
        stay."""
        refuse_moved(self, fn)
        return self

    def _get_name(self) -> str:
        return f"{type(self).__name__}({type(self._root).__name__})"
