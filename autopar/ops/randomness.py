"""Random operators: their list, a form that draws the same numbers on shards, and its rule.

ATen's random operators take numbers from a generator in the order in which they run. `seeded` rewrites each as
operators of `autopar.ir.randomness`, which read a key, and pointwise ATen; then every dim can be split, without
communication.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir import randomness
from autopar.ir.emitter import Emitter
from autopar.ir.graph import Node, Ref, overload, parameters
from autopar.ir.layout import Layout, Shape, Split, digits_of, padded_shape
from autopar.ir.program import RankIndex

from .expansions import Results, cast
from .rule import Call, OpRule
from .template import assemble

KEY_SHAPE, KEY_DTYPE = randomness.KEY_SHAPE, randomness.KEY_DTYPE


def drawn(call: Call) -> OpRule:
    """The key is replicated; every dim of the result, and of another operand, can be split."""
    rank = next(len(meta.shape) for meta in call.outputs if meta)
    names = [f"d{i}" for i in range(rank)]
    return assemble(call, [[None], *([names] * (len(call.inputs) - 1))], [names if m else () for m in call.outputs])


def held(call: Call, results: tuple[Layout, ...], mesh: Shape) -> Mapping[str, Any]:
    """The elements of the result that a rank draws, as loops over the global tensor (see `autopar.ir.randomness`)."""
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


Draw = Callable[[Emitter, Call, Ref], Results | None]
_DROPOUTS = "aten.native_dropout.default", "aten.dropout.default"


def may_draw(op: str) -> bool:
    """Whether an operator may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in overload(op).tags  # type: ignore[attr-defined]


def draws(node: Node) -> bool:
    """Whether a node draws random numbers: its operator may, no probability is 0, and it is no dropout of everything,
    for which torch draws none (see `dropped`)."""
    if not may_draw(node.op):
        return False
    given = dict(node.kwargs)
    for position, parameter in enumerate(parameters(node.op)):
        value = node.args[position] if position < len(node.args) else given.get(parameter.name, parameter.default)
        if parameter.name in ("p", "dropout_p") and isinstance(value, int | float) and value == 0:
            return node.op in SEEDED
    return not drops_all(node)


def drops_all(node: Node) -> bool:
    """Whether a node is a dropout that zeros every element."""
    return node.op in _DROPOUTS and node.args[1] == 1 and node.args[2] is not False


def dropped(emitter: Emitter, call: Call) -> Results:
    """The results of a dropout of everything: its input times 0, and a mask of nothing."""
    x = call.argument("input")
    kept = emitter.op("aten.zeros_like.default", x, dtype=torch.bool) if len(call.outputs) > 1 else None
    return (emitter.op("aten.mul.Scalar", x, 0.0), kept)[: len(call.outputs)]


def seeded(emitter: Emitter, call: Call, key: Ref) -> Results | None:
    """The call with its numbers drawn from a key, or None if there is no such form of it."""
    draw = SEEDED.get(call.node.op)
    own = call.has("generator") and call.argument("generator") is not None
    return None if draw is None or own else draw(emitter, call, key)


def _uniform(emitter: Emitter, call: Call, key: Ref, low: float = 0.0, high: float = 1.0) -> Ref:
    u = emitter.op("autopar.uniform.default", key, call.output.shape, call.output.dtype)
    return u if (low, high) == (0.0, 1.0) else _scaled(emitter, u, high - low, low)


def _normal(emitter: Emitter, call: Call, key: Ref) -> Ref:
    return emitter.op("autopar.normal.default", key, call.output.shape, call.output.dtype)


def _scaled(emitter: Emitter, value: Ref, factor: Any, term: Any) -> Ref:
    """value * factor + term, with numbers or tensors."""
    for name, other in (("mul", factor), ("add", term)):
        value = emitter.op(f"aten.{name}.{'Tensor' if isinstance(other, Ref) else 'Scalar'}", value, other)
    return value


def _dropout(emitter: Emitter, call: Call, key: Ref) -> Results:
    p = 0.0 if call.argument("train") is False else float(call.argument("p"))
    return emitter.ops("autopar.dropout.default", key, call.argument("input"), p)


