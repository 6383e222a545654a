"""Pools: batch and channels split freely, spatial dims where windows keep step with rows; ranks exchange edges where
windows overlap."""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Shape

from .expansions import LocalCall, Results, global_indices
from .families import FIRST, Rule
from .halo import Halos, HaloWindow, each, halo_dims, halos_added, halos_of, in_step, surrounded, with_halos
from .local import Arguments, Local, replaced
from .rule import Call, OpRule, neutral
from .template import OWN_PART, Dim, Linear, Name, Named, assemble, roles


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


def _with_leading(fine: TensorMeta, spatial: int, fine_rows: Iterable[int]) -> tuple[Named, Named]:
    """Names of the dims of the coarse and of the fine tensor, by `in_step`."""
    coarse_dims, fine_dims = in_step(fine_rows)
    return (*leading(fine, spatial), *coarse_dims), (*leading(fine, spatial), *fine_dims)


def pooled(spatial: int) -> Rule:
    """Pools of the last `spatial` dims and their backward ops: coarse rows are split with the fine rows that
    belong to them. Indices (of the maxima) count within the global plane: those of a shard expand."""

    def rule(call: Call) -> OpRule:
        fine, coarse = _fine_and_coarse(call)
        backward, indexed = call.has("grad_output"), call.has("indices") or len(call.outputs) == 2
        # rounded up, a shard with rows to spare would have a window more
        over, up = _windows(call, spatial), call.argument("ceil_mode")
        sizes = zip(over, fine.shape[-spatial:], coarse.shape[-spatial:], strict=True)
        in_rows = (
            w.stride if size == w.stride * count and not (up and w.before and w.excess < 0) else 0
            for w, size, count in sizes
        )
        coarse_dims, fine_dims = _with_leading(fine, spatial, in_rows)
        dims: dict[str, Dim] = {}
        if indexed:
            padding = {0: 0.0} if backward else {}
            dims = {f"s{i}": replace(OWN_PART, padding=padding) for i in range(spatial)}
        dims |= halo_dims(over, (0,), 0 if backward or not indexed else neutral("max", fine.dtype))
        inputs = [fine_dims if role == "self" else coarse_dims for role in roles(call)]
        outputs = [(fine_dims if backward else coarse_dims) if meta else () for meta in call.outputs]
        return assemble(call, inputs, outputs, dims, () if indexed and not backward else FIRST)

    return rule


