"""Travel: what travels between ranks in another dtype than that in which it is made and read.

Gradients of parameters are cast once, before their reduction. Parameters are made narrow before each collective, and
wide after it, so that copies between two of them are of what is wide (`codegen.precision`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autopar.cost.redistribute import Acquired, RouteStep
from autopar.ir.graph import CAST, TensorMeta
from autopar.ir.layout import local_meta
from autopar.ir.program import COLLECTIVES
from autopar.ops.float8 import FROM, INSIDE, TO

from .items import COMPUTE, Item, cast_seconds
from .space import Space
from .tensors import MovedKind


def casting(dtype: torch.dtype) -> tuple[str, str]:
    """What makes a tensor so narrow, and what makes it wide again."""
    return (TO, FROM) if dtype == torch.float8_e4m3fn else (CAST, CAST)


def is_narrower(dtype: torch.dtype | None, meta: TensorMeta) -> bool:
    """Whether a parameter is less wide where it travels in a dtype. In float8, biases and the weights of norms, which
    are few bytes, travel as they are."""
    if dtype is None or not meta.dtype.is_floating_point or dtype.itemsize >= meta.dtype.itemsize:
        return False
    return dtype.itemsize > 1 or len(meta.shape) > 1


def items_of(space: Space, moved: MovedKind, phases: Sequence[Sequence[tuple[Acquired, int]]]) -> Iterator[Item]:
    """The items of making what travels, and what is read, of a tensor that travels in another dtype."""
    acquired = [each for phase in phases for each in phase if each[0].route.steps]
    if moved.cast_from is not None and moved.is_gradient:
        steps = [item.route.steps[0] for item, _ in acquired]
        layouts = dict.fromkeys(step.before for step in steps if step.kind in COLLECTIVES)
        local = [[local_meta(meta, layout, space.mesh) for meta in (moved.computed, moved.meta)] for layout in layouts]
        yield Item(COMPUTE, sum(cast_seconds(space, *metas) for metas in local))
    elif moved.cast_from is not None:
        for item, times in acquired:
            yield Item(COMPUTE, sum(_seconds(space, moved, step) for step in item.route.steps), times=times)


def _seconds(space: Space, moved: MovedKind, step: RouteStep) -> float:
    """Of a step of a parameter: around a collective, and of copies, as far as they are wider than what travels."""
    device, wide, narrow = space.cluster.device, moved.computed.dtype, moved.meta.dtype
    seconds = device.moving_seconds(step.copies.bytes * (wide.itemsize / narrow.itemsize - 1))
    if step.kind in COLLECTIVES:
        there = step.bytes // narrow.itemsize
        here = there // (space.mesh[step.axis] if step.kind == "all_gather" else 1)
        for op, size, *dtypes in zip(casting(narrow), (here, there), (wide, narrow), (narrow, wide), strict=True):
            given, made = (TensorMeta((size,), dtype) for dtype in dtypes)
            inside = INSIDE.get(op, 0.0) * size * wide.itemsize
            seconds += device.operator_seconds(op, [given], [made], 0.0, inside)
    return seconds
