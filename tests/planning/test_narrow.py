"""Narrow travel: parameters that are gathered in a narrower dtype arrive within what that dtype says, forward and
backward use what arrived, and plans count, price and say it."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import plans
import pytest
import torch
import torch.distributed as dist
from micro_batches import assert_promised
from models import Step, assert_close, assert_same, eager, simulated, whole
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Precision
from autopar.cluster.library import named_cluster
from autopar.ir.graph import CAST, Node, Ref, TensorMeta
from autopar.ir.layout import Replicate, Split
from autopar.ir.precision import NARROW
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.text import parsed_program, text_of
from autopar.ops.float8 import BLOCK, FROM, TO, from_float8, packed_bytes, to_float8
from autopar.passes.codegen.narrow import narrowed, narrowed_parameters, rounded
from autopar.passes.codegen.precision import written
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import Gathers, Request
from autopar.runtime.pipeline import simulate_pipeline
from autopar.runtime.simulate import simulate_step

GRID = {"dp": 2, "tp": 2}
NAMES = ("gpt2", "llama of 4 layers", "mlp with loss_fn", "llama tied")
FLOAT8 = "float8_e4m3fn"
HALF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, FLOAT8: 2.0**-4}
"""The part of itself by which a number is off at most; in float8, where it is no smaller than `SMALL`."""

SMALL, LEAST = 2.0**-13, 2.0**-17
"""The part of a block's largest number below which numbers are off by `LEAST` of that largest one."""


LOCAL = named_cluster("local")
SLOW = replace(
    LOCAL, levels=tuple(replace(each, bytes_per_second=1e6, group_bytes_per_second=1e6) for each in LOCAL.levels)
)
"""Where whatever travels narrower is there sooner."""

TOLERANCES = {FLOAT8: 1e-4}
"""Of a step whose weights are rounded as a whole: what is small in a block depends on who else is in it."""


@functools.cache
def planner(
    name: str, gather_dtype: str | None, dtype: torch.dtype = torch.float32, micro_batches: int = 1, **more: Any
) -> Planner:
    made = models.in_dtype(models.case(name), dtype)
    precision = Precision(gather_dtype=gather_dtype, **more)  # type: ignore[arg-type]
    asked = Request(precision=precision, micro_batches=micro_batches, cluster=SLOW)
    return Planner(made.model, GRID, made.args, made.kwargs, loss_fn=made.loss_fn, request=asked)


# --- float8


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "parts"), [((4, 64), 1), ((6, 50), 2), ((1,), 1), ((3, 129), 3), ((0, 4), 1)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_float8_is_within_its_bounds(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], parts: int, scale: float
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(scale).to(device, dtype)
    packed = to_float8(x, parts)
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(x.numel(), parts),)
    arrived = from_float8(packed, shape, dtype, parts)
    assert arrived.dtype == dtype and arrived.shape == shape
    if x.numel():
        error, size = (arrived.double() - x.double()).abs(), x.double().abs()
        assert (error <= torch.maximum(HALF[FLOAT8] * size, LEAST * size.max())).all()
        assert (error > HALF[FLOAT8] * size / 2).any() or x.numel() < 4  # it is rounded
    assert torch.equal(from_float8(to_float8(arrived, parts), shape, dtype, parts), arrived)


def test_blocks_have_scales_of_their_own_and_scales_round_nothing() -> None:
    x = torch.ones(3, BLOCK)
    x[0] *= 2.0**-100
    x[2] *= 2.0**100
    assert torch.equal(from_float8(to_float8(x, 1), x.shape, x.dtype, 1), x)
    x = torch.randn(4, 3 * BLOCK, generator=torch.Generator().manual_seed(2))
    other = from_float8(to_float8(x.t().contiguous(), 1), x.t().shape, x.dtype, 1).t()
    apart = (rounded(x, torch.float8_e4m3fn) - other).abs()
    assert apart.max() <= LEAST * 2 * x.abs().max()  # whatever shares a block


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    x = torch.ones(2, BLOCK)
    x[0, 3] = wrong
    arrived = from_float8(to_float8(x, 1), x.shape, x.dtype, 1)
    assert not arrived[0, 3].isfinite() and torch.equal(arrived[1], x[1])


# --- the numbers of a step


def arrived(name: str, program: Program, dtype: torch.dtype, gather_dtype: str) -> Step:
    """A step of one process whose parameters are what arrives where they travel."""
    case = models.in_dtype(models.case(name), dtype)
    model, narrow = copy.deepcopy(case.model), getattr(torch, gather_dtype)
    names = narrowed_parameters(program, narrow)
    assert names
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            parameter.copy_(rounded(parameter, narrow))
    return replace(eager(models.Case(model=model, batch=case.batch, loss_fn=case.loss_fn)), parameters=None)


