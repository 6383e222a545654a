"""Plans for steps of several micro-batches: the objective counts what is issued, the step and the peak are those of the
whole step, and what is held from one micro-batch to the next is gathered once and right."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import micro_batches
import models
import plans
import pytest
import torch
import torch.distributed as dist
from micro_batches import COUNT, Net, assert_promised, counted, ids, issued_by
from models import assert_close, whole
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cluster.library import named_cluster
from autopar.compat.patching import patched
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.hold import held
from autopar.planning.advice import LEAST_SPEEDUP
from autopar.planning.micro import parts_of
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import Gathers, Request
from autopar.planning.training import Training
from autopar.runtime.module import ParallelModule

GRID = {"dp": 2, "tp": 2}
NAMES = ("gpt2", "llama of 4 layers", "mlp with loss_fn")
WAYS: tuple[Gathers, ...] = ("each", "once")


@functools.cache
def planner(name: str, count: int = COUNT) -> Planner:
    made = models.case(name)
    return Planner(made.model, GRID, made.args, made.kwargs, loss_fn=made.loss_fn, micro_batches=count)


@pytest.mark.parametrize(("name", "gathers", "seed"), pairwise(NAMES, WAYS, tuple(range(6))))
def test_the_objective_counts_the_collectives_that_a_step_issues(name: str, gathers: Gathers, seed: int) -> None:
    """Of random assignments, tied weights among them: kinds, axes, counts and bytes."""
    made = planner(name).gathering(gathers)
    assignment = plans.random_assignment(made.space, seed)
    assert_promised(made.space, assignment, codegen(made.space, assignment), COUNT, gathers)


def test_one_reduction_is_a_quarter_of_four() -> None:
    """Gradients of ddp: a step of four micro-batches reduces as many bytes as a step of one."""
    reduced = {}
    for count in (1, COUNT):
        plan = planner("llama of 4 layers", count).plan(solver="ddp")
        reduced[count] = sum(c.bytes for c in plan.account.collectives if c.bytes > 1000)
        assert plan.training.micro_batches == count
    assert reduced[COUNT] == pytest.approx(reduced[1], rel=0.05)


def test_a_step_is_its_micro_batches_and_one_update() -> None:
    made, one = planner("llama of 4 layers"), planner("llama of 4 layers", 1)
    for solver in ("ddp", "fsdp", "dp"):
        plan, single = (each.plan(solver=solver, cost="serial") for each in (made, one))
        assert 1.5 * single.seconds < plan.seconds < COUNT * single.seconds
        assert plan.objective_seconds == pytest.approx(plan.account.seconds) and plan.timing is not None
        assert plan.account.optimizer_seconds <= single.account.optimizer_seconds * 1.01
        assert 0 < plan.lower_bound_seconds <= plan.seconds


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_counts_what_waits_and_what_is_held(name: str) -> None:
    made = planner(name)
    each, once = (made.gathering(way) for way in WAYS)
    assignment = each.assignment(made.plan(solver="fsdp"))
    single, apart, kept = (way.evaluate(assignment) for way in (planner(name, 1), each, once))
    *_, last = parts_of(made.writer.written(assignment), COUNT, holds=False)
    pending = last.waiting["forward"]
    assert single.bytes < apart.bytes <= single.bytes + 2 * pending and apart.bytes <= kept.bytes


def test_the_planner_holds_where_that_is_faster_and_fits() -> None:
    """Under fsdp, all parameters are gathered in forward; held, they need memory."""
    made = planner("llama of 4 layers")
    free = made.plan(solver="fsdp")
    assert free.training.gathers == "once"
    each = made.gathering("each")._planned(Request(solver="fsdp"), "fsdp")
    assert each.seconds > free.seconds and each.bytes < free.bytes
    tight = made.plan(solver="fsdp", memory_limit_bytes=(each.bytes + free.bytes) / 2)
    assert tight.bytes < free.bytes and tight.seconds >= free.seconds


def test_a_plan_says_so_and_reads_back(tmp_path: Path) -> None:
    made, case = planner("llama of 4 layers"), models.case("llama of 4 layers")
    plan = made.plan(solver="fsdp")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.training == Training(micro_batches=COUNT, gathers="once")
    assert "4 a step, whose gradients are reduced once" in plan.text(width=1000)
    again = autopar.read_plan(loaded, case.model, (), case.kwargs)
    assert (again.seconds, again.bytes) == (pytest.approx(plan.seconds), plan.bytes)
    assert plan.digest != planner("llama of 4 layers", 1).plan(solver="fsdp").digest
    with pytest.raises(ValueError, match=r"training with .*micro_batches.*and this is the default"):
        planner("llama of 4 layers", 1).check(loaded)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4", None, 10**9])
def test_a_wrong_number_is_one_clear_error(wrong: Any) -> None:
    made = models.case("mlp with loss_fn")
    with pytest.raises(ValueError, match=r"micro_batches is .*: give how many calls"):
        autopar.plan(made.model, GRID, made.args, loss_fn=made.loss_fn, micro_batches=wrong)


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "dp"])
def test_a_warm_program_gathers_nothing_in_forward_that_parameters_lead_to(solver: str) -> None:
    made = planner("llama of 4 layers", 1)
    program = bucket(codegen(made.space, made.assignment(made.plan(solver=solver, cost="serial"))))
    parts = held(program)
    assert parts.cold.forward == program.forward and parts.cold.saved == (*program.saved, *parts.names)
    known = {i.name for i in program.inputs if i.role == "parameter"}
    for node in parts.warm.forward:
        assert not (node.collective and known.issuperset(node.inputs))
        known.update(name for name in node.outputs if name and known.issuperset(node.inputs))
    if solver == "fsdp":
        assert parts.names and len(parts.warm.collectives()) < len(program.collectives())


# --- real ranks


def parallel(solver: str, **options: Any) -> ParallelModule:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    return autopar.parallelize(Net(), mesh, (ids(0),), solver=solver, micro_batches=COUNT, **options)


def held_on_ranks() -> None:
    """Losses, norms and parameters over two steps, and what is sent."""
    module, beside = parallel("fsdp"), micro_batches.parallel("fsdp")
    assert module.plan.training.gathers == "once"
    ours = micro_batches.trained(module, module.no_sync)
    theirs = micro_batches.trained(beside, beside.no_sync)
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, "a loss, a norm or a parameter", 1e-5)

    def step(each: ParallelModule) -> Callable[[], None]:
        def run() -> None:
            for micro in range(COUNT):
                with each.no_sync() if micro < COUNT - 1 else nullcontext():
                    each(ids(micro)).backward()

        return run

    sent = {}
    for name, each in (("held", module), ("each", beside)):
        with counted() as counts:
            step(each)()
        sent[name] = sum(counts.values())
        each.zero_grad()
    assert sent["held"] < sent["each"]
    # parameters that change within a step are gathered again
    for each in (module, beside):
        torch.manual_seed(1)
        with each.no_sync():
            each(ids(0)).backward()
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(0.5)
        each(ids(1)).backward()
    for name, parameter in beside.named_parameters():
        assert_close(whole(module.get_parameter(name).grad), whole(parameter.grad), name, 1e-4)
    # nothing is held after the reduction
    gathers = vars(module)["_state"].module.pending.gathers
    assert gathers and not any(each.values for each in gathers.values())
    module.eval()
    with torch.no_grad():
        assert_close(whole(module(ids(3))), whole(beside.eval()(ids(3))), "evaluation", 1e-5)


def test_what_is_held_gives_the_same_and_sends_less() -> None:
    run(2, held_on_ranks)


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """How often this rank begins a collective of a program, by name."""
    calls = Counter[str]()
    kinds = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
    kinds += tuple(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name))
    with ExitStack() as stack:
        for name in kinds:
            begin = getattr(dist, name)

            def counting(x: torch.Tensor, *args: Any, name: str = name, begin: Any = begin, **kwargs: Any) -> Any:
                calls[name] += x.is_floating_point()  # ranks tell each other whole numbers
                return begin(x, *args, **kwargs)

            stack.enter_context(patched(dist, **{name: counting}))
        yield calls


def issued_as_predicted() -> None:
    """As many collectives as the plan's programs hold, in a step of so many calls."""
    for solver in ("ddp", "fsdp"):
        module = parallel(solver)
        step = parts_of(module.program, COUNT, holds=module.plan.training.gathers == "once")
        module(ids(9)).backward()  # the first call agrees on more
        module.zero_grad()
        with calls_counted() as calls:
            for micro in range(COUNT):
                with module.no_sync() if micro < COUNT - 1 else nullcontext():
                    module(ids(micro)).backward()
        assert sum(calls.values()) == issued_by(step).total()


