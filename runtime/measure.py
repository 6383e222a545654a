"""What the ranks of this process group reach: collectives by size and axis, and arithmetic on all at once.

All ranks call these functions together. Collectives are those of `execute`, which programs call. Everything is measured
in rounds, each of which runs every case, in another order, so that what disturbs the machine disturbs all cases alike;
medians are taken over all runs of a case.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.measurements import (
    Axis,
    Case,
    Compute,
    Measurements,
    Sample,
    Together,
    axes,
    level_axes,
    quartiles,
)
from autopar.ops.experts import MM, MM_WEIGHT, expert_mm, expert_mm_weight

from .execute import (
    Pending,
    all_gather,
    all_reduce_in_place,
    all_to_all,
    exchange,
    reduce_scatter,
    shift,
    wait,
)

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 7
CASE_SECONDS = 0.02
"""In a round, a case is repeated for about so long. What takes as long is run once, and begun together: repeated,
two ranks that exchange large messages fall out of step and take turns."""
MOST_REPEATS = 16
SHORT_VISITS = 3
"""Times in a round that a case is come back to which is shorter: where ranks share processors, such a collective takes
up to three times as long as another time, by how their processes are scheduled."""
WINDOW_SECONDS = 0.05
OPERATOR_SECONDS = 0.3
TOGETHER_BYTES: Mapping[str, int] = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Of the all-reduce that operators are measured under, by type of device."""
TOGETHER_ROWS = 512
RING_BYTES: Mapping[str, int] = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Of the operands that a product takes in turn while it is measured, by type of device: caches hold less, as of a
model's weights."""
RING_MOST = 64
"""Times that they are there at most, where they are small."""
RING_NEAR = 4
"""Times that the operands of all else are there: most of what a program's operators read, one of the last ones made."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COLUMNS = 512
ROWS: Mapping[str, tuple[int, ...]] = {
    "cpu": (8, 32, 128, 512, 2048, 8192),
    "cuda": (128, 512, 2048, 8192, 32768, 131072),
}
"""Of the tensors of `COLUMNS` that are moved, by type of device."""
MOVERS: Mapping[str, tuple[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "aten.add.Tensor": (2, torch.add),
    "aten.mul.Tensor": (2, torch.mul),
    "aten.clone.default": (1, lambda x, y: x.clone()),
    "aten.silu.default": (1, lambda x, y: torch.nn.functional.silu(x)),
    "aten.gelu.default": (1, lambda x, y: torch.nn.functional.gelu(x)),
    "aten._softmax.default": (1, lambda x, y: x.softmax(-1)),
    "aten.sum.dim_IntList": (1, lambda x, y: x.sum(0)),
    "aten.mean.dim": (1, lambda x, y: x.mean(-1)),
}
"""What a model does besides arithmetic, and how many operands each of it reads."""
ATTENTIONS = ((4, 8, 128, 32), (1, 8, 512, 64))
"""Batch, heads, positions, features of a head; causal."""
EXPERTS = ((256, 256, 512, 4), (1024, 256, 512, 8))
"""Rows, features in and out, experts."""
MATMULS = (
    (16, 16, 16),
    (64, 64, 64),
    (128, 128, 128),
    (64, 256, 256),
    (256, 256, 256),
    (128, 512, 512),
    (512, 512, 512),
    (128, 1024, 1024),
    (256, 2048, 512),
    (1024, 1024, 1024),
)
"""Rows, and features in and out."""


Report = Callable[[float, str], None]
"""(part done, what is being measured)"""


def measure(
    levels: Sequence[int],
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    seconds: float = OPERATOR_SECONDS,
    device: torch.device | None = None,
    report: Report = lambda part, what: None,
) -> Measurements:
    """Everything that a cluster file is made of. `levels` are sizes from the outermost in, whose product is the
    number of ranks; every operator is measured for about `seconds`. The same result on every rank."""
    assert math.prod(levels) == dist.get_world_size()
    device = device or torch.device("cpu")
    compute = _compute(device, seconds, report)
    mine, first = _groups(levels)
    samples = _collectives(tuple(levels), mine, first, sizes, rounds, device, report)
    report(1.0, "operators under collectives")
    together = tuple(_together(axis, mine[axis], rounds, device) for axis in level_axes(levels) if axis in mine)
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
    and the lab do. Without `levels`: nodes and their ranks. `report` makes, for a rank, what tells of its progress.

    Raises ValueError where there is no such group, or fewer than 2 ranks.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: ranks measure; start them with torchrun --no-python autopar calibrate, or "
            "with autopar lab --nodes 2 --ranks 2 -- autopar calibrate"
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


def groups(world: int, axis: tuple[int, int]) -> list[list[int]]:
    """The ranks of each group of an axis of so many ranks, so far apart."""
    ranks, stride = axis
    return [
        [first + stride * k for k in range(ranks)]
        for block in range(0, world, ranks * stride)
        for first in range(block, block + stride)
    ]


def _groups(levels: Sequence[int]) -> tuple[dict[tuple[int, int], dist.ProcessGroup], set[tuple[int, int]]]:
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


def _collectives(
    levels: tuple[int, ...],
    mine: Mapping[tuple[int, int], dist.ProcessGroup],
    first: Collection[tuple[int, int]],
    sizes: Sequence[int],
    rounds: int,
    device: torch.device,
    report: Report,
) -> tuple[Sample, ...]:
    cases = []
    whole = level_axes(levels)
    for axis in mine:
        # alone, to find how many share a link
        for alone in (False, True)[: 1 + (axis in whole and axis[0] < math.prod(levels))]:
            cases += [Case(kind=kind, axis=axis, bytes=size, alone=alone) for kind in _CALLS for size in sizes]
    found = _rounds(cases, mine, first, rounds, device, report)
    return tuple(
        Sample(
            kind=case.kind,
            axis=case.axis,
            bytes=case.bytes,
            alone=case.alone,
            seconds=statistics.median(seconds),
            quartiles=quartiles(seconds),
        )
        for case, seconds in found.items()
    )


def collectives_seconds(
    cases: Sequence[Case[str]], mesh: DeviceMesh, *, rounds: int = ROUNDS
) -> dict[Case[str], float]:
    """Median seconds of collectives on the axes of a mesh, all groups of an axis at once; the same on every rank."""
    assert mesh.mesh_dim_names is not None
    mine = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    found = _rounds(cases, mine, frozenset(mine), rounds, torch.device(mesh.device_type), lambda part, what: None)
    return {case: statistics.median(seconds) for case, seconds in found.items()}


def _rounds(
    cases: Sequence[Case[Axis]],
    mine: Mapping[Axis, dist.ProcessGroup],
    first: Collection[Axis],
    rounds: int,
    device: torch.device,
    report: Report,
) -> dict[Case[Axis], list[float]]:
    """Seconds of each case's slowest rank, whenever it ran. `mine` is this rank's group of each axis, `first` are the
    axes of which it is the one that works alone."""
    # a collective is of a number for each pair of ranks at least
    largest = max(dist.get_world_size() ** 2, *(case.bytes // 4 for case in cases))
    buffer = torch.zeros(largest, device=device)
    repeats: dict[Case[Axis], int] = {}
    found: dict[Case[Axis], list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        order = [case for case in found for _ in range(1 if repeats.get(case, 1) == 1 else SHORT_VISITS)]
        random.Random(number).shuffle(order)  # alike on all ranks: what runs before a case changes what it takes
        for position, case in enumerate(order):
            if position % 8 == 0:
                report((number + position / len(order)) / (rounds + 1), f"{case.kind} of {case.bytes} bytes")
            busy = case.axis in first or not case.alone
            seconds = _timed(case.kind, case.bytes, mine[case.axis], buffer, repeats.get(case, 2)) if busy else 0.0
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # also lets all begin the next case together
            if number:
                found[case].append(slowest.item())
            else:
                repeats[case] = max(1, min(MOST_REPEATS, round(CASE_SECONDS / slowest.item())))
    return found


def _timed(kind: str, size: int, group: dist.ProcessGroup, buffer: torch.Tensor, repeats: int) -> float:
    """Seconds of one of `repeats` collectives of `size` bytes, one after the other."""
    ranks = group.size()
    elements = max(1, size // 4 // (ranks * ranks)) * ranks
    whole, part = buffer[: elements * ranks], buffer[:elements]
    run = _CALLS[kind]
    operand = part if kind == "all_gather" else whole
    if repeats > 1:
        wait(run(operand, group))
    _synchronize(buffer.device)
    began = time.perf_counter()
    for _ in range(repeats):
        wait(run(operand, group))
    _synchronize(buffer.device)
    return (time.perf_counter() - began) / repeats


def _together(axis: tuple[int, int], group: dist.ProcessGroup, rounds: int, device: torch.device) -> Together:
    """Products beside an all-reduce that takes about half as long, all groups of the axis at once."""
    buffer = torch.zeros(TOGETHER_BYTES[device.type] // 4, device=device)
    a, b = (torch.randn(TOGETHER_ROWS, TOGETHER_ROWS, device=device) for _ in range(2))

    def collective() -> None:
        wait(all_reduce_in_place(buffer, "sum", group))

    def both() -> None:
        pending = all_reduce_in_place(buffer, "sum", group)
        compute()
        wait(pending)

    one = min(_slowest(lambda: torch.mm(a, b), device) for _ in range(3))
    products = max(1, math.ceil(2 * _slowest(collective, device) / one))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, b)

    rows = [[_slowest(run, device) for run in (compute, collective, both)] for _ in range(rounds)]
    computed, moved, together = map(statistics.median, zip(*rows, strict=True))
    return Together(axis=axis, compute_seconds=computed, collective_seconds=moved, seconds=together)


def _slowest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call that all ranks begin together, on the slowest."""
    box = torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(box)
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    box.fill_(time.perf_counter() - began)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    ranks = group.size()
    return exchange(x, torch.full((2, ranks), x.numel() // ranks), group)


_CALLS: Mapping[str, Callable[[torch.Tensor, dist.ProcessGroup], Pending]] = {
    "all_reduce": lambda x, group: all_reduce_in_place(x, "sum", group),
    "all_gather": all_gather,
    "reduce_scatter": lambda x, group: reduce_scatter(x, "sum", group),
    "all_to_all": all_to_all,
    "shift": lambda x, group: shift(x, 1, group),
    "exchange": _exchange,
}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- arithmetic


def matmul_flops_per_second(size: int = 512, seconds: float = 1.0) -> float:
    """FLOP/s of this rank on a square float32 product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b), a.device, seconds=seconds)


def median_seconds(function: Callable[[], object], device: torch.device, *, seconds: float = OPERATOR_SECONDS) -> float:
    """Seconds of a call: the median over windows of many calls, since where ranks share processors a rank waits for
    its turn between calls more than in them."""
    function()
    _synchronize(device)
    began = time.perf_counter()
    function()
    _synchronize(device)
    calls = max(1, math.ceil(WINDOW_SECONDS / (time.perf_counter() - began)))
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(calls):
            function()
        _synchronize(device)
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


def _compute(device: torch.device, seconds: float, report: Report) -> Compute:
    """Medians over the ranks, each of them busy with the same at the same time."""
    one = torch.zeros(1, device=device)
    report(0.0, "operators")
    seconds_per_op = _over_ranks(median_seconds(lambda: one + one, device, seconds=seconds), device)
    operators = []
    for op, flops, moved, call in _operators(device):
        report(0.0, op)
        operators.append((op, flops, moved, _over_ranks(median_seconds(call, device, seconds=seconds), device)))
    matmuls = []
    for dtype in DTYPES:
        for m, k, n in MATMULS:
            report(0.0, f"products of {str(dtype).removeprefix('torch.')}")
            a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
            call = in_turn(torch.mm, a, b, copies=copies_beyond_caches(a, b))
            found = median_seconds(call, device, seconds=seconds)
            matmuls.append((str(dtype).removeprefix("torch."), m, k, n, _over_ranks(found, device)))
    return Compute(
        seconds_per_op=seconds_per_op,
        operators=tuple(operators),
        memory_bytes=_memory_bytes(device),
        matmuls=tuple(matmuls),
    )


def _operators(device: torch.device) -> Iterator[tuple[str, float, int, Callable[[], None]]]:
    """(op, its flops as its rule counts them, bytes that it reads and writes, a call of it)."""
    for op, (reads, run) in MOVERS.items():
        for rows in ROWS[device.type]:
            x, y = (torch.randn(rows, COLUMNS, device=device) for _ in range(2))
            yield op, 0.0, reads * x.nbytes + run(x, y).nbytes, in_turn(run, x, y)
    for op, run, operands, flops in arithmetic(device):
        made = run(*operands)
        moved = sum(t.nbytes for t in (*operands, *(made if isinstance(made, tuple) else (made,))))
        yield op, flops, moved, in_turn(run, *operands)


def arithmetic(
    device: torch.device,
) -> Iterator[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], float]]:
    """(op, what runs it, its operands, its flops) of what does arithmetic and is no plain product."""
    if device.type == "cpu":  # which kernel it is on another device depends on more
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for shape in ATTENTIONS:
            q, k, v = (torch.randn(shape) for _ in range(3))
            product = 2.0 * q.numel() * shape[-2]
            out, sums = forward(q, k, v, is_causal=True)
            yield str(forward.default), partial(forward, is_causal=True), (q, k, v), 2 * product
            given = out, q, k, v, out, sums
            yield str(backward.default), partial(backward, dropout_p=0.0, is_causal=True), given, 5 * product
    for rows, features, hidden, experts in EXPERTS:
        x, gradient = torch.randn(rows, features, device=device), torch.randn(rows, hidden, device=device)
        weight = torch.randn(experts, features, hidden, device=device)
        ids = torch.randint(experts, (rows,), device=device)
        flops = 2.0 * rows * features * hidden
        yield MM, expert_mm, (x, weight, ids), flops
        yield MM_WEIGHT, partial(expert_mm_weight, experts=experts), (x, gradient, ids), flops


def copies_beyond_caches(*operands: torch.Tensor) -> int:
    """How many copies of operands no cache holds."""
    return max(2, min(RING_MOST, RING_BYTES[operands[0].device.type] // sum(operand.nbytes for operand in operands)))


def in_turn(run: Callable[..., Any], *operands: torch.Tensor, copies: int = RING_NEAR) -> Callable[[], None]:
    """A call on the next of some copies of the operands, whose result stays until as many others were made. So both are
    about as far away as those of a program: always the same would be in the nearest cache."""
    ring = [tuple(operand.clone() for operand in operands) for _ in range(copies)]
    results: list[object] = [None] * copies
    places = itertools.cycle(range(copies))

    def call() -> None:
        place = next(places)
        results[place] = run(*ring[place])

    return call


def _over_ranks(value: float, device: torch.device) -> float:
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    middle: float = values.quantile(0.5).item()
    return middle


def _memory_bytes(device: torch.device) -> float:
    """What one rank may use."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / dist.get_world_size()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a rank"
