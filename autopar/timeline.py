"""Timeline: when each instruction of a program runs, and what of its communication hides behind computation.

Every rank runs the same program on equal shares, so one rank is simulated for all. It has a stream for its own
operators, in the program's order, and one for each mesh axis, on which collectives follow each other. A collective
starts when the program comes to it and the axis is free; a `collective.wait` stands still until it has ended. Operators
take what their rules count, on local shapes, as in the search; collectives what their links do (`collectives`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from .cluster import Cluster, Device
from .collectives import collective_seconds
from .graph import Node, Ref, overload
from .ops import Call, rule_of
from .ops.emit import on_meta
from .ops.registry import VIEWS
from .program import Instruction, Program

COMPUTE = "compute"
"""The stream of a rank's own operators; the others have the names of mesh axes."""

COPIES = frozenset({"aten.contiguous.default", "aten.reshape.default"})
"""Views that lay out anew a value that does not lie in order."""

FREE = COPIES | set(VIEWS)
"""Views that the search does not see: their time is that of the operators around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One instruction on one stream. `backward` says in which half of the step."""

    name: str
    op: str
    stream: str
    start_seconds: float
    end_seconds: float
    bytes: int
    module: str
    backward: bool

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One forward and backward of one rank, without the optimizer."""

    axes: tuple[str, ...]
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)

    def busy_seconds(self, stream: str) -> float:
        return math.fsum(event.seconds for event in self.events if event.stream == stream)

    @property
    def communication_seconds(self) -> float:
        """Of all axes; where two run at once, both count."""
        return math.fsum(map(self.busy_seconds, self.axes))

    @property
    def exposed_seconds(self) -> float:
        """What the rank stands still for."""
        return max(0.0, self.seconds - self.busy_seconds(COMPUTE))

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
                "name": event.op,
                "cat": "backward" if event.backward else "forward",
                "pid": 0,
                "tid": threads[event.stream],
                "ts": event.start_seconds * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"value": event.name, "module": event.module, "bytes": event.bytes},
            }
            for event in self.events
        ]
        return {"traceEvents": names + spans, "displayTimeUnit": "ms"}


def timeline(program: Program, cluster: Cluster) -> Timeline:
    """One step of `program` on a cluster. Raises ValueError where the mesh does not fit the cluster."""
    links = cluster.links(program.mesh)
    local = _Local(program, cluster.device)
    now = 0.0
    free = [0.0] * len(links)
    ends: dict[str, float] = {}
    events: list[Event] = []

    def add(instruction: Instruction, stream: str, start: float, end: float, size: int, backward: bool) -> None:
        events.append(
            Event(
                name=next((name for name in instruction.outputs if name), ""),
                op=instruction.op,
                stream=stream,
                start_seconds=start,
                end_seconds=end,
                bytes=size,
                module=instruction.module,
                backward=backward,
            )
        )

    for backward, instruction in _instructions(program):
        if kind := instruction.collective:
            axis = instruction.args[-1]
            size = max(program.metas[name].bytes for name in (*instruction.inputs, *instruction.outputs))
            start = max(now, free[axis])
            free[axis] = start + collective_seconds(kind, size, links[axis])
            ends[instruction.outputs[0]] = free[axis]
            add(instruction, program.axes[axis], start, free[axis], size, backward)
        elif instruction.op == "collective.wait":
            now = max(now, ends.get(instruction.inputs[0], 0.0))
        elif seconds := local.seconds(instruction):
            add(instruction, COMPUTE, now, now + seconds, local.bytes(instruction), backward)
            now += seconds
    return Timeline(axes=program.axes, events=tuple(events))


def _instructions(program: Program) -> Iterator[tuple[bool, Instruction]]:
    for backward, instructions in ((False, program.forward), (True, program.backward)):
        for instruction in instructions:
            yield backward, instruction


@cache
def _is_view(op: str) -> bool:
    """Whether its schema says that its results are, or may be, its operand seen in another way."""
    returned = [result.alias_info for result in overload(op)._schema.returns]  # type: ignore[attr-defined]
    return any(alias is not None and not alias.is_write for alias in returned)


class _Local:
    """Seconds of a rank's own operators: a roofline of arithmetic and memory."""

    def __init__(self, program: Program, device: Device) -> None:
        self.metas, self.device = program.metas, device
        self.read = {name for _, instruction in _instructions(program) for name in instruction.inputs}
        self.read.update(program.saved, (o.name for o in program.outputs if o.name is not None))
        self.strided: set[str] = set()
        """Values that do not lie in order: views that move dims, or parts."""
        self._known: dict[tuple[Any, ...], tuple[bool, float]] = {}
        self._orders: dict[tuple[Any, ...], tuple[bool, ...]] = {}

    def bytes(self, instruction: Instruction) -> int:
        return sum(self.metas[name].bytes for name in (*instruction.inputs, *instruction.outputs) if name)

    def seconds(self, instruction: Instruction) -> float:
        strided = not self.strided.isdisjoint(instruction.inputs)
        is_view, arithmetic = self._cost(instruction)
        if is_view and not (strided and instruction.op in COPIES):
            kept = (False,) * len(instruction.outputs) if strided else self._in_order(instruction)
            self.strided.update(name for name, fine in zip(instruction.outputs, kept, strict=True) if not fine)
            return 0.0 if instruction.op in FREE else self.device.seconds_per_op
        moved = self.bytes(instruction) / self.device.memory_bytes_per_second
        return self.device.seconds_per_op + max(arithmetic, moved)

    def _cost(self, instruction: Instruction) -> tuple[bool, float]:
        """Whether it is a view, and the seconds of its arithmetic."""
        metas = tuple(self.metas[name] for name in instruction.inputs)
        # an op may be told not to make what nobody reads
        wanted = self.read.intersection(instruction.outputs) or instruction.outputs
        made = tuple(self.metas[name] if name and name in wanted else None for name in instruction.outputs)
        key = (instruction.op, metas, made, instruction.args if instruction.kwargs else None)
        if key not in self._known:
            if _is_view(instruction.op):
                self._known[key] = True, 0.0
            else:
                node = Node(
                    op=instruction.op, args=instruction.args, kwargs=instruction.kwargs, outputs=instruction.outputs
                )
                rule = rule_of(Call(node, metas, made))
                dtypes = [meta.dtype for meta in (*metas, *made) if meta is not None]
                seconds = self.device.compute_seconds(rule.flops, dtypes[0]) if rule is not None and dtypes else 0.0
                self._known[key] = rule is not None and rule.moves_nothing, seconds
        return self._known[key]

    def _in_order(self, instruction: Instruction) -> tuple[bool, ...]:
        """Of each result of a view of what lies in order: whether it does, too."""
        metas = tuple(self.metas[name] for name in instruction.inputs)
        key = (instruction.op, str(instruction.args), metas)
        if key not in self._orders:

            def given(value: Any) -> Any:
                if isinstance(value, Ref):
                    return self.metas[value.name]
                return tuple(map(given, value)) if isinstance(value, tuple) else value

            named = tuple((name, given(value)) for name, value in instruction.kwargs)
            made = on_meta(instruction.op, tuple(map(given, instruction.args)), named)
            self._orders[key] = tuple(value is None or value.is_contiguous() for value in made)
        return self._orders[key]
