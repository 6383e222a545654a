"""Ops that do not run on shards as they are: the local program of each, with its collectives.

An expansion replaces the op when a factor that says `expands` is split. It emits ops on local values and
returns the local results, in the op's order.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref
from autopar.ir.layout import Layout, Shape, digits_of, padded_shape

from .bounds import checked
from .rule import Call, OpRule

Results: TypeAlias = tuple[Ref | None, ...]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call on shards: args and kwargs are localised and refer to local values. `splits` names every
    factor of the op that is split, with the mesh axes that split it, outermost first. `operands` and
    `results` are the layouts of operands and results, `outputs` the local shapes of the latter."""

    call: Call
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    splits: Mapping[str, tuple[int, ...]]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    outputs: tuple[Shape | None, ...]

    def axes(self, of: Callable[[str], bool]) -> tuple[int, ...]:
        """The mesh axes that split these factors, by name."""
        return tuple(axis for name, axes in self.splits.items() if of(name) for axis in axes)

    def result(self, emitter: Emitter, *args: Any, **kwargs: Any) -> Ref:
        """Emit the op itself, which has one output, with other arguments."""
        return emitter.op(self.call.node.op, *args, **kwargs)


Expansion = Callable[[Emitter, LocalCall], Results]


def _shards(emitter: Emitter, names: Mapping[str, tuple[int, ...]]) -> int:
    """Into how many shards these factors are split together."""
    return math.prod(emitter.ranks(axis) for axes in names.values() for axis in axes)


def all_reduce(emitter: Emitter, value: Ref, reduction: str, axes: tuple[int, ...]) -> Ref:
    """The value reduced over several mesh axes."""
    for axis in axes:
        value = emitter.all_reduce(value, reduction, axis)
    return value


