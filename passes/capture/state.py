"""What a model's Python can reach beside parameters, buffers and inputs, as it is at one moment.

    modules, loss_fn --_Walk--> Ledger: path -> token, and how to put all of it back

A path reads as the code does (`encoder.layers.0.calls`, `loss_fn.weights[2]`, `Layer.forward's stats`).
A token says what stands there: type and value of a constant, length and keys of a container, the state of a generator
of random numbers, the identity of a tensor, a function, a lock. Two ledgers are equal where all tokens are.

Every object is looked into alike. A class of Python's has fields: what is in the `__dict__` and in the slots. A class
written in C has a rule (`_RULES`), or is seen as pickle sees it, or is one of those that hold nothing (`_OPAQUE`).
What forward read and nothing sees into is refused by name. Functions and classes lead on to what their code names:
closures, defaults, globals, data of classes. Code of torch and of Python's own library is taken as it is, and so is
what clocks and other processes tell.
"""

import copyreg
import decimal
import enum
import functools
import gc
import logging
import operator
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from autopar.compat.tensors import is_fake, is_plain, is_torchs, memory_of, notes_of, unmodified
from autopar.compat.watching import HOOKS, SETTINGS, SETTINGS_AT_WORK, global_hooks
from autopar.ir.rewrite import distinct
from autopar.ir.tree import joined

from .errors import CaptureError
from .fakes import STANDS_FOR
from .ledger import ABSENT, Drawn, Ledger, Reads, Same, contents, identities, outer_paths, put_back
from .source import defaults_of, is_library, is_library_module, names_of

logger = logging.getLogger(__name__)

REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps what a graph has inputs for."""

_OTHERWISE = REGISTRIES | {
    *HOOKS, "__dict__", "__class__", "training",
    "_flat_weights", "_flat_weight_refs",  # the parameters of torch's recurrent layers, once more
    STANDS_FOR,
}  # fmt: skip
"""Attributes of modules that are compared in other ways."""

TOKENS_MOST = 300_000
"""Where a walk ends, with a warning."""

REGISTERED = "registered"
"""The token of what a module was asked for and has among its parameters, buffers or modules."""

NUMBERS_MOST = 64
"""Up to which size a tensor is compared by its numbers, and not by how often it was written."""

BYTES_MOST = 1 << 26
"""Up to which size an array is copied that forward may not read."""

_ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
"""Types of constants, which are compared by value."""

_DATA = _ATOMS | {tuple, list, dict, set, frozenset, torch.Tensor}
"""Types of what is compared on a class of torch's or of Python's library, to which anyone may add it."""

_CODE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, property, staticmethod, classmethod,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
"""What code is made of, and not data."""

_ABOUT = frozenset({
    "__doc__", "__annotations__", "__module__", "__name__", "__qualname__", "__dict__", "__weakref__", "__objclass__",
    "__closure__", "__globals__", "__builtins__", "__vectorcalloffset__",
})  # fmt: skip
"""What code says about itself, and what is looked at in other ways."""

_CALLED = "call getattr setattr getitem setitem contains iter next len bool enter exit add mul torch_function"
_ALWAYS = frozenset(f"__{name}__" for name in _CALLED.split()) | {"forward", "backward"}
"""Methods that code calls without naming them."""


def look(modules: Mapping[str, nn.Module], loss_fn: Any = None, reads: Reads | None = None) -> Ledger:
    """What modules by path, their loss and the global hooks hold; of what was read alone, where that is given, and then
    not generators, which others draw from too. Raises CaptureError where forward read what nothing sees into."""
    walk = _Walk(modules, reads)
    with unmodified():
        if reads is None:
            # the functions of `random` and `numpy.random` are methods of a hidden generator each
            walk.reach("random", getattr(random.random, "__self__", None))
            if (numpy := sys.modules.get("numpy")) is not None:
                walk.reach("numpy.random", numpy.random.rand.__self__)
            walk.reach("torch.get_rng_state()", torch.default_generator)
        walk.class_of(nn.Parameter)
        for path, module in modules.items():
            walk.module(path, module)
        for name, value in {**({} if loss_fn is None else {"loss_fn": loss_fn}), **global_hooks()}.items():
            walk.reach(name, value)
        walk.run()
    walk.settings()
    walk.waiting.clear()  # it leads back to the walk, which would be garbage in a cycle with all that it saw
    if reads is None:  # where less is looked at, the same object may be reached by another path first
        walk.ledger.tensors += [
            (alias + path[len(outer) :], tensor)
            for path, tensor in walk.ledger.tensors
            for outer in outer_paths(path)
            for alias in walk.aliases.get(outer, ())
        ]
    return walk.ledger


class _Walk:
    def __init__(self, modules: Mapping[str, nn.Module], reads: Reads | None) -> None:
        self.ledger, self.reads = Ledger(), reads
        self.inside = {id(module): path for path, module in modules.items()}
        # what is printed is nobody's state
        self.seen: dict[int, str] = {id(getattr(sys, name)): f"sys.{name}" for name in ("stdout", "stderr", "stdin")}
        self.queue: deque[tuple[str, Any]] = deque()
        self.aliases: dict[str, list[str]] = {}
        self.rules: dict[type, tuple[_Rule | None, list[tuple[str, Any]]]] = {}
        self.compared: set[tuple[int, str, bool]] = set()  # names of namespaces, and of classes
        self.called: set[str] = set(_ALWAYS)  # names of attributes that reached code mentions
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self.kept: list[Any] = []  # everything that was walked, lest an identity come up twice

    def run(self) -> None:
        """Look at all that is reached, the nearest first."""
        while self.queue:
            path, value = self.queue.popleft()
            if len(self.ledger.tokens) >= TOKENS_MOST:
                logger.warning("the model holds too much in Python to compare all of it: not from %s on", path)
                self.queue.clear()
            else:
                # two lambdas of one function have one name
                self.ledger.tokens[distinct(path, self.ledger.tokens)] = self.token(path, value)

    def reach(self, path: str, value: Any) -> None:
        self.queue.append((path, value))

    def held(
        self, path: str, ask: Callable[[], Any], put: Callable[[Any], object] | None = None, *, is_fixed: bool = False
    ) -> None:
        """Reach what stands at a path. Unless it is fixed, it is to be the same object later on."""
        self.reach(path, ask() if is_fixed else self.ledger.enter(path, ask, put, operator.is_))

    def contents(self, path: str, value: Any) -> None:
        """A container or a class is to hold the same objects later on."""
        kept = contents(value)
        self.ledger.enter(path, functools.partial(identities, value), lambda _: put_back(value, kept))

    def token(self, path: str, value: Any) -> Any:
        """What stands at a path. What is inside of it is reached."""
        kind = type(value)
        if kind in _ATOMS:
            return _frozen(value)
        if value is ABSENT:
            return value
        if id(value) in self.inside:
            return ("module", self.inside[id(value)])
        if issubclass(kind, torch.Tensor):
            if value.layout is torch.strided:  # others have no memory that a graph could read
                self.ledger.tensors.append((path, value))
            self.notes(path, value)
            if self.reads is None:
                return Same(value)
            asks: list[Callable[[], int]] = [functools.partial(memory_of, value)] if is_plain(value) else []
            if path in self.reads.values:
                asks.append(functools.partial(_numbers, value))
            return (Same(value), *(self.ledger.enter(path, ask) for ask in asks))
        if id(value) in self.seen:
            self.aliases.setdefault(self.seen[id(value)], []).append(path)
            return ("as", self.seen[id(value)])
        self.seen[id(value)] = path
        self.kept.append(value)
        if isinstance(value, torch.Generator):
            self.ledger.generators.append(value)
        if kind not in self.rules:
            self.rules[kind] = _rule_of(kind), _slots(kind)
        rule, slots = self.rules[kind]
        if rule is None:
            return Same(value)
        token = rule(self, path, value)
        self.fields(path, value, None if self.reads is None else self.reads.of(kind), slots)
        return token

    # ---- fields

    def module(self, path: str, module: nn.Module) -> None:
        """A module of the model."""
        self.kept.append(module)
        self.fields(path, module, None if self.reads is None else self.reads.of(path))
        for name in () if self.reads is None else HOOKS:
            _mapping(self, joined(path, name), vars(module)[name])
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    self.notes(joined(path, name), tensor)
                    if self.reads is not None:  # it may be replaced
                        self.ledger.enter(joined(path, name), functools.partial(_note_count, registry, name))
        self.class_of(type(module))

    def fields(self, path: str, value: Any, wanted: Set[str] | None, slots: Sequence[tuple[str, Any]] = ()) -> None:
        """What is in the `__dict__` of an object, and in its slots: what was read of it, or all."""
        fields, otherwise = getattr(value, "__dict__", None), _ABOUT
        if isinstance(value, nn.Module):
            inside = id(value) in self.inside
            otherwise = _OTHERWISE if inside and self.reads is not None else REGISTRIES
            for registry in () if inside else REGISTRIES:
                for name, held in vars(value)[registry].items():
                    self.reach(f"{path}.{name}", held)
        if isinstance(fields, dict):
            self.ledger.classes.add(type(value))
            if wanted is None and (fields or self.reads is None or not _is_of_library(value)):
                self.sized(path, fields)
            for name in [*fields] if wanted is None else sorted(wanted):
                if name in otherwise or is_torchs(str(name)):
                    continue
                if name in fields:
                    self.item(joined(path, name), fields, name)
                else:
                    self._not_own(joined(path, name), value, name)
        for name, slot in slots:
            self.ledger.classes.add(type(value))
            if wanted is None or name in wanted:
                self.slot(f"{path}.{name}", slot, value, is_fixed=_is_native(slot.__objclass__))

    def _not_own(self, path: str, value: Any, name: str) -> None:
        """An attribute that was read and is not in the `__dict__`: the class's, one of a module's tensors or modules,
        or one that was not there."""
        registries = [vars(value)[name] for name in REGISTRIES] if isinstance(value, nn.Module) else []
        if any(name in registry for registry in registries):
            self.ledger.tokens[path] = REGISTERED
            return
        owner = next((cls for cls in type(value).__mro__ if name in vars(cls)), None)
        if owner is nn.Module and type(vars(owner)[name]) not in _DATA:
            return
        for mapping in (vars(value), *(registries if owner is None else ())):
            self.held(path, functools.partial(dict.get, mapping, name, ABSENT))
        if owner is not None and (not is_library_module(owner.__module__) or type(vars(owner)[name]) in _DATA):
            self._class_attribute(owner, name)

    def notes(self, path: str, tensor: torch.Tensor) -> None:
        """Attributes that people set on a tensor, as far as reached code names them."""
        if self.reads is None:
            self.sized(path, vars(tensor))
        for name in notes_of(tensor) if vars(tensor) else ():
            self.when_named(name, functools.partial(self.item, f"{path}.{name}", vars(tensor), name))

    def item(self, path: str, mapping: dict[Any, Any], key: Any) -> None:
        ask = functools.partial(dict.get, mapping, key, ABSENT)
        self.held(path, ask, functools.partial(dict.__setitem__, mapping, key))

    def slot(self, path: str, slot: Any, value: Any, *, is_fixed: bool) -> None:
        """What is in a slot, or in the cell of a closure."""
        ask = functools.partial(_in_slot, slot, value)
        self.held(path, ask, functools.partial(_put_in_slot, slot, value), is_fixed=is_fixed)

    def sized(self, path: str, mapping: dict[Any, Any]) -> None:
        """Compare how much it holds, or put all of that back."""
        if self.reads is not None:
            self.ledger.enter(path, mapping.__len__)
        else:
            self.contents(path, mapping)

    # ---- code

    def when_named(self, name: str, then: Callable[[], None]) -> None:
        """Do it if reached code mentions a name, or once it does."""
        if name in self.called:
            then()
        else:
            self.waiting.setdefault(name, []).append(then)

    def calls(self, names: set[str]) -> None:
        self.ledger.names |= names
        for name in sorted(names - self.called):
            self.called.add(name)
            for then in self.waiting.pop(name, ()):
                then()

    def class_of(self, cls: type) -> None:
        """Methods of a class and its bases, and data, as far as reached code names them."""
        for base in [*cls.__mro__, *type.mro(type(cls))]:
            library = is_library_module(base.__module__)
            if id(base) in self.seen or (library and _is_native(base)):
                continue
            self.seen[id(base)] = base.__name__
            kept = dict(vars(base))
            if self.reads is not None:
                self.ledger.enter(base.__name__, vars(base).__len__)
            elif not library:
                self.contents(base.__name__, base)
            for name, held in kept.items():
                if library and type(held) not in _DATA:
                    continue
                then = functools.partial(self._class_attribute, base, name, isinstance(held, _CODE))
                if not name.startswith("__"):
                    self.when_named(name, then)
                    if type(held) in _ATOMS and not library:  # a name that is put together is in no code
                        self.when_named("getattr", then)
                elif name in self.called:
                    then()

    def _class_attribute(self, cls: type, name: str, is_code: bool = False) -> None:
        if (id(cls), name, is_code) not in self.compared:
            self.compared.add((id(cls), name, is_code))
            ask = functools.partial(vars(cls).get, name, ABSENT)
            self.held(f"{cls.__name__}.{name}", ask, is_fixed=is_code)

    def function(self, _: str, function: types.FunctionType) -> Same:
        """What a function holds, and what a person's code names."""
        of, code, namespace = f"{function.__qualname__}'s", function.__code__, function.__globals__
        library = is_library(code.co_filename)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self.slot(f"{of} {name}", _CELL, cell, is_fixed=library)
        for name, held in defaults_of(function).items():
            self.reach(f"{of} {name}", held)
        if library:
            self.calls({function.__name__})  # whatever the model calls it
            return Same(function)
        for name in ("__defaults__", "__kwdefaults__"):
            if found := getattr(function, name):
                self.ledger.enter(f"{of} {name}", functools.partial(getattr, function, name), None, operator.is_)
            if isinstance(found, dict):
                self.contents(f"{of} {name}", found)
        names = names_of(code)
        self.namespace(f"{of} ", namespace, names)
        for name in sorted(names):
            for imported in (name, f"{namespace.get('__package__')}.{name}"):
                if isinstance(module := sys.modules.get(imported), types.ModuleType):
                    self.namespace(f"{imported}.", vars(module), names, f"{module.__name__}.")
        self.calls(names)
        return Same(function)

    def namespace(self, prefix: str, namespace: dict[str, Any], names: set[str], inside: str = "") -> None:
        """Globals that code names: its own, or those inside of a module; of torch and of Python's own library constants
        alone."""
        library = is_library_module(inside)
        if self.reads is not None and not library and (id(namespace), "", False) not in self.compared:
            self.compared.add((id(namespace), "", False))
            self.ledger.enter(prefix, namespace.__len__)  # what code asks for may not be there yet
            if inside and (answers := namespace.get("__getattr__")) is not None:  # for names that the module has not
                self.reach(f"{prefix}__getattr__", answers)
        # no code can say `@name`: instruments write such globals beside a person's (pytest, to explain an assert)
        for name in sorted(filter(str.isidentifier, names & namespace.keys())):
            held, key = namespace[name], (id(namespace), name, False)
            if isinstance(held, types.ModuleType):
                if not library and held.__name__.startswith(inside):
                    self.namespace(f"{prefix}{name}.", vars(held), names, f"{held.__name__}.")
                    if type(held) is not types.ModuleType:
                        self.module_of_class(f"{prefix}{name}", held)
            elif key not in self.compared and (type(held) in _ATOMS or not library):
                self.compared.add(key)
                if not (isinstance(held, type) and is_library_module(held.__module__)):
                    self.item(f"{prefix}{name}", namespace, name)

    def module_of_class(self, path: str, module: types.ModuleType) -> None:
        """A Python module of a person's class, whose methods may answer for it: constants in it, as far as reached code
        names them."""
        self.class_of(type(module))
        for name, value in vars(module).items():
            if type(value) in _ATOMS and not name.startswith("__"):
                self.when_named(name, functools.partial(self.item, f"{path}.{name}", vars(module), name))

    def settings(self) -> None:
        """What the process is set to, as far as operators or reached code ask for it."""
        for name, ask in SETTINGS.items():
            if name in self.ledger.names | SETTINGS_AT_WORK:
                self.ledger.tokens[f"torch.{name}()"] = self.ledger.enter(f"torch.{name}()", ask)
        if self.ledger.names & {"environ", "getenv"}:
            self.ledger.tokens["os.environ"] = self.ledger.enter("os.environ", _environment, _set_environment)
        if self.ledger.names & {"decimal", "Decimal", "getcontext", "localcontext"}:
            self.held("decimal.getcontext()", decimal.getcontext)
        self.run()


