"""How fast this rank computes, while the other ranks do the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(function: Callable[[], object], *, seconds: float = 0.3, least: int = 5) -> float:
    """Median seconds of a call, over as many calls as fit into `seconds`, and at least `least`."""
    function()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def matmul_flops_per_second(size: int = 512, seconds: float = 1.0) -> float:
    """FLOP/s of this rank on a square float32 product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b), seconds=seconds)
