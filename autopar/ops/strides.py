"""The memory layouts that kernels need: what the table says of an argument whose strides matter.

Kernels of torch read some operands at the addresses that contiguous ones would have, whatever their strides say, and
compute from what happens to lie there: layer norm's backward its statistics, group norm its weight, attention the last
dim. On one device these operands come from kernels that return them contiguous. On shards they may be cut, gathered or
permuted first. `contract` enforces the layouts.
"""

from collections.abc import Callable, Mapping

import torch

Preparation = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor to the same numbers in the layout that a kernel needs; the tensor itself if it lies so."""


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous."""
    return x.contiguous()


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, with neighbours along its last dim side by side."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def contiguous_pairs(x: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous, and beginning at an even element of its memory."""
    return x.contiguous() if x.storage_offset() % 2 == 0 else x.clone(memory_format=torch.contiguous_format)


def needs(arguments: str, prepare: Preparation = contiguous) -> Mapping[str, Preparation]:
    """Names of arguments, separated by spaces, that must lie so."""
    return dict.fromkeys(arguments.split(), prepare)
