"""What the table of a tensor depends on, and how its layouts are encoded as numbers and masks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout
from autopar.solve.problem import unions_of

from .choices import REGATHER, Policy
from .sites import Option, Site


class MovedKind(NamedTuple):
    """What the price of having a tensor in several layouts depends on beside these. `kept`: forward makes it, and
    backward reads it."""

    meta: TensorMeta
    kept: bool
    is_parameter: bool
    bucketed: bool
    made: str = ""
    """The name of what is made where it is read."""
    copies: int = 1
    """How many copies of a repeat share it."""
    is_gradient: bool = False
    """Whether only parameters and sums of their gradients read it, so that it is reduced once a step."""
    cast_from: torch.dtype | None = None
    """The dtype in which such a gradient is computed, where `meta` says that it is reduced in another one."""


def moved_of(meta: TensorMeta, maker: Site, readers: Sequence[tuple[Site, bool]]) -> MovedKind:
    """Of the site that makes a tensor, and those that read it, each with whether it does so in backward."""
    kept = not maker.backward and any(late for _, late in readers)
    return MovedKind(meta, kept, maker.kind == "parameter", is_bucketed(maker, [site for site, _ in readers]))


def is_bucketed(maker: Site, readers: Sequence[Site]) -> bool:
    """Whether a tensor travels in a bucket: parameters and gradients do."""
    return maker.kind == "parameter" or any(reader.kind == "parameter" for reader in readers)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RootTensor:
    """A root in a region of `copies` copies: site number `maker` makes it, as one of its results, and those of
    `reading` read it, each as (site, position of the operand)."""

    root: str
    sites: Sequence[Site]
    options: Sequence[tuple[Option, ...]]
    maker: int
    result: int
    reading: Sequence[tuple[int, int]]
    copies: int

    @property
    def produced(self) -> tuple[tuple[Layout, Policy], ...]:
        """By each option of the maker."""
        return tuple((o.makes[self.result], o.choice.policy) for o in self.options[self.maker])


Made = TypeVar("Made")
Item = TypeVar("Item")


def in_order(sites: Sequence[Site], reading: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(reader, position), a forward reader next to its backward twin: solvers take readers in this order, and what
    stands together is eliminated together."""
    return sorted(reading, key=lambda at: -1 if (node := sites[at[0]].node) is None else node.sequence)


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