def _bernoulli(emitter: Emitter, call: Call, key: Ref) -> Results:
    p = call.argument("p" if call.has("p") else "self")
    if isinstance(p, float):
        return (cast(emitter, emitter.op("autopar.bernoulli.default", key, call.output.shape, p), call.output.dtype),)
    u = emitter.op("autopar.uniform.default", key, call.output.shape, torch.float32)
    hit = emitter.op("aten.lt.Tensor", u, p)
    return (emitter.op("aten._to_copy.default", hit, dtype=call.output.dtype),)


def _exponentials(emitter: Emitter, key: Ref, shape: Shape, dtype: torch.dtype) -> Ref:
    """Exponential numbers of mean 1, in float32 or float64. The uniform number stays above 0, whose logarithm is
    infinite: the term added to it is the largest that rounds no number below 1 up to 1."""
    u = emitter.op("autopar.uniform.default", key, shape, dtype)
    above = emitter.op("aten.add.Scalar", u, 2.0**-55 if dtype == torch.float64 else 2.0**-26)
    return emitter.op("aten.neg.default", emitter.op("aten.log.default", above))


def _exponential(emitter: Emitter, call: Call, key: Ref) -> Results:
    wide = torch.promote_types(call.output.dtype, torch.float32)
    numbers = _exponentials(emitter, key, call.output.shape, wide)
    return (cast(emitter, emitter.op("aten.mul.Scalar", numbers, 1.0 / call.argument("lambd")), call.output.dtype),)


def _geometric(emitter: Emitter, call: Call, key: Ref) -> Results:
    """The first of many tries that succeeds, counted from 1: an exponential number, rounded up."""
    numbers = _exponentials(emitter, key, call.output.shape, torch.float64)
    scaled = emitter.op("aten.mul.Scalar", numbers, -1.0 / math.log1p(-call.argument("p")))
    tries = emitter.op("aten.clamp_min.default", emitter.op("aten.ceil.default", scaled), 1)
    return (cast(emitter, tries, call.output.dtype),)


def _cauchy(emitter: Emitter, call: Call, key: Ref) -> Results:
    wide = torch.promote_types(call.output.dtype, torch.float32)
    u = emitter.op("autopar.uniform.default", key, call.output.shape, wide)
    tangent = emitter.op("aten.tan.default", _scaled(emitter, u, math.pi, -math.pi / 2))
    scaled = _scaled(emitter, tangent, call.argument("sigma"), call.argument("median"))
    return (cast(emitter, scaled, call.output.dtype),)


def _log_normal(emitter: Emitter, call: Call, key: Ref) -> Results:
    normal = _scaled(emitter, _normal(emitter, call, key), call.argument("std"), call.argument("mean"))
    return (emitter.op("aten.exp.default", normal),)


def _multinomial(emitter: Emitter, call: Call, key: Ref) -> Results:
    """Without replacement the categories that come in first where each runs for an exponential time over its weight;
    with replacement those in which random shares of the total weight lie. In float64: a weight of 1e-9 counts."""
    weights, count = call.argument("self"), call.argument("num_samples")
    shape = emitter.meta(weights).shape
    wide = emitter.op("aten._to_copy.default", weights, dtype=torch.float64)
    if count == 1 or not call.argument("replacement"):
        times = _exponentials(emitter, key, shape, torch.float64)
        speeds = emitter.op("aten.div.Tensor", wide, times)
        if count == 1:
            return (emitter.op("aten.argmax.default", speeds, -1, True),)
        return (emitter.ops("aten.topk.default", speeds, count)[1],)
    sums = emitter.op("aten.cumsum.default", wide, -1)
    total = emitter.op("aten.slice.Tensor", sums, -1, shape[-1] - 1, shape[-1])
    share = emitter.op("autopar.uniform.default", key, call.output.shape, torch.float64)
    # a share below 1 of a total is below the total, rounded too: no category past the end
    places = emitter.op("aten.mul.Tensor", share, total)
    return (emitter.op("aten.searchsorted.Tensor", sums, places, right=True),)


