"""The verb `simulate`: a plan of a model on a cluster, run in time by one rank's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import Optimizer
from autopar.cost.timeline import COMPUTE, Timeline
from autopar.planning.constraints import Constraints
from autopar.planning.plan import Plan, bytes_text, seconds_text, table
from autopar.planning.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A plan, and the timeline of its program."""

    plan: Plan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of a step: forward, backward and the optimizer."""
        return self.timeline.seconds + self.plan.account.optimizer_seconds

    def to_json(self) -> dict[str, Any]:
        found = self.timeline
        return {
            "model": self.plan.model,
            "mesh": dict(self.plan.mesh),
            "cluster": self.plan.cluster,
            "solver": self.plan.solver,
            "seconds": self.seconds,
            "optimizer_seconds": self.plan.account.optimizer_seconds,
            "compute_seconds": found.busy_seconds(COMPUTE),
            "communication_seconds": found.communication_seconds,
            "exposed_seconds": found.exposed_seconds,
            "busy": found.busy_seconds(COMPUTE) / found.seconds if found.seconds else 0.0,
            "utilization": found.utilization,
            "communication": [{**asdict(row), "hidden_seconds": row.hidden_seconds} for row in found.communication],
        }

    def __str__(self) -> str:
        found, plan = self.timeline, self.plan
        mesh = ", ".join(f"{axis}={n}" for axis, n in plan.mesh.items())
        told = self.to_json()
        rows: list[tuple[str, ...]] = [("collective", "axis", "count", "bytes", "seconds", "exposed", "hidden")]
        rows += [
            (
                row.kind, row.axis, str(row.count), bytes_text(row.bytes), seconds_text(row.seconds),
                seconds_text(row.exposed_seconds), seconds_text(row.hidden_seconds),
            )
            for row in found.communication
        ]  # fmt: skip
        lines = [
            f"{plan.model} on mesh {mesh} of {plan.cluster}, by {plan.solver}",
            f"step {seconds_text(self.seconds)}: forward and backward {seconds_text(found.seconds)}, "
            f"optimizer {seconds_text(plan.account.optimizer_seconds)}",
            f"operators {seconds_text(told['compute_seconds'])}, busy {told['busy']:.1%}; "
            f"arithmetic at {found.utilization:.1%} of the peak",
            f"communication {seconds_text(found.communication_seconds)}, of which exposed "
            f"{seconds_text(found.exposed_seconds)}",
        ]
        return "\n".join([*lines, *(["", *table(rows)] if found.communication else [])])


def simulate(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    solver: str = "dp",
    cluster: str | Cluster | None = None,
    memory_limit_bytes: float | None = None,
    optimizer: str | float | Optimizer = "adamw",
    constraints: Constraints | None = None,
) -> Simulation:
    """One training step of a plan on a cluster, without devices: of `plan`, or of the one that `autopar.plan` makes.

    Arguments as for `autopar.plan`. A given plan may be simulated on another cluster than the one that it was made for.
    Raises ValueError for what cannot be planned, and for a plan of another model or mesh.
    """
    planner = Planner(model, mesh_shape, args, kwargs, loss_fn=loss_fn, cluster=cluster, optimizer=optimizer)
    if plan is None:
        plan = planner.plan(solver=solver, memory_limit_bytes=memory_limit_bytes, constraints=constraints)
    return Simulation(plan=plan, timeline=planner.timeline(plan))
