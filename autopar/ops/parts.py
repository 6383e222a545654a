"""Parts of tensors, and wholes made of parts: their rules, and the local programs of those that split the dim at hand.

Where a part is split with the tensor that it is from, its offset and its length are multiples of the factor's size. A
rank puts values back into its own places alone: it knows which of them a part covers.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from autopar.ir.graph import parameters
from autopar.ir.layout import Shape

from .expansions import LocalCall, Results, global_indices
from .families import BOTH, DIMS, FIRST, Rule
from .local import Arguments, replaced, unchanged
from .lookup import PLACE, PLACED, along_dim, dim_of, dims_of, looked_up, place_of, with_dim
from .rule import Call, OpRule
from .template import Dim, Name, assemble, unsplit
from .traced import trace
from .windows import in_window


def pieces(sizes_of: Callable[[Call], Iterable[int]]) -> Rule:
    """split: the pieces along `dim`."""

    def pieces_of(call: Call) -> OpRule:
        (source,) = call.inputs
        names, dim = dims_of(call, source)
        cut = Dim(size=math.gcd(source.shape[dim], *sizes_of(call)))
        rule = assemble(call, [names], [names if m else () for m in call.outputs], {DIMS[dim]: cut}, FIRST)
        return replace(rule, moves_nothing=True)

    return pieces_of


def split_sizes(call: Call) -> tuple[int, ...]:
    """Lengths of the pieces of split.Tensor (one of them; the last may be shorter) or split_with_sizes."""
    value = call.argument("split_size" if call.has("split_size") else "split_sizes")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def stacked(call: Call) -> OpRule:
    """stack: a new dim, unsplit."""
    rank = len(call.inputs[0].shape)
    dim = call.argument("dim") % (rank + 1)
    names = DIMS[:rank]
    return assemble(
        call, [names] * len(call.inputs), [(*names[:dim], None, *names[dim:])],
        linear=(tuple(range(len(call.inputs))),),
    )  # fmt: skip


def taken(call: Call) -> OpRule:
    """unbind: `dim` is unsplit, and gone."""
    names: list[Name] = list(DIMS[: len(call.inputs[0].shape)])
    dim = call.argument("dim") % len(names)
    rest = names[:dim] + names[dim + 1 :]
    names[dim] = None
    outputs = [rest if meta else () for meta in call.outputs]
    return replace(assemble(call, [names], outputs, linear=FIRST), moves_nothing=True)


def repeated(call: Call) -> OpRule:
    """repeat: index i of the result is index i mod size of the operand."""
    names = DIMS[: len(call.output.shape)]
    source = names[len(names) - len(call.inputs[0].shape) :]
    dims = {name: Dim(size=size) for name, size in zip(source, call.inputs[0].shape, strict=True) if size != 1}
    return assemble(call, [source], [names], dims, FIRST)


def permuted(call: Call) -> OpRule:
    """permute."""
    names = DIMS[: len(call.inputs[0].shape)]
    order = call.argument("dims")
    return replace(assemble(call, [names], [[names[d] for d in order]], linear=FIRST), moves_nothing=True)


def unfolded(call: Call) -> OpRule:
    """unfold: overlapping windows along a dim, which is unsplit, as is the new last dim of their elements."""
    if not call.inputs[0].shape:
        return unsplit(call)
    names = DIMS[: len(call.inputs[0].shape)]
    dim = call.argument("dimension") % len(names)
    return assemble(call, [with_dim(names, dim, None)], [[*with_dim(names, dim, None), None]], linear=FIRST)


def unfold_backward(call: Call) -> OpRule:
    """unfold_backward."""
    if not call.argument("input_sizes"):
        return unsplit(call)
    names = DIMS[: len(call.argument("input_sizes"))]
    dim = call.argument("dim") % len(names)
    return assemble(call, [[*with_dim(names, dim, None), None]], [with_dim(names, dim, None)], linear=FIRST)


def _diagonal(call: Call, rank: int) -> tuple[list[str | None], list[str | None]]:
    """Names of a tensor's dims and of its diagonal's, which come last."""
    dims = {call.argument("dim1") % rank, call.argument("dim2") % rank}
    names = [None if d in dims else name for d, name in enumerate(DIMS[:rank])]
    return names, [*(name for name in names if name), None]


def diagonal(call: Call) -> OpRule:
    """diagonal: two dims, which are unsplit, become one."""
    names, kept = _diagonal(call, len(call.inputs[0].shape))
    return assemble(call, [names], [kept], linear=FIRST)


def diagonal_backward(call: Call) -> OpRule:
    """diagonal_backward."""
    names, kept = _diagonal(call, len(call.argument("input_sizes")))
    return assemble(call, [kept], [names], linear=FIRST)


def selected(call: Call) -> OpRule:
    """select."""
    names, dim = dims_of(call, call.inputs[0])
    source = with_dim(names, dim, place_of(call.inputs[0]))
    return replace(assemble(call, [source], [with_dim(names, dim)], PLACED, FIRST), moves_nothing=True)


def select(local: LocalCall) -> Results:
    """select of one place."""
    shape = local.call.inputs[0].shape
    dim = dim_of(local.call, len(shape))
    place = filled(local, (1,), local.call.argument("index") % shape[dim])
    return looked_up(local, local.args[0], dim, place).squeeze(dim)


def put_back(call: Call) -> OpRule:
    """select_backward."""
    names, dim = dims_of(call, call.output)
    return assemble(call, [with_dim(names, dim)], [with_dim(names, dim, PLACE)], PLACED, FIRST)


def select_backward(local: LocalCall) -> Results:
    """select_backward into a split dim."""
    shape = local.call.output.shape
    dim = dim_of(local.call, len(shape))
    other = _other_places(local, shape, dim)
    spread: Tensor = local.args[0].unsqueeze(dim).expand(local.outputs[0])
    return spread.masked_fill(other, 0)


def select_scattered(call: Call) -> OpRule:
    """select_scatter: `src` replaces one place of `dim`."""
    names, dim = dims_of(call, call.inputs[0])
    target = with_dim(names, dim, PLACE)
    return assemble(call, [target, with_dim(names, dim)], [target], PLACED, BOTH)


def select_scatter(local: LocalCall) -> Results:
    """select_scatter into a split dim."""
    shape = local.call.inputs[0].shape
    dim = dim_of(local.call, len(shape))
    other = _other_places(local, shape, dim)
    return torch.where(other, local.args[0], local.args[1].unsqueeze(dim))


def _other_places(local: LocalCall, shape: tuple[int, ...], dim: int) -> Tensor:
    """Which of this rank's places are not the one in the argument `index`."""
    other = global_indices(local, shape, local.results[0], dim) != local.call.argument("index") % shape[dim]
    return along_dim(other, len(shape), dim)


