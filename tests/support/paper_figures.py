"""What the papers' formulas give, from the same links and prices that plans are made with.

The tests hold these figures, and `benchmarks/papers.py` prints them beside the papers'.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cache

from autopar.cluster.links import Link
from autopar.cluster.loads import prices
from autopar.cluster.machine import Cluster, Device, Level

DEVICE = Device(
    name="a device",
    flops_per_second={"float16": 1e12},
    memory_bytes=1e9,
    memory_bytes_per_second=1e9,
    seconds_per_op=0.0,
)
GB = 1e9


def level(size: int, pair: float, group: float | None = None, topology: str = "switch", shared: int = 1) -> Level:
    """No latency: the papers count bytes."""
    return Level(
        name=f"level of {size}",
        size=size,
        topology=topology,
        bytes_per_second=pair,
        group_bytes_per_second=group or pair,
        devices_per_link=shared,
        latency_seconds=0.0,
    )


def cluster(*levels: Level) -> Cluster:
    return Cluster(name="from a paper", device=DEVICE, levels=levels)


# ------------------------------------------------------------------------------------------------- ATP


def atp_layer(d1: int, d2: int, seconds1: float, seconds2: float) -> float:
    """ATP Eq. 2 in units of 2 L b s h, with `seconds` those of an all-reduce of one byte on each axis: 7h
    over the second axis (it counts an all-reduce and a separate all-gather; a reduce-scatter would
    make it 6h), 2h over the first."""
    return 7 / d1 * seconds2 + 2 / d2 * seconds1


def atp_predicted(on: Cluster, d1: int, d2: int) -> float:
    """ATP Eq. 2 to 4: Rabenseifner's cost is that of a ring without latency."""
    first, second = (
        prices("all_reduce", 1.0, link)["ring"].moving if link.ranks > 1 else 0.0 for link in on.links((d1, d2))
    )
    return atp_layer(d1, d2, first, second)


def atp_calibrated_saving() -> float:
    """5.3: by how much ATP-4 is below ATP-1 on IC1, with the bandwidths that the paper calibrated."""
    return 1 - atp_layer(2, 4, 1 / 1.20, 1 / 4.95) / atp_layer(8, 1, 1 / 0.97, 0.0)


def atp_teraflops(hidden: int, batch: int = 4, sequence: int = 2048) -> float:
    """Table 2: forward and backward of a layer, in units of 2^40, by Megatron-LM's formula."""
    return 72 * batch * sequence * hidden**2 * (1 + sequence / (6 * hidden)) / 2**40


ATP_TABLE_2 = {2048: 2.625, 4096: 9.75, 8192: 37.5, 12288: 83.25}
"""Hidden size -> TFLOPs a layer."""


