"""What the kernels of attention have in common: the call, and where results lie."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Band(NamedTuple):
    """Queries `first` and later, up to `last`, see the keys from `start` to `end`: all of them, or those of a
    `triangle`."""

    first: int
    start: int
    end: int
    triangle: bool
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """The arguments beside query, key and value. `kept_scale` multiplies the weights that `kept` keeps. Kernels are
    given no documents: see `bands`."""

    mask: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    causal: bool = False
    scale: float
    kept_scale: float = 1.0
    documents: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """forward(query, key, value, call) -> output, logsumexp;
    backward(gradient, query, key, value, output, logsumexp, call) -> gradients of query, key and value."""

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attending], Pair]
    backward: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Attending], Triple
    ]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and of their logsumexp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def transposed_like(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, width] that lies as [batch, sequence, heads, width], as projections want it."""
    batch, heads, sequence, width = x.shape
    return x.new_empty((batch, sequence, heads, width)).transpose(1, 2)


def results(query: torch.Tensor, value: torch.Tensor) -> Pair:
    """Room for output and logsumexp, where the kernels put them."""
    shape = *query.shape[:-1], value.shape[-1]
    out = torch.empty_like(query) if query.shape == shape else transposed_like(query.new_empty(shape))
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Triple:
    """Room for the gradients, where the kernels put them."""
    return transposed_like(query), transposed_like(key), transposed_like(value)
