"""The message of a failure on a rank: in which instruction, of which module, with which peers; and collectives that do
not come to their end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.graph import WAIT, Node
from autopar.ir.program import Program, source_line

from .execute import Groups


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a message."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class CollectiveError(RuntimeError):
    """A collective that did not come to its end: another rank had ended before, or did not come in time. Backends
    report a peer's death as a closed connection, and name neither the collective nor the ranks. `fact` is what is
    known, and `guess` what may have happened, for as long as nobody knows more."""

    def __init__(self, fact: str, guess: str = "") -> None:
        super().__init__(fact, guess)

    @property
    def fact(self) -> str:
        fact: str = self.args[0]
        return fact

    @property
    def guess(self) -> str:
        guess: str = self.args[1]
        return guess

    def __str__(self) -> str:
        return f"{self.fact}. {self.guess}" if self.guess else self.fact


@contextmanager
def watched(what: str, axis: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Raises CollectiveError, from what the backend raised, in the place of that."""
    try:
        with outlasting():
            yield
    except RuntimeError as error:
        if not _is_of_backend(error):
            raise
        raise explanation(what, axis, group, error) from error


def explanation(what: str, axis: str, group: dist.ProcessGroup, error: Exception) -> CollectiveError:
    """The error for a collective that failed with a backend's `error`."""
    rank = dist.get_rank()
    others = [other for other in dist.get_process_group_ranks(group) if other != rank]
    named = named_ranks(others)
    fact = f"rank {rank}: {what} over mesh axis {axis!r}, with {named}, failed"
    guess = (
        f"A peer has probably died, or ended with an error of its own: look at the log of {named} for what came first"
    )
    if is_timeout(error):
        fact += ": it did not end within the timeout of the process group"
        guess = (
            f"{named[0].upper()}{named[1:]} may be slow, may wait in another collective, or may have ended: look at "
            f"the log of {named}, and give the process group a longer timeout if a step takes that long"
        )
    explained = CollectiveError(fact, guess)
    explained.add_note(f"The backend says: {error}".splitlines()[0])
    return explained


@contextmanager
def outlasting() -> Iterator[None]:
    """Launchers end all ranks by SIGTERM once one has ended. Within it, and once a backend has failed in it, that ends
    this process some seconds later, so that it can say what it waited for."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end_later)
    failed = False
    try:
        yield
    except RuntimeError as error:
        failed = _is_of_backend(error)
        raise
    finally:
        if not failed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_later(number: int, frame: object) -> None:
    timer = threading.Timer(_LAST_SECONDS, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


_LAST_SECONDS = 5.0


def alone(what: str, error: RuntimeError) -> RuntimeError:
    """The error for a call of PyTorch's that failed with a backend's `error`, if that is one of waiting in vain."""
    if not _is_of_backend(error) or not is_timeout(error):
        return error
    rank = dist.get_rank()
    return CollectiveError(
        f"rank {rank}: {what} waited for the other ranks, which did not call it within the process group's timeout",
        "Call it on all ranks at once, not under `if rank == 0`, and write or print on one of them what it gives",
    )


def is_timeout(error: Exception) -> bool:
    """Backends have no type for it. gloo says "Timed out waiting", NCCL's watchdog "timeout"."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


def _is_of_backend(error: Exception) -> bool:
    own = isinstance(error, CollectiveError | torch.OutOfMemoryError | NotImplementedError | RecursionError)
    return isinstance(error, RuntimeError) and not own


def located(
    function: Callable[[list[torch.Tensor]], Any], program: Program, groups: Groups, lines: Mapping[int, Node]
) -> Callable[[list[torch.Tensor]], Any]:
    """A function of the program's source, whose exceptions say where they come from. `lines` holds the instruction
    on each line of the file that the source was compiled as."""
    started = {i.outputs[0]: i for i in program.nodes if i.collective}
    file = function.__code__.co_filename

    def run(arguments: list[torch.Tensor]) -> Any:
        try:
            with outlasting():
                return function(arguments)
        except Exception as error:
            instruction = lines.get(_line(error, file))
            if instruction is None:
                raise
            place = place_of(instruction, program)
            collective = started.get(instruction.inputs[0]) if instruction.op == WAIT else instruction
            if collective is None or collective.collective is None or not _is_of_backend(error):
                error.add_note(f"on rank {dist.get_rank() if dist.is_initialized() else 0}, {place}")
                raise
            axis = collective.args[-1]
            group = groups[axis]
            assert group is not None
            what = f"{collective.collective} {place_of(collective, program)},"
            raise explanation(what, program.axes[axis], group, error) from error

    return run


def _line(error: Exception, file: str) -> int:
    """The line of a file that an exception went through."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def place_of(instruction: Node, program: Program) -> str:
    of = f" for {instruction.serves}" if instruction.serves else ""
    module = f" of module {instruction.module!r}" if instruction.module else ""
    return f"in `{source_line(instruction, program.axes)}`{of}{module}"
