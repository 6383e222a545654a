"""Outputs of pointwise operators, known from their operands without running them."""

from functools import cache, lru_cache
from typing import Any

import torch

from autopar.compat.tensors import contiguous_strides

from .emitter import QUICK, on_any, types_of
from .graph import TensorMeta, overload


def _shape_of_all(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[int, ...] | None:
    """The shape of all operands of a pointwise operator, but for scalars, where they are contiguous: what it makes lies
    as they do, and has a dtype that does not depend on the shape. None of others. torch infers these in Python."""
    if not is_pointwise(op) or any(isinstance(value, _OTHERWISE) for value in (*args, *(v for _, v in kwargs))):
        return None
    operands = [x for x in args if isinstance(x, (TensorMeta, torch.Tensor)) and len(x.shape)]
    shapes = {tuple(x.shape) for x in operands}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    strides = contiguous_strides(shape)
    return shape if all(isinstance(x, TensorMeta) or x.stride() == strides for x in operands) else None


_OTHERWISE = tuple, list, torch.device, torch.memory_format
"""Types of arguments that may hold tensors, or say how results lie."""


@cache
def is_pointwise(op: str) -> bool:
    """Whether torch says that each element of the result is computed from one of each operand."""
    return op.startswith("aten.") and torch.Tag.pointwise in overload(op).tags  # type: ignore[attr-defined]


def _short(argument: Any) -> Any:
    """An argument with a short operand in the place of any that is no scalar."""
    if not isinstance(argument, (TensorMeta, torch.Tensor)):
        return argument
    return TensorMeta((2,) if len(argument.shape) else (), argument.dtype)


@lru_cache(maxsize=1 << 16)
def _dtype_of(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], types: Any) -> torch.dtype | None:
    """What a pointwise operator makes of short operands; None where that is not one tensor like them."""
    outputs = on_any(op, args, kwargs)
    return outputs[0].dtype if len(outputs) == 1 and outputs[0] is not None and outputs[0].shape == (2,) else None


def _known(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[torch.Tensor] | None:
    shape = _shape_of_all(op, args, kwargs)
    if shape is None:
        return None
    alike = tuple(map(_short, args))
    dtype = _dtype_of(op, alike, kwargs, types_of((alike, kwargs)))
    return None if dtype is None else (torch.empty(shape, dtype=dtype, device="meta"),)


QUICK.append(_known)
