"""Ops that write elements at their place along a dim, with that dim split.

Each rank drops what is for other ranks' places. What adds at places may also split what is added: every rank adds its
part, and one of them the tensor that it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.ir.graph import Ref

from .bounds import checked
from .expansions import Expansion, LocalCall, Results
from .families import DIMS, Rule
from .places import (
    PLACE,
    all_whole,
    common_dims,
    counted_from_start,
    dim_of,
    held,
    indices_of,
    place_names,
    result_dims,
    split_places,
    with_dim,
)
from .rule import Call, Emitter, OpRule
from .template import Linear, Named, assemble


def scattered(adds: Callable[[Call], bool], linear: Linear = ()) -> Rule:
    """scatter and the like; what `adds` may split what is added."""

    def rule(call: Call) -> OpRule:
        names, dim = common_dims(call)
        if not names:
            return all_whole(call)
        target, other = with_dim(names, dim, PLACE), with_dim(names, dim, "i" if adds(call) else None)
        return assemble(
            call, [target, *([other] * (len(call.inputs) - 1))], [target], linear=linear,
            expands=(PLACE, "i"), uneven=(PLACE, "i"),
        )  # fmt: skip

    return rule


def index_written(adds: bool, linear: Linear = ()) -> Rule:
    """index_add, index_copy, index_fill: a vector of places, and a slice for each (or one number for all)."""

    def rule(call: Call) -> OpRule:
        names = DIMS[: len(call.inputs[0].shape)]
        if not names:
            return all_whole(call)
        dim = dim_of(call, len(names))
        index = "i" if adds else None
        values = with_dim(names, dim, index)
        inputs: list[Named] = [with_dim(names, dim, PLACE), [index] if call.inputs[1].shape else []]
        inputs += [values if meta.shape else () for meta in call.inputs[2:]]
        return assemble(
            call, inputs, [with_dim(names, dim, PLACE)], linear=linear, expands=(PLACE, "i"), uneven=(PLACE, "i")
        )  # fmt: skip

    return rule


def write(*, from_end: bool = False) -> Expansion:
    """scatter, index_add and the like along a split dim, or of a split source: (self, dim, index, ...). Places may
    count `from_end`."""

    def expand(emitter: Emitter, local: LocalCall) -> Results:
        target, dim, places, *rest = local.args
        target = _once(emitter, local, target, "i")
        dims = [dim % len(emitter.meta(target).shape)] if PLACE in local.splits else []
        for d in dims:
            size, whole = emitter.meta(target).shape[d], local.call.inputs[0].shape[d]
            places = counted_from_start(emitter, places, whole) if from_end else checked(emitter, places, whole)
            row, mine = held(emitter, local, places, d)
            places = emitter.op("aten.masked_fill.Scalar", row, emitter.op("aten.logical_not.default", mine), size)
        written = local.result(emitter, _longer(emitter, target, dims), dim, places, *rest, **dict(local.kwargs))
        return (_cut(emitter, written, target, dims),)

    return expand


def index_put(call: Call) -> OpRule | None:
    """index_put, whose values have the dims that index would give (some may be missing or 1). Only what
    accumulates may split the indices: else the last of two values for one place wins."""
    found = indices_of(call)
    if found is None:
        return None
    places, adjacent, index_rank = found
    rank, values = len(call.inputs[0].shape), call.inputs[-1]
    index = [f"i{k}" if call.argument("accumulate") else None for k in range(index_rank)]
    value = result_dims(rank, places, adjacent, index)
    names = place_names(rank, places)
    expands = tuple(f"{PLACE}{d}" for d in places)
    inputs: list[Named] = [names, *(index[index_rank - len(m.shape) :] for m in call.inputs[1:-1])]
    return assemble(
        call, [*inputs, value[len(value) - len(values.shape) :]], [names], linear=((0, len(call.inputs) - 1),),
        expands=(*expands, *(i for i in index if i)), uneven=(*expands, *(i for i in index if i)),
    )  # fmt: skip


def put_at_indices(emitter: Emitter, local: LocalCall) -> Results:
    """index_put in split dims, or of split values."""
    source = _once(emitter, local, local.args[0], "i")
    indices, _, dims = split_places(emitter, local, source, lambda size: size)
    longer = _longer(emitter, source, dims)
    return (_cut(emitter, local.result(emitter, longer, tuple(indices), *local.args[2:]), source, dims),)


def _once(emitter: Emitter, local: LocalCall, value: Ref, prefix: str) -> Ref:
    """What is added to is kept by the first rank of those that split what is added, and zero on others."""
    for name, axes in local.splits.items():
        for axis in axes if name.startswith(prefix) else ():
            number = emitter.op("aten.full.default", (), emitter.coordinate(axis), dtype=torch.int64)
            value = emitter.op("aten.masked_fill.Scalar", value, emitter.op("aten.ne.Scalar", number, 0), 0)
    return value


def _longer(emitter: Emitter, value: Ref, dims: Sequence[int]) -> Ref:
    """The value with one more element at the end of each of some dims, for what goes elsewhere."""
    rank = len(emitter.meta(value).shape)
    pad = [int(rank - 1 - i // 2 in dims and i % 2 == 1) for i in range(2 * rank)]
    return emitter.op("aten.constant_pad_nd.default", value, tuple(pad), 0) if dims else value


def _cut(emitter: Emitter, value: Ref, like: Ref, dims: Sequence[int]) -> Ref:
    for dim in dims:
        value = emitter.op("aten.slice.Tensor", value, dim, 0, emitter.meta(like).shape[dim])
    return value