def test_ranks_issue_what_the_plan_counts() -> None:
    run(2, issued_as_predicted)


def test_accumulated_gradients_are_those_of_one_process() -> None:
    run(2, _against_one_process)


def _against_one_process() -> None:
    made, alone = Net(), Net()
    for net in (made, alone):
        net.body[2].p = 0.0
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(made, mesh, (ids(0),), solver="fsdp", micro_batches=COUNT)
    ours = micro_batches.trained(module, module.no_sync)
    theirs = micro_batches.trained(alone, nullcontext)
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, "a loss, a norm or a parameter", 1e-4)
    assert isinstance(module, nn.Module)


# --- advice

SLOW_RATE = 200e6


@functools.cache
def slow(name: str) -> Planner:
    """On links so slow that ranks wait."""
    made, known = models.case(name), named_cluster("a100-pcie")
    links = tuple(
        replace(level, bytes_per_second=SLOW_RATE, group_bytes_per_second=SLOW_RATE) for level in known.levels
    )
    return Planner(made.model, GRID, made.args, made.kwargs, loss_fn=made.loss_fn, cluster=replace(known, levels=links))


@pytest.mark.parametrize(
    ("name", "solver"), [("llama of 4 layers", "fsdp"), ("gpt2", "ddp"), ("mlp with loss_fn", "fsdp")]
)
def test_advice_is_what_more_micro_batches_take_and_a_plan_for_them_is_no_longer(name: str, solver: str) -> None:
    made = slow(name)
    plan = made.plan(solver=solver)
    assert plan.waits and plan.advice is not None
    count, speedup = plan.advice.micro_batches, plan.advice.speedup
    assert count == 4 and speedup >= LEAST_SPEEDUP
    exact = []
    for gathers in WAYS:
        on = made.trained(Training(micro_batches=count, gathers=gathers))
        exact.append(on.evaluate(made.assignment(plan), buckets=(plan.bucket_bytes,)).seconds)
    assert speedup == pytest.approx(count * plan.seconds / min(exact), rel=0.02)
    # searched for them, a plan is at least as quick
    searched = made.trained(Training(micro_batches=count)).plan(solver=solver)
    assert count * plan.seconds / searched.seconds >= speedup * 0.98
    assert f"try --micro-batches 4: {speedup:.2g}x the " in " ".join(str(plan).split())
    assert Plan.from_json(plan.to_json()).advice == plan.advice


def test_no_advice_where_nothing_waits_nothing_pays_or_nothing_fits() -> None:
    made = slow("gpt2")
    megatron = made.on({"tp": 4}, made.cluster).plan(solver="megatron")
    fast = planner("llama of 4 layers", 1).plan(solver="dp")
    assert megatron.waits and not fast.waits
    for plan in (megatron, fast):  # whose waits are in each micro-batch; who does not wait
        assert plan.advice is None and "try --micro" not in str(plan)
    free = made.plan(solver="ddp")
    limit = free.bytes + 1.0
    tight = made.plan(solver="ddp", memory_limit_bytes=limit)
    assert free.advice is not None and tight.waits and tight.advice is None
    # what was promised to fit does
    roomy = free.bytes * 3.0
    found = made.plan(solver="ddp", memory_limit_bytes=roomy)
    assert found.advice is not None
    again = made.trained(Training(micro_batches=found.advice.micro_batches))
    assert again.plan(solver="ddp", memory_limit_bytes=roomy).bytes <= roomy
