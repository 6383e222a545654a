"""One ledger of what Python can read beside parameters, buffers and inputs: what stands at each path, how to ask for it
again, and how to put it back.

Capture fills it, and each call compares it. What one step leaves for the next while a model is captured is refused,
unless nobody reads it; what differs at a call makes the module capture again. What forward could draw from (`Drawn`)
may not differ in a capture, and may at a call.
"""

from __future__ import annotations

import collections
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.compat.tensors import notes_of, unmodified

from .errors import CaptureError

logger = logging.getLogger(__name__)


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
    see which inputs are one object. `mentioned` are the names in the code that was reached."""

    names: Mapping[str | type, frozenset[str]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    identities: bool = False
    mentioned: frozenset[str] = frozenset()

    def of(self, owner: str | type) -> frozenset[str] | None:
        """The attributes that count, of the module at a path or of the objects of a class; None for all."""
        names = self.names.get(owner, frozenset())
        is_module = isinstance(owner, type) and issubclass(owner, nn.Module)  # one that is not the model's
        return None if is_module or "__dict__" in names else names

    def check_inputs(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises CaptureError for attributes that a caller set on an input and that the code may read."""
        for path, tensor in tensors.items():
            for name in notes_of(tensor) if vars(tensor) else ():
                if name in self.mentioned:
                    raise CaptureError(
                        f"input {path} has an attribute {name!r} that its caller set, which a program would not find, "
                        f"and code that forward runs says {name}: pass it as an argument, or give a tensor without it"
                    )


class LedgerEntry(NamedTuple):
    """What stood at a path: how to ask for it again, what the answer was, whether another answer is alike, and how to
    put it back."""

    path: str
    ask: Callable[[], Any]
    answer: Any
    alike: Callable[[Any, Any], bool]
    put: Callable[[Any], object] | None


@dataclass(kw_only=True)
class Ledger:
    """All that was reached: a token of each path, and entries that tell quickly whether it is there still."""

    tokens: dict[str, Any] = field(default_factory=dict)
    entries: list[LedgerEntry] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    classes: set[type] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    """Names that the code mentions which was reached."""

    def enter(
        self,
        path: str,
        ask: Callable[[], Any],
        put: Callable[[Any], object] | None = None,
        alike: Callable[[Any, Any], bool] = operator.eq,
    ) -> Any:
        """Ask what stands at a path: it is to be alike later on."""
        answer = ask()
        self.entries.append(LedgerEntry(path, ask, answer, alike, put))
        return answer

    @cached_property
    def _columns(self) -> Sequence[tuple[list[Any], list[Any]]]:
        """What asks and was answered: of what is to be the same object, and of what is to be equal."""
        ways = [[each for each in self.entries if each.alike is alike] for alike in (operator.is_, operator.eq)]
        return [([each.ask for each in way], [each.answer for each in way]) for way in ways]

    def holds(self) -> bool:
        """Whether every answer is what it was: some microseconds."""
        (same, there), (equal, answers) = self._columns
        return all(map(operator.is_, map(operator.call, same), there)) and [*map(operator.call, equal)] == answers

    def differs(self, other: Ledger, same: Callable[[Any, Any], bool] = lambda a, b: False) -> list[str]:
        """Paths at which they differ, the outermost of each. `same` decides where tokens differ."""
        paths = dict.fromkeys((*self.tokens, *other.tokens))
        differing = {
            path: None
            for path in paths
            if (a := self.tokens.get(path, ABSENT)) != (b := other.tokens.get(path, ABSENT)) and not same(a, b)
        }
        return [path for path in differing if not any(outer in differing for outer in outer_paths(path))]

    def restore(self) -> None:
        """Put everything back as it was, contents before what stands there. Warns of what lets nobody put it back."""
        with unmodified():
            for path, ask, answer, alike, put in sorted(self.entries, key=lambda entry: entry.alike is operator.is_):
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
