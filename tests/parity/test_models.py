"""The models that people use, unmodified: a step under any plan is the step that PyTorch makes of them.

Two of the usual presets and a random plan run on simulated (2, 2) ranks, the solver's plan on (4,), which is planned
sooner; some models on real ranks. The graphs hold no operator that one device alone has, and the programs run on fakes
of a GPU. `benchmarks/models.py` does the same for more models, meshes and
plans, and makes docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import models
import plans
import pytest
import ranks
from models import assert_same, eager, on_ranks, simulated
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.compat.devices import devices_of
from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner
from autopar.testing.devices import DeviceFakes

zoo = pytest.importorskip("zoo")

GRID, LINE = {"dp": 2, "tp": 2}, {"a": 4}


PRESETS = (("ddp", "megatron_sp"), ("fsdp", "megatron"))
"""Two for each model; all of them for all models, on real ranks, by the benchmark."""


def programs(grid: Planner, presets: Sequence[str]) -> Iterator[tuple[str, Program]]:
    """Programs, each with the name of its plan."""
    for solver in presets:
        yield solver, grid.program(grid.plan(solver=solver))
    yield "random", bucket(codegen(grid.space, plans.random_assignment(grid.space, seed=0)))
    line = grid.on(LINE, None)
    yield "dp", line.program(line.plan(cost="serial"))


@pytest.fixture(scope="module")
def gpu() -> DeviceFakes:
    """Of all models here: their layers are alike."""
    return DeviceFakes()


@pytest.mark.parametrize(
    ("name", "presets"), [(name, PRESETS[place % 2]) for place, name in enumerate(zoo.ISSUE)], ids=zoo.ISSUE
)
def test_every_plan(name: str, presets: Sequence[str], gpu: DeviceFakes) -> None:
    made = zoo.case(name)
    expected = eager(made)
    planner = Planner(made.model, GRID, made.args, made.kwargs, loss_fn=made.loss_fn)
    assert not planner.space.without_rule
    assert all(len(devices_of(node.op)) == 2 for node in planner.captured.graph.nodes)
    for plan, program in programs(planner, presets):
        gpu.run(program)
        try:
            assert_same(simulated(program, planner.captured, made), expected)
        except AssertionError as error:
            raise AssertionError(f"{name} under plan {plan}: {error}") from error


def of_one_layer(name: str) -> models.Case:
    made: models.Case = zoo.case(name, layers=1)
    return made


def step_on_ranks(name: str, mesh: dict[str, int], solver: str) -> models.Step:
    made = of_one_layer(name)
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    with models.as_captured(models.captured(of_one_layer, name).captured):
        module = autopar.parallelize(
            made.model, device_mesh, made.args, made.kwargs, loss_fn=made.loss_fn, solver=solver
        )
    return on_ranks(module, made)


@pytest.mark.parametrize(
    ("name", "mesh", "solver"),
    [("T5", {"tp": 2}, "megatron"), ("ViT", GRID, "ilp"), ("Mamba", {"dp": 2}, "fsdp")],
    ids=["T5", "ViT", "Mamba"],
)
def test_a_step_on_real_ranks(name: str, mesh: dict[str, int], solver: str) -> None:
    expected = eager(of_one_layer(name))
    models.captured(of_one_layer, name)  # once, for all ranks
    for found in ranks.run(math.prod(mesh.values()), step_on_ranks, name, mesh, solver):
        assert_same(found, expected)
