"""Processes for tests: gloo ranks on this machine, each running one function, and commands as a shell would start them.
Both are forked, and start in a tenth of a second."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = ["warm"]
"""Imported once in the server that commands fork from, so that one starts in a tenth of a second, not in five."""

PATIENCE_SECONDS = 250.0
"""Ends ranks that hang. Far above what a test takes, for machines that are busy or slow; a rank that fails ends the
others within 10 s all the same."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a rank: its result, or its exception with the traceback as text."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


def run(ranks: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = PATIENCE_SECONDS) -> list[Any]:
    """[function(*args) on each rank], in rank order. `function` is a top-level function of a module.

    A rank is forked from this process, with what it imported and keeps. Inside, `torch.distributed` is initialised with
    gloo, torch uses one thread, and random numbers begin anew, the same on every rank. RuntimeError with the tracebacks
    of the ranks that failed; no process outlives the call.
    """
    found = outcomes(ranks, function, *args, timeout_seconds=timeout_seconds)
    failed = [f"rank {rank}: {o.error!r}\n{o.traceback}" for rank, o in enumerate(found) if o.error is not None]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [o.value for o in found]


def outcomes(
    ranks: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = PATIENCE_SECONDS
) -> list[Outcome]:
    """As `run`, with exceptions as values. A rank that does not finish in time, or within 10 s after
    another one failed, is killed and has a TimeoutError."""
    context = _forking()
    pickle.dumps((function, args))  # a rank inherits them, but where torch is built for CUDA it is sent them
    found: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes, connections = [], {}
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(rank, ranks, os.path.join(folder, "store"), sender, function, args), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                connections[receiver] = rank
            deadline = time.monotonic() + timeout_seconds
            while connections and (left := deadline - time.monotonic()) > 0:
                for receiver in multiprocessing.connection.wait(list(connections), timeout=left):
                    rank = connections.pop(receiver)  # type: ignore[arg-type, call-overload]
                    found[rank] = _receive(receiver, processes[rank])  # type: ignore[arg-type]
                    if found[rank].error is not None:
                        deadline = min(deadline, time.monotonic() + 10.0)
        finally:
            for process in processes:
                if len(found) < ranks:
                    process.kill()
                process.join(10.0)
                if process.exitcode is None:
                    process.kill()
                    process.join()
    late = Outcome(error=TimeoutError(f"not finished after {timeout_seconds} s, or 10 s after another rank failed"))
    return [found.get(rank, late) for rank in range(ranks)]


def _forking() -> multiprocessing.context.BaseContext:
    """How ranks start. Where torch knows of CUDA, this process may have asked for devices, and could not fork."""
    import torch

    if torch.version.cuda is not None:
        return _served()
    _capture_once()
    return multiprocessing.get_context("fork")


@cache
def _capture_once() -> None:
    """What PyTorch imports and sets up at its first capture, ranks inherit."""
    import torch

    from autopar.planning.planner import Planner

    Planner(torch.nn.Linear(2, 2), {"a": 2}, (torch.ones(2, 2),)).plan(solver="ddp")


def _served() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process of its own; what it writes is in files."""

    process: BaseProcess
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def error(self) -> str:
        return (self.folder / "error").read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def status(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit status, once it has ended; minus a signal's number if that ended it."""
        self.process.join(timeout_seconds)
        assert self.process.exitcode is not None, f"has not ended: {self.output}{self.error}"
        return self.process.exitcode

    def lines_until(self, text: str, times: int = 1) -> list[str]:
        """What it has written once it has written lines that end with `text` so many times."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (lines := self.output).count(f"{text}\n") < times:
            running = self.process.is_alive() and time.monotonic() < end
            assert running, f"{text!r} did not come {times} times: {lines}{self.error}"
            time.sleep(0.05)
        return lines.splitlines()


def start(folder: Path, function: Callable[[], Any], *argv: str) -> Command:
    """Runs a top-level function of a module, such as a command's `main`, as a process with these arguments."""
    folder.mkdir(exist_ok=True)
    for name in ("output", "error"):
        (folder / name).touch()
    process = _served().Process(target=_as_command, args=(folder, function, argv), daemon=False)
    process.start()
    return Command(process=process, folder=folder)


def _as_command(folder: Path, function: Callable[[], Any], argv: tuple[str, ...]) -> None:
    for descriptor, name in ((1, "output"), (2, "error")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.argv = list(argv)
    sys.exit(function())


def _receive(connection: multiprocessing.connection.Connection, process: BaseProcess) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(10.0)
        outcome = Outcome(error=RuntimeError(f"the process died, with exit code {process.exitcode}"))
    connection.close()
    return outcome


def _rank(rank: int, ranks: int, store: str, sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # where it crashes, its last lines say
    gc.freeze()  # what the parent holds is not looked at, and so not copied
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        outcome = Outcome(value=function(*args))
    except Exception as error:
        outcome = Outcome(error=error, traceback=traceback.format_exc())
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)
    except Exception as error:
        message = pickle.dumps(Outcome(error=RuntimeError(f"{error!r} in {outcome}"), traceback=outcome.traceback))
    sender.send_bytes(message)
    sender.close()
    if outcome.error is None and dist.is_initialized():
        dist.destroy_process_group()
