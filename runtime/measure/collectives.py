"""Collectives by size and axis, those of `runtime.collectives`, which programs call.

Everything is measured in rounds, each of which runs every case, in another order, so that what disturbs the machine
disturbs all cases alike; medians are taken over all runs of a case.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.measurements import Axis, Case, Sample, Together, axes, level_axes, quartiles
from autopar.runtime.collectives import (
    Pending,
    all_gather,
    all_reduce_in_place,
    all_to_all,
    reduce_scatter,
    wait,
)
from autopar.runtime.messages import exchange, shift
from autopar.runtime.timing import Report, all_ranks, largest, seconds_of, slowest

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 7
ROUNDS_SECONDS: Mapping[str, float] = {"cpu": math.inf, "cuda": 140.0}
"""By type of device: no round begins that would end later, so that GPUs are calibrated in four minutes with their
operators. One round is always measured."""
CASE_SECONDS = 0.02
"""In a round, a case is repeated for about so long. What takes as long is run once, and begun together: repeated,
two ranks that exchange large messages fall out of step and take turns."""
MOST_REPEATS = 16
SHORT_VISITS = 3
"""Times in a round that a case is come back to which is shorter: where ranks share processors, such a collective takes
up to three times as long as another time, by how their processes are scheduled."""


def collectives_seconds(
    cases: Sequence[Case[str]], mesh: DeviceMesh, *, rounds: int = ROUNDS
) -> dict[Case[str], float]:
    """Median seconds of collectives on the axes of a mesh, all groups of an axis at once; the same on every rank."""
    assert mesh.mesh_dim_names is not None
    mine = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    device = torch.device(mesh.device_type)
    samples, _ = _rounds(cases, mine, frozenset(mine), rounds, math.inf, device, lambda part, what: None)
    return {case: statistics.median(seconds) for case, seconds in samples.items()}


def groups(world: int, axis: tuple[int, int]) -> list[list[int]]:
    """The ranks of each group of an axis of so many ranks, so far apart."""
    ranks, stride = axis
    return [
        [first + stride * k for k in range(ranks)]
        for block in range(0, world, ranks * stride)
        for first in range(block, block + stride)
    ]


def groups_of(levels: Sequence[int]) -> tuple[dict[tuple[int, int], dist.ProcessGroup], set[tuple[int, int]]]:
    """This rank's group of each axis, and the axes of which it is the one that works alone."""
    rank = dist.get_rank()
    mine: dict[tuple[int, int], dist.ProcessGroup] = {}
    first: set[tuple[int, int]] = set()
    for axis in axes(math.prod(levels)):
        members = groups(math.prod(levels), axis)
        for ranks in members:
            group = dist.new_group(ranks)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine[axis] = group
                first |= {axis} if ranks == members[0] else set()
    return mine, first


def collective_samples(
    levels: tuple[int, ...],
    mine: Mapping[tuple[int, int], dist.ProcessGroup],
    first: Collection[tuple[int, int]],
    sizes: Sequence[int],
    rounds: int,
    device: torch.device,
    report: Report,
) -> tuple[tuple[Sample, ...], int]:
    """Of every case, and in how many rounds it was measured."""
    cases = []
    full_axes = level_axes(levels)
    for axis in mine:
        # alone, to find how many share a link
        for alone in (False, True)[: 1 + (axis in full_axes and axis[0] < math.prod(levels))]:
            cases += [Case(kind=kind, axis=axis, bytes=size, alone=alone) for kind in _CALLS for size in sizes]
    samples, done = _rounds(cases, mine, first, rounds, ROUNDS_SECONDS[device.type], device, report)
    rows = tuple(
        Sample(**vars(case), seconds=statistics.median(seconds), quartiles=quartiles(seconds))
        for case, seconds in samples.items()
    )
    return rows, done


def _rounds(
    cases: Sequence[Case[Axis]],
    mine: Mapping[Axis, dist.ProcessGroup],
    first: Collection[Axis],
    rounds: int,
    most_seconds: float,
    device: torch.device,
    report: Report,
) -> tuple[dict[Case[Axis], list[float]], int]:
    """Seconds of each case's slowest rank, whenever it ran, and the rounds, of which none begins that would end after
    `most_seconds`. `mine` is this rank's group of each axis, `first` are the axes of which it is the one that works
    alone."""
    # a collective is of a number for each pair of ranks at least
    elements = max([dist.get_world_size() ** 2, *(case.bytes // 4 for case in cases)])
    buffer = torch.zeros(elements, device=device)
    repeats: dict[Case[Axis], int] = {}
    samples: dict[Case[Axis], list[float]] = {case: [] for case in cases}
    everyone, began = all_ranks(), time.perf_counter()
    for number in range(rounds + 1):
        if number > 1 and math.isfinite(most_seconds):
            spent = largest(time.perf_counter() - began, device, everyone)  # all end with the same round
            if spent * (number + 1) / number > most_seconds:
                return samples, number - 1
        order = [case for case in samples for _ in range(1 if repeats.get(case, 1) == 1 else SHORT_VISITS)]
        random.Random(number).shuffle(order)  # alike on all ranks: what runs before a case changes what it takes
        for position, case in enumerate(order):
            if position % 8 == 0:
                report((number + position / len(order)) / (rounds + 1), f"{case.kind} of {case.bytes} bytes")
            busy = case.axis in first or not case.alone
            seconds = _timed(case.kind, case.bytes, mine[case.axis], buffer, repeats.get(case, 2)) if busy else 0.0
            most = largest(seconds, device, everyone)  # also lets all begin the next case together
            if number:
                samples[case].append(most)
            else:
                repeats[case] = max(1, min(MOST_REPEATS, round(CASE_SECONDS / most)))
    return samples, rounds


def _timed(kind: str, size: int, group: dist.ProcessGroup, buffer: torch.Tensor, repeats: int) -> float:
    """Seconds of one of `repeats` collectives of `size` bytes, one after the other."""
    ranks = group.size()
    elements = max(1, size // 4 // (ranks * ranks)) * ranks
    full, part = buffer[: elements * ranks], buffer[:elements]
    run = _CALLS[kind]
    operand = part if kind == "all_gather" else full
    if repeats > 1:
        wait(run(operand, group))

    def repeated() -> None:
        for _ in range(repeats):
            wait(run(operand, group))

    return seconds_of(repeated, buffer.device) / repeats


_CALLS: Mapping[str, Callable[[torch.Tensor, dist.ProcessGroup], Pending]] = {
    "all_reduce": lambda x, group: all_reduce_in_place(x, "sum", group),
    "all_gather": all_gather,
    "reduce_scatter": lambda x, group: reduce_scatter(x, "sum", group),
    "all_to_all": all_to_all,
    "shift": lambda x, group: shift(x, 1, group),
    "exchange": lambda x, group: exchange(x, torch.full((2, group.size()), x.numel() // group.size()), len(x), group),
}


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

    everyone = all_ranks()
    one = min(slowest(lambda: torch.mm(a, b), device, everyone) for _ in range(3))
    products = max(1, math.ceil(2 * slowest(collective, device, everyone) / one))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, b)

    rows = [[slowest(run, device, everyone) for run in (compute, collective, both)] for _ in range(rounds)]
    computed, moved, together = map(statistics.median, zip(*rows, strict=True))
    return Together(axis=axis, compute_seconds=computed, collective_seconds=moved, seconds=together)