def global_indices(emitter: Emitter, shape: Shape, layout: Layout, dim: int) -> Ref:
    """int64 [local size of the dim]: the global index of each of this rank's elements along a dim; in
    padding, indices beyond the end."""
    digits = digits_of(layout, dim, emitter.ranks)
    size = padded_shape(shape, layout)[dim]
    indices = emitter.op("aten.arange.default", size)
    if not digits:
        return indices
    # mixed radix: every axis takes one of the digits, those between them stay
    radix: list[int] = []
    above = size
    for stride, axis in digits:
        radix += [above // (stride * emitter.ranks(axis)), emitter.ranks(axis)]
        above = stride
    cut = emitter.op("aten.reshape.default", indices, (*radix, above))
    for number, (_, axis) in enumerate(digits):
        cut = emitter.op("aten.select.int", cut, number + 1, emitter.coordinate(axis))
    return emitter.op("aten.reshape.default", cut, (-1,))


def filled_beyond(emitter: Emitter, value: Ref, shape: Shape, layout: Layout, dim: int, filling: float) -> Ref:
    """The value with its padding behind the end of a dim replaced."""
    beyond = emitter.op("aten.ge.Scalar", global_indices(emitter, shape, layout, dim), shape[dim])
    rest = len(shape) - 1 - dim
    if rest:
        beyond = emitter.op("aten.reshape.default", beyond, (-1, *(1,) * rest))
    return emitter.op("aten.masked_fill.Scalar", value, beyond, filling)


def share(rule_of: Callable[[Call], OpRule | None]) -> Expansion:
    """A mean over a shard counts for the shard's share of all elements, padding included."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        rule = rule_of(local.call)
        assert rule is not None
        share = 1.0
        for number, factor in enumerate(rule.factors):
            if factor.expands and factor.name in local.splits:
                share *= _local_share(emitter, local, rule, number)
        value = local.result(emitter, *local.args, **dict(local.kwargs))
        return (emitter.op("aten.mul.Scalar", value, share),)

    return expand


def _local_share(emitter: Emitter, local: LocalCall, rule: OpRule, factor: int) -> float:
    """How much of a factor one rank holds."""
    for dims, meta, layout in zip(rule.inputs, local.call.inputs, local.operands, strict=True):
        for dim, carried in enumerate(dims):
            if carried == factor:
                ways = _shards(emitter, {"": local.splits[rule.factors[factor].name]})
                return padded_shape(meta.shape, layout)[dim] / ways / meta.shape[dim]
    raise AssertionError(f"no operand of {local.call.node} carries {rule.factors[factor].name}")


def share_of_bias(emitter: Emitter, local: LocalCall) -> Results:
    """addmm, baddbmm with the contracted factor split: every rank adds its share of the bias, so that the sum holds it
    once. This is free, since the op scales the bias anyway."""
    named = dict(local.kwargs)
    named["beta"] = named.get("beta", 1) / _shards(emitter, {"k": local.splits["k"]})
    return (local.result(emitter, *local.args, **named),)


def share_of_last(factor: str) -> Expansion:
    """linear, convolution with the contracted factor split: the bias, third operand, in shares."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        share = 1.0 / _shards(emitter, {factor: local.splits[factor]})
        bias = emitter.op("aten.mul.Scalar", local.args[2], share)
        return (local.result(emitter, *local.args[:2], bias, *local.args[3:], **dict(local.kwargs)),)

    return expand


def local_indices(emitter: Emitter, indices: Ref, axes: tuple[int, ...], size: int) -> tuple[Ref, Ref]:
    """Indices into a contiguously split dim, relative to this rank's first element, and whether each is among its
    `size` elements."""
    local = emitter.op("aten.sub.Tensor", indices, emitter.offset(axes, size))
    above = emitter.op("aten.ge.Scalar", local, 0)
    below = emitter.op("aten.lt.Scalar", local, size)
    return local, emitter.op("aten.logical_and.default", above, below)


def embedding(emitter: Emitter, local: LocalCall) -> Results:
    """Rows of the table split: each rank looks up its own rows and gives zeros for the others."""
    weight, indices = local.args[:2]
    rows = emitter.meta(weight).shape[0]
    indices = checked(emitter, indices, local.call.inputs[0].shape[0])
    row, mine = local_indices(emitter, indices, local.splits["v"], rows)
    other = emitter.op("aten.logical_not.default", mine)
    vectors = local.result(emitter, weight, emitter.op("aten.masked_fill.Scalar", row, other, 0))
    last = emitter.op("aten.unsqueeze.default", other, -1)
    return (emitter.op("aten.masked_fill.Scalar", vectors, last, 0.0),)


def embedding_backward(emitter: Emitter, local: LocalCall) -> Results:
    """Rows of the table split: gradients of other ranks' rows, and of the padding row, go to one extra row, which is
    cut off."""
    gradient, indices, _, padding, by_frequency = local.args
    assert local.outputs[0] is not None
    rows = local.outputs[0][0]
    row, mine = local_indices(emitter, indices, local.splits["v"], rows)
    if padding >= 0:
        mine = emitter.op("aten.logical_and.default", mine, emitter.op("aten.ne.Scalar", indices, padding))
    row = emitter.op("aten.masked_fill.Scalar", row, emitter.op("aten.logical_not.default", mine), rows)
    wider = local.result(emitter, gradient, row, rows + 1, -1, by_frequency)
    return (emitter.op("aten.slice.Tensor", wider, 0, 0, rows),)


NARROW = (torch.bfloat16, torch.float16)


def wide(emitter: Emitter, value: Ref) -> Ref:
    """The value in a dtype to compute in."""
    dtype = emitter.meta(value).dtype
    return cast(emitter, value, torch.float32 if dtype in NARROW else dtype)


def cast(emitter: Emitter, value: Ref, dtype: torch.dtype) -> Ref:
    """The value in this dtype."""
    same = emitter.meta(value).dtype == dtype
    return value if same else emitter.op("aten._to_copy.default", value, dtype=dtype)


def in_output_dtypes(emitter: Emitter, call: Call, values: Iterable[Ref | None]) -> Results:
    """Results in the dtypes of the call's outputs, without those that nobody uses."""
    pairs = zip(values, call.outputs, strict=True)
    return tuple(cast(emitter, value, meta.dtype) if value and meta else None for value, meta in pairs)


def softmax(*, log: bool = False, safe: bool = False) -> Expansion:
    """_softmax, _log_softmax, _safe_softmax with the classes split: two all-reduces without the class dim, of the
    maximum and of the sum of exponentials. The `safe` one gives zeros where all scores are -inf."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        dim = (local.call.argument("dim"),)
        scores = wide(emitter, local.args[0])
        highest = all_reduce(emitter, emitter.op("aten.amax.default", scores, dim, True), "max", local.splits["c"])
        if safe:
            nowhere = emitter.op("aten.eq.Scalar", highest, -math.inf)
            highest = emitter.op("aten.masked_fill.Scalar", highest, nowhere, 0.0)
        shifted = emitter.op("aten.sub.Tensor", scores, highest)
        powers = emitter.op("aten.exp.default", shifted)
        total = all_reduce(emitter, emitter.op("aten.sum.dim_IntList", powers, dim, True), "sum", local.splits["c"])
        if safe:
            total = emitter.op("aten.masked_fill.Scalar", total, nowhere, 1.0)
        if log:
            result = emitter.op("aten.sub.Tensor", shifted, emitter.op("aten.log.default", total))
        else:
            result = emitter.op("aten.div.Tensor", powers, total)
        return (cast(emitter, result, local.call.output.dtype),)

    return expand


def softmax_backward(*, log: bool) -> Expansion:
    """Their backward ops with the classes split: one all-reduce without the class dim."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        dim = (local.call.argument("dim"),)
        gradient, output = wide(emitter, local.args[0]), wide(emitter, local.args[1])
        product = gradient if log else emitter.op("aten.mul.Tensor", gradient, output)
        total = all_reduce(emitter, emitter.op("aten.sum.dim_IntList", product, dim, True), "sum", local.splits["c"])
        weight = emitter.op("aten.exp.default", output) if log else output
        result = emitter.op("aten.sub.Tensor", product, emitter.op("aten.mul.Tensor", weight, total))
        return (cast(emitter, result, local.call.output.dtype),)

    return expand