def shapes(devices: int) -> list[tuple[int, int]]:
    return [(devices // d2, d2) for d2 in range(1, devices + 1) if devices % d2 == 0]


def atp_curve(devices: int) -> dict[int, float]:
    """5.4: d2 -> (14 d2 + 4 d1 - 18) / (d1 d2), of one level of equal bandwidth, in units of 2 L b s h / GroupBW."""
    return {d2: (14 * d2 + 4 * d1 - 18) / (d1 * d2) for d1, d2 in shapes(devices)}


# ---------------------------------------------------------------------------------------------- Par4D

Grid = tuple[int, int, int, int]
"""Gx, Gy, Gz, Gdata: X innermost."""


def grids(devices: int) -> list[Grid]:
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return [g for g in itertools.product(sizes, repeat=4) if math.prod(g) == devices]  # type: ignore[misc]


def par4d_bandwidths(grid: Grid, per_node: int, inside: float, between: float) -> list[float]:
    """Par4D Eq. 10, as printed."""
    found = []
    for i in range(4):
        before = math.prod(grid[:i])
        found.append(inside if before * grid[i] <= per_node else between / min(per_node, before))
    return found


def par4d_layer(grid: Grid, beta: list[float], m: float, k: float, n: float) -> list[float]:
    """Par4D Eq. 4 to 8, as printed: all-gather and reduce-scatter of weights on z, all-reduces of activations
    on y and x, of gradients on data."""
    x, y, z, data = grid
    bx, by, bz, bd = beta
    return [
        1 / bz * (z - 1) * k * n / (x * y * z),
        1 / bz * (z - 1) / z * k * n / (x * y),
        2 / by * (y - 1) / y * m * n / (z * x),
        2 / bx * (x - 1) / x * m * k / (z * y),
        2 / bd * (data - 1) / data * k * n / (x * y * z),
    ]


def priced_layer(on: Cluster, grid: Grid, m: float, k: float, n: float, transposed: bool = False) -> list[float]:
    """The same five collectives on a mesh (data, z, y, x) of a cluster, as rings. In a transposed layer x and y
    change roles, with their bandwidths."""
    x, y, z, _ = grid
    over_data, over_z, over_y, over_x = on.links(grid[::-1])
    if transposed:
        x, y, over_x, over_y = y, x, over_y, over_x
    asked = [
        ("all_gather", k * n / (x * y), over_z),
        ("reduce_scatter", k * n / (x * y), over_z),
        ("all_reduce", m * n / (z * x), over_y),
        ("all_reduce", m * k / (z * y), over_x),
        ("all_reduce", k * n / (x * y * z), over_data),
    ]
    return [prices(kind, size, link)["ring"].moving if link.ranks > 1 else 0.0 for kind, size, link in asked]


PRODUCTS = ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
"""(k, n) in hidden sizes of the products with weights of a transformer layer (q, k and v; attention's output; the two
of the MLP), and whether it is one of Par4D's transposed layers."""


def par4d_model(on: Cluster, grid: Grid, tokens: float, hidden: float) -> float:
    """Eq. 9 over a transformer layer."""
    return sum(
        sum(priced_layer(on, grid, tokens / grid[3], k * hidden, n * hidden, transposed))
        for k, n, transposed in PRODUCTS
    )


PERLMUTTER = cluster(level(8, 100 * GB, shared=4), level(4, 300 * GB))
"""Eight of its nodes: four GPUs, each with NVLink to the others, 100 GB/s between nodes."""


def par4d_rankings() -> tuple[list[Grid], list[Grid]]:
    """V.C: grids of 32 GPUs of Perlmutter for GPT-20B (hidden 7168), best first, by the placement-aware and by the
    agnostic model. Ties go to the smaller (Gx, Gy, Gz, Gdata).

    The tokens of a batch are not stated: the example of IV has 32K on 16 GPUs, so 64K are taken, and the grids whose
    replica has at least 16 GPUs (16 bytes a parameter, 40 GB each).
    """
    flat = cluster(level(32, 100 * GB))
    fitting = [grid for grid in grids(32) if grid[3] <= 2]
    aware, agnostic = (
        sorted(fitting, key=lambda grid: (par4d_model(on, grid, 64 * 1024, 7168), grid)) for on in (PERLMUTTER, flat)
    )
    return aware, agnostic


# ------------------------------------------------------------------------------------------- MeshSlice


def flowing(rows: int, columns: int, down: float, across: float) -> tuple[float, float]:
    """Bytes that one chip receives down and across when two matrices flow through a rows x columns mesh (2.3.1), from
    all-gathers (or reduce-scatters) at one byte a second."""
    links = cluster(level(rows * columns, 1.0)).links((rows, columns))
    found = [
        prices("all_gather", whole / others, link)["ring"].moving if link.ranks > 1 else 0.0
        for link, whole, others in zip(links, (down, across), (columns, rows), strict=True)
    ]
    return found[0], found[1]


MESHSLICE_MODELS = {"GPT-3": 12288, "Megatron-NLG": 20480}
"""Hidden sizes."""

CHIPS = 256
TOKENS = 128 * 2048
"""5.1.1: half as many sequences as chips, of 2048 tokens."""

PEAK, REACHED = 272e12, 242e12
"""FLOP/s of a TPU v4 (5.1.1), and those that the authors' autotuner takes (its `Autotuner.py`: 242, in units of 2^40,
which would be 98% of the peak; we take 10^12)."""

RATES: Mapping[str, tuple[float, float, float]] = {
    "all_gather": (79.751e9, 5e-6, 13e-6),
    "reduce_scatter": (63.167e9, 5e-6, 26e-6),
}
"""Bytes/s both ways around a ring, seconds of a step and of a launch: the paper prints none, these are its repository's
(github.com/hwnam831/meshslice, `Autotuner.py`, measured on TPU v4)."""

Product = tuple[str, float, float, float]
"""(dataflow, m, k, n): an m x k by k x n product, by the output- (os), left- (ls) or right-stationary (rs) dataflow."""


def dataflows(stays: str, m: float, k: float, n: float) -> list[Product]:
    """Table 1: forward, gradient of the input, gradient of the weight, where "y", "x" or "w" stays."""
    return {
        "y": [("os", m, k, n), ("ls", m, n, k), ("rs", k, m, n)],
        "x": [("ls", m, k, n), ("os", m, n, k), ("rs", n, m, k)],
        "w": [("rs", m, k, n), ("ls", k, n, m), ("os", k, m, n)],
    }[stays]  # type: ignore[return-value]


def largest(m: float, k: float, n: float) -> str:
    """3.2.1: which matrix of Y = X W is the largest; of equal ones, the input."""
    return max([(m * k, 2, "x"), (m * n, 1, "y"), (k * n, 0, "w")])[2]


def sliced_seconds(product: Product, rows: int, columns: int) -> float:
    """3.2.2: prologue, steady state and epilogue of a sliced product with the best number of slices S <= 64 of eight
    columns at least. Rows and columns are independent; bfloat16."""
    flow, m, k, n = product
    computing = 2 * m * k * n / (rows * columns) / REACHED
    inner = {"os": k, "ls": n, "rs": m}[flow]
    found = []
    for slices in range(1, 65):
        if inner % (slices * 8 * math.lcm(rows, columns)):
            continue
        part = computing / slices
        left = 2 * m * k / rows / slices
        right = 2 * k * n / columns / slices
        if flow == "os":
            first, second = _sent("all_gather", 1, left, rows, columns), _sent("all_gather", 0, right, rows, columns)
            around = max(first, second)
        elif flow == "ls":
            first = _sent("all_gather", 0, right, rows, columns)
            second = _sent("reduce_scatter", 1, 2 * m * n / rows / slices, rows, columns)
            around = first + second
        else:
            first = _sent("all_gather", 1, left, rows, columns)
            second = _sent("reduce_scatter", 0, 2 * m * n / columns / slices, rows, columns)
            around = first + second
        found.append(around + (slices - 1) * max(first, second, part) + part)
    return min(found)


def _sent(kind: str, axis: int, size: float, rows: int, columns: int) -> float:
    link = _torus(kind, rows, columns)[axis]
    return prices(kind, size, link)["ring"].seconds() if link.ranks > 1 else 0.0


@cache
def _torus(kind: str, rows: int, columns: int) -> tuple[Link, ...]:
    """A 2D torus with links of its own both ways for each chip, with what a kind of collective reaches."""
    both, step, launch = RATES[kind]
    levels = (
        Level(
            name=name,
            size=size,
            topology="ring",
            bytes_per_second=both / 2 * chips,
            group_bytes_per_second=both * chips,
            latency_seconds=step,
            launch_seconds=launch,
        )
        for name, size, chips in (("rows", rows, columns), ("columns", columns, 1))
    )
    return cluster(*levels).links((rows, columns))


def utilization(hidden: int, rows: int, columns: int, *, choosing: bool) -> float:
    """Part of the peak that the four FC layers of a block reach, forward and backward, with the dataflow that keeps
    the largest matrix (`choosing`), or with Y-stn everywhere (Table 2's "not optimized")."""
    seconds = 0.0
    for k, n, _ in PRODUCTS:
        shape = (TOKENS, k * hidden, n * hidden)
        flows = dataflows(largest(*shape) if choosing else "y", *shape)
        seconds += sum(sliced_seconds(product, rows, columns) for product in flows)
    return 6 * TOKENS * 12 * hidden**2 / CHIPS / PEAK / seconds


def meshes_of(chips: int) -> list[tuple[int, int]]:
    """Figure 13's shapes."""
    return [(rows, chips // rows) for rows in (2**k for k in range(2, 8))]


def dataflow_gain(hidden: int) -> tuple[float, float]:
    """Table 2: utilization at the best mesh without and with the choice of dataflows."""
    without, chosen = (
        max(utilization(hidden, *mesh, choosing=choosing) for mesh in meshes_of(CHIPS)) for choosing in (False, True)
    )
    return without, chosen


MESHSLICE_TEXT: Mapping[str, Mapping[str, float]] = {
    "GPT-3": {"MeshSlice": 0.674, "over Wang": 0.138, "end to end": 0.120, "lost": 0.168},
    "Megatron-NLG": {"MeshSlice": 0.822, "over Wang": 0.260, "end to end": 0.234, "lost": 0.058},
}
"""What 5.1.1 and Table 2 say of Fig. 9 on 256 chips: utilization of the FC layers, how much faster than Wang these are,
and the whole layer, and how much of its efficiency MeshSlice loses from 16 chips on. All else is bars without numbers.
"""

# ------------------------------------------------------------------------------------------------- CFP


def profiled_programs(dims: list[list[int]]) -> int:
    """5.5: programs to profile for unique segments, each with the numbers of candidate dims of its blocks: all
    combinations within a segment, and of the last block of one with the first of the next; the last segment repeats."""
    inside = sum(math.prod(counts) for counts in dims)
    following = [*dims[1:], dims[-1]]
    return inside + sum(here[-1] * after[0] for here, after in zip(dims, following, strict=True))
