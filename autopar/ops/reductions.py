"""Reductions and running sums along a split dim whose shards are no partial results: each rank reduces what it holds,
and small all-reduces, without the reduced dims, combine that.
"""

import math
from collections.abc import Callable

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref
from autopar.ir.layout import padded_shape

from .expansions import Expansion, LocalCall, Results, all_reduce, cast, filled_beyond, global_indices, wide
from .families import DIMS, FIRST, Rule, axes, keeps_dims, reduced_dims
from .rule import Call, OpRule, neutral
from .template import assemble


def combined(
    possible: Callable[[Call], bool] = lambda call: True, *, padding: Callable[[Call], float] | None = None
) -> Rule:
    """Reductions over `dim` (all dims without it) whose results are replicated. Where it is not `possible` to combine
    shards, the reduced dims are unsplit. `padding` is what changes nothing; without it the split has to be even."""

    def rule(call: Call) -> OpRule:
        split = possible(call)
        names, outputs, over = reduced_dims(call, split=split)
        return assemble(
            call, [names], outputs, expands=over, uneven=over if padding else (),
            reductions={name: ("",) * len(outputs) for name in over},
            padding={(0, name): padding(call) for name in over} if padding and split else None,
        )  # fmt: skip

    return rule


def numbers(call: Call) -> bool:
    """Collectives have no maximum of truth values, and complex numbers have none at all."""
    return not (call.inputs[0].dtype is torch.bool or call.inputs[0].dtype.is_complex)


def real(call: Call) -> bool:
    return call.inputs[0].dtype.is_floating_point


def one_dim(call: Call) -> bool:
    """Whether a place is one along a dim, not in the flattened tensor."""
    return numbers(call) and call.argument("dim") is not None


def has_power(call: Call) -> bool:
    """Whether a norm is a root of a sum of powers, or an extreme."""
    return real(call) and (call.argument("ord") > 0 or call.argument("ord") == -math.inf)


def least(call: Call) -> float:
    """What changes no maximum."""
    return neutral("max", call.inputs[0].dtype)


def greatest(call: Call) -> float:
    """What changes no minimum."""
    return neutral("min", call.inputs[0].dtype)


def no_part(call: Call) -> float:
    """What changes no norm."""
    return math.inf if call.argument("ord") == -math.inf else 0.0


def _reduced(local: LocalCall) -> tuple[int, ...]:
    return axes(local.call, "dim", len(local.call.inputs[0].shape))


def _over(local: LocalCall) -> tuple[int, ...]:
    """The mesh axes that split reduced dims."""
    return tuple(axis for d in _reduced(local) for axis in local.splits.get(DIMS[d], ()))


def _shaped(emitter: Emitter, local: LocalCall, value: Ref) -> Ref:
    """A result with its reduced dims of size 1 in the shape of the op's result."""
    return value if keeps_dims(local.call) else emitter.op("aten.squeeze.dims", value, _reduced(local))


def truth(reduction: str) -> Expansion:
    """any ("max") and all ("min"), by an all-reduce of bytes."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        value = local.result(emitter, *local.args, **dict(local.kwargs))
        dtype = emitter.meta(value).dtype
        value = emitter.op("aten._to_copy.default", value, dtype=torch.uint8)
        value = all_reduce(emitter, value, reduction, _over(local))
        return (emitter.op("aten._to_copy.default", value, dtype=dtype),)

    return expand


def extreme(reduction: str, *, values: bool) -> Expansion:
    """max.dim, min.dim and argmax, argmin: the best value of all ranks, then the first place that has it: two
    all-reduces without the reduced dim."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        source, shape, (dim,) = local.args[0], local.call.inputs[0].shape, _reduced(local)
        best = emitter.op("aten.amax.default" if reduction == "max" else "aten.amin.default", source, (dim,), True)
        best = all_reduce(emitter, best, reduction, _over(local))
        equal = emitter.op("aten.eq.Tensor", source, best)
        if emitter.meta(source).dtype.is_floating_point:
            equal = emitter.op("aten.logical_or.default", equal, emitter.op("aten.isnan.default", source))
        here = global_indices(emitter, shape, local.operands[0], dim)
        here = emitter.op("aten.reshape.default", here, tuple(-1 if d == dim else 1 for d in range(len(shape))))
        place = emitter.op("aten.where.ScalarOther", equal, here, torch.iinfo(torch.int64).max)
        place = all_reduce(emitter, emitter.op("aten.amin.default", place, (dim,), True), "min", _over(local))
        results = (_shaped(emitter, local, best), _shaped(emitter, local, place))
        return results if values else results[1:]

    return expand


def logsumexp(emitter: Emitter, local: LocalCall) -> Results:
    """logsumexp: two all-reduces, of the maximum and of the sum of exponentials."""
    source, dims = wide(emitter, local.args[0]), _reduced(local)
    highest = all_reduce(emitter, emitter.op("aten.amax.default", source, dims, True), "max", _over(local))
    infinite = emitter.op("aten.isinf.default", highest)
    highest = emitter.op("aten.masked_fill.Scalar", highest, infinite, 0.0)
    powers = emitter.op("aten.exp.default", emitter.op("aten.sub.Tensor", source, highest))
    total = all_reduce(emitter, emitter.op("aten.sum.dim_IntList", powers, dims, True), "sum", _over(local))
    result = emitter.op("aten.add.Tensor", highest, emitter.op("aten.log.default", total))
    return (cast(emitter, _shaped(emitter, local, result), emitter.meta(local.args[0]).dtype),)


