"""The program of a rank on streams: each instruction as a task, and the timeline that simulating them gives.

A rank has a stream for its own operators, in the order of the program, one for the collectives of each mesh axis, and
one for copies to the host. A collective or a copy starts when the program reaches it and its stream is free; a
`collective.wait` stalls until it has ended. Operators take what the search prices (`roofline`), collectives what their
links take (`collectives`). A collective takes longer while another axis uses the same links, an operator while a
collective occupies part of the device (`simulator`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cluster.loads import loads, price
from autopar.cluster.machine import Cluster
from autopar.ir.graph import WAIT, Node
from autopar.ir.program import Program
from autopar.ops.host import HOST_COPIES

from . import liveness
from .roofline import Cost, CostKey, LocalOperators
from .simulator import Resource, Task, TaskSpan, scheduled
from .timeline import COMPUTE, HOST, Event, Stall, Timeline

MEMORY = "memory"
"""What operators and collectives share, where a device's `memory_bytes_per_link_byte` is not 0."""

PROCESSOR = "processor"
"""What operators need all of, and collectives a part, where a level's `compute_share` is not 0."""

LATEST = 2
"""Timelines that `TimelineCache` keeps."""


@dataclass(frozen=True, slots=True)
class TimelineCache:
    """Costs of operators and placements of results, shared by timelines of similar programs on one device."""

    costs: dict[CostKey, Cost] = field(default_factory=dict)
    placements: liveness.PlacementCache = field(default_factory=liveness.PlacementCache)
    latest: list[tuple[Program, Cluster, Timeline]] = field(default_factory=list)
    """Of the most recent programs: consecutive passes ask for the same one."""


def timeline(program: Program, cluster: Cluster, cache: TimelineCache | None = None) -> Timeline:
    """One step of `program` on a cluster; `cache` is shared by timelines on one device. Raises ValueError where the
    mesh does not fit the cluster."""
    cache = cache or TimelineCache()
    for other, on, cached in cache.latest:
        if other is program and on is cluster:
            return cached
    simulated = _Streams(program, cluster, cache).timeline()
    cache.latest[:] = [(program, cluster, simulated), *cache.latest[: LATEST - 1]]
    return simulated


def alone_seconds(program: Program, cluster: Cluster, cache: TimelineCache | None = None) -> dict[str, float]:
    """What each operator and each collective takes if nothing else runs, by its first result. Raises ValueError as
    `timeline`."""
    streams = _Streams(program, cluster, cache or TimelineCache())
    return {node.name: seconds for node in program.nodes if (seconds := streams.alone(node)) and node.name}


class _Issued(NamedTuple):
    """A task's instruction, or a wait for one (then `task` is what it waits for)."""

    task: int
    instruction: Node
    backward: bool


