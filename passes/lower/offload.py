"""Offload: some of what forward keeps for backward waits in the host's memory.

A copy starts as soon as a value is made, and one back ahead of its first reader, both on the host's link, which is a
stream of its own. Of what could leave, that leaves which the link can take while the device computes; what is still
missing is the oldest of the rest, which backward reads last. On a device that does not say its rate all may leave, the
oldest first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.liveness import Memory
from autopar.cost.streams import alone_seconds
from autopar.ir.emitter import Emitter
from autopar.ir.graph import WAIT, Node, Ref, readers
from autopar.ir.program import Program
from autopar.ir.rewrite import reading
from autopar.ops.host import FROM_HOST, TO_HOST

from .lowering import Adopted, Rewrite, Target

LEAST_PART = 1 / 256
"""Of the largest value that could leave: what is smaller stays, since each copy has a start of its own."""

UNDER_WAY = 2
"""Copies at once: the next one starts while one is under way, and what they read or make lies in memory."""


@dataclass(frozen=True)
class Offload(Rewrite):
    """At least so many bytes of what is kept for backward leave for the host, or all that can."""

    bytes: int = 0
    name = "offload"

    def __call__(self, program: Program, target: Target) -> Program:
        leaving = _leaving(program, self.bytes, target)
        return _copied(program, leaving) if leaving else program


def as_asked(program: Program, target: Target) -> Adopted:
    """So many bytes leave as the target says."""
    rewrites = (Offload(target.offload_bytes),) if target.offload_bytes else ()
    return Adopted(given=program, rewrites=rewrites, target=target)


def _leaving(program: Program, size: int, target: Target) -> list[str]:
    """The values that leave, in the order in which forward makes them."""
    able, device = _able(program, target), target.cluster.device
    seconds = alone_seconds(program, target.cluster, target.cache)
    now = free = 0.0
    first: list[str] = []
    for node in program.forward:
        now += seconds.get(node.name, 0.0) if not node.collective else 0.0
        for name in node.outputs:
            if name in able and free <= now:
                first.append(name)
                free = now + (device.host_seconds(able[name]) if device.host_bytes_per_second else 0.0)
    taken: list[str] = []
    for name in (*first, *(name for name in able if name not in set(first))):
        if size <= 0:
            break
        taken.append(name)
        size -= able[name]
    return [name for name in able if name in set(taken)]


def _able(program: Program, target: Target) -> dict[str, int]:
    """The values that could leave, each with its bytes: forward makes them, backward reads them, and nothing else holds
    their memory."""
    memory = Memory.of(program, program.forward, target.cache.placements)
    outside = {i.name for i in program.inputs} | {o.name for o in program.outputs if o.name}
    saved = [memory.storages[name][0] for name in program.saved]
    held = {memory.storages[name][0] for name in outside if name in memory.storages}
    held |= {storage for storage in saved if saved.count(storage) > 1}
    able: dict[str, int] = {}
    kept = {*program.saved} - outside - program.uneven
    for name in (name for node in program.forward for name in node.outputs if name in kept):
        size = program.metas[name].bytes
        if memory.storages[name][0] not in held and memory.bytes[memory.storages[name][0]] == size:
            able[name] = size
    least = LEAST_PART * max(able.values(), default=0)
    return {name: size for name, size in able.items() if size >= least}


def _copied(program: Program, leaving: Sequence[str]) -> Program:
    writer = Emitter(metas=dict(program.metas), taken={i.name for i in program.inputs})
    homes = _sent(program, leaving, writer)
    forward, writer.written = tuple(writer.written), []
    backward = _fetched(program, homes, writer)
    saved = tuple(homes.get(name, name) for name in program.saved)
    return replace(program, forward=forward, backward=backward, saved=saved, metas=writer.metas)


def _sent(program: Program, leaving: Sequence[str], writer: Emitter) -> dict[str, str]:
    """Writes forward; gives, of each value, the name of its copy on the host."""
    homes: dict[str, str] = {}
    under_way: list[tuple[str, str]] = []
    wanted = set(leaving)

    def finish() -> None:
        name, started = under_way.pop(0)
        homes[name] = writer.emit(WAIT, (Ref(started),), writer.fresh(f"{name}_host"))

    for node in program.forward:
        writer.written.append(node)
        for name in node.outputs:
            if name in wanted:
                if len(under_way) == UNDER_WAY:
                    finish()
                writer.about = {"module": node.module, "serves": node.serves}
                under_way.append((name, writer.emit(TO_HOST, (Ref(name),), writer.fresh(f"{name}_leaving"))))
    while under_way:
        finish()
    return homes


def _fetched(program: Program, homes: Mapping[str, str], writer: Emitter) -> tuple[Node, ...]:
    """Backward, which gets each value ahead of its first reader, while the one before it is read."""
    first = {name: places[0] for name, places in readers(program.backward).items() if name in homes}
    waiting = sorted(first, key=lambda name: first[name])
    begun: dict[str, str] = {}
    renamed: dict[str, str] = {}

    def begin() -> None:
        name = waiting.pop(0)
        begun[name] = writer.emit(FROM_HOST, (Ref(homes[name]),), writer.fresh(f"{name}_returning"))

    for node in program.backward:
        writer.about = {"module": node.module, "serves": node.serves}
        while waiting and len(begun) < UNDER_WAY:
            begin()
        for name in dict.fromkeys(node.inputs):
            if name in homes and name not in renamed:
                while name not in begun:
                    begin()
                renamed[name] = writer.emit(WAIT, (Ref(begun.pop(name)),), writer.fresh(f"{name}_back"))
        writer.written.append(reading(node, renamed))
    return tuple(writer.written)