def averaged_to_size(spatial: int) -> Rule:
    """Adaptive averages, backward too: a dim is split where every window has the same length."""

    def rule(call: Call) -> OpRule:
        fine, coarse = _fine_and_coarse(call)
        sizes = zip(fine.shape[-spatial:], coarse.shape[-spatial:], strict=True)
        coarse_dims, fine_dims = _with_leading(fine, spatial, (0 if size % n else size // n for size, n in sizes))
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


def _padding(call: Call, spatial: int, halos: Halos) -> tuple[int, ...]:
    return tuple(0 if i in halos else size for i, size in enumerate(each(call, "padding", spatial)))


def max_pool(local: LocalCall, spatial: int) -> Results:
    """max_pool_with_indices with spatial dims split."""
    call, source, halos = local.call, local.args[0], _halos(local, spatial)
    around = with_halos(local, source, spatial, halos, neutral("max", source.dtype))
    values, indices = local.result(
        around, call.argument("kernel_size"), call.argument("stride"), _padding(call, spatial, halos),
        call.argument("dilation"), call.argument("ceil_mode"),
    )  # fmt: skip
    dims = _along(local, spatial, source, around.shape[-spatial:])
    return values, _renumbered(local, indices, dims, to_global=True)


def max_pool_backward(local: LocalCall, spatial: int) -> Results:
    """max_pool_with_indices_backward with spatial dims split."""
    call, halos = local.call, _halos(local, spatial)
    gradient, source, indices = local.args[0], local.args[1], local.args[-1]
    around = surrounded(source, spatial, halos)
    dims = _along(local, spatial, source, around.shape[-spatial:])
    result = local.result(
        gradient, around, call.argument("kernel_size"), call.argument("stride"), _padding(call, spatial, halos),
        call.argument("dilation"), call.argument("ceil_mode"), _renumbered(local, indices, dims, to_global=False),
    )  # fmt: skip
    return halos_added(local, result, spatial, halos)


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


def _along(local: LocalCall, spatial: int, source: Tensor, plane: Sequence[int]) -> list[_PlaneDim]:
    sizes, own = _fine_and_coarse(local.call)[0].shape[-spatial:], source.shape[-spatial:]
    halos = _halos(local, spatial)
    before = [halos[i][0].before if i in halos else 0 for i in range(spatial)]
    axes = [local.splits.get(f"s{i}", ()) for i in range(spatial)]
    return list(map(_PlaneDim, sizes, own, plane, before, axes))


def _strides(plane: Sequence[int]) -> list[int]:
    return [math.prod(plane[i + 1 :]) for i in range(len(plane))]


def _renumbered(local: LocalCall, indices: Tensor, dims: Sequence[_PlaneDim], *, to_global: bool) -> Tensor:
    """Indices into a shard with its halo as indices into the global plane, or back. They stay inside, even where a
    window holds nothing above -inf, or is padding."""
    inner, outer = _strides([d.rows for d in dims]), _strides([d.size for d in dims])
    have, want = (inner, outer) if to_global else (outer, inner)
    to, back = (operator.add, operator.sub) if to_global else (operator.sub, operator.add)
    if inner == outer and not any(d.before for d in dims):  # rows only
        for d, stride in zip(dims, outer, strict=True):
            if d.axes:
                indices = to(indices, local.offset(d.axes, d.own * stride))
        return indices.clamp(0, math.prod(d.size if to_global else d.rows for d in dims) - 1)
    total = None
    for i, (d, had, wanted) in enumerate(zip(dims, have, want, strict=True)):
        if d.size == 1:
            continue
        coordinate = indices
        if i < len(dims) - 1:
            coordinate, indices = indices // had, indices % had
        if d.axes:
            coordinate = to(coordinate, local.offset(d.axes, d.own))
            if d.before:
                coordinate = back(coordinate, d.before)
            coordinate = coordinate.clamp(0, (d.size if to_global else d.rows) - 1)
        term = coordinate * wanted if wanted > 1 else coordinate
        total = term if total is None else total + term
    assert total is not None
    return total


# Averages


def _is_full(call: Call, window: HaloWindow, size: int, count: int) -> bool:
    """Whether every window along a dim counts all of its elements."""
    padding = window.before if call.argument("count_include_pad") else 0
    return padding == window.before and window.stride * (count - 1) + window.reach < size + padding + window.before


def average_pool(local: LocalCall, spatial: int) -> Results:
    """avg_pool and its backward with spatial dims split: sums, divided by the number of elements that they count."""
    call, halos, backward = local.call, _halos(local, spatial), local.call.has("grad_output")
    divisor = call.argument("divisor_override")
    value: Tensor = local.args[0]
    uncounted: list[int] = []
    if divisor is None:
        fine, coarse = _fine_and_coarse(call)
        sizes = zip(_windows(call, spatial), fine.shape[-spatial:], coarse.shape[-spatial:], strict=True)
        full = [_is_full(call, *each) for each in sizes]
        divisor = math.prod(itertools.compress(each(call, "kernel_size", spatial), full))
        uncounted = [i for i, counts_all in enumerate(full) if not counts_all]
    rest = (
        call.argument("kernel_size"), call.argument("stride"), _padding(call, spatial, halos),
        call.argument("ceil_mode"), True, divisor,
    )  # fmt: skip
    if not backward:
        value = local.result(with_halos(local, value, spatial, halos), *rest)
    for i in uncounted:
        value = value / _counts(local, spatial, i)
    if backward:
        value = local.result(value, surrounded(local.args[1], spatial, halos), *rest)
        value = halos_added(local, value, spatial, halos)
    return value


def _counts(local: LocalCall, spatial: int, i: int) -> Tensor:
    """How many elements each window of this rank counts along a spatial dim, to divide by."""
    fine, coarse = _fine_and_coarse(local.call)
    window, dim = _windows(local.call, spatial)[i], len(coarse.shape) - spatial + i
    layout = (local.operands if local.call.has("grad_output") else local.results)[0]
    beyond = window.before if local.call.argument("count_include_pad") else 0
    start = global_indices(local, coarse.shape, layout, dim) * window.stride - window.before
    end = start + (window.reach + 1)
    start, end = start.clamp(-beyond), end.clamp(None, fine.shape[dim] + beyond)
    return (end - start).clamp(1).reshape(-1, *(1,) * (spatial - 1 - i))
