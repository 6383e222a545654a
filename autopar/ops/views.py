"""Rules of views, and of ops that join tensors: their dims are parts, runs or repeats of each other.

Where a part is split with the tensor that it is from, its offset and its length are multiples of the factor's size.
"""

import math
from dataclasses import replace

from .families import DIMS, FIRST
from .rule import Call, OpRule
from .template import Dim, Named, assemble


def window(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """A slice's start and end within [0, size]."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def joined(call: Call) -> OpRule:
    """cat."""
    rank = max(len(meta.shape) for meta in call.inputs)
    dim = call.argument("dim") % rank
    lengths = [meta.shape[dim] for meta in call.inputs if len(meta.shape) == rank]
    names = DIMS[:rank]
    # a one-dimensional empty tensor may be joined to anything
    inputs: list[Named] = [names if len(meta.shape) == rank else (None,) for meta in call.inputs]
    return assemble(call, inputs, [names], {DIMS[dim]: Dim(size=math.gcd(*lengths))}, (tuple(range(len(inputs))),))


def expanded(call: Call) -> OpRule:
    """expand: a dim of size 1 becomes any size; each rank produces its part."""
    names = DIMS[: len(call.output.shape)]
    source = names[len(names) - len(call.inputs[0].shape) :]
    return replace(assemble(call, [source], [names], linear=FIRST), moves_nothing=True)
