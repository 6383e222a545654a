"""Timeline: when each instruction of a program runs, and what of its communication hides behind computation.

Every rank runs the same program on equal shares, so one rank is simulated for all. It has a stream for its own
operators, in the program's order, and one for each mesh axis, on which collectives follow each other. A collective
starts when the program comes to it and the axis is free; a `collective.wait` stands still until it has ended. Operators
take what their rules count, on local shapes, as in the search; collectives what their links do (`collectives`), and
longer while another axis uses the same links, operators while a collective takes a part of what they run on
(`simulator`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from autopar.cluster.collectives import loads, price
from autopar.cluster.machine import Cluster, Device, operator_key
from autopar.ir.graph import TensorMeta
from autopar.ir.program import Instruction, Program
from autopar.ops import Call, rule_of
from autopar.ops.emit import call_of
from autopar.ops.registry import VIEWS

from . import liveness
from .simulator import Resource, Span, Task, simulate

COMPUTE = "compute"
"""The stream of a rank's own operators; the others have the names of mesh axes."""

MEMORY = "memory"
"""What operators and collectives share, where a device's `memory_bytes_per_link_byte` is not 0."""

PROCESSOR = "processor"
"""What operators need all of, and collectives a part, where a level's `compute_share` is not 0."""

COPIES = frozenset({"aten.contiguous.default", "aten.reshape.default"})
"""Views that lay out anew a value that does not lie in order."""

LATEST = 2
"""Timelines that `Known` keeps."""

FREE = COPIES | set(VIEWS)
"""Views that the search does not see: their time is that of the operators around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One instruction on one stream; a collective stands on the rank's own, too, while the rank is busy with its start,
    where that was measured. `alone_seconds` is what it takes if nothing else uses the same links or memory.
    `backward` says in which half of the step."""

    name: str
    op: str
    stream: str
    start_seconds: float
    end_seconds: float
    alone_seconds: float
    bytes: int
    module: str
    backward: bool

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    @property
    def label(self) -> str:
        return f"{self.op} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The rank stands still for a collective, or for those before it on the stream of its axis."""

    label: str
    stream: str
    start_seconds: float
    end_seconds: float
    backward: bool

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """All collectives of a kind on a mesh axis: what they took, and what of it the rank stood still for."""

    kind: str
    axis: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One forward and backward of one rank, without the optimizer. `peak_seconds` is what its arithmetic would take at
    the device's peak."""

    axes: tuple[str, ...]
    events: tuple[Event, ...]
    stalls: tuple[Stall, ...] = ()
    peak_seconds: float = 0.0

    @cached_property
    def seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)

    def busy_seconds(self, stream: str) -> float:
        return math.fsum(event.seconds for event in self.events if event.stream == stream)

    @property
    def communication_seconds(self) -> float:
        """Of all axes, each collective as if it were alone on its links."""
        return math.fsum(event.alone_seconds for event in self.events if event.stream != COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        """What the rank stands still for."""
        return max(0.0, self.seconds - self.busy_seconds(COMPUTE))

    @property
    def utilization(self) -> float:
        """The part of the device's peak that the step reaches."""
        return self.peak_seconds / self.seconds if self.seconds else 0.0

    @cached_property
    def communication(self) -> tuple[Communication, ...]:
        """By kind and axis, the longest first. What a rank stands still for counts to the collective that is under way
        on the axis that it waits for; the parts add up to `exposed_seconds`."""
        totals: dict[tuple[str, str], list[float]] = {}
        exposed = covered(self.stalls, [event for event in self.events if event.stream != COMPUTE])
        for event, stood in exposed:
            total = totals.setdefault((event.op.removeprefix("collective."), event.stream), [0, 0, 0.0, 0.0])
            for i, more in enumerate((1, event.bytes, event.seconds, stood)):
                total[i] += more
        found = (
            Communication(kind=k, axis=a, count=int(n), bytes=int(size), seconds=seconds, exposed_seconds=stood)
            for (k, a), (n, size, seconds, stood) in totals.items()
        )
        return tuple(sorted(found, key=lambda row: -row.seconds))

    def to_chrome(self) -> dict[str, Any]:
        """The trace that chrome://tracing and Perfetto open: microseconds, a thread for each stream."""
        threads = {stream: number for number, stream in enumerate((COMPUTE, *self.axes))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
            for stream, number in threads.items()
        ]
        spans = [
            {
                "ph": "X",
                "name": event.label,
                "cat": "backward" if event.backward else "forward",
                "pid": 0,
                "tid": threads[event.stream],
                "ts": event.start_seconds * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"module": event.module, "bytes": event.bytes, "alone": event.alone_seconds * 1e6},
            }
            for event in self.events
        ]
        waits = [
            {
                "ph": "X",
                "name": stall.label,
                "cat": "backward" if stall.backward else "forward",
                "pid": 0,
                "tid": threads[COMPUTE],
                "ts": stall.start_seconds * 1e6,
                "dur": stall.seconds * 1e6,
                "args": {"axis": stall.stream},
            }
            for stall in self.stalls
        ]
        return {"traceEvents": names + spans + waits, "displayTimeUnit": "ms"}


