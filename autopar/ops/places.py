"""Places along a split dim: the names of the dims of an indexed tensor, the places that a rank holds, and ops that read
and write elements by their place.

To read, each rank looks up the places that it holds and has zeros for the others; the result is Partial(sum), and
nobody gathers the source. To write, each rank drops the values for other ranks' places. An op that adds at places may
also split the values: every rank adds its part, and one of them the tensor that they are added to.
"""

from collections.abc import Callable, Sequence

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref

from .bounds import checked
from .expansions import Expansion, LocalCall, Results
from .families import DIMS, FIRST, Rule
from .lookup import PLACE, dim_of, dims_of, held, looked_up, place_of, with_dim
from .rule import Call, OpRule
from .template import Linear, Named, assemble, unsplit


def common_dims(call: Call) -> tuple[list[str | None], int]:
    """For gather and scatter: names of the dims, without those whose size differs from operand to operand (a 1 is not
    broadcast), and the dim of the places. No names if a number stands for a tensor."""
    rank = len(call.inputs[0].shape)
    if any(len(meta.shape) != rank for meta in call.inputs) or not rank:
        return [], 0
    equal = [len({meta.shape[d] for meta in call.inputs}) == 1 for d in range(rank)]
    return [name if same else None for name, same in zip(DIMS, equal, strict=False)], dim_of(call, rank)


def indices_of(call: Call) -> tuple[tuple[int, ...], bool, int] | None:
    """The dims that are indexed, whether they stand side by side (the dims of the indices then come in their place,
    else first), and the number of dims of the indices. None for masks, whose results have sizes that depend
    on the data."""
    places = tuple(d for d, index in enumerate(call.argument("indices")) if index is not None)
    indices = call.inputs[1 : 1 + len(places)]
    if not places or any(not meta.dtype.is_signed for meta in indices):
        return None
    return places, places[-1] - places[0] == len(places) - 1, max(len(meta.shape) for meta in indices)


def result_dims(rank: int, places: tuple[int, ...], adjacent: bool, index: Sequence[str | None]) -> list[str | None]:
    """Names of the dims of x[indices], for x with the names `DIMS`."""
    rest = [name for d, name in enumerate(DIMS[:rank]) if d not in places]
    before = places[0] if adjacent else 0
    return [*rest[:before], *index, *rest[before:]]


def place_names(rank: int, places: tuple[int, ...], allowed: bool = True) -> list[str | None]:
    return [(f"{PLACE}{d}" if allowed else None) if d in places else DIMS[d] for d in range(rank)]


def counted_from_start(emitter: Emitter, places: Ref, size: int) -> Ref:
    """Places in [-size, size), of which -1 is the last, as places in [0, size)."""
    return emitter.op("aten.remainder.Scalar", checked(emitter, places, size, from_end=True), size)


def split_places(
    emitter: Emitter, local: LocalCall, source: Ref, outside: Callable[[int], int]
) -> tuple[list[Ref | None], list[Ref], list[int]]:
    """The indices relative to this rank's first element, with `outside(size)` for other ranks' places; where those
    are, one mask for each split dim; and the split dims."""
    indices: list[Ref | None] = list(local.args[1])
    shape = emitter.meta(source).shape
    masks, dims = [], []
    for d, index in enumerate(indices):
        if index is not None and f"{PLACE}{d}" in local.splits:
            row, other = held(emitter, local, counted_from_start(emitter, index, local.call.inputs[0].shape[d]), d)
            indices[d] = emitter.op("aten.masked_fill.Scalar", row, other, outside(shape[d]))
            masks.append(other)
            dims.append(d)
    return indices, masks, dims


def index_selected(call: Call) -> OpRule:
    """index_select."""
    names, dim = dims_of(call, call.inputs[0])
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
    ) if names else unsplit(call)  # fmt: skip


def gather(emitter: Emitter, local: LocalCall) -> Results:
    """gather along a split dim."""
    source, dim, places, *rest = local.args
    dim %= len(emitter.meta(source).shape)
    row, other = held(emitter, local, checked(emitter, places, local.call.inputs[0].shape[dim]), dim)
    elements = local.result(emitter, source, dim, emitter.op("aten.masked_fill.Scalar", row, other, 0), *rest)
    return (emitter.op("aten.masked_fill.Scalar", elements, other, 0),)


