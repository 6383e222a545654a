"""How far a search is: the parts that are done, of those that are known, and the best so far."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autopar.solve.effort import Deadline

from .texts import mesh_words, short_bytes, short_seconds

logger = logging.getLogger("autopar.progress")
"""Gets a record at DEBUG for each part that is done, with `doing`, the work in words, and `done`, from 0 to 1; and one
with `best`, an order and words, for each step that is estimated: the least is the best so far."""

SEARCHING = "searching"

EXPLORED, LIMITED, COMPARED = 0.3, 0.6, 0.85
"""What is done of a search when it knows the cheapest plan without a limit, the cheapest within the limit, and how long
the steps of its rivals take. The rest is writing the programs of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of some work, from `begin` to `end` of 1, and what is done in words, to which `left` adds how long the
    rest takes. `mesh` is what several meshes are searched for. How long a part takes differs from model to model; one
    that ends early leaves a gap."""

    doing: str = SEARCHING
    left: str = ""
    mesh: Mapping[str, int] | None = None
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

    def tell(self, done: float = 0.0) -> None:
        """So much of this part is done, from 0 to 1."""
        whole, doing = self.part(0.0, done).end, f"{self.doing}{self.left}"
        logger.debug("%s: %.0f%%", doing, 100 * whole, extra={"doing": doing, "done": whole})

    def found(self, seconds: float, *, is_serial: bool = False) -> None:
        """A plan has a step of so many seconds; `is_serial`: as if nothing overlapped."""
        if seconds < float("inf"):
            where = "" if self.mesh is None else f" on {mesh_words(self.mesh)}"
            words = f"{short_seconds(seconds)}{where}{', if nothing overlapped' if is_serial else ''}"
            logger.debug("a step of %s", words, extra={"best": (is_serial, seconds, words)})


@contextmanager
def ended_by_interrupts(until: Deadline) -> Iterator[None]:
    """Within it, a first interrupt (Ctrl-C) ends the searches that end with `until`, and a second one is Python's own.
    So is the first in another thread, and where interrupts are handled already."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        until.end()
        logging.getLogger("autopar").warning("the search ends with the best that it has; interrupt again to stop now")

    before = until.at
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        until.at = before


WHOLE = Stage()
"""All of a search."""