def covered(stalls: tuple[Stall, ...], events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with the seconds of stalls on its stream that lie within it."""
    waiting: dict[str, list[Stall]] = {}
    for stall in stalls:
        waiting.setdefault(stall.stream, []).append(stall)
    at = dict.fromkeys(waiting, 0)
    for event in events:  # of one stream, both follow each other
        found, stream = 0.0, event.stream
        own = waiting.get(stream, [])
        while at.get(stream, 0) < len(own):
            stall = own[at[stream]]
            if stall.start_seconds >= event.end_seconds:
                break
            start, end = max(stall.start_seconds, event.start_seconds), min(stall.end_seconds, event.end_seconds)
            found += max(0.0, end - start)
            if stall.end_seconds > event.end_seconds:
                break
            at[stream] += 1
        yield event, found


@dataclass(frozen=True, slots=True)
class Known:
    """What operators cost and what they make, for timelines of many programs of one device that are much alike."""

    costs: dict[tuple[liveness.Results, tuple[bool, ...]], _Cost] = field(default_factory=dict)
    """By what an operator makes of its operands, and which of its results are wanted."""
    made: liveness.Known = field(default_factory=liveness.Known)
    latest: list[tuple[Program, Cluster, Timeline]] = field(default_factory=list)
    """Of the programs that were looked at last: passes look at the same one, one after the other."""


def timeline(program: Program, cluster: Cluster, known: Known | None = None) -> Timeline:
    """One step of `program` on a cluster; `known` is what earlier timelines on the same device found out. Raises
    ValueError where the mesh does not fit the cluster."""
    known = known or Known()
    for other, priced, found in known.latest:
        if other is program and priced is cluster:
            return found
    made = _Writer(program, cluster, known).timeline()
    known.latest[:] = [(program, cluster, made), *known.latest[: LATEST - 1]]
    return made


def alone_seconds(program: Program, cluster: Cluster, known: Known | None = None) -> dict[str, float]:
    """What each operator and each collective takes if nothing else runs, by its first result. Raises ValueError as
    `timeline`."""
    writer = _Writer(program, cluster, known or Known())
    writer.write()
    return {
        name: writer.tasks[task].seconds
        for task, instruction, _ in writer.order
        if (name := _first(instruction)) and instruction.op != "collective.wait"
    }


def _first(instruction: Instruction) -> str:
    """The name of the first result that has one."""
    return next((name for name in instruction.outputs if name), "")


class _Issued(NamedTuple):
    """A task's instruction, or a wait for one (then `task` is what it waits for)."""

    task: int
    instruction: Instruction
    backward: bool


class _Writer:
    """A program as tasks."""

    def __init__(self, program: Program, cluster: Cluster, known: Known) -> None:
        self.program, self.device = program, cluster.device
        self.links = cluster.links(program.mesh)
        self.shares_processor = any(link.compute_share for link in self.links)
        self.local = _Local(program, cluster.device, known)
        self.tasks: list[Task] = []
        self.order: list[_Issued] = []
        """What the rank comes to, one after the other."""
        self.started: dict[str, int] = {}
        """A collective's result -> its task."""
        self.barrier: tuple[int, ...] = ()
        """What has to end before the rank goes on."""
        self.bytes: list[int] = []
        self.peak_seconds = 0.0
        self._priced: dict[tuple[str, int, int], Task] = {}

    def timeline(self) -> Timeline:
        self.write()
        spans = simulate(self.tasks)
        return Timeline(
            axes=self.program.axes,
            events=tuple(self._events(spans)),
            stalls=tuple(self._stalls(spans)),
            peak_seconds=self.peak_seconds,
        )

    def write(self) -> None:
        """The tasks, in the order in which the rank comes to them."""
        for backward, instruction in _instructions(self.program):
            if instruction.op == "collective.wait":
                self.local.pass_by(instruction)
                awaited = self.started.get(instruction.inputs[0])
                if awaited is not None:
                    self.barrier = (*self.barrier, awaited)
                    self.order.append(_Issued(awaited, instruction, backward))
            elif instruction.collective:
                self.local.pass_by(instruction)
                if starting := self.local.starting(instruction):
                    task = Task(stream=COMPUTE, after=self.barrier, fixed_seconds=starting)
                    self._add(instruction, task, 0, backward)
                    self.barrier = (len(self.tasks) - 1,)
                self.started[instruction.outputs[0]] = len(self.tasks)
                self._add(instruction, self._collective(instruction), self._sent(instruction), backward)
            else:
                cost = self.local.cost(instruction)
                self.peak_seconds += cost.peak_seconds
                if cost.seconds:
                    self._add(instruction, self._operator(cost), cost.bytes, backward)
                    self.barrier = (len(self.tasks) - 1,)

    def _add(self, instruction: Instruction, task: Task, size: int, backward: bool) -> None:
        self.order.append(_Issued(len(self.tasks), instruction, backward))
        self.tasks.append(task)
        self.bytes.append(size)

    def _sent(self, instruction: Instruction) -> int:
        metas = self.program.metas
        return max(metas[name].bytes for name in (*instruction.inputs, *instruction.outputs))

    def _collective(self, instruction: Instruction) -> Task:
        axis, kind = instruction.args[-1], instruction.collective
        assert kind is not None
        key = (kind, axis, self._sent(instruction))
        if key not in self._priced:
            self._priced[key] = self._priced_task(*key)
        priced = self._priced[key]
        return Task(
            stream=priced.stream,
            after=self.barrier,
            fixed_seconds=priced.fixed_seconds,
            moving_seconds=priced.moving_seconds,
            least_seconds=priced.least_seconds,
            uses=priced.uses,
        )

    def _priced_task(self, kind: str, axis: int, size: int) -> Task:
        link, stream = self.links[axis], self.program.axes[axis]
        if link.ranks == 1:
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

    def _operator(self, cost: _Cost) -> Task:
        uses: tuple[tuple[Resource, float], ...] = ((PROCESSOR, 1.0),) if self.shares_processor else ()
        if self.device.memory_bytes_per_link_byte and cost.memory:
            uses += ((MEMORY, cost.memory),)
        if not uses:
            return Task(stream=COMPUTE, after=self.barrier, fixed_seconds=cost.seconds)
        fixed = min(cost.seconds, self.device.seconds_per_op)
        return Task(
            stream=COMPUTE,
            after=self.barrier,
            fixed_seconds=fixed,
            moving_seconds=cost.seconds - fixed,
            uses=uses,
        )

    def _events(self, spans: list[Span]) -> Iterator[Event]:
        for task, instruction, backward in self.order:
            if instruction.op != "collective.wait":
                yield Event(
                    name=_first(instruction),
                    op=instruction.op,
                    stream=self.tasks[task].stream,
                    start_seconds=spans[task].start_seconds,
                    end_seconds=spans[task].end_seconds,
                    alone_seconds=self.tasks[task].seconds,
                    bytes=self.bytes[task],
                    module=instruction.module,
                    backward=backward,
                )

    def _stalls(self, spans: list[Span]) -> Iterator[Stall]:
        """Waits for what has not ended when the rank comes to it; at last for what nobody waits for."""
        now, last = 0.0, None
        for issued in self.order:
            end, stream = spans[issued.task].end_seconds, self.tasks[issued.task].stream
            if issued.instruction.op == "collective.wait":
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


def _instructions(program: Program) -> Iterator[tuple[bool, Instruction]]:
    for backward, instructions in ((False, program.forward), (True, program.backward)):
        for instruction in instructions:
            yield backward, instruction


class _Cost(NamedTuple):
    """Of one operator: seconds, the part of the memory's rate that it uses meanwhile, the bytes that it reads and
    writes, and the seconds of its arithmetic at the device's peak."""

    seconds: float
    memory: float
    bytes: int
    peak_seconds: float


def key_of(instruction: Instruction, metas: Mapping[str, TensorMeta]) -> str:
    """The `operator_key` of an instruction of a program."""
    made = [metas[name] for name in instruction.outputs if name]
    return operator_key(instruction.op, [metas[name] for name in instruction.inputs], made)


class _Local:
    """What a rank's own operators cost: a roofline of arithmetic and memory. What only makes a view of memory that is
    there already moves nothing (`liveness.Memory`)."""

    def __init__(self, program: Program, device: Device, known: Known) -> None:
        self.program, self.metas, self.device = program, program.metas, device
        self.read = {name for _, instruction in _instructions(program) for name in instruction.inputs}
        self.memory = liveness.Memory(known=known.made)
        made = {name for _, instruction in _instructions(program) for name in instruction.outputs}
        for name in self.read - made:
            self.memory.give(name, self.metas[name])
        self.read.update(program.saved, (o.name for o in program.outputs if o.name is not None))
        self._known = known.costs

    def pass_by(self, instruction: Instruction) -> None:
        """A collective makes memory of its own."""
        for name in instruction.outputs:
            self.memory.give(name, self.metas[name])

    def starting(self, instruction: Instruction) -> float:
        """Seconds that the rank itself is busy with the start of a collective, where that was measured."""
        return self._measured(instruction) or 0.0

    def _measured(self, instruction: Instruction) -> float | None:
        operators = self.device.operators
        return None if operators is None else operators.seconds.get(key_of(instruction, self.metas))

    def cost(self, instruction: Instruction) -> _Cost:
        results, outputs = self.memory.local(instruction), instruction.outputs
        # an op may be told not to make what nobody reads
        wanted = outputs if len(outputs) == 1 else self.read.intersection(outputs) or outputs
        key = (results, tuple([bool(name) and name in wanted for name in outputs]))
        if (found := self._known.get(key)) is None:
            made = tuple(self.metas[name] if name and name in wanted else None for name in outputs)
            call = replace(call_of(instruction, self.metas), outputs=made)
            found = self._known[key] = self._cost(instruction, results.copies, call)
        return found

    def _cost(self, instruction: Instruction, copies: bool, call: Call) -> _Cost:
        known, ratio = self._measured(instruction), self.device.ratio(instruction.op)
        seconds_per_op = self.device.seconds_per_op if known is None else known
        size = sum(self.metas[name].bytes for name in (*instruction.inputs, *instruction.outputs) if name)
        if not copies:
            return _Cost(0.0 if instruction.op in FREE and known is None else seconds_per_op, 0.0, size, 0.0)
        arithmetic = peak = 0.0
        if instruction.op not in COPIES and (rule := rule_of(call)) is not None:
            if rule.moves_nothing:
                return _Cost(seconds_per_op, 0.0, size, 0.0)
            dtypes = [meta.dtype for meta in (*call.inputs, *call.outputs) if meta is not None]
            if dtypes and rule.flops:
                arithmetic = self.device.compute_seconds(rule.flops, dtypes[0])
                peak = rule.flops / self.device.peak_flops(dtypes[0])
        moved = self.device.moving_seconds(size)
        longest = max(arithmetic, moved)
        seconds = ratio * (seconds_per_op + longest) if known is None else known
        return _Cost(seconds, moved / longest if longest else 0.0, size, peak)
