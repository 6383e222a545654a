"""Rules of views, and of ops that join tensors: their dims are parts, runs or repeats of each other.

Where a part is split with the tensor that it is from, its offset and its length are multiples of the factor's size.
"""

import math
from collections.abc import Callable, Iterable

from .families import DIMS, FIRST, Rule
from .lookup import dims_of, with_dim
from .rule import Call, OpRule
from .template import Name, Named, assemble


def window(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """A slice's start and end within [0, size]."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def pieces(sizes_of: Callable[[Call], Iterable[int]]) -> Rule:
    """split: the pieces along `dim`."""

    def rule(call: Call) -> OpRule:
        (source,) = call.inputs
        names, dim = dims_of(call, source)
        sizes = {DIMS[dim]: math.gcd(source.shape[dim], *sizes_of(call))}
        return assemble(
            call, [names], [names if m else () for m in call.outputs], linear=FIRST, sizes=sizes, moves_nothing=True
        )

    return rule


def split_sizes(call: Call) -> tuple[int, ...]:
    """Lengths of the pieces of split.Tensor (one of them; the last may be shorter) or split_with_sizes."""
    value = call.argument("split_size" if call.has("split_size") else "split_sizes")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def joined(call: Call) -> OpRule:
    """cat."""
    rank = max(len(meta.shape) for meta in call.inputs)
    dim = call.argument("dim") % rank
    lengths = [meta.shape[dim] for meta in call.inputs if len(meta.shape) == rank]
    names = DIMS[:rank]
    # a one-dimensional empty tensor may be joined to anything
    inputs: list[Named] = [names if len(meta.shape) == rank else (None,) for meta in call.inputs]
    return assemble(call, inputs, [names], linear=(tuple(range(len(inputs))),), sizes={DIMS[dim]: math.gcd(*lengths)})


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
    return assemble(call, [names], outputs, linear=FIRST, moves_nothing=True)


def expanded(call: Call) -> OpRule:
    """expand: a dim of size 1 becomes any size; each rank produces its part."""
    names = DIMS[: len(call.output.shape)]
    source = names[len(names) - len(call.inputs[0].shape) :]
    return assemble(call, [source], [names], linear=FIRST, moves_nothing=True)


def repeated(call: Call) -> OpRule:
    """repeat: index i of the result is index i mod size of the operand."""
    names = DIMS[: len(call.output.shape)]
    source = names[len(names) - len(call.inputs[0].shape) :]
    sizes = {name: size for name, size in zip(source, call.inputs[0].shape, strict=True) if size != 1}
    return assemble(call, [source], [names], linear=FIRST, sizes=sizes)


def permuted(call: Call) -> OpRule:
    """permute."""
    names = DIMS[: len(call.inputs[0].shape)]
    order = call.argument("dims")
    return assemble(call, [names], [[names[d] for d in order]], linear=FIRST, moves_nothing=True)


def unfolded(call: Call) -> OpRule:
    """unfold: overlapping windows along a dim, which is unsplit, as is the new last dim of their elements."""
    names = DIMS[: len(call.inputs[0].shape)]
    dim = call.argument("dimension") % len(names)
    return assemble(call, [with_dim(names, dim, None)], [[*with_dim(names, dim, None), None]], linear=FIRST)


def unfold_backward(call: Call) -> OpRule:
    """unfold_backward."""
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
