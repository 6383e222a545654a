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

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import itertools
import logging
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import compat

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

ARRAY_BYTES_MOST = 1 << 16
"""Arrays up to this size are compared at every call."""

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum,
)  # fmt: skip
_STATE = (
    dict, list, tuple, set, collections.deque, bytearray, torch.Tensor, torch.Generator, nn.Module, random.Random,
    types.SimpleNamespace, contextvars.ContextVar,
)  # fmt: skip
_CACHE = type(functools.lru_cache(len))
_PLACES = tuple(sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}))


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """The token of what is compared by identity, and of a tensor."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Drawn(tuple[Any, ...]):
    """The token of what cannot be looked at again: a generator, an iterator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What was read while a model was traced: attributes of modules as (path, name), and of other objects by class.
    `__dict__` stands for all of them. `values` are the tensors whose numbers became Python's."""

    modules: frozenset[tuple[str, str]] = frozenset()
    fields: Mapping[type, frozenset[str]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()

    def of(self, value: Any) -> frozenset[str] | None:
        """The attributes of an object that count; None for all."""
        if isinstance(value, nn.Module):
            return None
        names = self.fields.get(type(value), frozenset())
        return None if "__dict__" in names else names


@dataclass(slots=True)
class Look:
    """All that was reached. `entries` are (dictionary, key, value) as they stood, `absent` keys that were not there,
    `sized` and `sequences` containers with what they held, `others` (how to look again, value); `undo` puts all
    back."""

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    entries: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)
    absent: list[tuple[dict[Any, Any], Any]] = field(default_factory=list)
    sized: list[dict[Any, Any]] = field(default_factory=list)
    sequences: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    others: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    arrays: list[tuple[Any, bytes]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)
    is_cut: bool = False
    names: set[str] = field(default_factory=set)
    """Names that the code mentions which was reached."""
    kept: list[Any] = field(default_factory=list)
    """Everything that was walked, lest an identity come up twice."""

    def differs(self, other: Look, same: Callable[[Any, Any], bool] = lambda a, b: False) -> list[str]:
        """Paths at which they differ, the outermost of each. `same` decides where tokens differ."""
        paths = dict.fromkeys((*self.facts, *other.facts))
        found = {
            path: None
            for path in paths
            if (a := self.facts.get(path, _ABSENT)) != (b := other.facts.get(path, _ABSENT)) and not same(a, b)
        }
        return [path for path in found if not any(outer in found for outer in _outer(path))]

    def restore(self) -> None:
        """Put everything back as it was when this look was taken, in the order in which it was reached."""
        with compat.without_modes():
            for put_back in self.undo:
                put_back()


_ABSENT = Same("absent")
_ALWAYS = frozenset(
    f"__{name}__"
    for name in [
        "call",
        "getattr",
        "setattr",
        "getitem",
        "setitem",
        "contains",
        "iter",
        "next",
        "len",
        "bool",
        "enter",
        "exit",
        "add",
        "mul",
        "torch_function",
    ]
) | {"forward"}
"""Methods that code calls without naming them."""


def _outer(path: str) -> Iterator[str]:
    """What a path is inside of: `a.b[0]` -> `a.b`, `a`."""
    for i in range(len(path) - 1, 0, -1):
        if path[i] in ".[":
            yield path[:i]


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
    return walk.look


@functools.cache
def is_library(code_file: str) -> bool:
    """Whether code is torch's or Python's own."""
    if not code_file or code_file.startswith("<frozen"):
        return True
    if code_file.startswith(str(Path(torch.__file__).parent)):
        return True
    return code_file.startswith(_PLACES) and "site-packages" not in code_file


@functools.cache
def _is_library_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root in ("torch", "autopar", "numpy", "builtins") or (root in sys.stdlib_module_names and root != "__main__")


