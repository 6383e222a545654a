"""Overlap: what a collective does not wait for runs while it is under way.

A rank issues its operators in one order. In the order of the graph the gradient of a layer's weight comes before the
gradient of its input, whose all-reduce everything after it waits for. This pass starts such a collective as soon
as its operands are there, and lets the operators that stood before it, and that it does not need, run while bytes
travel (asynchronous gradients: Par4D IV-A, ATP 4.2). No operator moves past the next collective that is waited for, and
no more of them move than the collective takes, the last ones first: what is put off longer is kept alive longer, and
with it the reductions that it leads to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.streams import alone_seconds
from autopar.ir.dataflow import derived
from autopar.ir.graph import WAIT, Node
from autopar.ir.program import LAYOUT, Program

from .lowering import Rewrite, Target


@dataclass(frozen=True)
class Overlap(Rewrite):
    """Collectives that are soon waited for start early, by the prices of the target's cluster."""

    name = "overlap"

    def __call__(self, program: Program, target: Target) -> Program:
        return overlap(program, alone_seconds(program, target.cluster, target.cache))


def overlap(program: Program, seconds: Mapping[str, float] | None = None) -> Program:
    """The program with the same instructions, each half in an order in which collectives that are soon waited for start
    earlier. Values are the same bit for bit. `seconds` are those of instructions by their first result
    (`streams.alone_seconds`); without them, all that may run under a collective does."""
    parameters = {i.name for i in program.inputs if i.role == "parameter"}
    forward, backward = (_lifted(half, parameters, seconds) for half in (program.forward, program.backward))
    return replace(program, forward=tuple(forward), backward=tuple(backward))


def _lifted(instructions: Sequence[Node], parameters: set[str], seconds: Mapping[str, float] | None) -> list[Node]:
    """In stretches that end with a collective that is soon waited for: what it needs, itself, and the rest."""
    written: list[Node] = []
    stretch: list[Node] = []
    urgent = _urgent(instructions, parameters)
    for instruction in instructions:
        stretch.append(instruction)
        if instruction.outputs[0] in urgent:
            needed = _needed(stretch)
            late = _under(stretch[-1], [i for i in stretch if id(i) not in needed], seconds)
            put_off = {id(i) for i in late}
            written += [i for i in stretch if id(i) not in put_off]
            written += late
            stretch = []
    return written + stretch


def _under(collective: Node, others: Sequence[Node], seconds: Mapping[str, float] | None) -> list[Node]:
    """Of the operators that a collective does not need, the last that take as long as it does."""
    if seconds is None:
        return list(others)
    left = seconds.get(collective.outputs[0], 0.0)
    late: list[Node] = []
    for instruction in reversed(others):
        if left <= 0:
            break
        left -= 0.0 if instruction.collective else seconds.get(instruction.outputs[0], 0.0)
        late.append(instruction)
    return late[::-1]


def _needed(stretch: Sequence[Node]) -> set[int]:
    """By identity: the collective that these instructions end with, and what it depends on. Others stay where they are:
    a gather that is started ahead of its reader is not started further ahead. Nothing is waited for sooner: where the
    collective depends on a wait, what stands before it is needed, too."""
    reads = set(stretch[-1].outputs)
    needed: set[int] = set()
    for position in reversed(range(len(stretch))):
        instruction = stretch[position]
        if not reads.isdisjoint(instruction.outputs):
            if instruction.op == WAIT:
                return needed | {id(i) for i in stretch[: position + 1]}
            needed.add(id(instruction))
            reads.update(instruction.inputs)
    return needed


def _only_moves(node: Node) -> bool:
    return node.collective is not None or node.op == WAIT or node.op in LAYOUT


def _urgent(instructions: Sequence[Node], parameters: set[str]) -> set[str]:
    """Results of the collectives that are waited for before another one starts or is waited for. Gathers of parameters,
    which wait for nothing, start when `bucket` says."""
    urgent = set()
    ready = derived(instructions, parameters, lambda node: _only_moves(node) and bool(node.inputs))
    started: str | None = None
    for instruction in instructions:
        if instruction.collective:
            started = None if instruction.outputs[0] in ready else instruction.outputs[0]
        elif instruction.op == WAIT:
            if started == instruction.inputs[0]:
                urgent.add(started)
            started = None
    return urgent
