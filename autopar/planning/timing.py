"""Where the time of a step goes: by kinds of operators, and by what ranks wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.timeline import COMPUTE, Communication, Event, Timeline

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "expert_mm", "expert_mm_weight", "dot", "mv"})
"""Operators that are matrix products; convolutions count among them."""

OPERATOR_KINDS = MATRIX_PRODUCTS, ATTENTION, OTHER_OPERATORS = "matrix products", "attention", "other operators"
"""What the operators of a step are counted as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A rank's seconds of one step, on its timeline: of matrix products and convolutions, of attention, and of all
    other operators, copies among them. The rest of the step is the optimizer, and the waits in `communication`: by kind
    and mesh axis, what collectives take, and what of that ranks wait for. `unfused_seconds` of the operators are spent
    on what kernels write and read of results of their own: attention's, where dropout keeps it from fused ones."""

    products_seconds: float
    attention_seconds: float
    others_seconds: float
    optimizer_seconds: float
    communication: tuple[Communication, ...]
    unfused_seconds: float = 0.0

    def exposed_on(self) -> Mapping[str, float]:
        """Mesh axis -> the seconds that ranks wait for its collectives."""
        exposed: dict[str, float] = {}
        for row in self.communication:
            exposed[row.axis] = exposed.get(row.axis, 0.0) + row.exposed_seconds
        return exposed


def timing(step: Timeline, optimizer_seconds: float, seconds: float) -> Timing:
    """Of a timeline whose step, with the optimizer, takes so many seconds: measured programs scale it."""
    scale = (seconds - optimizer_seconds) / step.seconds if step.seconds else 1.0

    def busy(kind: str) -> float:
        return scale * math.fsum(e.seconds for e in step.events if e.stream == COMPUTE and operator_kind(e) == kind)

    return Timing(
        products_seconds=busy(MATRIX_PRODUCTS),
        attention_seconds=busy(ATTENTION),
        others_seconds=busy(OTHER_OPERATORS),
        optimizer_seconds=optimizer_seconds,
        communication=tuple(
            Communication(
                kind=row.kind,
                axis=row.axis,
                count=row.count,
                bytes=row.bytes,
                seconds=scale * row.seconds,
                exposed_seconds=scale * row.exposed_seconds,
            )
            for row in step.communication
        ),
        unfused_seconds=scale * step.unfused_seconds,
    )


def operator_kind(event: Event) -> str:
    """Which of `OPERATOR_KINDS` an event of a rank's own stream is."""
    name = event.op.split(".")[1] if "." in event.op else event.op
    if name in PRODUCTS or name.startswith("convolution"):
        return MATRIX_PRODUCTS
    return ATTENTION if "attention" in name else OTHER_OPERATORS
