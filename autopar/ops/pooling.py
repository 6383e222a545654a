"""Pools: batch and channels split freely, spatial dims where windows keep step with rows; ranks exchange edges where
windows overlap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.layout import Shape

from .expansions import Expansion, LocalCall, Results, global_indices
from .families import FIRST, Rule
from .halo import Halos, HaloWindow, each, halos_added, halos_of, with_halos
from .local import Arguments, Local, replaced
from .rule import Call, OpRule, neutral
from .template import Linear, Name, Named, assemble, roles


def leading(meta: TensorMeta, spatial: int) -> tuple[str, ...]:
    """Names of the dims before the spatial ones: batch, if there is one, and channels."""
    return tuple(f"d{i}" for i in range(len(meta.shape) - spatial, 0, -1))


def unsplit_planes(spatial: int, *, linear: Linear = FIRST) -> Rule:
    """Ops on the last `spatial` dims, which are unsplit: reflection padding, adaptive pools of maxima."""

    def names(meta: TensorMeta | None) -> Named:
        return (*leading(meta, spatial), *([None] * spatial)) if meta else ()

    return lambda call: assemble(call, list(map(names, call.inputs)), list(map(names, call.outputs)), linear=linear)


def columns(call: Call) -> OpRule:
    """im2col and col2im: a column's channels are the image's channels times the places of a window. The dim of columns
    is unsplit, as are the image's rows."""
    places = math.prod(call.argument("kernel_size"))
    source, target = call.inputs[0], call.output
    batch: list[Name] = ["n"] if min(len(source.shape), len(target.shape)) == 3 else []

    def names(meta: TensorMeta) -> Named:
        image = len(meta.shape) - len(batch) == 3
        return (*batch, "c", None, None) if image else (*batch, ("c", places), None)

    return assemble(call, [names(source)], [names(target)], linear=FIRST)


def pooled(spatial: int) -> Rule:
    """Pools of the last `spatial` dims and their backward ops: coarse rows are split with the fine rows that
    belong to them. Indices (of the maxima) count within the global plane: those of a shard expand."""

    def rule(call: Call) -> OpRule:
        fine, coarse = _fine_and_coarse(call)
        backward, indexed = call.has("grad_output"), call.has("indices") or len(call.outputs) == 2
        fine_dims: list[Name] = list(leading(fine, spatial))
        coarse_dims: list[Name] = list(leading(fine, spatial))
        least: dict[str, int] = {}
        split, halos = [], []
        for i, window in enumerate(_windows(call, spatial)):
            if fine.shape[i - spatial] != window.stride * coarse.shape[i - spatial]:
                keeps_step = False
            else:  # rounded up, a shard with rows to spare would have a window more
                keeps_step = not (call.argument("ceil_mode") and window.before and window.excess < 0)
            fine_dims.append((f"s{i}", window.stride) if keeps_step else None)
            coarse_dims.append(f"s{i}" if keeps_step else None)
            split.append(f"s{i}")
            if window.before or window.after:
                halos.append(f"s{i}")
                least[f"s{i}"] = window.coarse_rows
        inputs = [fine_dims if role == "self" else coarse_dims for role in roles(call)]
        outputs = [(fine_dims if backward else coarse_dims) if meta else () for meta in call.outputs]
        expands = split if indexed else halos
        beyond = 0 if backward or not indexed else neutral("max", fine.dtype)
        return assemble(
            call, inputs, outputs, linear=() if indexed and not backward else FIRST, expands=expands,
            contiguous=expands, least=least, uneven=split,
            padding={(0, name): beyond for name in (split if indexed and backward else halos)},
        )  # fmt: skip

    return rule


