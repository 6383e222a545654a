"""Tensors put together from what ranks hold."""

import torch

from .layout import Layout, Partial, Replicate, Shape, owned_digits, owned_indices, padded_shape


def unshard(shards: dict[Shape, torch.Tensor], shape: Shape, layout: Layout, mesh: Shape) -> torch.Tensor:
    """The global tensor from what every rank holds: the inverse of `shard`, reducing Partials."""
    first = next(iter(shards.values()))
    reductions = {p.reduction for p in layout if isinstance(p, Partial)}
    assert len(reductions) <= 1, "mixed reductions have no single inverse"
    reduction = next(iter(reductions), "sum")
    padded = padded_shape(shape, layout)
    unsharded = torch.zeros(padded, dtype=first.dtype, device=first.device)
    seen = torch.zeros(padded, dtype=torch.bool, device=first.device)
    ones = [(1,) * (len(shape) - 1 - dim) for dim in range(len(shape))]
    for coordinate, local in shards.items():
        if any(isinstance(p, Replicate) and c for p, c in zip(layout, coordinate, strict=True)):
            continue  # replicas are equal; the first speaks for all
        owned = [owned_indices(padded[dim], owned_digits(layout, mesh, coordinate, dim)) for dim in range(len(shape))]
        index = tuple(o.to(first.device).view(-1, *behind) for o, behind in zip(owned, ones, strict=True))
        if reduction == "sum":
            unsharded[index] = unsharded[index] + local if index else unsharded + local
        else:
            combine = torch.maximum if reduction == "max" else torch.minimum
            unsharded[index] = torch.where(seen[index], combine(unsharded[index], local), local)
            seen[index] = True
    return unsharded[tuple(map(slice, shape))]
