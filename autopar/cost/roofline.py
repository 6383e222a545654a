"""What a rank's own operators take: a roofline of arithmetic and memory, on local shapes, or what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from autopar.cluster.machine import Device, operator_key
from autopar.ir.graph import Node, TensorMeta
from autopar.ir.program import Program
from autopar.ops import Call, rule_of
from autopar.ops.registry import VIEWS
from autopar.ops.rule import call_of

from . import liveness

COPIES = frozenset({"aten.contiguous.default", "aten.reshape.default"})
"""Views that lay out anew a value that does not lie in order."""

FREE = COPIES | set(VIEWS)
"""Views that the search does not see: their time is that of the operators around them."""


class Cost(NamedTuple):
    """Of one operator: seconds, the part of the memory's rate that it uses meanwhile, the bytes that it reads and
    writes, and the seconds of its arithmetic at the device's peak."""

    seconds: float
    memory: float
    bytes: int
    peak_seconds: float


CostKey = tuple[liveness.Results, tuple[bool, ...]]
"""What an operator makes of its operands, and which of its results are wanted."""


def key_of(instruction: Node, metas: Mapping[str, TensorMeta]) -> str:
    """The `operator_key` of an instruction of a program."""
    made = [metas[name] for name in instruction.outputs if name]
    return operator_key(instruction.op, [metas[name] for name in instruction.inputs], made)


class LocalOperators:
    """What a rank's own operators cost: a roofline of arithmetic and memory. What only makes a view of memory that is
    there already moves nothing (`liveness.Memory`)."""

    def __init__(self, program: Program, device: Device, costs: dict[CostKey, Cost], made: liveness.Known) -> None:
        self.program, self.metas, self.device = program, program.metas, device
        instructions = (*program.forward, *program.backward)
        self.read = {name for instruction in instructions for name in instruction.inputs}
        self.memory = liveness.Memory(known=made)
        for name in self.read.difference(*(instruction.outputs for instruction in instructions)):
            self.memory.give(name, self.metas[name])
        self.read.update(program.saved, (o.name for o in program.outputs if o.name is not None))
        self._known = costs

    def pass_by(self, instruction: Node) -> None:
        """A collective makes memory of its own."""
        for name in instruction.outputs:
            self.memory.give(name, self.metas[name])

    def starting(self, instruction: Node) -> float:
        """Seconds that the rank itself is busy with the start of a collective, where that was measured."""
        return self._measured(instruction) or 0.0

    def _measured(self, instruction: Node) -> float | None:
        operators = self.device.operators
        return None if operators is None else operators.seconds.get(key_of(instruction, self.metas))

    def cost(self, instruction: Node) -> Cost:
        results, outputs = self.memory.local(instruction), instruction.outputs
        # an op may be told not to make what nobody reads
        wanted = outputs if len(outputs) == 1 else self.read.intersection(outputs) or outputs
        key = (results, tuple([bool(name) and name in wanted for name in outputs]))
        if (found := self._known.get(key)) is None:
            made = tuple(self.metas[name] if name and name in wanted else None for name in outputs)
            call = replace(call_of(instruction, self.metas), outputs=made)
            found = self._known[key] = self._cost(instruction, results.copies, call)
        return found

    def _cost(self, instruction: Node, copies: bool, call: Call) -> Cost:
        known, ratio = self._measured(instruction), self.device.ratio(instruction.op)
        seconds_per_op = self.device.seconds_per_op if known is None else known
        size = sum(self.metas[name].bytes for name in (*instruction.inputs, *instruction.outputs) if name)
        if not copies:
            return Cost(0.0 if instruction.op in FREE and known is None else seconds_per_op, 0.0, size, 0.0)
        arithmetic = peak = 0.0
        if instruction.op not in COPIES and (rule := rule_of(call)) is not None:
            if rule.moves_nothing:
                return Cost(seconds_per_op, 0.0, size, 0.0)
            dtypes = [meta.dtype for meta in (*call.inputs, *call.outputs) if meta is not None]
            if dtypes and rule.flops:
                arithmetic = self.device.compute_seconds(rule.flops, dtypes[0])
                peak = rule.flops / self.device.peak_flops(dtypes[0])
        moved = self.device.moving_seconds(size)
        longest = max(arithmetic, moved)
        seconds = ratio * (seconds_per_op + longest) if known is None else known
        return Cost(seconds, moved / longest if longest else 0.0, size, peak)