def averaged_to_size(spatial: int) -> Rule:
    """Adaptive averages, backward too: a dim is split where every window has the same length."""

    def rule(call: Call) -> OpRule:
        fine, coarse = _fine_and_coarse(call)
        fine_dims: list[Name] = list(leading(fine, spatial))
        coarse_dims: list[Name] = list(leading(fine, spatial))
        for i in range(spatial):
            size, count = fine.shape[i - spatial], coarse.shape[i - spatial]
            fine_dims.append((f"s{i}", size // count) if size % count == 0 else None)
            coarse_dims.append(f"s{i}" if size % count == 0 else None)
        inputs = [fine_dims if role == "self" else coarse_dims for role in roles(call)]
        return assemble(call, inputs, [fine_dims if call.has("grad_output") else coarse_dims], linear=FIRST)

    return rule


def _fine_and_coarse(call: Call) -> tuple[TensorMeta, TensorMeta]:
    metas = dict(zip(roles(call), call.inputs, strict=True))
    coarse = metas.get("grad_output") or next(meta for meta in call.outputs if meta)
    return metas["self"], coarse


def _windows(call: Call, spatial: int) -> tuple[HaloWindow, ...]:
    """One a spatial dim."""
    kernel = each(call, "kernel_size", spatial)
    stride = each(call, "stride", spatial) or kernel
    dilation = each(call, "dilation", spatial) if call.has("dilation") else (1,) * spatial
    steps = zip(kernel, stride, each(call, "padding", spatial), dilation, strict=True)
    return tuple(HaloWindow(step, padding, apart * (size - 1)) for size, step, padding, apart in steps)


def size_of_output(spatial: int) -> Local:
    """The argument `output_size` is that of the result's last dims."""

    def local(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
        assert local_outputs[0] is not None
        return replaced(call, output_size=local_outputs[0][-spatial:])

    return local


# Local programs


def _halos(local: LocalCall, spatial: int) -> Halos:
    return halos_of(local, _windows(local.call, spatial))


def _of_surrounded_shape(emitter: Emitter, value: Ref, spatial: int, halos: Halos) -> Ref:
    """A tensor of the shape with halos, for a backward op that reads no more than its shape."""
    shape = list(emitter.meta(value).shape)
    for i, (window, _) in halos.items():
        shape[i - spatial] += window.before + window.after
    return emitter.op("aten.new_empty.default", value, tuple(shape)) if halos else value


def _padding(call: Call, spatial: int, halos: Halos) -> tuple[int, ...]:
    return tuple(0 if i in halos else size for i, size in enumerate(each(call, "padding", spatial)))


def max_pool(spatial: int) -> Expansion:
    """max_pool_with_indices with spatial dims split."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        call, source, halos = local.call, local.args[0], _halos(local, spatial)
        around = with_halos(emitter, source, spatial, halos, neutral("max", emitter.meta(source).dtype))
        values, indices = emitter.ops(
            call.node.op, around, call.argument("kernel_size"), call.argument("stride"), _padding(call, spatial, halos),
            call.argument("dilation"), call.argument("ceil_mode"),
        )  # fmt: skip
        plane = emitter.meta(around).shape[-spatial:]
        return values, _renumbered(emitter, indices, _along(local, emitter, spatial, source, plane), to_global=True)

    return expand


def max_pool_backward(spatial: int) -> Expansion:
    """max_pool_with_indices_backward with spatial dims split."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        call, halos = local.call, _halos(local, spatial)
        gradient, source, indices = local.args[0], local.args[1], local.args[-1]
        around = _of_surrounded_shape(emitter, source, spatial, halos)
        plane = emitter.meta(around).shape[-spatial:]
        indices = _renumbered(emitter, indices, _along(local, emitter, spatial, source, plane), to_global=False)
        result = local.result(
            emitter, gradient, around, call.argument("kernel_size"), call.argument("stride"),
            _padding(call, spatial, halos), call.argument("dilation"), call.argument("ceil_mode"), indices,
        )  # fmt: skip
        return (halos_added(emitter, result, spatial, halos),)

    return expand


# Indices of maxima: they count within the plane of the spatial dims


@dataclass(frozen=True, slots=True)
class _PlaneDim:
    """One dim of the plane: its global size, the rows of a shard, those with the halo, `before` of them before the
    shard's own, and the mesh axes that split it."""

    size: int
    own: int
    rows: int
    before: int
    axes: tuple[int, ...]


def _along(local: LocalCall, emitter: Emitter, spatial: int, source: Ref, plane: Sequence[int]) -> list[_PlaneDim]:
    sizes, own = _fine_and_coarse(local.call)[0].shape[-spatial:], emitter.meta(source).shape[-spatial:]
    halos = _halos(local, spatial)
    before = [halos[i][0].before if i in halos else 0 for i in range(spatial)]
    axes = [local.splits.get(f"s{i}", ()) for i in range(spatial)]
    return list(map(_PlaneDim, sizes, own, plane, before, axes))


def _strides(plane: Sequence[int]) -> list[int]:
    return [math.prod(plane[i + 1 :]) for i in range(len(plane))]


def _renumbered(emitter: Emitter, indices: Ref, dims: Sequence[_PlaneDim], *, to_global: bool) -> Ref:
    """Indices into a shard with its halo as indices into the global plane, or back. They stay inside, even where a
    window holds nothing above -inf, or is padding."""
    inner, outer = _strides([d.rows for d in dims]), _strides([d.size for d in dims])
    have, want = (inner, outer) if to_global else (outer, inner)
    to, back = ("aten.add.Tensor", "aten.sub.Tensor") if to_global else ("aten.sub.Tensor", "aten.add.Tensor")
    if inner == outer and not any(d.before for d in dims):  # rows only
        for d, stride in zip(dims, outer, strict=True):
            if d.axes:
                indices = emitter.op(to, indices, emitter.offset(d.axes, d.own * stride))
        return emitter.op(
            "aten.clamp.default", indices, 0, math.prod(d.size if to_global else d.rows for d in dims) - 1
        )
    total = None
    for i, (d, had, wanted) in enumerate(zip(dims, have, want, strict=True)):
        if d.size == 1:
            continue
        coordinate = indices
        if i < len(dims) - 1:
            coordinate = emitter.op("aten.floor_divide.default", indices, had)
            indices = emitter.op("aten.remainder.Scalar", indices, had)
        if d.axes:
            coordinate = emitter.op(to, coordinate, emitter.offset(d.axes, d.own))
            if d.before:
                coordinate = emitter.op(back, coordinate, d.before)
            coordinate = emitter.op("aten.clamp.default", coordinate, 0, (d.size if to_global else d.rows) - 1)
        term = emitter.op("aten.mul.Scalar", coordinate, wanted) if wanted > 1 else coordinate
        total = term if total is None else emitter.op("aten.add.Tensor", total, term)
    assert total is not None
    return total


# Averages


def _is_full(call: Call, window: HaloWindow, size: int, count: int) -> bool:
    """Whether every window along a dim counts all of its elements."""
    padding = window.before if call.argument("count_include_pad") else 0
    return padding == window.before and window.stride * (count - 1) + window.reach < size + padding + window.before


def average_pool(spatial: int) -> Expansion:
    """avg_pool and its backward with spatial dims split: sums, divided by the number of elements that they count."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        call, halos, backward = local.call, _halos(local, spatial), local.call.has("grad_output")
        value, divisor = local.args[0], call.argument("divisor_override")
        uncounted: list[int] = []
        if divisor is None:
            fine, coarse = _fine_and_coarse(call)
            sizes = zip(_windows(call, spatial), fine.shape[-spatial:], coarse.shape[-spatial:], strict=True)
            full = [_is_full(call, *each) for each in sizes]
            divisor = math.prod(
                k for k, counts_all in zip(each(call, "kernel_size", spatial), full, strict=True) if counts_all
            )
            uncounted = [i for i, counts_all in enumerate(full) if not counts_all]
        rest = (
            call.argument("kernel_size"), call.argument("stride"), _padding(call, spatial, halos),
            call.argument("ceil_mode"), True, divisor,
        )  # fmt: skip
        if not backward:
            value = local.result(emitter, with_halos(emitter, value, spatial, halos), *rest)
        for i in uncounted:
            value = emitter.op("aten.div.Tensor", value, _counts(emitter, local, spatial, i))
        if backward:
            value = local.result(emitter, value, _of_surrounded_shape(emitter, local.args[1], spatial, halos), *rest)
            value = halos_added(emitter, value, spatial, halos)
        return (value,)

    return expand


def _counts(emitter: Emitter, local: LocalCall, spatial: int, i: int) -> Ref:
    """How many elements each window of this rank counts along a spatial dim, to divide by."""
    fine, coarse = _fine_and_coarse(local.call)
    window, dim = _windows(local.call, spatial)[i], len(coarse.shape) - spatial + i
    layout = (local.operands if local.call.has("grad_output") else local.results)[0]
    beyond = window.before if local.call.argument("count_include_pad") else 0
    place = global_indices(emitter, coarse.shape, layout, dim)
    start = emitter.op("aten.sub.Tensor", emitter.op("aten.mul.Scalar", place, window.stride), window.before)
    end = emitter.op("aten.add.Tensor", start, window.reach + 1)
    start = emitter.op("aten.clamp.default", start, -beyond)
    end = emitter.op("aten.clamp.default", end, None, fine.shape[dim] + beyond)
    count = emitter.op("aten.clamp.default", emitter.op("aten.sub.Tensor", end, start), 1)
    return emitter.op("aten.reshape.default", count, (-1, *(1,) * (spatial - 1 - i)))
