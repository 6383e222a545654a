"""When a value of a program is dropped: `runtime.execute` writes its source by it, and `memory` counts bytes, so that
what is counted is what runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Node
from autopar.ir.program import COLLECTIVES
from autopar.ir.rewrite import last_reads

_OWN = "add.Tensor bmm.default cat.default clone.default div.Tensor embedding.default embedding_dense_backward.default"
_OWN += " mm.default mul.Tensor sum.dim_IntList"
OWN_MEMORY = frozenset((*(f"aten.{op}" for op in _OWN.split()), *(f"collective.{kind}" for kind in COLLECTIVES)))
"""Ops whose result shares memory with nothing: an all-reduce that alone reads it may work in place."""


@dataclass(frozen=True, slots=True)
class Line:
    """An instruction; whether it, if it is an all-reduce, works in its operand; and the values that are dropped right
    after it: operands read for the last time, and results that nothing reads."""

    instruction: Node
    in_place: bool
    dead: tuple[str, ...]


def lifetimes(
    arguments: Sequence[str], instructions: Sequence[Node], results: Iterable[str | None]
) -> tuple[tuple[str, ...], list[Line]]:
    """(arguments that nothing reads, lines) of a function that returns `results`."""
    last = last_reads(instructions)
    kept = {result for result in results if result is not None}
    unused = tuple(dict.fromkeys(a for a in arguments if a not in last and a not in kept))
    own: set[str] = set()  # values whose memory nothing else reads any more
    lines = []
    for i, instruction in enumerate(instructions):
        dead = [used for used in dict.fromkeys(instruction.inputs) if last[used] == i and used not in kept]
        dies = set(dead)
        in_place = bool(dies & own)
        if instruction.op in OWN_MEMORY or (len(instruction.inputs) == 1 and in_place):
            own.update(instruction.outputs)
        if instruction.op not in OWN_MEMORY:
            own.difference_update(set(instruction.inputs) - dies)  # a view of it may outlive it
        dead += [output for output in instruction.outputs if output and output not in last and output not in kept]
        lines.append(Line(instruction, in_place, tuple(dead)))
    return unused, lines
