"""Cost modes: what a plan is the least of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.extensions import Table
from autopar.passes.space.space import Space

from .constraints import Pins
from .plan import Plan
from .volume import volumes, with_arithmetic_split


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMode:
    """How the plan is found that is best by a cost. A search weighs the prices of `space(given)`, or those of the
    cluster; what constraints pin is `pinned(given, pins)` further, unless a preset is solved. `by_timeline`: of several
    candidates the one with the shortest step is taken. A mode that measures has `plan(planner,
    request)` and nothing else. Whatever it was chosen for, a plan says its seconds."""

    name: str
    meaning: str
    space: Callable[[Space], Space] | None = None
    pinned: Callable[[Space, Pins], Pins] | None = None
    by_timeline: bool = False
    plan: Callable[..., Plan] | None = None

    def __post_init__(self) -> None:
        if self.by_timeline + (self.space is not None) + (self.plan is not None) > 1:
            raise ValueError(f"cost {self.name!r} has more than one of space, by_timeline and plan: give one of them")


COSTS = Table(
    "cost",
    CostMode,
    (
        CostMode(
            name="analytical",
            meaning="of the cheapest plan as if nothing overlapped, the cheapest as if most of what travels in buckets "
            "did, and the presets' plans, the one with the shortest timeline",
            by_timeline=True,
        ),
        CostMode(name="serial", meaning="the cheapest plan as if nothing overlapped"),
        CostMode(
            name="volume",
            meaning="the plan with the fewest bytes on links (`volume`)",
            space=volumes,
            pinned=with_arithmetic_split,
        ),
    ),
    functions=("space", "pinned", "plan"),
)


def register_cost(cost: CostMode, *, replace: bool = False) -> None:
    """Adds a cost mode, which `cost=` then names. Raises ValueError for what is none, and for a name that is taken."""
    COSTS.add(cost, replace=replace)
