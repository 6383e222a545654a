"""Choices: what a site decides on each mesh axis, and how a decision is written as text."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Kind = Literal["R", "S", "X", "P"]

Policy = Literal["", "keep", "regather"]
"""Of a parameter: whether what was gathered for forward is kept for backward or gathered again. Of all others: ""."""

KEEP: Policy = "keep"
REGATHER: Policy = "regather"
NO_POLICY: tuple[Policy, ...] = ("",)


class AxisChoice(NamedTuple):
    """What a site does on one mesh axis, by its kind:

    - R: work on replicated values;
    - S: split `factor` of the operator (or that dim of a stored value), with a period of so many elements;
    - X: the rows, split as by S, are with their experts (`layout.Routed`);
    - P: take the operands of the rule's linear set number `factor` as partial sums and make a partial sum; of a
      border, which has no linear sets: pass a partial sum on.
    """

    kind: Kind
    factor: int = -1
    period: int = 0

    @property
    def splits(self) -> bool:
        return self.kind == "S"

    @property
    def routes(self) -> bool:
        return self.kind == "X"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    def __str__(self) -> str:
        """One word: "R", "S0%512", "X0%512", "P1", "P"."""
        if self.kind in ("S", "X"):
            return f"{self.kind}{self.factor}%{self.period}"
        return self.kind if self.factor < 0 else f"{self.kind}{self.factor}"


class SiteChoice(NamedTuple):
    """What a site does on every mesh axis, in the order of the axes, and the policy of a parameter."""

    axes: tuple[AxisChoice, ...]
    policy: Policy = ""

    def on(self, axis: int, choice: AxisChoice) -> SiteChoice:
        """With another choice on one axis."""
        return SiteChoice((*self.axes[:axis], choice, *self.axes[axis + 1 :]), self.policy)

    def __str__(self) -> str:
        """One word per mesh axis, and the policy: "S0%512 R keep"."""
        return " ".join(map(str, (*self.axes, self.policy) if self.policy else self.axes))


REPLICATED = AxisChoice("R")

PASSES_PARTIAL = AxisChoice("P")
"""Of a border: what crosses it is a partial sum."""

_WORD = re.compile(r"R|P(?P<set>\d*)|(?P<kind>[SX])(?P<factor>\d+)%(?P<period>\d+)")


def parse_choice(text: str) -> SiteChoice:
    """The inverse of `str`. Raises ValueError for text that is none."""
    words = text.split()
    policy = next((policy for policy in (KEEP, REGATHER) if policy in words[-1:]), NO_POLICY[0])
    return SiteChoice(tuple(map(_parsed, words[:-1] if policy else words)), policy)


def _parsed(word: str) -> AxisChoice:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{word!r} is no choice: expected R, S<dim>%<period>, X<dim>%<period>, P<set>, keep or regather"
        )
    if match["factor"]:
        return AxisChoice("S" if match["kind"] == "S" else "X", int(match["factor"]), int(match["period"]))
    if word == "R":
        return REPLICATED
    return AxisChoice("P", int(match["set"])) if match["set"] else PASSES_PARTIAL
