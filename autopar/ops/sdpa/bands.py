"""Causal attention whose queries begin at another place than its keys, by kernels that know a triangle alone.

Query i sees the keys up to i + offset: a band of keys that all queries see, and behind it a triangle.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from autopar.ir.program import RankIndex

from .call import Attending, Kernel, Pair, Triple, gradients, results, wide


class Band(NamedTuple):
    """Queries `first` and later see the keys from `start` to `end`: all of them, or those of a `triangle`."""

    first: int
    start: int
    end: int
    triangle: bool


def bands(queries: int, keys: int, offset: int) -> tuple[Band, ...]:
    """What causal queries see that begin `offset` places behind the keys: nothing, one band, or two."""
    if offset >= keys - 1:
        return (Band(0, 0, keys, False),)
    whole, end = max(0, offset), min(keys, queries + offset)
    made = (Band(0, 0, whole, False), Band(max(0, -offset), whole, end, True))
    return tuple(band for band in made if band.start < band.end)


def offsets_of(offset: int | RankIndex) -> tuple[int, ...]:
    """The places that ranks begin at."""
    return offset.values if isinstance(offset, RankIndex) else (offset,)


def seen(queries: int, keys: int, offset: int) -> float:
    """The part of [queries, keys] that causal queries see."""
    pairs = 0.0
    for first, start, end, triangle in bands(queries, keys, offset):
        rows, columns = queries - first, end - start
        hidden = columns * (columns - 1) / 2 if triangle else 0.0
        pairs += rows * columns - hidden
    return pairs / (queries * keys)


def joined(one: Pair, other: Pair) -> Pair:
    """Outputs and logsumexps of attention to two sets of keys: those of both, in the logsumexp's dtype. The logsumexp
    of no key is -inf."""
    both = torch.logaddexp(one[1], other[1])
    weight = torch.exp(other[1] - both.masked_fill(both == -math.inf, 0.0)).unsqueeze(-1)
    return torch.lerp(one[0].to(weight.dtype), other[0].to(weight.dtype), weight), both


KernelOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attending], Kernel]


def forward(
    kernel_of: KernelOf, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending, offset: int
) -> Pair:
    """Output and logsumexp; of queries that come before all keys, 0 and -inf."""
    out, sums = results(query, value)
    made: Pair | None = None
    for band in bands(query.shape[-2], key.shape[-2], offset):
        parts, part_call = _part(band, query, key, value, call)
        of_band = kernel_of(*parts, part_call).forward(*parts, part_call)
        made = of_band if made is None else joined(made, of_band)
    seeing = made[0].shape[-2] if made is not None else 0
    out[..., : query.shape[-2] - seeing, :].zero_()
    sums[..., : query.shape[-2] - seeing].fill_(-math.inf)
    if made is not None:
        out[..., -seeing:, :].copy_(made[0])
        sums[..., -seeing:].copy_(made[1])
    return out, sums


def backward(
    kernel_of: KernelOf,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
    offset: int,
) -> Triple:
    """The gradients of query, key and value: a sum over bands of the first, side by side of the others."""
    of_query, of_key, of_value = gradients(query, key, value)
    total = torch.zeros_like(of_query, dtype=wide(query.dtype))
    of_key.zero_()
    of_value.zero_()
    for band in bands(query.shape[-2], key.shape[-2], offset):
        parts, part_call = _part(band, query, key, value, call)
        kernel = kernel_of(*parts, part_call)
        rows = slice(band.first, None)
        given = gradient[..., rows, :], *parts, out[..., rows, :], logsumexp[..., rows].contiguous()
        made = kernel.backward(*given, part_call)
        total[..., rows, :].add_(made[0])
        for whole, of_band in zip((of_key, of_value), made[1:], strict=True):
            whole[..., band.start : band.end, :].copy_(of_band)
        del made, of_band  # lest they are there beside those of the next band
    of_query.copy_(total)
    return of_query, of_key, of_value


def _part(
    band: Band, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending
) -> tuple[Triple, Attending]:
    """The operands of a band, and the call with the masks of it."""
    columns = slice(band.start, band.end)

    def cut(mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None:
            return None
        mask = mask[..., band.first :, :] if mask.shape[-2] == query.shape[-2] else mask
        return mask[..., columns] if mask.shape[-1] == key.shape[-2] else mask

    operands = query[..., band.first :, :], key[..., columns, :], value[..., columns, :]
    return operands, replace(call, mask=cut(call.mask), kept=cut(call.kept), causal=band.triangle)
