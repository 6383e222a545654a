"""Schedules of pipelines by name: functions from devices and micro-batches to a `Schedule`.

F, I and W are the seconds of a stage's forward, gradient of inputs and gradient of weights for a micro-batch, B those
of both gradients; p devices, m micro-batches, v stages (chunks) a device. Devices and stages are counted from 0.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autopar.extensions import Table
from autopar.ir.schedule import (
    BACKWARD,
    FORWARD,
    INPUTS,
    PASSES,
    WEIGHTS,
    Action,
    Edge,
    PipelineRun,
    Schedule,
    chain,
    played,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What one micro-batch takes on a stage, and what the stage holds."""

    forward_seconds: float
    inputs_seconds: float
    weights_seconds: float
    whole_seconds: float | None = None
    """Of a backward in one piece; those of its two parts if None."""
    held_bytes: float = 0.0
    """Of a micro-batch, from the start of its forward to the end of its gradient of inputs."""
    kept_bytes: float = 0.0
    """From then on to the end of its gradient of weights."""
    rest_bytes: float = 0.0
    """At all times: parameters, gradients, states of the optimizer."""

    def seconds(self, kind: str) -> float:
        whole = self.inputs_seconds + self.weights_seconds if self.whole_seconds is None else self.whole_seconds
        return {FORWARD: self.forward_seconds, INPUTS: self.inputs_seconds, WEIGHTS: self.weights_seconds}.get(
            kind, whole
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """What the stages of a program cost. `transfers` are the seconds that a value is on its way between two stages on
    different devices; by default each stage needs the one before, at once. Where links are shared, the values that a
    device sends to another travel one after the other."""

    stages: tuple[StageCost, ...]
    transfers: Mapping[Edge, float] | None = None
    shared_links: bool = False

    @property
    def seconds(self) -> dict[str, list[float]]:
        return {kind: [stage.seconds(kind) for stage in self.stages] for kind in "FBIW"}

    @property
    def edges(self) -> Mapping[Edge, float]:
        return chain(len(self.stages)) if self.transfers is None else self.transfers

    def run(self, devices: tuple[int, ...]) -> PipelineRun:
        return PipelineRun(devices, self.seconds, self.edges, shared=self.shared_links)

    def rest(self, devices: tuple[int, ...]) -> list[float]:
        """The bytes that each device holds at all times."""
        bytes_of = [0.0] * (max(devices) + 1)
        for device, stage in zip(devices, self.stages, strict=True):
            bytes_of[device] += stage.rest_bytes
        return bytes_of

    def peaks(self, schedule: Schedule) -> list[tuple[float, int]]:
        """The most bytes of each device, and the position of the first action with which it has them."""
        peaks = []
        for now, order in zip(self.rest(schedule.devices), schedule.orders, strict=True):
            sizes = [now := now + self.change(action) for action in order]
            peaks.append((max(sizes), sizes.index(max(sizes))))
        return peaks

    def change(self, action: Action) -> float:
        """How many bytes more a device holds, from the start of a forward or the end of a backward on."""
        cost = self.stages[action.stage]
        held, kept = cost.held_bytes, cost.kept_bytes
        return {FORWARD: held, INPUTS: kept - held, WEIGHTS: -kept, BACKWARD: -held}.get(action.kind, 0.0)


# ---- named -----------------------------------------------------------------------------------------


def _schedule(name: str, devices: tuple[int, ...], micro_batches: int, units: Callable[[int], str]) -> Schedule:
    """The schedule in which a device runs its `units`: "F1 " is a forward of the second stage that it holds, of the
    next micro-batch, or nothing after the last."""
    orders = []
    for device in range(max(devices) + 1):
        stages = [stage for stage, holder in enumerate(devices) if holder == device]
        counts: dict[tuple[str, int], int] = defaultdict(int)
        late: dict[int, list[int]] = defaultdict(list)
        order = []
        for unit in units(device).split():
            kind, chunk = unit[0], int(unit[1:])
            if kind == WEIGHTS:
                number = late[chunk].pop(0)
            else:
                number = counts[PASSES[kind], chunk]
                counts[PASSES[kind], chunk] += 1
                late[chunk] += [number] * (kind == INPUTS)
            if number < micro_batches:
                order.append(Action(stages[chunk], kind, number))
        orders.append(tuple(order))
    return Schedule(name=name, micro_batches=micro_batches, devices=devices, orders=tuple(orders))


def _zigzag(devices: int) -> tuple[int, ...]:
    """The V of the zero-bubble papers: the first device holds the first and the last stage."""
    return (*range(devices), *reversed(range(devices)))


def gpipe(devices: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965). A device idles (p-1)(F+B) and holds what
    all m micro-batches keep for backward."""
    units = "F0 " * micro_batches + "B0 " * micro_batches
    return _schedule("gpipe", tuple(range(devices)), micro_batches, lambda i: units)


def one_f_one_b(devices: int, micro_batches: int) -> Schedule:
    """Each backward as soon as it can be (PipeDream-Flush, arXiv 2006.09503; Megatron-LM's 1F1B). A device idles
    (p-1)(F+B), and device i holds p-i micro-batches."""
    places = tuple(range(devices))
    return _schedule("1f1b", places, micro_batches, lambda i: "F0 " * (devices - i) + "B0 F0 " * micro_batches)


def _split(name: str, devices: int, micro_batches: int, ahead: int) -> Schedule:
    """1F1B with the gradient in two parts: forwards are `ahead` times as far ahead, gradients of weights as far
    behind."""

    def units(i: int) -> str:
        late = ahead * i
        steady = "I0 F0 " * late + "I0 W0 F0 " * (micro_batches - late)
        return "F0 " * (ahead * (devices - 1 - i) + 1) + steady + "W0 " * late

    return _schedule(name, tuple(range(devices)), micro_batches, units)


def zb_h1(devices: int, micro_batches: int) -> Schedule:
    """1F1B with gradients of weights that come later the later the stage (Qi et al. 2023, arXiv 2401.10241, section
    2). A device idles (p-1)(F+I-W); device i holds p-i micro-batches, and i more between I and W."""
    return _split("zb-h1", devices, micro_batches, 1)


def zb_h2(devices: int, micro_batches: int) -> Schedule:
    """ZB-H1 with twice the micro-batches in flight (arXiv 2401.10241, section 2). From its own first action to its own
    last, a device idles (p-1)(F+I-2W); device i holds 2(p-i)-1 micro-batches, and 2i more between I and W."""
    return _split("zb-h2", devices, micro_batches, 2)


def interleaved(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B on v stages a device, p apart (Narayanan et al. 2021, arXiv 2104.04473). Micro-batches pass in groups of p
    through one chunk after the other. A device idles (p-1)(F+B)/v, where F and B are those of all its chunks.

    Where p does not divide m, groups are as even as can be and none is smaller than p; if m < p, all are one group.
    Larger groups hold more micro-batches. Where Megatron-LM and torch have an order, it is theirs."""
    rounds = max(1, micro_batches // devices)
    groups = [(micro_batches + number) // rounds for number in reversed(range(rounds))]
    forwards = [f"F{chunk} " for group in groups for chunk in range(chunks) for _ in range(group)]
    backwards = [f"B{chunk} " for group in groups for chunk in reversed(range(chunks)) for _ in range(group)]

    def units(i: int) -> str:
        warm = min(len(forwards), (chunks - 1) * groups[0] + 2 * (devices - 1 - i))
        pairs = zip(forwards[warm:], backwards, strict=False)
        return "".join([*forwards[:warm], *map("".join, pairs), *backwards[len(forwards) - warm :]])

    return _schedule("interleaved", tuple(range(devices)) * chunks, micro_batches, units)


def zb_v(devices: int, micro_batches: int) -> Schedule:
    """Zero bubble on two stages a device, there and back (arXiv 2401.10241, section 6; 2405.15362). No device idles
    between its first and its last action if F = I = W and m >= 2p-1; each holds what p micro-batches keep."""

    def units(i: int) -> str:
        steady = max(micro_batches, 2 * devices - 1) - 2 * devices + i + 1
        warm = "F0 " * (2 * (devices - i) - 1) + "F1 F0 " * i + "F1 I1 W1 " * (devices - i)
        end = "I0 W0 F1 I1 W1 " * (devices - 1 - i) + "I0 I1 " * i + "I0 W0 " * (devices - i)
        return warm + "F0 I0 W0 F1 I1 W1 " * steady + end + "W1 " * i + "W0 " * i

    return _schedule("zb-v", _zigzag(devices), micro_batches, units)


def dual_pipe_v(devices: int, micro_batches: int) -> Schedule:
    """Each forward beside the backward of another micro-batch, on the stages of ZB-V (DeepSeek-V3, arXiv 2412.19437,
    cut in half; github.com/deepseek-ai/DualPipe). Meant for devices that run the two at once; here one follows the
    other. Each device holds what p micro-batches keep, and one stage of one more."""

    def units(i: int) -> str:
        behind, steady = devices - 1 - i, max(micro_batches, 2 * devices) - 2 * devices + i + 1
        warm = "F0 " * (2 * behind) + "F0 F1 " * (i + 1) + "I1 W1 F1 " * behind
        last = ["1 ", "0 "] * (i + 1)
        late = last[i + 1 :] + ["0 "] * behind  # their gradients of weights are left for the end
        end = ["B" + chunk for chunk in last[: i + 1]] + ["I" + chunk for chunk in last[i + 1 :]]
        end += [f"W{chunk}I0 " for chunk in late[:behind]] + ["W" + chunk for chunk in late[behind:]]
        return warm + "F0 B1 F1 B0 " * steady + "B1 F1 B0 " * behind + "".join(end)

    return _schedule("dualpipe-v", _zigzag(devices), micro_batches, units)


# ---- search ----------------------------------------------------------------------------------------

AHEAD = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 1e9)
"""Forwards that a stage may be ahead of its gradients of inputs, for each device that is between it and the end."""

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""A device leaves a gradient of weights for later if what else it has to do arrives within this part of its seconds."""

CLOSER = (0.95, 0.975, 1.0, 1.025, 1.05)
"""Parts of the forwards ahead that are tried for the best rules."""

ROUNDS = 3
"""Rules are compared on so many micro-batches for each device, and the best one of each patience runs on all."""

UNITS = 300_000
"""That are scheduled to compare rules: small pipelines with more micro-batches, of large ones fewer rules."""

AS_QUICK = 1e-3
"""Of steps that differ by less than this part, the one whose devices are occupied for the shortest time is taken."""

ROUNDING = 1 + 1e-9

Rule = tuple[tuple[int, ...], float, float, str]
"""Devices of the stages, patience, forwards ahead, and the name of a schedule to follow instead."""


class _Listing:
    """A schedule by a rule: list scheduling, in which each device that is free takes what is there by then, within a
    limit of its bytes. It takes a gradient of inputs, else a forward, else a gradient of weights; or the next forward
    or gradient of inputs of the schedule that it follows, else a gradient of weights. A forward leaves room for those
    of later stages on its device, so each micro-batch that has begun can end."""

    def __init__(
        self, micro_batches: int, costs: PipelineCosts, limit: float, rule: Rule, follow: Schedule | None
    ) -> None:
        devices, self.patience, ahead, _ = rule
        self.micro_batches, self.costs, self.limit, self.run = (
            micro_batches,
            costs,
            limit * ROUNDING,
            costs.run(devices),
        )
        self.bytes = costs.rest(devices)
        stages, count = range(len(devices)), len(self.bytes)
        self.held = [[stage for stage in reversed(stages) if devices[stage] == device] for device in range(count)]
        self.room = [sum(costs.stages[s].held_bytes for s in self.held[devices[at]] if s >= at) for at in stages]
        self.ahead = [ahead * (len(devices) - 1 - stage) * count / len(devices) for stage in stages]
        self.done = dict.fromkeys(product(stages, (FORWARD, INPUTS)), 0)
        self.weights: list[list[Action]] = [[] for _ in range(count)]
        follows = [[action for action in order if action.kind in PASSES] for order in (follow.orders if follow else ())]
        self.follows = [[a._replace(kind=a.kind.replace(BACKWARD, INPUTS)) for a in reversed(o)] for o in follows]

    def listed(self) -> PipelineRun | None:
        """None where the limit admits no such schedule."""
        self.run.go(self._choose)
        return self.run if min(self.done.values()) == self.micro_batches else None

    def _choose(self, device: int, now: float) -> Action | None:
        weights = self.weights[device]
        soonest = math.inf
        for unit in self._wanted(device):
            if (arrival := self.run.arrival(unit)) <= now:
                self.done[unit.stage, unit.kind] += 1
                self.bytes[device] += self.costs.change(unit)
                if unit.kind == INPUTS:
                    weights.append(unit._replace(kind=WEIGHTS))
                if self.follows:
                    self.follows[device].pop()
                return unit
            soonest = min(soonest, arrival)
        if not weights or soonest < now + self.patience * self.run.seconds[WEIGHTS][weights[0].stage]:
            return None
        self.bytes[device] += self.costs.change(weights[0])
        return weights.pop(0)

    def _wanted(self, device: int) -> list[Action]:
        """Units that memory and rule admit, the most wanted first."""
        room = self.limit - self.bytes[device]
        units = self.follows[device][-1:] if self.follows else []
        if not self.follows:
            begun = [(stage, self.done[stage, FORWARD], self.done[stage, INPUTS]) for stage in self.held[device]]
            units = [Action(stage, INPUTS, back) for stage, forth, back in begun if back < forth]
            for stage, forth, back in begun:
                if forth < self.micro_batches and forth - back <= self.ahead[stage] and self.room[stage] <= room:
                    units.append(Action(stage, FORWARD, forth))
        return [unit for unit in units if self.costs.change(unit) <= room]


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

    def listed(count: int, rules: Sequence[Rule]) -> list[PipelineRun | None]:
        named = {row.name: scheduled(row.name, devices, count, chunks=chunks) for row in rows}
        return [_Listing(count, costs, limit_bytes, rule, named.get(rule[3])).listed() for rule in rules]

    places = sorted({start.devices for start in starts})
    rules: list[Rule] = [(place, patience, ahead, "") for patience, ahead, place in product(PATIENCE, AHEAD, places)]
    rules += [(start.devices, patience, 0.0, start.name) for start in starts for patience in PATIENCE[::2]]
    units = 3 * devices * chunks
    few = min(micro_batches, max(ROUNDS * devices, UNITS // (units * len(rules))))
    rules = rules[: max(len(places) * len(AHEAD), UNITS // (units * few))]
    for scales in (CLOSER, (1.0,)):
        ranked = [rules[at] for at in _ranked(listed(few, rules))]
        best = {rule[1]: rule for rule in reversed(ranked)}.values()
        rules = [(place, patience, ahead * scale, name) for place, patience, ahead, name in best for scale in scales]
    peaks = [max(costs.peaks(start))[0] for start in starts]
    fits = [peak <= limit_bytes * ROUNDING for peak in peaks]
    runs = [played(start, costs.run(start.devices)) if fit else None for start, fit in zip(starts, fits, strict=True)]
    longest = min((_score(run)[0] for run in runs if run), default=math.inf)
    runs += listed(micro_batches, rules)
    if not any(runs):
        raise ValueError(
            f"no schedule of {chunks} stages on each of {devices} devices holds at most {limit_bytes:g} bytes, and "
            f"{starts[peaks.index(min(peaks))].name} at least {min(peaks):g}: take more devices, or recompute more"
        )
    chosen = runs[_ranked(runs, longest)[0]]
    assert chosen is not None
    orders = tuple(map(tuple, chosen.orders))
    return Schedule(name="searched", micro_batches=micro_batches, devices=chosen.devices, orders=orders)


def _score(run: PipelineRun) -> tuple[float, float]:
    """Seconds of the step, and the longest time from a device's first action to its last."""
    spans = [ends[-1] - starts[0] for starts, ends in zip(run.starts, run.ends, strict=True)]
    return max(ends[-1] for ends in run.ends), max(spans)


def _ranked(runs: Sequence[PipelineRun | None], longest: float = math.inf) -> list[int]:
    """Positions, those of the shortest steps first. Nearly the shortest steps that are no longer than `longest` are
    equal, and the ones whose devices are occupied for the shortest time come first."""
    scores = {at: _score(run) for at, run in enumerate(runs) if run}
    shortest = min((seconds for seconds, _ in scores.values()), default=0.0)
    quick = min(longest * ROUNDING, shortest * (1 + AS_QUICK))
    return sorted(scores, key=lambda at: (max(scores[at][0], quick), scores[at][1]))


# ---- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A way to schedule. `name` is what `schedule=` names. `run(devices, micro_batches)` gives a `Schedule`; those of
    `chunks`, `costs` and `limit_bytes` that are in `takes` are its keywords. A device holds `chunks` stages, or any
    number if that is None."""

    name: str
    run: Callable[..., Schedule]
    chunks: int | None = 1
    takes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [word for word in self.takes if word not in TAKEN]:
            raise ValueError(f"schedule {self.name!r} takes {', '.join(unknown)}: give some of {', '.join(TAKEN)}")


TAKEN = ("chunks", "costs", "limit_bytes")
"""What a function that makes a schedule may be given beside numbers of devices and micro-batches."""

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


def in_turn(devices: tuple[int, ...], micro_batches: int) -> Schedule:
    """All forwards, then all backwards, of stages that lie on devices in any way."""
    stages, counts = range(len(devices)), range(micro_batches)
    units = [Action(stage, FORWARD, k) for stage in stages for k in counts]
    units += [Action(stage, BACKWARD, k) for stage in reversed(stages) for k in counts]
    orders = tuple(tuple(u for u in units if devices[u.stage] == device) for device in range(max(devices) + 1))
    return Schedule(name="in turn", micro_batches=micro_batches, devices=devices, orders=orders)


def register_schedule(schedule: Scheduler, *, replace: bool = False) -> None:
    """Adds a `schedule`, by a name under which plans may ask for it. Raises ValueError for what is none, and for a name
    that is taken unless it is to `replace` that one."""
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
    if "costs" in row.takes and "costs" not in given:
        raise ValueError(f"{name} is made for the seconds and bytes of stages: give costs")
    given = {"chunks": chunks} | given
    schedule = row.run(devices, micro_batches, **{key: given[key] for key in row.takes if key in given})
    if name in SCHEDULES.added:
        schedule = _checked(schedule, name, devices, micro_batches, chunks)
    return schedule


def _checked(schedule: Any, name: str, devices: int, micro_batches: int, chunks: int) -> Schedule:
    """What a function of another package gave, by the name that it is asked for. Raises ValueError if it is no schedule
    of these devices, micro-batches and stages."""
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule {name!r}: its run function returned a {type(schedule).__name__}: give a Schedule")
    held = Counter(schedule.devices)
    of_stages = {**dict.fromkeys(range(len(schedule.orders)), 0), **held}
    said = {
        "micro_batches": (schedule.micro_batches, micro_batches),
        "stages of each device": (of_stages, dict.fromkeys(range(devices), chunks)),
    }
    for what, (given, wanted) in said.items():
        if given != wanted:
            raise ValueError(
                f"schedule {name!r} of {devices} devices, {micro_batches} micro-batches and {chunks} stages on each "
                f"has {given!r} as {what}: give {wanted!r}"
            )
    schedule.check()
    return replace(schedule, name=name)
