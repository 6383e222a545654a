"""Ranks that do not do the same: one error with the cause on every rank, within the timeout, and none hangs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import mean_square, mlp
from ranks import outcomes
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.failures import CollectiveError
from autopar.runtime.handshake import Handshake, Intent
from autopar.runtime.module import ParallelModule

TIMEOUT = timedelta(seconds=2)
BATCH = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
ODD = 1
"""The rank that does something else."""


def step(module: ParallelModule, batch: torch.Tensor = BATCH) -> None:
    module(batch).backward()


def evaluates_alone(module: ParallelModule) -> None:
    for training in (False, True):  # there are programs for both
        module.train(training)
        with torch.set_grad_enabled(training):
            module(BATCH)
    step(module)
    if dist.get_rank() == ODD:
        module.eval()
        with torch.no_grad():
            module(BATCH)
    step(module)


def freezes_alone(module: ParallelModule) -> None:
    step(module)
    if dist.get_rank() == ODD:
        module.get_parameter("0.weight").requires_grad_(False)
    step(module)


def swallows_an_error(module: ParallelModule) -> None:
    """Between forward and backward, of its third step."""
    for number in range(5):
        try:
            loss = module(BATCH)
            if number == 2 and dist.get_rank() == ODD:
                raise FileNotFoundError("metrics.json")
            loss.backward()
        except FileNotFoundError:
            continue


def skips_a_batch(module: ParallelModule) -> None:
    for number in range(5):
        if number == 2 and dist.get_rank() == ODD:
            continue  # its loader could not read it
        step(module, BATCH + number)


def does_not_synchronize(module: ParallelModule) -> None:
    step(module)
    if dist.get_rank() == ODD:
        with module.no_sync():
            step(module)
    else:
        step(module)
    step(module)


def does_not_synchronize_again(module: ParallelModule) -> None:
    with module.no_sync():
        step(module)
    does_not_synchronize(module)


def sets_an_attribute(module: ParallelModule) -> None:
    step(module)
    if dist.get_rank() == ODD:
        module.get_submodule("1").approximate = "tanh"
    step(module)


def has_a_bad_input(module: ParallelModule) -> None:
    for number in range(4):
        bad = number == 2 and dist.get_rank() == ODD
        step(module, BATCH.to("meta") if bad else BATCH)


def is_stopped(module: ParallelModule) -> None:
    if dist.get_rank() == ODD:
        pid = os.getpid()
        if os.fork() == 0:  # wakes it again, when the others have ended
            try:
                time.sleep(TIMEOUT.total_seconds() + 3)
                os.kill(pid, signal.SIGCONT)
            finally:
                os._exit(0)
        threading.Timer(0.5, lambda: os.kill(pid, signal.SIGSTOP)).start()
    for _ in range(100):
        step(module)
        time.sleep(0.02)


FAULTS: dict[str, tuple[Callable[[ParallelModule], None], str]] = {
    "evaluates alone": (
        evaluates_alone, r"different modes .* rank 0: training with gradients.*; rank 1: evaluation",
    ),
    "freezes a parameter alone": (
        freezes_alone, r"rank 0: training with gradients, of .*; rank 1: training with gradients, 0.weight frozen, of",
    ),
    "swallows an error": (
        swallows_an_error, r"What the ranks say: rank 0 waited for others in the backward pass of call 5; "
        r"rank 1 came to call 6 .* and waited for the others",
    ),
    "skips a batch": (
        skips_a_batch, r"input args.0 differs between ranks: .* Digests of call 5: rank 0: \w+; rank 1: \w+",
    ),
    "does not synchronize": (
        does_not_synchronize, r"some ranks called backward\(\) within no_sync\(\), and others outside: "
        r"rank 0: 1 outside; rank 1: 0 outside",
    ),
    "does not synchronize as before": (
        does_not_synchronize_again, r"rank 0 waited for others in the backward pass of call 5",
    ),
    "sets an attribute": (
        sets_an_attribute, "some ranks must capture the model again, .*: rank 0: no capture; rank 1: a capture",
    ),
    "has a bad input": (has_a_bad_input, r"args.0 is on meta and the mesh on cpu"),
    "is stopped": (is_stopped, r"did not end within the timeout|not all others did, within the timeout"),
}  # fmt: skip


def faulty(name: str) -> None:
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)  # as init_process_group(timeout=TIMEOUT) does
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(mlp(), mesh, (BATCH,), loss_fn=mean_square, solver="ddp")
    for _ in range(2):
        step(module)
    FAULTS[name][0](module)
    time.sleep(0.1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_does_something_else_ends_all(name: str) -> None:
    began = time.monotonic()
    found = outcomes(2, faulty, name, timeout_seconds=40.0)
    assert time.monotonic() - began < 25
    for rank, outcome in enumerate(found):
        assert outcome.error is not None, f"rank {rank} goes on"
        assert not isinstance(outcome.error, TimeoutError), f"rank {rank} hangs"
        if name != "is stopped" or rank != ODD:
            assert re.search(FAULTS[name][1], str(outcome.error)), outcome.traceback
            assert "died" not in str(outcome.error)
        if name == "is stopped" and rank != ODD:
            assert "rank 1 said nothing: stopped, ended, or busy elsewhere" in str(outcome.error)


def ends_between_calls() -> str:
    handshake = Handshake(init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), "0" * 15)
    for number in range(3):
        if number == 2 and dist.get_rank() == ODD:
            time.sleep(0.5)  # the other has heard of the calls before
            os._exit(1)
        handshake.begin(Intent(number=0, text="a call", tensors={}))
    with pytest.raises(CollectiveError) as error, handshake.running("backward pass"):
        handshake.settle()
    return str(error.value)


def test_what_the_ranks_say_stands_in_an_error_once() -> None:
    found, _ = outcomes(2, ends_between_calls, timeout_seconds=40.0)
    assert found.error is None, found.traceback
    assert re.fullmatch(
        r"rank 0 came to call 3 \(a call\) and lost the connection to another. What the ranks say: "
        r"rank 0 came to call 3 \(a call\) and waited for the others; rank 1 said nothing: stopped, ended, or busy "
        r"elsewhere",
        found.value,
    ), found
