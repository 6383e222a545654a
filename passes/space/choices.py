"""Choices: what a site decides on each mesh axis, and how a decision is written as text.

- ("R",): work on whole values;
- ("S", factor, period): split one factor of the operator (or one dim of a stored value);
- ("X", factor, period): rows, split as by ("S", factor, period), are with their experts (`layout.Routed`);
- ("P", k): take the operands of the rule's k-th linear set as partial sums and make a partial sum;
- for a border, ("P",): pass a partial sum on.

A parameter's choice ends with "keep" or "regather": whether what was gathered for forward is kept for backward or
gathered again.
"""

from __future__ import annotations

import re
from typing import Any

AxisChoice = tuple[Any, ...]

SiteChoice = tuple[Any, ...]
"""One `AxisChoice` per mesh axis; for a parameter followed by "keep" or "regather"."""

WHOLE: AxisChoice = ("R",)

KEEP, REGATHER = "keep", "regather"


def str_choice(choice: SiteChoice) -> str:
    """A choice as text, one word per mesh axis: "R", "S0%512", "X0%512", "P1", and "keep" or "regather"."""
    words = []
    for part in choice:
        if isinstance(part, str):
            words.append(part)
        elif part[0] in ("S", "X"):
            words.append(f"{part[0]}{part[1]}%{part[2]}")
        else:
            words.append(part[0] + "".join(map(str, part[1:])))
    return " ".join(words)


_WORD = re.compile(r"R|keep|regather|P\d*|(?P<kind>[SX])(?P<dim>\d+)%(?P<period>\d+)")


def parse_choice(text: str) -> SiteChoice:
    """The inverse of `str_choice`. Raises ValueError for text that is none."""
    parts: list[Any] = []
    for word in text.split():
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(
                f"{word!r} is no choice: expected R, S<dim>%<period>, X<dim>%<period>, P<set>, keep or regather"
            )
        if found["dim"]:
            parts.append((found["kind"], int(found["dim"]), int(found["period"])))
        elif word[0] == "P":
            parts.append(("P", int(word[1:])) if word[1:] else ("P",))
        else:
            parts.append(("R",) if word == "R" else word)
    return tuple(parts)
