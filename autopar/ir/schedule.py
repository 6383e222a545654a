"""Schedules of pipelines: in which order each device runs the forwards and backwards of its stages.

    1f1b: stages on devices 0 1, 2 micro-batches
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

A line per device. `0F1` is the forward of stage 0 for micro-batch 1, `B` a whole backward, `I` the gradient of inputs,
`W` that of weights. `0SEND_F1` sends what this forward made to stage 1, where `1RECV_F1` receives it; `0SEND_F1:3` and
`3RECV_F1:0` are those of a skip from stage 0 to stage 3. A text parses back. Without stages on one device and skips, it
has the actions that `torch.distributed.pipelining` reads.
"""

import csv
import io
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
"""Kind of a unit -> whether what it makes and needs belongs to forward or to backward."""

TRANSFERS = {SEND: "SEND", RECEIVE: "RECV"}
ACTION = re.compile(r"(\d+)(?:([FBIW])|(SEND|RECV)_([FB]))(\d+)(?::(\d+))?")
NOT_OURS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")
"""Actions of torch's runtime that belong to data parallelism."""


class Action(NamedTuple):
    """What a device does for one stage and one micro-batch. Of a transfer, `peer` is the other stage, and `of` says
    whether the value is of "F"orward or of "B"ackward."""

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


