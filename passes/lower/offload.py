"""Offload: some of what forward keeps for backward waits in the host's memory.

A copy starts as soon as a value is made, and one back just in time for its first reader, both on the host's link, which
is a stream of its own. Of what could leave, that leaves which the link can take while the device computes; what is
still missing is the oldest of the rest, which backward reads last. Times are those of operators alone; where a device
does not say the rate of its link, copies take none.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from autopar.cost.liveness import Memory
from autopar.cost.optimizers import Optimizer
from autopar.cost.streams import alone_seconds
from autopar.ir.emitter import Emitter
from autopar.ir.graph import WAIT, Ref, readers
from autopar.ir.program import Program
from autopar.ir.rewrite import reading
from autopar.ops.host import FROM_HOST, TO_HOST

from .lowering import Adopted, Rewrite, Target

LEAST_PART = 1 / 256
"""Of the largest value that could leave: what is smaller stays, since each copy has a start of its own."""

BACKLOG_PART = 1 / 32
"""Of the seconds of forward, how far the link may be behind: what waits for it lies in the device's memory."""


@dataclass(frozen=True)
class Offload(Rewrite):
    """At least so many bytes of what is kept for backward leave for the host, or all that can."""

    bytes: int = 0
    name = "offload"

    def __call__(self, program: Program, target: Target) -> Program:
        link = _Link(program, target)
        leaving = _leaving(program, self.bytes, link)
        return _copied(program, leaving, link) if leaving else program


class _Link:
    """The seconds of copies, and when each instruction starts if nothing waits for anything else."""

    def __init__(self, program: Program, target: Target) -> None:
        self.able, self.device = _able(program, target), target.cluster.device
        alone = alone_seconds(program, target.cluster, target.cache)
        own = ([0.0 if i.collective else alone.get(i.name, 0.0) for i in half] for half in program.halves)
        self.forward, self.backward = ([0.0, *accumulate(seconds)] for seconds in own)

    def seconds(self, name: str) -> float:
        return self.device.host_seconds(self.able[name]) if self.device.host_bytes_per_second else 0.0


def host_bytes(program: Program, optimizer: Optimizer) -> int:
    """What a rank needs of the host's memory: for what leaves, of which each value takes a power of two, as PyTorch
    allocates pinned memory, and for states of the optimizer."""
    sent = (program.metas[name].bytes for i in program.forward if i.op == TO_HOST for name in i.inputs)
    owned = (program.metas[i.name] for i in program.inputs if i.role == "parameter")
    return sum(1 << (size - 1).bit_length() for size in sent) + sum(map(optimizer.brought_bytes, owned))


def as_asked(program: Program, target: Target) -> Adopted:
    """So many bytes leave as the target says."""
    rewrites = (Offload(target.offload_bytes),) if target.offload_bytes else ()
    return Adopted(given=program, rewrites=rewrites, target=target)


def _leaving(program: Program, size: int, link: _Link) -> dict[str, float]:
    """The values that leave, in the order in which forward makes them, and when the copy of each ends."""
    made = {name: at for at, node in enumerate(program.forward, 1) for name in node.outputs if name in link.able}
    most, free = BACKLOG_PART * link.forward[-1], 0.0
    first: list[str] = []
    for name, at in made.items():
        if free - link.forward[at] <= most:
            first.append(name)
            free = max(free, link.forward[at]) + link.seconds(name)
    taken = set[str]()
    for name in dict.fromkeys((*first, *made)):
        if size <= 0:
            break
        taken.add(name)
        size -= link.able[name]
    ends, free = dict[str, float](), 0.0
    for name in (name for name in made if name in taken):
        ends[name] = free = max(free, link.forward[made[name]]) + link.seconds(name)
    return ends


def _able(program: Program, target: Target) -> dict[str, int]:
    """The values that could leave, each with its bytes: forward makes them, backward reads them, and nothing else holds
    their memory."""
    memory = Memory.of(program, program.forward, target.cache.placements)
    outside = {i.name for i in program.inputs} | {o.name for o in program.outputs if o.name}
    saved = [memory.storages[name][0] for name in program.saved]
    held = {memory.storages[name][0] for name in outside if name in memory.storages}
    held |= {storage for storage, count in Counter(saved).items() if count > 1}
    able: dict[str, int] = {}
    kept = {*program.saved} - outside - program.uneven
    for name in (name for node in program.forward for name in node.outputs if name in kept):
        size = program.metas[name].bytes
        if memory.storages[name][0] not in held and memory.bytes[memory.storages[name][0]] == size:
            able[name] = size
    least = LEAST_PART * max(able.values(), default=0)
    return {name: size for name, size in able.items() if size >= least}


def _copied(program: Program, ends: Mapping[str, float], link: _Link) -> Program:
    writer = Emitter(metas=dict(program.metas), taken={i.name for i in program.inputs})
    homes = _sent(program, ends, link, writer)
    forward, writer.written = tuple(writer.written), []
    _fetched(program, homes, link, writer)
    saved = tuple(homes.get(name, name) for name in program.saved)
    return replace(program, forward=forward, backward=tuple(writer.written), saved=saved, metas=writer.metas)


def _sent(program: Program, ends: Mapping[str, float], link: _Link, writer: Emitter) -> dict[str, str]:
    """Writes forward; gives, of each value, the name of its copy on the host."""
    homes: dict[str, str] = {}
    under_way: dict[str, str] = {}

    def finish(now: float) -> None:
        for name in [name for name in under_way if ends[name] <= now]:
            homes[name] = writer.emit(WAIT, (Ref(under_way.pop(name)),), writer.fresh(f"{name}_host"))

    for now, node in zip(link.forward, program.forward, strict=False):
        finish(now)
        writer.written.append(node)
        writer.about = {"module": node.module, "serves": node.serves}
        for name in (name for name in node.outputs if name in ends):
            under_way[name] = writer.emit(TO_HOST, (Ref(name),), writer.fresh(f"{name}_leaving"))
    finish(math.inf)
    return homes


def _fetched(program: Program, homes: Mapping[str, str], link: _Link, writer: Emitter) -> None:
    """Writes backward, in which a copy starts so that it and those after it are there when they are read."""
    first = {name: places[0] for name, places in readers(program.backward).items() if name in homes}
    waiting = sorted(first, key=lambda name: first[name])
    latest, starts = math.inf, dict[str, float]()
    for name in reversed(waiting):
        starts[name] = latest = min(latest, link.backward[first[name]]) - link.seconds(name)
    begun: dict[str, str] = {}
    renamed: dict[str, str] = {}
    for place, node in enumerate(program.backward):
        writer.about = {"module": node.module, "serves": node.serves}
        while waiting and (starts[waiting[0]] <= link.backward[place + 1] or first[waiting[0]] == place):
            name = waiting.pop(0)
            begun[name] = writer.emit(FROM_HOST, (Ref(homes[name]),), writer.fresh(f"{name}_returning"))
        for name in dict.fromkeys(node.inputs):
            if name in begun:
                renamed[name] = writer.emit(WAIT, (Ref(begun.pop(name)),), writer.fresh(f"{name}_back"))
        writer.written.append(reading(node, renamed))
