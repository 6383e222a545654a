"""Writing local programs: instructions, their local shapes, and the expansions of operators.

The op table has an expansion (say, of a softmax whose class dim is split), which is traced. Costs, codegen and the
oracle trace the same expansion, so that ranks run what was priced and proved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Node, Ref, TensorMeta, map_references
from autopar.ir.layout import Layout, Shape, local_shape, padded_shape

from .expansions import LocalCall, filled_beyond
from .rule import ROUTED, Call, OpRule, neutral
from .rules import expand, localize
from .traced import Traced


@dataclass(frozen=True, slots=True)
class Emission:
    """Instructions with the local metas of all their values; `results` are the op's outputs."""

    instructions: tuple[Node, ...]
    metas: Mapping[str, TensorMeta]
    results: tuple[str | None, ...]


OPERAND = "operand_{}"
"""Name, inside an expansion, of the op's i-th tensor operand."""


def local_program(
    call: Call,
    rule: OpRule | None,
    splits: tuple[tuple[str, tuple[int, ...]], ...],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    mesh: Shape,
    zeros: tuple[bool, ...] = (),
) -> Emission:
    """The local program of an op, as a value of its own: the op, or its expansion if a split factor
    `expands`, after filling padding. Every operand has a name of its own, even if the op reads one tensor
    twice. `operands` and `results` are layouts; `zeros` says which operands have zeros as padding already
    (none given: none)."""
    local_inputs, local_outputs = local_shapes(call, operands, results, mesh)
    shapes = zip(local_inputs, call.inputs, strict=True)
    metas = {OPERAND.format(i): TensorMeta(shape, meta.dtype) for i, (shape, meta) in enumerate(shapes)}
    counter = iter(range(1 << 30))
    emitter = Emitter(metas=metas, mesh=mesh, named=lambda hint: f"{hint}_{next(counter)}")
    values: list[Any] = [Traced(emitter, name) for name in metas]
    local = partial(
        LocalCall, call, splits=dict(splits), operands=operands, results=results, outputs=local_outputs, emitter=emitter
    )
    if rule is not None:
        for i, dim, value in fillings(call, rule, operands, zeros):
            values[i] = filled_beyond(local((), ()), values[i], call.inputs[i].shape, operands[i], dim, value)
    feed = iter(values)
    args, kwargs = localize(call, local_inputs, local_outputs, results, mesh)
    if rule is not None and expands(rule, splits):
        args, kwargs = map_references((args, kwargs), lambda _: next(feed))
        produced = _named(expand(local(args, kwargs)), len(local_inputs))
    else:
        args, kwargs = map_references((args, kwargs), lambda _: Ref(next(feed).name))
        local_metas = tuple(
            None if meta is None or shape is None else TensorMeta(shape, meta.dtype)
            for meta, shape in zip(call.outputs, local_outputs, strict=True)
        )
        emitter.emit(call.node.op, args, kwargs=kwargs, metas=local_metas)
        produced = tuple(name or None for name in emitter.written[-1].outputs)
    return Emission(tuple(emitter.written), metas, produced)


def _named(results: tuple[Any, ...], operands: int) -> tuple[str | None, ...]:
    """Results under names of their own: one may be an operand unchanged (the gradient of a bias without rows to sum),
    or equal to another."""
    taken: set[str | None] = {OPERAND.format(i) for i in range(operands)}
    named: list[str | None] = []
    for result in results:
        if result is not None and result.name in taken:
            result = result.reshape(result.shape)
        named.append(None if result is None else result.name)
        taken.update(named[-1:])
    return tuple(named)


def expands(rule: OpRule, splits: tuple[tuple[str, tuple[int, ...]], ...]) -> bool:
    """Whether the op expands because of a split factor."""
    names = {name for name, _ in splits}
    return ROUTED in names or any(factor.expands and factor.name in names for factor in rule.factors)


def fillings(
    call: Call, rule: OpRule, operands: tuple[Layout, ...], zeros: tuple[bool, ...]
) -> list[tuple[int, int, float]]:
    """(operand, dim, value): the padding that the op would read, and what to fill it with."""
    fills = []
    for i, (meta, layout) in enumerate(zip(call.inputs, operands, strict=True)):
        padded = padded_shape(meta.shape, layout)
        for dim, (size, longer) in enumerate(zip(meta.shape, padded, strict=True)):
            factor = rule.inputs[i][dim]
            if size != longer and factor is not None:
                value = _filling(call, rule, i, factor)
                if value is not None and not (value == 0 and zeros and zeros[i]):
                    fills.append((i, dim, value))
    return fills


def _filling(call: Call, rule: OpRule, operand: int, factor: int) -> float | None:
    stated = {(i, f): value for i, f, value in rule.padding}
    if (operand, factor) in stated:
        return stated[operand, factor]
    dtype = call.inputs[operand].dtype
    outputs = zip(rule.factors[factor].reductions, call.outputs, strict=True)
    wanted = {reduction for reduction, meta in outputs if reduction and meta is not None}
    if len(wanted) > 1:
        raise ValueError(
            f"the rule {rule} of {call.node.op} reduces {rule.factors[factor].name} by {' and '.join(sorted(wanted))}: "
            f"no padding changes neither, so say what to fill it with (OpRule.padding), or make the factor even"
        )
    for reduction in wanted:
        return neutral(reduction, dtype)
    is_index = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return 0 if is_index and not rule.elementwise else None


def local_shapes(
    call: Call, operands: tuple[Layout, ...], results: tuple[Layout, ...], mesh: Shape
) -> tuple[tuple[Shape, ...], tuple[Shape | None, ...]]:
    """Local shapes of an op's operands and outputs."""
    return (
        tuple(local_shape(m.shape, layout, mesh) for m, layout in zip(call.inputs, operands, strict=True)),
        tuple(
            None if m is None else local_shape(m.shape, layout, mesh)
            for m, layout in zip(call.outputs, results, strict=True)
        ),
    )
