"""Bucket: gathers of parameters and reductions of gradients travel together, and early.

One collective a gradient is slow (each pays its latency); this pass joins those of one kind, axis and
dtype into collectives of up to `bucket_bytes`. Values are the same bit for bit: members are laid side
by side in a flat tensor, communicated at once, and taken apart again. What is large enough to hide a
latency travels alone, without the copies that a bucket needs.

Four kinds of collectives are told apart:

- *reductions*, in backward, that only gradients depend on: started as soon as a bucket is full,
  finished at the end, or, where a second mesh axis follows, when the next bucket has been started;
- *gathers* of parameters as they rest, in forward and again in backward: bucketed in the order of
  first use and started ahead of it, with at most `ahead_bytes` in flight that are not yet used; over two mesh
  axes, what was gathered on the first goes on while the bucket before it is computed with;
- small all-reduces in forward (all latency), several parts of a loss, say: those that do not depend on each other
  travel where the last of them stands;
- all others stay where they are, and are waited for just before their first reader.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.program import Instruction, Program

logger = logging.getLogger("autopar")

LIMIT_BYTES = 25 * 2**20
ALONE_BYTES = 4 * 2**20
SMALL_BYTES = 4 * 2**10
BUCKETS = 8
SMALLER = 4
SMALLEST_BYTES = 2**18
"""Where the reductions of an axis fill fewer buckets than `BUCKETS`, these are smaller, down to a part or to a size."""
WAIT = "collective.wait"
LAYOUT = frozenset({"aten.contiguous.default", "aten.permute.default", "aten.reshape.default", "aten.select.int"})
"""Local ops of one tensor that codegen puts around collectives."""
SCATTERED = ("reduce_scatter", "all_to_all")
"""Kinds that send an equal part of dim 0 to each rank."""
REDUCED = ("all_reduce", "reduce_scatter", "all_gather")
"""Kinds that a reduction over several axes is made of."""
GATHERED = ("all_gather", "all_to_all")
"""Kinds whose result has a part from each rank along dim 0."""


def bucket(
    program: Program,
    bucket_bytes: Sequence[int] = (),
    *,
    limit_bytes: int = LIMIT_BYTES,
    alone_bytes: int = ALONE_BYTES,
    ahead_bytes: int | None = None,
) -> Program:
    """The program with its parameter and gradient collectives in buckets, and each wait just before
    the first reader.

    A bucket on mesh axis `a` holds at most `bucket_bytes[a]` (of the larger of what goes in and comes out), and
    `limit_bytes` in any case; a collective of `alone_bytes` or more is in no bucket, but starts and ends as one would.
    Gathers that are started and not yet read have at most `ahead_bytes` (`limit_bytes` if not given), or are two.
    """
    parameters = {i.name for i in program.inputs if i.role == "parameter"}
    made = [o.name for o in program.outputs if o.role != "gradient" and o.name is not None]
    gradients = [o.name for o in program.outputs if o.name is not None and o.role == "gradient"]
    limits = tuple(min(limit_bytes, size) for size in bucket_bytes or (limit_bytes,) * len(program.mesh))
    alone = min(alone_bytes, limit_bytes)
    writer = _Writer(program.mesh, dict(program.metas), limits, limit_bytes, alone, ahead_bytes or limit_bytes)
    forward = writer.gather(writer.together(program.forward, program.uneven), parameters, [*made, *program.saved])
    backward = writer.gather(program.backward, parameters, gradients)
    backward = writer.reduce(backward, gradients)
    bucketed = replace(program, forward=tuple(forward), backward=tuple(backward), metas=writer.metas)
    if changes := _changes(program, bucketed):
        logger.info("bucket: %s", changes)
    return bucketed


def _changes(before: Program, after: Program) -> str:
    counts = [Counter(kind for kind, _, _ in program.collectives()) for program in (before, after)]
    return ", ".join(f"{n} {kind} -> {counts[1][kind]}" for kind, n in counts[0].items() if n != counts[1][kind])


@dataclass(eq=False, slots=True)
class _Bucket:
    """Collectives that start together. `started` is the joint result before its wait, `pieces` what it is
    taken apart into, one a member; both are None until they are written."""

    members: list[Instruction]
    bytes: int
    started: str | None = None
    pieces: tuple[str, ...] | None = None


NAMED = 3
"""Members of a bucket that are named in what it serves."""


def _together(members: list[Instruction]) -> str:
    """What a bucket serves."""
    served = (f"{m.node} of module {m.module!r}" if m.module else m.node for m in members if m.node)
    several = list(dict.fromkeys(served))
    more = [f"and {len(several) - NAMED} more"] if len(several) > NAMED else []
    return ", ".join([*several[:NAMED], *more])


@dataclass(eq=False)
class _Writer:
    mesh: tuple[int, ...]
    metas: dict[str, TensorMeta]
    bucket_bytes: tuple[int, ...]
    limit_bytes: int
    alone_bytes: int
    ahead_bytes: int
    written: list[Instruction] = field(default_factory=list)
    count: int = 0

    # --- instructions

    def emit(self, op: str, args: tuple[object, ...], *outputs: tuple[str, TensorMeta], serves: str = "") -> str:
        names = tuple(name for name, _ in outputs)
        self.metas.update(outputs)
        self.written.append(Instruction(op=op, args=args, outputs=names, node=serves))
        return names[0]

    def fresh(self) -> str:
        while True:
            self.count += 1
            if (name := f"bucket_{self.count}") not in self.metas:
                return name

    def reshape(self, value: str, shape: tuple[int, ...], name: str | None = None) -> str:
        meta = TensorMeta(shape, self.metas[value].dtype)
        return self.emit("aten.reshape.default", (Ref(value), shape), (name or self.fresh(), meta))

    def bytes(self, collective: Instruction) -> int:
        return max(self.metas[name].bytes for name in (*collective.inputs, *collective.outputs))

    def start(self, joint: _Bucket) -> None:
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
            first.op, (Ref(packed), *first.args[1:]), (self.fresh(), meta), serves=_together(joint.members)
        )

    def finish(self, joint: _Bucket) -> None:
        """Wait, and take the result apart as [ranks, ...] pieces, one a member."""
        assert joint.started is not None
        if len(joint.members) == 1:
            joint.pieces = (joint.started,)
            return
        meta = self.metas[joint.started]
        whole = self.emit(WAIT, (Ref(joint.started),), (self.fresh(), meta))
        rows = meta.shape[0]
        sizes = tuple(self.metas[member.outputs[0]].numel // rows for member in joint.members)
        pieces = [(self.fresh(), TensorMeta((rows, size), meta.dtype)) for size in sizes]
        self.emit("aten.split_with_sizes.default", (Ref(whole), sizes, 1), *pieces)
        joint.pieces = tuple(name for name, _ in pieces)

    def result(self, joint: _Bucket, wait: Instruction) -> None:
        """The value of one member's wait."""
        if len(joint.members) == 1:
            self.written.append(wait)
            return
        assert joint.pieces is not None
        number = next(i for i, member in enumerate(joint.members) if member.outputs[0] == wait.inputs[0])
        self.reshape(joint.pieces[number], self.metas[wait.outputs[0]].shape, wait.outputs[0])

    def join(self, collectives: Iterable[Instruction], limits: Mapping[str, float]) -> list[_Bucket]:
        """Buckets of collectives of one key, in their order; `limits` are the bytes of the one that each may join."""
        made: list[_Bucket] = []
        last: _Bucket | None = None
        for collective in collectives:
            size = self.bytes(collective)
            if size >= self.alone_bytes:
                made.append(_Bucket([collective], size))
            elif last is None or last.bytes + size > limits[collective.outputs[0]]:
                made.append(last := _Bucket([collective], size))
            else:
                last.members.append(collective)
                last.bytes += size
        return made

    def key(self, collective: Instruction) -> tuple[object, ...]:
        """What collectives of one bucket have in common."""
        return (collective.op, *collective.args[1:], self.metas[collective.inputs[0]].dtype)

    # --- small all-reduces

    def together(self, instructions: Sequence[Instruction], uneven: frozenset[str]) -> list[Instruction]:
        """Small all-reduces of one key in buckets, each where the last of its members stands. What reads the others
        comes after that, so that no collective in between may."""
        groups = self._independent(instructions, uneven)
        self.written = []
        held: dict[str, Instruction] = {}  # members that wait for the last one, by what they make
        late: list[Instruction] = []  # what reads them
        missing: set[str] = set()
        started: dict[str, _Bucket] = {}

        def write(instruction: Instruction) -> None:
            if not missing.isdisjoint(instruction.inputs):
                late.append(instruction)
                missing.update(instruction.outputs)
            elif instruction.op == WAIT and instruction.inputs[0] in started:
                self.result(started[instruction.inputs[0]], instruction)
            else:
                self.written.append(instruction)

        for instruction in instructions:
            name = instruction.outputs[0]
            members = groups.get(name)
            if members is None:
                write(instruction)
                continue
            held[name] = instruction
            missing.add(name)
            if members[-1] is instruction:
                joint = _Bucket(members, sum(map(self.bytes, members)))
                self.start(joint)
                self.finish(joint)
                for member in members:
                    del held[member.outputs[0]]
                    started[member.outputs[0]] = joint
                again = list(late)
                late.clear()
                missing = set(held)
                for waiting in again:
                    write(waiting)
        return self.written

    def _independent(self, instructions: Sequence[Instruction], uneven: frozenset[str]) -> dict[str, list[Instruction]]:
        """Small all-reduces, by the names of their results, with those that they can be joined with, itself included.
        None of a group, and no collective between its first and last, depends on another of it."""
        upstream: dict[str, int] = {}  # the small all-reduces that a value depends on, as bits
        open_groups: dict[tuple[object, ...], tuple[int, list[Instruction]]] = {}
        found: dict[str, list[Instruction]] = {}
        for instruction in instructions:
            mask = 0
            for name in instruction.inputs:
                mask |= upstream.get(name, 0)
            if instruction.collective:
                open_groups = {key: group for key, group in open_groups.items() if not group[0] & mask}
            small = instruction.collective == "all_reduce" and self.bytes(instruction) <= SMALL_BYTES
            if small and uneven.isdisjoint((*instruction.inputs, *instruction.outputs)):
                bit = 1 << len(found)
                bits, members = open_groups.get(self.key(instruction), (0, []))
                members.append(instruction)
                open_groups[self.key(instruction)] = (bits | bit, members)
                found[instruction.outputs[0]] = members
                mask |= bit
            upstream.update(dict.fromkeys(instruction.outputs, mask))
        return {name: members for name, members in found.items() if len(members) > 1}

    # --- gathers

    def gather(
        self, instructions: Sequence[Instruction], parameters: set[str], kept: Sequence[str]
    ) -> list[Instruction]:
        """Gathers of parameters in buckets, ahead of first use; waits and layouts just before theirs."""
        self.written = []
        lazy = _Lazy(self, instructions, parameters)
        starts: dict[int, list[_Bucket]] = {}
        for time, joint in lazy.schedule():
            starts.setdefault(time, []).append(joint)
        for time, instruction in enumerate(instructions):
            for joint in starts.get(time, ()):
                lazy.start(joint)
            if instruction.outputs[0] not in lazy.delayed:
                for name in instruction.inputs:
                    lazy.ensure(name)
                self.written.append(instruction)
        for name in kept:
            lazy.ensure(name)
        lazy.finish()
        return self.written

    # --- reductions

    def reduce(self, instructions: Sequence[Instruction], gradients: Sequence[str]) -> list[Instruction]:
        """Reductions that only gradients depend on, in buckets in the order of production."""
        self.written = []
        tail = _Tail(self, instructions, set(gradients))
        for name in tail.given:
            tail.made(name)
        for instruction in instructions:
            if instruction.outputs[0] not in tail.levels:
                self.written.append(instruction)
                for name in instruction.outputs:
                    tail.made(name)
        tail.drain()
        return self.written


