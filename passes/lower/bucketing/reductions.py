"""Reductions that only gradients depend on, in buckets in the order of production.

A bucket starts as soon as it is full. It is finished at the end, or, where a second mesh axis follows, when the next
bucket has been started, or when too much is under way: what a collective reads lies in memory until then.
"""

from collections import Counter
from collections.abc import Sequence

from autopar.ir.dataflow import ending
from autopar.ir.graph import CAST, WAIT, Node, readers
from autopar.ir.program import LAYOUT, REDUCED

from .packing import BucketWriter, Joint

BUCKETS = 8

SMALLER = 4

IN_FLIGHT = 16
"""Reductions under way hold as many times the bytes of a bucket, or are two."""

SMALLEST_BYTES = 2**18
"""Where the reductions of an axis fill fewer buckets than `BUCKETS`, these are smaller, down to a part or to a size."""


UNHIDDEN_ALONE_BYTES = 2**20
"""Where nothing hides, a copy into a bucket keeps the processor from computing as a start does, and so many bytes, in
memory that is mapped first, keep it longer on `local`."""


def reduce(writer: BucketWriter, instructions: Sequence[Node], gradients: Sequence[str]) -> list[Node]:
    """Reductions that only gradients depend on, in buckets in the order of production."""
    writer.written = []
    tail = _Tail(writer, instructions, set(gradients))
    for name in tail.given:
        tail.advance(name)
    for instruction in instructions:
        if instruction.outputs[0] not in tail.levels:
            writer.written.append(instruction)
            for name in instruction.outputs:
                tail.advance(name)
    tail.drain()
    return writer.written


def _moves(node: Node) -> bool:
    """Whether what only gradients depend on may be put off."""
    return node.op in LAYOUT or node.op in (CAST, WAIT) or node.collective in REDUCED


