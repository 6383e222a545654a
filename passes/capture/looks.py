"""What a look at state holds: tokens by path, what to compare at each call, and how to put all of it back. And code:
whose it is, which line of the model runs, and what a function names and holds."""

from __future__ import annotations

import collections
import dis
import functools
import gc
import inspect
import itertools
import logging
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import compat

logger = logging.getLogger(__name__)

_PLACES = tuple(sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}))


@functools.cache
def is_library(code_file: str) -> bool:
    """Whether code is torch's or Python's own."""
    if not code_file or code_file.startswith("<frozen"):
        return True
    if code_file.startswith(str(Path(torch.__file__).parent)):
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
    """What was read while a model was traced: attributes of modules as (path, name), and of other objects by class.
    `__dict__` stands for all of them. `values` are the tensors whose numbers became Python's. `identities` says that
    the code may see which inputs are one object."""

    modules: frozenset[tuple[str, str]] = frozenset()
    fields: Mapping[type, frozenset[str]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    identities: bool = False

    def of(self, value: Any) -> frozenset[str] | None:
        """The attributes of an object that count; None for all."""
        if isinstance(value, nn.Module):
            return None
        names = self.fields.get(type(value), frozenset())
        return None if "__dict__" in names else names


@dataclass(slots=True)
class Look:
    """All that was reached. `entries` are (dictionary, key, value) as they stood, ABSENT where there was none, `sized`
    and `sequences` containers with what they held, `asks` and `equals` (how to look again, answer), which is the same
    object or an equal one; `undo` puts all back, by path."""

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    entries: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)
    sized: list[dict[Any, Any]] = field(default_factory=list)
    sequences: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    asks: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    equals: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    undo: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
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
        """Put everything back as it was when this look was taken, in the order in which it was reached. Warns of what
        lets nobody put it back."""
        with compat.without_modes():
            for path, put_back in self.undo:
                try:
                    put_back()
                except (AttributeError, TypeError, ValueError, OSError) as error:
                    logger.warning("capture changed %s and cannot put it back: %s", path, error)


def outer_paths(path: str) -> Iterator[str]:
    """What a path is inside of: `a.b[0]` -> `a.b`, `a`."""
    for i in range(len(path) - 1, 0, -1):
        if path[i] in ".[":
            yield path[:i]


def put_back_mapping(value: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if len(value) != len(kept) or any(dict.get(value, key, ABSENT) is not item for key, item in kept.items()):
        kind: type[dict[Any, Any]] = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        kind.clear(value)
        for key, item in kept.items():
            kind.__setitem__(value, key, item)


def put_back_sequence(value: Any, kept: tuple[Any, ...]) -> None:
    if len(value) != len(kept) or any(a is not b for a, b in zip(value, kept, strict=True)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(kept)


def put_back_class(cls: type, kept: dict[str, Any]) -> None:
    for name in [*vars(cls)]:
        if name not in kept and not name.startswith("__"):
            delattr(cls, name)
    for name, item in kept.items():
        if vars(cls).get(name, ABSENT) is not item and not name.startswith("__"):
            setattr(cls, name, item)
