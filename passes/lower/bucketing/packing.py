"""Packing: collectives of one kind, axis and dtype as one, their operands side by side in a flat tensor.

What comes back is taken apart again; values are the same bit for bit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.emitter import Emitter
from autopar.ir.graph import RESHAPE, WAIT, Node, Ref
from autopar.ir.program import SCATTERED
from autopar.ops.kinds import CAT, SPLIT


@dataclass(eq=False, slots=True)
class Joint:
    """Collectives that start together. `started` is the joint result before its wait, `pieces` what it is
    taken apart into, one a member; both are None until they are written."""

    members: list[Node]
    bytes: int
    started: str | None = None
    pieces: tuple[str, ...] | None = None


NAMED = 3
"""Members of a bucket that are named in what it serves."""


def _served(members: list[Node]) -> str:
    """What a bucket serves."""
    served = (f"{m.serves} of module {m.module!r}" if m.module else m.serves for m in members if m.serves)
    several = list(dict.fromkeys(served))
    more = [f"and {len(several) - NAMED} more"] if len(several) > NAMED else []
    return ", ".join([*several[:NAMED], *more])


@dataclass(eq=False, kw_only=True)
class BucketWriter(Emitter):
    """Writes buckets of collectives of a program."""

    bucket_bytes: tuple[int, ...]
    limit_bytes: int
    alone_bytes: int
    ahead_bytes: int
    unhidden: frozenset[int] = frozenset()
    """Mesh axes on which what travels takes the processors from what is computed."""

    # --- instructions

    def joined(self, op: str, *args: Any, **about: Any) -> str:
        return self.emit(op, args, self.fresh("bucket"), **about)

    def bytes(self, collective: Node) -> int:
        return max(self.metas[name].bytes for name in (*collective.inputs, *collective.outputs))

    def start(self, joint: Joint) -> None:
        """Lay the members side by side, as [ranks, ...] where each rank is sent a part, and communicate."""
        first = joint.members[0]
        if len(joint.members) == 1:
            self.written.append(first)
            joint.started = first.outputs[0]
            return
        kind, axis = first.collective, first.args[-1]
        assert kind is not None
        rows = self.mesh[axis] if kind in SCATTERED else 1
        parts = []
        for member in joint.members:
            (name,) = member.inputs
            parts.append(Ref(self.joined(RESHAPE, Ref(name), (rows, self.metas[name].numel // rows))))
        packed = self.joined(CAT, tuple(parts), 1)
        joint.started = self.joined(first.op, Ref(packed), *first.args[1:], serves=_served(joint.members))

    def finish(self, joint: Joint) -> None:
        """Wait, and take the result apart as [ranks, ...] pieces, one a member."""
        assert joint.started is not None
        if len(joint.members) == 1:
            joint.pieces = (joint.started,)
            return
        result = self.joined(WAIT, Ref(joint.started))
        rows = self.metas[result].shape[0]
        sizes = tuple(self.metas[member.outputs[0]].numel // rows for member in joint.members)
        joint.pieces = tuple(self.fresh("bucket") for _ in sizes)
        self.emit(SPLIT, (Ref(result), sizes, 1), *joint.pieces)

    def result(self, joint: Joint, wait: Node) -> None:
        """The value of one member's wait."""
        if len(joint.members) == 1:
            self.written.append(wait)
            return
        assert joint.pieces is not None
        number = next(i for i, member in enumerate(joint.members) if member.outputs[0] == wait.inputs[0])
        (name,) = wait.outputs
        self.emit(RESHAPE, (Ref(joint.pieces[number]), self.metas[name].shape), name)

    def join(self, collectives: Iterable[Node], limits: Mapping[str, float]) -> list[Joint]:
        """Buckets of collectives of one key, in their order; `limits` are the bytes of the one that each may join."""
        buckets: list[Joint] = []
        last: Joint | None = None
        for collective in collectives:
            size = self.bytes(collective)
            if size >= self.alone_bytes:
                buckets.append(Joint([collective], size))
            elif last is None or last.bytes + size > limits[collective.outputs[0]]:
                buckets.append(last := Joint([collective], size))
            else:
                last.members.append(collective)
                last.bytes += size
        return buckets

    def key(self, collective: Node) -> tuple[object, ...]:
        """What collectives of one bucket have in common."""
        return (collective.op, *collective.args[1:], self.metas[collective.inputs[0]].dtype)
