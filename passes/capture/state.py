"""What a model's Python can reach beside parameters, buffers and inputs, as it is at one moment.

    modules, loss_fn --_walk--> Look: path -> token, and how to put all of it back

A path reads as the code does (`encoder.layers.0.calls`, `loss_fn.weights[2]`, `Layer.forward's stats`).
A token says what stands there: type and value of a constant, length and keys of a container, the state of a generator
of random numbers, and otherwise the object itself. Two looks are equal where all tokens are.

What is reached: attributes of modules, their containers and plain objects; of the functions among them, of the methods
of the modules' classes and of loss_fn the variables that they close over, their defaults and the globals that they
name; data attributes of the classes; the global generators of `random` and numpy. Objects of torch and of Python's own
library are taken as they are, and so is what files, clocks and other processes tell.
"""

import collections
import contextvars
import enum
import functools
import logging
import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar import compat

from .looks import (
    ABSENT,
    Look,
    Reads,
    Same,
    Streams,
    defaults_of,
    is_library,
    is_library_module,
    is_stream,
    names_of,
    put_back_attribute,
    put_back_class,
    put_back_mapping,
)

logger = logging.getLogger(__name__)

REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps what a graph has inputs for."""

_OTHERWISE = REGISTRIES | {
    "__dict__", "__class__", "training",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_flat_weights", "_flat_weight_refs",  # the parameters of torch's recurrent layers, once more
}  # fmt: skip
"""Attributes of modules that are compared in other ways."""

FACTS_MOST = 300_000
"""Where a walk ends, with a warning."""

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum,
)  # fmt: skip

_STATE = (
    dict, list, tuple, set, collections.deque, bytearray, torch.Tensor, torch.Generator, nn.Module, random.Random,
    types.SimpleNamespace, contextvars.ContextVar,
)  # fmt: skip

_CACHE = type(functools.lru_cache(len))

_CALLED = "call getattr setattr getitem setitem contains iter next len bool enter exit add mul torch_function"
_ALWAYS = frozenset(f"__{name}__" for name in _CALLED.split()) | {"forward", "backward"}
"""Methods that code calls without naming them."""


def look(modules: Mapping[str, nn.Module], roots: Mapping[str, Any], reads: Reads | None = None) -> Look:
    """A look at modules by path and at other values by name; at `reads` alone, where given, and then not at
    generators, which others draw from too."""
    walk = _Walk(modules, reads)
    with compat.without_modes():
        if reads is None:
            walk.generators()
        for path, module in modules.items():
            walk.module(path, module)
        for name, value in roots.items():
            walk.value(name, value)
    walk.settings()
    return walk.look


class _Walk(Streams):
    def __init__(self, modules: Mapping[str, nn.Module], reads: Reads | None) -> None:
        self.look, self.reads = Look(), reads
        self.inside = {id(module): path for path, module in modules.items()}
        self.seen: dict[int, str] = {}
        self.called: set[str] = set(_ALWAYS)  # names of attributes that reached code mentions
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self.names: dict[str, set[str]] = {}
        for path, name in reads.modules if reads is not None else ():
            self.names.setdefault(path, set()).add(name)

    # ---- modules

    def module(self, path: str, module: nn.Module) -> None:
        attributes, prefix = vars(module), f"{path}." if path else ""
        self.look.kept.append(module)
        names = self.names.get(path, set())
        if self.reads is None or "__dict__" in names:
            _note_size(self.look, attributes)
            names = {*names, *attributes}
        for name in sorted(names - (REGISTRIES if self.reads is None else _OTHERWISE)):
            if name in attributes:
                self.look.entries.append((attributes, name, attributes[name]))
                self.value(f"{prefix}{name}", attributes[name])
            else:
                self._not_own(f"{prefix}{name}", module, name)
        self.class_of(type(module))

    def _not_own(self, path: str, module: nn.Module, name: str) -> None:
        """An attribute that was read and is not the module's own: its class's, one of its tensors or modules, or
        one that code asked for and was not there."""
        if any(name in vars(module)[registry] for registry in REGISTRIES):
            return
        owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
        if owner is not None and owner.__module__ == nn.Module.__module__:
            return
        self.look.absent.append((vars(module), name))
        if owner is None:
            self.look.facts[path] = ABSENT
        elif not is_library_module(owner.__module__):
            raw = vars(owner)[name]
            self.look.facts[path] = ("of its class", Same(raw))
            self.look.others.append((functools.partial(vars(owner).get, name), raw))
            if _is_data(raw):
                self.value(f"{owner.__name__}.{name}", raw)

    def class_of(self, cls: type) -> None:
        """Methods and data of a class and its bases, as far as reached code names them."""
        for base in cls.__mro__:
            if id(base) in self.seen or is_library_module(base.__module__):
                continue
            self.seen[id(base)] = base.__name__
            kept = dict(vars(base))
            self.look.undo.append(functools.partial(put_back_class, base, kept))
            for name, value in kept.items():
                wait = functools.partial(self._class_attribute, base, name, value)
                if name in self.called:
                    wait()
                elif not name.startswith("__"):
                    self.waiting.setdefault(name, []).append(wait)

    def _class_attribute(self, cls: type, name: str, value: Any) -> None:
        path = f"{cls.__name__}.{name}"
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(inner, (types.FunctionType, _CACHE)):
            self.value(path, inner)
        elif _is_data(value):
            self.look.others.append((functools.partial(vars(cls).get, name), value))
            self.value(path, value)

    def _calls(self, names: set[str]) -> None:
        self.look.names |= names
        for name in names - self.called:
            self.called.add(name)
            for wait in self.waiting.pop(name, ()):
                wait()

    # ---- values

    def value(self, path: str, value: Any) -> None:
        look = self.look
        if len(look.facts) >= FACTS_MOST:
            if not look.is_cut:
                logger.warning("the model holds too much in Python to compare all of it: not from %s on", path)
            look.is_cut = True
            return
        if isinstance(value, _ATOMS):
            look.facts[path] = (type(value), repr(value) if isinstance(value, (float, complex, slice)) else value)
            return
        if isinstance(value, torch.Tensor):
            look.facts[path] = Same(value)
            look.tensors.append((path, value))
            if self.reads is not None and path in self.reads.values:
                look.facts[path] = (Same(value), value._version)
                look.versions.append((value, value._version))
            return
        if id(value) in self.inside:
            look.facts[path] = ("module", self.inside[id(value)])
            return
        if id(value) in self.seen:
            look.facts[path] = ("as", self.seen[id(value)])
            return
        self.seen[id(value)] = path
        look.kept.append(value)
        if not (self._container(path, value) or self._function(path, value) or self.stream(path, value)):
            self._object(path, value)

    def _container(self, path: str, value: Any) -> bool:
        facts = self.look.facts
        if isinstance(value, dict):
            facts[path] = (type(value), tuple(map(_key, dict.keys(value))))
            _note_size(self.look, value)
            for key, item in _items(value).items():
                self.look.entries.append((value, key, item))
                self.value(f"{path}[{key!r}]", item)
        elif isinstance(value, (list, collections.deque, tuple)):
            facts[path] = (type(value), len(value))
            if not isinstance(value, tuple):
                self.sequence(value)
            for i, item in enumerate(tuple(value)):
                self.value(f"{path}[{i}]", item)
        elif isinstance(value, (set, frozenset)):
            facts[path] = (type(value), frozenset(map(_key, value)))
            if isinstance(value, set):
                self.sequence(value)
        elif isinstance(value, (bytearray, memoryview)):
            facts[path] = (type(value), bytes(value))
        else:
            return False
        if type(value).__module__ not in ("builtins", "collections") and hasattr(value, "__dict__"):
            self._fields(path, value)
        return True

    def _function(self, path: str, value: Any) -> bool:
        facts = self.look.facts
        if isinstance(value, types.FunctionType):
            facts[path] = Same(value)
            if is_library(value.__code__.co_filename):
                self._calls({value.__name__})  # whatever the model calls it
            else:
                self._function_state(value)
        elif isinstance(value, types.BuiltinFunctionType) and is_library_module(value.__module__ or ""):
            facts[path] = Same(value)
            self._calls({value.__name__})
        elif isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (type, types.ModuleType)):
            facts[path] = ("method", value.__name__)
            self.value(f"{path}.__self__", value.__self__)
        elif isinstance(value, types.MethodType):
            facts[path] = ("method", Same(value.__func__))
            self.value(f"{path}.__self__", value.__self__)
            self.value(path + ".__func__", value.__func__)
        elif isinstance(value, functools.partial):
            facts[path] = (functools.partial,)
            self.value(f"{path}.func", value.func)
            self.value(f"{path}.args", value.args)
            self.value(f"{path}.keywords", value.keywords)
        elif isinstance(value, _CACHE):
            facts[path] = Same(value)
            # results that the trace left in a cache are no tensors
            size = value.cache_info().currsize
            self.look.undo.append(lambda: value.cache_clear() if value.cache_info().currsize != size else None)
            self.value(f"{path}.__wrapped__", value.__wrapped__)
        else:
            return False
        return True

    def _function_state(self, function: types.FunctionType) -> None:
        of = f"{function.__qualname__}'s"
        code, namespace = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            if name != "__class__":
                self.look.undo.append(functools.partial(setattr, cell, "cell_contents", held))
                self.look.others.append((functools.partial(getattr, cell, "cell_contents", None), held))
                self.value(f"{of} {name}", held)
        for name, held in defaults_of(function).items():
            self.value(f"{of} {name}", held)
        if vars(function):
            self._fields(function.__qualname__, function)
        names = names_of(code)
        # no code can say `@name`: instruments write such globals beside a person's (pytest, to explain an assert)
        for name in sorted(name for name in names & namespace.keys() if name.isidentifier()):
            held = namespace[name]
            if isinstance(held, types.ModuleType):
                if not is_library_module(held.__name__):
                    for inner in sorted(names & vars(held).keys()):
                        self._global(f"{of} {name}.{inner}", vars(held), inner)
            else:
                self._global(f"{of} {name}", namespace, name)
        self._calls(names)

    def _global(self, path: str, namespace: dict[str, Any], name: str) -> None:
        held = namespace[name]
        if isinstance(held, type):
            if not is_library_module(held.__module__) and not issubclass(held, enum.Enum):
                self.class_of(held)
        elif _is_data(held) or isinstance(held, (types.FunctionType, types.BuiltinFunctionType, functools.partial)):
            self.look.undo.append(lambda: namespace.__setitem__(name, held))
            self.look.entries.append((namespace, name, held))
            self.value(path, held)

    # ---- other objects

    def _object(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, type) and not (is_library_module(value.__module__) or issubclass(value, enum.Enum)):
            self.look.facts[path] = Same(value)
            del self.seen[id(value)]  # its methods are still to be looked at
            self.class_of(value)
        elif isinstance(value, nn.Module) or not (
            is_library_module(kind.__module__) and kind is not types.SimpleNamespace
        ):
            self.look.facts[path] = ("an object", kind)
            self._fields(path, value)
            if not isinstance(value, type):
                self.class_of(kind)
        else:
            self.look.facts[path] = Same(value)

    def _fields(self, path: str, value: Any) -> None:
        wanted = None if self.reads is None else self.reads.of(value)
        self.look.classes.add(type(value))
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            if wanted is None:
                _note_size(self.look, fields)
            for name in [name for name in fields if wanted is None or name in wanted]:
                if isinstance(value, nn.Module) and name in REGISTRIES:
                    for key, item in fields[name].items():
                        self.value(f"{path}.{key}", item)
                    continue
                self.look.entries.append((fields, name, fields[name]))
                self.value(f"{path}.{name}", fields[name])
            self.look.absent += [(fields, name) for name in wanted or () if name not in fields]
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                included = name not in ("__dict__", "__weakref__") and (wanted is None or name in wanted)
                if included and hasattr(value, name):
                    item = getattr(value, name)
                    self.value(f"{path}.{name}", item)
                    self.look.others.append((functools.partial(getattr, value, name, None), item))
                    self.look.undo.append(functools.partial(put_back_attribute, value, name, item))


def _note_size(look: Look, value: dict[Any, Any]) -> None:
    kept = _items(value)
    look.sized.append(value)
    look.undo.append(lambda: put_back_mapping(value, kept))


def _key(key: Any) -> Any:
    return (type(key), key) if isinstance(key, _ATOMS) else Same(key)


def _of_numpy() -> tuple[type, ...]:
    """What of numpy is state, where it is imported."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState)


def _items(value: dict[Any, Any]) -> dict[Any, Any]:
    """What a dictionary holds, whatever its class makes of it when it is asked."""
    return dict(dict.items(value))


def _is_data(value: Any) -> bool:
    """Whether a global or a class attribute may be state: not what code is made of."""
    if isinstance(value, (*_ATOMS, *_STATE, *_of_numpy())) or is_stream(value):
        return True
    code = (type, types.FunctionType, property, staticmethod, classmethod)
    return not is_library_module(type(value).__module__) and not isinstance(value, code)