_COMPILERS = tuple(
    os.fsencode(name)
    for name in ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "TORCH_WARM_POOL", "KMP_", "CUDA_HOME", "CUBLAS_")
)
"""How variables begin that torch's compiler sets while it compiles something."""


def _environment() -> dict[bytes, bytes]:
    """The environment, as it is kept, which is read in some microseconds."""
    return {name: value for name, value in vars(os.environ)["_data"].items() if not name.startswith(_COMPILERS)}


def _set_environment(kept: Mapping[bytes, bytes]) -> None:
    for name in _environment().keys() - kept.keys():
        del os.environb[name]
    os.environb.update(kept)


# ---- how an object is looked into: a rule gives its token, and reaches what is inside and is no field

_Rule = Callable[[_Walk, str, Any], Any]


def _rule_of(kind: type) -> _Rule | None:
    """How objects of a class are looked into; None where they are the same as long as they are the same object."""
    if issubclass(kind, type):
        return _class
    if issubclass(kind, enum.Enum):
        return None if is_library_module(kind.__module__) else lambda walk, path, value: Same(value)
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if names[0].startswith(_OPAQUE_MODULES) or not _OPAQUE.isdisjoint(names):
        return None
    rule = next((_RULES[name] for name in names if name in _RULES), None)
    return rule or (_object if _native(kind) is object else _pickled)


