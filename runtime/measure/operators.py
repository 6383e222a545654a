"""Operators: what arithmetic takes on every rank at the same time, with operands as far away as those of a program."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.cluster.measurements import Compute
from autopar.ops.experts import MM, MM_WEIGHT, expert_mm, expert_mm_weight
from autopar.ops.kinds import MOVERS
from autopar.ops.sdpa import ATTENTION, ATTENTION_BACKWARD, attention, attention_backward
from autopar.ops.sdpa.bands import seen
from autopar.runtime.timing import Report, median_sample, median_seconds, seconds_of

RING_BYTES: Mapping[str, int] = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Of the operands that a product takes in turn while it is measured, by type of device: caches hold less, as of a
model's weights."""
RING_MOST = 64
"""Times that they are there at most, where they are small."""
RING_NEAR = 4
"""Times that other operands are there: most of what a program's operators read, one of the last ones produced."""
KEPT_MOST = 256
"""Results of an operator that are kept at most while others are made: forward keeps its own for backward, so that what
it writes lies in memory that no cache holds."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COLUMNS = 512
ROWS: Mapping[str, tuple[int, ...]] = {
    "cpu": (8, 32, 128, 512, 2048, 8192),
    "cuda": (128, 512, 2048, 8192, 32768, 131072),
}
"""Of the tensors of `COLUMNS` that are moved, by type of device."""
ATTENTIONS = ((4, 8, 128, 32), (1, 8, 512, 64))
"""Batch, heads, positions, features of a head; causal."""
EXPERTS = ((256, 256, 512, 4), (1024, 256, 512, 8))
"""Rows, features in and out, experts."""
PRODUCT = (128, 512, 1024)
"""Rows, and features in and out, of what stands between operators that are measured apart."""
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


def matmul_flops_per_second(size: int = 512, seconds: float = 1.0) -> float:
    """FLOP/s of this rank on a square float32 product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b), a.device, seconds=seconds)


def measured_compute(device: torch.device, seconds: float, report: Report) -> Compute:
    """Medians over the ranks, each of them busy with the same at the same time."""
    one = torch.zeros(1, device=device)
    report(0.0, "operators")
    seconds_per_op = _over_ranks(median_seconds(lambda: one + one, device, seconds=seconds), device)
    apart = _over_ranks(seconds_apart(lambda: one + one, seconds), device) if device.type == "cpu" else 0.0
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
            median = median_seconds(call, device, seconds=seconds)
            matmuls.append((str(dtype).removeprefix("torch."), m, k, n, _over_ranks(median, device)))
    return Compute(
        seconds_per_op=seconds_per_op,
        seconds_per_op_apart=apart,
        operators=tuple(operators),
        memory_bytes=_memory_bytes(device),
        matmuls=tuple(matmuls),
    )


def seconds_apart(function: Callable[[], object], seconds: float) -> float:
    """Seconds of a call on a CPU, each behind a product."""
    a, b = torch.randn(PRODUCT[:2]), torch.randn(PRODUCT[1:])
    product = in_turn(torch.mm, a, b, copies=copies_beyond_caches(a, b))

    def sample() -> float:
        product()
        return seconds_of(function, a.device)

    return median_sample(sample, seconds)


def _operators(device: torch.device) -> Iterator[tuple[str, float, int, Callable[[], None]]]:
    """(op, its flops as its rule counts them, bytes that it reads and writes, a call of it)."""
    for op, (reads, run) in MOVERS.items():
        for rows in ROWS[device.type]:
            x, y = (torch.randn(rows, COLUMNS, device=device) for _ in range(2))
            yield op, 0.0, reads * x.nbytes + run(x, y).nbytes, in_turn(run, x, y)
    for op, run, operands, flops in arithmetic(device):
        result = run(*operands)
        moved = sum(t.nbytes for t in (*operands, *(result if isinstance(result, tuple) else (result,))))
        yield op, flops, moved, in_turn(run, *operands)


def arithmetic(
    device: torch.device,
) -> Iterator[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], float]]:
    """(op, what runs it, its operands, its flops) of what does arithmetic and is no plain product."""
    for shape in ATTENTIONS:
        q, k, v = (torch.randn(shape, device=device) for _ in range(3))
        places, named = shape[-2], {"scale": shape[-1] ** -0.5, "is_causal": True}
        product = 2.0 * q.numel() * places * seen(places, places, 0)
        out, sums = attention(q, k, v, **named)
        yield ATTENTION, partial(attention, **named), (q, k, v), 2 * product
        yield ATTENTION_BACKWARD, partial(attention_backward, **named), (out, q, k, v, out, sums), 5 * product
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
    """A call on the next of some copies of the operands. Its result stays until caches hold no more of later ones. So
    both are about as far away as those of a program: always the same would be in the nearest cache."""
    ring = [tuple(operand.clone() for operand in operands) for _ in range(copies)]
    made = run(*operands)
    size = sum(result.nbytes for result in (made if isinstance(made, tuple) else (made,)))
    kept = max(copies, min(KEPT_MOST, RING_BYTES[operands[0].device.type] // size))
    results: list[object] = [None] * kept
    places, spaces = itertools.cycle(range(copies)), itertools.cycle(range(kept))

    def call() -> None:
        results[next(spaces)] = run(*ring[next(places)])

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
