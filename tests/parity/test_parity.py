"""A parallel program computes what the model computes: loss, every gradient, and parameters after training.

Most cases run on simulated ranks, all in this process; some on real gloo ranks, through `autopar.parallelize`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import plans
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from models import CASES, assert_close, assert_same, case, eager, on_ranks, simulated, whole
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autopar
from autopar.ir.layout import local_shape, valid_shape
from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner
from autopar.runtime.module import ParallelModule

pytest.importorskip("transformers")

PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp")
MESHES: tuple[dict[str, int], ...] = (
    {"a": 4},
    {"dp": 2, "tp": 2},
    {"dp": 1, "tp": 4},
    {"a": 8},
    {"dp": 2, "tp": 4},
    {"a": 2, "b": 2, "c": 2},
)


def mesh_id(mesh: dict[str, int]) -> str:
    return "x".join(map(str, mesh.values()))


planner = models.planners(case)


@functools.cache
def reference(name: str) -> models.Step:
    return eager(case(name))


def check(name: str, mesh: dict[str, int], program: Program) -> None:
    found = simulated(program, planner(name, mesh).captured, case(name))
    assert_same(found, reference(name))


# ----------------------------------------------------------------------------------- simulated ranks


TWINS = ("gpt2 untied", "llama tied", "llama of 4 layers", "mlp with outputs")
"""Cases that differ from another in one thing: on two meshes."""
ON: list[tuple[str, dict[str, int]]] = [
    (name, mesh) for name in CASES for mesh in MESHES if name not in TWINS or mesh in ({"a": 4}, {"dp": 2, "tp": 2})
]


def on_id(value: object) -> str:
    return mesh_id(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "mesh", "solver"), pairwise(tuple(CASES), MESHES, PRESETS), ids=on_id)
def test_presets(name: str, mesh: dict[str, int], solver: str) -> None:
    made = planner(name, mesh)
    check(name, mesh, made.program(made.plan(solver=solver, cost="serial")))


PAPERS = ("atp", "par4d", "meshslice")
GRIDS: tuple[dict[str, int], ...] = (
    {"a": 2, "b": 2},
    {"a": 2, "b": 2, "c": 2},
    {"a": 4, "b": 2},
    {"a": 2, "b": 3},
    {"data": 2, "z": 2, "y": 2, "x": 2},
)


@pytest.mark.parametrize(
    ("name", "mesh", "solver"),
    pairwise(("gpt2", "llama", "gpt2 of odd sizes", "mlp with outputs"), GRIDS, PAPERS),
    ids=on_id,
)
def test_presets_of_papers(name: str, mesh: dict[str, int], solver: str) -> None:
    made = planner(name, mesh)
    program = made.program(made.plan(solver=solver, cost="serial"))
    check(name, mesh, program)


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 8}], ids=mesh_id)
@pytest.mark.parametrize("solver", PAPERS)
def test_presets_of_papers_on_one_axis(solver: str, mesh: dict[str, int]) -> None:
    made = planner("gpt2", mesh)
    check("gpt2", mesh, made.program(made.plan(solver=solver, cost="serial")))


@pytest.mark.parametrize("mesh", [{"a": 4}, {"dp": 1, "tp": 4}, {"a": 8}], ids=mesh_id)
@pytest.mark.parametrize("name", CASES)
def test_solver_on_one_axis(name: str, mesh: dict[str, int]) -> None:
    made = planner(name, mesh)
    check(name, mesh, made.program(made.plan(solver="dp", cost="serial")))


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}], ids=mesh_id)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp with loss_fn"])
def test_solver_on_two_axes(name: str, mesh: dict[str, int]) -> None:
    made = planner(name, mesh)
    check(name, mesh, made.program(made.plan(solver="dp", cost="serial")))


@pytest.mark.parametrize(("name", "mesh"), [*ON, *((name, {"a": 2, "b": 3}) for name in CASES)], ids=on_id)
def test_random_plans(name: str, mesh: dict[str, int]) -> None:
    """Any point of the space is right, not only those that a solver likes."""
    made = planner(name, mesh)
    program = codegen(made.space, plans.random_assignment(made.space, seed=0))
    check(name, mesh, program)
    check(name, mesh, bucket(program))


def test_a_plan_under_a_memory_limit() -> None:
    mesh = {"a": 4}
    made = planner("llama", mesh)
    free = made.plan(cost="serial")
    tight = made.plan(cost="serial", memory_limit_bytes=0.7 * free.bytes)
    assert tight.bytes <= 0.7 * free.bytes and tight.account.seconds >= free.account.seconds
    check("llama", mesh, made.program(tight))


def test_bfloat16_loosely() -> None:
    torch.manual_seed(0)
    made = models.Case(model=models.llama().bfloat16(), batch=models.tokens)
    plain = models.Case(model=models.llama(), batch=models.tokens)
    plain.model.load_state_dict({k: v.float() for k, v in made.model.state_dict().items()})
    exact, half = eager(plain), eager(made)
    planner = Planner(made.model, {"dp": 2, "tp": 2}, made.args, made.kwargs)
    for solver in PRESETS:
        found = simulated(planner.program(planner.plan(solver=solver, cost="serial")), planner.captured, made)
        for name, gradient in exact.gradients.items():
            ours = (found.gradients[name].float() - gradient).norm()
            theirs = (half.gradients[name].float() - gradient).norm()
            assert ours <= 2 * theirs + 0.01 * gradient.norm(), name


# ---------------------------------------------------------------------------------------- real ranks


STEPS = range(10)


def axes(mesh: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def parallel(made: models.Case, mesh: dict[str, int], solver: str = "ddp") -> ParallelModule:
    """Captured by every rank."""
    return autopar.parallelize(made.model, axes(mesh), made.args, made.kwargs, loss_fn=made.loss_fn, solver=solver)


def parallel_as_captured(name: str, made: models.Case, mesh: dict[str, int], solver: str) -> ParallelModule:
    """Ranks have the capture of the process that they are forked from, see `on_ranks_of`."""
    with models.as_captured(models.captured(case, name).captured):
        return parallel(made, mesh, solver)


def on_ranks_of(mesh: dict[str, int], function: Callable[..., Any], name: str, *args: Any) -> list[Any]:
    models.captured(case, name)
    return run(math.prod(mesh.values()), function, name, *args)


def step_and_train(name: str, mesh: dict[str, int], solver: str, clip: float | None) -> dict[str, Any]:
    """One step's outputs and gradients, and the losses and parameters of `STEPS` AdamW steps."""
    made = case(name)
    module = parallel_as_captured(name, made, mesh, solver)
    step = on_ranks(module, made)
    named = dict(module.named_parameters())
    assert named.keys() == dict(made.model.named_parameters()).keys()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in named.values())
    module.zero_grad()
    optimizer = models.adamw(module)
    losses = models.train(module, optimizer, made, STEPS, clip=clip)
    return {
        "step": step,
        "losses": losses,
        "parameters": {name: whole(p).detach() for name, p in module.named_parameters()},
        "keys": list(module.state_dict()),
    }