@pytest.mark.parametrize(("name", "narrow", "seed"), pairwise(NAMES, NARROW, tuple(range(6))))
def test_forward_and_backward_use_what_arrived(name: str, narrow: str, seed: int) -> None:
    made = planner(name, narrow, torch.float64)
    program = written(made.space, plans.random_assignment(made.space, seed))
    assert parsed_program(text_of(program)) == program
    found = simulated(program, made.captured, models.in_dtype(models.case(name), torch.float64))
    assert_same(found, arrived(name, program, torch.float64, narrow), TOLERANCES.get(narrow, 1e-6))


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("solver", ["fsdp", "meshslice"])
def test_lowered_programs_do_too(solver: str, narrow: str) -> None:
    name = "llama of 4 layers"
    made = planner(name, narrow, torch.float64)
    program = made.program(made.plan(solver=solver, cost="serial"))
    found = simulated(program, made.captured, models.in_dtype(models.case(name), torch.float64))
    assert_same(found, arrived(name, program, torch.float64, narrow), TOLERANCES.get(narrow, 1e-6))


@pytest.mark.parametrize("narrow", ["bfloat16", FLOAT8])
def test_stages_do_too(narrow: str) -> None:
    case = models.in_dtype(models.case("llama of 4 layers"), torch.float64)
    precision = Precision(gather_dtype=narrow)  # type: ignore[arg-type]
    asked = Request(cluster="dgx-h100", micro_batches=2, solver="fsdp", precision=precision)
    made = Planner(case.model, {"pp": 2, "dp": 2}, case.args, case.kwargs, request=asked)
    plan = made.plan()
    whole = made.program(plan)
    assert narrowed_parameters(whole, getattr(torch, narrow))
    values = dict([*case.model.named_parameters(remove_duplicate=False), *case.model.named_buffers()])
    values |= made.captured.constants
    given = {k: v for k, v in made.captured.bind(case.args, case.kwargs).items() if isinstance(v, torch.Tensor)}
    expected = simulate_step(whole, values, given, None, seed=3)
    found = simulate_pipeline(*made.pipelined(plan), values, given, None, seed=3)
    for ours, theirs in ((found.gradients, expected.gradients), (found.outputs, expected.outputs)):
        for key, value in theirs.items():
            assert_close(ours[key], value, key)


