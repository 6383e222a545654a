"""The affine maps of one operator: those of a view follow from its shapes, those of other operators from their rules.

A rule gives the factors that dims carry (CFP Table 1: element-wise, broadcast, contraction). Without a rule, every
element of a result depends on every element of every operand.
"""

from functools import cache
from typing import Any

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, TensorMeta, constants_of
from autopar.ir.layout import Shape
from autopar.ops.rule import Call, OpRule

from .affine import AffineMap, Expression, add, digit, permute, reshape, times, variable


def signatures(graph: JointGraph) -> tuple[int, ...]:
    """A number for each node, equal for nodes of equal op, constants and metas: their rules, maps and fingerprints are
    equal, whoever their operands are, and are computed once."""
    kinds: dict[TensorMeta, int] = {}
    kind = {name: kinds.setdefault(meta, len(kinds)) for name, meta in graph.metas.items()}
    numbers: dict[Any, int] = {}
    labels: list[int] = []
    for node in graph.nodes:
        names: list[str] = []
        constants = (constants_of(node.args, names), tuple([(k, constants_of(v, names)) for k, v in node.kwargs]))
        metas = tuple([kind[name] for name in names]), tuple([kind[o] if o else -1 for o in node.outputs])
        labels.append(numbers.setdefault((node.op, node.backward, constants, metas), len(numbers)))
    return tuple(labels)


def dependency(call: Call, rule: OpRule | None) -> tuple[tuple[AffineMap | None, ...], ...]:
    """For each output (None where nobody uses it), for each tensor operand, the map from the output's
    indices to the operand's. Views are mapped from their shapes, other ops from their rule's factors;
    without a rule everything depends on everything."""
    maps: list[tuple[AffineMap | None, ...]] = []
    for slot, output in enumerate(call.outputs):
        if output is None:
            maps.append((None,) * len(call.inputs))
        elif call.node.op == RESHAPE:
            maps.append((reshape(call.inputs[0].shape, output.shape),))
        elif call.node.op == PERMUTE:
            order = tuple(d % len(output.shape) for d in call.node.args[1])
            maps.append((permute(call.inputs[0].shape, order),))
        else:
            sizes = _factor_sizes(rule) if rule else ()
            carried = rule.outputs[slot] if rule else (None,) * len(output.shape)
            maps.append(
                tuple(
                    _carried(
                        output.shape, carried, meta.shape, rule.inputs[i] if rule else (None,) * len(meta.shape), sizes
                    )
                    for i, meta in enumerate(call.inputs)
                )
            )
    return tuple(maps)


def _factor_sizes(rule: OpRule) -> tuple[int, ...]:
    """Sizes of the factors; 0 where dims that carry a factor are not mapped index by index. What expands is
    not computed shard by shard (an index depends on others than its own), and scaled dims differ in length."""
    scaled = {
        factor
        for several, scales in ((rule.inputs, rule.input_scales), (rule.outputs, rule.output_scales))
        for dims, factors in zip(several, scales, strict=False)
        for factor, scale in zip(dims, factors, strict=True)
        if scale != 1
    }
    return tuple(0 if factor.expands or number in scaled else factor.size for number, factor in enumerate(rule.factors))


@cache
def _carried(
    outputs: Shape, output_factors: tuple[int | None, ...], inputs: Shape, input_factors: tuple[int | None, ...],
    sizes: tuple[int, ...],
) -> AffineMap:  # fmt: skip
    """The map between dims that carry the same factor (CFP Table 1: element-wise, broadcast,
    contraction). A factor smaller than its dims repeats along them: index i of one part depends on
    index i of every part."""
    indices: list[Expression] = []
    free: list[int] = []

    def anything(size: int) -> Expression:
        free.append(size)
        return variable(len(outputs) + len(free) - 1, size)

    for size, factor in zip(inputs, input_factors, strict=True):
        if size == 1:
            indices.append(Expression(()))
        elif factor is None or factor not in output_factors or not sizes[factor]:
            indices.append(anything(size))
        else:
            dim, period = output_factors.index(factor), sizes[factor]
            index = digit(variable(dim, outputs[dim]), 1, period)
            indices.append(index if size == period else add(times(anything(size // period), period), index))
    return AffineMap(outputs=outputs, inputs=inputs, indices=tuple(indices), free=tuple(free))
