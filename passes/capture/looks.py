"""What a look at state holds: tokens by path, what to compare at each call, and how to put all of it back. `Streams` is
what gives another value each time it is asked: generators of random numbers, iterators, arrays. And code: whose it is,
which line of the model runs, and what a function names and holds."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import os
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import compat

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
    """Names that a function's code mentions, functions inside of it too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in a message, and how many more there are."""
    shown = ", ".join(dict.fromkeys(names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


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
    undo: list[Callable[[], object]] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)
    is_cut: bool = False
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
        """Put everything back as it was when this look was taken, in the order in which it was reached."""
        with compat.without_modes():
            for put_back in self.undo:
                put_back()


ABSENT = Same("absent")


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


def put_back_attribute(owner: Any, name: str, held: Any) -> None:
    if getattr(owner, name, ABSENT) is not held:
        setattr(owner, name, held)


ARRAY_BYTES_MOST = 1 << 16
"""Arrays up to this size are compared at every call."""


class Streams:
    """What gives another value each time it is asked, in a look: generators of random numbers, iterators, arrays,
    settings of the process."""

    look: Look
    seen: dict[int, str]

    def value(self, path: str, value: Any) -> None:
        """Takes a value into the look."""
        raise NotImplementedError

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

    def settings(self) -> None:
        """What the process is set to, as far as operators or reached code ask for it."""
        for name, ask in compat.SETTINGS.items():
            if name in self.look.names | compat.SETTINGS_AT_WORK:
                self.look.facts[f"torch.{name}()"] = set_to = ask()
                self.look.others.append((ask, set_to))
        if self.look.names & {"environ", "getenv"}:
            self.value("os.environ", vars(os.environ)["_data"])

    def sequence(self, value: Any) -> None:
        kept = tuple(value)
        self.look.sequences.append((value, kept))
        self.look.undo.append(lambda: put_back_sequence(value, kept))

    def _generator(self, path: str, generator: Any) -> None:
        state = generator.getstate()
        self.look.facts[path] = Drawn((state,))
        self.look.undo.append(lambda: generator.setstate(state))

    def _numpy(self, path: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        state = get()
        self.look.facts[path] = Drawn((_flat(state),))
        self.look.undo.append(lambda: put(state))

    def stream(self, path: str, value: Any) -> bool:
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
            self.look.undo.append(functools.partial(value.set_state, state))
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
        elif is_stream(value):
            facts[path] = Drawn((type(value), _position(value)))
        else:
            return False
        return True


def is_stream(value: Any) -> bool:
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
