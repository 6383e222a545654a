"""Pooling and resampling: batch and channels are split freely, spatial dims where windows do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..graph import Ref, TensorMeta
from ..layout import Shape
from .expansions import LocalCall, Results
from .families import FIRST, Rule, has
from .local import Arguments, Local, replaced
from .rule import Call, Emitter, OpRule
from .template import Linear, Name, Named, assemble, roles


def _leading(meta: TensorMeta, spatial: int) -> tuple[str, ...]:
    """Names of the dims before the spatial ones: batch, if there is one, and channels."""
    return tuple(f"d{i}" for i in range(len(meta.shape) - spatial, 0, -1))


def resampled(spatial: int, *, linear: Linear = FIRST) -> Rule:
    """Ops on the last `spatial` dims, which are whole: upsampling, reflection padding, overlapping pools."""

    def names(meta: TensorMeta | None) -> Named:
        return (*_leading(meta, spatial), *([None] * spatial)) if meta else ()

    return lambda call: assemble(call, list(map(names, call.inputs)), list(map(names, call.outputs)), linear=linear)


def pooled(spatial: int, windows: str = "kernel_size") -> Rule:
    """Pools of the last `spatial` dims and their backward ops: a dim whose windows follow each other without overlap,
    gap or padding is split, coarse rows with the fine rows of their windows. `windows` "output_size" says that windows
    are what makes the sizes right. Indices (of the maxima) count within the whole plane: those of a shard expand."""

    def rule(call: Call) -> OpRule:
        metas = dict(zip(roles(call), call.inputs, strict=True))
        backward, indexed = "grad_output" in metas, "indices" in metas or len(call.outputs) == 2
        fine, coarse = metas["self"], metas["grad_output"] if backward else call.outputs[0] or call.outputs[1]
        assert coarse is not None
        fine_dims: list[Name] = list(_leading(fine, spatial))
        coarse_dims: list[Name] = list(_leading(fine, spatial))
        split = []
        for i in range(spatial):
            size, count = fine.shape[i - spatial], coarse.shape[i - spatial]
            follows = size % count == 0 and (windows == "output_size" or _follow(call, spatial, i, size // count))
            fine_dims.append((f"s{i}", size // count) if follows else None)
            coarse_dims.append(f"s{i}" if follows else None)
            split.append(f"s{i}")
        inputs = [fine_dims if role == "self" else coarse_dims for role in metas]
        outputs = [(fine_dims if backward else coarse_dims) if meta else () for meta in call.outputs]
        return assemble(
            call, inputs, outputs, linear=() if indexed and not backward else FIRST,
            expands=split if indexed else (), contiguous=split if indexed else (), uneven=split,
            padding={(0, name): 0 for name in split} if indexed and backward else None,
        )  # fmt: skip

    return rule


def _follow(call: Call, spatial: int, dim: int, size: int) -> bool:
    """Whether windows of this size stand side by side along a spatial dim."""

    def of(name: str, default: int) -> int:
        values = call.argument(name) if has(call, name) else (default,)
        values = values if isinstance(values, (tuple, list)) else (values,)
        return values[dim if len(values) == spatial else 0] if values else default

    kernel = of("kernel_size", 0)
    return kernel == size and of("stride", kernel) == size and of("padding", 0) == 0 and of("dilation", 1) == 1


def size_of_output(spatial: int) -> Local:
    """The argument `output_size` is that of the result's last dims."""

    def local(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
        assert local_outputs[0] is not None
        return replaced(call, output_size=local_outputs[0][-spatial:])

    return local


# Indices of maxima: they count within the plane of the spatial dims


def _strides(plane: Sequence[int]) -> list[int]:
    return [math.prod(plane[i + 1 :]) for i in range(len(plane))]


def _renumbered(emitter: Emitter, indices: Ref, before: Sequence[int], after: Sequence[int]) -> Ref:
    """Flat indices into a plane with strides `before` as flat indices into one with strides `after`."""
    if before == after:
        return indices
    terms = []
    for have, want in zip(before, after, strict=True):
        coordinate = emitter.op("aten.floor_divide.default", indices, have)
        terms.append(emitter.op("aten.mul.Scalar", coordinate, want))
        indices = emitter.op("aten.remainder.Scalar", indices, have)
    total = terms[0]
    for term in terms[1:]:
        total = emitter.op("aten.add.Tensor", total, term)
    return total


def _firsts(emitter: Emitter, local: LocalCall, plane: Sequence[int], strides: Sequence[int]) -> list[Any]:
    """Summands of the flat index, in the whole plane, of the first element of this rank's `plane`."""
    axes = [local.splits.get(f"s{i}", ()) for i in range(len(plane))]
    pieces = zip(axes, plane, strides, strict=True)
    return [emitter.offset(over, rows * stride) for over, rows, stride in pieces if over]


def max_pool(emitter: Emitter, local: LocalCall) -> Results:
    """max_pool_with_indices with spatial dims split."""
    assert local.outputs[0] is not None or local.outputs[1] is not None
    whole, spatial = local.call.inputs[0].shape, len(local.call.argument("kernel_size"))
    plane = emitter.meta(local.args[0]).shape[-spatial:]
    strides = _strides(whole[-spatial:])
    values, indices = emitter.ops(local.call.node.op, *local.args, **dict(local.kwargs))
    indices = _renumbered(emitter, indices, _strides(plane), strides)
    for first in _firsts(emitter, local, plane, strides):
        indices = emitter.op("aten.add.Tensor", indices, first)
    return values, indices


def max_pool_backward(emitter: Emitter, local: LocalCall) -> Results:
    """max_pool_with_indices_backward with spatial dims split."""
    *arguments, indices = local.args
    whole, spatial = local.call.inputs[1].shape, len(local.call.argument("kernel_size"))
    plane = emitter.meta(arguments[1]).shape[-spatial:]
    strides = _strides(whole[-spatial:])
    for first in _firsts(emitter, local, plane, strides):
        indices = emitter.op("aten.sub.Tensor", indices, first)
    # padding (of other dims) was filled with 0, which is not in every rank's plane
    indices = emitter.op("aten.clamp.default", indices, 0)
    indices = _renumbered(emitter, indices, strides, _strides(plane))
    return (local.result(emitter, *arguments, indices, **dict(local.kwargs)),)


def shuffled(*, up: bool) -> Rule:
    """pixel_shuffle [*, c r^2, h, w] -> [*, c, h r, w r], and (not `up`) its inverse."""

    def rule(call: Call) -> OpRule:
        (source,) = call.inputs
        factor = call.argument("upscale_factor" if up else "downscale_factor")
        *batch, channels = _leading(source, 2)
        deep: Named = [*batch, (channels, factor * factor), "s0", "s1"]
        wide: Named = [*batch, channels, ("s0", factor), ("s1", factor)]
        return assemble(call, [deep if up else wide], [wide if up else deep], linear=FIRST)

    return rule
