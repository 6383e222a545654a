"""Cost modes: what a plan is the least of.

A mode whose costs are known without a device has no `plan` of its own: the planner's search reads its name. One that
measures brings the function that plans by what it measures (`runtime.profiled`). `register_cost` adds a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMode:
    """`plan(planner, request)` gives the plan that is best by this cost."""

    name: str
    meaning: str
    plan: Callable[..., Plan] | None = None


COSTS: dict[str, CostMode] = {}


def register_cost(mode: CostMode) -> None:
    """Adds a cost mode, or replaces the one of its name."""
    COSTS[mode.name] = mode


def unknown_cost(cost: Any) -> ValueError | None:
    """What is wrong with the name of a cost mode."""
    if isinstance(cost, str) and cost in COSTS:
        return None
    return ValueError(f"unknown cost {cost!r}; known: {', '.join(COSTS)}")


for _name, _meaning in {
    "analytical": "of the cheapest plan as if nothing overlapped, the cheapest as if most of what travels in buckets "
    "did, and the presets' plans, the one with the shortest timeline",
    "serial": "the cheapest plan as if nothing overlapped",
    "volume": "the plan with the fewest bytes on links (`volume`)",
}.items():
    register_cost(CostMode(name=_name, meaning=_meaning))
