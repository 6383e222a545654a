"""MeshSlice's seven ways of multiplying matrices on a mesh of chips, as tasks of the simulator; and five of them as the
programs that autopar's lowerings make.

A chip has a stream for products and one for each direction of the mesh; links of the two directions are apart. What is
overlapped, and what is not, is as in the paper's Figure 4 and section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dataflows import Dataflow, forward_product
from paper_figures import PEAK, PRODUCTS, Product, cluster, dataflows, largest

from autopar.cluster.links import Link
from autopar.cluster.loads import loads, prices
from autopar.cluster.machine import Cluster, Device, Level
from autopar.cost.simulator import Task, scheduled
from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.slice import SLICING
from benchmarks.rivals import RIVALS

FLOPS = 245.7e12
BYTES_PER_SECOND = 74.2e9
SYNC = 11.8e-6
LAUNCH = {"all_gather": 15.9e-6, "reduce_scatter": 31.8e-6}
"""The paper prints no rates of its simulator. These four figures were fitted to its text (issue 6): FLOP/s of a chip,
bytes/s both ways around a ring, seconds to synchronise two chips, and to launch a collective. A message from chip to
chip is launched as an all-gather is."""

CHIP = Device(
    name="a chip",
    flops_per_second={"bfloat16": FLOPS},
    memory_bytes=1e12,
    memory_bytes_per_second=1e30,
    seconds_per_op=0.0,
)

SLICES = tuple(range(1, 65))
BLOCK = 8
"""Columns that are sliced together (3.1.2)."""

PACKETS = tuple(2**k for k in range(13))
"""Into so many parts a broadcast may be cut (2.3.3); the best is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A matrix that travels: whole bytes, along which direction, gathered as an operand or scattered as a result."""

    kind: str
    axis: int
    bytes: float


def flows(product: Product, rows: int, columns: int) -> list[Flow]:
    """The two matrices of a product that do not stay, with the bytes of one chip's row or column of chips (2.3.1)."""
    flow, m, k, n = product
    left, right, result = 2 * m * k / rows, 2 * k * n / columns, 2 * m * n
    return {
        "os": [Flow(kind="all_gather", axis=1, bytes=left), Flow(kind="all_gather", axis=0, bytes=right)],
        "ls": [
            Flow(kind="all_gather", axis=0, bytes=right),
            Flow(kind="reduce_scatter", axis=1, bytes=result / rows),
        ],
        "rs": [
            Flow(kind="all_gather", axis=1, bytes=left),
            Flow(kind="reduce_scatter", axis=0, bytes=result / columns),
        ],
    }[flow]


@cache
def cluster_of(kind: str, rows: int, columns: int) -> Cluster:
    """Rings of their own down and across; what is no product takes no time."""
    levels = (
        Level(
            name=name,
            size=size,
            topology="ring",
            bytes_per_second=BYTES_PER_SECOND / 2 * count,
            group_bytes_per_second=BYTES_PER_SECOND * count,
            latency_seconds=SYNC,
            launch_seconds=LAUNCH[kind],
        )
        for name, size, count in (("down", rows, columns), ("across", columns, 1))
    )
    return replace(cluster(*levels), device=CHIP)


def torus(kind: str, rows: int, columns: int) -> tuple[Link, ...]:
    return cluster_of(kind, rows, columns).links((rows, columns))


