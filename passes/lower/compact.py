"""Compact: what backward keeps of a larger tensor is copied out of it, so that the rest is not kept with it.

A view holds all the memory of its base: a slice of a mask that every rank makes whole would keep the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.cost.liveness import Known, Memory
from autopar.ir.graph import Ref, map_references
from autopar.ir.program import Instruction, Program

CLONE = "aten.clone.default"
LEAST = 2.0
"""A copy is worth it where what would be kept is at least so many times as large."""


def compact(program: Program, known: Known | None = None) -> Program:
    """The program with copies in forward of what it saves, where most of the memory behind that is of no use later.
    `known` is how results lay in memory in other programs."""
    memory = Memory.of(program, program.forward, known)
    origin = {
        name: instruction.inputs[made]
        for instruction in program.forward
        for name in instruction.outputs
        if name and (made := _viewed(memory, instruction, name)) is not None
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
    metas = dict(program.metas)
    forward = []
    for instruction in program.forward:
        forward.append(_reading(instruction, renamed))
        for name in instruction.outputs:
            if name in copied:
                metas[renamed.setdefault(name, _fresh(name, metas))] = metas[name]
                forward.append(_clone(instruction, name, renamed[name]))
    return replace(
        program,
        forward=tuple(forward),
        backward=tuple(_reading(instruction, renamed) for instruction in program.backward),
        saved=tuple(dict.fromkeys(renamed.get(name, name) for name in program.saved)),
        outputs=tuple(replace(o, name=renamed.get(o.name, o.name)) if o.name else o for o in program.outputs),
        metas=metas,
        uneven=program.uneven | {renamed[name] for name in copied & program.uneven},
    )


def _viewed(memory: Memory, instruction: Instruction, name: str) -> int | None:
    """Which operand a result is a view of."""
    if instruction.op.startswith("collective."):
        return None
    places = (i for i, source in enumerate(instruction.inputs) if memory.storages[source] == memory.storages[name])
    return next(places, None)


def _top(memory: Memory, origin: dict[str, str], name: str) -> str:
    """The first of the views that led to a value which has its elements, and no others."""
    for source in _sources(origin, name):
        if memory.placed[source].numel != memory.placed[name].numel:
            break
        name = source
    return name


def _sources(origin: dict[str, str], name: str) -> Iterator[str]:
    while name in origin:
        name = origin[name]
        yield name


def _reading(instruction: Instruction, renamed: dict[str, str]) -> Instruction:
    if renamed.keys().isdisjoint(instruction.inputs):
        return instruction

    def now(name: str) -> Ref:
        return Ref(renamed.get(name, name))

    args, kwargs = map_references(instruction.args, now), map_references(instruction.kwargs, now)
    return replace(instruction, args=args, kwargs=kwargs)


def _clone(after: Instruction, name: str, copy: str) -> Instruction:
    return Instruction(op=CLONE, args=(Ref(name),), outputs=(copy,), module=after.module, node=after.node)


def _fresh(name: str, metas: Mapping[str, object]) -> str:
    number = 1
    while f"{name}_kept_{number}" in metas:
        number += 1
    return f"{name}_kept_{number}"
