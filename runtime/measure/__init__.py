"""What the ranks of this process group reach: collectives by size and axis, arithmetic, and both at once.

All ranks call these functions together.
"""

import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autopar.cluster.measurements import Measurements, level_axes
from autopar.runtime.timing import OPERATOR_SECONDS, Report

from .collectives import ROUNDS, SIZES, collective_samples, groups_of, measured_together
from .operators import measured_compute


def measure(
    levels: Sequence[int],
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    seconds: float = OPERATOR_SECONDS,
    device: torch.device | None = None,
    report: Report = lambda part, what: None,
) -> Measurements:
    """Everything that a cluster file holds. `levels` are sizes from the outermost in, whose product is the
    number of ranks; every operator is measured for about `seconds`. The same result on every rank."""
    assert math.prod(levels) == dist.get_world_size()
    device = device or torch.device("cpu")
    compute = measured_compute(device, seconds, report)
    mine, first = groups_of(levels)
    samples, rounds = collective_samples(tuple(levels), mine, first, sizes, rounds, device, report)
    report(1.0, "operators under collectives")
    together = tuple(measured_together(axis, mine[axis], rounds, device) for axis in level_axes(levels) if axis in mine)
    return Measurements(
        levels=tuple(levels),
        device=_device_name(device),
        backend=dist.get_backend(),
        rounds=rounds,
        compute=compute,
        samples=samples,
        together=together,
    )


def measured_here(
    levels: Sequence[int] | None, *, rounds: int, device_type: str, report: Callable[[int], Report]
) -> tuple[int, Measurements]:
    """(this rank, what its process group reaches), the group being the one that the environment describes, as torchrun
    and the lab do. Without `levels`: nodes and their ranks. `report` gives, for a rank, what reports its progress.

    Raises ValueError where there is no such group, or fewer than 2 ranks.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: ranks measure, so start them with torchrun --no-python autopar calibrate, "
            "or with autopar lab --nodes 2 --ranks 2 -- autopar calibrate"
        )
    world = int(os.environ["WORLD_SIZE"])
    if levels is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        levels = [world // local, local]
    levels = [level for level in levels if level > 1]
    if math.prod(levels) != world or world < 2:
        shown = " x ".join(map(str, levels)) or "1"
        raise ValueError(
            f"levels {shown} hold {math.prod(levels)} ranks of {world}: give --levels, for 2 ranks or more"
        )
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rank = dist.get_rank()
        return rank, measure(levels, rounds=rounds, device=device, report=report(rank))
    finally:
        dist.destroy_process_group()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a rank"