def parsed_action(text: str) -> Action:
    """The action of a text. Raises ValueError for what is none."""
    if (found := ACTION.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no action of a schedule: write 0F1, 0B1, 0I1, 0W1, 0SEND_F1 or 1RECV_F1")
    stage, unit, transfer, of, micro_batch, peer = found.groups()
    if unit:
        return Action(int(stage), unit, int(micro_batch))
    kind = SEND if transfer == "SEND" else RECEIVE
    other = int(peer) if peer else _neighbour(int(stage), kind, of)
    return Action(int(stage), kind, int(micro_batch), other, of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`devices` says which device holds each stage, `orders` what each device does. Units are whole backwards or those
    in two parts, with transfers or without."""

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

    def to_csv(self) -> str:
        """What `_PipelineScheduleRuntime._load_csv` of `torch.distributed.pipelining` reads, with transfers as
        "compute_comms". Raises ValueError for a skip, since its stages send to their neighbours alone."""
        rows = [[*map(str, order)] for order in self.orders]
        if skips := [action for row in rows for action in row if ":" in action]:
            raise ValueError(f"{self.name}: torch's runtime has no skips between stages, such as {skips[0]}")
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(rows)
        return written.getvalue()

    def check(self) -> None:
        """Raises ValueError for an action that is missing, twice, on the wrong device or before what it needs, and
        where devices wait for each other: in units, each stage after the one before it; in transfers even if a send
        blocks until its receive is reached."""
        if set(self.devices) != {*range(len(self.orders))}:
            raise ValueError(f"{self.name}: stages on devices {self.devices}, and {len(self.orders)} orders")
        position: dict[Action, int] = {}
        for device, order in enumerate(self.orders):
            for at, action in enumerate(order):
                self._check_action(action, device)
                if action in position:
                    raise ValueError(f"{self.name}: {action} is there twice, on device {device}")
                position[action] = at
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                self._check_units(position, stage, micro_batch)
        for action, at in position.items():
            if action.kind in TRANSFERS:
                self._check_transfer(position, action, at)
        played(self, dict.fromkeys("FBIW", (0.0,) * self.stages), chain(self.stages))
        self._meet()

    def _check_action(self, action: Action, device: int) -> None:
        legal = action.kind in (*PASSES, WEIGHTS) or (action.kind in TRANSFERS and action.of in (FORWARD, BACKWARD))
        if not legal or not 0 <= action.stage < self.stages or not 0 <= action.micro_batch < self.micro_batches:
            raise ValueError(f"{self.name}: {action} is none of {self.stages} stages and {self.micro_batches} batches")
        if self.devices[action.stage] != device:
            raise ValueError(
                f"{self.name}: {action} is on device {device}, and its stage on device {self.devices[action.stage]}"
            )
        if action.kind in TRANSFERS:
            forth = action.stage < action.peer if action.kind == SEND else action.peer < action.stage
            if not 0 <= action.peer < self.stages or forth != (action.of == FORWARD):
                raise ValueError(f"{self.name}: {action} does not lead to a stage where its value is needed")

    def _check_units(self, position: Mapping[Action, int], stage: int, micro_batch: int) -> None:
        whole = Action(stage, BACKWARD, micro_batch) in position
        kinds = (FORWARD, BACKWARD) if whole else (FORWARD, INPUTS, WEIGHTS)
        units = [Action(stage, kind, micro_batch) for kind in kinds]
        for unit in units:
            if unit not in position:
                raise ValueError(f"{self.name}: {unit} is missing on device {self.devices[stage]}")
        if whole and (part := {Action(stage, kind, micro_batch) for kind in (INPUTS, WEIGHTS)} & position.keys()):
            raise ValueError(f"{self.name}: {units[1]} is the whole backward, and {min(part)} is there, too")
        for before, after in itertools.pairwise(units):
            if position[before] > position[after]:
                raise ValueError(f"{self.name}: {after} comes before {before} on device {self.devices[stage]}")

    def _check_transfer(self, position: Mapping[Action, int], action: Action, at: int) -> None:
        if action.mirror not in position:
            raise ValueError(f"{self.name}: {action} is there, and {action.mirror} is not")
        kinds = [kind for kind, of in PASSES.items() if of == action.of]
        unit = next(u for kind in kinds if (u := Action(action.stage, kind, action.micro_batch)) in position)
        if (at > position[unit]) != (action.kind == SEND):
            before, after = (action, unit) if action.kind == SEND else (unit, action)
            raise ValueError(f"{self.name}: {before} comes before {after}")

    def _meet(self) -> None:
        """Runs the transfers, each of which takes place when both devices have come to it."""
        rest = [[a for a in reversed(order) if a.kind in TRANSFERS] for order in self.orders]
        ready = [*range(len(rest))]
        while ready:
            device = ready.pop()
            while rest[device]:
                action = rest[device][-1]
                peer = rest[self.devices[action.peer]]
                if not peer or peer[-1] != action.mirror:
                    break
                rest[device].pop()
                peer.pop()
                ready.append(self.devices[action.peer])
        _refuse_stuck(self, {device: actions[-1] for device, actions in enumerate(rest) if actions})


def _refuse_stuck(schedule: Schedule, stuck: Mapping[int, Action]) -> None:
    if stuck:
        places = ", ".join(f"device {device} at {action}" for device, action in sorted(stuck.items()))
        raise ValueError(f"{schedule.name}: devices wait for each other: {places}")


def parsed_schedule(text: str) -> Schedule:
    """The schedule that has this text. Raises ValueError for what is none."""
    head, *lines = text.strip().splitlines()
    found = re.fullmatch(r"(.*): stages on devices ([\d ]+), (\d+) micro-batches", head.strip())
    if found is None:
        raise ValueError(f"{head!r} does not begin a schedule: write 'NAME: stages on devices 0 1, 2 micro-batches'")
    orders = tuple(tuple(map(parsed_action, line.split())) for line in lines)
    devices = tuple(map(int, found[2].split()))
    return Schedule(name=found[1], micro_batches=int(found[3]), devices=devices, orders=orders)


def schedule_of_csv(text: str, name: str) -> Schedule:
    """The schedule of a file of actions of `torch.distributed.pipelining`, without those of its data parallelism; of
    a forward and a backward at once, one after the other. Raises ValueError for what is none."""
    cells = [",".join(row).replace("(", "").replace(")OVERLAP_F_B", "") for row in csv.reader(io.StringIO(text))]
    texts = [[t for cell in re.split("[,;]", row) if (t := cell.strip()) and not NOT_OURS.match(t)] for row in cells]
    orders = tuple(tuple(map(parsed_action, row)) for row in texts)
    held = {action.stage: device for device, order in enumerate(orders) for action in order}
    if sorted(held) != [*range(len(held))]:
        raise ValueError(f"{name}: there are actions of stages {sorted(held)}, and no others")
    return Schedule(
        name=name,
        micro_batches=1 + max((action.micro_batch for order in orders for action in order), default=-1),
        devices=tuple(held[stage] for stage in range(len(held))),
        orders=orders,
    )


def chain(stages: int, seconds: float = 0.0) -> dict[Edge, float]:
    """The edges of stages that need the one before alone, each with the seconds that a value is on its way."""
    pairs = [(stage, stage + 1) for stage in range(stages - 1)]
    forth = {(a, b, FORWARD): seconds for a, b in pairs}
    return forth | {(b, a, BACKWARD): seconds for a, b in pairs}


def played(
    schedule: Schedule, seconds: Mapping[str, Sequence[float]], edges: Mapping[Edge, float], *, shared: bool = False
) -> tuple[list[list[float]], list[list[float]]]:
    """When each action of each device starts and when it ends. `seconds` are those of a kind of unit, by stage, `edges`
    those that a value is on its way to another device. Transfers cost no device time: a value leaves when it is made,
    and a unit waits until what it needs has arrived. With `shared`, the values that one device sends to another travel
    one after the other. Raises ValueError where devices wait for each other."""
    into: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    out: dict[tuple[int, str], list[tuple[list[float], float, tuple[int, int]]]] = defaultdict(list)
    for (source, target, of), delay in edges.items():
        link = (schedule.devices[source], schedule.devices[target])
        arrivals = [-1.0] * schedule.micro_batches
        into[target, of].append(arrivals)
        out[source, of].append((arrivals, delay if link[0] != link[1] else 0.0, link))
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    free: dict[tuple[int, int], float] = defaultdict(float)
    waiting: dict[tuple[int, int], int] = {}
    ready = [*range(len(schedule.orders))]
    while ready:
        device = ready.pop()
        began, ended, order = starts[device], ends[device], schedule.orders[device]
        now = ended[-1] if ended else 0.0
        for at in range(len(ended), len(order)):
            stage, kind, micro_batch = order[at][:3]
            of = PASSES.get(kind, "")
            for arrivals in into[stage, of] if of else ():
                arrival = arrivals[micro_batch]
                if arrival < 0:
                    waiting[id(arrivals), micro_batch] = device
                    break
                now = max(now, arrival)
            else:
                began.append(now)
                now += seconds[kind][stage] if kind in seconds else 0.0
                ended.append(now)
                for arrivals, delay, link in out[stage, of] if of else ():
                    leaves = max(now, free[link]) if shared and delay else now
                    free[link] = arrivals[micro_batch] = leaves + delay
                    if (woken := waiting.pop((id(arrivals), micro_batch), None)) is not None:
                        ready.append(woken)
                continue
            break
    stuck = {d: order[len(ends[d])] for d, order in enumerate(schedule.orders) if len(ends[d]) < len(order)}
    _refuse_stuck(schedule, stuck)
    return starts, ends


def with_transfers(schedule: Schedule, edges: Iterable[Edge]) -> Schedule:
    """The schedule with the transfers of these edges, but for those within a device. A send follows its unit, and a
    receive stands right before the unit that needs it, in the order of the sends from one device to another.

    Devices are run as if a send blocked until its receive is reached, so whatever order comes out cannot deadlock. Only
    where several wait for each other in a circle is a receive moved ahead of the send at which its device waits: the
    one that its device would have come to soonest."""
    plain = replace(schedule, orders=tuple(tuple(a for a in o if a.kind not in TRANSFERS) for o in schedule.orders))
    return replace(plain, orders=tuple(map(tuple, _Transfers(plain, edges).orders)))


class _Transfers:
    """A run of a schedule, in which receives are put where they are needed."""

    def __init__(self, schedule: Schedule, edges: Iterable[Edge]) -> None:
        self.schedule, self.devices = schedule, schedule.devices
        self.sources: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.targets: dict[tuple[int, str], list[int]] = defaultdict(list)
        for source, target, of in edges:
            if self.devices[source] != self.devices[target]:
                self.sources[target, of].append(source)
                self.targets[source, of].append(target)
        self.position = {
            (unit.stage, PASSES[unit.kind], unit.micro_batch): at
            for order in schedule.orders
            for at, unit in enumerate(order)
            if unit.kind in PASSES
        }
        self.at = [0] * len(schedule.orders)
        self.sends: list[list[Action]] = [[] for _ in schedule.orders]
        """What a device has made and not sent, the next one last."""
        self.received: set[Action] = set()
        self.orders: list[list[Action]] = [[] for _ in schedule.orders]
        ready = [*range(len(self.orders))]
        while ready or (ready := self._unlock()):
            device = ready.pop(0)
            while (met := self._advance(device)) is not None:
                ready += met

    def _missing(self, device: int) -> Action | None:
        """The first receive without which the device's next unit cannot run."""
        unit = self.schedule.orders[device][self.at[device]]
        of = PASSES.get(unit.kind, "")
        receives = (Action(unit.stage, RECEIVE, unit.micro_batch, peer, of) for peer in self.sources[unit.stage, of])
        return next((receive for receive in receives if receive not in self.received), None)

    def _waits_for(self, device: int) -> int | None:
        """The device that this one waits for; itself if for none; None at its end."""
        if self.sends[device]:
            return self.devices[self.sends[device][-1].peer]
        if self.at[device] == len(self.schedule.orders[device]):
            return None
        missing = self._missing(device)
        return device if missing is None else self.devices[missing.peer]

    def _advance(self, device: int) -> list[int] | None:
        """One action of a device, and the devices that it frees; None where it has to wait or is at its end."""
        peer = self._waits_for(device)
        if peer is None:
            return None
        if peer == device:
            unit = self.schedule.orders[device][self.at[device]]
            self.orders[device].append(unit)
            self.at[device] += 1
            of = PASSES.get(unit.kind, "")
            targets = reversed(self.targets[unit.stage, of])
            self.sends[device] = [Action(unit.stage, SEND, unit.micro_batch, target, of) for target in targets]
            return []
        sender = device if self.sends[device] else peer
        receiver = peer if sender == device else device
        if self.sends[receiver] or self._waits_for(receiver) != sender or self._waits_for(sender) != receiver:
            return None
        return self._transfer(sender) if self.sends[sender] else None

    def _transfer(self, sender: int) -> list[int]:
        send = self.sends[sender].pop()
        receiver = self.devices[send.peer]
        self.orders[sender].append(send)
        self.orders[receiver].append(send.mirror)
        self.received.add(send.mirror)
        return [sender, receiver]

    def _unlock(self) -> list[int]:
        """The devices that go on when a receive in a circle of waiting devices is moved ahead; none at the end."""
        device = next((d for d in range(len(self.orders)) if self._waits_for(d) is not None), None)
        path: list[int] = []
        while device is not None and device not in path:
            path.append(device)
            device = self._waits_for(device)
        if device is None:
            return []
        circle = path[path.index(device) :]
        if not (senders := [d for d in circle if self.sends[d]]):
            _refuse_stuck(self.schedule, {d: self.schedule.orders[d][self.at[d]] for d in circle})

        def distance(sender: int) -> tuple[int, int]:
            send = self.sends[sender][-1]
            return self.position[send.peer, send.of, send.micro_batch] - self.at[self.devices[send.peer]], sender

        return self._transfer(min(senders, key=distance))
