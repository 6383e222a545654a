"""Par4D's step and ATP's layer, and what they are compared with, as tasks of the simulator.

A rank comes to one operation after the other; collectives of a mesh axis follow each other on its stream, and are
waited for where the method does. Operators are the products with weights, attention, and the bytes of all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from paper_figures import GB, PRODUCTS, Grid, atp_teraflops, cluster, grids, level, par4d_model

from autopar.cluster.library import CLUSTERS
from autopar.cluster.links import Link
from autopar.cluster.loads import loads, price
from autopar.cluster.machine import Cluster
from autopar.cost.simulator import Task, scheduled

OTHER_BYTES = 34
"""Bytes per token and hidden size that a layer keeps for backward besides scores of attention (Korthikanti et al. 2022,
4.1): forward writes and reads each, backward twice. Scores are not stored (fused attention)."""


class Rank:
    """Tasks of one rank, as it comes to them."""

    def __init__(self, on: Cluster, mesh: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.links, self.dtype = on.device, on.links(tuple(mesh)), dtype
        self.tasks: list[Task] = []
        self.barrier: tuple[int, ...] = ()

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def compute(self, flops: float, size: float = 0.0, seconds: float = 0.0) -> None:
        arithmetic = self.device.compute_seconds(flops, self.dtype) if flops else 0.0
        took = seconds + arithmetic + size / self.device.memory_bytes_per_second
        self.barrier = (self._add(Task(stream="compute", after=self.barrier, fixed_seconds=took)),)

    def start(self, kind: str, axis: int, size: float) -> int | None:
        link: Link = self.links[axis]
        if link.ranks == 1:
            return None
        found = price(kind, size, link)
        return self._add(
            Task(
                stream=f"axis {axis}",
                after=self.barrier,
                fixed_seconds=found.fixed,
                moving_seconds=found.moving,
                uses=loads(kind, found.algorithm, link),
            )
        )

    def wait(self, *tasks: int | None) -> None:
        self.barrier = (*self.barrier, *(task for task in tasks if task is not None))

    @property
    def seconds(self) -> float:
        return max((span.end_seconds for span in scheduled(self.tasks)), default=0.0)


# ---------------------------------------------------------------------------------------------- Par4D


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """Table I. Sequences of 2048 tokens; weights and activations in bfloat16, activations recomputed in backward."""

    layers: int
    hidden: int

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2

    def flops(self, tokens: float) -> float:
        """VI.C: those of hardware, with forward recomputed (Narayanan et al. 2021)."""
        return 4 * 2 * tokens * self.parameters * (1 + LENGTH / (6 * self.hidden))


LENGTH = 2048
GPTS = {
    64: Gpt(layers=24, hidden=4096),
    128: Gpt(layers=32, hidden=5120),
    256: Gpt(layers=32, hidden=7168),
    512: Gpt(layers=38, hidden=9216),
    1024: Gpt(layers=42, hidden=12288),
}
"""GPUs -> model (Tables I and III)."""

PERLMUTTER = replace(CLUSTERS["perlmutter"], algorithms=("ring", "pairwise", "message"))
"""V.A: collectives are rings."""

PEAK = 312e12
BATCH = 2048
"""Sequences: 4M tokens."""

STEPS = ("overlapped all-reduces", "overlapped reduce-scatters", "overlapped all-gathers", "cached all-gathers")
"""IV-A to IV-D, each on top of those before it."""

PAR4D_FIGURE_3 = (0.05, 0.08, 0.19, 0.09)
"""By how much each improves batch times; 34% together."""

PAR4D_TABLE_3 = {
    64: {"Megatron-LM": 0.37, "ZeRO-3": 0.55, "DeepSpeed-3D": 0.33, "Par4D": 0.67},
    128: {"Megatron-LM": 0.42, "ZeRO-3": 0.57, "DeepSpeed-3D": 0.33, "Par4D": 0.63},
    256: {"Megatron-LM": 0.42, "ZeRO-3": 0.57, "DeepSpeed-3D": 0.35, "Par4D": 0.67},
    512: {"Megatron-LM": 0.44, "ZeRO-3": 0.55, "DeepSpeed-3D": 0.35, "Par4D": 0.64},
    1024: {"Megatron-LM": 0.42, "ZeRO-3": 0.27, "DeepSpeed-3D": 0.38, "Par4D": 0.57},
}
"""Part of the peak, weak scaling on Perlmutter."""

DATA, Z, Y, X = range(4)


def par4d(model: Gpt, grid: Grid, sequences: int, *, steps: int = 4, cached: float = 1.0) -> float:
    """Seconds of a step by Algorithm 1 with the first so many of the optimisations of IV; `cached` is the part of
    layers whose gathers are kept (IV-D). Gradients are reduced over data at the end."""
    on = Rank(PERLMUTTER, grid[::-1])
    x, y, z, data = grid
    tokens = sequences * LENGTH / (z * data)
    h = model.hidden
    late: list[int | None] = []
    overlap_reduce, overlap_scatter, prefetch, keep = (steps > k for k in range(4))

    def shape(number: int) -> tuple[float, float, int, int]:
        """Local k and n of a product, and the axes of its sums forward and backward."""
        k, n, transposed = PRODUCTS[number]
        return (k * h / x, n * h / y, X, Y) if transposed else (k * h / y, n * h / x, Y, X)

    def between(number: int, times: float) -> None:
        """Attention after q, k and v; a quarter of the other bytes after each product."""
        flops = 4 * tokens * LENGTH * h / (x * y) / 2 * times if number == 0 else 0.0
        on.compute(flops, size=2 * OTHER_BYTES / 4 * tokens * h / x * times)

    def forward(layers: Sequence[int], gathers: Sequence[bool]) -> None:
        """Gathers of the next product's weight start under the product before it, where they are prefetched."""
        every = [(layer, number) for layer in layers for number in range(4)]
        sizes = [2 * shape(number)[0] * shape(number)[1] for _, number in every]
        wanted = [gathers[layers.index(layer)] for layer, _ in every]
        gathered = on.start("all_gather", Z, sizes[0]) if wanted[0] else None
        for i, (_, number) in enumerate(every):
            k, n, down, _ = shape(number)
            on.wait(gathered)
            gathered = None
            following = i + 1 < len(every) and wanted[i + 1]
            if prefetch and following:
                gathered = on.start("all_gather", Z, sizes[i + 1])
            on.compute(2 * tokens * k * n)
            on.wait(on.start("all_reduce", down, 2 * tokens * n))
            between(number, 1.0)
            if following and not prefetch:
                gathered = on.start("all_gather", Z, sizes[i + 1])

    def backward() -> None:
        for number in reversed(range(4)):
            k, n, _, across = shape(number)
            between(number, 2.0)
            on.compute(2 * tokens * k * n)
            reduced = on.start("all_reduce", across, 2 * tokens * k)
            if not overlap_reduce:
                on.wait(reduced)
            on.compute(2 * tokens * k * n)
            on.wait(reduced)
            scattered = on.start("reduce_scatter", Z, 2 * k * n)
            late.append(scattered)
            if not overlap_scatter:
                on.wait(scattered)

    forward(range(model.layers), [True] * model.layers)
    for layer in reversed(range(model.layers)):
        again = not keep or layer >= cached * model.layers
        forward([layer], [again])
        backward()
    on.wait(*late)
    weights = model.parameters / (x * y * z)
    on.wait(on.start("all_reduce", DATA, 2 * weights))
    return on.seconds


