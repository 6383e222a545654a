"""Products that add to what is there: a sum of partial products needs no pass over memory of its own."""

from __future__ import annotations

from typing import Any

ADDING = {"aten.mm.default": "aten.addmm.default", "aten.bmm.default": "aten.baddbmm.default"}
"""A product, and the op that adds it to its first operand."""


def adding(op: str) -> str | None:
    """The op that adds the same product to another first operand, or None."""
    return op if op in ADDING.values() else ADDING.get(op)


def factors_of(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What such an op multiplies."""
    return args[1:] if op in ADDING.values() else args
