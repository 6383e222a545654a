"""Where the time of a step goes: by kinds of operators, and by what ranks wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.cost.timeline import COMPUTE, Communication, Event, Timeline

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "expert_mm", "expert_mm_weight", "dot", "mv"})
"""Operators that are matrix products; convolutions count among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A rank's seconds of one step, on its timeline: of matrix products and convolutions, of attention, and of all
    other operators, copies among them. The rest of the step is the optimizer, and the waits in `communication`: by kind
    and mesh axis, what collectives take, and what of that ranks wait for."""

    products_seconds: float
    attention_seconds: float
    others_seconds: float
    optimizer_seconds: float
    communication: tuple[Communication, ...]

    def exposed_on(self) -> Mapping[str, float]:
        """Mesh axis -> the seconds that ranks wait for its collectives."""
        exposed: dict[str, float] = {}
        for row in self.communication:
            exposed[row.axis] = exposed.get(row.axis, 0.0) + row.exposed_seconds
        return exposed


def timing(step: Timeline, optimizer_seconds: float, seconds: float) -> Timing:
    """Of a timeline whose step, with the optimizer, takes so many seconds: measured programs scale it."""
    scale = (seconds - optimizer_seconds) / step.seconds if step.seconds else 1.0

    def busy(wanted: Callable[[Event], bool]) -> float:
        return scale * math.fsum(e.seconds for e in step.events if e.stream == COMPUTE and wanted(e))

    products, attention = busy(_is_product), busy(_is_attention)
    return Timing(
        products_seconds=products,
        attention_seconds=attention,
        others_seconds=busy(lambda event: not _is_product(event) and not _is_attention(event)),
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
    )


def _name(event: Event) -> str:
    return event.op.split(".")[1] if "." in event.op else event.op


def _is_product(event: Event) -> bool:
    return _name(event) in PRODUCTS or _name(event).startswith("convolution")


def _is_attention(event: Event) -> bool:
    return "attention" in _name(event)
