"""Choices: what a site decides on each mesh axis, and how a decision is written as text."""

from __future__ import annotations

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