class _Tail:
    """The reductions that only gradients depend on, and what follows them. `levels` counts, for each
    value, the reductions on the way to it."""

    def __init__(self, writer: BucketWriter, instructions: Sequence[Node], gradients: set[str]) -> None:
        self.writer = writer
        every = {name: [instructions[i] for i in positions] for name, positions in readers(instructions).items()}
        self.levels: dict[str, int] = {}
        for instruction in ending(instructions, _moves, gradients):
            before = self.levels.get(instruction.inputs[0])
            if instruction.collective:
                self.levels[instruction.name] = (before or 0) + 1
            elif before is not None:
                self.levels[instruction.name] = before
        self.readers = {n: [r for r in following if r.outputs[0] in self.levels] for n, following in every.items()}
        produced = {name for i in instructions for name in i.outputs}
        self.given = [name for name in every if name not in produced]
        self.limits = self._limits(instructions)
        self.filling: dict[tuple[int, tuple[object, ...]], Joint] = {}
        self.started: dict[int, list[Joint]] = {}

    def _limits(self, instructions: Sequence[Node]) -> dict[str, int]:
        """The bytes of the bucket that each reduction may join: the fewest that its axis wants, and those of the
        reductions after it, which it keeps waiting. Where all fit in a few buckets, these are made smaller, down to a
        part, since the last one hides behind nothing."""
        reductions = [i for i in instructions if i.collective and i.outputs[0] in self.levels]
        total = Counter[int]()
        for reduction in reductions:
            total[reduction.args[-1]] += self.writer.bytes(reduction)
        wanted = {}
        for axis, size in total.items():
            most = self.writer.bucket_bytes[axis]
            smaller = min(most, max(most // SMALLER, size // BUCKETS, SMALLEST_BYTES))
            wanted[axis] = self.writer.limit_bytes if axis in self.writer.unhidden else smaller
        limits: dict[str, int] = {}
        after: dict[str, int] = {}
        for instruction in reversed(instructions):
            name = instruction.outputs[0]
            if name in self.levels:
                following = min(
                    (after[r.outputs[0]] for r in self.readers.get(name, ())), default=self.writer.limit_bytes
                )
                if instruction.collective:
                    following = limits[name] = min(following, wanted[instruction.args[-1]])
                after[name] = following
        return limits

    def advance(self, name: str) -> None:
        """A value is there: what only gradients need of it goes on."""
        for reader in self.readers.get(name, ()):
            if reader.collective:
                self.add(reader)
            elif reader.op != WAIT:
                self.writer.written.append(reader)
                self.advance(reader.outputs[0])

    def add(self, collective: Node) -> None:
        size = self.writer.bytes(collective)
        level = self.levels[collective.outputs[0]]
        unhidden = collective.args[-1] in self.writer.unhidden
        if size >= min(self.writer.alone_bytes, UNHIDDEN_ALONE_BYTES if unhidden else self.writer.limit_bytes):
            self.start(level, Joint([collective], size))
            return
        key = (level, self.writer.key(collective))
        joint = self.filling.get(key)
        if joint is not None and joint.bytes + size > self.limits[collective.outputs[0]]:
            self.start(level, self.filling.pop(key))
            joint = None
        if joint is None:
            joint = self.filling[key] = Joint([], 0)
        joint.members.append(collective)
        joint.bytes += size

    def start(self, level: int, joint: Joint) -> None:
        """Start a bucket; those before it, if reductions follow theirs, are finished meanwhile."""
        self.writer.start(joint)
        before = self.started.setdefault(level, [])
        early = [b for b in before if any(self.goes_on(m.outputs[0]) for m in b.members)]
        self.started[level] = [b for b in before if b not in early] + [joint]
        for b in early:
            self.finish(b)
        under_way = self.started[level]
        while len(under_way) > 2 and sum(b.bytes for b in under_way) > IN_FLIGHT * self.writer.limit_bytes:
            self.finish(under_way.pop(0))

    def goes_on(self, name: str) -> bool:
        return any(r.collective or self.goes_on(r.outputs[0]) for r in self.readers.get(name, ()))

    def finish(self, joint: Joint) -> None:
        self.writer.finish(joint)
        for member in joint.members:
            for wait in self.readers[member.outputs[0]]:
                self.writer.result(joint, wait)
                self.advance(wait.outputs[0])

    def drain(self) -> None:
        """The end of backward: start what is left, and finish everything, level by level."""
        while self.filling or self.started:
            level = min([*(key[0] for key in self.filling), *self.started])
            for key in [key for key in self.filling if key[0] == level]:
                self.start(level, self.filling.pop(key))
            for joint in self.started.pop(level, []):
                self.finish(joint)


SMALL_BYTES = 4 * 2**10
"""An all-reduce of no more than this is all latency."""


def together(writer: BucketWriter, instructions: Sequence[Node], uneven: frozenset[str]) -> list[Node]:
    """Small all-reduces of one key in buckets, each where the last of its members stands. What reads the others
    comes after that, so that no collective in between may."""
    groups = _independent(writer, instructions, uneven)
    writer.written = []
    held: dict[str, Node] = {}  # members that wait for the last one, by their results
    late: list[Node] = []  # what reads them
    missing: set[str] = set()
    started: dict[str, Joint] = {}

    def write(instruction: Node) -> None:
        if not missing.isdisjoint(instruction.inputs):
            late.append(instruction)
            missing.update(instruction.outputs)
        elif instruction.op == WAIT and instruction.inputs[0] in started:
            writer.result(started[instruction.inputs[0]], instruction)
        else:
            writer.written.append(instruction)

    for instruction in instructions:
        name = instruction.outputs[0]
        members = groups.get(name)
        if members is None:
            write(instruction)
            continue
        held[name] = instruction
        missing.add(name)
        if members[-1] is instruction:
            joint = Joint(members, sum(map(writer.bytes, members)))
            writer.start(joint)
            writer.finish(joint)
            for member in members:
                del held[member.outputs[0]]
                started[member.outputs[0]] = joint
            again = list(late)
            late.clear()
            missing = set(held)
            for waiting in again:
                write(waiting)
    return writer.written


def _independent(writer: BucketWriter, instructions: Sequence[Node], uneven: frozenset[str]) -> dict[str, list[Node]]:
    """Small all-reduces, by the names of their results, with those that they can be joined with, itself included.
    None of a group, and no collective between its first and last, depends on another of it."""
    upstream: dict[str, int] = {}  # the small all-reduces that a value depends on, as bits
    open_groups: dict[tuple[object, ...], tuple[int, list[Node]]] = {}
    joinable: dict[str, list[Node]] = {}
    for instruction in instructions:
        mask = 0
        for name in instruction.inputs:
            mask |= upstream.get(name, 0)
        if instruction.collective:
            open_groups = {key: group for key, group in open_groups.items() if not group[0] & mask}
        small = instruction.collective == "all_reduce" and writer.bytes(instruction) <= SMALL_BYTES
        if small and uneven.isdisjoint((*instruction.inputs, *instruction.outputs)):
            bit = 1 << len(joinable)
            bits, members = open_groups.get(writer.key(instruction), (0, []))
            members.append(instruction)
            open_groups[writer.key(instruction)] = (bits | bit, members)
            joinable[instruction.outputs[0]] = members
            mask |= bit
        upstream.update(dict.fromkeys(instruction.outputs, mask))
    return {name: members for name, members in joinable.items() if len(members) > 1}
