"""What the table of a tensor depends on, and how its layouts are encoded as numbers and masks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from autopar.ir.layout import Layout
from autopar.solve.problem import unions_of

from .choices import REGATHER, Policy
from .tensors import MovedKind

Part = Literal["whole", "once", "forward", "backward"]
"""What a table prices of having a tensor: all of it, or a part. What is gathered again costs a sum of what forward and
backward want of it, and anything else costs what all want of it together, `once`: apart, these are small tables, and
the whole is their product."""

WHOLE: tuple[Part, ...] = ("whole",)
PARTS: tuple[Part, ...] = ("once", "forward", "backward")
PHASES: tuple[Part, ...] = ("forward", "backward")


class Wanted(NamedTuple):
    """A layout that a reader wants, in backward if it is `late`, and, if it is `extra`, only if the copy is
    recomputed; where prices depend on that."""

    layout: Layout
    late: bool
    extra: bool


@dataclass(frozen=True, slots=True)
class Movement:
    """A part of having a tensor: the one way in which it is moved, or, in a copy that may be recomputed, those if it is
    not and if it is, when it is acquired again for backward if it is `reacquired`. What crosses a border is kept as it
    crosses."""

    ways: tuple[MovedKind, ...]
    part: Part
    reacquired: bool
    is_border: bool

    def excludes(self, policy: Policy) -> bool:
        """Whether nothing of what this policy acquires is of this part."""
        return self.part != "whole" and (policy == REGATHER) == (self.part == "once")

    def is_free(self, policy: Policy) -> bool:
        """Whether the part costs nothing under a policy, if the copy is recomputed or not."""
        return not self.reacquired and self.excludes(policy)


Made = TypeVar("Made")
Item = TypeVar("Item")


def positions_of(reading: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for reader, position in reading:
        positions.setdefault(reader, []).append(position)
    return positions


def encoded(
    produced: Sequence[Made], wanted: Sequence[Sequence[Sequence[Item]]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], list[Item], set[int]]:
    """What is produced, as numbers; what readers want, as masks; the item of each bit; and all unions of masks."""
    layouts: dict[Made, int] = {}
    items: dict[Item, int] = {}
    codes = tuple(layouts.setdefault(p, len(layouts)) for p in produced)
    masks = tuple(
        tuple(sum({1 << items.setdefault(item, len(items)) for item in each}) for each in per_option)
        for per_option in wanted
    )
    return codes, masks, list(items), unions_of(masks)


def of_bits(items: Sequence[Item], union: int) -> list[Item]:
    return [item for bit, item in enumerate(items) if union >> bit & 1]
