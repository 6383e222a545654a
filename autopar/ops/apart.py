"""Results that need not all operands of their operators, and how they are had without."""

import torch
from torch import Tensor

from .expansions import NARROW, wide


def total_weight(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Tensor:
    """The second result of nll_loss forward, the weight of all targets, of its operands but the scores."""
    exact = torch.float32 if scores.dtype in NARROW else scores.dtype
    counts = target != ignored
    if weight is None:
        return counts.sum(dtype=exact).to(scores.dtype)
    rows = target.masked_fill(counts.logical_not(), 0)
    picked = torch.index_select(weight, 0, rows.reshape(-1)).reshape(*rows.shape)
    return wide(torch.where(counts, picked, 0.0)).sum().to(scores.dtype)


APART = {f"aten.{op}.default": (1, total_weight) for op in ("nll_loss_forward", "nll_loss2d_forward")}
"""Operators one of whose results does not depend on all operands: its number, and how else it is had."""
