"""Batch and group norm: rules, and expansions that compute statistics over all ranks' elements.

A split that cuts the elements of a statistic (batch and spatial dims; of group norm the spatial dims) costs one
all-reduce of 2 numbers a statistic forward and one backward; a split of channels or groups costs nothing.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.compat.tensors import norm_dtype, statistics_dtype
from autopar.ir.graph import Node, TensorMeta, overload, parameters, references
from autopar.ir.layout import Shape

from .expansions import NARROW, LocalCall, Results, all_reduce, wide
from .families import FIRST
from .kernels import ADAPTED
from .local import Arguments, replaced
from .rule import Call, OpRule
from .template import Dim, Name, Named, assemble, roles, unsplit

CHANNEL = "c"

STATISTICS = {"aten._native_batch_norm_legit_functional.default": ((3, 4), 3)}
"""Operators that count in running statistics, which these operands are and their first so many results do not depend
on: captured norms are operators of their own in evaluation."""


def unread(node: Node) -> list[str]:
    """Operands of a node on whose values what it computes of a batch does not depend: running statistics, where those
    of the batch are taken."""
    given = dict(zip((parameter.name for parameter in parameters(node.op)), node.args, strict=False))
    trains = given.get("train") or given.get("training")
    return references((given.get("running_mean"), given.get("running_var"))) if trains else []


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
    trains = _trains(call)
    summed = Dim(expands=trains, even=False, padding={0: 0} if trains else {}, reductions=("",) * len(outputs))
    return assemble(call, [of(meta) for meta in call.inputs], outputs, dict.fromkeys(others, summed))


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
    summed = Dim(expands=True, even=False, padding={0: 0, 1: 0}, reductions=("", "", ""))
    return assemble(call, inputs, outputs, dict.fromkeys(others, summed), FIRST)


def _over(local: LocalCall) -> tuple[int, ...]:
    """The mesh axes that split anything but the channels."""
    return local.axes(lambda name: name != CHANNEL)


def _summed(pair: Sequence[Tensor], axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, summed over the ranks of `axes` in one all-reduce an axis."""
    first, second = all_reduce(torch.stack(tuple(pair)), "sum", axes)
    return first, second