class Schedule:
    """Tasks, one after the other as they are issued."""

    def __init__(self, rows: int, columns: int) -> None:
        self.shape = (rows, columns)
        self.tasks: list[Task] = []

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def multiply(self, flops: float, *after: int) -> int:
        return self.add(Task(stream="compute", after=after, fixed_seconds=flops / FLOPS))

    def collective(self, flow: Flow, size: float, *after: int) -> tuple[int, ...]:
        """An all-gather or a reduce-scatter of so many bytes as one partial collective; none along one chip."""
        link = torus(flow.kind, *self.shape)[flow.axis]
        if link.ranks == 1:
            return after
        ring = prices(flow.kind, size, link)["ring"]
        uses = loads(flow.kind, "ring", link)
        return (
            self.add(
                Task(
                    stream=f"axis {flow.axis}",
                    after=after,
                    fixed_seconds=ring.fixed,
                    moving_seconds=ring.moving,
                    uses=uses,
                )
            ),
        )

    def message(self, axis: int, size: float, *after: int, hops: int = 1, both_ways: bool = True) -> int:
        """From each chip to its neighbour, or `hops` further; halves of it in both directions, or all in one."""
        rate = BYTES_PER_SECOND if both_ways else BYTES_PER_SECOND / 2
        fixed = LAUNCH["all_gather"] + hops * SYNC
        return self.add(
            Task(stream=f"axis {axis}", after=after, fixed_seconds=fixed, moving_seconds=hops * size / rate)
        )

    def broadcast(self, flow: Flow, size: float, *after: int) -> tuple[int, ...]:
        """Of one chip's bytes around a ring in packets, or the reduction of all chips' onto one: P + D - 1 stages, each
        of which synchronises (2.3.3)."""
        chips = self.shape[flow.axis]
        if chips == 1:
            return after
        stages = {packets: chips + packets - 1 for packets in PACKETS}
        fixed, moving = min(
            ((n * SYNC, n * size / packets / BYTES_PER_SECOND) for packets, n in stages.items()), key=sum
        )
        launch = LAUNCH[flow.kind]
        return (
            self.add(
                Task(stream=f"axis {flow.axis}", after=after, fixed_seconds=launch + fixed, moving_seconds=moving)
            ),
        )

    @property
    def seconds(self) -> float:
        return max((span.end_seconds for span in scheduled(self.tasks)), default=0.0)


Algorithm = Callable[[Product, int, int, int], Schedule]
"""(product, rows, columns, slices) -> what one chip does."""


def flops_of(product: Product) -> float:
    return 2 * product[1] * product[2] * product[3]


def meshslice(product: Product, rows: int, columns: int, slices: int) -> Schedule:
    """Figure 5: partial collectives of both directions under partial products. With one slice it is Collective."""
    made = Schedule(rows, columns)
    flops = flops_of(product) / (rows * columns)
    travelling = flows(product, rows, columns)
    operands = [f for f in travelling if f.kind == "all_gather"]
    results = [f for f in travelling if f.kind == "reduce_scatter"]
    gathered = []
    for _ in range(slices):
        gathered.append([i for f in operands for i in made.collective(f, f.bytes / slices)])
    for slice_ in gathered:
        done = made.multiply(flops / slices, *slice_)
        for f in results:
            made.collective(f, f.bytes / slices, done)
    return made


def collective(product: Product, rows: int, columns: int, slices: int) -> Schedule:
    return meshslice(product, rows, columns, 1)


def wang(product: Product, rows: int, columns: int, slices: int) -> Schedule:
    """4.2: messages of the direction that is better overlapped, under as many products as MeshSlice has slices; the
    other direction is one collective before or after all of them."""
    travelling = flows(product, rows, columns)
    return min((_wang(product, rows, columns, slices, *pair) for pair in (travelling, travelling[::-1])), key=_seconds)


def _seconds(schedule: Schedule) -> float:
    return schedule.seconds


def _wang(product: Product, rows: int, columns: int, slices: int, cut: Flow, whole: Flow) -> Schedule:
    made = Schedule(rows, columns)
    flops = flops_of(product) / (rows * columns)
    first = made.collective(whole, whole.bytes) if whole.kind == "all_gather" else ()
    last = decomposed(made, cut, flops, slices, first)
    if whole.kind == "reduce_scatter":
        made.collective(whole, whole.bytes, last)
    return made


