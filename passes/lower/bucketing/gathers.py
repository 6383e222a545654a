"""Gathers of parameters as they rest, in buckets in the order of first use, each started ahead of it.

At most `ahead_bytes` are in flight that are not yet used. Over two mesh axes, what was gathered on the first goes on
while the bucket before it is computed with.
"""

from collections.abc import Sequence

from autopar.ir.graph import WAIT, Node
from autopar.ir.program import GATHERED, LAYOUT
from autopar.ops.float8 import CASTS

from .packing import BucketWriter, Joint


def gather(writer: BucketWriter, instructions: Sequence[Node], parameters: set[str], kept: Sequence[str]) -> list[Node]:
    """Gathers of parameters in buckets, ahead of first use; waits and layouts just before theirs."""
    writer.written = []
    lazy = _Lazy(writer, instructions, parameters)
    starts: dict[int, list[Joint]] = {}
    for time, joint in lazy.schedule():
        starts.setdefault(time, []).append(joint)
    for time, instruction in enumerate(instructions):
        for joint in starts.get(time, ()):
            lazy.start(joint)
        if instruction.outputs[0] not in lazy.delayed:
            for name in instruction.inputs:
                lazy.ensure(name)
            writer.written.append(instruction)
    for name in kept:
        lazy.ensure(name)
    lazy.finish()
    return writer.written


class _Lazy:
    """What of a list is delayed until it is read: waits, layouts of waited or gathered values, and
    gathers of parameters, which start when `schedule` says."""

    def __init__(self, writer: BucketWriter, instructions: Sequence[Node], parameters: set[str]) -> None:
        self.writer, self.instructions = writer, instructions
        self.producer = {name: i for i in instructions for name in i.outputs if name}
        head: set[str] = set()  # values of one parameter, by way of casts, gathers and layouts
        self.depth: dict[str, int] = {}
        """Gather -> gathers of the same parameter before it."""
        self.delayed: set[str] = set()
        depths = dict.fromkeys(parameters, 0)
        for instruction in instructions:
            source = instruction.inputs[0] if len(instruction.inputs) == 1 else ""
            name = instruction.outputs[0]
            from_parameter = source in parameters or source in head
            if instruction.collective in GATHERED and from_parameter:
                self.depth[name] = depths[source]
                depths[name] = depths[source] + 1
                head.add(name)
            elif (instruction.op in LAYOUT or instruction.op in CASTS) and from_parameter:
                depths[name] = depths[source]
                head.add(name)
            elif instruction.op == WAIT or (instruction.op in LAYOUT and source in self.delayed):
                self.delayed.add(name)
                if from_parameter:
                    depths[name] = depths[source]
                    head.add(name)
        self.delayed |= head
        self.buckets: dict[str, Joint] = {}
        self.done: set[str] = set()

    def schedule(self) -> list[tuple[int, Joint]]:
        """(index of the instruction before which it starts, bucket), in the order of starting.

        A bucket starts as early as `ahead_bytes` hold it and all that are started and not yet read;
        at the latest when the bucket before it is first read.
        """
        needed = self._needed()
        height, limits = self._heights(), self._limits()
        starts: list[tuple[int, int, Joint]] = []
        for level in range(max(height.values(), default=-1) + 1):
            groups: dict[tuple[object, ...], list[Node]] = {}
            here = [name for name, h in height.items() if h == level and name in needed]
            for name in sorted(here, key=lambda n: needed[n]):
                gather = self.producer[name]
                groups.setdefault((self.depth[name], *self.writer.key(gather)), []).append(gather)
            joints = [joint for group in groups.values() for joint in self.writer.join(group, limits)]
            need = {id(j): min(needed[m.outputs[0]] for m in j.members) for j in joints}
            joints.sort(key=lambda j: need[id(j)])
            for number, joint in enumerate(joints):
                ahead, first = joint.bytes, number - 1
                while first >= 0 and ahead + joints[first].bytes <= self.writer.ahead_bytes:
                    ahead += joints[first].bytes
                    first -= 1
                time = need[id(joints[first])] if first >= 0 else 0
                if number and any(map(self._upstream, joint.members)):
                    # to start it is to wait for another gather, which passes while the bucket before is computed with
                    time = max(time, need[id(joints[max(number - 2, 0)])])
                    time = min(time + 1, need[id(joint)])
                starts.append((time, -level, joint))
                for member in joint.members:
                    self.buckets[member.outputs[0]] = joint
                    for upstream in self._upstream(member):
                        needed[upstream] = min(needed.get(upstream, time), time)
        starts.sort(key=lambda s: s[:2])
        return [(time, joint) for time, _, joint in starts]

    def _needed(self) -> dict[str, int]:
        """Gather -> index of the first instruction that reads its result, later gathers aside; those
        that nothing reads here are needed at the end."""
        needed: dict[str, int] = {}
        for time, instruction in enumerate(self.instructions):
            if instruction.outputs[0] not in self.delayed:
                for name in instruction.inputs:
                    if gather := self._nearest(name):
                        needed.setdefault(gather, time)
        read = {upstream for name in self.depth for upstream in self._upstream(self.producer[name])}
        for name in self.depth:
            if name not in read:
                needed.setdefault(name, len(self.instructions) - 1)
        return needed

    def _nearest(self, name: str) -> str | None:
        """The last gather on the way to a delayed value."""
        while name in self.producer and name in self.delayed:
            if name in self.depth:
                return name
            name = self.producer[name].inputs[0]
        return None

    def _upstream(self, gather: Node) -> list[str]:
        nearest = self._nearest(gather.inputs[0])
        return [] if nearest is None else [nearest]

    def _limits(self) -> dict[str, float]:
        """The bytes of the bucket that each gather may join: what its axis wants, and no more than comes of a bucket of
        the gather before it."""
        limits: dict[str, float] = {}
        for name in self.depth:
            gather = self.producer[name]
            limits[name] = self.writer.bucket_bytes[gather.args[-1]]
            for upstream in self._upstream(gather):
                grown = self.writer.bytes(gather) / self.writer.bytes(self.producer[upstream])
                limits[name] = min(limits[name], limits[upstream] * grown)
        return limits

    def _heights(self) -> dict[str, int]:
        """Gather -> gathers of the same parameter after it."""
        height = dict.fromkeys(self.depth, 0)
        for name in reversed(list(self.depth)):
            for upstream in self._upstream(self.producer[name]):
                height[upstream] = max(height[upstream], height[name] + 1)
        return height

    def start(self, joint: Joint) -> None:
        if joint.started is None:
            for member in joint.members:
                self.ensure(member.inputs[0])
            self.writer.start(joint)

    def finish(self) -> None:
        """Wait for what nothing reads (an operator on shards may have no use for an operand): a collective that is
        begun is finished."""
        for instruction in self.instructions:
            if instruction.op == WAIT:
                joint = self.buckets.get(instruction.inputs[0])
                if joint is None or joint.pieces is None:
                    self.ensure(instruction.outputs[0])

    def ensure(self, name: str) -> None:
        """Write what a delayed value still needs."""
        if name not in self.delayed or name in self.done:
            return
        self.done.add(name)
        instruction = self.producer[name]
        if name in self.buckets:
            self.start(self.buckets[name])
            return
        source = instruction.inputs[0]
        if instruction.op == WAIT and source in self.buckets:
            joint = self.buckets[source]
            self.start(joint)
            if joint.pieces is None:
                self.writer.finish(joint)
            self.writer.result(joint, instruction)
            return
        self.ensure(source)
        self.writer.written.append(instruction)
