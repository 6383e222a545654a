"""Micro-batches whose gradients are added up on each rank and reduced once: the gradients of one process, and the bytes
of one reduction."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import dropout
import models
import pytest
import torch
import torch.distributed as dist
from micro_batches import COUNT, Net, counted, ids, parallel, trained
from models import assert_close, simulated, whole
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.program import Program
from autopar.passes.lower.accumulate import accumulation
from autopar.planning.planner import Planner
from autopar.runtime.module import ParallelModule
from autopar.runtime.simulate import assemble, given_to_ranks, run_ranks

CASES: dict[str, Callable[[], models.Case]] = {
    **{name: functools.partial(models.case, name) for name in ("gpt2 untied", "llama tied", "mlp with outputs")},
    **{f"{name} with dropout": functools.partial(dropout.case, name) for name in ("gpt2", "bert", "mlp")},
}


def case(name: str) -> models.Case:
    pytest.importorskip("transformers")
    return CASES[name]()


planner = models.planners(case)


def program_of(name: str, mesh: dict[str, int], solver: str) -> tuple[Planner, Program]:
    made = planner(name, mesh)
    return made, made.program(made.plan(solver=solver, cost="serial"))


@functools.cache
def on_one_process(name: str) -> dict[str, torch.Tensor]:
    """The sum of the gradients of all micro-batches."""
    made, program = program_of(name, {"a": 1}, "dp")
    total: dict[str, torch.Tensor] = {}
    for step in range(COUNT):
        found = simulated(program, made.captured, case(name), step=step, seed=step)
        for target, gradient in found.gradients.items():
            total[target] = total.get(target, 0) + gradient
    return total


MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
SOLVERS = ("dp", "ddp", "fsdp", "megatron_sp")


@pytest.mark.parametrize(
    ("name", "mesh", "solver"),
    pairwise(tuple(CASES), MESHES, SOLVERS),
    ids=lambda value: dropout.mesh_id(value) if isinstance(value, dict) else value,
)
def test_micro_batches_that_are_reduced_once_give_the_gradients_of_one_process(
    name: str, mesh: dict[str, int], solver: str
) -> None:
    made, program = program_of(name, mesh, solver)
    parts = accumulation(program)
    reduced_later = Counter(parts.rest.collectives())
    assert Counter(parts.micro.collectives()) + reduced_later == Counter(program.collectives())
    assert parts.last.collectives() == program.collectives()  # the same buckets, in the same order

    made_case = case(name)
    held = {
        **dict(made_case.model.named_parameters()),
        **dict(made_case.model.named_buffers()),
        **made.captured.constants,
    }

    def inputs(step: int) -> dict[Any, Any]:
        args, kwargs = made_case.batch(step)
        given = {
            i.target: models.tangents(torch.empty(i.meta.shape, dtype=i.meta.dtype))
            for i in program.inputs
            if i.role == "tangent" and i.meta.shape
        }
        return given_to_ranks(program, held, made.captured.bind(args, kwargs), given, step)

    sums: dict[Any, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for step in range(COUNT - 1):
            for coordinate, values in run_ranks(parts.micro, inputs(step)).items():
                mine = sums.setdefault(coordinate, {})
                for entering, pending in zip(parts.names, parts.pending, strict=True):
                    mine[pending] = mine.get(pending, 0) + values[entering]
        last = {coordinate: {**given, **sums[coordinate]} for coordinate, given in inputs(COUNT - 1).items()}
        found = gradients(parts.last, run_ranks(parts.last, last))
        without = gradients(program, run_ranks(program, inputs(COUNT - 1)))
        rest = gradients(parts.rest, run_ranks(parts.rest, sums))
    expected = on_one_process(name)
    assert found.keys() == expected.keys() == rest.keys()
    largest = max(value.abs().max().item() for value in expected.values())
    for target, value in expected.items():
        for ours in (found[target], without[target] + rest[target]):
            assert models.difference(ours, value, target, models.NEGLIGIBLE * largest) < 2e-5


def gradients(program: Program, ranks: Any) -> dict[str, torch.Tensor]:
    return {
        o.target: assemble(
            {c: values[o.name] for c, values in ranks.items()},
            o.meta.shape,
            o.layout,
            program.mesh,
            1e-5,
            o.target,
            1.0,
        )
        for o in program.outputs
        if o.role == "gradient" and o.name is not None and o.meta is not None
    }


@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
def test_a_micro_batch_reduces_nothing_but_the_loss(solver: str) -> None:
    _, program = program_of("gpt2 untied", {"a": 2, "b": 2}, solver)
    micro = accumulation(program).micro
    assert {kind for kind, _, size in micro.collectives() if size > 64} <= {"all_gather"}
    assert {kind for kind, _, size in program.collectives() if size > 64} > {"all_gather"}


# --- real ranks


def test_accumulation_on_ranks_is_that_of_one_process() -> None:
    run(2, against_one_process, "ddp")
    run(2, against_one_process, "fsdp")


def against_one_process(solver: str) -> None:
    module, reducing = parallel(solver), parallel(solver)
    for found, expected in zip(trained(module, module.no_sync), trained(reducing, nullcontext), strict=True):
        assert_close(found, expected, "a loss, a norm or a parameter, with dropout", 1e-4)
    made, beside = Net(), Net()
    for net in (made, beside):
        net.body[2].p = 0.0  # whose numbers are others without autopar
    parallel_ = autopar.parallelize(made, module.mesh, (ids(0),), solver=solver)
    for found, expected in zip(trained(parallel_, parallel_.no_sync), trained(beside, nullcontext), strict=True):
        assert_close(found, expected, "a loss, a norm or a parameter", 1e-4)
    with counted() as once:
        module(ids(0)).backward()
    module.zero_grad()
    with counted() as four:
        for micro in range(COUNT):
            with module.no_sync() if micro < COUNT - 1 else nullcontext():
                module(ids(micro)).backward()
    with counted() as gathers, torch.no_grad():
        module(ids(0))
    reductions = sum(once.values()) - sum(gathers.values())
    beyond = sum(four.values()) - COUNT * sum(gathers.values())
    # under fsdp backward gathers again, in every micro-batch
    assert beyond < 1.05 * reductions if solver == "ddp" else four["all_to_all_single"] == once["all_to_all_single"] > 0


def other_cases() -> None:
    module, beside = parallel("fsdp"), parallel("fsdp")
    assert not any(p.grad is not None for p in module.parameters())

    def compare(what: str) -> None:
        for name, parameter in beside.named_parameters():
            assert_close(whole(module.get_parameter(name).grad), whole(parameter.grad), f"{what}: {name}", 1e-4)
        module.zero_grad(), beside.zero_grad()

    # what waits is of the module, of whichever program: another mode's backward reduces it too
    for each in (module, beside):
        torch.manual_seed(1)
        with module.no_sync():
            each(ids(0)).backward()
            each.eval()
            each(ids(1)).backward()
        each.train()
        each(ids(2)).backward()
    compare("two programs")

    # dropped by zero_grad of the module
    with module.no_sync():
        module(ids(0)).backward()
    module.zero_grad()
    for each in (module, beside):
        torch.manual_seed(2)
        each(ids(1)).backward()
    compare("zero_grad")

    # a copy begins without gradients, as that of any model
    with module.no_sync():
        module(ids(0)).backward()
    assert all(parameter.grad is None for parameter in copy.deepcopy(module).parameters())
    module.zero_grad()

    # frozen parameters have no gradient, and inputs have theirs at once
    for each in (module, beside):
        each.norm.requires_grad_(False)
        torch.manual_seed(5)
        with module.no_sync():
            each(ids(0)).backward()
        each(ids(1)).backward()
    assert module.norm.weight.grad is None
    for name, parameter in beside.named_parameters():
        if parameter.requires_grad:
            assert_close(whole(module.get_parameter(name).grad), whole(parameter.grad), name, 1e-4)


def test_what_waits_is_reduced_by_whichever_backward_comes_and_by_no_other() -> None:
    run(2, other_cases)


def waiting(module: nn.Module, step: int) -> None:
    with module.no_sync() if isinstance(module, ParallelModule) else nullcontext():
        module(ids(step)).backward()


def dropped(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting(module, 0)
    optimizer.zero_grad()
    waiting(module, 1)
    module.body[0].weight.grad = None
    module.norm.zero_grad()
    waiting(module, 2)
    module.body[1:].zero_grad(set_to_none=False)
    module(ids(3)).backward()
    yield module.norm.weight.grad


def frozen(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting(module, 0)
    module.body.requires_grad_(False)
    waiting(module, 1)
    module(ids(2)).backward()
    module.body.requires_grad_(True)
    module(ids(3)).backward()
    yield module.body[0].weight.grad


def never_reduced(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting(module, 0)
    waiting(module, 1)
    optimizer.step()
    optimizer.zero_grad()
    module(ids(2)).backward()
    waiting(module, 3)
    optimizer.step()
    yield module.norm.weight


def read(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting(module, 0)
    kept = module.norm.weight.grad
    yield kept.clone()
    waiting(module, 1)
    kept.mul_(0.5)
    module.norm.bias.grad, moved = None, module.norm.bias.grad
    module(ids(2)).backward()
    yield kept
    yield moved


def hooked(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    factor, seen = [3.0], list[torch.Tensor]()
    waiting(module, 0)
    handles = [module.norm.weight.register_hook(lambda gradient: gradient * factor[0])]
    weight = module.body[0].weight
    handles += [weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))]
    waiting(module, 1)
    factor[0] = 5.0
    module(ids(2)).backward()
    for handle in handles:
        handle.remove()
    waiting(module, 3)
    yield from seen


def taken(module: Any, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    waiting(module, 0)
    with module.no_sync() if isinstance(module, ParallelModule) else nullcontext():
        yield from torch.autograd.grad(module(ids(1)), [*module.norm.parameters()])
        module(ids(2)).backward(inputs=[module.norm.weight])
        (module(ids(1)) + 2 * module(ids(2))).backward()
    yield from torch.autograd.grad(module(ids(1)), [*module.norm.parameters()])
    (module(ids(1)) + 2 * module(ids(2))).backward()


def as_in_eager(solver: str) -> None:
    for sequence in (dropped, frozen, never_reduced, read, hooked, taken):
        beside, made = Net(), Net()
        made.body[2].p = beside.body[2].p = 0.0
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        module = autopar.parallelize(made, mesh, (ids(0),), solver=solver)
        found = [
            [whole(x.detach()) for x in sequence(each, torch.optim.SGD(each.parameters(), lr=0.1))]
            for each in (module, beside)
        ]
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs, f"what {sequence.__name__} saw", 1e-4)
        for (name, parameter), ours in zip(beside.named_parameters(), module.parameters(), strict=True):
            assert (parameter.grad is None) == (ours.grad is None)
            if parameter.grad is not None:
                assert type(ours.grad.detach()) is DTensor
                assert_close(whole(ours.grad), parameter.grad, f"{sequence.__name__}: gradient of {name}", 1e-4)
            assert_close(whole(ours.detach()), parameter.detach(), f"{sequence.__name__}: {name}", 1e-4)


@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
def test_gradients_that_wait_are_those_of_eager_to_whoever_reads_drops_or_hooks_them(solver: str) -> None:
    run(2, as_in_eager, solver)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def inputs_and_checks() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    model = Scaled()
    x = torch.randn(4, 8)
    module = autopar.parallelize(model, mesh, (x.clone().requires_grad_(),), solver="ddp", verify=2)
    given = [x.clone().requires_grad_() for _ in range(2 * COUNT)]
    for micro, (ours, theirs) in enumerate(zip(given[:COUNT], given[COUNT:], strict=True)):
        with module.no_sync() if micro < COUNT - 1 else nullcontext():
            module(ours).backward()  # the first two are compared with one device, and reduce
        model(theirs).backward()
        assert_close(whole(ours.grad), theirs.grad, "gradient of an input", 1e-5)
    for name, parameter in model.named_parameters():
        gradient = module.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        assert_close(gradient.full_tensor(), parameter.grad, name, 1e-5)


def test_gradients_of_inputs_come_at_once_and_checked_steps_reduce() -> None:
    run(2, inputs_and_checks)


class Two(nn.Module):
    """A trunk and two heads, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x).tanh()
        return self.one(h).square().mean(), self.other(h).square().mean()


