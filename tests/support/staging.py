"""Programs in stages, planned at small sizes and cut anywhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models import Case, in_dtype

from autopar.ir.program import Program
from autopar.ir.schedule import Schedule
from autopar.passes.codegen.precision import written
from autopar.passes.lower.stages import Staged, staged
from autopar.passes.space.problem import Assignment, ProblemBuilder
from autopar.planning.options import Options
from autopar.planning.pipelines import time_pins
from autopar.planning.planner import Planner
from autopar.planning.presets.context import Context
from autopar.planning.search import Search
from autopar.runtime.pipeline import simulate_pipeline
from autopar.runtime.simulate import Simulated, simulate_step


@dataclass(frozen=True, kw_only=True)
class InTime:
    """A model's program on a mesh whose first axis lies in time."""

    planner: Planner
    assignment: Assignment
    program: Program
    values: Mapping[str, torch.Tensor]
    """Parameters, buffers and constants."""
    inputs: Mapping[str, torch.Tensor]

    def cut(self, stages: int, seed: int) -> Staged:
        """Anywhere."""
        places = list(dict.fromkeys(node.serves for node in self.program.forward if node.serves))
        first = {name: k for k, name in reversed(list(enumerate(n.serves for n in self.program.forward)))}
        drawn = sorted(random.Random(seed).sample(places[1:], stages - 1), key=first.__getitem__)
        return staged(self.program, drawn)

    def whole(self) -> Simulated:
        """The step of all micro-batches at once, as ranks of a mesh."""
        return simulate_step(self.program, self.values, self.inputs, seed=3)

    def piped(self, cut: Staged, schedule: Schedule) -> Simulated:
        return simulate_pipeline(cut, schedule, self.values, self.inputs, seed=3)


def in_time(case: Case, stages: int, mesh: Mapping[str, int]) -> InTime:
    """In float64; the first axis of the mesh are the micro-batches."""
    case = in_dtype(case, torch.float64)
    args, kwargs = case.batch(0)
    axis, *_ = mesh
    planner = Planner(
        case.model, {**mesh, axis: stages}, args, kwargs, loss_fn=case.loss_fn, cluster="dgx-h100", pipeline=axis,
        micro_batches=mesh[axis],
    )  # fmt: skip
    assert planner.space.mesh == tuple(mesh.values())
    pins = time_pins(Context(planner.space, planner.searches.blocks()))
    search = Search(ProblemBuilder(planner.space), "dp", Options(planner.space, pins))
    assignment = search.run().assignment
    bound: Mapping[str, Any] = planner.captured.bind(args, kwargs)
    model = case.model
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return InTime(
        planner=planner,
        assignment=assignment,
        program=written(planner.space, assignment),
        values={**dict(named[0]), **dict(named[1]), **planner.captured.constants},
        inputs={path: value for path, value in bound.items() if isinstance(value, torch.Tensor)},
    )


def difference(found: Simulated, wanted: Simulated) -> float:
    """The largest, relative to the largest element of what differs."""
    most = 0.0
    for one, other in ((getattr(found, what), getattr(wanted, what)) for what in ("outputs", "gradients", "mutations")):
        assert one.keys() == other.keys()
        for target, value in other.items():
            assert one[target].shape == value.shape and one[target].dtype == value.dtype
            if value.numel():
                error = (one[target].double() - value.double()).abs().max()
                most = max(most, float(error / max(value.double().abs().max().item(), 1e-12)))
    return most
