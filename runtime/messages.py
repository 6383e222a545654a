"""Collectives that move rows between some ranks: messages to neighbours, to and from one rank, and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

import torch
import torch.distributed as dist

from autopar.compat.collectives import from_host_alone

from .collectives import COLLECTIVES, REDUCTIONS, Pending, Waitable, started


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages under way, and the tensor that is being sent, held until it is."""

    works: Sequence[dist.Work]
    sent: torch.Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True, slots=True)
class Landing:
    """A transfer under way to the host's memory, from where it goes to `target`."""

    work: Waitable
    received: torch.Tensor
    target: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.received)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A reduction under way of which this rank gets nothing: its buffer holds what happened to pass."""

    work: Waitable
    target: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.zero_()


Transfer = Callable[[torch.Tensor, int, dist.ProcessGroup], Pending]


def _over_host(transfer: Transfer) -> Transfer:
    """gloo has collectives for CUDA, and messages from host to host alone."""

    @wraps(transfer)
    def started(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
        if not from_host_alone(group, x.device):
            return transfer(x, offset, group)
        received, work = transfer(x.cpu(), offset, group)
        target = torch.empty_like(received, device=x.device)
        return target, Landing(work, received, target)

    return started


@_over_host
def shift(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
    rank, ranks = dist.get_rank(group), group.size()
    received = torch.zeros_like(x, memory_format=torch.contiguous_format)
    messages = []
    if 0 <= rank + offset < ranks:
        messages.append(dist.P2POp(dist.isend, x, group=group, group_peer=rank + offset))
    if 0 <= rank - offset < ranks:
        messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - offset))
    works = dist.batch_isend_irecv(messages) if messages else []
    return received, Messages(works, x)


@_over_host
def rotate(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
    rank, ranks = dist.get_rank(group), group.size()
    if offset % ranks == 0:
        return x.clone(memory_format=torch.contiguous_format), Messages((), x)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    messages = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + offset) % ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - offset) % ranks),
    ]
    return received, Messages(dist.batch_isend_irecv(messages), x)


def broadcast(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> Pending:
    received = x.clone(memory_format=torch.contiguous_format)
    return started(received, dist.broadcast(received, group=group, group_src=root, async_op=True))


def reduce(x: torch.Tensor, reduction: str, root: int, group: dist.ProcessGroup) -> Pending:
    reduced = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(reduced, op=REDUCTIONS[reduction], group=group, group_dst=root, async_op=True)
    assert work is not None
    return reduced, work if dist.get_rank(group) == root else Elsewhere(work, reduced)


def exchange(x: torch.Tensor, sizes: torch.Tensor, _: int, group: dist.ProcessGroup) -> Pending:
    """How many rows come is in the sizes, whatever shapes assume."""
    put, got = sizes.tolist()
    exchanged = x.new_empty((sum(got), *x.shape[1:]))
    return started(exchanged, dist.all_to_all_single(exchanged, x, got, put, group=group, async_op=True))


COLLECTIVES.update({function.__name__: function for function in (shift, exchange, rotate, broadcast, reduce)})
