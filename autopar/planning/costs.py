"""Cost modes: what a plan minimizes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autopar.cluster.links import Link, Stage
from autopar.cost.bucketed import BucketingRedistributor
from autopar.extensions import Table
from autopar.passes.space.choices import AxisChoice, SiteChoice
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space

from .constraints import Pins
from .plan import Plan

BYTES_PER_SECOND = 1e9
"""Bytes that a second stands for in a space of volumes."""

ALGORITHMS = ("ring", "pairwise", "message")
"""Collective algorithms that move the bytes that Alpa counts; all others move as many, or more."""


def volumes(space: Space) -> Space:
    """The same space, where a second is `BYTES_PER_SECOND` bytes that a rank sends, and an operator counts as one.

    Alpa (Zheng et al., OSDI 2022, section 4) adds up the bytes of its collectives: of a tensor that n ranks reduce to
    all, 2 (n - 1) / n; that they gather, reduce and scatter, or exchange, (n - 1) / n. Operators that do arithmetic may
    not be repeated on several ranks, so that all plans compute alike, and all other operators are free. So it is here:
    those that do arithmetic are split on every axis that can split them, others count as a byte. Alpa's program also
    has a latency and a rate for each axis, by default 1 and 1, and counts an all-to-all n / 2 times; here no axis has a
    latency, a rate or a place in the cluster, and all bytes count once.
    """
    device = replace(
        space.cluster.device,
        flops_per_second=dict.fromkeys(space.cluster.device.flops_per_second, math.inf),
        efficiency=((1.0, 1.0),),
        memory_bytes_per_second=math.inf,
        seconds_per_op=1 / BYTES_PER_SECOND,
    )
    redistributor = BucketingRedistributor(space.mesh, tuple(map(_link, space.mesh)), device)
    return replace(space, cluster=replace(space.cluster, device=device), redistributor=redistributor)


def _link(ranks: int) -> Link:
    rate = BYTES_PER_SECOND
    stage = Stage(
        name="bytes",
        width=ranks,
        members=1,
        bytes_per_second=rate,
        pair_bytes_per_second=rate,
        rank_bytes_per_second=rate,
        latency_seconds=0.0,
    )
    return Link(ranks, (stage,), algorithms=ALGORITHMS)


def with_arithmetic_split(space: Space, pins: Pins) -> Pins:
    """The constraints, and splits of operators that do arithmetic on as many axes together as they and the constraints
    allow, the first axes first."""
    pinned = dict(pins)
    for region in space.regions():
        for site in region.sites.values():
            if site.rule is not None and site.rule.flops:
                pinned[site.name] = {**pins.get(site.name, {}), **_split(space, site, pins.get(site.name, {}))}
    return pinned


def _split(space: Space, site: Site, pinned: Mapping[int, tuple[AxisChoice, ...]]) -> dict[int, tuple[AxisChoice, ...]]:
    left = [pinned.get(axis, site.choices[ranks]) for axis, ranks in enumerate(space.mesh)]
    splits: dict[int, tuple[AxisChoice, ...]] = {}
    for axis, ranks in enumerate(space.mesh):
        split = tuple(choice for choice in left[axis] if choice.splits)
        wider = [*left[:axis], split, *left[axis + 1 :]]
        if ranks > 1 and any(space.option(site, SiteChoice(choice)) is not None for choice in product(*wider)):
            splits[axis], left = split, wider
    return splits


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMode:
    """How to search for the plan with the least cost. `name` is what `cost=` names, `meaning` says in words what is
    minimised. The search weighs the prices of `space(given)`, or those of the cluster; `pinned(given, pins)` adds to
    the constraints, unless a preset is solved. `by_timeline` takes the candidate with the shortest step. A mode that
    measures has `plan(planner, request)` and nothing else. Every mode's plan reports its seconds. Raises ValueError for
    more than one of `space`, `by_timeline` and `plan`."""

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
            meaning="of the cheapest plan as if half of what travels in buckets overlapped, others near it, and the "
            "presets' plans, the one with the shortest timeline",
            by_timeline=True,
        ),
        CostMode(name="serial", meaning="the cheapest plan as if nothing overlapped"),
        CostMode(
            name="volume",
            meaning="the plan with the fewest bytes on links (`volumes`)",
            space=volumes,
            pinned=with_arithmetic_split,
        ),
    ),
    functions=("space", "pinned", "plan"),
)


def priced_space(mode: CostMode, space: Space) -> Space:
    """The space at a mode's prices. Raises ValueError for a mode whose function gives something else."""
    assert mode.space is not None
    priced: Any = mode.space(space)
    if not isinstance(priced, Space):
        raise ValueError(f"cost {mode.name!r}: its space function returned a {type(priced).__name__}: give a Space")
    return priced


def register_cost(cost: CostMode, *, replace: bool = False) -> None:
    """Adds a cost mode for `cost=` to name. Raises ValueError for an invalid mode, and for a name that is taken unless
    it is to `replace` that one."""
    COSTS.add(cost, replace=replace)
