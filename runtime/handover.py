"""Weights of a parallel module for an inference engine: each rank sends the boxes that it holds to the ranks whose
engine tensors have them, a bucket at a time, and no rank has more of a tensor than its engine rank does."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .agreement import all_equal, raise_together, together
from .boxes import Box
from .engines import EngineShard, engine_shards
from .places import local_part
from .state_dicts import saved_names
from .values import ModuleValues

BUCKET_BYTES = 64 << 20

_ALIGNED = 16
"""Bytes: pieces lie in a bucket at multiples of it, so that they are views of any dtype."""

_PIECES = 16
"""Of a full bucket, at least: what does not fit leaves little of it empty, and holders of copies take turns."""

Receive = Callable[[int, str, torch.Tensor], object]
"""Of an engine rank, a name and the tensor."""

Holders = Sequence[Mapping[int, Box]]
"""Of each part of a tensor that any rank holds: the ranks that do, and where."""


class Piece(NamedTuple):
    """A box of a tensor that a rank takes from what it holds, and that another, or itself, puts into an engine's."""

    sender: int
    source: str
    sent: Box
    put: Box
    shard: EngineShard
    is_last: bool = False
    """Whether the engine's tensor is whole with it."""

    @property
    def travels(self) -> bool:
        return self.sender != self.shard.home

    @property
    def bytes(self) -> int:
        """In a bucket."""
        return math.ceil(self.put.elements * self.shard.dtype.itemsize / _ALIGNED) * _ALIGNED


