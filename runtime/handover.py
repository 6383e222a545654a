"""Weights of a parallel module for an inference engine: each rank sends the boxes that it holds to the ranks whose
engine tensors have them, a bucket at a time, and no rank has more of a tensor than its engine ranks do."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.ir.layout import Shape

from .agreement import all_equal, raise_together, together
from .boxes import Box
from .engines import EngineTensor, engine_tensors
from .messages import MeshRanks
from .places import local_part
from .state_dicts import saved_names
from .values import ModuleValues

BUCKET_BYTES = 64 << 20

Receive = Callable[[int, str, torch.Tensor], object]
"""Of an engine rank, a name and the tensor."""

Tensors = Mapping[Any, torch.Tensor]


class Piece(NamedTuple):
    """A box of a tensor of the model, as it lies in what a rank holds, and in the engine's tensor of another rank, or
    of the same."""

    sender: int
    home: int
    slot: int
    """Which of the homes of engine ranks it is for."""
    source: str
    sent: Box
    put: Box


def pieces(tensor: EngineTensor, homes: Sequence[int], held: Mapping[str, Sequence[Sequence[Box]]]) -> list[Piece]:
    """What an engine's tensor is put together of, by sender and home. `held` are the boxes of the model's tensors that
    each rank holds. Where several hold the same one, a rank takes its own, or else that of the next rank that does: so
    those take turns."""
    made = []
    for slot, home in enumerate(homes):
        for source, wanted in tensor.ranks[slot % len(tensor.ranks)]:
            of_ranks = [*enumerate(held[source])]
            found: dict[tuple[Shape, Shape], int] = {}
            for sender, boxes in of_ranks[home:] + of_ranks[:home]:
                for box in boxes:
                    put = wanted.overlap(box.offsets, box.sizes)
                    if put.elements and found.setdefault((put.offsets, put.sizes), sender) == sender:
                        made.append(Piece(sender, home, slot, source, box.overlap(put.offsets, put.sizes), put))
    return sorted(made, key=lambda piece: piece[:2])


def buckets(travel: Sequence[Piece], elements: float) -> Iterator[list[Piece]]:
    """Equal parts of all pieces, so many that no rank sends and receives more than so many elements of one. Raises
    ValueError where a part would be less than an index of a dim."""
    loads = Counter[int]()
    for piece in travel:
        loads.update(dict.fromkeys(piece[:2], piece.put.elements))
    count = math.ceil(2 * max(loads.values(), default=0) / elements)  # a part may be twice the average
    if any(max(piece.put.sizes) < count for piece in travel):
        raise ValueError(f"bucket_bytes is too small for {travel[0].source}: give {count} times as many")
    for number in range(count):
        yield [p._replace(sent=p.sent.part(number, count), put=p.put.part(number, count)) for p in travel]


@torch.no_grad()
def hand_over(
    values: ModuleValues,
    layout: str,
    receive: Receive,
    width: int,
    on: Sequence[int] | None,
    bucket_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    """All ranks at once. Raises on every rank what any rank raises."""
    ranks, error = values.ranks, None
    with together(values.mesh):
        names = {name: value for value, name in saved_names(values).items()}
        on = [ranks.everyone[rank % len(ranks.everyone)] for rank in range(width)] if on is None else on
        if not on or len(on) % width or not {*on} <= {*ranks.everyone} or bucket_bytes < 1:
            raise ValueError(
                f"width={width}, on={on}, bucket_bytes={bucket_bytes}: give a width and bytes of at least 1, and for each "
                f"engine rank, and each of further copies of the engine, one of the ranks {ranks.everyone}"
            )
        shapes = {name: tuple(values[value].shape) for name, value in names.items()}
        tensors = [*engine_tensors(layout, shapes, width, getattr(values.root, "config", None))]
    given = zlib.crc32(repr((layout, on, width, bucket_bytes, dtype)).encode())
    all_equal(given, values.mesh, "the ranks hand over in different ways, by digest: give all the same arguments")
    homes = [*map(ranks.everyone.index, on)]
    for tensor in tensors:
        local = {source: local_part(values[names[source]]) for source in tensor.sources}
        first = local[tensor.sources[0]]
        kind = dtype if dtype and first.is_floating_point() else first.dtype
        own = [slot for slot, home in enumerate(homes) if home == ranks.own]
        made = {slot: torch.zeros(tensor.shape, dtype=kind, device=values.device) for slot in own}
        held = {source: [values.boxes(names[source], at) for at in ranks.coordinates] for source in tensor.sources}
        program = pieces(tensor, homes, held)
        for piece in program:
            if piece.sender == piece.home == ranks.own:
                piece.put.of(made[piece.slot]).copy_(piece.sent.of(local[piece.source]))
        travel = [piece for piece in program if piece.sender != piece.home]
        for bucket in buckets(travel, bucket_bytes / kind.itemsize):
            _move(bucket, local, made, kind, ranks)
        try:
            for slot in own:
                if error is None:
                    receive(slot % width, tensor.name, made.pop(slot))
        except Exception as raised:  # on all ranks, once they have theirs
            error = raised
    raise_together(error, values.mesh)


def _move(bucket: Sequence[Piece], local: Tensors, made: Tensors, dtype: torch.dtype, ranks: MeshRanks) -> None:
    """From what ranks hold to what engine ranks do."""
    sent, got = ([piece for piece in bucket if piece[end] == ranks.own] for end in (0, 1))
    sizes = [
        [sum(piece.put.elements for piece in way if piece[end] == rank) for rank in range(len(ranks.everyone))]
        for end, way in ((1, sent), (0, got))
    ]
    given = torch.empty(sum(sizes[0]), dtype=dtype, device=ranks.mesh.device_type)
    for piece, part in _parts(sent, given):
        part.copy_(piece.sent.of(local[piece.source]))
    for piece, part in _parts(got, ranks.exchange(given, *sizes, "a bucket of weights that are handed over,")):
        piece.put.of(made[piece.slot]).copy_(part)


def _parts(way: Sequence[Piece], bucket: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece, and where it lies in a bucket."""
    for piece, part in zip(way, bucket.split([piece.put.elements for piece in way]), strict=True):
        yield piece, part.view(piece.put.sizes)