def indexed(call: Call) -> OpRule | None:
    """index with tensors of integers."""
    addressed = indices_of(call)
    if addressed is None:
        return None
    places, adjacent, index_rank = addressed
    rank = len(call.inputs[0].shape)
    index = [f"i{k}" for k in range(index_rank)]
    names = place_names(rank, places, call.inputs[0].dtype is not torch.bool)
    expands = tuple(f"{PLACE}{d}" for d in places)
    return assemble(
        call, [names, *(index[index_rank - len(meta.shape) :] for meta in call.inputs[1:])],
        [result_dims(rank, places, adjacent, index)], linear=FIRST, expands=expands, uneven=expands,
    )  # fmt: skip


def index(emitter: Emitter, local: LocalCall) -> Results:
    """index in split dims: elements that any of the indices puts on another rank are zero here."""
    source, addressed = local.args[0], indices_of(local.call)
    assert addressed is not None
    places, adjacent, _ = addressed
    indices, masks, _ = split_places(emitter, local, source, lambda size: 0)
    elements = local.result(emitter, source, tuple(indices))
    rank = len(emitter.meta(source).shape)
    behind = rank - 1 - places[-1] if adjacent else rank - len(places)
    for mask in masks:
        shape = (*emitter.meta(mask).shape, *(1,) * behind)
        elements = emitter.op("aten.masked_fill.Scalar", elements, emitter.op("aten.reshape.default", mask, shape), 0)
    return (elements,)


def scattered(adds: bool | Callable[[Call], bool], linear: Linear = ()) -> Rule:
    """scatter and the like; one that `adds` may split the values that it adds."""

    def rule(call: Call) -> OpRule:
        names, dim = common_dims(call)
        if not names:
            return unsplit(call)
        may_split = adds(call) if callable(adds) else adds
        target, other = with_dim(names, dim, PLACE), with_dim(names, dim, "i" if may_split else None)
        return assemble(
            call, [target, *([other] * (len(call.inputs) - 1))], [target], linear=linear,
            expands=(PLACE, "i"), uneven=(PLACE, "i"),
        )  # fmt: skip

    return rule


def index_written(adds: bool, linear: Linear = ()) -> Rule:
    """index_add, index_copy, index_fill: a vector of places, and a slice for each (or one number for all)."""

    def rule(call: Call) -> OpRule:
        names, dim = dims_of(call, call.inputs[0])
        if not names:
            return unsplit(call)
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
            count = local.call.inputs[0].shape[d]
            places = counted_from_start(emitter, places, count) if from_end else checked(emitter, places, count)
            row, other = held(emitter, local, places, d)
            places = emitter.op("aten.masked_fill.Scalar", row, other, emitter.meta(target).shape[d])
        written = local.result(emitter, _longer(emitter, target, dims), dim, places, *rest, **dict(local.kwargs))
        return (_cut(emitter, written, target, dims),)

    return expand


def index_put(call: Call) -> OpRule | None:
    """index_put, whose values have the dims that index would give (some may be missing or 1). Only what
    accumulates may split the indices: else the last of two values for one place wins."""
    addressed = indices_of(call)
    if addressed is None:
        return None
    places, adjacent, index_rank = addressed
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
    """The tensor that values are added to: kept by the first of the ranks that split the values, zero on the others."""
    for name, axes in local.splits.items():
        for axis in axes if name.startswith(prefix) else ():
            number = emitter.op("aten.full.default", (), emitter.coordinate(axis), dtype=torch.int64)
            value = emitter.op("aten.masked_fill.Scalar", value, emitter.op("aten.ne.Scalar", number, 0), 0)
    return value


def _longer(emitter: Emitter, value: Ref, dims: Sequence[int]) -> Ref:
    """The value with one more element at the end of some dims, which takes what belongs to other ranks."""
    rank = len(emitter.meta(value).shape)
    pad = [int(rank - 1 - i // 2 in dims and i % 2 == 1) for i in range(2 * rank)]
    return emitter.op("aten.constant_pad_nd.default", value, tuple(pad), 0) if dims else value


def _cut(emitter: Emitter, value: Ref, like: Ref, dims: Sequence[int]) -> Ref:
    for dim in dims:
        value = emitter.op("aten.slice.Tensor", value, dim, 0, emitter.meta(like).shape[dim])
    return value
