"""`as_strided` of overlapping windows, as the views that they are: shards have no addresses in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def windows(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor | None:
    """`x.as_strided(size, stride)` of a tensor without gaps, by `unfold`; None for what is no windows of it.

    Two dims (count, width) whose strides are (step, 1) times that of what lies inside are windows of one dim.
    """
    given = all(isinstance(n, int) for n in (*size, *stride)) and len(size) == len(stride)
    if not given or x.storage_offset() or storage_offset not in (None, 0) or not x.numel() or 0 in size:
        return None
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim] if x.shape[dim] > 1 else 1)
    dims = sorted((dim for dim in range(len(size)) if size[dim] > 1), key=lambda dim: -stride[dim])
    memory = x.permute(order)
    if not memory.is_contiguous():
        return None
    found = _in_order(memory, [size[dim] for dim in dims], [stride[dim] for dim in dims])
    if found is None:
        return None
    back = [dims.index(dim) for dim in sorted(dims)]
    return found.permute(back).reshape(tuple(size))


def _in_order(x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor | None:
    """Of a contiguous tensor, with strides that fall."""
    groups: list[tuple[int, int, int]] = []  # (length of a dim of x, width, step) or (length, 0, 0), innermost first
    inside, dim = 1, len(size) - 1
    while dim >= 0:
        if stride[dim] != inside:
            return None
        step = stride[dim - 1] // inside if dim else 0
        paired = 0 < step < size[dim] and stride[dim - 1] % inside == 0
        outer = dim - 2 if paired else dim - 1
        # the next dim outwards tells how long this one is
        length, rest = divmod(stride[outer] if outer >= 0 else x.numel(), inside)
        needed = (size[dim - 1] - 1) * step + size[dim] if paired else size[dim]
        if rest or length < needed:
            return None
        groups.append((length, size[dim], step) if paired else (length, 0, 0))
        inside, dim = inside * length, outer
    if inside != x.numel() or not any(step for *_, step in groups):
        return None
    result, at = x.reshape([length for length, *_ in reversed(groups)]), 0
    for _, width, step in reversed(groups):
        if step:
            result = result.unfold(at, width, step).movedim(-1, at + 1).narrow(at, 0, size[at])
            at += 1
        elif result.shape[at] != size[at]:
            result = result.narrow(at, 0, size[at])
        at += 1
    return result
