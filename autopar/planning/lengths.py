"""Plans for batches of several lengths, all with parameters in the same layouts at rest: a module has one copy of them.

Each length is planned alone first. What its plan chose for parameters at rest is a candidate, in which the others are
roughly planned again; the one with the shortest mean step is taken, by the share of batches of each length, in which
every length then gets its plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from autopar.ir.layout import Layout
from autopar.solve.problem import Infeasible

from .at_rest import Decided, in_layouts
from .costs import COSTS
from .plan import LengthPlan, Plan
from .planner import Planner
from .repriced import repriced
from .request import AUTO, Gathers, Request
from .steps import QUICK
from .texts import short_bytes, short_seconds

logger = logging.getLogger("autopar")


def resized(inputs: Any, length: int) -> Any:
    """Inputs of another length (0: their own): where dim 1 of a tensor is as long as that of the first that has one, it
    is cut, or repeated. Raises ValueError if none has."""
    if not length:
        return inputs
    known = {id(x): x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim() > 1}
    if not known:
        raise ValueError(f"lengths has {length}, and no input has a dim 1, whose size is the length of a batch")
    own = next(iter(known.values())).shape[1]
    made = {
        key: torch.cat([x.detach()] * -(-length // own), 1)[:, :length].contiguous().requires_grad_(x.requires_grad)
        for key, x in known.items()
        if x.shape[1] == own
    }
    return pytree.tree_map(lambda x: made.get(id(x), x), inputs)


def planners_of(shares: Mapping[int, float], make: Callable[[int], Planner]) -> dict[int, Planner]:
    """A planner for batches of each length, the longest first; of length 0, the example's own, if there are no lengths.
    On a mesh with an axis of stages, and where prices are measured, of the longest alone."""
    longest, *others = shares or (0,)
    first = make(longest)
    if first.axis or COSTS.named(first.asked.cost).plan is not None:
        return {longest: first}
    return {longest: first, **{length: make(length).within(first.effort) for length in others}}


def planned_together(planners: Mapping[int, Planner], request: Request, plan: Plan | None = None) -> dict[int, Plan]:
    """The plan of each length, by its planner, the longest first. The longest one's is `plan`, if that is given; it
    says how long the steps of all are. Raises ValueError as `Planner.plan`, and `Infeasible` if the lengths have no
    layouts at rest in common that keep the memory limit."""
    longest, first = next(iter(planners.items()))
    if len(planners) == 1:
        return {longest: plan or first.plan()}
    alone = {longest: plan} if plan else {n: planner.planned(_of(n, planner.asked)) for n, planner in planners.items()}
    rests = {n: (planners[n].layouts(one), one.training.gathers) for n, one in alone.items()}
    candidates = [n for n, rest in rests.items() if n == next(m for m, other in rests.items() if other == rest)]

    def mean(own: int) -> float:
        seconds = sum(
            share * (alone[n].seconds if rests[n] == rests[own] else _seconds_at(planners[n], rests[own][0], alone[n]))
            for n, share in request.shares.items()
        )
        logger.info("parameters at rest as for length %d: about %s in the mean", own, short_seconds(seconds))
        return seconds

    error: Infeasible | None = None
    for own in sorted(candidates, key=mean) if len(candidates) > 1 else candidates:
        try:
            plans = {
                n: alone[n] if rests.get(n) == rests[own] else planned_at(planner, n, *rests[own])
                for n, planner in planners.items()
            }
        except Infeasible as raised:
            logger.info("parameters at rest as for length %d: %s", own, raised)
            error = raised
            continue
        said = [
            LengthPlan(length=n, share=share, seconds=plans[n].seconds, bytes=plans[n].bytes)
            for n, share in request.shares.items()
        ]
        return {**plans, longest: replace(plans[longest], lengths=tuple(said))}
    assert error is not None
    raise error


def planned_at(planner: Planner, length: int, at_rest: Mapping[str, Layout], gathers: Gathers = "each") -> Plan:
    """The plan of a length with parameters at rest in these layouts and gathered so; by any solver, where a preset is
    asked for. Raises ValueError as `Planner.plan` and as `best_at_rest`."""
    on, asked = planner.holding(at_rest, gathers), _of(length, planner.asked)
    plan = on.planned(replace(asked, solver=AUTO if asked.preset else asked.solver))
    found = on.assignment(plan)
    if (kept := in_layouts(on.space, found, at_rest)) != found:
        plan = repriced(on, plan, kept)
    if plan.headroom_bytes is not None and plan.headroom_bytes < 0:
        raise Infeasible(f"with each layer's own layouts at rest the plan needs {short_bytes(plan.bytes)}")
    return plan


def _seconds_at(planner: Planner, at_rest: Mapping[str, Layout], alone: Plan) -> float:
    """About how long a step takes with parameters in these layouts, near the plan of its length alone."""
    near = Decided.of(planner.space, planner.assignment(alone))
    return planner.evaluate(planner.assignment_at(at_rest, near), QUICK).seconds


def _of(length: int, request: Request) -> Request:
    """As progress names it."""
    stage = replace(request.stage, doing=f"{request.stage.doing} for batches of length {length}")
    return replace(request, stage=stage)