def moments(
    local: LocalCall, source: Tensor, dims: tuple[int, ...], count: int, axes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased, float64) over local `dims` and the ranks of `axes`, of `count` elements in all.

    The shards' own means and variances are combined (Chan, Golub, LeVeque 1979) by summing E[x] and E[x^2] of
    each: exact in float64 where the sums of single elements would cancel, and one all-reduce for both. Zeros that
    fill an uneven shard add nothing to the sums, and are not counted; far from the mean as they are, they take
    float64 from the start.
    """
    elements = math.prod(source.shape[d] for d in dims)
    share = elements / count
    exact = source.to(torch.float64) if elements * local.ranks(axes) != count else wide(source)
    variance, mean = torch.var_mean(exact, dims, correction=0)
    mean, variance = mean.to(torch.float64), variance.to(torch.float64)
    squares = torch.addcmul(variance, mean, mean)
    mean, squares = _summed([mean * share, squares * share], axes)
    variance = torch.addcmul(squares, mean, mean, value=-1)
    return mean, variance.clamp_min(0)


def _statistics_dtype(source: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is not None:
        return weight.dtype
    return torch.float32 if source.dtype in NARROW else source.dtype


def batch_norm_statistics(local: LocalCall) -> Results:
    """Batch norm in training with the batch or spatial dims split: statistics of all ranks' elements, then the op with
    these as its running statistics."""
    call = local.call
    shape = call.inputs[0].shape
    source, weight, bias = local.args[:3]
    count, epsilon = math.prod(shape) // shape[1], call.argument("eps")
    mean, variance = moments(local, source, (0, *range(2, len(shape))), count, _over(local))
    scale = torch.rsqrt(variance + epsilon)

    dtype = _statistics_dtype(source, weight)
    plain = mean.to(dtype), variance.to(dtype)
    output = torch.batch_norm(source, weight, bias, *plain, False, 0.0, epsilon, True)
    saved = in_output_dtypes(call.outputs[1:3], (mean, scale))
    if len(call.outputs) == 3:
        return (output, *saved)
    # the running variance is unbiased
    unbiased = variance * (count / max(1, count - 1))
    olds = zip(local.args[3:5], (mean, unbiased), strict=True)
    return (output, *saved, *(torch.lerp(old, new.to(old.dtype), call.argument("momentum")) for old, new in olds))


def batch_norm_gradients(local: LocalCall) -> Results:
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
        given, running = torch.ones_like(mean), [None, None]
    mask = False, True, True
    _, product, total = local.result(gradient, source, given, *running, mean, scale, True, call.argument("eps"), mask)
    product, total = _summed([wide(product), wide(total)], _over(local))

    mean, scale, given = map(wide, (mean, scale, given))
    # sums of weight * dy and weight * dy * x^, by -N
    along, across = (value * given * (-1 / count) for value in (total, product))
    result = _input_gradient(gradient, source, mean, scale, given, along, across)
    return in_output_dtypes(call.outputs, (result, product, total))


def _input_gradient(
    gradient: Tensor, source: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, along: Tensor, across: Tensor
) -> Tensor:
    """invstd * (weight * dy + along + across * x^), the last five a number a channel."""
    column = (1, -1, *([1] * (source.ndim - 2)))
    by_channel = scale * weight, scale * along, scale * scale * across, mean
    slope, offset, steps, mean = (value.reshape(column) for value in by_channel)
    centered = source - mean
    result = torch.addcmul(offset, centered, steps)
    return torch.addcmul(result, gradient, slope)


# Group norm: a group of channels, on one sample, has statistics of its own


def _grouped(call: Call, size: int) -> list[Name]:
    """Batch, channels by group, and spatial dims."""
    return ["n", ("g", size), *(f"s{i}" for i in range(len(call.inputs[0].shape) - 2))]


def group_norm(call: Call) -> OpRule:
    """native_group_norm -> output, mean and inverse deviation [n, groups]. Spatial dims expand."""
    if not call.inputs[0].numel:
        return unsplit(call)
    names = _grouped(call, call.argument("C") // call.argument("group"))
    spatial = [name for name in names[2:] if isinstance(name, str)]
    weights: list[Named] = [[names[1]]] * (len(call.inputs) - 1)
    outputs: list[Named] = [names, ["n", "g"], ["n", "g"]]
    there = [named if meta else () for named, meta in zip(outputs, call.outputs, strict=True)]
    summed = Dim(expands=True, even=False, padding={0: 0}, reductions=("", "", ""))
    return assemble(call, [names, *weights], there, dict.fromkeys(spatial, summed))


def group_norm_backward(call: Call) -> OpRule:
    """native_group_norm_backward. Only the gradient of the input takes sums over a group."""
    if not call.inputs[0].numel:
        return unsplit(call)
    names = _grouped(call, call.argument("C") // call.argument("group"))
    spatial = [name for name in names[2:] if isinstance(name, str)]
    dims: dict[str, Named] = {"mean": ["n", "g"], "rstd": ["n", "g"], "weight": [names[1]]}
    outputs: list[Named] = [names, [names[1]], [names[1]]]
    there = [named if meta else () for named, meta in zip(outputs, call.outputs, strict=True)]
    summed = Dim(expands=bool(call.argument("output_mask")[0]), even=False, padding={0: 0, 1: 0})
    return assemble(call, [dims.get(role, names) for role in roles(call)], there, dict.fromkeys(spatial, summed), FIRST)


def group_sizes(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """Group norm takes the sizes of its input as arguments."""
    n, c, *spatial = local_inputs[0]
    return replaced(call, N=n, C=c, HxW=math.prod(spatial), group=call.argument("group") * c // call.argument("C"))


def _to_channels(statistic: Tensor, channels: int) -> Tensor:
    """[n, groups] -> [n * channels]."""
    n, groups = statistic.shape
    return statistic.reshape(n, groups, 1).expand(n, groups, channels // groups).reshape(-1)


def _to_samples(weight: Tensor, n: int) -> Tensor:
    """[channels] -> [n * channels]."""
    return weight.expand(n, weight.shape[0]).reshape(-1)


def group_norm_statistics(local: LocalCall) -> Results:
    """Group norm with spatial dims split: statistics of all ranks' elements, one all-reduce of 2 numbers a group and
    sample. A channel of a sample is then a channel of a batch norm in evaluation."""
    call = local.call
    source, weight, bias, *_, groups, epsilon = local.args
    n, channels, *spatial = source.shape
    count = call.inputs[0].numel // (call.inputs[0].shape[0] * call.argument("group"))
    axes = local.axes(lambda name: name.startswith("s"))
    mean, variance = moments(local, source.reshape(n, groups, -1), (2,), count, axes)
    scale = torch.rsqrt(variance + epsilon)
    dtype = _statistics_dtype(source, weight)
    of_channels = (_to_channels(statistic.to(dtype), channels) for statistic in (mean, variance))
    means, variances = of_channels
    weight, bias = (None if value is None else _to_samples(value, n) for value in (weight, bias))
    one = source.reshape(1, n * channels, *spatial)
    output = torch.batch_norm(one, weight, bias, means, variances, False, 0.0, epsilon, True)
    saved = in_output_dtypes(call.outputs[1:], (mean, scale))
    return (output.reshape(source.shape), *saved)


def group_norm_gradients(local: LocalCall) -> Results:
    """Group norm backward with spatial dims split: one all-reduce of 2 numbers a group and sample. The gradients of
    weight and bias are sums of the ranks' own elements."""
    call = local.call
    gradient, source, mean, scale, weight, *_, groups, _ = local.args
    n, channels, *spatial = source.shape
    count = call.inputs[1].numel // (call.inputs[1].shape[0] * call.argument("group"))
    axes = local.axes(lambda name: name.startswith("s"))
    mean, scale = (_to_channels(wide(value), channels) for value in (mean, scale))
    dy, x = (value.reshape(1, n * channels, *spatial) for value in (gradient, source))
    ones = torch.ones_like(mean)
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, None, None, mean, scale, True, 0.0, (False, True, True)
    )
    given = ones if weight is None else wide(_to_samples(weight, n))

    def of_groups(value: Tensor) -> Tensor:
        return (value * given).reshape(n, groups, channels // groups).sum(2)

    sums = _summed([of_groups(product), of_groups(total)], axes)
    across, along = (_to_channels(value * (-1 / count), channels) for value in sums)
    result = _input_gradient(dy, x, mean, scale, given, along, across).reshape(source.shape)
    sums_of_weights = (value.reshape(n, channels).sum(0) for value in (product, total))
    return in_output_dtypes(call.outputs, (result, *sums_of_weights))


def in_output_dtypes(
    outputs: Iterable[TensorMeta | None], values: Iterable[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Results in the dtypes of these outputs of a call, without those that nobody uses."""
    pairs = zip(values, outputs, strict=True)
    return tuple(None if value is None or meta is None else value.to(meta.dtype) for value, meta in pairs)


# What computes them


def _forward(op: str) -> Callable[..., Any]:
    """The statistics of layer and batch norm of half-precision inputs are float32 on CUDA, and on a CPU of the inputs'
    dtype unless weights are wider. In a graph they are float32: here a CPU's are widened, and narrowed again for its
    backward, which loses nothing."""
    function = overload(op)

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, mean, deviation, *rest = function(x, *args, **kwargs)
        wide = statistics_dtype(x)
        return out, mean.to(wide), deviation.to(wide), *rest

    return run


def _backward(op: str) -> Callable[..., Any]:
    function = overload(op)
    names = [parameter.name for parameter in parameters(op)]
    places = [names.index(name) for name in names if name in ("mean", "rstd", "save_mean", "save_invstd")]
    wider = [names.index(name) for name in ("weight", "running_mean") if name in names]

    def run(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        args = [gradient, x, *rest]
        if x.device.type == "cpu":
            narrow = norm_dtype(x, next((args[place] for place in wider if args[place] is not None), None))
            for place in places:
                args[place] = None if args[place] is None else args[place].to(narrow)
        return function(*args)

    return run


_FORWARD = (
    "aten.native_layer_norm.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
)
_BACKWARD = ("aten.native_layer_norm_backward.default", "aten.native_batch_norm_backward.default")

ADAPTED.update({**{op: _forward(op) for op in _FORWARD}, **{op: _backward(op) for op in _BACKWARD}})
