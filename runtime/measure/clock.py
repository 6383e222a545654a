"""Seconds of calls: of one rank's, and of what all ranks begin together."""

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

WINDOW_SECONDS = 0.05
OPERATOR_SECONDS = 0.3
"""Of the measurement of one operator."""

Report = Callable[[float, str], None]
"""(part done, what is being measured)"""


def median_seconds(function: Callable[[], object], device: torch.device, *, seconds: float = OPERATOR_SECONDS) -> float:
    """Seconds of a call: the median over windows of many calls, since where ranks share processors a rank waits for
    its turn between calls more than in them."""
    function()
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    calls = max(1, math.ceil(WINDOW_SECONDS / (time.perf_counter() - began)))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        samples.append((time.perf_counter() - began) / calls)
    return statistics.median(samples)


def slowest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call that all ranks begin together, on the slowest."""
    box = torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(box)
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    box.fill_(time.perf_counter() - began)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
