"""Rules of elementwise ops that are more than a broadcast: divisions, fillings, and those with a buffer."""

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import TensorMeta

from .families import DIMS, FIRST, Rule, pointwise
from .rule import Call, OpRule
from .template import Linear, Named, assemble


def division(linear: Linear | Callable[[Call], Linear] = ()) -> Rule:
    """Elementwise divisions and remainders by a tensor, the last operand. Padding of integers is divided by 1: an
    integer divided by 0 is an error."""
    elementwise = pointwise(linear)

    def rule(call: Call) -> OpRule | None:
        base = elementwise(call)
        if base is None or any(meta.dtype.is_floating_point for meta in call.inputs):
            return base
        last = len(call.inputs) - 1
        return replace(base, padding=tuple((last, f, 1.0) for f in base.inputs[last] if f is not None))

    return rule


def pointwise_with_buffer(linear: Linear = ()) -> Rule:
    """Pointwise ops with a buffer for backward, which is like the operand, or empty on devices that need none."""

    def rule(call: Call) -> OpRule:
        shape = call.inputs[0].shape
        names = DIMS[: len(shape)]

        def of(meta: TensorMeta | None) -> Named:
            return () if meta is None else names if meta.shape == shape else (None,) * len(meta.shape)

        return assemble(call, list(map(of, call.inputs)), list(map(of, call.outputs)), linear=linear)

    return rule


def filled_with_zero(call: Call) -> Linear:
    """Filling with zeros is linear, filling with anything else is not."""
    return FIRST if call.argument("value") == 0 else ()


def true_division(call: Call) -> Linear:
    """A quotient is linear in the dividend unless it is rounded."""
    return FIRST if call.argument("rounding_mode") is None else ()


def new(call: Call) -> OpRule:
    """new_zeros and the like read no element of their operand. It is split in the dims that the result has too, so that
    nobody has to gather it."""
    source, result = call.inputs[0], call.output
    names = DIMS[: len(result.shape)]
    if len(source.shape) != len(result.shape):
        return assemble(call, [[None] * len(source.shape)], [names])
    pairs = zip(names, source.shape, result.shape, strict=True)
    return assemble(call, [[name if a == b else None for name, a, b in pairs]], [names])
