"""What a rank's own operators take: a roofline of arithmetic and memory, on local shapes, or what was measured."""

from dataclasses import replace
from typing import NamedTuple

from autopar.cluster.machine import Device
from autopar.ir.graph import CONTIGUOUS, RESHAPE, VIEWS, Node
from autopar.ir.program import Program
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops import Call, rule_of
from autopar.ops.rule import call_of

from . import liveness

COPIES = frozenset({CONTIGUOUS, RESHAPE})
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


class LocalOperators:
    """What a rank's own operators cost: a roofline of arithmetic and memory. What only makes a view of memory that is
    there already moves nothing (`liveness.Memory`)."""

    def __init__(
        self, program: Program, device: Device, costs: dict[CostKey, Cost], made: liveness.PlacementCache
    ) -> None:
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
        return self.device.measured_seconds(instruction.op, *input_and_output_metas(instruction, self.metas))

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
        op, device = instruction.op, self.device
        read, made = input_and_output_metas(instruction, self.metas)
        size = sum(meta.bytes for meta in (*read, *made))
        rule = rule_of(call) if copies and op not in COPIES else None
        if not copies or (rule is not None and rule.moves_nothing):
            is_free = not copies and op in FREE and self._measured(instruction) is None
            return Cost(0.0 if is_free else device.view_seconds(op, read, made), 0.0, size, 0.0)
        arithmetic = peak = flops = 0.0
        if rule is not None and rule.flops and (read or made):
            flops, dtype = rule.flops, (*read, *made)[0].dtype
            arithmetic, peak = device.compute_seconds(flops, dtype), flops / device.peak_flops(dtype)
        moved = device.moving_seconds(size)
        longest = max(arithmetic, moved)
        seconds = device.operator_seconds(op, read, made, flops)
        return Cost(seconds, moved / longest if longest else 0.0, size, peak)