ASKED = ([(0,)], [(1,)], [(0, 1)], [(0,), (1,)], [(1,), (1,)], [(0,), (0,), (1,)])
"""For each step which of the two losses each of its micro-batches trains."""


def losses_by_turns(solver: str, verify: int) -> list[str]:
    """Gradients that are another, or None where eager's are not, or the reverse."""
    torch.manual_seed(0)
    eager = Two().double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    x = torch.randn(4, 6, dtype=torch.float64)
    ours = autopar.parallelize(copy.deepcopy(eager), mesh, (x,), solver=solver, verify=verify)
    found: list[str] = []
    for asked in ASKED:
        for model in (eager, ours):
            model.zero_grad()
            for number, losses in enumerate(asked):
                waits = model is ours and number < len(asked) - 1
                with ours.no_sync() if waits else nullcontext():
                    sum(model(x + number)[k] for k in losses).backward()
        for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
            gradient = None if q.grad is None else q.grad.full_tensor()
            if (gradient is None) != (p.grad is None):
                found.append(f"{asked}: {name} is {gradient}, and {p.grad} in eager")
            elif p.grad is not None and gradient is not None and not torch.allclose(gradient, p.grad, 1e-9, 1e-9):
                found.append(f"{asked}: {name}")
    return found


@pytest.mark.parametrize(("solver", "verify"), [("ddp", 0), ("fsdp", 9)])
def test_what_no_loss_asks_for_has_no_gradient(solver: str, verify: int) -> None:
    """An optimizer leaves a head alone that the step does not train; zeros would decay it."""
    assert run(2, losses_by_turns, solver, verify) == [[], []]
