"""Boxes of tensors on their way from the ranks of a mesh that hold them to those that want them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.layout import Shape

from .boxes import Box
from .collectives import wait
from .failures import watched
from .messages import exchange
from .places import local_part


class Piece(NamedTuple):
    """A box of a tensor, as it lies in what the sender holds, and in what its home makes. Both may be one rank."""

    sender: int
    home: int
    source: Any
    sent: Box
    target: Any
    put: Box


def pieces(wanted: Iterable[tuple[int, Any, Any, Box]], held: Mapping[Any, Sequence[Sequence[Box]]]) -> list[Piece]:
    """What is sent by whom, in order. `wanted` says home, target, source and box; `held` are the boxes of a source that
    each rank holds. Where several hold the same one, a rank takes its own, or that of the next rank that does, so that
    they take turns."""
    made = []
    for home, target, source, box in wanted:
        holders = [*enumerate(held[source])]
        found: dict[Shape, int] = {}
        for sender, boxes in holders[home:] + holders[:home]:
            for there in boxes:
                put = box.overlap(there)
                if put.elements and found.setdefault(put.offsets, sender) == sender:
                    made.append(Piece(sender, home, source, there.overlap(put), target, put))
    return sorted(made, key=lambda piece: piece[:2])


@dataclass(frozen=True)
class MeshRanks:
    """All ranks of a mesh in one group, and in its order."""

    mesh: DeviceMesh

    @cached_property
    def group(self) -> dist.ProcessGroup:
        if self.mesh.ndim == 1:
            return self.mesh.get_group()
        world = dist.group.WORLD
        assert world is not None
        ranks = self.mesh.mesh.flatten().tolist()
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

    def move(
        self,
        program: Iterable[Piece],
        held: Mapping[Any, torch.Tensor],
        made: Mapping[Any, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Fill the targets of this rank from what the ranks hold of sources, on all of them at once. What travels does
        in this dtype, in one exchange."""
        ways = list[Piece](), list[Piece]()
        sizes = torch.zeros(2, len(self.everyone), dtype=torch.int64)
        travels = False
        for piece in program:
            ends = piece[:2]
            travels |= piece.sender != piece.home
            if ends == (self.own, self.own):
                piece.put.of(made[piece.target]).copy_(piece.sent.of(local_part(held[piece.source])))
            elif self.own in ends:
                way = ends.index(self.own)
                ways[way].append(piece)
                sizes[way, ends[1 - way]] += piece.put.elements
        if not travels:
            return
        packed = (piece.sent.of(local_part(held[piece.source])).to(dtype).flatten() for piece in ways[0])
        sent = torch.cat([torch.empty(0, dtype=dtype, device=self.mesh.device_type), *packed]).view(-1, 1)
        with watched("an exchange of parts of tensors,", "all", self.group):
            arrived = wait(exchange(sent.view(torch.uint8), sizes, 0, self.group)).view(dtype).flatten()
        for piece, part in zip(ways[1], torch.split(arrived, [p.put.elements for p in ways[1]]), strict=True):
            piece.put.of(made[piece.target]).copy_(part.view(piece.put.sizes))
