"""Reductions and running sums along a split dim whose shards are no partial results: each rank reduces what it holds,
and small all-reduces, without the reduced dims, combine that.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from autopar.ir.layout import padded_shape

from .expansions import LocalCall, Results, all_reduce, filled_beyond, global_indices, wide
from .families import DIMS, FIRST, Rule, aligned, axes, keeps_dims, reduced_dims
from .lookup import PADDED, along_dim
from .losses import MEAN, NONE
from .parts import slice_of
from .rule import Call, OpRule, neutral
from .template import OWN_PART, Dim, assemble


def combined(
    possible: Callable[[Call], bool] = lambda call: True, *, padding: Callable[[Call], float] | None = None
) -> Rule:
    """Reductions over `dim` (all dims without it) whose results are replicated. Where it is not `possible` to combine
    shards, the reduced dims are unsplit. `padding` is what changes nothing; without it the split has to be even."""

    def rule(call: Call) -> OpRule:
        split = possible(call)
        names, outputs, over = reduced_dims(call, split=split)
        filled = {0: padding(call)} if padding and split else {}
        reduced = Dim(expands=True, even=padding is None, reductions=("",) * len(outputs), padding=filled)
        return assemble(call, [names], outputs, dict.fromkeys(over, reduced))

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


def _shaped(local: LocalCall, value: Tensor) -> Tensor:
    """A result with its reduced dims of size 1 in the shape of the op's result."""
    return value if keeps_dims(local.call) else value.squeeze(_reduced(local))


def truth(local: LocalCall, reduction: str) -> Results:
    """any ("max") and all ("min"), by an all-reduce of bytes."""
    value = local.result()
    return all_reduce(value.to(torch.uint8), reduction, _over(local)).to(value.dtype)


def extreme(local: LocalCall, reduction: str, *, values: bool) -> Results:
    """max.dim, min.dim and argmax, argmin: the best value of all ranks, then the first place that has it: two
    all-reduces without the reduced dim."""
    source, shape, (dim,) = local.args[0], local.call.inputs[0].shape, _reduced(local)
    best = source.amax(dim, keepdim=True) if reduction == "max" else source.amin(dim, keepdim=True)
    best = all_reduce(best, reduction, _over(local))
    equal = source == best
    if source.dtype.is_floating_point:
        equal = torch.logical_or(equal, source.isnan())
    here = along_dim(global_indices(local, shape, local.operands[0], dim), len(shape), dim)
    place = torch.where(equal, here, torch.iinfo(torch.int64).max)
    place = all_reduce(place.amin(dim, keepdim=True), "min", _over(local))
    results = _shaped(local, best), _shaped(local, place)
    return results if values else results[1:]


def logsumexp(local: LocalCall) -> Results:
    """logsumexp: two all-reduces, of the maximum and of the sum of exponentials."""
    source, dims = wide(local.args[0]), _reduced(local)
    highest = all_reduce(source.amax(dims, keepdim=True), "max", _over(local))
    highest = highest.masked_fill(highest.isinf(), 0.0)
    total = all_reduce(torch.exp(source - highest).sum(dims, keepdim=True), "sum", _over(local))
    return _shaped(local, highest + torch.log(total)).to(local.args[0].dtype)


def variance(local: LocalCall, *, root: bool = False, mean: bool = False) -> Results:
    """var, std, var_mean: two all-reduces, of the sum and of the squared differences from the mean."""
    source, dims = wide(local.args[0]), _reduced(local)
    shape, layout = local.call.inputs[0].shape, local.operands[0]
    count = math.prod(shape[d] for d in dims)
    correction = local.call.argument("correction")
    middle = all_reduce(source.sum(dims, keepdim=True), "sum", _over(local)) / count
    difference = source - middle
    for d in dims:
        if padded_shape(shape, layout)[d] > shape[d]:
            difference = filled_beyond(local, difference, shape, layout, d, 0.0)
    squares = all_reduce((difference * difference).sum(dims, keepdim=True), "sum", _over(local))
    result = squares / max(0.0, count - (1 if correction is None else correction))
    result = torch.sqrt(result) if root else result
    results = (result, middle) if mean else (result,)
    return tuple(_shaped(local, value).to(local.args[0].dtype) for value in results)


def vector_norm(local: LocalCall) -> Results:
    """linalg_vector_norm: an all-reduce of the sum of powers, or of the extreme."""
    order = float(local.call.argument("ord"))
    norm: Tensor = local.result()
    if math.isinf(order):
        return all_reduce(norm, "max" if order > 0 else "min", _over(local))
    total = all_reduce(wide(norm) ** order, "sum", _over(local))
    return (total ** (1 / order)).to(norm.dtype)


# along a dim, which stays


STEP = "step"
"""The factor of the dim along which a sum runs."""


def running(call: Call) -> OpRule:
    """cumsum."""
    rank = len(call.inputs[0].shape)
    dim = call.argument("dim") % rank if rank else 0
    names = [STEP if d == dim else name for d, name in enumerate(DIMS[:rank])]
    return assemble(call, [names], [names], {STEP: OWN_PART}, FIRST)


def cumsum(local: LocalCall) -> Results:
    """cumsum: each rank sends its total to all, and adds the totals of the ranks before it."""
    value: Tensor = local.result()
    rank, over = value.ndim, local.splits[STEP]
    dim = local.args[1] % rank
    number, shards = local.offset(over, 1), local.arange(local.ranks(over))
    total = slice_of(value, dim, value.shape[dim] - 1, value.shape[dim])
    mine = along_dim(shards == number, rank, dim)
    totals = all_reduce(torch.where(mine, total, 0), "sum", over)
    before = totals.masked_fill(along_dim(shards >= number, rank, dim), 0)
    return value + before.sum(dim, keepdim=True)


def triangle(call: Call) -> OpRule:
    """tril, triu: each rank knows which of its elements to keep."""
    names = [*DIMS[: len(call.inputs[0].shape) - 2], "row", "column"]
    return assemble(call, [names], [names], {"row": PADDED, "column": PADDED}, FIRST)


def cut_triangle(local: LocalCall) -> Results:
    """tril, triu with rows or columns split."""
    shape, layout = local.call.inputs[0].shape, local.operands[0]
    rank = len(shape)
    row, column = (global_indices(local, shape, layout, d) for d in (rank - 2, rank - 1))
    diagonal, last = column - row.unsqueeze(1), local.call.argument("diagonal")
    dropped = diagonal > last if local.call.node.op.startswith("aten.tril") else diagonal < last
    x: Tensor = local.args[0]
    return x.masked_fill(dropped, 0)


def loss(call: Call, *, none: float = 0.0) -> OpRule:
    """mse_loss and the like: pointwise, then reduced. A mean over a shard expands. The loss of `none` and 0 is 0."""
    names, inputs = aligned(call)
    reduction = call.argument("reduction")
    dim = Dim(expands=reduction == MEAN, even=False, padding={0: none})
    return assemble(call, inputs, [names if reduction == NONE else ()], dict.fromkeys(names, dim))


def loss_backward(call: Call) -> OpRule:
    """Backward of `loss`: divides by the number of elements of a shard if the loss was a mean."""
    names, inputs = aligned(call)
    dim = Dim(expands=call.argument("reduction") == MEAN, even=False)
    return assemble(call, inputs, [names], dict.fromkeys(names, dim), FIRST)
