"""A saved plan with its model at hand: its figures computed again, so that an edited plan shows its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from autopar.cluster.library import named_cluster
from autopar.cluster.library.read import parse_cluster
from autopar.cluster.machine import Cluster

from .plan import Plan
from .planner import Planner
from .progress import Stage
from .provenance import EDITED, Candidate
from .repriced import repriced
from .request import AUTO, LengthOptions, Request

BEFORE = "before the edit"
"""The candidate that an edited plan was."""


def cluster_of(plan: Plan) -> Cluster:
    """The cluster that a plan is for, by the figures that it carries; by its name if it carries none."""
    if plan.provenance is None or not plan.provenance.cluster:
        return named_cluster(plan.cluster)
    return parse_cluster("\n".join(plan.provenance.cluster), f"the plan's cluster {plan.cluster}")


def optimizer_of(plan: Plan) -> str | float:
    """What `Planner` takes for the plan's optimizer."""
    number, _, rest = plan.optimizer.partition(" ")
    return float(number) if rest == "bytes per element" else plan.optimizer


def options_of(plan: Plan, **changes: Any) -> LengthOptions:
    """The options that a plan answers, with changes; constraints are those of the plan and of the changes."""
    limit = plan.memory_limit_bytes
    if plan.memory_limit_from in ("device", "none"):
        limit = None
    elif limit is None:
        limit = math.inf
    constraints = {name: dict(axes) for name, axes in plan.constraints.items()}
    constraints |= changes.pop("constraints", None) or {}
    own: LengthOptions = {
        "solver": plan.solver,
        "cost": plan.cost,
        "cluster": cluster_of(plan),
        "memory_limit_bytes": limit,
        "headroom": plan.headroom if plan.memory_limit_from == "device" else None,
        "optimizer": optimizer_of(plan),
        "constraints": constraints or None,
        "recompute": plan.training.recompute,
        "offload": bool(plan.offload_bytes),
        "micro_batches": plan.training.micro_batches,
        "pipeline": plan.pipeline.axis if plan.pipeline else None,
        "schedule": plan.pipeline.schedule if plan.pipeline else AUTO,
        "precision": plan.training.precision,
        "imbalance": plan.training.asked_imbalance,
        "compile": plan.training.compile or False,
        "within": plan.within or None,
        "lengths": {one.length: one.share for one in plan.lengths} or None,
    }
    return cast(LengthOptions, {**own, **changes})


def request_of(plan: Plan, **changes: Any) -> Request:
    """The request that a plan answers, with changes."""
    return Request(gathers=plan.training.gathers, **options_of(plan, **changes))


def refreshed(planner: Planner, plan: Plan) -> Plan:
    """The plan with all figures computed again by a planner for its model. What the solver proved stays if the figures
    of the cluster did. Raises ValueError for a plan of another model or mesh, and for decisions that contradict
    themselves."""
    Stage(doing="computing the plan's figures").tell()
    if planner.axis:
        again = planner.pipelines.repriced(plan)
    else:
        planner.program(plan)  # raises where decisions contradict themselves
        again = repriced(planner, plan)
    assert again.provenance is not None
    origin = plan.provenance or again.provenance
    proved = plan.objective_bound_seconds if origin.cluster == again.provenance.cluster else 0.0
    candidates, winner = origin.candidates, origin.winner
    if plan.is_edited:
        known = Candidate(name=BEFORE, seconds=plan.seconds, precision="simulated", bytes=plan.bytes)
        candidates, winner = (known, *candidates), EDITED
    about = replace(
        again.provenance, candidates=candidates, winner=winner, source=origin.source, command=origin.command
    )
    return replace(again, objective_bound_seconds=proved, provenance=about)
