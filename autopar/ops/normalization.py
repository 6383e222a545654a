"""Batch and group norm: rules, and expansions that compute statistics over all ranks' elements.

A split that cuts the elements of a statistic (batch and spatial dims; of group norm the spatial dims) costs one
all-reduce of 2 numbers a statistic forward and one backward; a split of channels or groups costs nothing.
"""

import math
from collections.abc import Sequence

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.layout import Shape

from .expansions import NARROW, LocalCall, Results, all_reduce, cast, in_output_dtypes, wide
from .families import FIRST
from .local import Arguments, replaced
from .rule import Call, OpRule
from .template import Name, Named, assemble, roles

CHANNEL = "c"

STATISTICS = {"aten._native_batch_norm_legit_functional.default": ((3, 4), 3)}
"""Operators that count in running statistics, which these operands are and their first so many results do not depend
on: captured norms are operators of their own in evaluation."""


def _names(rank: int) -> tuple[str, ...]:
    """Batch, channels and spatial dims."""
    return ("n", CHANNEL, *(f"s{i}" for i in range(rank - 2)))


def _trains(call: Call) -> bool:
    """Whether the statistics are those of the input."""
    name = "train" if call.has("train") else "training"
    return call.has(name) and call.argument(name)


def batch_norm(call: Call) -> OpRule:
    """Batch norm forward: output, saved mean and inverse deviation (empty in evaluation) and, of the
    functional op, the running statistics."""
    names = _names(len(call.inputs[0].shape))
    others = [name for name in names if name != CHANNEL]

    def of(meta: TensorMeta | None) -> Named:
        if meta is None or meta.shape == (0,):
            return () if meta is None else (None,)
        return names if len(meta.shape) == len(names) else (CHANNEL,)

    outputs = [of(meta) for meta in call.outputs]
    return assemble(
        call, [of(meta) for meta in call.inputs], outputs, expands=others if _trains(call) else (), uneven=others,
        padding={(0, name): 0 for name in others} if _trains(call) else None,
        reductions={name: ("",) * len(outputs) for name in others},
    )  # fmt: skip


def batch_norm_backward(call: Call) -> OpRule:
    """Batch norm backward. The gradient of the input takes sums over all ranks' elements in training; without
    it, or in evaluation, the op on a shard gives a share of the gradients of weight and bias."""
    names = _names(len(call.inputs[0].shape))
    others = [name for name in names if name != CHANNEL]
    inputs: list[Named] = [names if role in ("grad_out", "input") else [CHANNEL] for role in roles(call)]
    # in evaluation forward saves nothing
    inputs = [(None,) if meta.shape == (0,) else named for named, meta in zip(inputs, call.inputs, strict=True)]
    gives_input = call.argument("output_mask")[0]
    if not (_trains(call) and gives_input):
        return assemble(call, inputs, [names if gives_input else (), [CHANNEL], [CHANNEL]], linear=FIRST)
    outputs: list[Named] = [names, *([CHANNEL] if meta else () for meta in call.outputs[1:])]
    return assemble(
        call, inputs, outputs, linear=FIRST, expands=others, uneven=others,
        padding={(i, name): 0 for i in (0, 1) for name in others},
        reductions=dict.fromkeys(others, ("", "", "")),
    )  # fmt: skip


def _over(local: LocalCall) -> tuple[int, ...]:
    """The mesh axes that split anything but the channels."""
    return local.axes(lambda name: name != CHANNEL)


def _summed(emitter: Emitter, pair: Sequence[Ref], axes: tuple[int, ...]) -> tuple[Ref, Ref]:
    """Two tensors of one shape, summed over the ranks of `axes` in one all-reduce an axis."""
    both = all_reduce(emitter, emitter.op("aten.stack.default", tuple(pair)), "sum", axes)
    first, second = (emitter.op("aten.select.int", both, 0, i) for i in range(2))
    return first, second