@pytest.mark.parametrize(
    ("name", "mesh", "solver", "clip"),
    [
        ("gpt2", {"dp": 2}, "megatron_sp", None),
        ("llama", {"dp": 2, "tp": 2}, "megatron", 0.5),
        ("llama tied", {"dp": 1, "tp": 2}, "dp", None),
        ("gpt2 of odd sizes", {"a": 4}, "fsdp", 0.5),
        ("mlp with loss_fn", {"z": 2, "y": 2, "x": 2}, "par4d", 0.5),
        ("mlp with loss_fn", {"rows": 2, "cols": 2}, "meshslice", 0.5),
        ("mlp with loss_fn", {"a": 4}, "ddp", 0.01),
        ("mlp with loss_fn", {"dp": 2, "tp": 2}, "ilp", None),
    ],
    ids=lambda value: mesh_id(value) if isinstance(value, dict) else str(value),
)
def test_real_ranks_train_as_one_process(name: str, mesh: dict[str, int], solver: str, clip: float | None) -> None:
    made, expected = case(name), reference(name)
    module = models.Eager(made)
    losses = models.train(module, models.adamw(module), made, STEPS, clip=clip)

    results = on_ranks_of(mesh, step_and_train, name, mesh, solver, clip)

    for found in results:
        assert_same(found["step"], expected)
        assert found["losses"] == pytest.approx(losses, rel=1e-4)
        assert found["keys"] == list(made.model.state_dict())
        for key, parameter in module.named_parameters():
            assert_close(found["parameters"][key], parameter, key, 1e-4)
    assert all(found["losses"] == results[0]["losses"] for found in results)


