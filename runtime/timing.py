"""Seconds: between marks on a host or in a GPU's stream, of one rank's calls, and of what ranks begin together."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .failures import watched

WINDOW_SECONDS = 0.05
OPERATOR_SECONDS = 0.3
"""Of the measurement of one operator."""

Report = Callable[[float, str], None]
"""(part done, what is being measured)"""


def median_seconds(function: Callable[[], object], device: torch.device, *, seconds: float = OPERATOR_SECONDS) -> float:
    """Seconds of a call: the median over windows of many calls, since where ranks share processors a rank waits for
    its turn between calls more than in them."""
    function()
    calls = max(1, math.ceil(WINDOW_SECONDS / seconds_of(function, device)))

    def window() -> None:
        for _ in range(calls):
            function()

    return median_sample(lambda: seconds_of(window, device) / calls, seconds)


def median_sample(sample: Callable[[], float], seconds: float) -> float:
    """The median of the samples that are taken in so many seconds, of 3 at least."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        samples.append(sample())
    return statistics.median(samples)


Axes = Sequence[tuple[int, str, dist.ProcessGroup]]
"""Of ranks that are measured together: number, name and group of each mesh axis that they are on."""


def all_ranks() -> Axes:
    """Those of this process group, on one axis."""
    world = dist.group.WORLD
    assert world is not None
    return [(0, "all", world)]


def largest(value: float, device: torch.device, axes: Axes) -> float:
    """Of the values of all ranks, which so begin together what comes next."""
    if not axes:
        return value
    box = torch.tensor(value, dtype=torch.float64, device=device)
    for _, name, group in axes:
        with watched("the largest of what ranks measure,", name, group):
            dist.all_reduce(box, dist.ReduceOp.MAX, group)
    return box.item()


def slowest(run: Callable[[], object], device: torch.device, axes: Axes) -> float:
    """Seconds of a call that all ranks begin together, on the slowest."""
    largest(0.0, device, axes)
    return largest(seconds_of(run, device), device, axes)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Of a call, and of all that the device has to do for it."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def mark(device: torch.device) -> Any:
    """Now: on a host, a time; on a GPU, for which the host does not wait, an event in the stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Two marks, which the stream has passed."""
    if isinstance(began, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1e3
