"""Which of ATen's operators a graph writes in another way: views as one of two, and nothing that does nothing."""

from collections.abc import Callable
from typing import Any

COPIES = ("aten.clone.default",)

SELECT, SLICE, PAD = "aten.select.int", "aten.slice.Tensor", "aten.constant_pad_nd.default"

KEEPS_WITH_ONE = ("aten.pow.Tensor_Scalar", "aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor")

NO_OPS = frozenset(
    {
        "aten.detach.default",
        "aten.alias.default",
        "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default",
        "aten.lift.default",
        "aten.view_as.default",
        "aten.resolve_conj.default",
        "aten.resolve_neg.default",
    }
)

RESHAPES = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten._reshape_alias.default",
        "aten.view_copy.default",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.flatten.using_ints",
        "aten.unflatten.int",
    }
)

PERMUTES: dict[Any, Callable[..., tuple[int, ...]]] = {
    "aten.permute.default": lambda rank, order: tuple(d % rank for d in order),
    "aten.t.default": lambda rank: tuple(reversed(range(rank))),
    "aten.numpy_T.default": lambda rank: tuple(reversed(range(rank))),
    "aten.transpose.int": lambda rank, a, b: _swapped(rank, a, b),
    "aten.swapaxes.default": lambda rank, a, b: _swapped(rank, a, b),
    "aten.swapdims.default": lambda rank, a, b: _swapped(rank, a, b),
    "aten.mT.default": lambda rank: _swapped(rank, -1, -2),
}

FILLED: dict[Any, str] = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
}
"""Ops that take dtype and device of a tensor, and read nothing of it."""

LAZY: dict[Any, str] = {
    "aten._conj.default": "aten._conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
}
"""Views that leave a sign to whoever reads them: kernels and collectives of shards read what lies there."""


def _swapped(rank: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(rank))
    if rank:
        order[a], order[b] = order[b], order[a]
    return tuple(order)