def moments(emitter: Emitter, source: Ref, dims: tuple[int, ...], count: int, axes: tuple[int, ...]) -> tuple[Ref, Ref]:
    """Mean and variance (biased, float64) over local `dims` and the ranks of `axes`, of `count` elements in all.

    The shards' own means and variances are combined (Chan, Golub, LeVeque 1979) by summing E[x] and E[x^2] of
    each: exact in float64 where the sums of single elements would cancel, and one all-reduce for both. Zeros that
    fill an uneven shard add nothing to the sums, and are not counted; far from the mean as they are, they take
    float64 from the start.
    """
    elements = math.prod(emitter.meta(source).shape[d] for d in dims)
    share = elements / count
    filled = elements * math.prod(map(emitter.ranks, axes)) != count
    exact = cast(emitter, source, torch.float64) if filled else wide(emitter, source)
    variance, mean = emitter.ops("aten.var_mean.correction", exact, dims, correction=0)
    mean, variance = cast(emitter, mean, torch.float64), cast(emitter, variance, torch.float64)
    squares = emitter.op("aten.addcmul.default", variance, mean, mean)
    pair = [emitter.op("aten.mul.Scalar", moment, share) for moment in (mean, squares)]
    mean, squares = _summed(emitter, pair, axes)
    variance = emitter.op("aten.addcmul.default", squares, mean, mean, value=-1)
    return mean, emitter.op("aten.clamp_min.default", variance, 0)


def batch_norm_statistics(emitter: Emitter, local: LocalCall) -> Results:
    """Batch norm in training with the batch or spatial dims split: statistics of all ranks' elements, then the op with
    these as its running statistics."""
    call = local.call
    named = dict(zip(roles(call), call.inputs, strict=True))
    source, weight, bias = local.args[:3]
    shape = named["input"].shape
    count, rank = named["input"].numel // shape[1], len(shape)
    mean, variance = moments(emitter, source, (0, *range(2, rank)), count, _over(local))
    epsilon = call.argument("eps")
    scale = emitter.op("aten.rsqrt.default", emitter.op("aten.add.Scalar", variance, epsilon))

    dtype = emitter.meta(source).dtype
    statistic = emitter.meta(weight).dtype if weight is not None else torch.float32 if dtype in NARROW else dtype
    plain = (cast(emitter, mean, statistic), cast(emitter, variance, statistic))
    output = emitter.op("aten.batch_norm.default", source, weight, bias, *plain, False, 0.0, epsilon, True)
    saved = [cast(emitter, s, m.dtype) if m else None for s, m in zip((mean, scale), call.outputs[1:3], strict=True)]
    if len(call.outputs) == 3:
        return (output, *saved)
    # the running variance is unbiased
    unbiased = emitter.op("aten.mul.Scalar", variance, count / max(1, count - 1))
    running = []
    for old, new in zip(local.args[3:5], (mean, unbiased), strict=True):
        new = cast(emitter, new, emitter.meta(old).dtype)
        running.append(emitter.op("aten.lerp.Scalar", old, new, call.argument("momentum")))
    return (output, *saved, *running)


def batch_norm_gradients(emitter: Emitter, local: LocalCall) -> Results:
    """Batch norm backward in training with the batch or spatial dims split. With sums over all ranks' elements, N a
    channel, and x^ = (x - mean) * invstd:

        dx = weight * invstd * (dy - sum(dy) / N - x^ * sum(dy * x^) / N)
    """
    call = local.call
    gradient, source, weight, *running, mean, scale = local.args[:7]
    count = call.inputs[1].numel // call.inputs[1].shape[1]
    given = weight
    if weight is None:
        # ones of the statistics' dtype, which running ones of another may not stand beside; in training none are read
        given, running = emitter.op("aten.ones_like.default", mean), [None, None]
    arguments = (gradient, source, given, *running, mean, scale, True, call.argument("eps"), (False, True, True))
    _, product, total = emitter.ops(call.node.op, *arguments)
    product, total = _summed(emitter, [wide(emitter, product), wide(emitter, total)], _over(local))

    mean, scale, given = (wide(emitter, value) for value in (mean, scale, given))
    # sums of weight * dy and weight * dy * x^, by -N
    along, across = (
        emitter.op("aten.mul.Scalar", emitter.op("aten.mul.Tensor", value, given), -1 / count)
        for value in (total, product)
    )
    result = _input_gradient(emitter, gradient, source, mean, scale, given, along, across)
    return in_output_dtypes(emitter, call, (result, product, total))


