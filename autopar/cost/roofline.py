"""Seconds of a rank's own operators: a roofline of arithmetic and memory on local shapes, or a measurement."""

from dataclasses import replace
from typing import NamedTuple

from autopar.cluster.machine import Device
from autopar.ir.graph import CONTIGUOUS, RESHAPE, VIEWS, Node
from autopar.ir.program import Program
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops.rule import Call, call_of
from autopar.ops.rules import rule_of

from . import liveness
from .fusion import Fused, Fusion, fusion

COPIES = frozenset({CONTIGUOUS, RESHAPE})
"""Views that copy a value that is not contiguous."""

FREE = COPIES | set(VIEWS)
"""Views that the search does not see: their time is that of the operators around them."""


class Cost(NamedTuple):
    """Of one operator: seconds, the part of the memory's rate that it uses meanwhile, the bytes that it reads and
    writes, the seconds of its arithmetic at the device's peak, and what it takes longer for what its kernel writes and
    reads of results of its own, which a fused one keeps on the chip."""

    seconds: float
    memory: float
    bytes: int
    peak_seconds: float
    unfused_seconds: float = 0.0


CostKey = tuple[liveness.Results, tuple[bool, ...]]
"""Where an operator's results lie in memory, and which of them are read."""


class LocalOperators:
    """Costs of a rank's own operators. One that only views existing memory moves nothing (`liveness.Memory`)."""

    def __init__(
        self, program: Program, device: Device, costs: dict[CostKey, Cost], placements: liveness.PlacementCache
    ) -> None:
        self.program, self.metas, self.device = program, program.metas, device
        self.fusion = Fusion()
        if placements.fuses:
            self.fusion, self.device = fusion(program), replace(device, fused_part=0.0, saved_part=0.0)
        instructions = program.nodes
        self.read = {name for instruction in instructions for name in instruction.inputs}
        self.placements = placements
        given = self.read.difference(*(instruction.outputs for instruction in instructions))
        self.placed = {name: placements.fresh(self.metas[name]) for name in given}
        self.read.update(program.saved, (o.name for o in program.outputs if o.name is not None))
        self._costs = costs

    def pass_by(self, instruction: Node) -> None:
        """The results of a collective lie in new memory."""
        for name in instruction.outputs:
            self.placed[name] = self.placements.fresh(self.metas[name])

    def starting(self, instruction: Node) -> float:
        """Seconds that the rank itself is busy with the start of a collective, where that was measured."""
        return self._measured(instruction) or 0.0

    def _measured(self, instruction: Node) -> float | None:
        return self.device.measured_seconds(instruction.op, *input_and_output_metas(instruction, self.metas))

    def cost(self, instruction: Node) -> Cost:
        placed, outputs = self.placements.results(instruction, self.placed), instruction.outputs
        if (part := self.fusion.parts.get(instruction.name)) is not None:
            return self._of_kernel(part)
        # an op may leave out results that nobody reads
        wanted = outputs if len(outputs) == 1 else self.read.intersection(outputs) or outputs
        key = (placed, tuple([bool(name) and name in wanted for name in outputs]))
        cost = self._costs.get(key)
        if cost is None:
            results = tuple(self.metas[name] if name and name in wanted else None for name in outputs)
            call = replace(call_of(instruction, self.metas), outputs=results)
            cost = self._costs[key] = self._cost(instruction, placed.copies, call)
        return cost

    def _of_kernel(self, part: Fused) -> Cost:
        """Of a part of a kernel. (Of compiled programs nothing is measured: `planning.micro.check_measured`.)"""
        size = part.moved_bytes(self.metas)
        return Cost(part.seconds(self.device, self.metas), 1.0 if size else 0.0, size, 0.0)

    def _cost(self, instruction: Node, copies: bool, call: Call) -> Cost:
        op, device = instruction.op, self.device
        operands, results = input_and_output_metas(instruction, self.metas)
        size = sum(meta.bytes for meta in (*operands, *results))
        rule = rule_of(call) if copies and op not in COPIES else None
        if not copies or (rule is not None and rule.moves_nothing):
            is_free = not copies and op in FREE and self._measured(instruction) is None
            return Cost(0.0 if is_free else device.view_seconds(op, operands, results), 0.0, size, 0.0)
        arithmetic = peak = flops = inside = 0.0
        if rule is not None:
            inside = rule.inside_bytes
        if rule is not None and rule.flops and (operands or results):
            flops, dtype = rule.flops, (*operands, *results)[0].dtype
            arithmetic, peak = device.compute_seconds(flops, dtype), flops / device.peak_flops(dtype)
        moved = device.moving_seconds(size + inside)
        longest = max(arithmetic, moved)
        seconds = device.operator_seconds(op, operands, results, flops, inside)
        fused = device.operator_seconds(op, operands, results, flops) if inside else seconds
        return Cost(seconds, moved / longest if longest else 0.0, size, peak, seconds - fused)
