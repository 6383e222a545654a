"""Causal attention whose queries begin at another place than its keys, by kernels that know a triangle alone.

Query i sees the keys up to i + offset: a band of keys that all queries see, and behind it a triangle.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from autopar.ir.program import RankIndex

from .call import Attending, Band, Kernel, Pair, Triple, gradients, results, wide
from .documents import masked_bands


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
    for first, start, end, triangle, _ in bands(queries, keys, offset):
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
    """Output and logsumexp; 0 and -inf of queries that come before all keys, or are of no document."""
    out, sums = results(query, value)
    out.zero_()
    sums.fill_(-math.inf)
    joins = False
    for rows, _, operands, of_band in _parts(query, key, value, call, offset):
        made = kernel_of(*operands, of_band).forward(*operands, of_band)
        if call.documents and of_band.mask is not None:
            made[1].masked_fill_(of_band.mask.amax(-1) == -math.inf, -math.inf)
        elif joins:
            made = joined((out[..., rows, :], sums[..., rows]), made)
        out[..., rows, :], sums[..., rows] = made
        joins = True
        del made, of_band  # lest they are there beside those of the next band
    return out, sums


def backward(
    kernel_of: KernelOf,
    gradient: torch.Tensor,
    operands: Triple,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
    offset: int,
) -> Triple:
    """The gradients of query, key and value: sums over bands."""
    of_all = gradients(*operands)
    exact = wide(operands[0].dtype)
    dtypes = exact, *[exact if call.documents else operands[1].dtype] * 2  # what is added to once needs no more
    totals = [x.zero_().to(dtype) for x, dtype in zip(of_all, dtypes, strict=True)]
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    for rows, columns, cut_up, of_band in _parts(*operands, call, offset):
        given = gradient[..., rows, :], *cut_up, out[..., rows, :], logsumexp[..., rows].contiguous()
        made = kernel_of(*cut_up, of_band).backward(*given, of_band)
        for total, cut, part in zip(totals, (rows, columns, columns), made, strict=True):
            total[..., cut, :] += part
        del made, part, of_band
    of_query, of_key, of_value = (whole.copy_(total) for whole, total in zip(of_all, totals, strict=True))
    return of_query, of_key, of_value


def _parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending, offset: int
) -> Iterator[tuple[slice, slice, Triple, Attending]]:
    """Queries, keys, operands and the call of each band."""
    sizes = query.shape[-2], key.shape[-2]
    plain = ((band, None) for band in bands(*sizes, offset))
    for band, hiding in masked_bands(query, key, call, offset) if call.documents else plain:
        rows, columns = slice(band.first, band.last), slice(band.start, band.end)
        mask, kept = (_cut(x, sizes, rows, columns) for x in (call.mask, call.kept))
        if hiding is not None:
            mask = hiding if mask is None else hiding + mask
        of_band = replace(call, mask=mask, kept=kept, causal=band.triangle, documents=None)
        del hiding, mask
        yield rows, columns, (query[..., rows, :], key[..., columns, :], value[..., columns, :]), of_band
        del of_band


def _cut(mask: torch.Tensor | None, sizes: tuple[int, int], rows: slice, columns: slice) -> torch.Tensor | None:
    """Parts of the last two dims where a mask has as many."""
    if mask is None:
        return None
    mask = mask[..., rows, :] if mask.shape[-2] == sizes[0] else mask
    return mask[..., columns] if mask.shape[-1] == sizes[1] else mask