def _input_gradient(
    emitter: Emitter, gradient: Ref, source: Ref, mean: Ref, scale: Ref, weight: Ref, along: Ref, across: Ref
) -> Ref:
    """invstd * (weight * dy + along + across * x^), the last five a number a channel."""
    column: Shape = (1, -1, *([1] * (len(emitter.meta(source).shape) - 2)))
    slope = emitter.op("aten.mul.Tensor", scale, weight)
    offset = emitter.op("aten.mul.Tensor", scale, along)
    steps = emitter.op("aten.mul.Tensor", emitter.op("aten.mul.Tensor", scale, scale), across)
    slope, offset, steps, mean = (
        emitter.op("aten.reshape.default", value, column) for value in (slope, offset, steps, mean)
    )
    centered = emitter.op("aten.sub.Tensor", source, mean)
    result = emitter.op("aten.addcmul.default", offset, centered, steps)
    return emitter.op("aten.addcmul.default", result, gradient, slope)


# Group norm: a group of channels, on one sample, has statistics of its own


def _grouped(call: Call, size: int) -> list[Name]:
    """Batch, channels by group, and spatial dims."""
    return ["n", ("g", size), *(f"s{i}" for i in range(len(call.inputs[0].shape) - 2))]


def group_norm(call: Call) -> OpRule:
    """native_group_norm -> output, mean and inverse deviation [n, groups]. Spatial dims expand."""
    names = _grouped(call, call.argument("C") // call.argument("group"))
    spatial = [name for name in names[2:] if isinstance(name, str)]
    weights: list[Named] = [[names[1]]] * (len(call.inputs) - 1)
    outputs: list[Named] = [names, ["n", "g"], ["n", "g"]]
    return assemble(
        call, [names, *weights], [named if meta else () for named, meta in zip(outputs, call.outputs, strict=True)],
        expands=spatial, uneven=spatial, padding={(0, name): 0 for name in spatial},
        reductions=dict.fromkeys(spatial, ("", "", "")),
    )  # fmt: skip


def group_norm_backward(call: Call) -> OpRule:
    """native_group_norm_backward. Only the gradient of the input takes sums over a group."""
    names = _grouped(call, call.argument("C") // call.argument("group"))
    spatial = [name for name in names[2:] if isinstance(name, str)]
    dims: dict[str, Named] = {"mean": ["n", "g"], "rstd": ["n", "g"], "weight": [names[1]]}
    outputs: list[Named] = [names, [names[1]], [names[1]]]
    return assemble(
        call, [dims.get(role, names) for role in roles(call)],
        [named if meta else () for named, meta in zip(outputs, call.outputs, strict=True)],
        linear=FIRST, expands=spatial if call.argument("output_mask")[0] else (), uneven=spatial,
        padding={(i, name): 0 for i in (0, 1) for name in spatial},
    )  # fmt: skip


def group_sizes(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """Group norm takes the sizes of its input as arguments."""
    n, c, *spatial = local_inputs[0]
    return replaced(call, N=n, C=c, HxW=math.prod(spatial), group=call.argument("group") * c // call.argument("C"))


def _to_channels(emitter: Emitter, statistic: Ref, channels: int) -> Ref:
    """[n, groups] -> [n * channels]."""
    n, groups = emitter.meta(statistic).shape
    column = emitter.op("aten.reshape.default", statistic, (n, groups, 1))
    return emitter.op(
        "aten.reshape.default", emitter.op("aten.expand.default", column, (n, groups, channels // groups)), (-1,)
    )


def _to_samples(emitter: Emitter, weight: Ref | None, n: int) -> Ref | None:
    """[channels] -> [n * channels]."""
    if weight is None:
        return None
    channels = emitter.meta(weight).shape[0]
    return emitter.op("aten.reshape.default", emitter.op("aten.expand.default", weight, (n, channels)), (-1,))


def group_norm_statistics(emitter: Emitter, local: LocalCall) -> Results:
    """Group norm with spatial dims split: statistics of all ranks' elements, one all-reduce of 2 numbers a group and
    sample. A channel of a sample is then a channel of a batch norm in evaluation."""
    call = local.call
    source, weight, bias, *_, groups, epsilon = local.args
    shape, dtype = emitter.meta(source).shape, emitter.meta(source).dtype
    n, channels = shape[:2]
    count = call.inputs[0].numel // (call.inputs[0].shape[0] * call.argument("group"))
    axes = local.axes(lambda name: name.startswith("s"))
    rows = emitter.op("aten.reshape.default", source, (n, groups, -1))
    mean, variance = moments(emitter, rows, (2,), count, axes)
    scale = emitter.op("aten.rsqrt.default", emitter.op("aten.add.Scalar", variance, epsilon))
    statistic = emitter.meta(weight).dtype if weight is not None else torch.float32 if dtype in NARROW else dtype
    mean_, variance_ = (_to_channels(emitter, cast(emitter, v, statistic), channels) for v in (mean, variance))
    weight, bias = _to_samples(emitter, weight, n), _to_samples(emitter, bias, n)
    one = emitter.op("aten.reshape.default", source, (1, n * channels, *shape[2:]))
    output = emitter.op("aten.batch_norm.default", one, weight, bias, mean_, variance_, False, 0.0, epsilon, True)
    saved = [cast(emitter, s, m.dtype) if m else None for s, m in zip((mean, scale), call.outputs[1:], strict=True)]
    return (emitter.op("aten.reshape.default", output, shape), *saved)


def group_norm_gradients(emitter: Emitter, local: LocalCall) -> Results:
    """Group norm backward with spatial dims split: one all-reduce of 2 numbers a group and sample. The gradients of
    weight and bias are sums of the ranks' own elements."""
    call = local.call
    gradient, source, mean, scale, weight, *_, groups, _ = local.args
    shape = emitter.meta(source).shape
    n, channels = shape[:2]
    count = call.inputs[1].numel // (call.inputs[1].shape[0] * call.argument("group"))
    axes = local.axes(lambda name: name.startswith("s"))
    mean, scale = (_to_channels(emitter, wide(emitter, v), channels) for v in (mean, scale))
    one = (1, n * channels, *shape[2:])
    dy, x = (emitter.op("aten.reshape.default", v, one) for v in (gradient, source))
    ones = emitter.op("aten.ones_like.default", mean)
    op = "aten.native_batch_norm_backward.default"
    _, product, total = emitter.ops(op, dy, x, ones, None, None, mean, scale, True, 0.0, (False, True, True))
    given = ones if weight is None else wide(emitter, _to_samples(emitter, weight, n) or weight)

    def of_groups(value: Ref) -> Ref:
        weighted = emitter.op("aten.mul.Tensor", value, given)
        rows = emitter.op("aten.reshape.default", weighted, (n, groups, channels // groups))
        return emitter.op("aten.sum.dim_IntList", rows, (2,))

    sums = _summed(emitter, [of_groups(product), of_groups(total)], axes)
    across, along = (_to_channels(emitter, emitter.op("aten.mul.Scalar", v, -1 / count), channels) for v in sums)
    result = _input_gradient(emitter, dy, x, mean, scale, given, along, across)
    result = emitter.op("aten.reshape.default", result, shape)
    by_sample = (emitter.op("aten.reshape.default", v, (n, channels)) for v in (product, total))
    sums_of_weights = (emitter.op("aten.sum.dim_IntList", v, (0,)) for v in by_sample)
    return in_output_dtypes(emitter, call, (result, *sums_of_weights))