def plain_outputs(mesh: dict[str, int], solver: str) -> dict[str, Any]:
    """A model without a loss: the caller differentiates its output."""
    made = case("mlp with outputs")
    module = parallel(made, mesh, solver)
    output = module(*made.args)
    tangent: torch.Tensor = models.tangents(whole(output).detach())
    (whole(output) * tangent).sum().backward()
    return {
        "outputs": {"": whole(output).detach()},
        "gradients": {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("solver", ["ddp", "megatron", "dp"])
def test_a_model_without_loss_takes_gradients_into_its_outputs(solver: str) -> None:
    expected = reference("mlp with outputs")
    for found in run(4, plain_outputs, {"dp": 2, "tp": 2}, solver):
        assert_same(models.Step(outputs=found["outputs"], gradients=found["gradients"]), expected)


def slices_of_a_loader(name: str, mesh: dict[str, int], solver: str) -> dict[str, Any]:
    """Each rank loads what `input_placements` says, no more, and hands it over as a DTensor."""
    made = case(name)
    module = parallel_as_captured(name, made, mesh, solver)
    wanted = module.input_placements
    program = module.program
    layouts = {i.target: (i.layout, i.meta.shape) for i in program.inputs if i.role == "input"}
    kwargs = {}
    for name, value in made.kwargs.items():
        layout, shape = layouts[f"kwargs.{name}"]
        given = distribute_tensor(value, module.mesh, wanted[f"kwargs.{name}"], src_data_rank=None)
        coordinate = tuple(module.mesh.get_coordinate() or ())
        assert given.to_local().shape == valid_shape(shape, layout, program.mesh, coordinate)
        kwargs[name] = given
    loss = module(**kwargs).loss
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients, "inputs": {k: str(v) for k, v in wanted.items()}}


@pytest.mark.parametrize(
    ("name", "mesh", "solver"),
    [("llama", {"dp": 2, "tp": 1}, "megatron"), ("gpt2 of odd sizes", {"dp": 2, "tp": 2}, "ddp")],
)
def test_a_loader_hands_over_its_own_slice(name: str, mesh: dict[str, int], solver: str) -> None:
    expected = reference(name)
    for found in on_ranks_of(mesh, slices_of_a_loader, name, mesh, solver):
        assert_close(found["loss"], next(v for v in expected.outputs.values() if v.dim() == 0), "loss")
        for name, gradient in expected.gradients.items():
            assert_close(found["gradients"][name], gradient, name)
        assert "Shard(dim=0)" in found["inputs"]["kwargs.input_ids"]


def save_and_train(name: str, folder: str, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    made = case(name)
    module = parallel_as_captured(name, made, mesh, "fsdp")
    optimizer = models.adamw(module)
    models.train(module, optimizer, made, range(3))
    state = {"model": module.state_dict(), "optimizer": _optimizer_state(module, optimizer)}
    checkpoint.save(state, checkpoint_id=folder)
    models.train(module, optimizer, made, range(3, 6))
    return {name: whole(p).detach() for name, p in module.named_parameters()}


def load_and_train(name: str, folder: str, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    """On another mesh, with another plan."""
    made = case(name)
    module = parallel_as_captured(name, made, mesh, "megatron")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    optimizer = models.adamw(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = _optimizer_state(module, optimizer)
    state = {"model": dict(module.state_dict()), "optimizer": states}
    checkpoint.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    named = dict(module.named_parameters())
    for name, moments in states.items():
        optimizer.state[named[name]].update(moments)
    models.train(module, optimizer, made, range(3, 6))
    return {name: whole(p).detach() for name, p in module.named_parameters()}


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(optimizer.state[parameter]) for name, parameter in module.named_parameters()}


def test_a_run_resumes_from_a_checkpoint_on_another_mesh_with_another_plan(tmp_path: Path) -> None:
    name = "gpt2 of odd sizes"
    four, two = {"dp": 2, "tp": 2}, {"tp": 2}
    before = on_ranks_of(four, save_and_train, name, str(tmp_path), four)
    after = on_ranks_of(two, load_and_train, name, str(tmp_path), two)
    for name, parameter in before[0].items():
        assert_close(after[0][name], parameter, name, 1e-4)


def materialized(mesh: dict[str, int], solver: str) -> dict[str, Any]:
    weights = case("llama").model.state_dict()
    with torch.device("meta"):
        model = models.llama()
    made = models.Case(model=model, batch=models.tokens)
    module = parallel(made, mesh, solver)
    assert all(p.device.type == "meta" for p in module.parameters())
    # buffers that no state_dict holds come from the configuration
    buffers = dict(case("llama").model.named_buffers())
    module.materialize({**buffers, **weights})
    program = module.program
    held = sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))
    layouts = {i.target: i for i in program.inputs if i.role == "parameter"}
    expected = sum(torch.Size(local_shape(i.meta.shape, i.layout, program.mesh)).numel() for i in layouts.values())
    assert held == expected < sum(v.numel() for v in weights.values())
    loss = module(**made.kwargs).loss
    loss.backward()
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def test_a_model_on_meta_is_materialised_shard_by_shard() -> None:
    for found in run(2, materialized, {"a": 2}, "fsdp"):
        for name, gradient in reference("llama").gradients.items():
            assert_close(found[name], gradient, name)


def evaluated(name: str, mesh: dict[str, int], solver: str) -> dict[str, Any]:
    made = case(name)
    module = parallel_as_captured(name, made, mesh, solver)
    module.eval()
    with torch.no_grad():
        silent = module(**made.kwargs).loss
    module.train()
    loud = module(**made.kwargs).loss
    loud.backward()
    return {
        "silent": silent,
        "loud": loud.detach(),
        "requires_grad": silent.requires_grad,
        "config": module.config.n_layer,
    }


def test_evaluation_without_gradients() -> None:
    expected = next(v for v in reference("gpt2").outputs.values() if v.dim() == 0)
    for found in on_ranks_of({"tp": 2}, evaluated, "gpt2", {"tp": 2}, "megatron"):
        assert_close(found["silent"], expected, "loss in eval()")
        assert_close(found["loud"], expected, "loss in train()")


@pytest.mark.parametrize("name", ["llama", "mlp with loss_fn"])
def test_a_world_of_one_rank(name: str) -> None:
    made = case(name)
    module = models.Eager(made)
    losses = models.train(module, models.adamw(module), made, STEPS)
    mesh = {"dp": 1, "tp": 1}
    (found,) = on_ranks_of(mesh, step_and_train, name, mesh, "ilp", None)
    assert_same(found["step"], reference(name))
    assert found["losses"] == pytest.approx(losses, rel=1e-5)


def two_modules() -> list[float]:
    """Two plans in one process: the second does not disturb the first."""
    made = case("mlp with loss_fn")
    first = parallel(made, {"dp": 2, "tp": 2}, "megatron")
    losses = [float(first(*made.args))]
    second = parallel(made, {"a": 4}, "fsdp")
    losses.append(float(second(*made.args)))
    losses.append(float(first(*made.args)))
    return losses


def test_two_parallel_modules_in_one_process() -> None:
    (expected,) = reference("mlp with loss_fn").outputs.values()
    for losses in run(4, two_modules):
        assert losses == pytest.approx([float(expected)] * 3, rel=1e-5)
