"""Layer norm with the normalised dims split: statistics over all ranks' elements.

A split of rows costs nothing. A split of normalised dims costs one all-reduce of 2 numbers a row
forward, and one backward: what 2D tensor parallelism does between its products.
"""

import math

import torch
from torch import Tensor

from .expansions import LocalCall, Results, all_reduce, wide
from .families import DIMS, FIRST
from .normalization import in_output_dtypes, moments
from .rule import Call, OpRule
from .template import Dim, Named, assemble, roles


def _names(call: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the dims of rows, and of those that are normalised."""
    normalised = len(call.argument("normalized_shape"))
    return DIMS[: len(call.inputs[0].shape) - normalised], tuple(f"h{i}" for i in range(normalised))


def normalized(call: Call) -> OpRule:
    """native_layer_norm and its backward op: statistics have size 1 where the source is normalised. Weights have only
    those dims, and their gradients are sums over rows."""
    rows, inner = _names(call)
    given = roles(call)
    backward = "grad_out" in given

    def of(rank: int) -> Named:
        return (*rows, *inner) if rank == len(rows) + len(inner) else inner

    outputs = [of(len(meta.shape)) if meta else () for meta in call.outputs]
    filled = {i: 0.0 for i, role in enumerate(given) if role in ("grad_out", "input", "weight")}
    # statistics, and the sums in the gradient of the source, are those of all ranks
    summed = Dim(expands=True, even=False, reductions=("",) * len(outputs), padding=filled)
    inputs = [of(len(meta.shape)) for meta in call.inputs]
    return assemble(call, inputs, outputs, dict.fromkeys(inner, summed), FIRST if backward else ())


def _dims(local: LocalCall) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
    """Row dims, normalised dims, how many elements a row has, and the mesh axes that split it."""
    rows, inner = _names(local.call)
    first = len(rows)
    dims = tuple(range(first, first + len(inner)))
    return tuple(range(first)), dims, math.prod(local.call.argument("normalized_shape")), local.axes(inner.__contains__)


def layer_norm(local: LocalCall) -> Results:
    """native_layer_norm -> output, mean and inverse deviation."""
    source, _, weight, bias, epsilon = local.args
    _, inner, count, axes = _dims(local)
    mean, variance = moments(local, source, inner, count, axes)
    scale = torch.rsqrt(variance + epsilon)
    exact = wide(source)
    column = (*source.shape[: inner[0]], *(1,) * len(inner))
    mean, scale = (statistic.reshape(column).to(exact.dtype) for statistic in (mean, scale))
    output = (exact - mean) * scale
    if weight is not None:
        output = output * weight
    if bias is not None:
        output = output + bias
    return in_output_dtypes(local.call.outputs, (output, mean, scale))


def layer_norm_gradients(local: LocalCall) -> Results:
    """native_layer_norm_backward -> gradients of source, weight and bias. With sums over a row of N elements:

    dx = rstd * (w * dy - sum(w * dy) / N - x^ * sum(w * dy * x^) / N),    x^ = (x - mean) * rstd
    """
    gradient, source, _, mean, scale, weight, _, mask = local.args
    exact, mean, scale = map(wide, (source, mean, scale))
    normal = (exact - mean) * scale
    rows, inner, count, axes = _dims(local)
    gradient = wide(gradient)
    gradients: list[Tensor | None] = [None]
    if mask[0]:
        weighted = gradient if weight is None else gradient * weight
        sums = [term.sum(inner, keepdim=True) for term in (weighted * normal, weighted)]
        both = all_reduce(torch.stack(sums), "sum", axes) * (-1 / count)
        result = torch.addcmul(weighted, normal, both[0]) + both[1]
        gradients = [result * scale]
    products = [gradient * normal if mask[1] else None, gradient if mask[2] else None]
    gradients += [product if product is None or not rows else product.sum(rows) for product in products]
    return in_output_dtypes(local.call.outputs, gradients)
