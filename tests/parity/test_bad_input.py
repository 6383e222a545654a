"""What cannot be done is refused in words that say what to change, on every rank, and nothing hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import Case, assert_same, case, eager, simulated
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy

import autopar
from autopar.passes.codegen.program import codegen
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import ASKED, Keywords, LengthOptions, Options, Request, byte_count
from autopar.testing import check

pytest.importorskip("transformers")


def plan(made: Case, mesh: dict[str, int] | None = None, **options: Any) -> Plan:
    options = {"loss_fn": made.loss_fn, "solver": "ddp", **options}
    return autopar.plan(made.model, {"a": 2} if mesh is None else mesh, made.args, made.kwargs, **options)


def refused(function: Callable[..., Any], *args: Any, kind: Any = ValueError, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def mlp() -> Case:
    return case("mlp with loss_fn")


# --------------------------------------------------------------------------------------------- options


def test_an_unknown_solver() -> None:
    message = refused(plan, mlp(), solver="simplex")
    assert "unknown solver 'simplex'" in message and "ilp" in message and "megatron_sp" in message


def test_a_model_that_reduces_its_gradients_itself() -> None:
    made = mlp()
    wrapped = Case(model=nn.DataParallel(made.model), batch=made.batch, loss_fn=made.loss_fn)
    assert "is in DataParallel, which reduces its gradients: give the model inside" in refused(plan, wrapped)


def test_an_unknown_solver_to_compare() -> None:
    made = mlp()
    assert "unknown solver 'simplex'" in refused(
        autopar.compare, made.model, {"a": 2}, made.args, loss_fn=made.loss_fn, solvers=["dp", "simplex"]
    )


def test_an_unknown_cost() -> None:
    message = refused(plan, mlp(), cost="guessed")
    assert "unknown cost 'guessed'" in message and "analytical" in message


def test_an_unknown_cluster() -> None:
    message = refused(plan, mlp(), cluster="basement")
    assert "unknown cluster 'basement'" in message and "dgx-h100" in message


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({}, "give axis names with sizes"),
        ((2, 2), "give axis names with sizes"),
        ({"a": 0}, "has size 0"),
        ({"a": 2.0}, "has size 2.0"),
        ({"a": True}, "has size True"),
        ({"a b": 2}, "'a b' is no identifier"),
        ({1: 2}, "1 is no identifier"),
    ],
    ids=str,
)
def test_a_mesh_that_is_none(mesh: Any, message: str) -> None:
    assert message in refused(plan, mlp(), mesh=mesh)


def test_the_keywords_of_verbs_are_the_fields_of_a_request() -> None:
    """With the types that a type checker sees, and the defaults that editors show; the others are the planner's."""
    fields = {f.name: (f.type, f.default) for f in dataclasses.fields(Request) if f.name in ASKED}
    for verb, options in (
        (autopar.plan, LengthOptions),
        (autopar.parallelize, LengthOptions),
        (autopar.simulate, Options),
        (autopar.compare, Keywords),
        (autopar.fit, Keywords),
    ):
        seen = inspect.signature(verb).parameters
        for name, hint in options.__annotations__.items():
            assert hint.__forward_arg__ == fields[name][0]
            assert (seen[name].annotation, seen[name].default) == fields[name]
        assert "options" not in seen and "stage" not in seen
    assert set(fields) == set(LengthOptions.__annotations__)
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'solvr' \(did you mean 'solver'"):
        autopar.plan(mlp().model, {"a": 2}, solvr="dp")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("memory_limit_bytes", "40GB", "memory_limit_bytes is '40GB' (str): give a positive number of bytes"),
        ("memory_limit_bytes", float("nan"), "memory_limit_bytes is nan"),
        ("constraints", ["x"], "constraints is ['x'] (list): give placements on mesh axes by name"),
        ("constraints", {"x": "R"}, "constraint 'x' is 'R' (str): give a placement for an axis"),
        ("constraints", {"x": {"a": 3}}, "constraint 'x': a=3 is no placement"),
        ("constraints", {3: {}}, "constraint 3 is no name"),
        ("optimizer", None, "optimizer is None: give a name"),
        ("solver", None, "unknown solver None"),
        ("solver", ["dp"], "unknown solver ['dp']"),
        ("cost", 5, "unknown cost 5"),
        ("cluster", 3, "cluster is 3 (int): give a name"),
        ("loss_fn", 3, "loss_fn is 3 (int): give a function"),
        ("profiles", 5, "profiles is 5 (int): give the path"),
    ],
    ids=str,
)
def test_an_option_of_another_type(option: str, value: Any, message: str) -> None:
    assert message in refused(plan, mlp(), **{option: value})


