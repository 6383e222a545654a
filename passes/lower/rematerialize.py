"""Rematerialize: backward makes again what it can from what is kept anyway, where a compiler makes that free.

Element-wise operators that backward's kernels read cost nothing there: they are computed where they are read. So of
their results forward keeps none that others lead to. Which values are kept is a minimum cut, by bytes, between what
must be kept (results of products, reductions, collectives) and what backward reads: the partition of AOTAutograd
(Ansel et al., PyTorch 2, ASPLOS 2024, 4.4), on the program of one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ortools.graph.python import max_flow

from autopar.cost.fusion import fuses, is_elementwise, is_view
from autopar.ir.dataflow import leading
from autopar.ir.emitter import Emitter
from autopar.ir.graph import producers, readers
from autopar.ir.program import Program
from autopar.ir.rewrite import living, needed, reading, with_own_metas

from .accumulate import add_meta
from .lowering import Adopted, Rewrite, Target, always

CHAIN = 64
"""A recurrence that is unrolled is one chain of element-wise operators: made again as a whole, it would run twice."""


@dataclass(frozen=True)
class Rematerialize(Rewrite):
    """Backward makes again what is element-wise of what forward keeps."""

    name = "rematerialize"

    def __call__(self, program: Program, target: Target) -> Program:
        return rematerialized(program)


def where_fused(program: Program, target: Target) -> Adopted | None:
    """Taken where a compiler fuses what is made again with what reads it."""
    return always(Rematerialize())(program, target) if target.cache.placements.fuses else None


def rematerialized(program: Program) -> Program:
    """The program that keeps the fewest bytes for backward of those which make the same from them."""
    made = producers(program.forward)
    inputs = {i.name for i in program.inputs}
    wanted = [name for name in program.saved if name in made]
    fixed = _fixed(program, wanted)
    kept = _cut(program, made, wanted, fixed)
    again = {name for name in wanted if name not in kept}
    if not again:
        return program
    writer = Emitter(metas=dict(program.metas), taken=inputs)
    renamed: dict[str, str] = {}
    lacking = {name: place for name, place in made.items() if name not in kept}

    def make(wanted: str) -> None:
        """The chain from what is kept to a value, in forward's order."""
        for node in (program.forward[place] for place in sorted(leading(program.forward, [wanted], made=lacking))):
            copies = {o: add_meta(writer.metas, writer.fresh(f"{o}_again"), writer.metas[o]) for o in node.outputs if o}
            outputs = tuple(copies.get(output, "") for output in node.outputs)
            writer.written.append(replace(reading(node, renamed), outputs=outputs, backward=True))
            renamed.update(copies)
            for output in copies:
                lacking.pop(output, None)

    for node in program.backward:
        for name in dict.fromkeys(node.inputs):
            if name in again:
                make(name)
        writer.written.append(reading(node, renamed))
    results = [o.name for o in program.gradients]
    backward = living(writer.written, results)
    tangents = {i.name for i in program.tangents}
    saved = tuple(name for name in needed(backward, results) if name not in tangents)
    forward = living(program.forward, (*(o.name for o in program.results), *saved))
    return with_own_metas(replace(program, forward=forward, backward=backward, saved=saved, metas=writer.metas))


def _fixed(program: Program, wanted: Collection[str]) -> set[str]:
    """Values that are kept if backward reads them: what it returns, what has rows that only the run counts, and what is
    in memory there anyway, since an operator that fuses with nothing reads it."""
    of = {name: [program.backward[k] for k in positions] for name, positions in readers(program.backward).items()}

    def is_materialized(name: str) -> bool:
        for node in of.get(name, ()):
            if is_view(node.op):
                if any(is_materialized(output) for output in node.outputs if output):
                    return True
            elif not fuses(node, program.metas):
                return True
        return False

    returned = {o.name for o in program.outputs}
    return {name for name in wanted if name in returned or name in program.uneven or is_materialized(name)}


def _cut(program: Program, made: Mapping[str, int], wanted: Collection[str], fixed: Collection[str]) -> set[str]:
    """The values that are kept."""
    flow, numbers = max_flow.SimpleMaxFlow(), dict[str, int]()
    source, sink = 0, 1
    without_limit = 1 + sum(program.metas[name].bytes for name in made)
    remade = _remade(program, fixed)
    waiting = list(wanted)
    for name in waiting:  # which grows: what leads to what is read
        if name in numbers:
            continue
        into = numbers[name] = 2 + 2 * len(numbers)
        flow.add_arc_with_capacity(into, into + 1, program.metas[name].bytes)
        if name in remade:
            waiting += [operand for operand in program.forward[made[name]].inputs if operand in made]
        else:
            flow.add_arc_with_capacity(source, into, without_limit)
    for name, into in numbers.items():
        for operand in dict.fromkeys(program.forward[made[name]].inputs if name in remade else ()):
            if operand in numbers:
                flow.add_arc_with_capacity(numbers[operand] + 1, into, without_limit)
    for name in wanted:
        flow.add_arc_with_capacity(numbers[name] + 1, sink, without_limit)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    below = set(flow.get_sink_side_min_cut())
    return {name for name, into in numbers.items() if into + 1 in below and into not in below}


def _remade(program: Program, fixed: Collection[str]) -> set[str]:
    """Values that backward may make again, if it does not need `CHAIN` operators in a row for it."""
    lengths: dict[str, int] = {}
    for node in program.forward:
        names = [name for name in node.outputs if name]
        length = 1 + max((lengths.get(name, 0) for name in node.inputs), default=0)
        is_made = is_elementwise(node.op) and len(names) == 1 and length < CHAIN
        if is_made and names[0] not in fixed and names[0] not in program.uneven:
            lengths[names[0]] = length
    return set(lengths)
