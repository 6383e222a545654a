"""Checks indices before each rank picks its own among them.

A rank that holds a part of a dim takes an index outside of its part for another rank's. So all ranks would ignore an
index outside of the dim, where one device raises IndexError: an op that splits an indexed dim checks its indices first.
"""

import torch
from torch import Tensor

from autopar.ir.own import FUNCTIONS

CHECK = "autopar.in_range.default"


def in_range(indices: torch.Tensor, lowest: int, size: int, ignored: int | None = None) -> torch.Tensor:
    """The indices, all of which are in [lowest, size) or `ignored`.

    Raises IndexError on a CPU. On a GPU an assertion on the device fails, without waiting for it, as on one GPU.
    """
    if indices.device.type == "meta" or not indices.numel():
        return indices
    looked_at = indices if ignored is None else indices.masked_fill(indices == ignored, 0)
    if indices.device.type != "cpu":
        fine = (looked_at >= lowest) & (looked_at < size)
        torch._assert_async(fine.all(), f"an index is out of range for a dim of size {size}")
        return indices
    least, largest = (int(bound.item()) for bound in looked_at.aminmax())
    if least < lowest or largest >= size:
        worst = largest if largest >= size else least
        raise IndexError(f"index {worst} is out of range for a dim of size {size}")
    return indices


torch.library.define("autopar::in_range", "(Tensor(a) indices, int lowest, int size, int? ignored=None) -> Tensor(a)")
torch.library.impl("autopar::in_range", "CompositeExplicitAutograd")(
    lambda indices, *bounds: in_range(indices, *bounds).view_as(indices)
)
FUNCTIONS[CHECK] = in_range


def checked(indices: Tensor, size: int, *, from_end: bool = False, ignored: int | None = None) -> Tensor:
    """Indices into a dim of this (global) size; `from_end`: -1 is the last."""
    bounds = -size if from_end else 0, size, *(() if ignored is None else (ignored,))
    result: Tensor = torch.ops.autopar.in_range(indices, *bounds)
    return result