def _is_of_library(value: Any) -> bool:
    """Whether it is a function on which nobody but a library notes anything."""
    return isinstance(value, types.FunctionType) and is_library(value.__code__.co_filename)


def _native(kind: type) -> type:
    """The class written in C that a class is or derives from, whose objects may hold what is no field."""
    return next(base for base in kind.__mro__ if _is_native(base))


def _is_native(cls: type) -> bool:
    new, heap, immutable = cls.__new__, cls.__flags__ & 1 << 9, cls.__flags__ & 1 << 8  # Py_TPFLAGS_*
    return not heap or bool(immutable) or (isinstance(new, types.BuiltinFunctionType) and new.__self__ is cls)


def _slots(kind: type) -> list[tuple[str, Any]]:
    # those of `type` are the interpreter's own: what it has cached of a class, and where
    bases = [base for base in kind.__mro__ if base is not type]
    members = [member for base in bases for member in vars(base).items() if member[0] not in _ABOUT]
    return [member for member in members if isinstance(member[1], types.MemberDescriptorType)]


def _note_count(registry: Mapping[str, torch.Tensor | None], name: str) -> int:
    return len(vars(registry.get(name))) if registry.get(name) is not None else 0


def _numbers(tensor: torch.Tensor) -> Any:
    """What tells whether a tensor's numbers are the same: of few, they themselves, since not all that writes them is
    counted (`.data`, an array on its memory)."""
    is_quick = tensor.device.type == "cpu" and tensor.numel() <= NUMBERS_MOST
    return repr(tensor.tolist()) if is_quick and not is_fake(tensor) else tensor._version


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except (AttributeError, ValueError):  # there is nothing: a cell says ValueError
        return ABSENT


