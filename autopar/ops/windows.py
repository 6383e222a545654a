"""One place or a window of a dim, read or put back: select, slice, their backward ops and their scatters.

Where a window does not fall on the shards of a split dim, a few places are looked up as indices are (`gather`), and
what is put back is made by each rank for its own places: it knows which of them are meant.
"""

import math

import torch

from autopar.ir.graph import Ref

from .expansions import LocalCall, Results, global_indices
from .families import BOTH, DIMS, FIRST, Rule
from .places import PLACE, along_dim, dim_of, looked_up, place_of, with_dim
from .rule import Call, Emitter, OpRule
from .template import Named, assemble
from .views import window


def selected(call: Call) -> OpRule:
    """select."""
    names = DIMS[: len(call.inputs[0].shape)]
    dim = dim_of(call, len(names))
    return assemble(
        call, [with_dim(names, dim, place_of(call.inputs[0]))], [with_dim(names, dim)], linear=FIRST,
        expands=(PLACE,), uneven=(PLACE,), moves_nothing=True,
    )  # fmt: skip


def select(emitter: Emitter, local: LocalCall) -> Results:
    """select of one place."""
    shape = local.call.inputs[0].shape
    dim = dim_of(local.call, len(shape))
    place = emitter.op("aten.full.default", (1,), local.call.argument("index") % shape[dim], dtype=torch.int64)
    return (emitter.op("aten.squeeze.dim", looked_up(emitter, local, local.args[0], dim, place), dim),)


def put_back(call: Call) -> OpRule:
    """select_backward."""
    assert call.outputs[0] is not None
    names = DIMS[: len(call.outputs[0].shape)]
    dim = dim_of(call, len(names))
    return assemble(
        call, [with_dim(names, dim)], [with_dim(names, dim, PLACE)], linear=FIRST, expands=(PLACE,), uneven=(PLACE,)
    )


def select_backward(emitter: Emitter, local: LocalCall) -> Results:
    """select_backward into a split dim."""
    assert local.call.outputs[0] is not None and local.outputs[0] is not None
    shape, dim = local.call.outputs[0].shape, dim_of(local.call, len(local.outputs[0]))
    other = _other_places(emitter, local, shape, dim, local.call.argument("index") % shape[dim])
    spread = emitter.op(
        "aten.expand.default", emitter.op("aten.unsqueeze.default", local.args[0], dim), local.outputs[0]
    )
    return (emitter.op("aten.masked_fill.Scalar", spread, other, 0),)


def select_scattered(call: Call) -> OpRule:
    """select_scatter: `src` replaces one place of `dim`."""
    names = DIMS[: len(call.inputs[0].shape)]
    dim = dim_of(call, len(names))
    whole = with_dim(names, dim, PLACE)
    return assemble(call, [whole, with_dim(names, dim)], [whole], linear=BOTH, expands=(PLACE,), uneven=(PLACE,))


def select_scatter(emitter: Emitter, local: LocalCall) -> Results:
    """select_scatter into a split dim."""
    shape = local.call.inputs[0].shape
    dim = dim_of(local.call, len(shape))
    other = _other_places(emitter, local, shape, dim, local.call.argument("index") % shape[dim])
    source = emitter.op("aten.unsqueeze.default", local.args[1], dim)
    return (emitter.op("aten.where.self", other, local.args[0], source),)


def _other_places(emitter: Emitter, local: LocalCall, shape: tuple[int, ...], dim: int, place: int) -> Ref:
    here = global_indices(emitter, shape, local.results[0], dim)
    return along_dim(emitter, emitter.op("aten.ne.Scalar", here, place), len(shape), dim)


def windowed(kind: str) -> Rule:
    """slice, slice_backward, slice_scatter: a window along `dim` of the whole, which is the operand `self`, or, for
    the backward op, the result. A window that starts and ends at multiples of a factor's size is split with
    the whole; of another, a slice looks up a few places and the others know which of their places are meant."""

    def rule(call: Call) -> OpRule:
        meta = call.outputs[0] if kind == "backward" else call.inputs[0]
        assert meta is not None
        names = DIMS[: len(meta.shape)]
        dim = dim_of(call, len(names))
        size = meta.shape[dim]
        start, end = window(call.argument("start"), call.argument("end"), size)
        unit = math.gcd(size, start, end) if call.argument("step") == 1 else 1
        whole: Named = names
        part: Named = names
        if unit == 1:
            few = 2 * len(range(start, end, call.argument("step"))) <= size
            whole = with_dim(names, dim, place_of(meta) if few or kind != "slice" else None)
            part = with_dim(names, dim, None)
        inputs = [part] if kind == "backward" else [whole, part][: len(call.inputs)]
        sizes = {names[dim]: unit} if unit > 1 else {}
        output = part if kind == "slice" else whole
        return assemble(
            call, inputs, [output], linear=BOTH if kind == "scatter" else FIRST, sizes=sizes,
            expands=(PLACE,), uneven=(PLACE,), moves_nothing=kind == "slice",
        )  # fmt: skip

    return rule


def slice_of_few(emitter: Emitter, local: LocalCall) -> Results:
    """slice of a few places."""
    shape = local.call.inputs[0].shape
    dim = dim_of(local.call, len(shape))
    start, end = window(local.call.argument("start"), local.call.argument("end"), shape[dim])
    places = emitter.op("aten.arange.start_step", start, end, local.call.argument("step"))
    return (looked_up(emitter, local, local.args[0], dim, places),)


def slice_backward(emitter: Emitter, local: LocalCall) -> Results:
    """slice_backward into a split dim."""
    assert local.outputs[0] is not None
    found, outside = _in_window(emitter, local, dim_of(local.call, len(local.outputs[0])), local.args[0])
    return (emitter.op("aten.masked_fill.Scalar", found, outside, 0),)


def slice_scatter(emitter: Emitter, local: LocalCall) -> Results:
    """slice_scatter into a split dim."""
    assert local.outputs[0] is not None
    found, outside = _in_window(emitter, local, dim_of(local.call, len(local.outputs[0])), local.args[1])
    return (emitter.op("aten.where.self", outside, local.args[0], found),)


def _in_window(emitter: Emitter, local: LocalCall, dim: int, part: Ref) -> tuple[Ref, Ref]:
    """What of a window falls on each of this rank's places, and which places have nothing of it."""
    assert local.call.outputs[0] is not None
    shape, step = local.call.outputs[0].shape, local.call.argument("step")
    start, _ = window(local.call.argument("start"), local.call.argument("end"), shape[dim])
    here = global_indices(emitter, shape, local.results[0], dim)
    distance = emitter.op("aten.sub.Tensor", here, start)
    row = emitter.op("aten.div.Tensor_mode", distance, step, rounding_mode="floor")
    outside = emitter.op("aten.lt.Scalar", distance, 0)
    for beyond in (
        emitter.op("aten.ge.Scalar", row, emitter.meta(part).shape[dim]),
        emitter.op("aten.ne.Scalar", emitter.op("aten.remainder.Scalar", distance, step), 0),
    ):
        outside = emitter.op("aten.logical_or.default", outside, beyond)
    row = emitter.op("aten.masked_fill.Scalar", row, outside, 0)
    return emitter.op("aten.index_select.default", part, dim, row), along_dim(emitter, outside, len(shape), dim)
