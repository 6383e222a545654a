"""Rules of ops along a dim: they mix elements of it, halve it, or compute something of each index of it."""

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


def weight_normalized(call: Call) -> OpRule:
    """_weight_norm_interface and its backward: `dim` has a norm each, over all others."""
    rank = max(len(meta.shape) for meta in call.inputs)
    dim = call.argument("dim") % rank
    names = [DIMS[d] if d == dim else None for d in range(rank)]
    backward = call.has("grad_w")
    return assemble(
        call, [names] * len(call.inputs), [names if m else () for m in call.outputs], linear=FIRST if backward else ()
    )


def transformed(call: Call) -> OpRule:
    """Fourier transforms, of the dims in `dim`; a real side may have another number of frequencies than the complex
    one has."""
    rank = len(call.inputs[0].shape)
    mixed = axes(call, "dim", rank)
    names = [None if d in mixed else DIMS[d] for d in range(rank)]
    return assemble(call, [names], [names], linear=FIRST)


def the_dims(call: Call, rank: int) -> tuple[int, ...]:
    """The dims in the argument `dims`."""
    return axes(call, "dims", rank)


def padded(call: Call, rank: int) -> tuple[int, ...]:
    """The dims that `constant_pad_nd` makes longer (or shorter)."""
    pad = call.argument("pad")
    return tuple(rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1])