def decomposed(made: Schedule, cut: Flow, flops: float, slices: int, before: tuple[int, ...] = ()) -> int:
    """A collective as messages from neighbour to neighbour, each under a product, or several under one. An operand's
    own part is there; a result's own part is the last that is multiplied."""
    chips = made.shape[cut.axis]
    shard = cut.bytes / chips
    iterations = rolled(chips, slices)
    group = chips // iterations
    sent: tuple[int, ...] = ()
    arrived: list[tuple[int, ...]] = []
    done = -1
    if cut.kind == "all_gather":
        for step in range(chips):
            if step:
                sent = (made.message(cut.axis, shard, *sent),)
            arrived.append(sent)
        for i in range(iterations):
            done = made.multiply(flops / iterations, *before, *arrived[(i + 1) * group - 1])
        return done
    for i in range(iterations):
        done = made.multiply(flops / iterations, *before)
        for _ in range(group - (i == iterations - 1)):
            sent = (made.message(cut.axis, shard, done, *sent),)
    return sent[0] if sent else done


def rolled(steps: int, slices: int) -> int:
    """Iterations of a loop over `steps` that is unrolled: as many as MeshSlice has slices, or what is next below."""
    return max(n for n in range(1, min(steps, slices) + 1) if steps % n == 0)


def summa(product: Product, rows: int, columns: int, slices: int) -> Schedule:
    """2.3.3: P broadcasts or reductions a direction, P a common multiple of rows and columns, under as many products as
    MeshSlice has slices."""
    made = Schedule(rows, columns)
    flops = flops_of(product) / (rows * columns)
    travelling = flows(product, rows, columns)
    panels = math.lcm(rows, columns)
    iterations = rolled(panels, slices)
    group = panels // iterations
    arrived = []
    for _ in range(iterations):
        arrived.append(
            [
                i
                for f in travelling
                if f.kind == "all_gather"
                for _ in range(group)
                for i in made.broadcast(f, f.bytes / panels)
            ]
        )
    for slice_ in arrived:
        done = made.multiply(flops / iterations, *slice_)
        for f in travelling:
            if f.kind == "reduce_scatter":
                for _ in range(group):
                    made.broadcast(f, f.bytes / panels, done)
    return made


