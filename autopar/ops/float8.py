"""Weights in float8 while they travel: a byte for each element, and one for the scale of each block of them.

Numbers are those of `torch.float8_e4m3fn`: with three bits behind the point, each is off by 2^-4 of itself at most, and
one that is small in its block by 2^-17 of the block's largest. Scales are powers of two, as in the OCP's microscaling
formats (MX, section 5), so that scaling rounds nothing, and what was narrow once is the same when it is narrow again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import CAST
from autopar.ir.own import define

from .rule import Call, OpRule
from .template import unsplit

TO, FROM = "autopar.to_float8.default", "autopar.from_float8.default"
CASTS = frozenset({CAST, TO, FROM})
"""Operators that make a tensor narrower or wider."""

INSIDE: Mapping[str, float] = {TO: 5.0, FROM: 2.0}
"""How often what is wide is read or written beside being the operand or the result: absolute values and what is scaled
stand in memory."""

BLOCK = 128
"""Elements that share a scale: consecutive ones of what a rank sends."""

NONE, BIAS, HIGHEST = 255, 127, 8
"""The exponent of a block with a NaN or an infinity, that of a scale of 1, and that of float8's largest number."""


def packed_bytes(elements: int, parts: int = 1) -> int:
    """Of elements in so many equal parts, with their scales."""
    size = elements // parts
    return parts * (size + -(-size // BLOCK))


def to_float8(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Each of so many equal parts of x in one row of bytes, its elements before the exponents of their scales.

    x: [d, ...], contiguous -> [`packed_bytes`].
    """
    rows = (x.float() if x.dtype == torch.float16 else x).reshape(parts, -1)  # which has no room for all scales
    size = rows.shape[1]
    whole = torch.nn.functional.pad(rows, (0, -size % BLOCK)) if size % BLOCK else rows
    blocks = whole.view(parts, -1, BLOCK)
    largest = blocks.abs().amax(-1).float()
    exponents = (torch.frexp(largest).exponent + (BIAS - HIGHEST)).clamp(1, NONE - 1)
    exponents = exponents.masked_fill(~largest.isfinite(), NONE)
    scales = _power(2 * BIAS - exponents.clamp(max=2 * BIAS - 1)).to(rows.dtype)
    values = (blocks * scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(parts, -1)[:, :size]
    return torch.cat([values, exponents.to(torch.uint8)], 1).flatten()


def from_float8(packed: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, parts: int) -> torch.Tensor:
    """What parts of a tensor of this shape became.

    packed: [`packed_bytes`] -> shape.
    """
    rows = packed.reshape(parts, -1)
    size = torch.Size(shape).numel() // parts
    wide = _numbers(rows[:, :size], torch.float32 if dtype == torch.float16 else dtype)
    scales = _power(rows[:, size:].int()).to(wide.dtype)
    if size % BLOCK:
        wide *= scales.repeat_interleave(BLOCK, 1)[:, :size]
    else:
        wide.view(parts, -1, BLOCK).mul_(scales[..., None])
    return wide.to(dtype).view(tuple(shape))


def _numbers(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What bytes mean. On a CPU, to look them up takes a quarter of the time of torch's cast."""
    if not values.is_cpu:
        return values.view(torch.float8_e4m3fn).to(dtype)
    table = torch.arange(NONE + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    return table.index_select(0, values.int().flatten()).view(values.shape)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to each exponent less the bias: its bits are those of a float32."""
    return (exponents.int() << 23).view(torch.float32)


OPERATORS: Mapping[Callable[..., Any], str] = {
    to_float8: "(Tensor x, int parts) -> Tensor",
    from_float8: "(Tensor packed, int[] shape, ScalarType dtype, int parts) -> Tensor",
}

define(OPERATORS)


def passes(call: Call) -> OpRule:
    """The rule, with what is read and written inside."""
    wide = max(meta.bytes for meta in (*call.inputs, call.output) if meta is not None)
    return replace(unsplit(call), inside_bytes=INSIDE[call.node.op] * wide)