def test_what_is_no_model_and_what_it_cannot_be_called_with() -> None:
    model, x = mlp().model, torch.randn(4, 16)
    assert "model is None: give an nn.Module" in refused(autopar.plan, None, {"a": 2}, (x,))
    assert "args is a tensor of shape (4, 16): give a tuple" in refused(autopar.plan, model, {"a": 2}, x)
    assert "kwargs is [1] (list): give the model's keyword" in refused(autopar.plan, model, {"a": 2}, (x,), [1])
    assert "mesh is 5 (int): give a DeviceMesh" in refused(autopar.parallelize, model, 5, (x,))
    assert "solvers is 'dp': give a list" in refused(autopar.compare, model, {"a": 2}, (x,), solvers="dp")
    assert "mesh_shape is 5" in refused(autopar.compare, model, 5, (x,))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({f"a{k}": 2 for k in range(12)}, "the mesh has 12 axes of two ranks or more"),
        ({"a": 10**6, "b": 10**6}, "the mesh has 1000000000000 ranks: give at most 1048576"),
        (2**30, "cluster local has 1048576 devices: give fewer"),
        ("2,2", "mesh_shape is '2,2': give axis names with sizes"),
    ],
    ids=["twelve axes", "a trillion", "a number", "text"],
)
def test_a_mesh_that_is_too_much(mesh: Any, message: str) -> None:
    made = mlp()
    assert message in refused(autopar.plan, made.model, mesh, made.args, loss_fn=made.loss_fn)


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "megatron", "megatron_sp"])
def test_a_batch_of_one(preset: str) -> None:
    made = mlp()
    message = refused(
        autopar.plan, made.model, {"dp": 3, "tp": 1}, (torch.randn(1, 16),), loss_fn=made.loss_fn, solver=preset
    )
    assert f"preset '{preset}' splits the batch by 3 (dp=3" in message and "the batch is 1" in message
    assert "two or more" in message


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"x": 2, "y": 2, "tp": 2}, "preset 'atp' splits products on two axes, and x, y, tp of the mesh are named for"),
        ({"dp": 2, "data": 2}, "preset 'atp' splits products on one or two axes, and all of the mesh (dp, data) are"),
        ({"z": 4}, "preset 'atp' splits products on one or two axes, and all of the mesh (z) are named for data"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_the_preset(mesh: dict[str, int], message: str) -> None:
    made = mlp()
    assert message in refused(plan, made, mesh=mesh, solver="atp")


@pytest.mark.parametrize("preset", ["par4d", "meshslice"])
def test_a_batch_of_one_on_axes_of_a_paper(preset: str) -> None:
    made = mlp()
    x = torch.randn(1, 16)
    message = refused(autopar.plan, made.model, {"z": 2, "x": 2}, (x,), loss_fn=made.loss_fn, solver=preset)
    assert f"preset '{preset}' splits the batch by 2 (z=2" in message and "the batch is 1" in message


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_memory_limit_that_is_none(limit: float) -> None:
    assert "give a positive number of bytes" in refused(plan, mlp(), memory_limit_bytes=limit)


@pytest.mark.parametrize("solver", ["ilp", "dp"])
def test_a_memory_limit_that_nothing_fits(solver: str) -> None:
    """The message says the smallest that would do, and that does."""
    made = mlp()
    message = refused(plan, made, mesh={"a": 4}, solver=solver, memory_limit_bytes=1000)
    assert "no plan fits in 1000 B" in message
    smallest = byte_count("".join(message.partition("that was reached is ")[2].split()[:2]))
    assert plan(made, mesh={"a": 4}, solver=solver, memory_limit_bytes=smallest).bytes <= smallest
    # a preset's search within a near limit may need a percent less
    refused(plan, made, mesh={"a": 4}, solver=solver, memory_limit_bytes=0.95 * smallest)


# ---------------------------------------------------------------------------------------------- models


def test_a_loss_that_depends_on_no_parameter() -> None:
    message = refused(plan, Case(model=nn.Linear(16, 8), batch=models.vectors, loss_fn=lambda y: y.detach().sum()))
    assert "weight, bias" in message and "requires_grad_(False)" in message


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda x: x * torch.binomial(x.detach().abs().ceil(), torch.full_like(x, 0.5)), "aten.binomial.default)"),
    ],
    ids=["binomial"],
)
def test_random_operators_that_cannot_be_made_parallel(
    function: Callable[[torch.Tensor], torch.Tensor], where: str
) -> None:
    model = nn.Sequential(nn.Linear(16, 8), Function(function))
    message = refused(plan, Case(model=model, batch=models.vectors))
    assert where in message and "draw these numbers outside of the model" in message