def _parameterized(op: str, parameter: str) -> Draw:
    """Numbers of a distribution of our own with a parameter at each element."""

    def draw(emitter: Emitter, call: Call, key: Ref) -> Results:
        return (emitter.op(op, key, call.argument(parameter)),)

    return draw


def _dirichlet(emitter: Emitter, call: Call, key: Ref) -> Results:
    """Gamma numbers over their sum."""
    wide = emitter.op("aten._to_copy.default", call.argument("self"), dtype=torch.float64)
    gammas = emitter.op("autopar.standard_gamma.default", key, wide)
    share = emitter.op("aten.div.Tensor", gammas, emitter.op("aten.sum.dim_IntList", gammas, (-1,), True))
    return (cast(emitter, share, call.output.dtype),)


def _integers(low: str = "") -> Draw:
    def draw(emitter: Emitter, call: Call, key: Ref) -> Results | None:
        least, most = call.argument(low) if low else 0, call.argument("high")
        if most - least > randomness.INTEGERS_MOST:
            return None
        return (emitter.op("autopar.integers.default", key, call.output.shape, least, most, call.output.dtype),)

    return draw


def _random(emitter: Emitter, call: Call, key: Ref) -> Results | None:
    """Integers up to a limit, or up to the largest that the dtype holds exactly."""
    dtype = call.output.dtype
    low = call.argument("from") if call.has("from") else 0
    high = call.argument("to") if call.has("to") else None
    if high is None:
        high = round(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max + 1
    high = min(high, 2**63 - 1)
    if high - low > randomness.INTEGERS_MOST:
        return None
    return (emitter.op("autopar.integers.default", key, call.output.shape, low, high, dtype),)


def _permutation(emitter: Emitter, call: Call, key: Ref) -> Results:
    """The order of random numbers."""
    numbers = emitter.op("autopar.integers.default", key, call.output.shape, 0, 1 << 62, torch.int64)
    order = emitter.op("aten.argsort.default", numbers)
    return (cast(emitter, order, call.output.dtype),)


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


SEEDED: Mapping[str, Draw] = MappingProxyType({
    f"aten.{name}": draw for names, draw in (
        ("native_dropout.default", _dropout),
        ("dropout.default", lambda *given: _dropout(*given)[:1]),
        ("bernoulli.default bernoulli.p bernoulli.Tensor", _bernoulli),
        ("rand.default rand_like.default", _distributed(_uniform)),
        ("uniform.default", lambda emitter, call, key: (
            _uniform(emitter, call, key, call.argument("from"), call.argument("to")),)),
        ("randn.default randn_like.default", _distributed(_normal)),
        ("normal_functional.default normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor",
         _distributed(_normal, "std", "mean")),
        ("exponential.default", _exponential),
        ("geometric.default", _geometric),
        ("cauchy.default", _cauchy),
        ("log_normal.default", _log_normal),
        ("poisson.default", _parameterized("autopar.poisson.default", "self")),
        ("_standard_gamma.default", _parameterized("autopar.standard_gamma.default", "self")),
        ("_sample_dirichlet.default", _dirichlet),
        ("multinomial.default", _multinomial),
        ("randint.default randint_like.default", _integers()),
        ("randint.low randint_like.low_dtype", _integers("low")),
        ("random.from random.to random.default", _random),
        ("randperm.default", _permutation),
        ("rrelu_with_noise_functional.default", _rrelu),
    ) for name in names.split()
})  # fmt: skip

FILLS = frozenset(
    f"aten.{name}"
    for name in (
        "uniform.default", "normal_functional.default", "exponential.default", "geometric.default", "cauchy.default",
        "log_normal.default", "random.from", "random.to", "random.default", "bernoulli.p", "rand_like.default",
        "randn_like.default", "randint_like.default", "randint_like.low_dtype",
    )
)  # fmt: skip
"""Those that read no element of the tensor that they are given: its shape and dtype alone."""