def par4d_times() -> list[float]:
    """Figure 3: GPT-20B on 16 GPUs, Gx = Gy = 2, Gz = 4, 32K tokens, without and with 1, 2, 3 and 4 of the
    optimisations; gathers of 28 of 32 layers kept."""
    return [par4d(GPTS[256], (2, 2, 4, 1), 16, steps=k, cached=28 / 32) for k in range(5)]


ADAM_BYTES = 16
"""Of a parameter in mixed precision: weights, gradients, and float32 weights and moments."""


def par4d_best(gpus: int) -> tuple[Grid, float]:
    """The grid of least communication by Eq. 9 and 10 whose weights take at most half of a GPU's memory, the batch
    among z and data; and its utilization."""
    model = GPTS[gpus]
    on = cluster(level(gpus // 4, 100 * GB, shared=4), level(4, 300 * GB))
    fitting = [
        g
        for g in grids(gpus)
        if model.parameters * ADAM_BYTES / (g[0] * g[1] * g[2]) <= PERLMUTTER.device.memory_bytes / 2
        and BATCH % (g[2] * g[3]) == 0
    ]
    ranked = sorted(fitting, key=lambda g: (par4d_model(on, g, BATCH * LENGTH, model.hidden), g))
    best = min(ranked[:5], key=lambda g: par4d(model, g, BATCH))
    return best, model.flops(BATCH * LENGTH) / gpus / PEAK / par4d(model, best, BATCH)


def zero3(gpus: int) -> float:
    """Utilization of ZeRO-3: weights of a layer gathered in forward and again in backward, under the layer before;
    their gradients scattered under the layers after."""
    model = GPTS[gpus]
    on = Rank(PERLMUTTER, (gpus,))
    tokens, weights = BATCH * LENGTH / gpus, 12 * model.hidden**2
    flops = 2 * tokens * weights * (1 + LENGTH / (6 * model.hidden))
    other = 2 * OTHER_BYTES * tokens * model.hidden
    for times in (1, 3):  # backward with forward recomputed
        gathered = on.start("all_gather", 0, 2 * weights)
        for layer in range(model.layers):
            on.wait(gathered)
            gathered = on.start("all_gather", 0, 2 * weights) if layer + 1 < model.layers else None
            on.compute(times * flops, size=times * other)
            if times == 3:
                on.start("reduce_scatter", 0, 2 * weights)
    return model.flops(BATCH * LENGTH) / gpus / PEAK / on.seconds


def pipelined(gpus: int, *, sharded: bool) -> float:
    """Utilization of Megatron-LM, and of DeepSpeed-3D with the optimizer's states sharded over data (gradients
    scattered, weights gathered again): tensor parallel on the 4 GPUs of a node, as few stages as hold 16 bytes a
    parameter in half of the memory, one sequence at a time. A pipeline of p stages and m microbatches takes (m + p -
    1) / m of its work (Narayanan et al. 2021)."""
    model, tensor = GPTS[gpus], 4
    memory = PERLMUTTER.device.memory_bytes / 2
    stages = next(p for p in (1, 2, 4, 8, 16) if model.parameters * ADAM_BYTES / tensor / p <= memory)
    data = gpus // tensor // stages
    # the mesh lies as (stages, data, tensor), so that data goes between nodes
    on = Rank(PERLMUTTER, (data, tensor))
    h, layers = model.hidden, model.layers / stages
    microbatches = BATCH // data
    flops = 2 * LENGTH * 12 * h**2 / tensor * (1 + LENGTH / (6 * h))
    for times in (1, 1, 2):  # forward, again, and backward of a layer
        for half in range(2):
            on.compute(times * flops / 2, size=times * OTHER_BYTES * LENGTH * h * (2 if half else 1) / 3)
            on.wait(on.start("all_reduce", 1, 2 * LENGTH * h))
    layer = on.seconds
    reduce = Rank(PERLMUTTER, (data, tensor))
    gradients = 2 * model.parameters / tensor / stages
    kinds = ("reduce_scatter", "all_gather") if sharded else ("all_reduce",)
    for kind in kinds:
        reduce.wait(reduce.start(kind, 0, gradients))
    step = layer * layers * (microbatches + stages - 1) + reduce.seconds
    return model.flops(BATCH * LENGTH) / gpus / PEAK / step


# ------------------------------------------------------------------------------------------------- ATP

ATP_MODELS = {"M1": 2048, "M2": 4096, "M3": 8192, "M4": 12288}
ATP_TABLE_3 = {
    "IC1": {"M2": (3.45, 3.46, 3.51), "M3": (6.68, 6.79, 6.72), "M4": (10.71, 10.70, 10.70)},
    "IC2": {"M2": (42.82, 43.59, 43.73), "M3": (73.61, 75.27, 75.95), "M4": (96.83, 100.25, 100.23)},
    "IC3": {"M2": (97.45, 100.38, 98.20), "M3": (151.98, 152.64, 151.79), "M4": (178.19, 178.17, 177.78)},
    "IC4": {"M2": (15.31, 17.20, 18.62), "M3": (22.47, 26.09, 26.18), "M4": (32.52, 34.95, 38.81)},
}
"""TFLOP/s a GPU of the best mesh as it is, and in chunks of 2 and 4; 8 GPUs."""

Reduced = tuple[tuple[float, float], tuple[float, float]]
"""(seconds of all-reduces after attention's block and after the MLP's) forward, and backward."""

A100 = CLUSTERS["dgx-a100"].device
GPUS = 8
IC1 = {(8, 1): (0.97 * GB, 0.0), (2, 4): (1.20 * GB, 4.95 * GB)}
"""Mesh -> rates of all-reduces, calibrated in 5.3."""

IC3 = (price("all_reduce", 2**28, CLUSTERS["dgx-a100"].links((GPUS,))[0]).moving / 2**28) ** -1
"""The rate of all-reduces over NVSwitch, which the paper does not print: that of a DGX A100."""

Reduced = tuple[float, float]
"""Seconds of the all-reduces of a direction: around attention, and around the MLP."""


def atp_reduced(hidden: int, mesh: tuple[int, int], rates: tuple[float, float], batch: int = 4) -> Reduced:
    """Eq. 2: f1 (3h) and f2 around attention, f3 (4h) and f4 around the MLP; conjugate pairs, so that backward sends
    the same."""
    (d1, d2), (rate1, rate2) = mesh, rates
    unit = 2.0 * batch * LENGTH * hidden
    second = unit / (d1 * rate2) if d2 > 1 else 0.0
    first = unit / (d2 * rate1) if d1 > 1 else 0.0
    return 3 * second + first, 4 * second + first


def atp_layer(hidden: int, reduced: Reduced, slow: float, *, chunks: int = 1, batch: int = 4) -> float:
    """Seconds of a layer on 8 GPUs, forward and backward (4.1, 4.2): forward in chunks of the batch, all-reduces of one
    under the block of the next; in backward all-reduces of gradients of inputs under gradients of weights, as in
    Megatron-LM 2.6. Operators take `slow` times what the device's curve says of products of their size."""
    tasks: list[Task] = []
    flops = atp_teraflops(hidden, batch) * 2**40 / 3 / GPUS  # of one pass, two products a block

    def add(stream: str, took: float, *after: int) -> int:
        tasks.append(Task(stream=stream, after=after, fixed_seconds=took))
        return len(tasks) - 1

    def block(part: float, *after: int) -> int:
        return add("compute", slow * 2 * A100.compute_seconds(flops * part / 4, torch.float16), *after)

    waiting: list[tuple[int, ...]] = [()] * chunks
    for sent in reduced:
        for chunk in range(chunks):
            waiting[chunk] = (add("links", sent / chunks, block(1 / chunks, *waiting[chunk])),)
    barrier = [task for tasks_ in waiting for task in tasks_]
    for sent in reduced[::-1]:
        inputs = block(1.0, *barrier)
        barrier = [add("links", sent, inputs), block(1.0)]
    return max(span.end_seconds for span in scheduled(tasks))


def teraflops(hidden: int, seconds: float, batch: int = 4) -> float:
    """Reached by a GPU."""
    return atp_teraflops(hidden, batch) * 2**40 / GPUS / seconds / 1e12


def _falling(function: Callable[[float], float], wanted: float) -> float:
    """Where a function that falls has a value."""
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > wanted else (low, middle)
    return low


@cache
def slowness(name: str) -> float:
    """How much slower than the device's curve operators are ("we do not use optimized kernels"), for a layer to reach
    on IC3 what Table 3 says without chunks; of M1, which is not in the table, that of M2."""
    name = "M2" if name == "M1" else name
    hidden = ATP_MODELS[name]
    reduced = atp_reduced(hidden, (GPUS, 1), (IC3, 0.0))
    return _falling(lambda slow: teraflops(hidden, atp_layer(hidden, reduced, slow)), ATP_TABLE_3["IC3"][name][0])


def atp_chunks(name: str, interconnect: str) -> tuple[float, ...]:
    """Table 3: TFLOP/s as it is, and in chunks of 2 and 4. All-reduces of IC3 at the rate of a DGX A100; the others are
    as slow as it takes for the first figure."""
    hidden, slow = ATP_MODELS[name], slowness(name)
    reduced = atp_reduced(hidden, (GPUS, 1), (IC3, 0.0))
    if interconnect != "IC3":
        stated = ATP_TABLE_3[interconnect][name][0]
        each = _falling(lambda each: teraflops(hidden, atp_layer(hidden, (each, each), slow)), stated)
        reduced = each, each
    return tuple(teraflops(hidden, atp_layer(hidden, reduced, slow, chunks=c)) for c in (1, 2, 4))


def atp_gain(name: str, interconnect: str) -> float:
    """Figure 10: by how much ATP with the best of 1, 2 and 4 chunks is above Megatron-LM, which is ATP-1 without; IC1
    with the rates of 5.3, ATP-4."""
    hidden, slow = ATP_MODELS[name], slowness(name)
    if interconnect == "IC1":
        (one, rates1), (four, rates4) = IC1.items()
        megatron, best = atp_reduced(hidden, one, rates1), atp_reduced(hidden, four, rates4)
    else:
        megatron = best = atp_reduced(hidden, (GPUS, 1), (IC3, 0.0))
    chunked = min(atp_layer(hidden, best, slow, chunks=c) for c in (1, 2, 4))
    return atp_layer(hidden, megatron, slow) / chunked - 1