ERRORS = {"bfloat16": 2.0**-6, FLOAT8: 2.0**-2, "reduce bfloat16": 2.0**-7}
"""The norm of what is off in a gradient, relative to the gradient of float32."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("narrow", ERRORS)
def test_gradients_are_this_far_from_float32(name: str, narrow: str) -> None:
    made = planner(name, None, reduce_dtype="bfloat16") if narrow.startswith("reduce") else planner(name, narrow)
    case = models.case(name)
    program = made.program(made.plan(solver="fsdp"))
    found, expected = simulated(program, made.captured, case), eager(case)
    for key, gradient in expected.gradients.items():
        error = (found.gradients[key] - gradient).norm() / gradient.norm()
        assert 0 < error < ERRORS[narrow], (key, error)
    losses = [(found.outputs[path], value) for path, value in expected.outputs.items() if value.dim() == 0]
    assert all((ours - theirs).abs() <= ERRORS[narrow] ** 2 * theirs.abs() for ours, theirs in losses)


# --- what is issued, and priced

WAYS: tuple[tuple[int, Gathers], ...] = ((1, "each"), (4, "each"), (4, "once"))


@pytest.mark.parametrize(("name", "narrow", "way", "seed"), pairwise(NAMES, NARROW, WAYS, tuple(range(5))))
def test_the_objective_counts_the_collectives_that_are_issued(
    name: str, narrow: str, way: tuple[int, Gathers], seed: int
) -> None:
    micro_batches, gathers = way
    made = planner(name, narrow, micro_batches=micro_batches).gathering(gathers)
    assignment = plans.random_assignment(made.space, seed)
    assert_promised(made.space, assignment, written(made.space, assignment), micro_batches, gathers)


def test_gathers_carry_fewer_bytes_and_reductions_as_many() -> None:
    def sent(narrow: str | None, **more: Any) -> dict[tuple[str, str], int]:
        plan = planner("llama of 4 layers", narrow, **more).plan(solver="fsdp", cost="serial")
        assert plan.objective_seconds == pytest.approx(plan.account.seconds)
        return {(c.kind, c.axis): c.bytes for c in plan.account.collectives if c.bytes > 1000}

    wide = sent(None)
    for (kind, axis), size in wide.items():
        is_gather = kind == "all_gather"
        assert sent("bfloat16")[kind, axis] == (size / 2 if is_gather else size)
        part = sent(FLOAT8)[kind, axis] / size
        assert 0.25 < part < 0.3 if is_gather else part == 1  # the weights of norms stay wide
    mixed = sent(FLOAT8, param_dtype="bfloat16")
    assert mixed["all_gather", "dp"] / wide["all_gather", "dp"] < 0.3


@pytest.mark.parametrize(("narrow", "ops"), [("bfloat16", {CAST}), (FLOAT8, {TO, FROM})])
def test_gathers_still_start_early_and_in_buckets(narrow: str, ops: set[str]) -> None:
    made = planner("llama of 4 layers", narrow)
    program, wide = (
        on.program(on.plan(solver="fsdp", cost="serial")) for on in (made, planner("llama of 4 layers", None))
    )
    assert ops <= {node.op for node in program.nodes}

    def gathers(program: Program) -> list[int]:
        return [k for k, node in enumerate(program.forward) if node.collective == "all_gather"]

    assert len(gathers(program)) <= len(gathers(wide)) + 2  # norms' of float8 are in buckets of their own dtype
    first = next(k for k, node in enumerate(program.forward) if "mm" in node.op)
    assert sum(k < first for k in gathers(program)) >= 2


# --- a program


META, PART = TensorMeta((4, 64), torch.float32), TensorMeta((2, 64), torch.float32)


def program(forward: tuple[Node, ...], backward: tuple[Node, ...], *wide: str) -> Program:
    names = {name for node in (*forward, *backward) for name in node.outputs}
    layout = (Split(0, 4),)
    return Program(
        axes=("a",),
        mesh=(2,),
        inputs=(
            ProgramInput(name="w", role="parameter", target="w", meta=META, layout=layout),
            ProgramInput(name="t", role="tangent", target="output", meta=META, layout=(Replicate(),)),
        ),
        forward=forward,
        backward=backward,
        saved=("w",),
        outputs=(
            ProgramOutput(name="y", role="output", target="output", meta=META, layout=(Replicate(),)),
            ProgramOutput(name="g", role="gradient", target="w", meta=META, layout=layout),
        ),
        metas={"w": PART, "t": META, **{name: META if name in ("w_all", "w_there", "y") else PART for name in names}},
    )


GATHER = Node(op="collective.all_gather", args=(Ref("w"), 0), outputs=("w_all",))
WAIT = Node(op="collective.wait", args=(Ref("w_all"),), outputs=("w_there",))
USE = Node(op="aten.neg.default", args=(Ref("w_there"),), outputs=("y",))
LOCAL = Node(op="aten.neg.default", args=(Ref("w"),), outputs=("g",))


def test_narrow_stands_around_a_collective_and_what_is_read_without_one_is_rounded() -> None:
    made = narrowed(program((GATHER, WAIT, USE), (LOCAL,)), {"w": torch.bfloat16})
    assert [(n.op.split(".")[1], n.outputs[0]) for n in made.forward] == [
        ("_to_copy", "w_to_send"), ("all_gather", "w_all"), ("wait", "w_there_narrow"), ("_to_copy", "w_there"),
        ("neg", "y"),
    ]  # fmt: skip
    assert [n.outputs[0] for n in made.backward] == ["w_to_send_1", "w_rounded", "g"]
    assert made.metas["w_all"].dtype == torch.bfloat16 and made.metas["w_there"] == META
    packed = narrowed(program((GATHER, WAIT, USE), (LOCAL,)), {"w": torch.float8_e4m3fn})
    assert packed.metas["w_all"] == TensorMeta((2 * packed_bytes(2 * 64),), torch.uint8)


def test_what_nobody_gathers_stays_as_it_is() -> None:
    local = replace(USE, args=(Ref("w"),))
    plain = program((local,), (LOCAL,))
    assert narrowed(plain, {"w": torch.bfloat16}) is plain


# --- what is asked for, and said


def test_a_plan_says_what_travels_and_reads_back(tmp_path: Path) -> None:
    made, case = planner("mlp with loss_fn", FLOAT8), models.case("mlp with loss_fn")
    plan = made.plan(solver="fsdp")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.training.precision == Precision(gather_dtype=torch.float8_e4m3fn)
    said = "parameters of two dims or more travel in float8_e4m3fn, 25% of the bytes of float32, and arrive within 2^-4"
    for text in (plan.text(width=1000), plan.text(width=1000, full=True)):
        assert said in text
    assert "parameters travel in bfloat16, 50% of" in planner("mlp with loss_fn", "bfloat16").plan(solver="fsdp").text(
        width=1000
    )
    again = autopar.read_plan(loaded, case.model, case.args, loss_fn=case.loss_fn, cluster=SLOW)
    assert (again.seconds, again.bytes) == (pytest.approx(plan.seconds), plan.bytes)
    assert plan.digest != planner("mlp with loss_fn", None).plan(solver="fsdp").digest


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_no_sooner_there_travels_as_it_is_used(micro_batches: int) -> None:
    case, leave = models.case("llama of 4 layers"), Precision(gather_dtype=FLOAT8)
    asked = Request(precision=leave, micro_batches=micro_batches, solver="fsdp")

    def planned(cluster: Any, precision: Precision) -> tuple[Plan, bool]:
        request = replace(asked, precision=precision, cluster=cluster)
        made = Planner(case.model, GRID, case.args, case.kwargs, loss_fn=case.loss_fn, request=request)
        plan = made.plan()
        return plan, TO in {node.op for node in made.program(plan).nodes}

    plan, is_narrow = planned(None, leave)
    assert not is_narrow and plan.training.precision == Precision()
    assert plan.seconds == planned(None, Precision())[0].seconds and "float8" not in plan.text(width=1000)
    plan.training.check_asked(asked)  # the leave may be given with it
    slow, is_narrow = planned(SLOW, leave)
    assert is_narrow and slow.training.precision == leave and slow.seconds < planned(SLOW, Precision())[0].seconds
    with pytest.raises(ValueError, match="precision is"):
        slow.training.check_asked(replace(asked, precision=Precision(gather_dtype="bfloat16")))


@pytest.mark.parametrize("wrong", ["fp8", torch.float32, torch.int8, torch.float8_e5m2, 8, True])
def test_what_is_no_narrow_dtype_is_one_clear_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"gather_dtype is .*: give a floating dtype \(bfloat16, float16, float8_e4"):
        Precision(gather_dtype=wrong)


def test_what_is_not_narrower_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match="gather_dtype is bfloat16, and parameters are used in bfloat16, which is no"):
        Precision(param_dtype=torch.bfloat16, gather_dtype=torch.bfloat16)
    case = models.in_dtype(models.case("mlp with loss_fn"), torch.bfloat16)
    with pytest.raises(ValueError, match="gather_dtype is float16, and parameters are used in bfloat16, which is no"):
        autopar.plan(case.model, GRID, case.args, loss_fn=case.loss_fn, precision=Precision(gather_dtype=torch.float16))


# --- real ranks

STEPS = 40


def curve(module: nn.Module, optimizer: torch.optim.Optimizer, case: models.Case) -> list[float]:
    losses = []
    for step in range(STEPS):
        args, kwargs = case.batch(step % 4)
        loss = module(*args, **kwargs).loss
        loss.backward()
        losses.append(float(whole(loss).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_ranks() -> None:
    """Masters stay exact and training goes the way of float32; `verify` knows what travels."""
    case = models.case("llama of 4 layers")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    alone = copy.deepcopy(case.model)
    wide = curve(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), case)
    for narrow, apart in (("bfloat16", 0.02), (FLOAT8, 0.1)):
        precision = Precision(gather_dtype=narrow)  # type: ignore[arg-type]
        module = autopar.parallelize(
            copy.deepcopy(case.model), mesh, case.args, case.kwargs, precision=precision, solver="fsdp", verify=2
        )
        for name, parameter in module.named_parameters():
            assert torch.equal(whole(parameter), case.model.get_parameter(name)), name
        ours = curve(module, module.optimizer(torch.optim.AdamW, lr=1e-2), case)
        assert abs(ours[0] - wide[0]) < 0.01 * wide[0] and ours != wide
        assert wide[-1] < 0.7 * wide[0] and abs(ours[-1] - wide[-1]) < apart * wide[0], (narrow, ours[-1], wide[-1])
        # a step that what travels would round away is kept
        weight = module.get_parameter("lm_head.weight")
        before = whole(weight).clone()
        with torch.no_grad():
            weight.mul_(1 + 2**-12)
        assert_close(whole(weight), before * (1 + 2**-12), "master", 1e-6)


def test_ranks_train_exact_masters() -> None:
    run(2, on_ranks)
