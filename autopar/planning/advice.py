"""Advice: what a person would try where ranks wait, priced with the plan's own decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.ir.layout import local_meta
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

from .account import parameter_layouts
from .plan import Advice, Plan
from .request import MICRO_BATCHES_MOST
from .training import GATHERS, Training

TIMES = 4
"""So many times the micro-batches are priced: they save three quarters of what is reduced once a step."""

LEAST_SPEEDUP = 1.05
"""What is worth a person's time."""


def advised(plan: Plan, space: Space, assignment: Assignment, step_seconds: Callable[[Training], float]) -> Plan:
    """A plan whose ranks wait for much of its step, with advice if more micro-batches fit and pay. `step_seconds` are
    those of the assignment in a step that trains so: estimated, as those of candidates are."""
    if TIMES * plan.training.micro_batches > MICRO_BATCHES_MOST:
        return plan
    steps = [step_seconds(training) for training in _fitting(space, plan, assignment)]
    speedup = TIMES * plan.seconds / min(steps) if steps else 0.0
    if speedup < LEAST_SPEEDUP:
        return plan
    return replace(plan, advice=Advice(micro_batches=TIMES * plan.training.micro_batches, speedup=speedup))


def _fitting(space: Space, plan: Plan, assignment: Assignment) -> Iterator[Training]:
    """The ways to gather for more micro-batches that surely fit: beside all that the plan holds, each rank keeps the
    gradients of its parameters as it computes them, and those parameters too if they are gathered once a step."""
    limit = plan.memory_limit_bytes
    free = None if limit is None else limit * (1.0 - plan.headroom) - plan.bytes
    metas = {name: space.graph.metas[value] for name, value in space.graph.parameters.items()}
    whole = sum(
        max(local_meta(metas[name], layout, space.mesh).bytes for layout in (at_rest, *in_use))
        for name, at_rest, in_use, _ in parameter_layouts(space, assignment)
    )
    for number, gathers in enumerate(GATHERS, 1):
        if free is None or number * whole <= free:
            yield replace(plan.training, micro_batches=TIMES * plan.training.micro_batches, gathers=gathers)
