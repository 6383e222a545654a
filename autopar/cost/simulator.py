"""Simulator: tasks on streams, and what those that run at once share.

A task stands on a stream, on which tasks follow each other, and starts when those that it comes after have ended. It
takes a fixed time (launches, synchronisation), then seconds that are as many as stated while it is alone. What it uses
meanwhile is shared: two collectives over the same links, or a collective and an operator on the same memory.

At every moment each task proceeds at a rate: 1 where nothing that it uses is asked for more than there is. Else rates
are raised together, in proportion to what each task uses most, until something is used up; tasks that use it stay
there, and the others go on (Ghodsi et al. 2011, dominant resource fairness; of one link, equal shares of its bytes).
Rates change when a task starts or ends, and only then.
"""

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Resource = Hashable
"""What is shared: there is 1 of each."""

FULL = 1e-12
"""A resource of which no more than this is left is used up."""


class Task(NamedTuple):
    """`after` are positions of earlier tasks. Alone it takes max(`least_seconds`, `fixed_seconds` + `moving_seconds`);
    `uses` are parts of resources that it uses during its moving seconds at rate 1."""

    stream: str
    after: tuple[int, ...] = ()
    fixed_seconds: float = 0.0
    moving_seconds: float = 0.0
    least_seconds: float = 0.0
    uses: tuple[tuple[Resource, float], ...] = ()

    @property
    def seconds(self) -> float:
        """What it takes alone."""
        return max(self.least_seconds, self.fixed_seconds + self.moving_seconds)


class TaskSpan(NamedTuple):
    """When a task starts and ends."""

    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def scheduled(tasks: Sequence[Task]) -> list[TaskSpan]:
    """When each task runs, from 0 on. Tasks of one stream run in their order here. Raises ValueError for a task that
    comes after itself or a later one, or that uses more than there is."""
    return _Simulation(tasks).spans()


@dataclass(slots=True)
class _Moving:
    """A task that proceeds at `rate`, with so many of its seconds left at `since`."""

    left: float
    since: float
    rate: float

    @property
    def end(self) -> float:
        return self.since + self.left / self.rate

    def at(self, now: float, rate: float) -> None:
        """A new rate from now on. One that stays as it is is left alone, so that nothing is lost to rounding."""
        if rate != self.rate:
            self.left = max(0.0, self.left - (now - self.since) * self.rate)
            self.since, self.rate = now, rate


class _Simulation:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.now = 0.0
        self.starts = [0.0] * len(tasks)
        self.ends = [0.0] * len(tasks)
        self.missing = [0] * len(tasks)
        """How many tasks each waits for."""
        self.followers: list[list[int]] = [[] for _ in tasks]
        self.moving: dict[int, _Moving] = {}
        self.next_end = math.inf
        """Of those that move."""
        self.queue: list[tuple[float, int, bool]] = []
        """(when, task, whether it then ends, or begins to move)."""
        last: dict[str, int] = {}
        for i, task in enumerate(tasks):
            before = {*task.after, *([last[task.stream]] if task.stream in last else ())}
            last[task.stream] = i
            if not all(0 <= b < i for b in before):
                raise ValueError(f"task {i} on stream {task.stream!r} comes after {sorted(before)}: name earlier tasks")
            if not all(0 < part <= 1 + FULL for _, part in task.uses):
                raise ValueError(f"task {i} on stream {task.stream!r} uses {task.uses}: parts above 0 and at most 1")
            self.missing[i] = len(before)
            for b in before:
                self.followers[b].append(i)

    def spans(self) -> list[TaskSpan]:
        for i in [i for i, count in enumerate(self.missing) if not count]:
            self._start(i)
        while self.queue or self.moving:
            if self.queue and self.queue[0][0] <= self.next_end:
                self.now, i, ends = heapq.heappop(self.queue)
                if ends:
                    self._end(i)
                else:
                    self.moving[i] = _Moving(self.tasks[i].moving_seconds, self.now, 0.0)
                    self._share()
            else:
                self.now = self.next_end
                i = min(self.moving, key=lambda k: self.moving[k].end)
                del self.moving[i]
                self._share()
                least = self.starts[i] + self.tasks[i].least_seconds
                if least > self.now:
                    heapq.heappush(self.queue, (least, i, True))
                else:
                    self._end(i)
        return [TaskSpan(start, end) for start, end in zip(self.starts, self.ends, strict=True)]

    def _start(self, i: int) -> None:
        task = self.tasks[i]
        self.starts[i] = self.now
        shares = bool(task.uses) and task.moving_seconds > 0
        heapq.heappush(self.queue, (self.now + (task.fixed_seconds if shares else task.seconds), i, not shares))

    def _end(self, i: int) -> None:
        self.ends[i] = self.now
        for k in self.followers[i]:
            self.missing[k] -= 1
            if not self.missing[k]:
                self._start(k)

    def _share(self) -> None:
        if len(self.moving) == 1:  # nothing to share
            ((_, alone),) = self.moving.items()
            alone.at(self.now, 1.0)
            self.next_end = alone.end
            return
        rates = fair_rates({i: dict(self.tasks[i].uses) for i in self.moving})
        for i, moving in self.moving.items():
            moving.at(self.now, rates[i])
        self.next_end = min((moving.end for moving in self.moving.values()), default=math.inf)


def fair_rates(uses: Mapping[int, Mapping[Resource, float]]) -> dict[int, float]:
    """The rate of each task, from 0 to 1, by what it uses at rate 1."""
    left: dict[Resource, float] = {}
    for parts in uses.values():
        for resource, part in parts.items():
            left[resource] = left.get(resource, 1.0) - part
    if all(rest >= -FULL for rest in left.values()):
        return dict.fromkeys(uses, 1.0)
    left = dict.fromkeys(left, 1.0)
    rates = dict.fromkeys(uses, 0.0)
    most = {i: max(parts.values()) for i, parts in uses.items()}
    rising = set(uses)
    while rising:
        asked: dict[Resource, float] = {}
        for i in rising:
            for resource, part in uses[i].items():
                asked[resource] = asked.get(resource, 0.0) + part / most[i]
        step = min(
            *((1.0 - rates[i]) * most[i] for i in rising), *(left[resource] / part for resource, part in asked.items())
        )
        for i in rising:
            rates[i] += step / most[i]
        for resource, part in asked.items():
            left[resource] -= step * part
        full = {resource for resource, rest in left.items() if rest <= FULL}
        rising = {i for i in rising if rates[i] < 1.0 - FULL and full.isdisjoint(uses[i])}
    return rates
