"""Ops that do not run on shards as they are: the local program of each, with its collectives.

An expansion replaces the op when a factor that says `expands` is split. It is code on tensors, which stand for those of
a rank (see `autopar.ops.traced`), and returns the local results, in the op's order.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from autopar.ir.emitter import Emitter
from autopar.ir.layout import Layout, Shape, digits_of, padded_shape
from autopar.ir.program import RankIndex

from .bounds import checked
from .rule import Call, OpRule
from .traced import collective, record, trace

Results: TypeAlias = Tensor | tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call on shards: args and kwargs are localised and hold local values. `splits` names every
    factor of the op that is split, with the mesh axes that split it, outermost first. `operands` and
    `results` are the layouts of operands and results, `outputs` the local shapes of the latter."""

    call: Call
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    splits: Mapping[str, tuple[int, ...]]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    outputs: tuple[Shape | None, ...]
    emitter: Emitter

    def axes(self, of: Callable[[str], bool]) -> tuple[int, ...]:
        """The mesh axes that split these factors, by name."""
        return tuple(axis for name, axes in self.splits.items() if of(name) for axis in axes)

    def ranks(self, axes: Iterable[int]) -> int:
        """How many ranks mesh axes have together."""
        return math.prod(self.emitter.mesh[axis] for axis in axes)

    def coordinate(self, axis: int) -> int:
        """This rank's coordinate on a mesh axis: an int that differs by rank, to add or to give to an op."""
        return cast(int, RankIndex(((axis, 1),)))

    def offset(self, axes: tuple[int, ...], local_size: int) -> int:
        """The global index, in a dim split contiguously by `axes` (outermost first), of this rank's first element,
        where the rank holds `local_size` elements: an int that differs by rank."""
        strides = (local_size * self.ranks(axes[i + 1 :]) for i in range(len(axes)))
        return cast(int, RankIndex(tuple(zip(axes, strides, strict=True))))

    def result(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the op itself makes of other arguments, or of its own if there are none: a tensor or several."""
        if not args:
            args, kwargs = self.args, {**dict(self.kwargs), **kwargs}
        made: Tensor = record(self.emitter, self.call.node.op, *args, **kwargs)
        return made

    def arange(self, *bounds: int) -> Tensor:
        """int64: as `torch.arange` makes them."""
        numbers: Tensor = trace(self.emitter, "aten.arange", bounds, {})
        return numbers


Expansion = Callable[[LocalCall], Results]


def all_reduce(value: Tensor, reduction: str, axes: tuple[int, ...]) -> Tensor:
    """The value reduced over several mesh axes."""
    for axis in axes:
        value = collective("all_reduce", value, reduction, axis)
    return value


def global_indices(
    local: LocalCall, shape: Shape, layout: Layout, dim: int, coordinate: Callable[[int], int] | None = None
) -> Tensor:
    """int64 [local size of the dim]: the global index of each of this rank's elements along a dim, or of those of the
    rank with other coordinates; in padding, indices beyond the end."""
    mesh = local.emitter.mesh
    digits = digits_of(layout, dim, mesh.__getitem__)
    size = padded_shape(shape, layout)[dim]
    indices = local.arange(size)
    if not digits:
        return indices
    # mixed radix: every axis takes one of the digits, those between them stay
    radix: list[int] = []
    above = size
    for stride, axis in digits:
        radix += [above // (stride * mesh[axis]), mesh[axis]]
        above = stride
    cut = indices.reshape(*radix, above)
    for number, (_, axis) in enumerate(digits):
        cut = cut.select(number + 1, (coordinate or local.coordinate)(axis))
    return cut.reshape(-1)


def filled_beyond(local: LocalCall, value: Tensor, shape: Shape, layout: Layout, dim: int, filling: float) -> Tensor:
    """The value with its padding behind the end of a dim replaced."""
    beyond = global_indices(local, shape, layout, dim) >= shape[dim]
    rest = len(shape) - 1 - dim
    return value.masked_fill(beyond.reshape(-1, *(1,) * rest) if rest else beyond, filling)


def share(rule_of: Callable[[Call], OpRule | None]) -> Expansion:
    """A mean over a shard counts for the shard's share of all elements, padding included."""

    def expand(local: LocalCall) -> Tensor:
        rule = rule_of(local.call)
        assert rule is not None
        share = 1.0
        for number, factor in enumerate(rule.factors):
            if factor.expands and factor.name in local.splits:
                share *= _local_share(local, rule, number)
        mean: Tensor = local.result()
        return mean * share

    return expand


def _local_share(local: LocalCall, rule: OpRule, factor: int) -> float:
    """How much of a factor one rank holds."""
    for dims, meta, layout in zip(rule.inputs, local.call.inputs, local.operands, strict=True):
        for dim, carried in enumerate(dims):
            if carried == factor:
                ways = local.ranks(local.splits[rule.factors[factor].name])
                return padded_shape(meta.shape, layout)[dim] / ways / meta.shape[dim]
    raise AssertionError(f"no operand of {local.call.node} carries {rule.factors[factor].name}")


def local_indices(local: LocalCall, indices: Tensor, axes: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
    """Indices into a contiguously split dim, relative to this rank's first element, and whether each is among its
    `size` elements."""
    row = indices - local.offset(axes, size)
    return row, torch.logical_and(row >= 0, row < size)


def embedding(local: LocalCall) -> Results:
    """Rows of the table split: each rank looks up its own rows and gives zeros for the others."""
    weight, indices = local.args[:2]
    indices = checked(indices, local.call.inputs[0].shape[0])
    row, mine = local_indices(local, indices, local.splits["v"], weight.shape[0])
    other = mine.logical_not()
    vectors = local.result(weight, row.masked_fill(other, 0))
    return vectors.masked_fill(other.unsqueeze(-1), 0.0)


def embedding_backward(local: LocalCall) -> Results:
    """Rows of the table split: gradients of other ranks' rows, and of the padding row, go to one extra row, which is
    cut off."""
    gradient, indices, _, padding, by_frequency = local.args
    assert local.outputs[0] is not None
    rows = local.outputs[0][0]
    row, mine = local_indices(local, indices, local.splits["v"], rows)
    if padding >= 0:
        mine = torch.logical_and(mine, indices != padding)
    row = row.masked_fill(mine.logical_not(), rows)
    return local.result(gradient, row, rows + 1, -1, by_frequency)[:rows]


NARROW = (torch.bfloat16, torch.float16)


def wide(value: Tensor) -> Tensor:
    """The value in a dtype to compute in."""
    return value.to(torch.float32 if value.dtype in NARROW else value.dtype)


def softmax(local: LocalCall, *, log: bool = False, safe: bool = False) -> Results:
    """_softmax, _log_softmax, _safe_softmax with the classes split: two all-reduces without the class dim, of the
    maximum and of the sum of exponentials. The `safe` one gives zeros where all scores are -inf."""
    dim, axes = local.call.argument("dim"), local.splits["c"]
    scores = wide(local.args[0])
    highest = all_reduce(scores.amax(dim, keepdim=True), "max", axes)
    if safe:
        nowhere = highest == -math.inf
        highest = highest.masked_fill(nowhere, 0.0)
    shifted = scores - highest
    powers = torch.exp(shifted)
    total = all_reduce(powers.sum(dim, keepdim=True), "sum", axes)
    if safe:
        total = total.masked_fill(nowhere, 1.0)
    result = shifted - torch.log(total) if log else powers / total
    return result.to(local.call.output.dtype)


def softmax_backward(local: LocalCall, *, log: bool = False) -> Results:
    """Their backward ops with the classes split: one all-reduce without the class dim."""
    dim = local.call.argument("dim")
    gradient, output = map(wide, local.args[:2])
    product = gradient if log else gradient * output
    total = all_reduce(product.sum(dim, keepdim=True), "sum", local.splits["c"])
    result = product - (torch.exp(output) if log else output) * total
    return result.to(local.call.output.dtype)