def cannon(product: Product, rows: int, columns: int, slices: int) -> Schedule:
    """2.3.2: both matrices that travel are skewed, up to half of the ring away, then shifted P - 1 times in one
    direction under products. A result is put straight at the end."""
    if rows != columns:
        raise ValueError(f"Cannon's algorithm needs a square mesh, not {rows} x {columns}")
    made = Schedule(rows, columns)
    flops = flops_of(product) / (rows * columns)
    travelling = flows(product, rows, columns)
    here = [
        made.message(f.axis, f.bytes / rows, hops=rows // 2, both_ways=False)
        for f in travelling
        if f.kind == "all_gather"
    ]
    moved: tuple[int, ...] = tuple(here)
    for step in range(rows):
        done = made.multiply(flops / rows, *moved)
        if step < rows - 1:
            operands = tuple(
                made.message(f.axis, f.bytes / rows, both_ways=False) for f in travelling if f.kind == "all_gather"
            )
            for f in travelling:
                if f.kind == "reduce_scatter":
                    made.message(f.axis, f.bytes / rows, done, both_ways=False)
            moved = operands
    for f in travelling:
        if f.kind == "reduce_scatter":
            made.message(f.axis, f.bytes / rows, done, hops=rows // 2, both_ways=False)
    return made


ALGORITHMS: Mapping[str, Algorithm] = {
    "MeshSlice": meshslice,
    "Wang": wang,
    "Collective": collective,
    "SUMMA": summa,
    "Cannon": cannon,
}
"""Of two dimensions. Those of one are `one_dimensional`."""


def slices_of(product: Product, rows: int, columns: int) -> list[int]:
    """S that divide what is summed over, or the dim that is not, in blocks (3.1.2)."""
    flow, m, k, n = product
    inner = {"os": k, "ls": n, "rs": m}[flow]
    return [s for s in SLICES if inner % (s * BLOCK * math.lcm(rows, columns)) == 0]


def closed_form(product: Product, rows: int, columns: int, slices: int) -> float:
    """3.2.2: prologue + (S - 1) x steady state + epilogue, of MeshSlice."""
    computing = flops_of(product) / (rows * columns) / FLOPS / slices
    sent = []
    for flow in flows(product, rows, columns):
        link = torus(flow.kind, rows, columns)[flow.axis]
        sent.append(prices(flow.kind, flow.bytes / slices, link)["ring"].seconds() if link.ranks > 1 else 0.0)
    around = max(sent) if product[0] == "os" else sum(sent)
    return around + (slices - 1) * max(*sent, computing) + computing


@cache
def best_slices(product: Product, rows: int, columns: int) -> int:
    """The autotuner's S (3.2.2)."""
    return min(slices_of(product, rows, columns), key=lambda s: (closed_form(product, rows, columns, s), s))


def products(hidden: int, tokens: int) -> Iterator[Product]:
    """Of the four FC layers of a block, forward and backward, with the largest matrix in place (3.2.1)."""
    for k, n, _ in PRODUCTS:
        shape = (tokens, k * hidden, n * hidden)
        yield from dataflows(largest(*shape), *shape)


DATAFLOW: Mapping[str, Dataflow] = {"os": "output", "ls": "left", "rs": "right"}


def program_of(name: str, product: Product, rows: int, columns: int) -> Program:
    """What the lowering of that name makes of a product; where it cannot be taken, Collective."""
    flow, m, k, n = product
    plain = forward_product(DATAFLOW[flow], (rows, columns), m, k, n)
    if name == "Collective":
        return bucket(plain)  # as every program is: both gathers start before one is waited for
    if name == "MeshSlice":
        return SLICING.everywhere(plain, best_slices(product, rows, columns))
    return RIVALS[name.lower()](plain)


@cache
def seconds_of_program(name: str, product: Product, rows: int, columns: int) -> float:
    """Each collective is launched as an all-gather is."""
    return timeline(program_of(name, product, rows, columns), cluster_of("all_gather", rows, columns)).seconds


def reached(name: str, hidden: int, chips: int) -> tuple[float, tuple[int, int]]:
    """Utilization of the peak by the FC layers of a block under weak scaling (5.1.1: half as many sequences as chips),
    and the mesh, of all that there are the best for the algorithm. (0, (0, 0)) where there is none."""
    tokens = chips // 2 * 2048
    flops = 6 * tokens * 12 * hidden**2
    if name in ("1D TP", "FSDP"):
        return flops / chips / PEAK / one_dimensional(name, hidden, chips, tokens), (chips, 1)
    found = (0.0, (0, 0))
    for rows in (2**k for k in range(chips.bit_length())):
        columns = chips // rows
        if name == "Cannon" and rows != columns:
            continue
        seconds = sum(seconds_of(name, product, rows, columns) for product in products(hidden, tokens))
        found = max(found, (flops / chips / PEAK / seconds, (rows, columns)))
    return found


@cache
def seconds_of(name: str, product: Product, rows: int, columns: int) -> float:
    return ALGORITHMS[name](product, rows, columns, best_slices(product, rows, columns)).seconds


def one_dimensional(name: str, hidden: int, chips: int, tokens: int) -> float:
    """4.3: on a ring of all chips, with collectives as messages under products. Sequence parallelism gathers the input
    of a product that is split by columns (again for the gradient of its weight) and scatters that of its input; of one
    that is split by rows, it scatters the result and gathers its gradient, once for both products of backward. FSDP
    gathers weights, again in backward, and scatters their gradients."""
    total = 0.0
    for number, (k, n, _) in enumerate(PRODUCTS):
        m, k, n = tokens, k * hidden, n * hidden
        if name == "FSDP":
            sent: Sequence[tuple[str, float] | None] = [
                ("all_gather", 2 * k * n), ("all_gather", 2 * k * n), ("reduce_scatter", 2 * k * n)
            ]  # fmt: skip
        elif number % 2 == 0:
            sent = [("all_gather", 2 * m * k), ("reduce_scatter", 2 * m * k), ("all_gather", 2 * m * k)]
        else:
            sent = [("reduce_scatter", 2 * m * n), ("all_gather", 2 * m * n), None]
        for what in sent:
            made = Schedule(chips, 1)
            flops = 2.0 * m * k * n / chips
            if what is None:
                made.multiply(flops)
            else:
                decomposed(made, Flow(kind=what[0], axis=0, bytes=what[1]), flops, chips)
            total += made.seconds
    return total