class _Lazy:
    """What of a list is delayed until it is read: waits, layouts of waited or gathered values, and
    gathers of parameters, which start when `schedule` says."""

    def __init__(self, writer: _Writer, instructions: Sequence[Instruction], parameters: set[str]) -> None:
        self.writer, self.instructions = writer, instructions
        self.producer = {name: i for i in instructions for name in i.outputs if name}
        head: set[str] = set()  # values made from one parameter by gathers and layouts
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
            elif instruction.op in LAYOUT and from_parameter:
                depths[name] = depths[source]
                head.add(name)
            elif instruction.op == WAIT or (instruction.op in LAYOUT and source in self.delayed):
                self.delayed.add(name)
                if from_parameter:
                    depths[name] = depths[source]
                    head.add(name)
        self.delayed |= head
        self.buckets: dict[str, _Bucket] = {}
        self.done: set[str] = set()

    def schedule(self) -> list[tuple[int, _Bucket]]:
        """(index of the instruction before which it starts, bucket), in the order of starting.

        A bucket starts as early as `ahead_bytes` hold it and all that are started and not yet read;
        at the latest when the bucket before it is first read.
        """
        needed = self._needed()
        height, limits = self._heights(), self._limits()
        starts: list[tuple[int, int, _Bucket]] = []
        for level in range(max(height.values(), default=-1) + 1):
            groups: dict[tuple[object, ...], list[Instruction]] = {}
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
                    # to start it is to wait for another gather: not before what can be computed meanwhile
                    time = max(time, (need[id(joints[number - 1])] + need[id(joint)]) // 2)
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

    def _upstream(self, gather: Instruction) -> list[str]:
        found = self._nearest(gather.inputs[0])
        return [] if found is None else [found]

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

    def start(self, joint: _Bucket) -> None:
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


class _Tail:
    """The reductions that only gradients depend on, and what follows them. `levels` counts, for each
    value, the reductions on the way to it."""

    def __init__(self, writer: _Writer, instructions: Sequence[Instruction], gradients: set[str]) -> None:
        self.writer = writer
        readers: dict[str, list[Instruction]] = {}
        for instruction in instructions:
            for name in dict.fromkeys(instruction.inputs):
                readers.setdefault(name, []).append(instruction)
        only: set[str] = set()
        for instruction in reversed(instructions):
            name = instruction.outputs[0]
            movable = instruction.op in LAYOUT or instruction.op == WAIT
            movable |= instruction.collective in REDUCED
            used = name in gradients or name in readers
            if movable and used and all(reader.outputs[0] in only for reader in readers.get(name, ())):
                only.add(name)
        self.levels: dict[str, int] = {}
        for instruction in instructions:
            name = instruction.outputs[0]
            if name in only:
                before = self.levels.get(instruction.inputs[0])
                if instruction.collective:
                    self.levels[name] = (before or 0) + 1
                elif before is not None:
                    self.levels[name] = before
        self.readers = {n: [r for r in found if r.outputs[0] in self.levels] for n, found in readers.items()}
        produced = {name for i in instructions for name in i.outputs}
        self.given = [name for name in readers if name not in produced]
        self.limits = self._limits(instructions)
        self.filling: dict[tuple[int, tuple[object, ...]], _Bucket] = {}
        self.started: dict[int, list[_Bucket]] = {}

    def _limits(self, instructions: Sequence[Instruction]) -> dict[str, int]:
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
            wanted[axis] = min(most, max(most // SMALLER, size // BUCKETS, SMALLEST_BYTES))
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

    def made(self, name: str) -> None:
        """A value is there: what only gradients need of it goes on."""
        for reader in self.readers.get(name, ()):
            if reader.collective:
                self.add(reader)
            elif reader.op != WAIT:
                self.writer.written.append(reader)
                self.made(reader.outputs[0])

    def add(self, collective: Instruction) -> None:
        size = self.writer.bytes(collective)
        level = self.levels[collective.outputs[0]]
        if size >= self.writer.alone_bytes:
            self.start(level, _Bucket([collective], size))
            return
        key = (level, self.writer.key(collective))
        joint = self.filling.get(key)
        if joint is not None and joint.bytes + size > self.limits[collective.outputs[0]]:
            self.start(level, self.filling.pop(key))
            joint = None
        if joint is None:
            joint = self.filling[key] = _Bucket([], 0)
        joint.members.append(collective)
        joint.bytes += size

    def start(self, level: int, joint: _Bucket) -> None:
        """Start a bucket; those before it, if reductions follow theirs, are finished meanwhile."""
        self.writer.start(joint)
        before = self.started.setdefault(level, [])
        early = [b for b in before if any(self.goes_on(m.outputs[0]) for m in b.members)]
        self.started[level] = [b for b in before if b not in early] + [joint]
        for b in early:
            self.finish(b)

    def goes_on(self, name: str) -> bool:
        return any(r.collective or self.goes_on(r.outputs[0]) for r in self.readers.get(name, ()))

    def finish(self, joint: _Bucket) -> None:
        self.writer.finish(joint)
        for member in joint.members:
            for wait in self.readers[member.outputs[0]]:
                self.writer.result(joint, wait)
                self.made(wait.outputs[0])

    def drain(self) -> None:
        """The end of backward: start what is left, and finish everything, level by level."""
        while self.filling or self.started:
            level = min([*(key[0] for key in self.filling), *self.started])
            for key in [key for key in self.filling if key[0] == level]:
                self.start(level, self.filling.pop(key))
            for joint in self.started.pop(level, []):
                self.finish(joint)
