"""Random operators: their list, a form that draws the same numbers on shards, and its rule.

ATen's random operators take numbers from a generator in the order in which they run. `seeded` rewrites each as
operators of `autopar.ir.randomness`, which read a key, and pointwise ATen; then every dim can be split, without
communication.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar.ir import randomness
from autopar.ir.emitter import Emitter
from autopar.ir.graph import Node, Ref, overload, parameters
from autopar.ir.layout import Layout, Shape, Split, digits_of, padded_shape
from autopar.ir.program import RankIndex

from .expansions import Results
from .parts import slice_of
from .rule import Call, OpRule
from .template import assemble
from .traced import traced

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


ops = torch.ops.autopar

Draw = Callable[[Call, Tensor], Results | None]
"""From a call that holds tensors, and a key, to its results; None if there is no such form of it."""
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


def dropped(emitter: Emitter, call: Call) -> tuple[Any, ...]:
    """The results of a dropout of everything: its input times 0, and a mask of nothing."""
    x = _holding_tensors(emitter, call).argument("input")
    kept = torch.zeros_like(x, dtype=torch.bool) if len(call.outputs) > 1 else None
    return (x * 0.0, kept)[: len(call.outputs)]


def seeded(emitter: Emitter, call: Call, key: str) -> tuple[Any, ...] | None:
    """The call with its numbers drawn from a key, or None if there is no such form of it."""
    draw = SEEDED.get(call.node.op)
    if draw is None or (call.has("generator") and call.argument("generator") is not None):
        return None
    results: Any = draw(_holding_tensors(emitter, call), traced(emitter, Ref(key)))
    return results if results is None or isinstance(results, tuple) else (results,)


def _holding_tensors(emitter: Emitter, call: Call) -> Call:
    args, kwargs = traced(emitter, (call.node.args, call.node.kwargs))
    return replace(call, node=replace(call.node, args=args, kwargs=kwargs))


def _uniform(call: Call, key: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    u: Tensor = ops.uniform(key, call.output.shape, call.output.dtype)
    return u if (low, high) == (0.0, 1.0) else u * (high - low) + low


def _normal(call: Call, key: Tensor) -> Tensor:
    normal: Tensor = ops.normal(key, call.output.shape, call.output.dtype)
    return normal


def _scaled_normal(call: Call, key: Tensor) -> Tensor:
    deviation, mean = call.argument("std"), call.argument("mean")
    numbers: Tensor = _normal(call, key) * deviation + mean
    return numbers


def _dropout(call: Call, key: Tensor) -> Any:
    p = 0.0 if call.argument("train") is False else float(call.argument("p"))
    return ops.dropout(key, call.argument("input"), p)


def _bernoulli(call: Call, key: Tensor) -> Tensor:
    p = call.argument("p" if call.has("p") else "self")
    if isinstance(p, float):
        hit: Tensor = ops.bernoulli(key, call.output.shape, p)
    else:
        hit = ops.uniform(key, call.output.shape, torch.float32) < p
    return hit.to(call.output.dtype)


def _exponentials(key: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Exponential numbers of mean 1, in float32 or float64. The uniform number stays above 0, whose logarithm is
    infinite: the term added to it is the largest that rounds no number below 1 up to 1."""
    u: Tensor = ops.uniform(key, shape, dtype)
    return -torch.log(u + (2.0**-55 if dtype == torch.float64 else 2.0**-26))


def _exponential(call: Call, key: Tensor) -> Tensor:
    wide = torch.promote_types(call.output.dtype, torch.float32)
    rate = float(call.argument("lambd"))
    return (_exponentials(key, call.output.shape, wide) * (1.0 / rate)).to(call.output.dtype)


def _geometric(call: Call, key: Tensor) -> Tensor:
    """The first of many tries that succeeds, counted from 1: an exponential number, rounded up."""
    numbers = _exponentials(key, call.output.shape, torch.float64)
    tries = torch.ceil(numbers * (-1.0 / math.log1p(-call.argument("p")))).clamp_min(1)
    return tries.to(call.output.dtype)


def _cauchy(call: Call, key: Tensor) -> Tensor:
    wide = torch.promote_types(call.output.dtype, torch.float32)
    u: Tensor = ops.uniform(key, call.output.shape, wide)
    numbers: Tensor = torch.tan(u * math.pi + -math.pi / 2) * call.argument("sigma") + call.argument("median")
    return numbers.to(call.output.dtype)


