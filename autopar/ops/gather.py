"""Ops that read elements by their place along a dim, with that dim split.

Each rank looks up the places that it holds and has zeros for the others: the result is Partial(sum), and the source is
not gathered.
"""

from __future__ import annotations

import torch

from autopar.ir.graph import Ref

from .bounds import checked
from .expansions import LocalCall, Results
from .families import DIMS, FIRST
from .places import (
    PLACE,
    all_whole,
    along_dim,
    common_dims,
    dim_of,
    held,
    indices_of,
    place_names,
    place_of,
    result_dims,
    split_places,
    with_dim,
)
from .rule import Call, Emitter, OpRule
from .template import assemble


def looked_up(emitter: Emitter, local: LocalCall, source: Ref, dim: int, places: Ref) -> Ref:
    """The elements at places (a vector of global indices) along a split dim: zeros for other ranks' places."""
    shape = emitter.meta(source).shape
    row, mine = held(emitter, local, places, dim)
    other = emitter.op("aten.logical_not.default", mine)
    found = emitter.op("aten.index_select.default", source, dim, emitter.op("aten.masked_fill.Scalar", row, other, 0))
    return emitter.op("aten.masked_fill.Scalar", found, along_dim(emitter, other, len(shape), dim), 0)


def index_selected(call: Call) -> OpRule:
    """index_select."""
    names = DIMS[: len(call.inputs[0].shape)]
    dim = dim_of(call, len(names))
    return assemble(
        call, [with_dim(names, dim, place_of(call.inputs[0])), ["i"] if call.inputs[1].shape else []],
        [with_dim(names, dim, "i")], linear=FIRST, expands=(PLACE,), uneven=(PLACE,),
    )  # fmt: skip


def index_select(emitter: Emitter, local: LocalCall) -> Results:
    """index_select along a split dim."""
    source, dim, places = local.args
    dim %= len(emitter.meta(source).shape)
    places = checked(emitter, places, local.call.inputs[0].shape[dim])
    return (looked_up(emitter, local, source, dim, emitter.op("aten.reshape.default", places, (-1,))),)


def gathered(call: Call) -> OpRule:
    """gather. The other dims move together where they have one size in all operands."""
    names, dim = common_dims(call)
    return assemble(
        call, [with_dim(names, dim, place_of(call.inputs[0])), with_dim(names, dim, "i")], [with_dim(names, dim, "i")],
        linear=FIRST, expands=(PLACE,), uneven=(PLACE,),
    ) if names else all_whole(call)  # fmt: skip


def gather(emitter: Emitter, local: LocalCall) -> Results:
    """gather along a split dim."""
    source, dim, places, *rest = local.args
    dim %= len(emitter.meta(source).shape)
    row, mine = held(emitter, local, checked(emitter, places, local.call.inputs[0].shape[dim]), dim)
    other = emitter.op("aten.logical_not.default", mine)
    found = local.result(emitter, source, dim, emitter.op("aten.masked_fill.Scalar", row, other, 0), *rest)
    return (emitter.op("aten.masked_fill.Scalar", found, other, 0),)


def indexed(call: Call) -> OpRule | None:
    """index with tensors of integers."""
    found = indices_of(call)
    if found is None:
        return None
    places, adjacent, index_rank = found
    rank = len(call.inputs[0].shape)
    index = [f"i{k}" for k in range(index_rank)]
    names = place_names(rank, places, call.inputs[0].dtype is not torch.bool)
    expands = tuple(f"{PLACE}{d}" for d in places)
    return assemble(
        call, [names, *(index[index_rank - len(meta.shape) :] for meta in call.inputs[1:])],
        [result_dims(rank, places, adjacent, index)], linear=FIRST, expands=expands, uneven=expands,
    )  # fmt: skip


def index(emitter: Emitter, local: LocalCall) -> Results:
    """index in split dims: what one of the indices says is elsewhere is zero here."""
    source = local.args[0]
    known = indices_of(local.call)
    assert known is not None
    places, adjacent, _ = known
    indices, masks, _ = split_places(emitter, local, source, lambda size: 0)
    found = local.result(emitter, source, tuple(indices))
    rank = len(emitter.meta(source).shape)
    behind = rank - 1 - places[-1] if adjacent else rank - len(places)
    for mask in masks:
        shape = (*emitter.meta(mask).shape, *(1,) * behind)
        found = emitter.op("aten.masked_fill.Scalar", found, emitter.op("aten.reshape.default", mask, shape), 0)
    return (found,)
