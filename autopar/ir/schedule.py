"""Schedules of pipelines: in which order each device runs the forwards and backwards of its stages.

    1f1b: stages on devices 0 1, 2 micro-batches
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

A line per device. `0F1` is the forward of stage 0 for micro-batch 1, `B` a whole backward, `I` the gradient of inputs,
`W` that of weights. `0SEND_F1` sends what this forward made to stage 1, where `1RECV_F1` receives it; `0SEND_F1:3` and
`3RECV_F1:0` are those of a skip from stage 0 to stage 3. A text parses back. With commas and without the first line, it
is a file of actions of `torch.distributed.pipelining`.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS, SEND, RECEIVE = "F", "B", "I", "W", "send", "receive"

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

    def __str__(self) -> str:
        head = f"{self.name}: stages on devices {' '.join(map(str, self.devices))}, {self.micro_batches} micro-batches"
        return "\n".join([head, *(" ".join(map(str, order)) for order in self.orders)])

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
        stages = range(len(self.devices))
        state = dict.fromkeys(itertools.product(stages, range(self.micro_batches)), "")
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
        played(self, dict.fromkeys("FBIW", [0.0] * len(self.devices)), chain(len(self.devices)))
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


def chain(stages: int, seconds: float = 0.0) -> dict[Edge, float]:
    """The edges of stages that need the one before alone, each with the seconds that a value is on its way."""
    pairs = [*itertools.pairwise(range(stages))]
    return {(a, b, FORWARD): seconds for a, b in pairs} | {(b, a, BACKWARD): seconds for a, b in pairs}


def played(
    schedule: Schedule, seconds: Mapping[str, Sequence[float]], edges: Mapping[Edge, float], *, shared: bool = False
) -> tuple[list[list[float]], list[list[float]]]:
    """When each action of each device starts and when it ends. `seconds` are those of a kind of unit, by stage, `edges`
    those that a value is on its way to another device. Transfers cost no device time: a value leaves when it is made,
    and a unit waits until what it needs has arrived. With `shared`, the values that one device sends to another travel
    one after the other. Raises ValueError where devices wait for each other."""
    into: dict[tuple[int, str], list[Edge]] = defaultdict(list)
    out: dict[tuple[int, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        out[edge[0], edge[2]].append(edge)
        into[edge[1], edge[2]].append(edge)
    devices, orders = schedule.devices, schedule.orders
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    arrived: dict[tuple[Edge, int], float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)
    waiting: dict[tuple[Edge, int], int] = {}
    ready = [*range(len(orders))]
    while ready:
        device = ready.pop()
        began, ended, order = starts[device], ends[device], orders[device]
        now = ended[-1] if ended else 0.0
        for at in range(len(ended), len(order)):
            stage, kind, micro_batch = order[at][:3]
            unit = (stage, PASSES.get(kind, ""))
            needed = [(edge, micro_batch) for edge in into[unit]]
            if late := [value for value in needed if value not in arrived]:
                waiting[late[0]] = device
                break
            now = max([now, *(arrived[value] for value in needed)])
            began.append(now)
            now += seconds[kind][stage] if kind in seconds else 0.0
            ended.append(now)
            for edge in out[unit]:
                link = (device, devices[edge[1]])
                leaves = max(now, free[link]) if shared else now
                free[link] = arrived[edge, micro_batch] = leaves + edges[edge] if link[0] != link[1] else now
                if (edge, micro_batch) in waiting:
                    ready.append(waiting.pop((edge, micro_batch)))
    _refuse({d: o[len(ends[d])] for d, o in enumerate(orders) if len(ends[d]) < len(o)}, schedule)
    return starts, ends


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