class _Walk:
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
            self._whole(attributes)
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
            self.look.facts[path] = _ABSENT
        elif not _is_library_module(owner.__module__):
            raw = vars(owner)[name]
            self.look.facts[path] = ("of its class", Same(raw))
            self.look.others.append((lambda: vars(owner).get(name), raw))
            if self._is_data(raw):
                self.value(f"{owner.__name__}.{name}", raw)

    def class_of(self, cls: type) -> None:
        """Methods and data of a class and its bases, as far as reached code names them."""
        for base in cls.__mro__:
            if id(base) in self.seen or _is_library_module(base.__module__):
                continue
            self.seen[id(base)] = base.__name__
            kept = dict(vars(base))
            self.look.undo.append(functools.partial(_put_back_class, base, kept))
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
        elif self._is_data(value):
            self.look.others.append((lambda: vars(cls).get(name), value))
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
                logger.warning("the model holds so much in Python that not all is looked at: from %s on", path)
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
        if not (self._container(path, value) or self._function(path, value) or self._stream(path, value)):
            self._object(path, value)

    def _container(self, path: str, value: Any) -> bool:
        facts = self.look.facts
        if isinstance(value, dict):
            facts[path] = (type(value), tuple(map(_key, dict.keys(value))))
            self._whole(value)
            for key, item in _items(value).items():
                self.look.entries.append((value, key, item))
                self.value(f"{path}[{key!r}]", item)
        elif isinstance(value, (list, collections.deque, tuple)):
            facts[path] = (type(value), len(value))
            if not isinstance(value, tuple):
                self._sequence(value)
            for i, item in enumerate(tuple(value)):
                self.value(f"{path}[{i}]", item)
        elif isinstance(value, (set, frozenset)):
            facts[path] = (type(value), frozenset(map(_key, value)))
            if isinstance(value, set):
                self._sequence(value)
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
            if not is_library(value.__code__.co_filename):
                self._function_state(value)
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
                self.look.undo.append(functools.partial(_put_back_cell, cell, held))
                self.look.others.append((functools.partial(getattr, cell, "cell_contents", None), held))
                self.value(f"{of} {name}", held)
        for name, held in _defaults(function).items():
            self.value(f"{of} {name}", held)
        if vars(function):
            self._fields(function.__qualname__, function)
        names = _names(code)
        # no code can say `@name`: instruments write such globals beside a person's (pytest, to explain an assert)
        for name in sorted(name for name in names & namespace.keys() if name.isidentifier()):
            held = namespace[name]
            if isinstance(held, types.ModuleType):
                if not _is_library_module(held.__name__):
                    for inner in sorted(names & vars(held).keys()):
                        self._global(f"{of} {name}.{inner}", vars(held), inner)
            else:
                self._global(f"{of} {name}", namespace, name)
        self._calls(names)

    def _global(self, path: str, namespace: dict[str, Any], name: str) -> None:
        held = namespace[name]
        if isinstance(held, type):
            if not _is_library_module(held.__module__) and not issubclass(held, enum.Enum):
                self.class_of(held)
        elif self._is_data(held) or isinstance(held, (types.FunctionType, functools.partial)):
            self.look.undo.append(lambda: namespace.__setitem__(name, held))
            self.look.entries.append((namespace, name, held))
            self.value(path, held)

    def _is_data(self, value: Any) -> bool:
        """Whether a global or a class attribute may be state: not what code is made of."""
        if isinstance(value, (*_ATOMS, *_STATE, *_of_numpy())) or _is_stream(value):
            return True
        code = (type, types.FunctionType, property, staticmethod, classmethod)
        return not _is_library_module(type(value).__module__) and not isinstance(value, code)

    # ---- what gives another value each time

    def generators(self) -> None:
        self._generator("random", random)
        # the functions of `random` and `numpy.random` are methods of a hidden generator each
        self.seen[id(getattr(random.random, "__self__", None))] = "random"
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self.seen[id(numpy.random.rand.__self__)] = "numpy.random"
            self._numpy("numpy.random", numpy.random.get_state, numpy.random.set_state)
        self.look.facts["torch.get_rng_state()"] = Drawn((_bytes(torch.get_rng_state()),))
        state = torch.get_rng_state()
        self.look.undo.append(lambda: torch.set_rng_state(state))

    def _generator(self, path: str, generator: Any) -> None:
        state = generator.getstate()
        self.look.facts[path] = Drawn((state,))
        self.look.undo.append(lambda: generator.setstate(state))

    def _numpy(self, path: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        state = get()
        self.look.facts[path] = Drawn((_flat(state),))
        self.look.undo.append(lambda: put(state))

    def _stream(self, path: str, value: Any) -> bool:
        facts = self.look.facts
        numpy = sys.modules.get("numpy")
        if isinstance(value, random.Random):
            self._generator(path, value)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            self._numpy(path, lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            self._numpy(path, value.get_state, value.set_state)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            kept = value.copy()
            facts[path] = ("array", value.shape, str(value.dtype), kept.tobytes() if value.dtype != object else None)
            if kept.nbytes <= ARRAY_BYTES_MOST:
                self.look.arrays.append((value, kept.tobytes()))
            if value.flags.writeable:
                self.look.undo.append(lambda: value.__setitem__(..., kept))
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            facts[path] = Drawn((_bytes(state),))
            self.look.undo.append(functools.partial(_put_back_generator, value, state))
        elif isinstance(value, contextvars.ContextVar):
            held = value.get(None)
            self.value(f"{path}.get()", held)
            self.look.undo.append(lambda: None if value.get(None) is held else value.set(held) and None)
        elif isinstance(value, weakref.ref):
            held = value()
            facts[path] = (type(value), Same(held))
            if not isinstance(held, (torch.Tensor, nn.Module)):  # those are reached where they are registered
                self.look.others.append((value, held))
                self.value(f"{path}()", held)
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            facts[path] = Drawn(("generator", frame.f_lasti if frame else None, repr(frame and frame.f_locals)))
        elif _is_stream(value):
            facts[path] = Drawn((type(value), _position(value)))
        else:
            return False
        return True

    # ---- other objects

    def _object(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, nn.Module) or not (
            _is_library_module(kind.__module__) and kind is not types.SimpleNamespace
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
                self._whole(fields)
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
                known = name not in ("__dict__", "__weakref__") and (wanted is None or name in wanted)
                if known and hasattr(value, name):
                    item = getattr(value, name)
                    self.value(f"{path}.{name}", item)
                    self.look.others.append((functools.partial(getattr, value, name, None), item))
                    self.look.undo.append(functools.partial(_put_back_attribute, value, name, item))

    def _whole(self, value: dict[Any, Any]) -> None:
        kept = _items(value)
        self.look.sized.append(value)
        self.look.undo.append(lambda: _put_back_mapping(value, kept))

    def _sequence(self, value: Any) -> None:
        kept = tuple(value)
        self.look.sequences.append((value, kept))
        self.look.undo.append(lambda: _put_back_sequence(value, kept))


def _key(key: Any) -> Any:
    return (type(key), key) if isinstance(key, _ATOMS) else Same(key)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Values of arguments that are made once."""
    given = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(given) > len(names):  # a decorator gave its wrapper the defaults of what it wraps
        names = tuple(f"default {i}" for i in range(len(given)))
    return {**dict(zip(names[len(names) - len(given) :], given, strict=True)), **(function.__kwdefaults__ or {})}


def _names(code: types.CodeType) -> set[str]:
    """Names that a function's code mentions, functions inside of it too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _of_numpy() -> tuple[type, ...]:
    """What of numpy is state, where it is imported."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState)


def _is_stream(value: Any) -> bool:
    """Whether `next` moves it on."""
    return hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")


def _position(value: Any) -> Any:
    if isinstance(value, itertools.count):
        return repr(value)
    hint = getattr(value, "__length_hint__", None)
    if hint is not None:
        return hint()
    # a copy is where the original is, and gives what that gives next
    try:
        return repr(value.__reduce__())
    except TypeError:
        return None


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _flat(state: Any) -> Any:
    """A numpy generator's state as what can be compared."""
    if isinstance(state, dict):
        return tuple((key, _flat(item)) for key, item in state.items())
    if isinstance(state, (tuple, list)):
        return tuple(map(_flat, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def _items(value: dict[Any, Any]) -> dict[Any, Any]:
    """What a dictionary holds, whatever its class makes of it when it is asked."""
    return dict(dict.items(value))


def _put_back_mapping(value: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if len(value) != len(kept) or any(dict.get(value, key, _ABSENT) is not item for key, item in kept.items()):
        kind: type[dict[Any, Any]] = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        kind.clear(value)
        for key, item in kept.items():
            kind.__setitem__(value, key, item)


def _put_back_sequence(value: Any, kept: tuple[Any, ...]) -> None:
    if len(value) != len(kept) or any(a is not b for a, b in zip(value, kept, strict=True)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(kept)


def _put_back_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _put_back_cell(cell: types.CellType, held: Any) -> None:
    cell.cell_contents = held


def _put_back_class(cls: type, kept: dict[str, Any]) -> None:
    for name in [*vars(cls)]:
        if name not in kept and not name.startswith("__"):
            delattr(cls, name)
    for name, item in kept.items():
        if vars(cls).get(name, _ABSENT) is not item and not name.startswith("__"):
            setattr(cls, name, item)


def _put_back_attribute(owner: Any, name: str, held: Any) -> None:
    if getattr(owner, name, _ABSENT) is not held:
        setattr(owner, name, held)


def line_of_model() -> str:
    """The line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "autopar.")) and not is_library(frame.f_code.co_filename):
            return f" ({frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
