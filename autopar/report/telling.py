"""Progress on standard error: on a terminal a line that changes, in pipes a line every two seconds."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

FIRST_SECONDS, EVERY_SECONDS = 1.5, 1.8
"""When the first line comes in a pipe, and how far those after it are apart."""


def notes() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


class Ticker:
    """Tells what is being done, and for how long, while its block runs; a quick block says nothing in a pipe."""

    def __init__(self, doing: str, *, enabled: bool = True) -> None:
        self.doing, self.enabled = doing, enabled
        self.console = notes()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)
        self.began = time.monotonic()
        self.status: Status | None = None

    def tell(self, doing: str) -> None:
        """What is being done from now on."""
        if doing != self.doing:
            self.doing, self.began = doing, time.monotonic()
            self._update()

    def __enter__(self) -> Self:
        if self.enabled:
            if self.console.is_terminal:
                self.status = self.console.status(self.doing)
                self.status.start()
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.ended.set()
            self.thread.join()
            if self.status is not None:
                self.status.stop()

    def _tick(self) -> None:
        wait = 1.0 if self.status is not None else FIRST_SECONDS
        while not self.ended.wait(wait):
            wait = 1.0 if self.status is not None else EVERY_SECONDS
            if self.status is not None:
                self._update()
            else:
                with suppress(ValueError):  # standard error was closed meanwhile
                    self.console.print(self._line(), markup=False)

    def _update(self) -> None:
        if self.status is not None:
            self.status.update(self._line())

    def _line(self) -> str:
        return f"{self.doing}, {time.monotonic() - self.began:.0f} s"
