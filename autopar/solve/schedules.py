"""Schedules of pipelines by name: functions from devices and micro-batches to a `Schedule`.

F, I and W are the seconds of a stage's forward, gradient of inputs and gradient of weights for a micro-batch, B both
gradients; p devices, m micro-batches, v stages (chunks) a device.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain as joined
from typing import TypeVar

from autopar.extensions import Table
from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, PASSES, WEIGHTS, Action, Edge, Schedule, chain, played


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What one micro-batch takes on a stage, and what the stage holds of it."""

    forward_seconds: float
    inputs_seconds: float
    weights_seconds: float
    whole_seconds: float | None = None
    """Of a backward in one piece; that of its two parts if None."""
    held_bytes: float = 0.0
    """From the start of the forward until the gradient of inputs is there."""
    kept_bytes: float = 0.0
    """From then on until that of weights is."""
    rest_bytes: float = 0.0
    """At all times, whatever the micro-batches: parameters, gradients, states of the optimizer."""

    def seconds(self, kind: str) -> float:
        parts = {FORWARD: self.forward_seconds, INPUTS: self.inputs_seconds, WEIGHTS: self.weights_seconds}
        whole = self.inputs_seconds + self.weights_seconds if self.whole_seconds is None else self.whole_seconds
        return whole if kind == BACKWARD else parts[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """What the stages of a program cost. `transfers` are the seconds that a value is on its way between two stages on
    different devices; by default each stage needs the one before, at once. Where links are shared, the values that a
    device sends to another travel one after the other."""

    stages: tuple[StageCost, ...]
    transfers: Mapping[Edge, float] | None = None
    shared_links: bool = False

    @property
    def seconds(self) -> dict[str, tuple[float, ...]]:
        return {kind: tuple(stage.seconds(kind) for stage in self.stages) for kind in "FBIW"}

    @property
    def edges(self) -> Mapping[Edge, float]:
        return chain(len(self.stages)) if self.transfers is None else self.transfers

    def played(self, schedule: Schedule) -> tuple[list[list[float]], list[list[float]]]:
        """When each action of each device starts and ends. Raises ValueError for costs of other stages, and where
        devices wait for each other."""
        if len(self.stages) != len(schedule.devices):
            raise ValueError(f"{schedule.name} has {len(schedule.devices)} stages, and costs are those of {len(self.stages)}")
        return played(schedule, self.seconds, self.edges, shared=self.shared_links)

    def peaks(self, schedule: Schedule) -> list[tuple[float, int]]:
        """The most bytes of each device, and the position of the first action that reaches them."""
        peaks = []
        for device, order in enumerate(schedule.orders):
            now = sum(cost.rest_bytes for cost, d in zip(self.stages, schedule.devices, strict=True) if d == device)
            peak = (now, 0)
            for at, action in enumerate(order):
                now += self.change(action)
                if now > peak[0]:
                    peak = (now, at)
            peaks.append(peak)
        return peaks

    def change(self, action: Action) -> float:
        """How many bytes more a device holds: from the start of a forward, from the end of a backward on."""
        cost = self.stages[action.stage]
        held, kept = cost.held_bytes, cost.kept_bytes
        return {FORWARD: held, INPUTS: kept - held, WEIGHTS: -kept, BACKWARD: -held}.get(action.kind, 0.0)


Key = TypeVar("Key")
Unit = tuple[str, int]
"""A kind and a chunk; micro-batches are counted up per unit."""


def _numbered(units: Iterable[Unit], stages: tuple[int, ...], micro_batches: int) -> tuple[Action, ...]:
    """Units of a device's chunks, each with the next micro-batch of its kind; without those beyond the last."""
    counts: dict[Unit, int] = {}
    order = []
    for kind, chunk in units:
        unit = (INPUTS if kind == BACKWARD else kind, chunk)
        count = counts[unit] = counts.get(unit, -1) + 1
        if kind == BACKWARD:
            counts[WEIGHTS, chunk] = count
        if count < micro_batches:
            order.append(Action(stages[chunk], kind, count))
    return tuple(order)


def zigzag(devices: int, chunks: int) -> tuple[int, ...]:
    """The device of each stage: there and back again, so that the last stage of a pass and the first of the next are on
    one device. Of two chunks it is the V of the zero-bubble papers."""
    return tuple(joined.from_iterable((range(devices), range(devices)[::-1])[c % 2] for c in range(chunks)))


def _schedule(
    name: str, devices: tuple[int, ...], micro_batches: int, units: Callable[[int], Iterable[Unit]]
) -> Schedule:
    held: dict[int, tuple[int, ...]] = {}
    for stage, device in enumerate(devices):
        held[device] = (*held.get(device, ()), stage)
    orders = tuple(_numbered(units(device), held[device], micro_batches) for device in range(len(held)))
    return Schedule(name=name, micro_batches=micro_batches, devices=devices, orders=orders)


def gpipe(devices: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965). A device idles (p-1)(F+B) and holds what
    all m micro-batches keep for backward."""
    units = [(FORWARD, 0)] * micro_batches + [(BACKWARD, 0)] * micro_batches
    return _schedule("gpipe", tuple(range(devices)), micro_batches, lambda device: units)


def _staggered(warm: int, lag: int, micro_batches: int, backward: str = INPUTS) -> Iterator[Unit]:
    """`warm` forwards, then a backward and a forward in turn; gradients of weights `lag` micro-batches later."""
    yield from [(FORWARD, 0)] * warm
    for count in range(micro_batches):
        yield backward, 0
        if backward == INPUTS and count >= lag:
            yield WEIGHTS, 0
        yield FORWARD, 0
    yield from [(WEIGHTS, 0)] * (lag if backward == INPUTS else 0)


def one_f_one_b(devices: int, micro_batches: int) -> Schedule:
    """Each backward as soon as it can be (PipeDream-Flush, arXiv 2006.09503; Megatron-LM's 1F1B). A device idles
    (p-1)(F+B), stage i of 0.. holds p-i micro-batches."""
    return _schedule(
        "1f1b", tuple(range(devices)), micro_batches, lambda i: _staggered(devices - i, 0, micro_batches, BACKWARD)
    )


def zb_h1(devices: int, micro_batches: int) -> Schedule:
    """1F1B whose gradients of weights come later the later the stage (Qi et al. 2023, arXiv 2401.10241, section 2). A
    device idles (p-1)(F+I-W); stage i of 0.. holds p-i micro-batches, and i more between I and W."""
    return _schedule("zb-h1", tuple(range(devices)), micro_batches, lambda i: _staggered(devices - i, i, micro_batches))


def zb_h2(devices: int, micro_batches: int) -> Schedule:
    """ZB-H1 with twice the micro-batches in flight (arXiv 2401.10241, section 2). A device idles (p-1)(F+I-2W), or not
    at all where F = I = W and its own first and last action are what counts; stage i of 0.. holds 2(p-i)-1
    micro-batches, and 2i more between I and W."""
    return _schedule(
        "zb-h2",
        tuple(range(devices)),
        micro_batches,
        lambda i: _staggered(2 * (devices - i) - 1, 2 * i, micro_batches),
    )


def interleaved(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B on v stages a device, p apart (Narayanan et al. 2021, arXiv 2104.04473). Micro-batches pass in groups of p
    through one chunk after the other. A device idles (p-1)(F+B)/v, where F and B are those of all its chunks.

    Where p does not divide m, groups are as even as can be and none is smaller than p; if m < p, all are one group.
    Larger groups hold more micro-batches. Where Megatron-LM and torch have an order it is theirs."""
    rounds = max(1, micro_batches // devices)
    groups = [(micro_batches + k) // rounds for k in range(rounds)][::-1]
    forwards = [(FORWARD, chunk) for group in groups for chunk in range(chunks) for _ in range(group)]
    backwards = [(BACKWARD, chunk) for group in groups for chunk in reversed(range(chunks)) for _ in range(group)]

    def units(device: int) -> Iterator[Unit]:
        warm = min(len(forwards), (chunks - 1) * groups[0] + 2 * (devices - 1 - device))
        yield from forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warm :]

    return _schedule("interleaved", tuple(range(devices)) * chunks, micro_batches, units)


def zb_v(devices: int, micro_batches: int) -> Schedule:
    """Zero bubble on two stages a device, there and back (arXiv 2401.10241, section 6; 2405.15362). No device idles
    between its first and its last action if F = I = W and m >= 2p-1; each holds what p micro-batches keep."""

    def units(i: int) -> Iterator[Unit]:
        back, forth = [(INPUTS, 1), (WEIGHTS, 1)], [(INPUTS, 0), (WEIGHTS, 0)]
        count = max(micro_batches, 2 * devices - 1)
        yield from [(FORWARD, 0)] * (2 * (devices - i) - 1)
        yield from [(FORWARD, 1), (FORWARD, 0)] * i
        yield from [(FORWARD, 1), *back] * (devices - i)
        yield from [(FORWARD, 0), *forth, (FORWARD, 1), *back] * (count - 2 * devices + i + 1)
        yield from [*forth, (FORWARD, 1), *back] * (devices - 1 - i)
        yield from [(INPUTS, 0), (INPUTS, 1)] * i
        yield from forth * (devices - i)
        yield from [(WEIGHTS, 1)] * i + [(WEIGHTS, 0)] * i

    return _schedule("zb-v", zigzag(devices, 2), micro_batches, units)


def dual_pipe_v(devices: int, micro_batches: int) -> Schedule:
    """Each forward beside the backward of another micro-batch, on the stages of ZB-V (DeepSeek-V3, arXiv 2412.19437,
    cut in half; github.com/deepseek-ai/DualPipe). Meant for devices that run the two at once; here one follows the
    other. Each device holds what p micro-batches keep, and the forward that runs."""

    def units(i: int) -> Iterator[Unit]:
        behind, count = devices - 1 - i, max(micro_batches, 2 * devices)
        yield from [(FORWARD, 0)] * (2 * behind)
        yield from [(FORWARD, 0), (FORWARD, 1)] * (i + 1)
        yield from [(INPUTS, 1), (WEIGHTS, 1), (FORWARD, 1)] * behind
        yield from [(FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0)] * (count - 2 * devices + i + 1)
        yield from [(BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0)] * behind
        last = [1, 0] * (i + 1)
        yield from ((BACKWARD, chunk) for chunk in last[: i + 1])
        yield from ((INPUTS, chunk) for chunk in last[i + 1 :])
        for number, chunk in enumerate(last[i + 1 :] + [0] * behind):
            yield WEIGHTS, chunk
            if number < behind:
                yield INPUTS, 0

    return _schedule("dualpipe-v", zigzag(devices, 2), micro_batches, units)


# ---- search ----------------------------------------------------------------------------------------

FORWARDS_AHEAD = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, math.inf)
"""Forwards of a stage ahead of its gradients of inputs, for each device that is between it and the end."""

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""A device leaves a gradient of weights for later if what else it has to do arrives within this part of its seconds."""

ROUNDS = 3
"""Rules are compared on so many micro-batches for each device, and the best `FINALISTS` of them run on all."""

FINALISTS = 5
UNITS = 600_000
"""That are scheduled to compare rules: of a larger pipeline fewer rules are compared."""

AS_QUICK = 1e-3
"""Of steps that differ by less than this part, the one whose devices are occupied for the shortest time is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a device chooses what to do next: a gradient of inputs that it can compute, else a forward, else a gradient
    of weights. Or it keeps to the forwards and gradients of inputs of the schedule that it is to `follow`."""

    patience: float
    ahead: float = math.inf
    follow: Schedule | None = None


class _Listing:
    """A schedule by a rule: list scheduling, in which every device that is free decides with what is there by then,
    within a limit of its bytes. Of each stage in a pass of its device, room is left for those that come after it:
    each micro-batch that has begun can end."""

    def __init__(
        self, devices: tuple[int, ...], micro_batches: int, costs: PipelineCosts, limit: float, rule: Rule
    ) -> None:
        self.devices, self.micro_batches, self.costs, self.limit, self.rule = devices, micro_batches, costs, limit, rule
        stages = range(len(devices))
        count = max(devices) + 1
        self.stages = [[s for s in reversed(stages) if devices[s] == device] for device in range(count)]
        self.seconds = costs.seconds
        self.room = dict.fromkeys(stages, 0.0)
        for held in self.stages:
            for at, stage in enumerate(held):
                self.room[stage] = sum(costs.stages[later].held_bytes for later in held[: at + 1])
        self.ahead = [1 + rule.ahead * (len(devices) - 1 - s) * count / len(devices) for s in stages]
        self.bytes = [sum(costs.stages[s].rest_bytes for s in held) for held in self.stages]
        self.out: dict[tuple[int, str], list[tuple[int, str, float]]] = {(s, i): [] for s in stages for i in "FI"}
        parts = {(s, FORWARD): 0 for s in stages} | {(s, INPUTS): 1 for s in stages}
        for (source, target, of), delay in costs.edges.items():
            kind = FORWARD if of == FORWARD else INPUTS
            self.out[source, kind].append((target, kind, delay if devices[source] != devices[target] else 0.0))
            parts[target, kind] += 1
        for stage in stages:
            self.out[stage, FORWARD].append((stage, INPUTS, 0.0))
        self.missing = {unit: [number] * micro_batches for unit, number in parts.items()}
        self.arrival = {unit: [0.0 if not number else math.inf] * micro_batches for unit, number in parts.items()}
        self.latest = {unit: [0.0] * micro_batches for unit in parts}
        self.done = {(s, kind): 0 for s in stages for kind in (FORWARD, INPUTS)}
        self.pending: list[list[Action]] = [[] for _ in range(count)]
        self.free = [0.0] * count
        self.orders: list[list[Action]] = [[] for _ in range(count)]
        follow = rule.follow.orders if rule.follow else ()
        self.plans = [
            [(a.stage, a.kind.replace(BACKWARD, INPUTS)) for a in o if a.kind in PASSES][::-1] for o in follow
        ]
        self.events = [(0.0, device) for device in range(count)]

    def schedule(self) -> Schedule | None:
        """None where the limit admits no such schedule."""
        while self.events:
            now, device = heapq.heappop(self.events)
            if now >= self.free[device] and (action := self._choose(device, now)):
                self._start(device, now, action)
        if any(number < self.micro_batches for number in self.done.values()):
            return None
        orders = tuple(map(tuple, self.orders))
        return Schedule(name="searched", micro_batches=self.micro_batches, devices=self.devices, orders=orders)

    def _choose(self, device: int, now: float) -> Action | None:
        soonest = math.inf
        for unit in self._wanted(device):
            number = self.done[unit]
            arrival = self.arrival[unit][number]
            if arrival <= now:
                return Action(*unit, number)
            soonest = min(soonest, arrival)
        if not self.pending[device]:
            return None
        weights = self.pending[device][0]
        return weights if soonest >= now + self.rule.patience * self.seconds[WEIGHTS][weights.stage] else None

    def _wanted(self, device: int) -> Iterator[tuple[int, str]]:
        """Units that memory and rule admit, in the order in which they are taken."""
        room = self.limit * (1 + 1e-12) - self.bytes[device]
        if self.plans:
            plan = self.plans[device]
            if plan and (plan[-1][1] == INPUTS or self.costs.stages[plan[-1][0]].held_bytes <= room):
                yield plan[-1]
            return
        for stage in self.stages[device]:
            if self.done[stage, INPUTS] < self.micro_batches:
                yield stage, INPUTS
        for stage in self.stages[device]:
            begun = self.done[stage, FORWARD]
            ahead = begun - self.done[stage, INPUTS]
            if begun < self.micro_batches and ahead < self.ahead[stage] and self.room[stage] <= room:
                yield stage, FORWARD

    def _start(self, device: int, now: float, action: Action) -> None:
        self.orders[device].append(action)
        self.bytes[device] += self.costs.change(action)
        end = self.free[device] = now + self.seconds[action.kind][action.stage]
        heapq.heappush(self.events, (end, device))
        if action.kind == WEIGHTS:
            self.pending[device].pop(0)
            return
        if self.plans:
            self.plans[device].pop()
        unit, number = (action.stage, action.kind), action.micro_batch
        self.done[unit] += 1
        if action.kind == INPUTS:
            self.pending[device].append(action._replace(kind=WEIGHTS))
        for stage, kind, delay in self.out[unit]:
            latest, missing = self.latest[stage, kind], self.missing[stage, kind]
            latest[number] = max(latest[number], end + delay)
            missing[number] -= 1
            if not missing[number]:
                self.arrival[stage, kind][number] = latest[number]
                heapq.heappush(self.events, (latest[number], self.devices[stage]))


def searched(
    devices: int, micro_batches: int, *, costs: PipelineCosts, chunks: int = 1, limit_bytes: float = math.inf
) -> Schedule:
    """The schedule of the shortest step found in which no device holds more than `limit_bytes`; never a longer one than
    the best named one that fits.

    Candidates are all named schedules of so many chunks, each of them with its gradients of weights where gaps are, and
    what list scheduling makes under several rules of the places where these have their stages (after the heuristic of
    arXiv 2401.10241, section 3.1). Raises ValueError where none fits."""
    rows = [row for row in SCHEDULES.values() if "costs" not in row.takes and row.chunks in (chunks, None)]
    starts = [scheduled(row.name, devices, micro_batches, chunks=chunks) for row in rows]
    places = sorted({start.devices for start in starts})
    rules = [
        (place, Rule(patience=patience, ahead=ahead))
        for place in places
        for ahead in FORWARDS_AHEAD
        for patience in PATIENCE
    ]
    few = min(micro_batches, ROUNDS * devices)
    rules = rules[:: math.ceil(len(rules) * 3 * devices * chunks * few / UNITS)]
    listed = [(_Listing(place, few, costs, limit_bytes, rule).schedule(), (place, rule)) for place, rule in rules]
    rules = [rule for _, rule in _ranked(listed, costs)][:FINALISTS]
    rules += [(s.devices, Rule(patience=patience, follow=s)) for s in starts for patience in PATIENCE[::2]]
    listed = [(_Listing(place, micro_batches, costs, limit_bytes, rule).schedule(), None) for place, rule in rules]
    fitting = [(s, None) for s in starts if _peak(s, costs) <= limit_bytes * (1 + 1e-12)]
    longest = min((_score(s, costs)[0] for s, _ in fitting), default=math.inf)
    ranked = _ranked((*fitting, *listed), costs, longest)
    if not ranked:
        least = min(starts, key=lambda s: _peak(s, costs))
        raise ValueError(
            f"no schedule of {devices} devices, {chunks} stages on each, holds at most {limit_bytes:g} bytes; "
            f"{least.name} needs {_peak(least, costs):g}, the least of all: take more devices, or recompute more"
        )
    return replace(ranked[0][0], name="searched")


def _peak(schedule: Schedule, costs: PipelineCosts) -> float:
    return max(costs.peaks(schedule))[0]


def _score(schedule: Schedule, costs: PipelineCosts) -> tuple[float, float]:
    """Seconds of the step, and the longest time from a device's first action to its last."""
    starts, ends = costs.played(schedule)
    spans = max(end[-1] - start[0] for start, end in zip(starts, ends, strict=True))
    return max(end[-1] for end in ends), spans


def _ranked(
    schedules: Iterable[tuple[Schedule | None, Key]], costs: PipelineCosts, longest: float = math.inf
) -> list[tuple[Schedule, Key]]:
    """Schedules of the shortest steps first. Those of nearly the shortest, and no longer than `longest`, are equal:
    the ones whose devices are occupied for the shortest time come first."""
    scored = [(_score(schedule, costs), schedule, key) for schedule, key in schedules if schedule]
    quick = min(longest * (1 + 1e-9), min((seconds for (seconds, _), *_ in scored), default=0.0) * (1 + AS_QUICK))
    ranked = sorted(scored, key=lambda row: (max(row[0][0], quick), row[0][1]))
    return [(schedule, key) for _, schedule, key in ranked]


# ---- the table -------------------------------------------------------------------------------------

TAKES = ("chunks", "costs", "limit_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A way to schedule: `run(devices, micro_batches)`, with those of `TAKES` that are in `takes` as keywords, gives a
    `Schedule`. `chunks` are the stages that a device holds, None if any number."""

    name: str
    run: Callable[..., Schedule]
    chunks: int | None = 1
    takes: tuple[str, ...] = ()


SCHEDULES: Table[Scheduler] = Table(
    "schedule",
    Scheduler,
    (
        Scheduler(name="gpipe", run=gpipe),
        Scheduler(name="1f1b", run=one_f_one_b),
        Scheduler(name="interleaved", run=interleaved, chunks=None, takes=("chunks",)),
        Scheduler(name="zb-h1", run=zb_h1),
        Scheduler(name="zb-h2", run=zb_h2),
        Scheduler(name="zb-v", run=zb_v, chunks=2),
        Scheduler(name="dualpipe-v", run=dual_pipe_v, chunks=2),
        Scheduler(name="searched", run=searched, chunks=None, takes=TAKES),
    ),
    functions=("run",),
)


def register_schedule(schedule: Scheduler, *, replace: bool = False) -> None:
    """Adds a way to schedule. Raises ValueError for what is none, and for a name that is taken unless it is to
    `replace` that one."""
    SCHEDULES.add(schedule, replace=replace)


def scheduled(
    name: str,
    devices: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    costs: PipelineCosts | None = None,
    limit_bytes: float = math.inf,
) -> Schedule:
    """The schedule of a name. Raises ValueError for an unknown one, for numbers that it cannot have, and where what
    another package made is none."""
    row = SCHEDULES.named(name)
    if min(devices, micro_batches, chunks) < 1 or row.chunks not in (chunks, None):
        raise ValueError(
            f"{name}: {devices} devices, {micro_batches} micro-batches and {chunks} stages on each device: give at "
            f"least 1 of each{f', and {row.chunks} stages' if row.chunks else ''}"
        )
    given = {"chunks": chunks, "costs": costs, "limit_bytes": limit_bytes}
    if costs is None and "costs" in row.takes:
        raise ValueError(f"{name} is made for the seconds and bytes of stages: give costs")
    schedule = row.run(devices, micro_batches, **{key: given[key] for key in row.takes})
    if name in SCHEDULES.added:
        schedule.check()
    return schedule
