"""What the remaining ranks say when one of them dies, and what any rank says of an error inside the program."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Case, mean_square, mlp
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.passes.codegen.program import codegen
from autopar.planning.planner import Planner
from autopar.runtime.agreement import follow_world_timeout, on_first_rank
from autopar.runtime.compiled import compile
from autopar.runtime.failures import CollectiveError, located

DIES = 3


def a_rank_dies(where: str, is_launched: bool = False) -> None:
    """Trains, and rank 3 is killed: before a forward pass, before a backward pass, or while ranks compare. A launcher
    that sees it sends SIGTERM to the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fs"))
    processes = [0] * 4
    dist.all_gather_object(processes, os.getpid())

    def dies_before(what: str) -> None:
        if what == where and dist.get_rank() == DIES:
            if is_launched:
                time.sleep(1.0)  # the others wait for it
                for process in processes[:DIES]:
                    os.kill(process, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == DIES:
        time.sleep(1.0)  # the others have their mesh
    dies_before("comparison")
    batch = torch.ones(8, 16)
    module = autopar.parallelize(mlp(), mesh, (batch,), loss_fn=mean_square, solver="fsdp")
    for step in ("first", "second", ""):  # the third is as the second was, and waits for nobody before it runs
        dies_before(f"{step}forward")
        loss = module(batch)
        dies_before(f"{step}backward")
        loss.backward()


@pytest.mark.parametrize(
    ("where", "is_launched"), [("forward", False), ("backward", False), ("comparison", False), ("backward", True)]
)
def test_a_rank_that_is_killed(where: str, is_launched: bool) -> None:
    """Every other rank ends too, and says in what, over which mesh axis and with which rank: rank 0 has none of its
    groups in common with rank 3, and ends when the others did. By itself: `outcomes` ends a rank 10 s after another
    one, with another error."""
    found = outcomes(4, a_rank_dies, where, is_launched)
    assert "the process died" in str(found[DIES].error)
    what = {
        "forward": "all_gather in",
        "backward": "(reduce_scatter|all_gather|all_reduce) in",
        "comparison": "exchange",
    }
    for rank in range(DIES):
        error = found[rank].error
        assert isinstance(error, CollectiveError), found[rank].traceback
        text = str(error)
        assert re.match(rf"rank {rank}: .*{what[where]}.* over mesh axis '(dp|fs)', with rank \d, failed", text)
        assert "look at the log of rank" in text
        if where != "comparison":
            assert re.search(r"` for (gradient of )?(\w|\.)+", text), text
        # what the backend said, chained
        assert re.search(r"Connection (closed|reset)|Broken pipe", found[rank].traceback), found[rank].traceback
    assert f"with rank {DIES}, failed" in f"{found[1].error} {found[2].error}"


TIMEOUT = timedelta(seconds=4)


def printed(call: Callable[[], Any]) -> str:
    """What a process prints of an error that nobody catches."""
    text = io.StringIO()
    try:
        call()
    except Exception:
        with contextlib.redirect_stderr(text):
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    return text.getvalue()


def calls_go_wrong() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batch = torch.ones(8, 16)
    module = autopar.parallelize(mlp(), mesh, (batch,), loss_fn=mean_square, solver="fsdp")
    return [
        printed(lambda: module(torch.ones(8, 15))),
        printed(lambda: module(batch, scale=2.0)),
        printed(lambda: autopar.parallelize(mlp(), mesh, (batch,), solver="fspd")),
        printed(lambda: nn.parallel.DistributedDataParallel(module)),
        printed(lambda: module(batch + dist.get_rank())),
    ]


class FailsOnOneRank(nn.Module):
    """Its forward raises on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("a fault of its own")
        return self.linear(x)


def fails_on_one_rank() -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return printed(lambda: autopar.parallelize(FailsOnOneRank(), mesh, (torch.ones(8, 16),), loss_fn=mean_square))


def test_the_rank_that_fails_alone_says_what_it_met() -> None:
    """With the line of the user's code, in few lines; the first rank has the message in its one line."""
    first, second = run(2, fails_on_one_rank)
    said = "RuntimeError: a fault of its own (on rank 1 of 2)"
    assert first.strip() == f"rank 0: {said}, as rank 1 says"
    lines = second.strip().splitlines()
    assert lines[-1].endswith(said) and len(lines) <= 12, second
    assert 'raise RuntimeError("a fault of its own")' in second


def test_the_first_rank_says_what_all_ranks_meet() -> None:
    """In few lines, of which the last is the error; the others say a line."""
    first, second = run(2, calls_go_wrong)
    wanted = {
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x15": "RuntimeError",
        "got an unexpected keyword argument 'scale'": "TypeError",
        "ValueError: unknown solver 'fspd' (did you mean 'fsdp'?)": "ValueError",
        "ValueError: a parallel module reduces its gradients itself": "ValueError",
        "ValueError: input args.0 differs between ranks": "ValueError",
    }
    for (words, kind), said, quiet in zip(wanted.items(), first, second, strict=True):
        lines = said.strip().splitlines()
        assert any(words in line for line in lines[-2:]) and len(lines) <= 20, said
        assert quiet.strip() == f"rank 1: {kind}, as the first rank says"


def a_rank_sleeps(where: str) -> float:
    """Rank 3 does nothing for long; the others end after the timeout of the world, not after a mesh's 30 minutes."""
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)  # as init_process_group(timeout=TIMEOUT) does
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fs"))
    batch = torch.ones(8, 16)
    if where == "step" or dist.get_rank() != DIES:
        module = autopar.parallelize(mlp(), mesh, (batch,), loss_fn=mean_square, solver="fsdp")
        for _ in range(2):
            module(batch).backward()
    if dist.get_rank() == DIES:
        time.sleep(60.0)
    module(batch).backward()
    return 0.0