class Parts(nn.Module):
    """A buffer that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("table", torch.ones(10))
        self.register_buffer("part", self.table[:8])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.part).mean()


class Hooks(nn.Sequential):
    """It registers one more in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self[0].register_forward_hook(lambda module, args, out: 2 * out)
        return super().forward(x).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a collective": (
        lambda: nn.Sequential(nn.Linear(16, 8), Function(lambda x: all_reduce(x))),
        "calls a collective, allreduce, and a parallel module issues all collectives itself",
    ),
    "a sparse tensor": (
        lambda: nn.Sequential(nn.Linear(16, 8), Function(lambda x: torch.sparse.mm(x.detach().to_sparse(), x.t()))),
        r"computes with a sparse tensor \(.*test_bad_input",
    ),
    "hooks that pile up": (lambda: Hooks(nn.Linear(16, 8)), r"registers hooks \(0._forward_hooks\) in each call"),
    "a part of a buffer": (Parts, "take part of table in forward, where it is used"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_no_graph_holds_is_told_what_to_do(name: str) -> None:
    made, message = MODELS[name]
    with contextlib.ExitStack() as stack:
        if name == "a collective":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        assert re.search(message, refused(plan, Case(model=made(), batch=models.vectors, loss_fn=torch.sum)))


def test_a_penalty_on_gradients_in_forward() -> None:
    class Penalized(nn.Module):
        def __init__(self, *, alone: bool) -> None:
            super().__init__()
            self.stem, self.head, self.alone = nn.Linear(16, 8), nn.Linear(8, 1), alone

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.stem(x)
            y = self.head(hidden.tanh()).sum()
            (gradient,) = torch.autograd.grad(y, hidden, create_graph=True)
            return gradient.square().sum() + (0 if self.alone else y)

    for alone in (False, True):
        result = check(Penalized(alone=alone), {"a": 2}, (torch.randn(4, 16),))
        assert result.equal, result


def test_dropout_in_evaluation_is_none() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5)).eval()
    assert plan(Case(model=model, batch=models.vectors)).parameters


def test_an_empty_batch() -> None:
    made = Case(model=models.mlp(), batch=lambda step: ((torch.ones(0, 16),), {}), loss_fn=models.mean_square)
    assert "input args.0 is float32[0, 16], an empty batch" in refused(plan, made)


