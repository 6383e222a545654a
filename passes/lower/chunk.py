"""Chunk: a stretch of a program from one collective through others runs in chunks of the batch, so that the
communication of one chunk is under way while another one is computed (ATP 4.2, Fig. 8).

What stands between two collectives of a layer is a chain: nothing of it can run while the collective before it travels.
Where every operator of the stretch acts on a dim index by index (its rule has a factor there), two or four chunks of
that dim are chains that do not wait for each other. The result is laid side by side again at the end.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.dataflow import leading
from autopar.ir.graph import Node
from autopar.ir.layout import Split

from .adopt import InParts, Place, Way
from .regions import Metas
from .slice import Around

CHUNKS = (2, 4)
THROUGH = (1, 2)
"""Collectives after the first one that a stretch goes through."""
LONGEST = 200
"""Instructions from the first to the last of a stretch."""


def places(half: Sequence[Node], metas: Metas, wanted: Container[str] | None = None) -> Iterator[Place]:
    """Stretches from a collective through the next ones, with the ways to cut them; of some collectives, by the names
    of their results, or of all."""
    around = Around(half, metas)
    for position, instruction in enumerate(half):
        if not instruction.collective or (wanted is not None and instruction.outputs[0] not in wanted):
            continue
        if ways := tuple(_ways(around, position)):
            yield Place(collective=instruction.outputs[0], ways=ways)


def _ways(around: Around, position: int) -> Iterator[Way]:
    start = around.start(position)
    seed = around.half[min(start)].inputs[0]
    behind = _behind(around, position)
    collectives = [m for m in behind if around.half[m].collective]
    for through in THROUGH:
        if through <= len(collectives):
            last = around.wait_of(collectives[through - 1])
            members = tuple(sorted(start | _between(around, behind, position, last)))
            if any(around.is_product(m) for m in members):
                for dim, size in enumerate(around.metas[seed].shape):
                    if size > 1:
                        yield Way(members=members, seed=seed, cut=Split(dim, size))


def _behind(around: Around, position: int) -> list[int]:
    """What depends on a collective, in order, as far as a stretch goes."""
    values = set(around.half[position].outputs)
    behind = [position]
    for later in range(position + 1, min(len(around.half), position + LONGEST)):
        instruction = around.half[later]
        if not values.isdisjoint(instruction.inputs):
            values.update(name for name in instruction.outputs if name)
            behind.append(later)
    return behind


def _between(around: Around, behind: Sequence[int], first: int, last: int) -> set[int]:
    """Of what depends on the first, what the last depends on."""
    made = {name: position for position in behind for name in around.half[position].outputs}
    wanted = {last} | leading(around.half, around.half[last].inputs, made=made)
    return wanted if first in wanted else set()


@dataclass(frozen=True, kw_only=True)
class Chunk(InParts):
    """Stretches between collectives run in chunks of a dim that all their operators share."""

    places = staticmethod(places)
    numbers = CHUNKS
    name = "chunk"


CHUNKING = Chunk()
