"""Timeline: when each instruction of a program runs, and what of its communication hides behind computation.

Every rank runs the same program on equal shares, so one rank stands for all. Its timeline has a stream for its own
operators and one for each mesh axis (`streams` writes it).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.files.kinds import Count

COMPUTE = "compute"
"""The stream of a rank's own operators; the others have the names of mesh axes."""

HOST = "host"
"""That of copies between a device and its host, where there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A time on one stream. `backward` says in which half of the step."""

    stream: str
    start_seconds: float
    end_seconds: float
    backward: bool

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Interval):
    """One instruction on one stream; a collective stands on the rank's own, too, while the rank is busy with its start,
    where that was measured. `alone_seconds` is what it takes if nothing else uses the same links or memory."""

    name: str
    op: str
    alone_seconds: float
    bytes: int
    module: str

    @property
    def label(self) -> str:
        return f"{self.op} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(Interval):
    """The rank stands still for a collective, or for those before it on the stream of its axis."""

    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """All collectives of a kind on a mesh axis: what they took, and what of it the rank stood still for."""

    kind: str
    axis: str
    count: Count
    bytes: Count
    seconds: float
    exposed_seconds: float

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One forward and backward of one rank, without the optimizer. `peak_seconds` is what its arithmetic would take at
    the device's peak, and `unfused_seconds` what kernels that are not fused take longer (`roofline.Cost`)."""

    axes: tuple[str, ...]
    events: tuple[Event, ...]
    stalls: tuple[Stall, ...] = ()
    peak_seconds: float = 0.0
    unfused_seconds: float = 0.0

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
            total = totals.setdefault((event.op.split(".")[1], event.stream), [0, 0, 0.0, 0.0])
            for i, more in enumerate((1, event.bytes, event.seconds, stood)):
                total[i] += more
        rows = (
            Communication(kind=k, axis=a, count=int(n), bytes=int(size), seconds=seconds, exposed_seconds=stood)
            for (k, a), (n, size, seconds, stood) in totals.items()
        )
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    def to_chrome(self) -> dict[str, Any]:
        """The trace that chrome://tracing and Perfetto open: microseconds, a thread for each stream."""
        threads = {stream: number for number, stream in enumerate((COMPUTE, *self.axes))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
            for stream, number in threads.items()
        ]

        def span(of: Event | Stall, stream: str, **about: Any) -> dict[str, Any]:
            return {
                "ph": "X",
                "name": of.label,
                "cat": "backward" if of.backward else "forward",
                "pid": 0,
                "tid": threads[stream],
                "ts": of.start_seconds * 1e6,
                "dur": of.seconds * 1e6,
                "args": about,
            }

        spans = [
            span(event, event.stream, module=event.module, bytes=event.bytes, alone=event.alone_seconds * 1e6)
            for event in self.events
        ]
        waits = [span(stall, COMPUTE, axis=stall.stream) for stall in self.stalls]
        return {"traceEvents": names + spans + waits, "displayTimeUnit": "ms"}


def covered(stalls: tuple[Stall, ...], events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with the seconds of stalls on its stream that lie within it."""
    waiting: dict[str, list[Stall]] = {}
    for stall in stalls:
        waiting.setdefault(stall.stream, []).append(stall)
    at = dict.fromkeys(waiting, 0)
    for event in events:  # of one stream, both follow each other
        seconds, stream = 0.0, event.stream
        own = waiting.get(stream, [])
        while at.get(stream, 0) < len(own):
            stall = own[at[stream]]
            if stall.start_seconds >= event.end_seconds:
                break
            start, end = max(stall.start_seconds, event.start_seconds), min(stall.end_seconds, event.end_seconds)
            seconds += max(0.0, end - start)
            if stall.end_seconds > event.end_seconds:
                break
            at[stream] += 1
        yield event, seconds