@pytest.mark.parametrize("solver", ["ddp", "megatron", "dp"])
def test_a_dim_of_no_elements_beside_a_batch(solver: str) -> None:
    """Such as a prompt of no tokens."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            before = self.head(self.embed(prompt)).square().sum()
            return before + self.head(self.embed(tokens)).square().mean()

    tokens = torch.arange(12).reshape(4, 3)
    made = Case(model=Prompted(), batch=lambda step: ((tokens[:, :0], tokens), {}))
    planner = Planner(made.model, {"dp": 2, "tp": 2}, made.args)
    program = codegen(planner.space, planner.assignment(planner.plan(solver=solver)))
    assert_same(simulated(program, planner.captured, made), eager(made))


# ------------------------------------------------------------------------------------------ plan files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan(mlp()).save(path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=0), "no plan of format 2 (found 0)"),
        (lambda data: data.pop("decisions"), "decisions is missing"),
        (lambda data: data.update(decisions=3), "is no plan"),
        (lambda data: data.update(decisions=["R"]), "is no plan"),
        (lambda data: data.update(mesh="a=2"), "is no plan"),
        (lambda data: data["account"].pop("collectives"), "account.collectives is missing"),
        (lambda data: data["account"].update(surprise=1), "surprise"),
        (lambda data: data.update(segments=[{"name": "x"}]), "segments[0].runs is missing"),
        (lambda data: data.update(parameters={"w": 3}), "is no plan"),
        (lambda data: data.update(bucket_bytes=1), "bucket_bytes is 1: an integer, at least 51200"),
        (lambda data: data["account"].update(compute_seconds="1"), "account.compute_seconds is '1': a number"),
        (lambda data: data["peak"].update(parameters=-1), "peak.parameters is -1: an integer, at least 0"),
        (lambda data: data["inputs"].update(x=["R", "R"]), "inputs['x'] has 2 placements: one for each of 1 axes"),
        (lambda data: data["mesh"].update(a=0), "mesh['a'] is 0: an integer, at least 1"),
        (lambda data: data.update(memory_limit_byte=1), "memory_limit_byte is unknown (did you mean 'memory_limit_by"),
    ],
    ids=(
        *("format", "decisions missing", "a number", "a list"),
        *("a mesh", "collectives", "surprise", "runs", "parameters"),
        *("buckets", "seconds", "bytes", "placements", "no ranks", "misspelt"),
    ),
)
def test_a_corrupt_plan(file: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(file, change)
    found = refused(Plan.load, file)
    assert message in found and str(file) in found


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"plan"', "null", "\x00"], ids=repr)
def test_a_file_that_is_no_plan(file: Path, text: str) -> None:
    file.write_text(text)
    assert f"{file} is no plan" in refused(Plan.load, file)


def test_a_plan_that_is_nowhere(tmp_path: Path) -> None:
    assert "cannot be read (No such file" in refused(Plan.load, tmp_path / "nothing.json")
    assert "None is no path of a plan" in refused(Plan.load, None)


@pytest.mark.parametrize("nested", [{"a": {"b": [1]}}, [[["x"]]]], ids=str)
def test_nested_json_in_the_place_of_each_field(file: Path, nested: Any) -> None:
    data = json.loads(file.read_text())
    for field in data:
        try:
            str(Plan.from_json({**data, field: nested}))
        except ValueError as error:
            assert "no plan" in str(error)


def test_a_file_of_json_nested_too_deep(file: Path) -> None:
    file.write_text("[" * 100_000)
    assert "nested too deep" in refused(Plan.load, file)


@pytest.mark.parametrize("counts", [(10**10,), (10**10, 2 - 10**10), (0, 2)], ids=str)
def test_counts_of_runs_that_no_model_has(counts: tuple[int, ...], tmp_path: Path) -> None:
    """They are refused at once: nothing is repeated so many times."""
    made, file = case("gpt2"), tmp_path / "plan.json"
    planner = Planner(made.model, {"a": 2}, made.args, made.kwargs, loss_fn=made.loss_fn)
    planner.plan(solver="ddp").save(file)

    def change(data: dict[str, Any]) -> None:
        (run,) = data["segments"][0]["runs"]
        data["segments"][0]["runs"] = [{**run, "count": count} for count in counts]

    edit(file, change)
    began = time.perf_counter()
    message = refused(lambda: planner.assignment(Plan.load(file)))
    assert "do not add up" in message or "an integer, at least" in message
    assert time.perf_counter() - began < 5


def test_a_plan_is_saved_over_a_plan_and_over_nothing_else(file: Path, tmp_path: Path) -> None:
    loaded = Plan.load(file)
    loaded.save(file)
    assert "cannot be written (Is a directory)" in refused(loaded.save, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x40" + bytes(7) + b"{}")
    assert "is there, and is no plan: move it away" in refused(loaded.save, weights)
    assert weights.read_bytes() == b"\x40" + bytes(7) + b"{}"


def test_a_file_of_bytes(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00\x01")
    assert f"{file} is no plan" in refused(Plan.load, file)


# ------------------------------------------------------------------------------------------ real ranks
# Every one of these runs on two gloo ranks, and every rank must raise the same words.

RANKS = 2


def everywhere(function: Callable[..., Any], *args: Any) -> str:
    found = outcomes(RANKS, function, *args)
    for outcome in found:
        assert isinstance(outcome.error, ValueError), f"{outcome.error!r}\n{outcome.traceback}"
    messages = {str(outcome.error) for outcome in found}
    assert len(messages) == 1, messages
    return messages.pop()


def axes(shape: tuple[int, ...] = (RANKS,), names: tuple[str, ...] | None = ("a",)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallelized(**options: Any) -> None:
    made = mlp()
    mesh = options.pop("mesh", None)
    autopar.parallelize(
        made.model, axes() if mesh is None else mesh, made.args, **{"loss_fn": made.loss_fn, "solver": "ddp", **options}
    )


def without_names() -> None:
    parallelized(mesh=axes(names=None))


def test_a_mesh_without_names() -> None:
    assert "has no axis names" in everywhere(without_names)


def with_unknown_solver() -> None:
    parallelized(solver="simplex")


def test_an_unknown_solver_on_ranks() -> None:
    assert "unknown solver 'simplex'" in everywhere(with_unknown_solver)


def with_little_memory() -> None:
    parallelized(solver="dp", memory_limit_bytes=1000)


def test_little_memory_on_ranks() -> None:
    assert "no plan fits in 1000 B" in everywhere(with_little_memory)


def with_batch_of_one() -> None:
    made = mlp()
    autopar.parallelize(made.model, axes(), (torch.randn(1, 16),), loss_fn=made.loss_fn, solver="ddp")


def test_a_batch_of_one_on_ranks() -> None:
    assert "the batch is 1" in everywhere(with_batch_of_one)


def with_plan_of_another_mesh() -> None:
    parallelized(plan=plan(mlp(), mesh={"a": 4}))


def test_a_plan_of_another_mesh() -> None:
    message = everywhere(with_plan_of_another_mesh)
    assert "the plan is for mesh {'a': 4}" in message and "this mesh is {'a': 2}" in message


def with_plan_of_another_axis() -> None:
    parallelized(plan=plan(mlp(), mesh={"b": 2}))


def test_a_plan_of_another_axis() -> None:
    assert "the plan is for mesh {'b': 2}" in everywhere(with_plan_of_another_axis)


def with_plan_of_another_model() -> None:
    parallelized(plan=plan(case("gpt2")))


def test_a_plan_of_another_model() -> None:
    message = everywhere(with_plan_of_another_model)
    assert "another model or other input shapes (GPT2LMHeadModel" in message


def with_an_edited_plan() -> None:
    good = plan(mlp())
    name = next(name for name in good.decisions if "0_weight" in name)
    data = {**good.to_json(), "decisions": {**good.decisions, name: "S0%5 keep"}}
    parallelized(plan=Plan.from_json(data))


def test_an_edited_plan_on_ranks() -> None:
    assert "cannot take 'S0%5 keep'" in everywhere(with_an_edited_plan)


def with_a_plan_on_one_rank() -> None:
    rank = torch.distributed.get_rank()
    parallelized(plan=plan(mlp()) if rank == 0 else None)


def test_a_plan_on_one_rank_only() -> None:
    assert "the ranks were given different plans" in everywhere(with_a_plan_on_one_rank)


def with_different_plans() -> None:
    rank = torch.distributed.get_rank()
    parallelized(plan=plan(mlp(), solver="ddp" if rank else "fsdp"))


def test_ranks_with_different_plans() -> None:
    assert "the ranks were given different plans" in everywhere(with_different_plans)


def with_different_models() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    autopar.parallelize(nn.Linear(16, 8), axes(), (torch.ones(8, 16),), loss_fn=torch.sum, solver="ddp")


def test_ranks_with_different_weights() -> None:
    assert "the ranks have different values for 'weight'" in everywhere(with_different_models)


IDS, LABELS = models.tokens(0)[1].values()
IN_EAGER = refused(cross_entropy, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32), kind=RuntimeError)
"""What torch says of labels of int32, in the words of its version."""

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"input_ids": IDS[:4], "labels": LABELS},
        "Expected input batch_size (32) to match target batch_size (64)",
    ),
    "dtype": ({"input_ids": IDS, "labels": LABELS.int()}, IN_EAGER),
    "empty": ({"input_ids": IDS[:0], "labels": LABELS[:0]}, "input kwargs.input_ids is int64[0, 8], an empty batch"),
    "no tensor": ({"input_ids": IDS, "labels": 3}, "argument 'input' (position 1) must be Tensor, not int"),
    "no input": ({"input_ids": IDS, "labels": object()}, "input kwargs.labels is a object: inputs are tensors and"),
    "device": ({"input_ids": IDS, "labels": LABELS.to("meta")}, "kwargs.labels"),
}
"""What no model could be called with; the dtype is seen where a kernel refuses it, as in eager PyTorch."""


OF_EAGER: dict[str, type[Exception]] = {"dtype": RuntimeError, "no tensor": TypeError}
"""What eager raises of these."""


def calls() -> dict[str, str]:
    """What this rank is told at each of the calls of one module, and at one with other data on each rank."""
    made = case("gpt2")
    module = autopar.parallelize(made.model, axes(), kwargs=made.kwargs, solver="ddp")
    given = {name: kwargs for name, (kwargs, _) in CALLS.items()}
    given["data"] = models.tokens(torch.distributed.get_rank())[1]
    return {name: refused(module, kind=OF_EAGER.get(name, ValueError), **kwargs) for name, kwargs in given.items()}


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run(RANKS, calls)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_with_other_inputs(told: list[dict[str, str]], call: str) -> None:
    (message,) = {on_rank[call] for on_rank in told}
    assert CALLS[call][1] in message


def test_ranks_with_different_batches(told: list[dict[str, str]]) -> None:
    (message,) = {on_rank["data"] for on_rank in told}
    assert "differs between ranks" in message and "DTensor" in message


def meta_and_called() -> None:
    with torch.device("meta"):
        model = models.mlp()
    module = autopar.parallelize(model, axes(), (torch.ones(8, 16),), loss_fn=models.mean_square, solver="ddp")
    module(torch.ones(8, 16))


def test_a_call_before_materialize() -> None:
    assert "call materialize(" in everywhere(meta_and_called)


def larger_mesh_than_the_world() -> None:
    try:
        mesh = axes((4,))
    except RuntimeError as error:  # torch's own check, where it makes one
        raise ValueError(f"torch: {error}") from error
    parallelized(mesh=mesh)


def test_a_mesh_that_does_not_match_the_world() -> None:
    assert "world" in everywhere(larger_mesh_than_the_world).lower()
