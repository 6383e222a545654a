"""Collectives that move rows between some ranks: messages to neighbours, to and from one rank, and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

import torch
import torch.distributed as dist

from autopar.compat.collectives import from_host_alone

from .collectives import COLLECTIVES, REDUCTIONS, Followed, Pending, started


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages under way, and the tensor that is being sent, held until it is."""

    works: Sequence[dist.Work]
    sent: torch.Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


Transfer = Callable[[torch.Tensor, int, dist.ProcessGroup], Pending]


def _over_host(transfer: Transfer) -> Transfer:
    """gloo has collectives for CUDA, and messages from host to host alone."""

    @wraps(transfer)
    def started(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
        if not from_host_alone(group, x.device):
            return transfer(x, offset, group)
        received, work = transfer(x.cpu(), offset, group)
        target = torch.empty_like(received, device=x.device)
        return target, Followed(work, received, target.copy_)

    return started


def _passed(x: torch.Tensor, received: torch.Tensor, to: int, source: int, group: dist.ProcessGroup) -> Pending:
    """A message to one rank of the group, and one from another, as far as there are such ranks."""
    ranks = range(group.size())
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=to)] if to in ranks else []
    receives = [dist.P2POp(dist.irecv, received, group=group, group_peer=source)] if source in ranks else []
    messages = [*sends, *receives]
    return received, Messages(dist.batch_isend_irecv(messages) if messages else [], x)


@_over_host
def shift(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
    rank, received = dist.get_rank(group), torch.zeros_like(x, memory_format=torch.contiguous_format)
    return _passed(x, received, rank + offset, rank - offset, group)


@_over_host
def rotate(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
    rank, ranks = dist.get_rank(group), group.size()
    if offset % ranks == 0:
        return x.clone(memory_format=torch.contiguous_format), Messages((), x)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _passed(x, received, (rank + offset) % ranks, (rank - offset) % ranks, group)


def broadcast(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> Pending:
    received = x.clone(memory_format=torch.contiguous_format)
    return started(received, dist.broadcast(received, group=group, group_src=root, async_op=True))


def reduce(x: torch.Tensor, reduction: str, root: int, group: dist.ProcessGroup) -> Pending:
    reduced = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(reduced, op=REDUCTIONS[reduction], group=group, group_dst=root, async_op=True)
    reduced, pending = started(reduced, work)
    if dist.get_rank(group) == root:
        return reduced, pending
    return reduced, Followed(pending, reduced, torch.Tensor.zero_)  # it holds what happened to pass


def exchange(x: torch.Tensor, sizes: torch.Tensor, _: int, group: dist.ProcessGroup) -> Pending:
    """How many rows come is in the sizes, whatever shapes assume."""
    put, got = sizes.tolist()
    exchanged = x.new_empty((sum(got), *x.shape[1:]))
    return started(exchanged, dist.all_to_all_single(exchanged, x, got, put, group=group, async_op=True))


COLLECTIVES.update({function.__name__: function for function in (shift, exchange, rotate, broadcast, reduce)})
