"""Rules of ops along a dim: they mix elements of it, halve it, or compute something of each index of it."""

from collections.abc import Callable

from .families import DIMS, FIRST, axes
from .rule import Call, OpRule
from .template import Dim, assemble


def halves(call: Call) -> OpRule:
    """glu and its backward: the two halves of `dim` are split together."""
    source = call.inputs[-1]
    rank = len(source.shape)
    dim = call.argument("dim") % rank
    names = DIMS[:rank]
    return assemble(
        call, [names] * len(call.inputs), [names], {names[dim]: Dim(size=source.shape[dim] // 2)},
        linear=FIRST if len(call.inputs) > 1 else (),
    )  # fmt: skip


def in_argument(name: str) -> Callable[[Call, int], tuple[int, ...]]:
    """The dims in an argument."""
    return lambda call, rank: axes(call, name, rank)


def all_but_dim(call: Call, rank: int) -> tuple[int, ...]:
    """The dims that the argument `dim` does not name."""
    return tuple(d for d in range(rank) if d != call.argument("dim") % rank)


def padded(call: Call, rank: int) -> tuple[int, ...]:
    """The dims that `constant_pad_nd` makes longer (or shorter)."""
    pad = call.argument("pad")
    return tuple(rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1])
