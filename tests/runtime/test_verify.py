"""`parallelize(..., verify=n)`: the first steps also run in one process, and what differs is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.graph import Node
from autopar.runtime.compiled import compile
from autopar.runtime.failures import located
from autopar.runtime.module import ParallelModule

HIDDEN, BATCH = 8, 12


class Net(nn.Module):
    """A tied weight, buffers of two kinds, a plain number that forward reads, and, if asked for, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.norm, self.drop, self.scale = nn.BatchNorm1d(HIDDEN), nn.Dropout(dropout), 2.0
        self.last = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps = self.steps + 1
        x = x + self.drop(self.down(torch.relu(self.up(self.first(x)))))
        return {"y": self.last(self.norm(x)) * self.scale, "best": x.argmax(1)}


def loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output["y"], output["y"].detach().cos())


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=dtype)


def parallel(
    dropout: float, dtype: torch.dtype, solver: str, steps: int = 3, differentiated: bool = True
) -> ParallelModule:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("a",))
    loss_fn = loss_of if differentiated else None
    model = Net(dropout).to(dtype)
    return autopar.parallelize(model, mesh, (batch(0, dtype),), loss_fn=loss_fn, solver=solver, verify=steps)


def trained(dropout: float, dtype: torch.dtype, solver: str) -> int:
    module = parallel(dropout, dtype, solver)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        module(batch(step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        module(batch(7, dtype))
    done: int = vars(module)["_verifier"].done
    return done


@pytest.mark.parametrize(
    ("dropout", "dtype", "solver"),
    [(0.0, torch.float64, "fsdp"), (0.3, torch.float32, "megatron"), (0.0, torch.bfloat16, "ddp")],
    ids=str,
)
def test_steps_that_equal_one_process(dropout: float, dtype: torch.dtype, solver: str) -> None:
    assert run(2, trained, dropout, dtype, solver) == [3, 3]


def tampered(what: str) -> None:
    """A program with another operator in it, or a model that does what was not captured."""
    module = parallel(0.3 if what == "random" else 0.0, torch.float64, "ddp", differentiated=False)
    state = vars(module)["_state"]
    program = state.program

    def changed(instructions: tuple[Node, ...], op: str, other: str) -> tuple[Node, ...]:
        assert any(i.op == op for i in instructions)
        return tuple(replace(i, op=other) if i.op == op else i for i in instructions)

    if what in ("forward", "random"):
        program = replace(program, forward=changed(program.forward, "aten.relu.default", "aten.sin.default"))
    elif what == "backward":
        program = replace(program, backward=changed(program.backward, "aten.sum.dim_IntList", "aten.mean.dim"))
    else:
        model = vars(module)["_verifier"].model
        model.register_forward_hook(lambda module, args, out: {**out, "y": out["y"] * 3.0})
    state.executable = compile(program, state.groups, around=located)
    output = module(batch(0, torch.float64))
    output["y"].square().sum().backward()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("forward", "buffer norm.running_mean, which .*batch_norm.* of module 'norm'.* not compute the captured graph"),
        ("random", "buffer norm.running_mean, which .*batch_norm.* of module 'norm'.* not compute the captured graph"),
        ("backward", "the gradient of up.bias, which .* of module 'up'.* not compute the captured graph"),
        ("model", "output output.y, which `aten.mul.Tensor` of module ''.* that is not the model"),
    ],
)
def test_what_differs_is_named_on_every_rank(what: str, message: str) -> None:
    for outcome in outcomes(2, tampered, what):
        assert isinstance(outcome.error, ValueError), outcome.traceback
        assert re.search(f"in step 1, {message}", str(outcome.error)), str(outcome.error)


def test_a_number_of_steps_that_is_none() -> None:
    for outcome in outcomes(1, parallel, 0.0, torch.float32, "ddp", -1):
        assert "verify is -1: give the number of first steps" in str(outcome.error)


def accumulated() -> None:
    """Two forwards before two backwards, each checked with the values that it started from."""
    module = parallel(0.0, torch.float64, "fsdp", steps=2)
    losses = [module(batch(step, torch.float64)) for step in range(2)]
    for loss in losses:
        loss.backward()


def test_two_steps_at_once() -> None:
    run(2, accumulated)
