"""What the kernels of attention have in memory beside operands and results."""

from collections.abc import Sequence

import torch

from autopar.ir.graph import TensorMeta
from autopar.ir.program import RankIndex

from . import composed, documents, expected_kernel
from .bands import bands, offsets_of
from .call import wide
from .fused import ALIGNED, ALIGNED_BIAS, ALIGNED_SUMS, round_up

_ROWS, _WIDTHS = 128, 32
"""Flash attention's backward accumulates the gradient of queries in tiles of this many rows and elements."""


def workspace_bytes(
    tensors: Sequence[TensorMeta],
    device_type: str,
    *,
    backward: bool,
    causal: bool = False,
    offset: int | RankIndex = 0,
) -> int:
    """Of one call, from its local tensor operands in their order."""
    if not (tensors[-1].dtype.is_floating_point or tensors[-1].dtype == torch.bool):
        return _documents_bytes(tensors[:-2], device_type, backward=backward)
    of_kernel = _kernel_bytes(tensors, device_type, backward=backward, causal=causal)
    return of_kernel + (_bands_bytes(tensors, offsets_of(offset), backward=backward) if causal else 0)


def _kernel_bytes(tensors: Sequence[TensorMeta], device_type: str, *, backward: bool, causal: bool) -> int:
    query, _, value = tensors[1:4] if backward else tensors[:3]
    masks = tensors[6 if backward else 3 :]
    dropped = any(mask.dtype == torch.bool for mask in masks)
    batch, heads, queries, width = query.shape
    _, key_heads, keys, value_width = value.shape
    kernel = expected_kernel(
        device_type, query.dtype, (queries, width), (keys, value_width), causal, len(masks) > dropped, dropped
    )
    itemsize = query.dtype.itemsize
    if kernel == "composed":
        scores, widths = (batch, heads, queries, keys), (width, value_width)
        return composed.workspace_bytes(scores, key_heads, widths, itemsize, device_type, backward=backward)
    rows, key_rows = batch * heads * queries, batch * key_heads * keys
    if kernel != "efficient":
        wider = max(width, value_width) if device_type == "cpu" else round_up(width, ALIGNED)
        padded = itemsize * _padded((width, value_width), wider, rows, key_rows, backward=backward)
        if kernel == "flash on cpu":
            return padded
        expanded = 2 * batch * heads * keys * wider * itemsize if heads != key_heads else 0
        return padded + (_accumulated(query) + expanded if backward else 0)
    both = width + value_width
    expanded = batch * heads * keys * both * itemsize if heads != key_heads else 0
    bias, passing = _bias_bytes(masks[0], query.dtype, keys) if masks else (0, 0)
    sums = 4 * batch * heads * round_up(queries, ALIGNED_SUMS)
    # a mask's cast is gone before there are results
    if not backward:
        return expanded + bias + max(passing - rows * (value_width * itemsize + 4), sums)
    results = (rows * width + key_rows * both) * itemsize
    return expanded + bias + max(passing - results, sums + _accumulated(query) + expanded)


def _documents_bytes(tensors: Sequence[TensorMeta], device_type: str, *, backward: bool) -> int:
    """Of a call with the numbers of documents, from its other operands, if its queries see all keys: the mask of those
    that are computed at a time, twice for what it is made of, what a kernel has for all of them, and what it makes."""
    given, masks = tensors[: 6 if backward else 3], tensors[6 if backward else 3 :]
    query, key, value = given[1:4] if backward else given
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    rows = documents.rows_at_a_time(batch, queries, keys, device_type)
    kept = [x for x in masks if x.dtype == torch.bool]
    heads = max([1, *(heads for x in masks[: len(masks) - len(kept)] if x.shape[1:2] == (heads,))])
    mask = TensorMeta((batch, heads, rows, keys), query.dtype)
    of_kernel = _kernel_bytes([*given, mask, *kept], device_type, backward=backward, causal=False)
    made = query.bytes // query.shape[3] * (value.shape[3] + 2)
    if backward:  # gradients, and sums of them in float32
        made = (query.bytes + key.bytes + value.bytes) * (3 if query.dtype.itemsize < 4 else 1)
    return 2 * mask.bytes + of_kernel + made


def _bands_bytes(tensors: Sequence[TensorMeta], offsets: Sequence[int], *, backward: bool) -> int:
    """What a causal call that begins at one of these places has beside what its kernels have: results of its bands,
    before they are joined."""
    query, _, value = tensors[1:4] if backward else tensors[:3]
    batch, heads, queries, width = query.shape
    _, key_heads, keys, value_width = value.shape
    several = max((len(bands(queries, keys, offset)) for offset in offsets if offset), default=0)
    rows, key_rows, itemsize = batch * heads * queries, batch * key_heads * keys, query.dtype.itemsize
    exact = wide(query.dtype).itemsize
    if not several:
        return 0
    if backward:
        return rows * width * (exact + itemsize) + key_rows * (width + value_width) * itemsize
    return rows * value_width * (itemsize if several == 1 else 2 * itemsize + 3 * exact)


def _padded(widths: tuple[int, int], wider: int, rows: int, key_rows: int, *, backward: bool) -> int:
    """Elements of what a kernel of one width for all is given and makes beside operands and results: tensors of
    queries' and of keys' rows, as wide as queries or as values."""
    width, value_width = widths
    given = [(rows, width), (key_rows, width), (key_rows, value_width)]
    made = [(rows, value_width)]
    if backward:
        made, given = given, [*given, *made * 2]  # the output and its gradient
    copied = sum(count * wider for count, own in given if own != wider)
    return copied + sum(count * (wider - own) for count, own in made)


def _bias_bytes(mask: TensorMeta, dtype: torch.dtype, keys: int) -> tuple[int, int]:
    """What the kernel reads in a mask's place, and what is there while that is made: the mask in its dtype, which is
    what the kernel reads where it has the rows that it wants."""
    columns, wider = mask.shape[-1], round_up(keys, ALIGNED_BIAS)
    cast = mask.numel * dtype.itemsize if mask.dtype != dtype else 0
    if columns == wider == keys:
        return cast, 0
    return mask.numel // columns * wider * dtype.itemsize, cast


def _accumulated(query: TensorMeta) -> int:
    """The gradient of queries in float32, in tiles, and a sum for each of its rows."""
    batch, heads, queries, width = query.shape
    return 4 * batch * heads * round_up(queries, _ROWS) * (round_up(width, _WIDTHS) + 1)