class _Streams:
    """A program as tasks."""

    def __init__(self, program: Program, cluster: Cluster, cache: TimelineCache) -> None:
        self.program, self.device = program, cluster.device
        self.links = cluster.links(program.mesh)
        self.shares_processor = any(link.compute_share for link in self.links)
        self.local = LocalOperators(program, cluster.device, cache.costs, cache.placements)
        self.tasks: list[Task] = []
        self.order: list[_Issued] = []
        """What the rank comes to, one after the other."""
        self.started: dict[str, int] = {}
        """A collective's result -> its task."""
        self.barrier: tuple[int, ...] = ()
        """What has to end before the rank goes on."""
        self.bytes: list[int] = []
        self.peak_seconds = self.unfused_seconds = 0.0
        self._priced: dict[tuple[str, int, int], Task] = {}

    def timeline(self) -> Timeline:
        self.write()
        spans = scheduled(self.tasks)
        return Timeline(
            axes=self.program.axes + (HOST,) * any(task.stream == HOST for task in self.tasks),
            events=tuple(self._events(spans)),
            stalls=tuple(self._stalls(spans)),
            peak_seconds=self.peak_seconds,
            unfused_seconds=self.unfused_seconds,
        )

    def write(self) -> None:
        """The tasks, in the order in which the rank comes to them."""
        for instruction in self.program.forward:
            self._issue(instruction, backward=False)
        for instruction in self.program.backward:
            self._issue(instruction, backward=True)

    def alone(self, instruction: Node) -> float:
        """What an instruction takes if nothing else runs."""
        task = self._beside(instruction)
        if task is None and instruction.op != WAIT:
            return self.local.cost(instruction).seconds
        self.local.pass_by(instruction)
        return task.seconds if task else 0.0

    def _issue(self, instruction: Node, *, backward: bool) -> None:
        if instruction.op == WAIT:
            self.local.pass_by(instruction)
            awaited = self.started.get(instruction.inputs[0])
            if awaited is not None:
                self.barrier = (*self.barrier, awaited)
                self.order.append(_Issued(awaited, instruction, backward))
        elif (task := self._beside(instruction)) is not None:
            self.local.pass_by(instruction)
            if starting := self.local.starting(instruction):
                start = Task(stream=COMPUTE, after=self.barrier, fixed_seconds=starting)
                self._add(instruction, start, 0, backward)
                self.barrier = (len(self.tasks) - 1,)
            self.started[instruction.outputs[0]] = len(self.tasks)
            self._add(instruction, task._replace(after=self.barrier), self._sent(instruction), backward)
        else:
            cost = self.local.cost(instruction)
            self.peak_seconds += cost.peak_seconds
            self.unfused_seconds += cost.unfused_seconds
            if cost.seconds:
                self._add(instruction, self._operator(cost), cost.bytes, backward)
                self.barrier = (len(self.tasks) - 1,)

    def _add(self, instruction: Node, task: Task, size: int, backward: bool) -> None:
        self.order.append(_Issued(len(self.tasks), instruction, backward))
        self.tasks.append(task)
        self.bytes.append(size)

    def _sent(self, instruction: Node) -> int:
        metas = self.program.metas
        return max(metas[name].bytes for name in (*instruction.inputs, *instruction.outputs))

    def _beside(self, instruction: Node) -> Task | None:
        """What passes while the rank computes: a collective, or a copy to or from the host."""
        if instruction.op in HOST_COPIES:
            return Task(stream=HOST, fixed_seconds=self.device.host_seconds(self._sent(instruction)))
        if (kind := instruction.collective) is None:
            return None
        axis = instruction.args[-1]
        key = (kind, axis, self._sent(instruction))
        if key not in self._priced:
            self._priced[key] = self._priced_task(*key)
        return self._priced[key]

    def _priced_task(self, kind: str, axis: int, size: int) -> Task:
        link, stream = self.links[axis], self.program.axes[axis]
        if link.ranks == 1 or link.in_time:
            return Task(stream=stream)
        cheapest = price(kind, size, link)
        uses: dict[Resource, float] = dict(loads(kind, cheapest.algorithm, link))
        per_byte, memory = self.device.memory_bytes_per_link_byte, self.device.memory_bytes_per_second
        if per_byte and cheapest.moving:
            sent = (2 if kind == "all_reduce" else 1) * (link.ranks - 1) / link.ranks * size
            uses[MEMORY] = min(1.0, per_byte * sent / cheapest.moving / memory)
        if link.compute_share:
            uses[PROCESSOR] = link.compute_share
        return Task(
            stream=stream,
            fixed_seconds=cheapest.fixed * (1.0 - cheapest.overlap),
            moving_seconds=cheapest.moving,
            least_seconds=cheapest.fixed,
            uses=tuple(uses.items()),
        )

    def _operator(self, cost: Cost) -> Task:
        uses: tuple[tuple[Resource, float], ...] = ((PROCESSOR, 1.0),) if self.shares_processor else ()
        if self.device.memory_bytes_per_link_byte and cost.memory:
            uses += ((MEMORY, cost.memory),)
        if not uses:
            return Task(stream=COMPUTE, after=self.barrier, fixed_seconds=cost.seconds)
        fixed = min(cost.seconds, self.device.seconds_per_op)
        moving = cost.seconds - fixed
        return Task(stream=COMPUTE, after=self.barrier, fixed_seconds=fixed, moving_seconds=moving, uses=uses)

    def _events(self, spans: list[TaskSpan]) -> Iterator[Event]:
        for task, instruction, backward in self.order:
            if instruction.op != WAIT:
                yield Event(
                    name=instruction.name,
                    op=instruction.op,
                    stream=self.tasks[task].stream,
                    start_seconds=spans[task].start_seconds,
                    end_seconds=spans[task].end_seconds,
                    alone_seconds=self.tasks[task].seconds,
                    bytes=self.bytes[task],
                    module=instruction.module,
                    backward=backward,
                )

    def _stalls(self, spans: list[TaskSpan]) -> Iterator[Stall]:
        """Waits for what has not ended when the rank comes to it; at last for what nobody waits for."""
        now, last = 0.0, None
        for issued in self.order:
            end, stream = spans[issued.task].end_seconds, self.tasks[issued.task].stream
            if issued.instruction.op == WAIT:
                if end > now:
                    yield self._stall(issued, stream, now, end)
                now = max(now, end)
            elif stream == COMPUTE:
                now = end
            elif last is None or end >= spans[last.task].end_seconds:
                last = issued
        if last is not None and spans[last.task].end_seconds > now:
            yield self._stall(last, self.tasks[last.task].stream, now, spans[last.task].end_seconds)

    @staticmethod
    def _stall(issued: _Issued, stream: str, start: float, end: float) -> Stall:
        label, backward = issued.instruction.label, issued.backward
        return Stall(label=label, stream=stream, start_seconds=start, end_seconds=end, backward=backward)