def variance(*, root: bool = False, mean: bool = False) -> Expansion:
    """var, std, var_mean: two all-reduces, of the sum and of the squared differences from the mean."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        source, dims = wide(emitter, local.args[0]), _reduced(local)
        dtype = emitter.meta(local.args[0]).dtype
        count = math.prod(local.call.inputs[0].shape[d] for d in dims)
        correction = local.call.argument("correction")
        total = all_reduce(emitter, emitter.op("aten.sum.dim_IntList", source, dims, True), "sum", _over(local))
        middle = emitter.op("aten.div.Scalar", total, count)
        difference = emitter.op("aten.sub.Tensor", source, middle)
        shape, layout = local.call.inputs[0].shape, local.operands[0]
        for d in dims:
            if padded_shape(shape, layout)[d] > shape[d]:
                difference = filled_beyond(emitter, difference, shape, layout, d, 0.0)
        squares = emitter.op("aten.sum.dim_IntList", emitter.op("aten.mul.Tensor", difference, difference), dims, True)
        squares = all_reduce(emitter, squares, "sum", _over(local))
        result = emitter.op("aten.div.Scalar", squares, max(0.0, count - (1 if correction is None else correction)))
        result = emitter.op("aten.sqrt.default", result) if root else result
        results = (result, middle) if mean else (result,)
        return tuple(cast(emitter, _shaped(emitter, local, value), dtype) for value in results)

    return expand


def vector_norm(emitter: Emitter, local: LocalCall) -> Results:
    """linalg_vector_norm: an all-reduce of the sum of powers, or of the extreme."""
    order = float(local.call.argument("ord"))
    value = local.result(emitter, *local.args, **dict(local.kwargs))
    if math.isinf(order):
        return (all_reduce(emitter, value, "max" if order > 0 else "min", _over(local)),)
    dtype = emitter.meta(value).dtype
    powers = emitter.op("aten.pow.Tensor_Scalar", wide(emitter, value), order)
    total = all_reduce(emitter, powers, "sum", _over(local))
    return (cast(emitter, emitter.op("aten.pow.Tensor_Scalar", total, 1 / order), dtype),)


# along a dim, which stays


STEP = "step"
"""The factor of the dim along which a sum runs."""


def running(call: Call) -> OpRule:
    """cumsum."""
    rank = len(call.inputs[0].shape)
    dim = call.argument("dim") % rank if rank else 0
    names = [STEP if d == dim else name for d, name in enumerate(DIMS[:rank])]
    return assemble(call, [names], [names], linear=FIRST, expands=(STEP,), contiguous=(STEP,), uneven=(STEP,))


def cumsum(emitter: Emitter, local: LocalCall) -> Results:
    """cumsum: each rank sends its total to all, and adds the totals of the ranks before it."""
    value = local.result(emitter, *local.args, **dict(local.kwargs))
    shape = emitter.meta(value).shape
    dim, over = local.args[1] % len(shape), local.splits[STEP]
    number = emitter.offset(over, 1)
    shards = emitter.op("aten.arange.default", math.prod(emitter.ranks(axis) for axis in over))
    beside = tuple(-1 if d == dim else 1 for d in range(len(shape)))
    total = emitter.op("aten.slice.Tensor", value, dim, shape[dim] - 1, shape[dim])
    mine = emitter.op("aten.reshape.default", emitter.op("aten.eq.Scalar", shards, number), beside)
    totals = all_reduce(emitter, emitter.op("aten.where.ScalarOther", mine, total, 0), "sum", over)
    after = emitter.op("aten.reshape.default", emitter.op("aten.ge.Scalar", shards, number), beside)
    before = emitter.op("aten.masked_fill.Scalar", totals, after, 0)
    offset = emitter.op("aten.sum.dim_IntList", before, (dim,), True)
    return (emitter.op("aten.add.Tensor", value, offset),)


def triangle(call: Call) -> OpRule:
    """tril, triu: each rank knows which of its elements to keep."""
    names = [*DIMS[: len(call.inputs[0].shape) - 2], "row", "column"]
    return assemble(call, [names], [names], linear=FIRST, expands=("row", "column"), uneven=("row", "column"))


def cut_triangle(emitter: Emitter, local: LocalCall) -> Results:
    """tril, triu with rows or columns split."""
    shape, layout = local.call.inputs[0].shape, local.operands[0]
    rank = len(shape)
    row, column = (global_indices(emitter, shape, layout, d) for d in (rank - 2, rank - 1))
    diagonal = emitter.op("aten.sub.Tensor", column, emitter.op("aten.unsqueeze.default", row, 1))
    beyond = "aten.gt.Scalar" if local.call.node.op.startswith("aten.tril") else "aten.lt.Scalar"
    dropped = emitter.op(beyond, diagonal, local.call.argument("diagonal"))
    return (emitter.op("aten.masked_fill.Scalar", local.args[0], dropped, 0),)
