"""Progress on standard error: on a terminal a line that changes; in pipes lines, ever farther apart."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from autopar.planning.texts import left_text

PROGRESS = "autopar.progress"
"""The logger that planning tells its progress to (`planning.progress`)."""

FIRST_SECONDS, NEXT_SECONDS, EVERY_SECONDS = 1.5, 0.2, 1.7
"""When the first line comes in a pipe; when the first of what follows other work comes, which was silent for up to
EVERY_SECONDS; and how far the first lines are apart."""

PATIENT_SECONDS, LATER_PART, MOST_SECONDS = 15.0, 0.25, 30.0
"""After so many seconds lines are this part of the time since then apart, and at most so many seconds: 7 minutes are
some 35 lines."""

FORESEEN_SECONDS, FORESEEN_PART = 3.0, 0.1
"""How much of a search must be over before it is said how long the rest takes."""

SAID = {"quiet": False}
"""Whether `--quiet` was given: nothing but errors goes to standard error."""

THREAD = "autopar tells"


def notes() -> Console:
    """Standard error, for what a person may do without."""
    return Console(stderr=True, highlight=False, quiet=SAID["quiet"])


def complain(error: object) -> None:
    """Says an error in a line on standard error, whatever else is kept quiet."""
    Console(stderr=True, highlight=False).print(f"error: {error}", style="red", markup=False, soft_wrap=True)


class Ticker:
    """Tells what is being done, and for how long, while its block runs; a quick block says nothing in a pipe. Of blocks
    within each other the innermost speaks."""

    def __init__(
        self, doing: str, *, enabled: bool = True, follows: bool = False, foresees: bool = False, bar: bool = False
    ) -> None:
        """`follows`: something else was done just before; `foresees`: it says how long the rest takes; on a terminal it
        draws a `bar` of what is done, or else writes it."""
        self.doing, self.enabled, self.follows, self.foresees, self.bar = doing, enabled, follows, foresees, bar
        self.done: float | None = None
        self.best: tuple[bool, float, str] | None = None
        self.console = notes()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, name=THREAD, daemon=True)
        self.began = time.monotonic()
        self.shown: Progress | None = None

    def tell(self, doing: str, done: float | None = None) -> None:
        """What is being done from now on, and how much of it is done, from 0 to 1, if that is known. Of one work, the
        most that was told counts: parts of it may search again, and begin anew."""
        if doing != self.doing:
            self.doing, self.done, self.best, self.began = doing, done, None, time.monotonic()
        elif done is not None:
            self.done = max(done, self.done or 0.0)
        self._update()

    def found(self, best: tuple[bool, float, str]) -> None:
        """The least of what was found in one work is the best so far (`planning.progress`)."""
        self.best = min(best, self.best or best)
        self._update()

    def __enter__(self) -> Self:
        if self.enabled:
            AT_WORK.append(self)
            if self.console.is_terminal and not self.console.quiet:
                columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn()) if self.bar else (SpinnerColumn(),)
                words = TextColumn("{task.description}", markup=False)
                self.shown = Progress(*columns, words, console=self.console, transient=True)
                self.shown.add_task(self.doing, total=1.0)
                self.shown.start()
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.ended.set()
            self.thread.join()
            AT_WORK.remove(self)
            if self.shown is not None:
                self.shown.stop()

    def _tick(self) -> None:
        began = self.began
        wait = 1.0 if self.shown is not None else NEXT_SECONDS if self.follows else FIRST_SECONDS
        while not self.ended.wait(wait):
            later = min(MOST_SECONDS, LATER_PART * (time.monotonic() - began - PATIENT_SECONDS))
            wait = 1.0 if self.shown is not None else max(EVERY_SECONDS, later)
            if self.shown is not None:
                self._update()
            elif AT_WORK[-1] is self:
                with suppress(ValueError):  # standard error was closed meanwhile
                    self.console.print(self.line, markup=False)

    def _update(self) -> None:
        if self.shown is not None:
            words = self.doing if self.bar else self.line
            self.shown.update(self.shown.task_ids[0], completed=self.done or 0.0, description=words)

    @property
    def line(self) -> str:
        """What is said now."""
        part = "" if self.done is None else f": {self.done:.0%}"
        seconds = time.monotonic() - self.began
        best = "" if self.best is None else f", best so far {self.best[2]}"
        return f"{self.doing}{part}, {seconds:.0f} s{self._left(seconds)}{best}"

    def _left(self, seconds: float) -> str:
        """How long the rest takes, if it takes as long as what is done."""
        if not self.foresees or seconds < FORESEEN_SECONDS or (self.done or 0.0) < FORESEEN_PART:
            return ""
        assert self.done is not None
        return f", {left_text(seconds / self.done * (1 - self.done))}"


AT_WORK: list[Ticker] = []
"""Those whose blocks run, the innermost last."""


@contextmanager
def following(
    tell: Callable[[str, float], None], found: Callable[[tuple[bool, float, str]], None] = lambda best: None
) -> Iterator[None]:
    """`tell` gets what the planner does and how much of it is done, from 0 to 1, and `found` each step, as it tells its
    log; nobody else does meanwhile, whatever the log's level. A forked process tells nothing."""
    logger, here = logging.getLogger(PROGRESS), os.getpid()

    def emit(record: logging.LogRecord) -> None:
        if os.getpid() != here:  # another one has no threads, and what they locked stays locked
            return
        if (best := getattr(record, "best", None)) is not None:
            found(best)
        else:
            tell(record.doing, record.done)  # type: ignore[attr-defined]

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[1]
        logger.setLevel(before[0])
