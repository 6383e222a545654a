"""Collectives on process groups: each function starts one and returns its result with the handle to wait for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.compat.collectives import all_gather_single, reduce_scatter_single

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Waitable(Protocol):
    """Something that can be waited for: a `dist.Work`, or several."""

    def wait(self) -> Any: ...


Pending = tuple[torch.Tensor, Waitable]
"""A collective under way: its result, and the handle that says when it is there. Both are held until
then. (With the functional collectives, which keep the handle in a registry, training on gloo in torch
2.13 aborted now and then on a loaded machine, in the worker of a coalesced all-gather. The cause was
not established; these calls do not take that path.)"""


@dataclass(frozen=True, slots=True)
class Followed:
    """Something under way, the tensor that it reads or writes, held until then, and what is done with that once it is
    there."""

    work: Waitable
    held: torch.Tensor
    then: Callable[[torch.Tensor], object]

    def wait(self) -> None:
        self.work.wait()
        self.then(self.held)


_NUMBERS = {torch.int32: torch.float32, torch.int64: torch.float64}
_BITS = {number: bits for bits, number in _NUMBERS.items()}


def _swapped(bits: torch.Tensor) -> torch.Tensor:
    """Bits of floating numbers as integers in their order, and back."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def ordered(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Floating numbers as integers in their order, with NaN as the extreme: backends compare NaN as they please."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    bits = _swapped(wide.contiguous().view(_BITS[wide.dtype]))
    info = torch.iinfo(bits.dtype)
    return bits.masked_fill(x.isnan(), info.max if reduction == "max" else info.min)


def _unordered(target: torch.Tensor, reduced: Pending) -> Pending:
    """A reduction of `ordered` numbers, whose result goes to `target`."""
    bits, work = reduced
    return target, Followed(work, bits, lambda bits: target.copy_(_swapped(bits).view(_NUMBERS[bits.dtype])))


def started(result: torch.Tensor, work: dist.Work | None) -> Pending:
    assert work is not None  # this rank is in the group
    return result, work


def all_reduce_in_place(x: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> Pending:
    if reduction != "sum" and x.is_floating_point():
        return _unordered(x, all_reduce_in_place(ordered(x, reduction), reduction, group))
    return started(x, dist.all_reduce(x, REDUCTIONS[reduction], group, async_op=True))


def all_reduce(x: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> Pending:
    return all_reduce_in_place(x.clone(memory_format=torch.contiguous_format), reduction, group)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    return started(gathered, all_gather_single(gathered, x, group))


def reduce_scatter(x: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> Pending:
    part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    if reduction != "sum" and x.is_floating_point():
        return _unordered(part, reduce_scatter(ordered(x, reduction), reduction, group))
    if reduction == "sum" and x.is_cpu:
        # gloo's own is an all-reduce, of which each rank keeps its part, and sends twice as much; the sum is the same
        # whatever the order of arrival
        exchanged, work = all_to_all(x, group)
        parts = exchanged.view(group.size(), *part.shape)
        return part, Followed(work, parts, lambda parts: torch.sum(parts, 0, dtype=part.dtype, out=part))
    return started(part, reduce_scatter_single(part, x, REDUCTIONS[reduction], group))


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
    return started(exchanged, dist.all_to_all_single(exchanged, x, group=group, async_op=True))


def wait(pending: Pending) -> torch.Tensor:
    result, work = pending
    work.wait()
    return result


COLLECTIVES: dict[str, Callable[..., Pending]] = {
    function.__name__: function for function in (all_reduce, all_gather, reduce_scatter, all_to_all)
}
"""By kind (`ir.program.COLLECTIVES`): a function of the operand, what the instruction says beside it, and the group.
`messages` adds others."""
