"""What `autopar.Metrics` sees of the programs of a module: how often each goes backward, and the seconds that each kind
of collective holds a rank up, by mesh axis."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from .compiled import Clock

S = TypeVar("S")
"""A program's state."""

Key = tuple[str, str]
"""The kind of a collective, and the name of a mesh axis."""

MARKS_MOST = 20_000
"""Pairs of marks that a stream has not come to yet; further waits are not timed."""


class Waits:
    """On a host, the seconds between begin and end. On a GPU, where the host does not wait, marks in the stream, which
    are read once the stream has passed them: nothing is synchronized."""

    def __init__(self, device: torch.device) -> None:
        self.on_host = device.type == "cpu"
        self.seconds: dict[Key, float] = {}
        self.began: Any = 0.0
        self.marks: deque[tuple[Key, Any, Any]] = deque()

    def begin(self) -> None:
        self.began = time.perf_counter() if self.on_host else _mark()

    def end(self, kind: str, axis: str) -> None:
        if self.on_host:
            self._add((kind, axis), time.perf_counter() - self.began)
        elif len(self.marks) < MARKS_MOST:
            self.marks.append(((kind, axis), self.began, _mark()))

    def taken(self) -> Mapping[Key, float]:
        """What has been timed since it was last asked."""
        while self.marks and self.marks[0][2].query():
            key, began, ended = self.marks.popleft()
            self._add(key, began.elapsed_time(ended) / 1e3)
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _add(self, key: Key, seconds: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(eq=False)
class Observed(Generic[S]):
    """What `autopar.Metrics` sees of all programs of a module, while it is asked to."""

    clock: Clock | None = None
    backwards: dict[S, int] = field(default_factory=dict)
    """How often each program has gone backward."""
    capture_seconds: float = 0.0
    """What captures and plans after the first have taken."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Observed[S]:
        return Observed()

    def passed(self, state: S) -> None:
        if self.clock is not None:
            self.backwards[state] = self.backwards.get(state, 0) + 1
