"""Weights of a parallel module for an inference engine: each rank sends the boxes that it holds to the ranks whose
engine tensors have them, a bucket at a time, and no rank has more of a tensor than its engine ranks do."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from .agreement import all_equal, raise_together, together
from .engines import engine_tensors
from .pieces import Piece, pieces
from .state_dicts import saved_names
from .values import ModuleValues

Receive = Callable[[int, str, torch.Tensor], object]
"""Of an engine rank, a name and the tensor."""


def buckets(program: Sequence[Piece], elements: float) -> Iterator[list[Piece]]:
    """Equal parts of all pieces, so many that no rank sends and receives more than so many elements at once, unless
    there are more parts than indices of a piece's longest dim. What is sent is there twice while it is packed."""
    loads = Counter[int]()
    for piece in program:
        if piece.sender != piece.home:
            loads.update({piece.sender: 2 * piece.put.elements, piece.home: piece.put.elements})
    count = math.ceil(2 * max(loads.values(), default=elements / 2) / elements)  # some are twice the average
    for number in range(count):
        yield [p._replace(sent=p.sent.part(number, count), put=p.put.part(number, count)) for p in program]


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
        tensors = {name: values[value] for name, value in names.items()}
        on = [ranks.everyone[rank % len(ranks.everyone)] for rank in range(width)] if on is None else on
        if min(width, len(on), bucket_bytes) < 1 or len(on) % width or {*on} - {*ranks.everyone}:
            raise ValueError(
                f"width={width}, on={on}, bucket_bytes={bucket_bytes}: give a width and bytes of at least 1, and for "
                f"each engine rank, and each of further copies of the engine, one of the ranks {ranks.everyone}"
            )
        program = [*engine_tensors(layout, tensors, width, getattr(values.root, "config", None))]
    given = zlib.crc32(repr((layout, on, width, bucket_bytes, dtype)).encode())
    all_equal(given, values.mesh, "the ranks hand over in different ways, by digest: give all the same arguments")
    homes = [*enumerate(map(ranks.everyone.index, on))]
    for tensor in program:
        kind = dtype or tensors[tensor.sources[0]].dtype
        made = {
            slot: torch.zeros(tensor.shape, dtype=kind, device=values.device)
            for slot, home in homes
            if home == ranks.own
        }
        boxes = {source: [values.boxes(names[source], at) for at in ranks.coordinates] for source in tensor.sources}
        wanted = [(home, slot, *each) for slot, home in homes for each in tensor.ranks[slot % width]]
        for bucket in buckets(pieces(wanted, boxes), bucket_bytes / kind.itemsize):
            ranks.move(bucket, tensors, made, kind)
        try:
            for slot in [*made]:
                if error is None:
                    receive(slot % width, tensor.name, made.pop(slot))
        except Exception as raised:  # on all ranks, once they have theirs
            error = raised
    raise_together(error, values.mesh)
