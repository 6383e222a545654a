"""What the kernels of attention have in memory beside operands and results."""

import math
from collections.abc import Sequence

import torch

from autopar.ir.graph import TensorMeta

from . import expected_kernel
from .composed import scores_at_once

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
        scores = scores_at_once((batch, heads, queries, keys), key_heads, device_type)
        # forward has the weights; backward theirs, their gradients, and those that dropout keeps
        return scores * max(4, query.dtype.itemsize) * ((2 + dropped) if backward else 1)
    if kernel == "flash on cpu":
        return 0
    expanded = (key.numel + value.numel) // key_heads * heads * query.dtype.itemsize if shared else 0
    bias = sum(mask.numel * query.dtype.itemsize for mask in masks)
    if not backward:
        return bias + (expanded if kernel == "efficient" else 0)
    rows, columns = (math.ceil(size / to) * to for size, to in ((queries, _ROWS), (width, _WIDTHS)))
    accumulated = 4 * batch * heads * rows * (columns + 1)
    return bias + accumulated + expanded * (2 if kernel == "efficient" else 1)
