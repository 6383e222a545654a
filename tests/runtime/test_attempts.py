"""Attempts of torchrun, which share one store: each has a part of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes

import autopar


def attempt(number: int, port: int) -> float:
    """As torchrun starts a rank; the first attempt ends without a word."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    autopar.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    if number == 0 and rank:
        os._exit(3)
    return float(x)


def test_an_attempt_after_one_that_failed() -> None:
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert any(outcome.error for outcome in outcomes(2, attempt, 0, agent.port))
    assert [outcome.value for outcome in outcomes(2, attempt, 1, agent.port, timeout_seconds=30.0)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "the environment lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"), ({"rank": 1}, "rank cannot be given")],
)
def test_what_torchrun_has_not_started(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autopar.init_process_group("gloo", **options)
