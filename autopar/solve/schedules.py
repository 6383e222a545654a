"""Schedules of pipelines by name: functions from devices and micro-batches to a `Schedule`.

F, I and W are the seconds of a stage's forward, gradient of inputs and gradient of weights for a micro-batch, B both
gradients; p devices, m micro-batches, v stages (chunks) a device.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autopar.extensions import Table
from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Edge, Schedule, chain, played


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
            raise ValueError(
                f"{schedule.name} has {len(schedule.devices)} stages, and costs are those of {len(self.stages)}"
            )
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
    return tuple(device if c % 2 == 0 else devices - 1 - device for c in range(chunks) for device in range(devices))


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

AHEAD = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, math.inf)
"""Forwards that a stage may be ahead of its gradients of inputs, for each device that is between it and the end."""

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""A device leaves a gradient of weights for later if what else it has to do arrives within this part of its seconds."""

ROUNDS = 3
"""Rules are compared on so many micro-batches for each device, and the best `FINALISTS` of them run on all."""

FINALISTS = 5
UNITS = 600_000
"""That are scheduled to compare rules: of larger pipelines, fewer rules are compared."""

AS_QUICK = 1e-3
"""Of steps that differ by less than this part, the one whose devices are occupied for the shortest time is taken."""

ROUNDING = 1 + 1e-9

Rule = tuple[tuple[int, ...], float, float, Schedule | None]
"""Devices of the stages, patience, forwards ahead, and a schedule to follow instead."""


class _Listing:
    """A schedule by a rule: list scheduling, in which each device that is free takes what is there by then, within a
    limit of its bytes. It takes a gradient of inputs, else a forward, else a gradient of weights; or the next forward
    or gradient of inputs of the schedule that it follows, else a gradient of weights. A forward leaves room for those
    of later stages on its device, so each micro-batch that has begun can end."""

    def __init__(self, micro_batches: int, costs: PipelineCosts, limit: float, rule: Rule) -> None:
        devices, self.patience, ahead, follow = rule
        self.devices, self.micro_batches, self.costs, self.limit = devices, micro_batches, costs, limit * ROUNDING
        self.seconds = costs.seconds
        stages, count = range(len(devices)), max(devices) + 1
        self.held = [[stage for stage in reversed(stages) if devices[stage] == device] for device in range(count)]
        self.room = [sum(costs.stages[s].held_bytes for s in self.held[devices[at]] if s >= at) for at in stages]
        self.ahead = [1 + ahead * (len(devices) - 1 - stage) * count / len(devices) for stage in stages]
        self.bytes = [sum(costs.stages[stage].rest_bytes for stage in held) for held in self.held]
        own = {(stage, stage, BACKWARD): 0.0 for stage in stages}
        self.out: dict[tuple[int, str], list[tuple[tuple[int, str], float]]] = defaultdict(list)
        parts = dict.fromkeys(product(stages, (FORWARD, INPUTS)), 0)
        for (source, target, of), delay in (own | dict(costs.edges)).items():
            made = FORWARD if of == FORWARD or source == target else INPUTS
            needed = target, FORWARD if of == FORWARD else INPUTS
            self.out[source, made].append((needed, delay if devices[source] != devices[target] else 0.0))
            parts[needed] += 1
        self.missing = {unit: [number] * micro_batches for unit, number in parts.items()}
        self.arrival = {unit: [0.0] * micro_batches for unit in parts}
        self.done = dict.fromkeys(parts, 0)
        self.weights: list[list[Action]] = [[] for _ in range(count)]
        self.free = [0.0] * count
        self.orders: list[list[Action]] = [[] for _ in range(count)]
        kinds = {FORWARD: FORWARD, BACKWARD: INPUTS, INPUTS: INPUTS}
        follows = follow.orders if follow else ()
        self.follows = [[(a.stage, kinds[a.kind]) for a in reversed(order) if a.kind in kinds] for order in follows]
        self.events = [(0.0, device) for device in range(count)]

    def schedule(self) -> Schedule | None:
        """None where the limit admits no such schedule."""
        while self.events:
            now, device = heapq.heappop(self.events)
            if now >= self.free[device] and (action := self._choose(device, now)):
                self._start(device, now, action)
        if min(self.done.values()) < self.micro_batches:
            return None
        orders = tuple(map(tuple, self.orders))
        return Schedule(name="searched", micro_batches=self.micro_batches, devices=self.devices, orders=orders)

    def _choose(self, device: int, now: float) -> Action | None:
        soonest = math.inf
        for unit in self._wanted(device):
            number = self.done[unit]
            if number < self.micro_batches and not self.missing[unit][number]:
                if self.arrival[unit][number] <= now:
                    return Action(*unit, number)
                soonest = min(soonest, self.arrival[unit][number])
        weights = next(iter(self.weights[device]), None)
        waits = weights and soonest < now + self.patience * self.seconds[WEIGHTS][weights.stage]
        return None if waits else weights

    def _wanted(self, device: int) -> Iterator[tuple[int, str]]:
        """Units that memory and rule admit, the most wanted first."""
        room = self.limit - self.bytes[device]
        if self.follows:
            for stage, kind in self.follows[device][-1:]:
                if kind == INPUTS or self.costs.stages[stage].held_bytes <= room:
                    yield stage, kind
            return
        for stage in self.held[device]:
            yield stage, INPUTS
        for stage in self.held[device]:
            if self.room[stage] <= room and self.done[stage, FORWARD] - self.done[stage, INPUTS] < self.ahead[stage]:
                yield stage, FORWARD

    def _start(self, device: int, now: float, action: Action) -> None:
        self.orders[device].append(action)
        self.bytes[device] += self.costs.change(action)
        end = self.free[device] = now + self.seconds[action.kind][action.stage]
        heapq.heappush(self.events, (end, device))
        if action.kind == WEIGHTS:
            self.weights[device].pop(0)
            return
        if self.follows:
            self.follows[device].pop()
        if action.kind == INPUTS:
            self.weights[device].append(action._replace(kind=WEIGHTS))
        number = action.micro_batch
        self.done[action.stage, action.kind] += 1
        for unit, delay in self.out[action.stage, action.kind]:
            arrival = self.arrival[unit][number] = max(self.arrival[unit][number], end + delay)
            self.missing[unit][number] -= 1
            heapq.heappush(self.events, (arrival, self.devices[unit[0]]))