def _log_normal(call: Call, key: Tensor) -> Tensor:
    return torch.exp(_scaled_normal(call, key))


def _multinomial(call: Call, key: Tensor) -> Tensor:
    """Without replacement the categories that come in first where each runs for an exponential time over its weight;
    with replacement those in which random shares of the total weight lie. In float64: a weight of 1e-9 counts."""
    weights, count = call.argument("self"), call.argument("num_samples")
    wide = weights.to(torch.float64)
    if count == 1 or not call.argument("replacement"):
        speeds: Tensor = wide / _exponentials(key, weights.shape, torch.float64)
        return speeds.argmax(-1, keepdim=True) if count == 1 else speeds.topk(count)[1]
    sums = wide.cumsum(-1)
    total = slice_of(sums, sums.ndim - 1, sums.shape[-1] - 1, sums.shape[-1])
    share: Tensor = ops.uniform(key, call.output.shape, torch.float64)
    # a share below 1 of a total is below the total, rounded too: no category past the end
    return torch.searchsorted(sums, share * total, right=True)


def _parameterized(op: str, parameter: str) -> Draw:
    """Numbers of a distribution of our own with a parameter at each element."""
    return lambda call, key: getattr(ops, op)(key, call.argument(parameter))


def _dirichlet(call: Call, key: Tensor) -> Tensor:
    """Gamma numbers over their sum."""
    gammas: Tensor = ops.standard_gamma(key, call.argument("self").to(torch.float64))
    return (gammas / gammas.sum(-1, keepdim=True)).to(call.output.dtype)


def _integers(call: Call, key: Tensor) -> Tensor | None:
    return _between(call, key, call.argument("low") if call.has("low") else 0, call.argument("high"))


def _between(call: Call, key: Tensor, low: int, high: int) -> Tensor | None:
    """Integers of [low, high), unless there are too many."""
    if high - low > randomness.INTEGERS_MOST:
        return None
    drawn: Tensor = ops.integers(key, call.output.shape, low, high, call.output.dtype)
    return drawn


def _random(call: Call, key: Tensor) -> Tensor | None:
    """Integers up to a limit, or up to the largest that the dtype holds exactly."""
    dtype = call.output.dtype
    high = call.argument("to") if call.has("to") else None
    if high is None:
        high = round(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max + 1
    return _between(call, key, call.argument("from") if call.has("from") else 0, min(high, 2**63 - 1))


def _permutation(call: Call, key: Tensor) -> Tensor:
    """The order of random numbers."""
    numbers: Tensor = ops.integers(key, call.output.shape, 0, 1 << 62, torch.int64)
    return numbers.argsort().to(call.output.dtype)


def _rrelu(call: Call, key: Tensor) -> tuple[Tensor, ...]:
    """A random slope below 0, and the slopes."""
    x = call.argument("self")
    of_slopes = replace(call, outputs=(call.inputs[0],))  # a checkpoint that runs again may want the slopes alone
    slope = _uniform(of_slopes, key, call.argument("lower"), call.argument("upper"))
    noise = torch.where(x > 0, 1.0, slope)
    return x * noise, noise


SEEDED: Mapping[str, Draw] = MappingProxyType({
    f"aten.{name}": draw for names, draw in (
        ("native_dropout.default", _dropout),
        ("dropout.default", lambda call, key: _dropout(call, key)[:1]),
        ("bernoulli.default bernoulli.p bernoulli.Tensor", _bernoulli),
        ("rand.default rand_like.default", _uniform),
        ("uniform.default", lambda call, key: _uniform(call, key, call.argument("from"), call.argument("to"))),
        ("randn.default randn_like.default", _normal),
        ("normal_functional.default normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor",
         _scaled_normal),
        ("exponential.default", _exponential),
        ("geometric.default", _geometric),
        ("cauchy.default", _cauchy),
        ("log_normal.default", _log_normal),
        ("poisson.default", _parameterized("poisson", "self")),
        ("_standard_gamma.default", _parameterized("standard_gamma", "self")),
        ("_sample_dirichlet.default", _dirichlet),
        ("multinomial.default", _multinomial),
        ("randint.default randint_like.default", _integers),
        ("randint.low randint_like.low_dtype", _integers),
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
