"""What the kernels of attention have in memory beside operands and results."""

import math
from collections.abc import Sequence

import torch

from autopar.ir.graph import TensorMeta

from . import composed, expected_kernel

_ROWS, _WIDTHS = 128, 32
"""Flash attention's backward accumulates the gradient of queries in tiles of this many rows and elements."""


def workspace_bytes(tensors: Sequence[TensorMeta], device_type: str, *, backward: bool) -> int:
    """Of one call, from its local tensor operands in their order."""
    query, key, value = tensors[1:4] if backward else tensors[:3]
    masks = tensors[6 if backward else 3 :]
    dropped = any(mask.dtype == torch.bool for mask in masks)
    batch, heads, queries, width = query.shape
    _, key_heads, keys, value_width = value.shape
    kernel = expected_kernel(
        device_type, query.dtype, (queries, width), (keys, value_width), False, len(masks) > dropped, dropped
    )
    shared = heads != key_heads
    if kernel == "composed":
        scores, widths = (batch, heads, queries, keys), (width, value_width)
        itemsize = query.dtype.itemsize
        return composed.workspace_bytes(scores, key_heads, widths, itemsize, device_type, backward=backward)
    if kernel == "flash on cpu":
        return 0
    expanded = (key.numel + value.numel) // key_heads * heads * query.dtype.itemsize if shared else 0
    bias = sum(mask.numel * query.dtype.itemsize for mask in masks)
    if not backward:
        return bias + (expanded if kernel == "efficient" else 0)
    rows, columns = (math.ceil(size / to) * to for size, to in ((queries, _ROWS), (width, _WIDTHS)))
    accumulated = 4 * batch * heads * rows * (columns + 1)
    return bias + accumulated + expanded * (2 if kernel == "efficient" else 1)
