"""What `autopar.Metrics` sees of the programs of a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .compiled import Clock

S = TypeVar("S")
"""A program's state."""


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
