"""The step of a pipeline: when each device does what, how long it idles, what it holds; and what no schedule beats."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Schedule, played
from autopar.solve.schedules import ROUNDING, PipelineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """A step of a schedule. Lists are by device."""

    schedule: Schedule
    starts: list[list[float]]
    ends: list[list[float]]
    busy_seconds: list[float]
    peaks: list[tuple[float, float]]
    """The most bytes, and the second from which on they are there."""
    in_flight: list[int]
    """The most micro-batches between forward and the gradient of inputs, those of each stage counted."""

    @property
    def seconds(self) -> float:
        """Of the step: until the last device has ended."""
        return max(ends[-1] for ends in self.ends)

    @property
    def idle_seconds(self) -> list[float]:
        """What each device idles, from the beginning of the step to its end."""
        return [self.seconds - busy for busy in self.busy_seconds]

    @property
    def bubble_rate(self) -> float:
        """As in the tables of the zero-bubble paper (arXiv 2401.10241, Table 5): a device's time runs from its own
        first action to its own last one, and the rate is the part of the longest that the busiest device idles."""
        span = max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))
        return 1 - max(self.busy_seconds) / span

    @property
    def idle_rate(self) -> float:
        """The part of the step that devices idle, in the mean of all."""
        return sum(self.idle_seconds) / (self.seconds * len(self.ends))

    def intervals(self, device: int) -> Iterator[tuple[Action, float, float]]:
        """Each action of a device, with its start and its end."""
        return zip(self.schedule.orders[device], self.starts[device], self.ends[device], strict=True)


def simulate(schedule: Schedule, costs: PipelineCosts) -> PipelineTimeline:
    """The step of a schedule. Transfers cost devices no time; a unit waits until what it needs has arrived. A straggler
    is a stage of more seconds. Raises ValueError where devices wait for each other, and for costs of other stages."""
    if len(costs.stages) != schedule.stages:
        raise ValueError(f"{schedule.name} has {schedule.stages} stages, and the costs {len(costs.stages)}")
    run = played(schedule, costs.run(schedule.devices))
    peaks = []
    for device, (size, at) in enumerate(costs.peaks(schedule)):
        times = run.starts if schedule.orders[device][at].kind == FORWARD else run.ends
        peaks.append((size, times[device][at]))
    seconds = run.seconds
    return PipelineTimeline(
        schedule=schedule,
        starts=run.starts,
        ends=run.ends,
        busy_seconds=[sum(seconds[a.kind][a.stage] for a in order if a.kind in seconds) for order in schedule.orders],
        peaks=peaks,
        in_flight=schedule.in_flight(schedule.devices),
    )


def bound_seconds(
    devices: tuple[int, ...], micro_batches: int, costs: PipelineCosts, limit_bytes: float = math.inf
) -> float:
    """A lower bound of the step of every schedule of stages on these devices.

    A device begins when the first micro-batch has come to it, and computes its share. After its last gradient of inputs
    at the earliest, those of the stages before it follow. Before its first one it can only run forwards, as many as
    `limit_bytes` holds, while a micro-batch goes to the last stage and back."""
    seconds = costs.seconds
    forward, whole = seconds[FORWARD], seconds[BACKWARD]
    inputs = [min(pair) for pair in zip(seconds[INPUTS], whole, strict=True)]
    weights = [min(w, b - i) for w, b, i in zip(seconds[WEIGHTS], whole, inputs, strict=True)]
    edges = [(a, b, of, delay * (devices[a] != devices[b])) for (a, b, of), delay in costs.edges.items()]
    forth = sorted((b, a, delay) for a, b, of, delay in edges if of == FORWARD)
    back = sorted((b, a, delay) for a, b, of, delay in edges if of == BACKWARD)
    begin = _longest([0.0] * len(devices), forward, forth)
    returns = _longest([*map(sum, zip(begin, forward, strict=True))], inputs, back[::-1])
    after = _longest(weights, inputs, [(a, b, delay) for b, a, delay in back])
    bounds = []
    for device, rest in enumerate(costs.rest(devices)):
        held = [stage for stage, holder in enumerate(devices) if holder == device]
        share, last = sum(forward[s] + inputs[s] for s in held), sum(weights[s] for s in held)
        runs = micro_batches * sum(forward[s] for s in held)
        if least := min(costs.stages[s].held_bytes for s in held):
            fitting = (min(limit_bytes, 1e300) * ROUNDING - rest) // least
            runs = min(runs, fitting * max(forward[s] for s in held))
        start = max(min(begin[s] for s in held), min(returns[s] for s in held) - runs)
        bounds.append(start + micro_batches * share + max(micro_batches * last, min(after[s] for s in held)))
    return max(bounds)


def _longest(first: list[float], take: list[float], steps: list[tuple[int, int, float]]) -> list[float]:
    """The longest way to each stage, along steps (to, from, delay) in the order of the stages."""
    ways = [*first]
    for target, source, delay in steps:
        ways[target] = max(ways[target], ways[source] + take[source] + delay)
    return ways
