"""Packing: collectives of one kind, axis and dtype as one, their operands side by side in a flat tensor.

What comes back is taken apart again; values are the same bit for bit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import RESHAPE, WAIT, Node, Ref, TensorMeta
from autopar.ir.program import GATHERED, SCATTERED
from autopar.ir.rewrite import NodeWriter, numbered


@dataclass(eq=False, slots=True)
class Bucket:
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
class BucketWriter(NodeWriter):
    """Writes buckets of collectives of a program."""

    mesh: tuple[int, ...]
    bucket_bytes: tuple[int, ...]
    limit_bytes: int
    alone_bytes: int
    ahead_bytes: int
    unhidden: frozenset[int] = frozenset()
    """Mesh axes on which what travels takes the processors from what is computed."""
    count: int = 0

    # --- instructions

    def fresh(self) -> str:
        name = numbered("bucket", self.metas, start=self.count + 1)
        self.count = int(name.removeprefix("bucket_"))
        return name

    def reshape(self, value: str, shape: tuple[int, ...], name: str | None = None) -> str:
        meta = TensorMeta(shape, self.metas[value].dtype)
        return self.emit(RESHAPE, (Ref(value), shape), (name or self.fresh(), meta))

    def bytes(self, collective: Node) -> int:
        return max(self.metas[name].bytes for name in (*collective.inputs, *collective.outputs))

    def start(self, joint: Bucket) -> None:
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
            parts.append(self.reshape(name, (rows, self.metas[name].numel // rows)))
        dtype = self.metas[parts[0]].dtype
        width = sum(self.metas[part].shape[1] for part in parts)
        args = (tuple(Ref(part) for part in parts), 1)
        packed = self.emit("aten.cat.default", args, (self.fresh(), TensorMeta((rows, width), dtype)))
        meta = TensorMeta((self.mesh[axis] if kind in GATHERED else 1, width), dtype)
        joint.started = self.emit(
            first.op, (Ref(packed), *first.args[1:]), (self.fresh(), meta), serves=_served(joint.members)
        )

    def finish(self, joint: Bucket) -> None:
        """Wait, and take the result apart as [ranks, ...] pieces, one a member."""
        assert joint.started is not None
        if len(joint.members) == 1:
            joint.pieces = (joint.started,)
            return
        meta = self.metas[joint.started]
        result = self.emit(WAIT, (Ref(joint.started),), (self.fresh(), meta))
        rows = meta.shape[0]
        sizes = tuple(self.metas[member.outputs[0]].numel // rows for member in joint.members)
        pieces = [(self.fresh(), TensorMeta((rows, size), meta.dtype)) for size in sizes]
        self.emit("aten.split_with_sizes.default", (Ref(result), sizes, 1), *pieces)
        joint.pieces = tuple(name for name, _ in pieces)

    def result(self, joint: Bucket, wait: Node) -> None:
        """The value of one member's wait."""
        if len(joint.members) == 1:
            self.written.append(wait)
            return
        assert joint.pieces is not None
        number = next(i for i, member in enumerate(joint.members) if member.outputs[0] == wait.inputs[0])
        self.reshape(joint.pieces[number], self.metas[wait.outputs[0]].shape, wait.outputs[0])

    def join(self, collectives: Iterable[Node], limits: Mapping[str, float]) -> list[Bucket]:
        """Buckets of collectives of one key, in their order; `limits` are the bytes of the one that each may join."""
        buckets: list[Bucket] = []
        last: Bucket | None = None
        for collective in collectives:
            size = self.bytes(collective)
            if size >= self.alone_bytes:
                buckets.append(Bucket([collective], size))
            elif last is None or last.bytes + size > limits[collective.outputs[0]]:
                buckets.append(last := Bucket([collective], size))
            else:
                last.members.append(collective)
                last.bytes += size
        return buckets

    def key(self, collective: Node) -> tuple[object, ...]:
        """What collectives of one bucket have in common."""
        return (collective.op, *collective.args[1:], self.metas[collective.inputs[0]].dtype)
