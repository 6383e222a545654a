"""What is said where something fails on a rank: in which instruction, of which module, with which peers.

Backends report a peer's death as a closed connection, and name neither the collective nor the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.graph import WAIT, Node
from autopar.ir.program import Program, source_line

Groups = Sequence[dist.ProcessGroup | None]


class CollectiveError(RuntimeError):
    """A collective that did not come to its end: another rank had ended before, or did not come in time."""


@contextmanager
def watched(what: str, axis: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Raises CollectiveError, from what the backend raised, in the place of that."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_backend(error):
            raise
        raise CollectiveError(explanation(what, axis, group, error)) from error


def explanation(what: str, axis: str, group: dist.ProcessGroup, error: Exception) -> str:
    """What is said of a collective that ended with a backend's `error`."""
    rank = dist.get_rank()
    others = [other for other in dist.get_process_group_ranks(group) if other != rank]
    named = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    if _is_timeout(error):
        return (
            f"rank {rank}: {what} over mesh axis {axis!r}, with {named}, failed: it did not end within the timeout "
            f"of the process group. {named[0].upper()}{named[1:]} may be slow, may wait in another collective, or may "
            f"have ended: look at the log of {named}, and give the process group a longer timeout if a step takes that "
            f"long"
        )
    return (
        f"rank {rank}: {what} over mesh axis {axis!r}, with {named}, failed. A peer has probably died, or ended with "
        f"an error of its own: look at the log of {named} for what came first"
    )


def _is_timeout(error: Exception) -> bool:
    """Backends have no type for it. gloo says "Timed out waiting", NCCL's watchdog "timeout"."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


def _is_of_backend(error: Exception) -> bool:
    own = isinstance(error, CollectiveError | torch.OutOfMemoryError | NotImplementedError | RecursionError)
    return isinstance(error, RuntimeError) and not own


def located(
    function: Callable[[list[torch.Tensor]], Any], program: Program, groups: Groups, lines: Mapping[int, Node]
) -> Callable[[list[torch.Tensor]], Any]:
    """A function of the program's source, whose exceptions say where they come from. `lines` holds the instruction
    on each line of the file that the source was compiled as. Costs nothing until something is raised."""
    started = {i.outputs[0]: i for i in (*program.forward, *program.backward) if i.collective}
    file = function.__code__.co_filename

    def run(arguments: list[torch.Tensor]) -> Any:
        try:
            return function(arguments)
        except Exception as error:
            instruction = lines.get(_line(error, file))
            if instruction is None:
                raise
            place = _place(instruction, program)
            collective = started.get(instruction.inputs[0]) if instruction.op == WAIT else instruction
            if collective is None or collective.collective is None or not _is_of_backend(error):
                error.add_note(f"on rank {dist.get_rank() if dist.is_initialized() else 0}, {place}")
                raise
            axis = collective.args[-1]
            group = groups[axis]
            assert group is not None
            what = f"{collective.collective} {_place(collective, program)},"
            raise CollectiveError(explanation(what, program.axes[axis], group, error)) from error

    return run


def _line(error: Exception, file: str) -> int:
    """The line of a file that an exception went through."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def _place(instruction: Node, program: Program) -> str:
    of = f" for {instruction.serves}" if instruction.serves else ""
    module = f" of module {instruction.module!r}" if instruction.module else ""
    return f"in `{source_line(instruction, program.axes)}`{of}{module}"
