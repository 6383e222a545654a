"""Products under a collective: what operators lose while one is under way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
import torch.distributed as dist

from autopar.cluster.measurements import Together
from autopar.runtime.collectives import all_reduce_in_place, wait

from .clock import slowest

TOGETHER_BYTES: Mapping[str, int] = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Of the all-reduce that operators are measured under, by type of device."""
TOGETHER_ROWS = 512


def measured_together(axis: tuple[int, int], group: dist.ProcessGroup, rounds: int, device: torch.device) -> Together:
    """Products beside an all-reduce that takes about half as long, all groups of the axis at once."""
    buffer = torch.zeros(TOGETHER_BYTES[device.type] // 4, device=device)
    a, b = (torch.randn(TOGETHER_ROWS, TOGETHER_ROWS, device=device) for _ in range(2))

    def collective() -> None:
        wait(all_reduce_in_place(buffer, "sum", group))

    def both() -> None:
        pending = all_reduce_in_place(buffer, "sum", group)
        compute()
        wait(pending)

    one = min(slowest(lambda: torch.mm(a, b), device) for _ in range(3))
    products = max(1, math.ceil(2 * slowest(collective, device) / one))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, b)

    rows = [[slowest(run, device) for run in (compute, collective, both)] for _ in range(rounds)]
    computed, moved, together = map(statistics.median, zip(*rows, strict=True))
    return Together(axis=axis, compute_seconds=computed, collective_seconds=moved, seconds=together)
