"""Collectives that move rows between some ranks: messages to neighbours, to and from one rank, and exchanges, also
among all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.compat.collectives import from_host_alone
from autopar.ir.layout import Shape

from .collectives import COLLECTIVES, REDUCTIONS, Followed, Pending, started, wait
from .failures import watched


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


@dataclass(frozen=True)
class MeshRanks:
    """All ranks of a mesh in one group, and in its order."""

    mesh: DeviceMesh

    @cached_property
    def group(self) -> dist.ProcessGroup:
        ranks = self.mesh.mesh.flatten().tolist()
        if self.mesh.ndim == 1:
            return self.mesh.get_group()
        world = dist.group.WORLD
        assert world is not None
        return world if len(ranks) == world.size() else dist.new_group(ranks, use_local_synchronization=True)

    @cached_property
    def everyone(self) -> list[int]:
        """By their numbers in the world."""
        return dist.get_process_group_ranks(self.group)

    @cached_property
    def coordinates(self) -> list[Shape]:
        return [tuple((self.mesh.mesh == rank).nonzero()[0].tolist()) for rank in self.everyone]

    @cached_property
    def own(self) -> int:
        return dist.get_rank(self.group)

    def exchange(self, sent: torch.Tensor, put: Sequence[int], got: Sequence[int], what: str) -> torch.Tensor:
        """Give each rank so many of the elements, one rank after the other, and get so many from each. Any dtype."""
        with watched(what, "all", self.group):
            arrived = wait(exchange(sent.view(-1, 1).view(torch.uint8), torch.tensor([put, got]), 0, self.group))
        return arrived.view(sent.dtype).view(-1)


COLLECTIVES.update({function.__name__: function for function in (shift, exchange, rotate, broadcast, reduce)})
