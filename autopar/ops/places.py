"""Places along a split dim: the names of the dims of an indexed tensor, the places that a rank holds, and ops that read
and write elements by their place.

To read, each rank looks up the places that it holds and has zeros for the others; the result is Partial(sum), and
nobody gathers the source. To write, each rank drops the values for other ranks' places. An op that adds at places may
also split the values: every rank adds its part, and one of them the tensor that they are added to.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .bounds import checked
from .expansions import LocalCall, Results
from .families import DIMS, FIRST, Rule
from .lookup import PADDED, PLACE, PLACED, dim_of, dims_of, held, looked_up, place_of, with_dim
from .parts import filled, slice_of
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


def counted_from_start(places: Tensor, size: int) -> Tensor:
    """Places in [-size, size), of which -1 is the last, as places in [0, size)."""
    return checked(places, size, from_end=True) % size


def split_places(
    local: LocalCall, source: Tensor, outside: Callable[[int], int]
) -> tuple[list[Tensor | None], list[Tensor], list[int]]:
    """The indices relative to this rank's first element, with `outside(size)` for other ranks' places; where those
    are, one mask for each split dim; and the split dims."""
    indices: list[Tensor | None] = list(local.args[1])
    masks, dims = [], []
    for d, index in enumerate(indices):
        if index is not None and f"{PLACE}{d}" in local.splits:
            row, other = held(local, counted_from_start(index, local.call.inputs[0].shape[d]), d)
            indices[d] = row.masked_fill(other, outside(source.shape[d]))
            masks.append(other)
            dims.append(d)
    return indices, masks, dims


def index_selected(call: Call) -> OpRule:
    """index_select."""
    names, dim = dims_of(call, call.inputs[0])
    if not names:
        return unsplit(call)
    source, index = with_dim(names, dim, place_of(call.inputs[0])), ["i"] if call.inputs[1].shape else []
    return assemble(call, [source, index], [with_dim(names, dim, "i")], PLACED, FIRST)


def index_select(local: LocalCall) -> Results:
    """index_select along a split dim."""
    source, dim, places = local.args
    dim %= source.ndim
    return looked_up(local, source, dim, checked(places, local.call.inputs[0].shape[dim]).reshape(-1))


def gathered(call: Call) -> OpRule:
    """gather. The other dims move together where they have one size in all operands."""
    names, dim = common_dims(call)
    if not names:
        return unsplit(call)
    source, found = with_dim(names, dim, place_of(call.inputs[0])), with_dim(names, dim, "i")
    return assemble(call, [source, found], [found], PLACED, FIRST)


def gather(local: LocalCall) -> Results:
    """gather along a split dim."""
    source, dim, places, *rest = local.args
    dim %= source.ndim
    row, other = held(local, checked(places, local.call.inputs[0].shape[dim]), dim)
    return local.result(source, dim, row.masked_fill(other, 0), *rest).masked_fill(other, 0)


def indexed(call: Call) -> OpRule | None:
    """index with tensors of integers."""
    addressed = indices_of(call)
    if addressed is None:
        return None
    places, adjacent, index_rank = addressed
    rank = len(call.inputs[0].shape)
    index = [f"i{k}" for k in range(index_rank)]
    names = place_names(rank, places, call.inputs[0].dtype is not torch.bool)
    inputs: list[Named] = [names, *(index[index_rank - len(meta.shape) :] for meta in call.inputs[1:])]
    dims = {f"{PLACE}{d}": PADDED for d in places}
    return assemble(call, inputs, [result_dims(rank, places, adjacent, index)], dims, FIRST)


def index(local: LocalCall) -> Results:
    """index in split dims: elements that any of the indices puts on another rank are zero here."""
    source, addressed = local.args[0], indices_of(local.call)
    assert addressed is not None
    places, adjacent, _ = addressed
    indices, masks, _ = split_places(local, source, lambda size: 0)
    elements = local.result(source, indices)
    behind = source.ndim - 1 - places[-1] if adjacent else source.ndim - len(places)
    for mask in masks:
        elements = elements.masked_fill(mask.reshape(*mask.shape, *(1,) * behind), 0)
    return elements


_WRITTEN = {PLACE: PADDED, "i": PADDED}
"""Of places that are written, and of the values that are written there."""


def scattered(adds: bool | Callable[[Call], bool], linear: Linear = ()) -> Rule:
    """scatter and the like; one that `adds` may split the values that it adds."""

    def rule(call: Call) -> OpRule:
        names, dim = common_dims(call)
        if not names:
            return unsplit(call)
        may_split = adds(call) if callable(adds) else adds
        target, other = with_dim(names, dim, PLACE), with_dim(names, dim, "i" if may_split else None)
        return assemble(call, [target, *([other] * (len(call.inputs) - 1))], [target], _WRITTEN, linear)

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
        return assemble(call, inputs, [with_dim(names, dim, PLACE)], _WRITTEN, linear)

    return rule


def write(local: LocalCall, *, from_end: bool = False) -> Results:
    """scatter, index_add and the like along a split dim, or of a split source: (self, dim, index, ...). Places may
    count `from_end`."""
    target, dim, places, *rest = local.args
    target = _once(local, target, "i")
    dims = [dim % target.ndim] if PLACE in local.splits else []
    for d in dims:
        count = local.call.inputs[0].shape[d]
        places = counted_from_start(places, count) if from_end else checked(places, count)
        row, other = held(local, places, d)
        places = row.masked_fill(other, target.shape[d])
    written = local.result(_longer(target, dims), dim, places, *rest, **dict(local.kwargs))
    return _cut(written, target, dims)


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
    dims = dict.fromkeys([*(f"{PLACE}{d}" for d in places), *(i for i in index if i)], PADDED)
    inputs: list[Named] = [names, *(index[index_rank - len(m.shape) :] for m in call.inputs[1:-1])]
    inputs.append(value[len(value) - len(values.shape) :])
    return assemble(call, inputs, [names], dims, ((0, len(call.inputs) - 1),))


def put_at_indices(local: LocalCall) -> Results:
    """index_put in split dims, or of split values."""
    source = _once(local, local.args[0], "i")
    indices, _, dims = split_places(local, source, lambda size: size)
    return _cut(local.result(_longer(source, dims), indices, *local.args[2:]), source, dims)


def _once(local: LocalCall, value: Tensor, prefix: str) -> Tensor:
    """The tensor that values are added to: kept by the first of the ranks that split the values, zero on the others."""
    for name, axes in local.splits.items():
        for axis in axes if name.startswith(prefix) else ():
            value = value.masked_fill(filled(local, (), local.coordinate(axis)) != 0, 0)
    return value


def _longer(value: Tensor, dims: Sequence[int]) -> Tensor:
    """The value with one more element at the end of some dims, which takes what belongs to other ranks."""
    rank = value.ndim
    pad = [int(rank - 1 - i // 2 in dims and i % 2 == 1) for i in range(2 * rank)]
    return torch.constant_pad_nd(value, pad, 0) if dims else value


def _cut(value: Tensor, like: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        value = slice_of(value, dim, 0, like.shape[dim])
    return value
