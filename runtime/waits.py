"""What `autopar.Metrics` sees of the programs of a module: how often each goes backward, and the seconds that each kind
of collective holds a rank up, by mesh axis."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .timing import mark, seconds_between

Key = tuple[str, str]
"""The kind of a collective, and the name of a mesh axis."""

MARKS_MOST = 20_000
"""Pairs of marks that a stream has not come to yet; further waits are not timed."""


class Waits:
    """On a host, the seconds between begin and end. On a GPU, where the host does not wait, marks in the stream, which
    are read once the stream has passed them: nothing is synchronized."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[Key, float] = {}
        self.began: Any = 0.0
        self.marks: deque[tuple[Key, Any, Any]] = deque()

    def begin(self) -> None:
        self.began = mark(self.device)

    def end(self, kind: str, axis: str) -> None:
        if self.device.type == "cpu":
            self._add((kind, axis), self.began, mark(self.device))
        elif len(self.marks) < MARKS_MOST:
            self.marks.append(((kind, axis), self.began, mark(self.device)))

    def taken(self) -> Mapping[Key, float]:
        """What has been timed since it was last asked."""
        while self.marks and self.marks[0][2].query():
            self._add(*self.marks.popleft())
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _add(self, key: Key, began: Any, ended: Any) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds_between(began, ended)


@dataclass(eq=False)
class Observed:
    """What `autopar.Metrics` sees of all programs of a module, while it is asked to."""

    clock: Waits | None = None
    backwards: dict[Any, int] = field(default_factory=dict)
    """How often each program has gone backward, by its state."""
    capture_seconds: float = 0.0
    """What captures and plans after the first have taken."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Observed:
        return Observed()

    def passed(self, state: Any) -> None:
        if self.clock is not None:
            self.backwards[state] = self.backwards.get(state, 0) + 1
