"""Layer norm with the normalised dims split: statistics over all ranks' elements.

A split of rows costs nothing. A split of normalised dims costs one all-reduce of 2 numbers a row
forward, and one backward: what 2D tensor parallelism does between its products.
"""

import math

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref

from .expansions import LocalCall, Results, all_reduce, cast, in_output_dtypes, wide
from .families import DIMS, FIRST
from .normalization import moments
from .rule import Call, OpRule
from .template import Named, assemble, roles


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
    # statistics, and the sums in the gradient of the source, are those of all ranks
    no_reduction = dict.fromkeys(inner, ("",) * len(outputs))
    filled = [i for i, role in enumerate(given) if role in ("grad_out", "input", "weight")]
    return assemble(
        call, [of(len(meta.shape)) for meta in call.inputs], outputs, linear=FIRST if backward else (),
        expands=inner, uneven=inner, reductions=no_reduction,
        padding={(i, name): 0 for i in filled for name in inner},
    )  # fmt: skip


def _over(local: LocalCall) -> tuple[int, ...]:
    """The mesh axes that split normalised dims."""
    _, inner = _names(local.call)
    return local.axes(lambda name: name in inner)


def _dims(local: LocalCall) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Row dims, normalised dims, and how many elements a row has."""
    shape = local.call.argument("normalized_shape")
    rows, inner = _names(local.call)
    rank = len(rows) + len(inner)
    return tuple(range(len(rows))), tuple(range(len(rows), rank)), math.prod(shape)


def _column(emitter: Emitter, statistic: Ref, source: Ref, inner: tuple[int, ...]) -> Ref:
    """A number a row, with dims of size 1 behind."""
    shape = emitter.meta(source).shape
    return emitter.op("aten.reshape.default", statistic, (*shape[: inner[0]], *(1,) * len(inner)))


def layer_norm(emitter: Emitter, local: LocalCall) -> Results:
    """native_layer_norm -> output, mean and inverse deviation."""
    source, _, weight, bias, epsilon = local.args
    _, inner, count = _dims(local)
    mean, variance = moments(emitter, source, inner, count, _over(local))
    scale = emitter.op("aten.rsqrt.default", emitter.op("aten.add.Scalar", variance, epsilon))
    exact = wide(emitter, source)
    mean, scale = (cast(emitter, _column(emitter, v, source, inner), emitter.meta(exact).dtype) for v in (mean, scale))
    output = emitter.op("aten.mul.Tensor", emitter.op("aten.sub.Tensor", exact, mean), scale)
    if weight is not None:
        output = emitter.op("aten.mul.Tensor", output, weight)
    if bias is not None:
        output = emitter.op("aten.add.Tensor", output, bias)
    return in_output_dtypes(emitter, local.call, (output, mean, scale))


def layer_norm_gradients(emitter: Emitter, local: LocalCall) -> Results:
    """native_layer_norm_backward -> gradients of source, weight and bias. With sums over a row of N elements:

    dx = rstd * (w * dy - sum(w * dy) / N - x^ * sum(w * dy * x^) / N),    x^ = (x - mean) * rstd
    """
    gradient, source, _, mean, scale, weight, _, mask = local.args
    exact, mean, scale = (wide(emitter, value) for value in (source, mean, scale))
    normal = emitter.op("aten.mul.Tensor", emitter.op("aten.sub.Tensor", exact, mean), scale)
    rows, inner, count = _dims(local)
    gradient = wide(emitter, gradient)
    gradients: list[Ref | None] = []
    if mask[0]:
        weighted = gradient if weight is None else emitter.op("aten.mul.Tensor", gradient, weight)
        terms = [emitter.op("aten.mul.Tensor", weighted, normal), weighted]
        sums = [emitter.op("aten.sum.dim_IntList", term, inner, True) for term in terms]
        both = all_reduce(emitter, emitter.op("aten.stack.default", tuple(sums)), "sum", _over(local))
        both = emitter.op("aten.mul.Scalar", both, -1 / count)
        across = emitter.op("aten.select.int", both, 0, 0)
        result = emitter.op("aten.addcmul.default", weighted, normal, across)
        result = emitter.op("aten.add.Tensor", result, emitter.op("aten.select.int", both, 0, 1))
        gradients.append(emitter.op("aten.mul.Tensor", result, scale))
    else:
        gradients.append(None)
    products = [emitter.op("aten.mul.Tensor", gradient, normal) if mask[1] else None]
    products += [gradient if given else None for given in mask[2:]]
    for product in products:
        summed = product is not None and rows
        gradients.append(emitter.op("aten.sum.dim_IntList", product, rows) if summed else product)
    return in_output_dtypes(emitter, local.call, gradients)