def _put_in_slot(slot: Any, value: Any, held: Any) -> None:
    slot.__delete__(value) if held is ABSENT else slot.__set__(value, held)


_CELL: Any = types.CellType.cell_contents


def _object(walk: _Walk, path: str, value: Any) -> Any:
    """An object that is its fields alone."""
    walk.class_of(type(value))
    return Same(value) if type(value) is object else ("an object", type(value))


def _class(walk: _Walk, path: str, value: Any) -> Any:
    del walk.seen[id(value)]  # its methods are still to be looked at
    walk.class_of(value)
    if issubclass(value, enum.Enum) and not is_library_module(value.__module__):
        for name, member in value.__members__.items():
            walk.reach(f"{value.__name__}.{name}", member)
    return Same(value)


def _builtin(walk: _Walk, path: str, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        walk.calls({value.__name__})
        return Same(value)
    walk.reach(f"{path}.__self__", owner)
    return ("method", value.__name__)


def _cache(walk: _Walk, path: str, value: Any) -> Any:
    if walk.reads is None:  # results that the trace leaves in a cache are no tensors
        walk.ledger.enter(path, lambda: value.cache_info().currsize, lambda _: value.cache_clear())
    return Same(value)


def _mapping(walk: _Walk, path: str, value: Any) -> Any:
    keys = [*dict.keys(value)]
    walk.sized(path, value)
    for i, key in enumerate(keys):
        walk.item(f"{path}[{key!r}]" if type(key) in _ATOMS else f"{path}.values()[{i}]", value, key)
        if type(key) not in _ATOMS:
            walk.reach(f"{path}.keys()[{i}]", key)
    return (type(value), tuple(map(_frozen, keys)))


def _elements(walk: _Walk, path: str, value: Any) -> Any:
    kept, is_set = tuple(value), isinstance(value, (set, frozenset))
    if not isinstance(value, (tuple, frozenset)):
        walk.contents(path, value)
    for i, item in enumerate(kept):
        if not is_set:
            walk.reach(f"{path}[{i}]", item)
        elif type(item) not in _ATOMS:
            walk.reach(f"{path}.{type(item).__name__} at {id(item):x}", item)
    return (type(value), len(kept), frozenset(map(_frozen, kept)) if is_set else None)


def _pickled(walk: _Walk, path: str, value: Any) -> Any:
    """An object as pickle sees it."""
    kind, native = type(value), _native(type(value))
    walk.class_of(kind)
    if walk.reads is None and (not is_library_module(native.__module__) or getattr(value, "nbytes", 0) > BYTES_MOST):
        return Same(value)  # it may be large: it is looked into where it was read
    getattr(value, "__dict__", None)  # made where it is asked for, and then pickle sees it
    parts = _reduced(value)
    if parts is None and walk.reads is not None:
        raise CaptureError(
            f"forward reads {path}, a {kind.__module__}.{kind.__qualname__}, which may change from one call to the "
            f"next, and nothing tells whether it did: it has no pickled form. Pass in what forward reads of it as an "
            f"input or a number, or leave it out of forward"
        )
    if parts is None or isinstance(parts, str):
        return Same(value)
    drawn = hasattr(native, "__next__") and native.__module__ in ("builtins", "itertools")
    return _seen(_reduced, _put_back_pickled, ".__reduce__()", drawn=drawn)(walk, path, value)


def _reduced(value: Any) -> Any:
    """What pickle makes of an object, with its items read; None where it has no pickled form."""
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        parts = value.__reduce_ex__(4) if reducer is None else reducer(value)
        return parts if isinstance(parts, str) else (*parts[:3], *(tuple(part or ()) for part in parts[3:5]))
    except Exception:  # of any class: it is refused by name where forward read it
        return None


def _put_back_pickled(value: Any, parts: Any) -> None:
    made, args, state = (*parts, None)[:3]
    if hasattr(value, "__array_interface__") or hasattr(value, "typecode"):  # memory stays where it is
        kept = made(*args)
        if state is not None and hasattr(kept, "__setstate__"):
            kept.__setstate__(state)
        value[... if hasattr(value, "shape") else slice(None)] = kept
    elif hasattr(value, "__setstate__"):
        value.__setstate__(*(args[-1] if state is None else (state,)))  # that of ctypes is its last argument
    elif made is type(value):
        value.__init__(*args)
    else:
        raise TypeError(f"a {type(value).__name__} has no __setstate__")


def _frozen(value: Any, leaf: Callable[[Any], Any] = type, depth: int = 6) -> Any:
    """The constants that a value holds, in its containers too, and of other objects what `leaf` makes of them."""
    kind = type(value)
    if kind in _ATOMS:
        return (kind, repr(value) if kind in (float, complex) else value)
    if isinstance(value, dict) and depth:
        items = dict.items(value)
        return (kind, tuple((_frozen(key, leaf, 0), _frozen(item, leaf, depth - 1)) for key, item in items))
    if isinstance(value, (tuple, list)) and depth:
        return (kind, tuple(_frozen(item, leaf, depth - 1) for item in value))
    return (kind, value.tobytes()) if hasattr(kind, "tobytes") else leaf(value)


def _seen(
    see: Callable[[Any], Any],
    put: Callable[[Any, Any], object] | None = None,
    suffix: str = "",
    *,
    drawn: bool = False,
) -> _Rule:
    """What shows by a function what it holds; it may make that anew each time. With a suffix that is looked into."""

    def rule(walk: _Walk, path: str, value: Any) -> Any:
        held = see(value)
        if suffix:
            walk.reach(path + suffix, held)
        if walk.reads is None or not drawn:  # what is drawn goes on outside of the model
            walk.ledger.enter(
                path, lambda: _frozen(see(value), Same), lambda _: put(value, held) if put is not None else None
            )
        token = (type(value), _frozen(held))
        return Drawn(token) if drawn else token

    return rule


_referent = _seen(lambda value: gc.get_referents(value)[0], suffix=".mapping")
_proxied = _seen(lambda value: value.__reduce__.__self__, suffix="()")

_RULES: dict[str, _Rule] = {
    "builtins.dict": _mapping,
    "builtins.list": _elements,
    "builtins.tuple": _elements,
    "builtins.set": _elements,
    "builtins.frozenset": _elements,
    "collections.deque": _elements,
    "builtins.function": _Walk.function,
    "builtins.builtin_function_or_method": _builtin,
    "functools._lru_cache_wrapper": _cache,
    # what is its slots, or its `__dict__`
    "builtins.method": _object,
    "builtins.property": _object,
    "builtins.staticmethod": _object,
    "builtins.classmethod": _object,
    "functools.partial": _object,
    "types.SimpleNamespace": _object,
    "_thread._local": _object,
    # what lets its memory be read
    "mmap.mmap": _seen(lambda value: value[:], lambda value, kept: value.__setitem__(slice(None), kept)),
    "builtins.memoryview": _seen(
        lambda value: value.tobytes(), lambda value, kept: value.cast("B").__setitem__(slice(None), kept)
    ),
    # what leads to another object
    "weakref.ReferenceType": _seen(weakref.ref.__call__, suffix="()"),
    "weakref.ProxyType": _proxied,
    "weakref.CallableProxyType": _proxied,
    "builtins.mappingproxy": _referent,
    "builtins.dict_keys": _referent,
    "builtins.dict_values": _referent,
    "builtins.dict_items": _referent,
    "_contextvars.ContextVar": _seen(
        lambda value: value.get(ABSENT), lambda value, held: held is ABSENT or value.set(held), ".get()"
    ),
    # what gives something else each time
    "random.SystemRandom": _pickled,  # what it draws from has no state
    "random.Random": _seen(random.Random.getstate, random.Random.setstate, drawn=True),
    "numpy.random._generator.Generator": _seen(
        lambda value: value.bit_generator.state,
        lambda value, state: setattr(value.bit_generator, "state", state),
        drawn=True,
    ),
    "numpy.random.mtrand.RandomState": _seen(
        lambda value: value.get_state(), lambda value, state: value.set_state(state), drawn=True
    ),
    "torch._C.Generator": _seen(
        lambda value: value.get_state().numpy(),
        lambda value, state: value.set_state(torch.from_numpy(state)),
        drawn=True,
    ),
    "builtins.generator": _seen(
        lambda value: (value.gi_frame and value.gi_frame.f_lasti, value.gi_frame and dict(value.gi_frame.f_locals)),
        suffix=".gi_frame",
        drawn=True,
    ),
}
"""How objects of a class are looked into, by the name of the class or of a base."""

_OPAQUE = frozenset({
    # code, and what describes it
    "builtins.module", "builtins.code", "builtins.frame", "builtins.traceback", "builtins.getset_descriptor",
    "builtins.member_descriptor", "builtins.method_descriptor", "builtins.wrapper_descriptor",
    "builtins.classmethod_descriptor", "_ctypes.CField", "types.GenericAlias", "types.UnionType",
    "re.Pattern", "re.Match", "pathlib.PurePath", "inspect.Signature",
    # what only synchronizes
    "_thread.lock", "_thread.RLock", "_multiprocessing.SemLock", "torch.Stream", "torch.Event",
    # what only takes notes
    "logging.Logger", "logging.LoggerAdapter", "logging.Handler", "torch.utils.tensorboard.writer.SummaryWriter",
    "torch.autograd.profiler.record_function",
    # of torch and numpy: what a tensor stands for, and what never changes
    "torch.storage.UntypedStorage", "torch.jit.torch.jit.ScriptFunction", "torch.finfo", "torch.iinfo",
    "numpy.dtype", "numpy.ufunc",
})  # fmt: skip
"""Classes whose objects hold nothing that forward could read anew."""

_OPAQUE_MODULES = ("typing.", "autopar.", "tokenizers.", "torch._C.", "torch._ops.", "torch._dynamo.", "torch.fx.")