@pytest.mark.parametrize("where", ["parallelize", "step"])
def test_a_rank_that_does_nothing_ends_the_others_after_the_timeout(where: str) -> None:
    began = time.monotonic()
    found = outcomes(4, a_rank_sleeps, where)
    assert time.monotonic() - began < 40
    for rank in (1, 2):  # those with a group in common
        error = found[rank].error
        assert isinstance(error, CollectiveError), found[rank].traceback
        assert f"with rank {DIES}, failed: it did not end within the timeout" in str(error)
    assert isinstance(found[0].error, CollectiveError), found[0].traceback


def one_rank_asks(what: str) -> float:
    """Rank 0 alone asks for what all must ask for."""
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fs",))
    batch = torch.ones(8, 16)
    module = autopar.parallelize(mlp(), mesh, (batch,), loss_fn=mean_square, solver="fsdp")
    if dist.get_rank() == 0:
        if what == "full_tensor":
            next(p for p in module.parameters() if not p.placements[0].is_replicate()).full_tensor()  # type: ignore
        else:
            dcp.save({"model": module.state_dict()}, checkpoint_id=tempfile.mkdtemp())
    else:
        time.sleep(8.0)
    return 0.0


@pytest.mark.parametrize("what", ["full_tensor", "torch.distributed.checkpoint"])
def test_a_rank_that_waits_alone_is_told_for_what(what: str) -> None:
    found = outcomes(2, one_rank_asks, what)
    assert isinstance(found[0].error, CollectiveError), found[0].traceback
    assert re.match(rf"rank 0: {what}.* waited for the other ranks", str(found[0].error))
    assert "not under `if rank == 0`" in str(found[0].error)


def planning_takes_long() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fs"))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    follow_world_timeout(mesh)

    def planned() -> str:
        time.sleep(4.0)
        return "a plan"

    found = on_first_rank(planned, mesh)
    (timeout,) = {mesh.get_group(axis)._get_backend(torch.device("cpu")).options._timeout for axis in ("dp", "fs")}
    assert timeout == timedelta(seconds=2)
    return found


def test_ranks_wait_for_a_plan_that_takes_longer_than_the_timeout() -> None:
    assert run(4, planning_takes_long) == ["a plan"] * 4


def own_timeouts() -> None:
    """A mesh whose groups were given their own keep it."""
    cpu, own = torch.device("cpu"), timedelta(seconds=77)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fs"))
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    dist.distributed_c10d._set_pg_timeout(own, mesh.get_group("dp"))
    autopar.parallelize(mlp(), mesh, (torch.ones(8, 16),), loss_fn=mean_square, solver="fsdp")
    timeouts = [mesh.get_group(axis)._get_backend(cpu).options._timeout for axis in ("dp", "fs")]
    assert timeouts == [own, TIMEOUT]


def test_a_timeout_of_its_own_stays() -> None:
    run(4, own_timeouts)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids).square().mean()


def test_an_error_in_the_program_says_where() -> None:
    made = Case(model=Words(), batch=lambda step: ((torch.arange(12),), {}))
    planner = Planner(made.model, {"tp": 1}, made.args)
    program = codegen(planner.space, planner.assignment(planner.plan(solver="ddp")))
    weight = made.model.embed.weight.detach()
    with pytest.raises(IndexError) as caught:
        compile(program, (None,), around=located).forward([weight, torch.tensor([1, 16] * 6)])
    (note,) = caught.value.__notes__
    line = r"`embedding = aten.embedding.default\(.*\)`"
    assert re.fullmatch(f"on rank 0, in {line} for embedding of module 'embed'", note)
