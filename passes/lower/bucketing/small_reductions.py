"""Small all-reduces that do not depend on each other (several parts of a loss, say), together where the last stands."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import WAIT, Node

from .packing import Bucket, BucketWriter

SMALL_BYTES = 4 * 2**10
"""An all-reduce of no more than this is all latency."""


def together(writer: BucketWriter, instructions: Sequence[Node], uneven: frozenset[str]) -> list[Node]:
    """Small all-reduces of one key in buckets, each where the last of its members stands. What reads the others
    comes after that, so that no collective in between may."""
    groups = _independent(writer, instructions, uneven)
    writer.written = []
    held: dict[str, Node] = {}  # members that wait for the last one, by what they make
    late: list[Node] = []  # what reads them
    missing: set[str] = set()
    started: dict[str, Bucket] = {}

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
            joint = Bucket(members, sum(map(writer.bytes, members)))
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
    found: dict[str, list[Node]] = {}
    for instruction in instructions:
        mask = 0
        for name in instruction.inputs:
            mask |= upstream.get(name, 0)
        if instruction.collective:
            open_groups = {key: group for key, group in open_groups.items() if not group[0] & mask}
        small = instruction.collective == "all_reduce" and writer.bytes(instruction) <= SMALL_BYTES
        if small and uneven.isdisjoint((*instruction.inputs, *instruction.outputs)):
            bit = 1 << len(found)
            bits, members = open_groups.get(writer.key(instruction), (0, []))
            members.append(instruction)
            open_groups[writer.key(instruction)] = (bits | bit, members)
            found[instruction.outputs[0]] = members
            mask |= bit
        upstream.update(dict.fromkeys(instruction.outputs, mask))
    return {name: members for name, members in found.items() if len(members) > 1}
