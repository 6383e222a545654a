"""How far a search is: the parts that are done, of those that are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from .texts import short_bytes

logger = logging.getLogger("autopar.progress")
"""Gets a record at DEBUG for each part that is done, with `doing`, the work in words, and `done`, from 0 to 1."""

T = TypeVar("T")

SEARCHING = "searching"

EXPLORED, LIMITED, COMPARED = 0.3, 0.6, 0.85
"""What is done of a search when it knows the cheapest plan without a limit, the cheapest within the limit, and how long
the steps of its rivals take. The rest is writing the programs of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of some work, from `begin` to `end` of 1, and what is done in words. How long a part takes differs from
    model to model; one that ends early leaves a gap."""

    doing: str = SEARCHING
    begin: float = 0.0
    end: float = 1.0

    def part(self, begin: float, end: float) -> Stage:
        """A part of this one, from `begin` to `end` of 1."""
        size = self.end - self.begin
        return replace(self, begin=self.begin + begin * size, end=self.begin + end * size)

    @property
    def exploring(self) -> Stage:
        return self.part(0.0, EXPLORED)

    @property
    def limiting(self) -> Stage:
        return self.part(EXPLORED, LIMITED)

    @property
    def comparing(self) -> Stage:
        return self.part(LIMITED, COMPARED)

    @property
    def writing(self) -> Stage:
        return self.part(COMPARED, 1.0)

    def within(self, limit_bytes: float) -> Stage:
        """The same under a memory limit."""
        return replace(self, doing=f"{self.doing} within {short_bytes(limit_bytes)} a rank")

    def parts(self, count: int) -> Iterator[Stage]:
        """So many equal parts. One is done when the next is asked for."""
        for number in range(count):
            part = self.part(number / count, (number + 1) / count)
            part.tell()
            yield part

    def told(self, tasks: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
        """The tasks, equal parts of this one; each tells when it is done."""
        ends = [self.part(number / len(tasks), (number + 1) / len(tasks)) for number in range(len(tasks))]
        return [partial(_ended, task, part) for task, part in zip(tasks, ends, strict=True)]

    def tell(self, done: float = 0.0) -> None:
        """So much of this part is done, from 0 to 1."""
        whole = self.part(0.0, done).end
        logger.debug("%s: %.0f%%", self.doing, 100 * whole, extra={"doing": self.doing, "done": whole})


WHOLE = Stage()
"""All of a search."""


def _ended(task: Callable[[], T], part: Stage) -> T:
    result = task()
    part.tell(1.0)
    return result
