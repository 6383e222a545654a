"""One place or a window of a dim, read or put back: select, slice, their backward ops and their scatters.

Where a window does not fall on the shards of a split dim, ranks look up a few places as they look up indices
(`gather`), and each rank puts values back into its own places: it knows which of them the window covers.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from .expansions import LocalCall, Results, global_indices
from .families import BOTH, FIRST, Rule
from .lookup import PLACED, along_dim, dim_of, dims_of, looked_up, place_of, with_dim
from .rule import Call, OpRule
from .template import Dim, Named, assemble
from .views import window


def windowed(kind: str) -> Rule:
    """slice, slice_backward, slice_scatter: a window along `dim` of the operand `self` or, for the backward op, of the
    result. A window that starts and ends at multiples of a factor's size is split with that tensor; of another, a slice
    looks up a few places and the other two know which of their places it covers."""

    def window_of(call: Call) -> OpRule:
        meta = call.output if kind == "backward" else call.inputs[0]
        names, dim = dims_of(call, meta)
        size = meta.shape[dim]
        start, end = window(call.argument("start"), call.argument("end"), size)
        unit = math.gcd(size, start, end) if call.argument("step") == 1 else 1
        full: Named = names
        part: Named = names
        if unit == 1:
            few = 2 * len(range(start, end, call.argument("step"))) <= size
            full = with_dim(names, dim, place_of(meta) if few or kind != "slice" else None)
            part = with_dim(names, dim, None)
        inputs = [part] if kind == "backward" else [full, part][: len(call.inputs)]
        dims = {**PLACED, names[dim]: Dim(size=unit if unit > 1 else None)}
        output = part if kind == "slice" else full
        rule = assemble(call, inputs, [output], dims, BOTH if kind == "scatter" else FIRST)
        return replace(rule, moves_nothing=kind == "slice")

    return window_of


def slice_of_few(local: LocalCall) -> Results:
    """slice of a few places."""
    shape = local.call.inputs[0].shape
    dim = dim_of(local.call, len(shape))
    start, end = window(local.call.argument("start"), local.call.argument("end"), shape[dim])
    return looked_up(local, local.args[0], dim, local.arange(start, end, local.call.argument("step")))


def slice_backward(local: LocalCall) -> Results:
    """slice_backward into a split dim."""
    values, outside = in_window(local, local.args[0])
    return values.masked_fill(outside, 0)


def in_window(local: LocalCall, part: Tensor) -> tuple[Tensor, Tensor]:
    """The value of a window at each of this rank's places, and which places lie outside of it."""
    shape, step = local.call.output.shape, local.call.argument("step")
    dim = dim_of(local.call, len(shape))
    start, _ = window(local.call.argument("start"), local.call.argument("end"), shape[dim])
    distance = global_indices(local, shape, local.results[0], dim) - start
    row = torch.div(distance, step, rounding_mode="floor")
    outside = distance < 0
    for beyond in (row >= part.shape[dim], distance % step != 0):
        outside = torch.logical_or(outside, beyond)
    return part.index_select(dim, row.masked_fill(outside, 0)), along_dim(outside, len(shape), dim)
