"""Random operators: which they are, what draws the same numbers on shards, and its rule.

ATen's random operators take numbers from a generator in the order in which they run. `seeded` writes
each as operators of `autopar.randomness`, which read a key, and as pointwise ATen; then every dim can
be split, and nothing is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from .. import randomness
from ..graph import Node, Ref, overload
from ..layout import Layout, Shape, Split, digits_of, padded_shape
from ..program import RankIndex
from .rule import Call, Emitter, OpRule, parameters
from .template import assemble

KEY_SHAPE, KEY_DTYPE = randomness.KEY_SHAPE, randomness.KEY_DTYPE


def drawn(call: Call) -> OpRule:
    """The key is whole; every dim of the result, and of another operand, can be split."""
    rank = next(len(meta.shape) for meta in call.outputs if meta)
    names = [f"d{i}" for i in range(rank)]
    return assemble(call, [[None], *([names] * (len(call.inputs) - 1))], [names if m else () for m in call.outputs])


def held(call: Call, results: tuple[Layout, ...], mesh: Shape) -> Mapping[str, Any]:
    """Which elements of the result a rank makes, as loops over the whole (see `autopar.randomness`)."""
    meta, layout = next((m, r) for m, r in zip(call.outputs, results, strict=True) if m is not None)
    if not any(isinstance(placement, Split) for placement in layout):
        return {}
    loops: list[tuple[int, int]] = []
    terms: list[tuple[int, int]] = []
    for dim in range(len(meta.shape)):
        below = math.prod(meta.shape[dim + 1 :])
        digits = digits_of(layout, dim, mesh.__getitem__)
        above = padded_shape(meta.shape, layout)[dim]
        for stride, axis in digits:
            loops.append((above // (stride * mesh[axis]), stride * mesh[axis] * below))
            terms.append((axis, stride * below))
            above = stride
        loops.append((above, below))
    merged: list[tuple[int, int]] = []
    for count, stride in loops:
        if count == 1:
            continue
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    box, strides = zip(*merged or [(1, 1)], strict=True)
    return {"box": box, "strides": strides, "base": RankIndex(tuple(sorted(terms)))}


Results = tuple[Ref | None, ...]
Draw = Callable[[Emitter, Call, Ref], Results]


def draws(node: Node) -> bool:
    """Whether a node draws random numbers: its operator may, and no probability of 0 says that it does not."""
    if torch.Tag.nondeterministic_seeded not in overload(node.op).tags:  # type: ignore[attr-defined]
        return False
    given = dict(node.kwargs)
    for position, parameter in enumerate(parameters(node.op)):
        value = node.args[position] if position < len(node.args) else given.get(parameter.name, parameter.default)
        if parameter.name in ("p", "dropout_p") and isinstance(value, int | float) and value == 0:
            return node.op in SEEDED
    return True


def seeded(emitter: Emitter, call: Call, key: Ref) -> Results | None:
    """The call with its numbers drawn from a key, or None if nothing does what it does."""
    draw = SEEDED.get(call.node.op)
    own = any(p.name == "generator" and call.argument("generator") is not None for p in parameters(call.node.op))
    return None if draw is None or own else draw(emitter, call, key)


def _shape(call: Call) -> Shape:
    assert call.outputs[0] is not None
    return call.outputs[0].shape


def _dtype(call: Call) -> torch.dtype:
    assert call.outputs[0] is not None
    return call.outputs[0].dtype


def _uniform(emitter: Emitter, call: Call, key: Ref, low: float = 0.0, high: float = 1.0) -> Ref:
    made = emitter.op("autopar.uniform.default", key, _shape(call), _dtype(call))
    return made if (low, high) == (0.0, 1.0) else _scaled(emitter, made, high - low, low)


def _normal(emitter: Emitter, call: Call, key: Ref) -> Ref:
    return emitter.op("autopar.normal.default", key, _shape(call), _dtype(call))


def _scaled(emitter: Emitter, value: Ref, factor: Any, term: Any) -> Ref:
    """value * factor + term, with numbers or tensors."""
    for name, other in (("mul", factor), ("add", term)):
        value = emitter.op(f"aten.{name}.{'Tensor' if isinstance(other, Ref) else 'Scalar'}", value, other)
    return value


def _dropout(emitter: Emitter, call: Call, key: Ref) -> Results:
    p = 0.0 if call.argument("train") is False else float(call.argument("p"))
    return emitter.ops("autopar.dropout.default", key, call.argument("input"), p)


def _bernoulli(emitter: Emitter, call: Call, key: Ref) -> Results:
    tossed = any(p.name == "p" for p in parameters(call.node.op))
    p = call.argument("p" if tossed else "self")
    u = emitter.op("autopar.uniform.default", key, _shape(call), torch.float32)
    hit = emitter.op(f"aten.lt.{'Tensor' if isinstance(p, Ref) else 'Scalar'}", u, p)
    return (emitter.op("aten._to_copy.default", hit, dtype=_dtype(call)),)


def _exponential(emitter: Emitter, call: Call, key: Ref) -> Results:
    """Never 0, whose logarithm is taken where this is used: the smallest number above 0 that a uniform
    number close to 1 is not rounded up by is 2^-26."""
    wide = torch.promote_types(_dtype(call), torch.float32)
    u = emitter.op("autopar.uniform.default", key, _shape(call), wide)
    logarithm = emitter.op("aten.log.default", emitter.op("aten.add.Scalar", u, 2.0**-26))
    made = emitter.op("aten.mul.Scalar", logarithm, -1.0 / call.argument("lambd"))
    return (made if wide == _dtype(call) else emitter.op("aten._to_copy.default", made, dtype=_dtype(call)),)


def _integers(low: str = "") -> Draw:
    def draw(emitter: Emitter, call: Call, key: Ref) -> Results:
        least = call.argument(low) if low else 0
        range_ = (least, call.argument("high"))
        return (emitter.op("autopar.integers.default", key, _shape(call), *range_, _dtype(call)),)

    return draw


def _permutation(emitter: Emitter, call: Call, key: Ref) -> Results:
    """The order of random numbers."""
    numbers = emitter.op("autopar.integers.default", key, _shape(call), 0, 1 << 62, torch.int64)
    order = emitter.op("aten.argsort.default", numbers)
    return (order if _dtype(call) == torch.int64 else emitter.op("aten._to_copy.default", order, dtype=_dtype(call)),)


def _rrelu(emitter: Emitter, call: Call, key: Ref) -> Results:
    """A random slope below 0, and the slopes."""
    x = call.argument("self")
    slope = _uniform(emitter, call, key, call.argument("lower"), call.argument("upper"))
    noise = emitter.op("aten.where.ScalarSelf", emitter.op("aten.gt.Scalar", x, 0), 1.0, slope)
    return emitter.op("aten.mul.Tensor", x, noise), noise


def _distributed(draw: Callable[[Emitter, Call, Ref], Ref], factor: str = "", term: str = "") -> Draw:
    """Numbers of a distribution, times one argument plus another."""

    def drawn(emitter: Emitter, call: Call, key: Ref) -> Results:
        value = draw(emitter, call, key)
        return (_scaled(emitter, value, call.argument(factor), call.argument(term)) if factor else value,)

    return drawn


_normals = _distributed(_normal, "std", "mean")

SEEDED: Mapping[str, Draw] = MappingProxyType({
    "aten.native_dropout.default": _dropout,
    "aten.dropout.default": lambda *given: _dropout(*given)[:1],
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _bernoulli,
    "aten.rand.default": _distributed(_uniform),
    "aten.rand_like.default": _distributed(_uniform),
    "aten.uniform.default": lambda emitter, call, key: (
        _uniform(emitter, call, key, call.argument("from"), call.argument("to")),),
    "aten.randn.default": _distributed(_normal),
    "aten.randn_like.default": _distributed(_normal),
    "aten.normal_functional.default": _normals,
    "aten.normal.float_float": _normals,
    "aten.normal.Tensor_float": _normals,
    "aten.normal.float_Tensor": _normals,
    "aten.normal.Tensor_Tensor": _normals,
    "aten.exponential.default": _exponential,
    "aten.randint.default": _integers(),
    "aten.randint.low": _integers("low"),
    "aten.randint_like.default": _integers(),
    "aten.randint_like.low_dtype": _integers("low"),
    "aten.randperm.default": _permutation,
    "aten.rrelu_with_noise_functional.default": _rrelu,
})  # fmt: skip
