"""What a look at state holds: tokens by path, what to compare at each call, and how to put all of it back."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar import compat


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
            if (a := self.facts.get(path, ABSENT)) != (b := other.facts.get(path, ABSENT)) and not same(a, b)
        }
        return [path for path in found if not any(outer in found for outer in outer_paths(path))]

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


def put_back_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def put_back_cell(cell: types.CellType, held: Any) -> None:
    cell.cell_contents = held


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
