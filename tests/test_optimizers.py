"""Fused optimizers step on what each rank holds, and no step differs from the one on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, mean_square, whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import autopar

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.01, amsgrad=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=torch.tensor(0.01), weight_decay=0.1, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "sgd without momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
}
X = torch.arange(24.0).reshape(4, 6).cos()


def mlp() -> nn.Module:
    """Rows that two ranks hold unevenly, and a bias of which one of them holds nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def parallel(solver: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    return autopar.parallelize(mlp(), mesh, (X,), loss_fn=mean_square, solver=solver)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any], steps: int = 3) -> None:
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(module: nn.Module, beside: nn.Module, what: str) -> None:
    for (name, one), other in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert_close(whole(one.detach()), other.detach(), f"{what}: {name}", 1e-4)


def stepped(solver: str) -> None:
    for kind, make in FUSED.items():
        module, beside = parallel(solver), mlp()
        one, other = (make(m.parameters(), fused=True) for m in (module, beside))
        losses = (lambda m=module: m(X), lambda b=beside: mean_square(b(X)))
        train(module, one, losses[0]), train(beside, other, losses[1])
        same(module, beside, kind)
        for parameter, twin in zip(module.parameters(), beside.parameters(), strict=True):
            for key, value in other.state[twin].items():
                if value is not None:
                    assert_close(whole(one.state[parameter][key]), value, f"{kind}: {key}", 1e-4)
        # its state goes to an optimizer that is not fused, and comes back
        plain, again = make(module.parameters()), make(module.parameters(), fused=True)
        for taker, giver in ((plain, one), (again, plain)):
            state = copy.deepcopy(giver.state_dict())
            for group in state["param_groups"]:
                group["fused"] = taker is again
            taker.load_state_dict(state)
            train(module, taker, losses[0], 2), train(beside, other, losses[1], 2)
            same(module, beside, f"{kind} with the state of another")


@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
def test_fused_steps_are_those_of_one_device(solver: str) -> None:
    run(2, stepped, solver)


def scaled() -> None:
    """One step that overflows, which changes nothing, and one that does not."""
    module, beside = parallel("fsdp"), mlp()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (module, beside)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optimizers]
    for factor in (float("inf"), 1.0):
        losses = (module(X), mean_square(beside(X)))
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        same(module, beside, f"loss times {factor}")
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0


def test_a_fused_step_under_a_scaler() -> None:
    run(2, scaled)


def partial() -> None:
    parallel("ddp")  # of which the process has one
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optimizer.step()
    assert torch.equal(whole(parameter.detach()), torch.full((4,), -1.0))


def test_a_gradient_that_is_a_partial_sum_is_added_up() -> None:
    run(2, partial)
