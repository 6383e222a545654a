"""Compact: what backward keeps of a larger tensor is copied out of it, so that the rest is not kept with it.

A view holds all the memory of its base: a slice of a mask that every rank computes in full would keep the full mask.
"""

from dataclasses import dataclass, replace

from autopar.cost.liveness import Memory, PlacementCache
from autopar.ir.emitter import Emitter
from autopar.ir.graph import Node, Ref
from autopar.ir.program import Program
from autopar.ir.rewrite import reading
from autopar.ir.rewriter import returning
from autopar.ops.kinds import CLONE

from .lowering import Rewrite, Target

LEAST = 2.0
"""A copy is worth it where what would be kept is at least so many times as large."""


@dataclass(frozen=True)
class Compact(Rewrite):
    """Copies of what is saved of larger tensors."""

    name = "compact"

    def __call__(self, program: Program, target: Target) -> Program:
        return compact(program, target.cache.placements)


def compact(program: Program, cache: PlacementCache | None = None) -> Program:
    """The program with copies in forward of what it saves, where most of the memory behind that is of no use later."""
    memory = Memory.of(program, program.forward, cache)
    origin = {
        name: instruction.inputs[operand]
        for instruction in program.forward
        for name in instruction.outputs
        if name and (operand := _viewed(memory, instruction, name)) is not None
    }
    outside = [i.name for i in program.inputs] + [o.name for o in program.outputs if o.role == "output" and o.name]
    held = {memory.storages[name][0] for name in outside if name in memory.storages}
    wanted: dict[int, dict[str, None]] = {}
    for name in program.saved:
        storage = memory.storages[name][0]
        if storage not in held:
            wanted.setdefault(storage, {})[_top(memory, origin, name)] = None
    copied = {
        name
        for storage, names in wanted.items()
        if memory.bytes[storage] >= LEAST * sum(program.metas[name].bytes for name in names)
        for name in names
    }
    if not copied:
        return program
    renamed: dict[str, str] = {}

    writer = Emitter(metas=dict(program.metas))
    for instruction in program.forward:
        writer.written.append(reading(instruction, renamed))
        for name in instruction.outputs:
            if name in copied:
                writer.about = {"module": instruction.module, "serves": instruction.serves}
                renamed[name] = writer.emit(CLONE, (Ref(name),), writer.fresh(f"{name}_kept"))
    return replace(
        program,
        forward=tuple(writer.written),
        backward=tuple(reading(instruction, renamed) for instruction in program.backward),
        saved=tuple(dict.fromkeys(renamed.get(name, name) for name in program.saved)),
        outputs=tuple(returning(o, renamed) for o in program.outputs),
        metas=writer.metas,
        uneven=program.uneven | {renamed[name] for name in copied & program.uneven},
    )


def _viewed(memory: Memory, instruction: Node, name: str) -> int | None:
    """Which operand a result is a view of."""
    if instruction.op.startswith("collective."):
        return None
    places = (i for i, source in enumerate(instruction.inputs) if memory.storages[source] == memory.storages[name])
    return next(places, None)


def _top(memory: Memory, origin: dict[str, str], name: str) -> str:
    """The first of the views that led to a value which has its elements, and no others."""
    numel = memory.placed[name].numel
    while name in origin and memory.placed[origin[name]].numel == numel:
        name = origin[name]
    return name
