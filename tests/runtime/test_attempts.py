"""Attempts of torchrun, which share one store: each has a part of its own."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mean_square
from ranks import outcomes, run
from torch import nn

import autopar


def attempt(number: int, port: int) -> float:
    """As torchrun starts a rank, whose agent counts starts for itself; the first attempt ends without a word."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(number * rank), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    autopar.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    if number == 0 and rank:
        os._exit(3)
    return float(x)


def test_attempts_after_one_that_failed() -> None:
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert any(outcome.error for outcome in outcomes(2, attempt, 0, agent.port))
    for number, ranks in enumerate((2, 3, 1, 2), 1):
        found = outcomes(ranks, attempt, number, agent.port, timeout_seconds=30.0)
        assert [outcome.value for outcome in found] == [float(ranks)] * ranks, found


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "the environment lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"), ({"rank": 1}, "rank cannot be given")],
)
def test_what_torchrun_has_not_started(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autopar.init_process_group("gloo", **options)


X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def chosen(options: dict[str, Any]) -> tuple[dict[str, int], float]:
    module = autopar.parallelize(mlp(), args=(X,), loss_fn=mean_square, **options)
    assert dict(zip(module.mesh.mesh_dim_names or (), module.mesh.shape, strict=True)) == module.plan.mesh
    return module.plan.mesh, module(X).item()


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_mesh_is_chosen_for_the_ranks_that_there_are(ranks: int) -> None:
    plan = autopar.plan(mlp(), ranks, (X,), loss_fn=mean_square)
    loss = mean_square(mlp()(X)).item()
    for options in ({}, {"plan": plan}, {"cost": "profiled"} if ranks == 3 else {"solver": "fsdp", "verify": 1}):
        assert run(ranks, chosen, options) == [(plan.mesh, pytest.approx(loss))] * ranks


def test_a_plan_for_other_ranks_is_one_error() -> None:
    plan = autopar.plan(mlp(), 4, (X,), loss_fn=mean_square)
    errors = [outcome.error for outcome in outcomes(3, chosen, {"plan": plan})]
    text = r"the plan is for 4 ranks \(.*\), and there are 3: leave plan out"
    assert all(isinstance(error, ValueError) and re.match(text, str(error)) for error in errors), errors
