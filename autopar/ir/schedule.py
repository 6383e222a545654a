"""Schedules of pipelines: in which order each device runs the forwards and backwards of its stages.

    1f1b: stages on devices 0 1, 2 micro-batches
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

A line per device. `0F1` is the forward of stage 0 for micro-batch 1, `B` a whole backward, `I` the gradient of inputs,
`W` that of weights. `0SEND_F1` sends what this forward made to stage 1, where `1RECV_F1` receives it; `0SEND_F1:3` and
`3RECV_F1:0` are those of a skip from stage 0 to stage 3. A text parses back. With commas and without the first line, it
is a file of actions of `torch.distributed.pipelining`.
"""

import heapq
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS, SEND, RECEIVE = "F", "B", "I", "W", "send", "receive"
UNITS = (FORWARD, BACKWARD, INPUTS, WEIGHTS)

Edge = tuple[int, int, str]
"""A value that one stage makes and another needs: (from stage, to stage, "F"orward or "B"ackward)."""

PASSES = {FORWARD: FORWARD, BACKWARD: BACKWARD, INPUTS: BACKWARD}
"""Kind of a unit -> whether what it needs and what it makes belongs to forward or to backward."""

FOLLOWS = {"F": "F", "FB": "W", "FI": "I", "IW": "W"}
"""The last unit of a stage and a micro-batch, and what comes next -> the last unit then; "W" when all is done."""

MISSING = {"": FORWARD, FORWARD: BACKWARD, INPUTS: WEIGHTS}
TRANSFERS = {SEND: "SEND", RECEIVE: "RECV"}
HEAD = re.compile(r"(.*): stages on devices ([\d ]+), (\d+) micro-batches")
ACTION = re.compile(r"(\d+)(?:([FBIW])|(SEND|RECV)_([FB]))(\d+)(?::(\d+))?")
NO_ACTION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)|OVERLAP_F_B")
"""In files of torch: actions of data parallelism, and a mark on a forward and a backward that run at once."""


class Action(NamedTuple):
    """What a device does for one stage and one micro-batch. Of a transfer, `peer` is the other stage, and `of` says
    whether the value is one of "F"orward or of "B"ackward."""

    stage: int
    kind: str
    micro_batch: int
    peer: int = -1
    of: str = ""

    def __str__(self) -> str:
        if self.kind not in TRANSFERS:
            return f"{self.stage}{self.kind}{self.micro_batch}"
        skip = "" if self.peer == _neighbour(self.stage, self.kind, self.of) else f":{self.peer}"
        return f"{self.stage}{TRANSFERS[self.kind]}_{self.of}{self.micro_batch}{skip}"

    @property
    def mirror(self) -> "Action":
        """The other half of a transfer."""
        return Action(self.peer, RECEIVE if self.kind == SEND else SEND, self.micro_batch, self.stage, self.of)


