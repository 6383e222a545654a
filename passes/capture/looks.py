"""What a look at state holds: tokens by path, and what stood where, to be compared and put back. And code: whose it is,
and what a function names and holds."""

from __future__ import annotations

import collections
import dis
import functools
import gc
import inspect
import itertools
import logging
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.compat.tensors import unmodified

logger = logging.getLogger(__name__)

_PLACES = tuple(sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}))


@functools.cache
def is_library(code_file: str) -> bool:
    """Whether code is torch's or Python's own."""
    if not code_file or code_file.startswith(("<frozen", str(Path(torch.__file__).parent))):
        return True
    return code_file.startswith(_PLACES) and "site-packages" not in code_file


@functools.cache
def is_library_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root in ("torch", "autopar", "numpy", "builtins") or (root in sys.stdlib_module_names and root != "__main__")


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Default values of arguments, which Python builds once."""
    given = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(given) > len(names):  # a decorator gave its wrapper the defaults of what it wraps
        names = tuple(f"default {i}" for i in range(len(given)))
    return {**dict(zip(names[len(names) - len(given) :], given, strict=True)), **(function.__kwdefaults__ or {})}


def names_of(code: types.CodeType) -> set[str]:
    """Names that a function's code mentions, functions inside of it too, and "is" if it compares identities (other than
    with a constant: `x is None`)."""
    names = set(code.co_names)
    if _IS in (ops := code.co_code[::2]) and any(b == _IS and a != _CONSTANT for a, b in itertools.pairwise(ops)):
        names.add("is")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


def codes_of(function: Any, module: nn.Module | None = None) -> Iterator[types.CodeType]:
    """A person's code that runs where a function of a module is called: its own, and of functions that it names."""
    own = _unwrapped(function)
    if own is None:
        return
    yield own.__code__
    cells = dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    for name in names_of(own.__code__) | cells.keys():
        cell = cells.get(name)
        found = own.__globals__.get(name) if cell is None else next(iter(gc.get_referents(cell)), None)
        for held in (found, vars(module).get(name) if module else None, getattr(type(module), name, None)):
            if (named := _unwrapped(held)) is not None:
                yield named.__code__


def _unwrapped(function: Any) -> types.FunctionType | None:
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
    is_own = isinstance(function, types.FunctionType) and not is_library(function.__code__.co_filename)
    return function if is_own else None


_IS, _CONSTANT = dis.opmap["IS_OP"], dis.opmap["LOAD_CONST"]


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in a message, and how many more there are."""
    shown = ", ".join(dict.fromkeys(names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """The token of what is compared by identity, and of a tensor."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Drawn(tuple[Any, ...]):
    """The token of what gives another value each time it is asked: a generator, an iterator, a file."""


ABSENT = Same("absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What was read while a model was traced: attributes of modules by path, and of other objects by class. `__dict__`
    stands for all of them. `values` are the tensors whose numbers became Python's. `identities` says that the code may
    see which inputs are one object."""

    names: Mapping[str | type, frozenset[str]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    identities: bool = False

    def of(self, owner: str | type) -> frozenset[str] | None:
        """The attributes that count, of the module at a path or of the objects of a class; None for all."""
        names = self.names.get(owner, frozenset())
        is_module = isinstance(owner, type) and issubclass(owner, nn.Module)  # one that is not the model's
        return None if is_module or "__dict__" in names else names


class Observation(NamedTuple):
    """What stood at a path: how to ask for it again, what the answer was, and how to put that back."""

    path: str
    ask: Callable[[], Any]
    answer: Any
    put: Callable[[Any], object] | None


@dataclass(slots=True)
class Look:
    """All that was reached: tokens by path, and what is to be an equal answer later on, or the same object."""

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    equal: list[Observation] = field(default_factory=list)
    same: list[Observation] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    """Names that the code mentions which was reached."""
    kept: list[Any] = field(default_factory=list)
    """Everything that was walked, lest an identity come up twice."""

    def differs(self, other: Look, same: Callable[[Any, Any], bool] = lambda a, b: False) -> list[str]:
        """Paths at which they differ, the outermost of each. `same` decides where tokens differ."""
        paths = dict.fromkeys((*self.facts, *other.facts))
        differing = {
            path: None
            for path in paths
            if (a := self.facts.get(path, ABSENT)) != (b := other.facts.get(path, ABSENT)) and not same(a, b)
        }
        return [path for path in differing if not any(outer in differing for outer in outer_paths(path))]

    def restore(self) -> None:
        """Put everything back as it was when this look was taken. Warns of what lets nobody put it back."""
        with unmodified():
            for observations, alike in ((self.equal, operator.eq), (self.same, operator.is_)):
                for path, ask, answer, put in observations:
                    try:
                        if put is not None and not alike(ask(), answer):
                            put(answer)
                    except (AttributeError, TypeError, ValueError, OSError) as error:
                        logger.warning("capture changed %s and cannot put it back: %s", path, error)


def outer_paths(path: str) -> Iterator[str]:
    """What a path is inside of: `a.b[0]` -> `a.b`, `a`."""
    for i in range(len(path) - 1, 0, -1):
        if path[i] in ".[":
            yield path[:i]


def contents(value: Any) -> Any:
    """What a container or a class holds, whatever its own class makes of it when it is asked."""
    if isinstance(value, (type, dict)):
        return dict(vars(value) if isinstance(value, type) else dict.items(value))
    return tuple(value)


def identities(value: Any) -> list[int]:
    """What a container or a class holds, by identity."""
    held = contents(value)
    return [*map(id, itertools.chain.from_iterable(held.items()) if isinstance(held, dict) else held)]


def put_back(value: Any, kept: Any) -> None:
    """A container or a class holds again what it did."""
    if isinstance(value, type):
        for name in {**vars(value), **kept}:
            if not name.startswith("__") and vars(value).get(name, ABSENT) is not kept.get(name, ABSENT):
                setattr(value, name, kept[name]) if name in kept else delattr(value, name)
    elif isinstance(value, dict):
        kind: type[dict[Any, Any]] = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        kind.clear(value)
        for key, item in kept.items():
            kind.__setitem__(value, key, item)
    else:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(kept)
