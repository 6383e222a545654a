"""Local seconds: what one rank's share of an operator takes under a choice, as the device's roofline has it."""

from __future__ import annotations

from autopar.cluster.collectives import collective_seconds
from autopar.ir.graph import WAIT, TensorMeta
from autopar.ir.layout import Layout
from autopar.ir.rewrite import read_and_made
from autopar.ops.emit import Emission, expands, fillings, local_program, local_shapes
from autopar.ops.rule import Call, OpRule

from .choices import SiteChoice
from .setting import Setting
from .sites import Site


def operator_seconds(
    setting: Setting,
    site: Site,
    rule: OpRule | None,
    splits: tuple[tuple[str, tuple[int, ...]], ...],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    choice: SiteChoice,
) -> float:
    """Roofline of the local op: arithmetic or memory, whichever is slower; an expansion costs what
    its own program does, collectives included."""
    call = site.call
    assert call is not None
    device = setting.cluster.device
    if rule is not None and (expands(rule, splits) or fillings(call, rule, operands, site.zeros)):
        emission = local_program(call, rule, splits, operands, results, setting.mesh, site.zeros)
        return emission_seconds(setting, emission, call, rule, choice)
    if rule is not None and rule.moves_nothing and device.operators is None:
        return device.seconds_per_op
    inputs, outputs = local_shapes(call, operands, results, setting.mesh)
    read = [TensorMeta(shape, m.dtype) for shape, m in zip(inputs, call.inputs, strict=True)]
    made = [
        TensorMeta(shape, m.dtype)
        for shape, m in zip(outputs, call.outputs, strict=True)
        if shape is not None and m is not None
    ]
    if rule is not None and rule.moves_nothing:
        return device.view_seconds(call.node.op, read, made)
    flops = _local_flops(setting, rule, choice) if rule is not None else 0.0
    return device.operator_seconds(call.node.op, read, made, flops)


def _local_flops(setting: Setting, rule: OpRule, choice: SiteChoice) -> float:
    """Arithmetic of one rank, on padding too."""
    flops = rule.flops
    for axis, on_axis in enumerate(choice.axes):
        if on_axis.splits or on_axis.routes:
            flops *= max(1.0, on_axis.period / rule.factors[on_axis.factor].size) / setting.mesh[axis]
    return flops


def emission_seconds(setting: Setting, emission: Emission, call: Call, rule: OpRule, choice: SiteChoice) -> float:
    """Seconds of an expansion's local program: its ops bound by memory, but for the op itself, which may be
    bound by arithmetic; its collectives by links."""
    device = setting.cluster.device
    itself = [instruction for instruction in emission.instructions if instruction.op == call.node.op]
    flops = _local_flops(setting, rule, choice) / max(1, len(itself))
    seconds = 0.0
    for instruction in emission.instructions:
        read, made = read_and_made(instruction, emission.metas)
        if kind := instruction.collective:
            largest = max(meta.bytes for meta in (*read, *made))
            seconds += collective_seconds(kind, largest, setting.redistributor.links[instruction.args[-1]])
        elif instruction.op != WAIT:
            own = flops if instruction.op == call.node.op else 0.0
            seconds += device.operator_seconds(instruction.op, read, made, own)
    return seconds