def searched(
    devices: int, micro_batches: int, *, costs: PipelineCosts, chunks: int = 1, limit_bytes: float = math.inf
) -> Schedule:
    """The schedule of the shortest step found in which no device holds more than `limit_bytes`; never a longer one than
    the best named one that fits.

    Candidates are all named schedules of so many chunks, these with their gradients of weights wherever a device would
    idle, and what list scheduling makes on the same devices under several rules (after the heuristic of arXiv
    2401.10241, section 3.1). Raises ValueError where none fits."""
    rows = [row for row in SCHEDULES.values() if "costs" not in row.takes and row.chunks in (chunks, None)]
    starts = [scheduled(row.name, devices, micro_batches, chunks=chunks) for row in rows]
    places = sorted({start.devices for start in starts})
    rules: list[Rule] = [(*rule, None) for rule in product(places, PATIENCE, AHEAD)]
    few = min(micro_batches, ROUNDS * devices)
    rules = rules[:: math.ceil(len(rules) * 3 * devices * chunks * few / UNITS)]
    best = _ranked([_Listing(few, costs, limit_bytes, rule).schedule() for rule in rules], costs)
    rules = [rules[at] for at in best[:FINALISTS]]
    rules += [(start.devices, patience, 0.0, start) for start in starts for patience in PATIENCE[::2]]
    peaks = [max(costs.peaks(start))[0] for start in starts]
    found = [start if peak <= limit_bytes * ROUNDING else None for start, peak in zip(starts, peaks, strict=True)]
    longest = min((_score(start, costs)[0] for start in found if start), default=math.inf)
    found += [_Listing(micro_batches, costs, limit_bytes, rule).schedule() for rule in rules]
    if not any(found):
        raise ValueError(
            f"no schedule of {chunks} stages on each of {devices} devices holds at most {limit_bytes:g} bytes, and "
            f"{starts[peaks.index(min(peaks))].name} at least {min(peaks):g}: take more devices, or recompute more"
        )
    chosen = found[_ranked(found, costs, longest)[0]]
    assert chosen is not None
    return replace(chosen, name="searched")


def _score(schedule: Schedule, costs: PipelineCosts) -> tuple[float, float]:
    """Seconds of the step, and the longest time from a device's first action to its last."""
    starts, ends = costs.played(schedule)
    spans = [end[-1] - start[0] for start, end in zip(starts, ends, strict=True)]
    return max(end[-1] for end in ends), max(spans)


def _ranked(schedules: Sequence[Schedule | None], costs: PipelineCosts, longest: float = math.inf) -> list[int]:
    """Positions, those of the shortest steps first. Nearly the shortest steps that are no longer than `longest` are
    equal, and the ones whose devices are occupied for the shortest time come first."""
    scores = {at: _score(schedule, costs) for at, schedule in enumerate(schedules) if schedule}
    shortest = min((seconds for seconds, _ in scores.values()), default=0.0)
    quick = min(longest * ROUNDING, shortest * (1 + AS_QUICK))
    return sorted(scores, key=lambda at: (max(scores[at][0], quick), scores[at][1]))


# ---- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A way to schedule: `run(devices, micro_batches)` gives a `Schedule`. Those of `chunks`, `costs` and `limit_bytes`
    that are in `takes` are its keywords. A device holds `chunks` stages, or any number if that is None."""

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
        Scheduler(name="searched", run=searched, chunks=None, takes=("chunks", "costs", "limit_bytes")),
    ),
    functions=("run",),
)


def register_schedule(schedule: Scheduler, *, replace: bool = False) -> None:
    """Adds a way to schedule. Raises ValueError for what is none, and for a name that is taken unless it is to
    `replace` that one."""
    SCHEDULES.add(schedule, replace=replace)


def scheduled(name: str, devices: int, micro_batches: int, *, chunks: int = 1, **given: Any) -> Schedule:
    """The schedule of a name. `costs` and `limit_bytes` are for those that take them. Raises ValueError for an unknown
    name, for numbers that it cannot have, and where what another package made is no schedule."""
    row = SCHEDULES.named(name)
    if min(devices, micro_batches, chunks) < 1 or row.chunks not in (chunks, None):
        raise ValueError(
            f"{name}: {devices} devices, {micro_batches} micro-batches and {chunks} stages on each device: give at "
            f"least 1 of each{f', and {row.chunks} stages' if row.chunks else ''}"
        )
    schedule = row.run(
        devices, micro_batches, **{k: v for k, v in {"chunks": chunks, **given}.items() if k in row.takes}
    )
    if name in SCHEDULES.added:
        schedule.check()
    return schedule
