"""A forked process computes one part of a search while this process computes another.

Searches are Python on one core. Where a part does not depend on what comes next, a copy of this process computes it and
returns the answer by a pipe. The answer is the same as this process would compute, and where there is no spare core,
this process computes it.
"""

import ctypes
import logging
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch

from autopar.solve.effort import Deadline

logger = logging.getLogger("autopar")

T = TypeVar("T")

PARENT_DEATH_SIGNAL = 1
"""Of Linux: `PR_SET_PDEATHSIG` in <sys/prctl.h>."""

PATIENCE_SECONDS = 10.0
"""A process that has used no processor for so long will not answer."""


@contextmanager
def forked(
    compute: Callable[[], T], *, worthwhile: bool = True, until: Deadline | None = None
) -> Iterator[Callable[[], T]]:
    """Yields a function that returns, or raises, what `compute` does. If this is `worthwhile`, a forked process starts
    to compute now, and ends with the block; otherwise the first call computes. This process repeats the other's log
    records with the answer, and sees no other side effect. An interrupt ends the other process; with `until`, the
    search in it, which then answers."""
    if not worthwhile or not _can_fork():
        yield cache(compute)
        return
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # it warns of threads, which the child lacks: the child runs Python and numpy, and is abandoned if it stalls
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(compute, writing, parent, until)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:

        @cache
        def answer() -> T:
            received = b"" if _stalls(answers.fileno(), child) else answers.read()
            if not received:
                logger.warning("a process that planned beside this one gave no answer: this process computes it")
                return compute()
            value: T
            value, error, records = pickle.loads(received)
            for record in records:
                logger.handle(record)
            if error is not None:
                raise error
            return value

        try:
            yield answer
        finally:
            os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):  # if the caller reaps all its children
                os.waitpid(child, 0)


def _stalls(answers: int, child: int) -> bool:
    """Waits for an answer, or until the child has used no processor for `PATIENCE_SECONDS`."""
    used = -1.0
    there = select.poll()
    there.register(answers, select.POLLIN)
    while not there.poll(1e3 * PATIENCE_SECONDS):
        before, used = used, _processor_seconds(child)
        if used == before:
            return True
    return False


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end_with(parent: int) -> None:
    """This process ends when its parent does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)


def _can_fork() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def _answer(compute: Callable[[], Any], pipe: int, parent: int, until: Deadline | None) -> NoReturn:
    """In the child: writes the answer and exits without running the parent's exit handlers."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if until is not None:
            signal.signal(signal.SIGINT, lambda *_: until.end())
        _end_with(parent)
        torch.set_num_threads(1)  # the parent's other threads are not here
        records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        logger.handlers, logger.propagate = [QueueHandler(records)], False
        value, raised = None, None
        try:
            value = compute()
        except Exception as error:  # which the parent raises
            raised = error
        with os.fdopen(pipe, "wb") as answers:
            pickle.dump((value, raised, [records.get() for _ in range(records.qsize())]), answers)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(status)