def holders_of(held: Iterable[Iterable[Box]]) -> Holders:
    """By the boxes that each rank holds."""
    parts: dict[object, dict[int, Box]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            parts.setdefault((box.offsets, box.sizes), {})[rank] = box
    return list(parts.values())


def pieces(
    tensors: Iterable[Sequence[EngineShard]], holders: Callable[[str], Holders], ranks: int, bucket_bytes: int
) -> Iterator[Piece]:
    """What all ranks send and put, in an order in which each finishes one engine tensor after the other, and in which
    all of them have about as much to do at any time. Of copies, a rank takes its own if it has one, and otherwise that
    of the rank that has sent the least."""
    loads = [0] * ranks
    for shards in tensors:
        turns: list[tuple[int, int, Piece]] = []
        for number, shard in enumerate(shards):
            made, home = [], shard.home
            for source, wanted in shard.sources:
                for copies in holders(source):
                    common = wanted.overlap(next(iter(copies.values())))
                    most = common.elements if home in copies else bucket_bytes // _PIECES // shard.dtype.itemsize
                    for put in common.cut(most) if common.elements else ():
                        sender = min(copies, key=lambda rank: (rank != home, loads[rank], (rank - home) % ranks))
                        made.append(Piece(sender, source, copies[sender].overlap(put), put, shard))
                        loads[sender] += made[-1].bytes * made[-1].travels
            made.sort(key=lambda piece: (piece.sender - home) % ranks)
            made = made or [Piece(home, "", _NOTHING, _NOTHING, shard)]
            made[-1] = made[-1]._replace(is_last=True)
            turn = sum(other.home == home for other in shards[:number])
            turns += [(turn, place, piece) for place, piece in enumerate(made)]
        yield from (piece for *_, piece in sorted(turns, key=lambda each: each[:2]))


_NOTHING = Box(offsets=(0,), sizes=(0,), local=(0,))
"""Of the model, in an engine tensor that is all padding."""


def buckets(program: Iterable[Piece], ranks: int, bucket_bytes: int) -> Iterator[list[Piece]]:
    """Pieces that travel at once: no rank sends and receives more than so many bytes of them."""
    loads, bucket = [0] * ranks, list[Piece]()
    for piece in program:
        ends = (piece.sender, piece.shard.home) if piece.travels else ()
        if any(loads[rank] + piece.bytes > bucket_bytes for rank in ends):
            yield bucket
            loads, bucket = [0] * ranks, []
        for rank in ends:
            loads[rank] += piece.bytes
        bucket.append(piece)
    yield bucket


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The values of a module on their way to an engine (`ValuesMixin.hand_over`)."""

    values: ModuleValues
    layout: str
    receive: Receive
    width: int
    on: Sequence[int] | None
    bucket_bytes: int
    dtype: torch.dtype | None

    @cached_property
    def names(self) -> dict[str, str]:
        """Of values, by those that layouts use."""
        return {name: value for value, name in saved_names(self.values).items()}

    @torch.no_grad()
    def run(self) -> None:
        """On all ranks at once. Raises on every rank what any rank raises."""
        ranks, error = self.values.ranks, None
        count = len(ranks.everyone)
        with together(self.values.mesh):
            tensors = self._tensors()
        given = (self.layout, self.width, self.on, self.bucket_bytes, self.dtype)
        digest = zlib.crc32(repr(given).encode())
        all_equal(digest, self.values.mesh, "the ranks hand over in different ways, by digest: give all the same")
        whole: torch.Tensor | None = None
        for bucket in buckets(pieces(tensors, self._holders, count, self.bucket_bytes), count, self.bucket_bytes):
            arrived = self._exchanged([piece for piece in bucket if piece.travels])
            for piece in bucket:
                shard = piece.shard
                if shard.home != ranks.own:
                    continue
                if whole is None:
                    whole = torch.zeros(shard.shape, dtype=shard.dtype, device=self.values.device)
                if piece.bytes:
                    piece.put.of(whole).copy_(arrived.pop(id(piece)) if piece.travels else self._held(piece))
                if piece.is_last:
                    try:
                        if error is None:
                            self.receive(shard.rank, shard.name, whole)
                    except Exception as raised:  # by all ranks, once they have theirs
                        error = raised
                    whole = None
            del arrived
        raise_together(error, self.values.mesh)

    def _tensors(self) -> list[list[EngineShard]]:
        """Of the engine. Raises ValueError for what is given wrong."""
        values, width = self.values, self.width
        everyone = values.ranks.everyone
        on = [everyone[rank % len(everyone)] for rank in range(width)] if self.on is None else self.on
        if width < 1 or len(on) % width or not {*on} <= {*everyone} or self.bucket_bytes < 1024:
            raise ValueError(
                f"width={width}, on={on}, bucket_bytes={self.bucket_bytes}: give a width of at least 1, for each engine "
                f"rank (and those of each further copy) one of the ranks {everyone}, and at least 1024 bytes"
            )
        tensors = {name: values[value] for name, value in self.names.items()}
        config, homes = getattr(values.root, "config", None), [*map(everyone.index, on)]
        return [*engine_shards(self.layout, tensors, width, homes, config, self.dtype)]

    def _holders(self, name: str) -> Holders:
        values = self.values
        return holders_of(values.boxes(self.names[name], coordinate) for coordinate in values.ranks.coordinates)

    def _held(self, piece: Piece) -> torch.Tensor:
        """The piece as a view of what this rank holds."""
        return piece.sent.of(local_part(self.values[self.names[piece.source]]))

    def _exchanged(self, travel: Sequence[Piece]) -> dict[int, torch.Tensor]:
        """What others send to this rank, by the id of the piece, as views of one bucket."""
        if not travel:
            return {}
        ranks, device = self.values.ranks, self.values.device
        sent = sorted((p for p in travel if p.sender == ranks.own), key=lambda p: p.shard.home)
        got = sorted((p for p in travel if p.shard.home == ranks.own), key=lambda p: p.sender)
        put, come = [0] * len(ranks.everyone), [0] * len(ranks.everyone)
        for piece in sent:
            put[piece.shard.home] += piece.bytes
        for piece in got:
            come[piece.sender] += piece.bytes
        bucket = torch.empty(sum(put), dtype=torch.uint8, device=device)
        for piece, part in _parts(sent, bucket):
            part.copy_(self._held(piece))
        arrived = ranks.exchange(bucket, put, come, "a bucket of weights that are handed over,")
        return {id(piece): part for piece, part in _parts(got, arrived)}


def _parts(travel: Sequence[Piece], bucket: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece, and where it lies in a bucket."""
    for piece, part in zip(travel, torch.split(bucket, [piece.bytes for piece in travel]), strict=True):
        dtype = piece.shard.dtype
        yield piece, part[: piece.put.elements * dtype.itemsize].view(dtype).view(piece.put.sizes)