def _neighbour(stage: int, kind: str, of: str) -> int:
    return stage + (1 if (kind == SEND) == (of == FORWARD) else -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`devices` says which device holds each stage, `orders` what each device does: whole backwards or their two parts,
    with transfers or without."""

    name: str
    micro_batches: int
    devices: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        head = f"{self.name}: stages on devices {' '.join(map(str, self.devices))}, {self.micro_batches} micro-batches"
        return "\n".join([head, *(" ".join(map(str, order)) for order in self.orders)])

    def in_flight(self, places: Sequence[int]) -> list[int]:
        """The most micro-batches between their forward and the gradient of their inputs at each place, those of each
        stage there counted. `places` are the numbers of those of the stages: themselves, or their devices."""
        most = [0] * (max(places) + 1)
        now = [*most]
        for action in itertools.chain(*self.orders):
            place = places[action.stage]
            now[place] += {FORWARD: 1, INPUTS: -1, BACKWARD: -1}.get(action.kind, 0)
            most[place] = max(most[place], now[place])
        return most

    def to_csv(self) -> str:
        """What `_PipelineScheduleRuntime` of `torch.distributed.pipelining` reads, as "compute_only", or with transfers
        as "compute_comms". Raises ValueError for a skip: its stages send to their neighbours alone."""
        rows = "\n".join(",".join(map(str, order)) for order in self.orders)
        if skip := re.search(r"\w+:\d+", rows):
            raise ValueError(f"{self.name}: torch's runtime has no skips between stages, such as {skip[0]}")
        return f"{rows}\n"

    def check(self) -> None:
        """Raises ValueError for an action that is missing, twice, none of its stages', on the wrong device or before
        what it needs, and where devices wait for each other: in units, each stage after the one before it; in
        transfers, even if a send blocks until its receive is reached."""
        state = dict.fromkeys(itertools.product(range(self.stages), range(self.micro_batches)), "")
        transfers: set[Action] = set()
        for device, order in enumerate(self.orders):
            for action in order:
                stage, kind, micro_batch, _, of = action
                before = state.get((stage, micro_batch))
                if before is None or self.devices[stage] != device:
                    raise ValueError(f"{self.name}: {action} is not on the device of a stage, but on {device}")
                if kind in TRANSFERS:
                    is_made = before != "" and (of == FORWARD or before != FORWARD)
                    if is_made != (kind == SEND) or action in transfers:
                        raise ValueError(f"{self.name}: {action} is there twice, or on the wrong side of its unit")
                    transfers.add(action)
                elif (after := FOLLOWS.get(f"{before}{kind}")) is None:
                    raise ValueError(f"{self.name}: {action} comes twice, or before what it needs")
                else:
                    state[stage, micro_batch] = after
        for (stage, micro_batch), last in state.items():
            if last != WEIGHTS:
                raise ValueError(f"{self.name}: {stage}{MISSING[last]}{micro_batch} is missing")
        if lost := {action.mirror for action in transfers} - transfers:
            raise ValueError(f"{self.name}: {min(lost)} is missing, and its counterpart is there")
        played(self, PipelineRun(self.devices, {}, chain(self.stages)))
        _met(self, moves=False)


def parsed_schedule(text: str) -> Schedule:
    """The schedule of a text, or of a file of actions of `torch.distributed.pipelining`, which is read without the
    actions of data parallelism. Raises ValueError for what is none."""
    head, lines = HEAD.match(text), text.strip().splitlines()
    orders = []
    for line in lines[1:] if head else lines:
        orders.append(tuple(_action(t) for t in re.findall(r"[^\s,;()]+", line) if not NO_ACTION.fullmatch(t)))
    if head:
        name, count, devices = head[1], int(head[3]), tuple(map(int, head[2].split()))
    else:
        held = {action.stage: device for device, order in enumerate(orders) for action in order}
        name, devices = "csv", tuple(device for _, device in sorted(held.items()))
        count = 1 + max((action.micro_batch for order in orders for action in order), default=-1)
    return Schedule(name=name, micro_batches=count, devices=devices, orders=tuple(orders))


def _action(text: str) -> Action:
    if (found := ACTION.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no action of a schedule: write 0F1, 0B1, 0I1, 0W1, 0SEND_F1 or 1RECV_F1")
    stage, micro_batch, of = int(found[1]), int(found[5]), found[4]
    if found[2]:
        return Action(stage, found[2], micro_batch)
    kind = SEND if found[3] == TRANSFERS[SEND] else RECEIVE
    return Action(stage, kind, micro_batch, int(found[6] or _neighbour(stage, kind, of)), of)


# ---- running ---------------------------------------------------------------------------------------


EARLY_RECEIVES = 4
"""On gloo, receives of a device that begin before it comes to them."""


def chain(stages: int, seconds: float = 0.0) -> dict[Edge, float]:
    """The edges of stages that need the one before alone, each with the seconds that a value is on its way."""
    pairs = [*itertools.pairwise(range(stages))]
    return {(a, b, FORWARD): seconds for a, b in pairs} | {(b, a, BACKWARD): seconds for a, b in pairs}


class PipelineRun:
    """A run of devices: which actions each of them runs, and when. `seconds` are those of a kind of unit, by stage,
    `edges` those that a value is on its way to another device. Transfers cost no device time: a value leaves when it is
    made. With `shared`, the values that one device sends to another travel one after the other."""

    def __init__(
        self,
        devices: tuple[int, ...],
        seconds: Mapping[str, Sequence[float]],
        edges: Mapping[Edge, float],
        *,
        shared: bool = False,
    ) -> None:
        self.devices, self.seconds, self.edges, self.shared = devices, seconds, edges, shared
        self.into: dict[tuple[int, str], list[Edge]] = defaultdict(list)
        self.out: dict[tuple[int, str], list[Edge]] = defaultdict(list)
        for edge in edges:
            self.into[edge[1], edge[2]].append(edge)
            self.out[edge[0], edge[2]].append(edge)
        self.orders: list[list[Action]] = [[] for _ in range(max(devices) + 1)]
        self.starts: list[list[float]] = [[] for _ in self.orders]
        self.ends: list[list[float]] = [[] for _ in self.orders]
        self.arrived: dict[tuple[Edge, int], float] = {}
        self.free: dict[tuple[int, int], float] = defaultdict(float)

    def arrival(self, action: Action) -> float:
        """When all is there that a unit needs of others; infinity while that is not known."""
        edges = self.into[action.stage, PASSES.get(action.kind, "")]
        return max([self.arrived.get((edge, action.micro_batch), math.inf) for edge in edges], default=0.0)

    def go(self, choose: Callable[[int, float], Action | None]) -> None:
        """Runs until no device has anything to do. A free device runs what `choose(device, now)` says; if that is
        nothing, it is asked again when a value arrives."""
        events = [(0.0, device) for device in range(len(self.orders))]
        while events:
            now, device = heapq.heappop(events)
            ends = self.ends[device]
            if (ends and now < ends[-1]) or (action := choose(device, now)) is None:
                continue
            stage, kind, micro_batch = action[:3]
            self.orders[device].append(action)
            self.starts[device].append(now)
            ends.append(now + self.seconds[kind][stage] if kind in self.seconds else now)
            heapq.heappush(events, (ends[-1], device))
            for edge in self.out[stage, PASSES.get(kind, "")]:
                peer, arrives = self.devices[edge[1]], ends[-1]
                if peer != device:
                    leaves = max(arrives, self.free[device, peer]) if self.shared else arrives
                    arrives = self.free[device, peer] = leaves + self.edges[edge]
                self.arrived[edge, micro_batch] = arrives
                heapq.heappush(events, (arrives, peer))


def played(schedule: Schedule, run: PipelineRun) -> PipelineRun:
    """The run in which each device keeps to its order: an action waits until what it needs has arrived. Raises
    ValueError where devices wait for each other."""
    _refuse(_stuck(schedule, run), schedule)
    return run


def _stuck(schedule: Schedule, run: PipelineRun) -> dict[int, Action]:
    """Runs what the devices can run, each in its order. Device -> the action that it then waits to run."""
    following = [*map(iter, schedule.orders)]
    actions = [next(order, None) for order in following]

    def choose(device: int, now: float) -> Action | None:
        action = actions[device]
        if action is None or run.arrival(action) > now:
            return None
        actions[device] = next(following[device], None)
        return action

    run.go(choose)
    return {device: action for device, action in enumerate(actions) if action}


def in_sequence(schedule: Schedule, edges: Iterable[Edge]) -> list[Action]:
    """The units of all devices one after the other, each after the units that make what it needs."""
    seconds = {kind: [1.0] * schedule.stages for kind in UNITS}
    run = PipelineRun(schedule.devices, seconds, dict.fromkeys(edges, 0.0))
    stuck = _stuck(schedule, run)
    assert not stuck, f"all devices wait: {', '.join(map(str, stuck.values()))}"
    started = zip(itertools.chain(*run.starts), itertools.chain(*run.orders), strict=True)
    return [action for _, action in sorted(started) if action.kind in UNITS]


def _refuse(stuck: Mapping[int, Action], schedule: Schedule) -> None:
    if stuck:
        places = ", ".join(f"device {device} at {action}" for device, action in sorted(stuck.items()))
        raise ValueError(f"{schedule.name}: devices wait for each other: {places}")


def with_transfers(schedule: Schedule, edges: Iterable[Edge]) -> Schedule:
    """A schedule of units with the transfers of these edges, but for those within a device. A send follows its unit,
    and a receive stands right before the unit that needs it, in the order of the sends from one device to another.

    Devices are run as if a send blocked until its receive is reached, so that the orders that come out cannot deadlock.
    Only where devices wait for each other in a circle is one of its receives moved to where its device waits: the one
    that this device would have come to soonest."""
    peers: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for source, target, of in edges:
        if schedule.devices[source] != schedule.devices[target]:
            peers[RECEIVE, target, of].append(source)
            peers[SEND, source, of].append(target)

    def transfers(unit: Action, kind: str) -> list[Action]:
        of = PASSES.get(unit.kind, "")
        return [Action(unit.stage, kind, unit.micro_batch, peer, of) for peer in peers[kind, unit.stage, of]]

    orders = [[[*transfers(unit, RECEIVE), unit, *transfers(unit, SEND)] for unit in o] for o in schedule.orders]
    return _met(replace(schedule, orders=tuple(tuple(itertools.chain(*order)) for order in orders)), moves=True)


def _met(schedule: Schedule, *, moves: bool) -> Schedule:
    """The schedule after a run in which a transfer takes place when both devices have come to it. Where they wait for
    each other in a circle, a receive `moves` ahead, or ValueError is raised."""
    rest = [[*reversed(order)] for order in schedule.orders]
    orders: list[list[Action]] = [[] for _ in rest]
    ready = [*range(len(rest))]
    while ready or any(rest):
        device = ready.pop() if ready else _move(schedule, rest, moves)
        while rest[device]:
            action = rest[device][-1]
            if action.kind in TRANSFERS:
                peer = schedule.devices[action.peer]
                if not rest[peer] or rest[peer][-1] != action.mirror:
                    break
                orders[peer].append(rest[peer].pop())
                ready.append(peer)
            orders[device].append(rest[device].pop())
    return replace(schedule, orders=tuple(map(tuple, orders)))


def _move(schedule: Schedule, rest: list[list[Action]], moves: bool) -> int:
    """A device that goes on, when a receive of a circle of waiting devices has been moved ahead."""
    device, path = next(device for device, actions in enumerate(rest) if actions), list[int]()
    while device not in path:
        path.append(device)
        device = schedule.devices[rest[device][-1].peer]
    circle = {device: rest[device][-1] for device in path[path.index(device) :]}
    ahead = []
    for device, send in circle.items():
        if moves and send.kind == SEND:
            receiver = schedule.devices[send.peer]
            ahead.append(
                (next(n for n, a in enumerate(reversed(rest[receiver])) if a == send.mirror), device, receiver)
            )
    if not ahead:
        _refuse(circle, schedule)
    distance, device, receiver = min(ahead)
    rest[receiver].append(rest[receiver].pop(-1 - distance))
    return device
