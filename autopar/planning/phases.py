"""Phases: where the time of a plan or of a search went."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Phases(dict[str, float]):
    """Seconds by the name of a phase."""

    def timed(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns; what it took is added to the phase."""
        began = time.perf_counter()
        result = function(*args, **kwargs)
        self[name] = self.get(name, 0.0) + time.perf_counter() - began
        return result