def slice_scatter(local: LocalCall) -> Results:
    """slice_scatter into a split dim."""
    values, outside = in_window(local, local.args[1])
    return torch.where(outside, local.args[0], values)


def piece_sizes(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """split: lengths shrink as the operand does."""
    dim = call.argument("dim") % len(local_inputs[0])
    whole, here = call.inputs[0].shape[dim], local_inputs[0][dim]
    if whole == here:
        return unchanged(call, local_inputs, local_outputs)
    sizes = tuple(size * here // whole for size in split_sizes(call))
    name = parameters(call.node.op)[1].name
    return replaced(call, **{name: sizes if isinstance(call.argument(name), tuple) else sizes[0]})


def repeats(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """repeat: how often the local operand fits into the local result; an empty one, as often as it was said."""
    assert local_outputs[0] is not None
    source = (1,) * (len(local_outputs[0]) - len(local_inputs[0])) + local_inputs[0]
    sizes = zip(local_outputs[0], source, call.argument("repeats"), strict=True)
    return replaced(call, repeats=tuple(o // s if s else times for o, s, times in sizes))


def slice_of(value: Tensor, dim: int, start: int, end: int) -> Tensor:
    """Rows [start, end) of a dim."""
    return value if (start, end) == (0, value.shape[dim]) else value[(slice(None),) * dim + (slice(start, end),)]


def contiguous_pairs(x: Tensor) -> Tensor:
    """The tensor, contiguous, and beginning at an even element of its memory."""
    return x.contiguous() if x.storage_offset() % 2 == 0 else x.clone(memory_format=torch.contiguous_format)


def filled(local: LocalCall, shape: Shape, value: int) -> Tensor:
    """int64 of one value, which may differ by rank."""
    numbers: Tensor = trace(local.emitter, "aten.full", (shape, value), {"dtype": torch.int64})
    return numbers
