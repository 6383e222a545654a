"""Beside: what a forked process computes while this one goes on.

Searches are Python on one core. Where a part of one does not depend on what comes next, a copy of this process computes
it, and hands its answer back by a pipe. The answer is what this process would have found, and this process finds it
itself where there is no core to spare.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch

logger = logging.getLogger("autopar")

T = TypeVar("T")

PARENT_DEATH_SIGNAL = 1
"""Of Linux: `PR_SET_PDEATHSIG` in <sys/prctl.h>."""

PATIENCE_SECONDS = 10.0
"""A process that has not used a processor for so long will not answer."""


@contextmanager
def beside(compute: Callable[[], T], *, worthwhile: bool = True) -> Iterator[Callable[[], T]]:
    """Gives a function that returns what `compute` does, or raises what it does. If it is `worthwhile`, a process
    computes it from now on, which ends with the block; else it is computed when it is asked for. What it logs is logged
    when the answer is there; whatever else it changes is not changed here."""
    if not worthwhile or not _can_fork():
        yield cache(compute)
        return
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # of other threads, which are not in the child: it runs Python and numpy, and one that stands still is given up
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(compute, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:

        @cache
        def answer() -> T:
            given = b"" if _stands_still(answers.fileno(), child) else answers.read()
            if not given:
                logger.warning(
                    "a process that planned beside this one gave no answer: what it was to find is found here"
                )
                return compute()
            found, error, records = pickle.loads(given)
            for record in records:
                logger.handle(record)
            if error is not None:
                raise error
            made: T = found
            return made

        try:
            yield answer
        finally:
            os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):  # where the caller has all its children reaped
                os.waitpid(child, 0)


def _stands_still(answers: int, child: int) -> bool:
    """Waits for an answer, or until the child has not computed for a while."""
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


def together(tasks: Sequence[Callable[[], T]], *, worthwhile: bool = True) -> list[T]:
    """What each task returns, in their order. If it is `worthwhile`, a forked process does those that this one has not
    come to."""
    if not worthwhile or not _can_fork():
        return [task() for task in tasks]
    reading, writing = os.pipe()  # a byte for each task that nobody has taken
    with os.fdopen(reading, "rb", buffering=0) as left, os.fdopen(writing, "wb", buffering=0) as numbers:
        numbers.write(bytes(range(len(tasks))))
        os.set_blocking(reading, False)

        def done() -> dict[int, T]:
            found = {}
            while number := left.read(1):
                found[number[0]] = tasks[number[0]]()
            return found

        with beside(done) as others:
            found = done()
            found |= others()
    return [found[number] if number in found else tasks[number]() for number in range(len(tasks))]


def _end_with(parent: int) -> None:
    """This process ends when its parent does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)


def _can_fork() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def _answer(compute: Callable[[], Any], pipe: int, parent: int) -> NoReturn:
    """In the child: it writes the answer and is gone, and nothing of the parent's is run at its end."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _end_with(parent)
        torch.set_num_threads(1)  # the parent's other threads are not here
        records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        logger.handlers, logger.propagate = [QueueHandler(records)], False
        found, raised = None, None
        try:
            found = compute()
        except Exception as error:  # the caller's, who asks for the answer
            raised = error
        with os.fdopen(pipe, "wb") as answers:
            pickle.dump((found, raised, [records.get() for _ in range(records.qsize())]), answers)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(status)
