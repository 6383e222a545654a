"""The step of a pipeline: when each device does what, how long it idles, and what it holds."""

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, Action, Schedule
from autopar.solve.schedules import PipelineCosts

COLUMNS = 100
"""Of a printed chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """A step of a schedule. Sequences are by device; printed, it is a chart with a line per device."""

    schedule: Schedule
    starts: list[list[float]]
    ends: list[list[float]]
    busy_seconds: list[float]
    peaks: list[tuple[float, float]]
    """The most bytes, and the second from which on they are there."""
    in_flight: list[int]
    """Micro-batches between forward and the gradient of inputs at once, those of each stage counted."""

    @property
    def seconds(self) -> float:
        """Of the step: until the last device has ended."""
        return max(ends[-1] for ends in self.ends)

    @property
    def idle_seconds(self) -> list[float]:
        """What each device idles from the first to the last second of the step."""
        return [self.seconds - busy for busy in self.busy_seconds]

    @property
    def bubble_rate(self) -> float:
        """As in the tables of the zero-bubble papers (arXiv 2401.10241, Table 5): a device's time runs from its own
        first action to its own last one; of the longest such time, the part in which the busiest device idles."""
        span = max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))
        return 1 - max(self.busy_seconds) / span

    @property
    def idle_rate(self) -> float:
        """Of the whole step and all devices, the part in which they idle."""
        return sum(self.idle_seconds) / (self.seconds * len(self.ends))

    def intervals(self, device: int) -> Iterator[tuple[Action, float, float]]:
        """Each action of a device, with its start and its end."""
        return zip(self.schedule.orders[device], self.starts[device], self.ends[device], strict=True)

    def __str__(self) -> str:
        width = min(COLUMNS, max(map(len, self.schedule.orders))) / self.seconds
        lines = []
        for device in range(len(self.ends)):
            line = ""
            for action, start, end in self.intervals(device):
                line = line.ljust(round(start * width), ".").ljust(round(end * width), action.kind[0])
            lines.append(f"{device:3} {line.ljust(round(self.seconds * width), '.')}")
        return "\n".join(lines)


def simulate(schedule: Schedule, costs: PipelineCosts) -> PipelineTimeline:
    """The step of a schedule. Transfers cost devices no time; a unit waits until what it needs has arrived. A straggler
    is a stage of more seconds. Raises ValueError where devices wait for each other, and for costs of other stages."""
    starts, ends = costs.played(schedule)
    seconds = costs.seconds
    peaks = []
    for device, (size, at) in enumerate(costs.peaks(schedule)):
        times = starts if schedule.orders[device][at].kind == FORWARD else ends
        peaks.append((size, times[device][at]))
    return PipelineTimeline(
        schedule=schedule,
        starts=starts,
        ends=ends,
        busy_seconds=[sum(seconds[a.kind][a.stage] for a in order if a.kind in seconds) for order in schedule.orders],
        peaks=peaks,
        in_flight=[max(_in_flight(order)) for order in schedule.orders],
    )


def _in_flight(order: tuple[Action, ...]) -> Iterator[int]:
    count = 0
    for action in order:
        count += {FORWARD: 1, INPUTS: -1, BACKWARD: -1}.get(action.kind, 0)
        yield count
