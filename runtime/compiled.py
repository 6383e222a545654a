"""Programs as modules run them: with every collective, and with each call shown, marked or timed while somebody asks
for that.

While a profiler is active, the same source runs with each call marked by its instruction's label, as in simulated
traces (`autopar.report.simulation`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch.profiler import record_function

from autopar.compat.calls import is_profiling
from autopar.cost.lifetimes import Line
from autopar.ir.graph import WAIT, Node

from . import messages as messages  # whose collectives programs may hold
from .collectives import Pending, wait
from .execute import Half, SourceWriter
from .execute import compile as compile_with
from .waits import Waits

MARK = "mark"
"""What a marked source calls `record_function`."""

WATCH = "watch"
"""What a watched source calls after each instruction."""

CLOCK = "clock"
"""What a clocked source calls in the place of `wait`."""

Style = Literal["plain", "marked", "watched", "clocked"]


Watcher = Callable[[Node, tuple[Any, ...]], None]


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def watched_by(watcher: Watcher) -> AbstractContextManager[None]:
    """Within it, programs that this thread runs call `watcher` after each instruction, with what it gave."""
    return _during(_watcher, watcher)


_clock: ContextVar[Waits | None] = ContextVar("clock", default=None)


def clocked_by(clock: Waits | None) -> AbstractContextManager[None]:
    """Within it, programs that this thread runs have this clock take the time of each wait."""
    return _during(_clock, clock)


@contextmanager
def waiting(kind: str, axis: str) -> Iterator[None]:
    """Within it, this thread waits for collectives of a kind over a mesh axis: a clock, if there is one, takes the
    time."""
    if (clock := _clock.get()) is not None:
        clock.begin()
    yield
    if clock is not None:
        clock.end(kind, axis)


@contextmanager
def _during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class ObservedSource(SourceWriter):
    """The same lines in several styles: `marked` ones have each call under its instruction's label; `watched` ones show
    what each call gave; in `clocked` ones a clock takes the time of each wait."""

    style: Style = "plain"

    @cached_property
    def lines_of(self) -> dict[Style, dict[int, Node]]:
        """Of each style that was written, the instruction on each line."""
        return {}

    def styled(self, style: Style) -> str:
        """The source in another style, whose lines are its own."""
        self.style, self.lines = style, {}
        source = self.source()
        self.style, self.lines_of[style] = "plain", self.lines
        return source

    def statement(self, number: int, line: Line) -> str:
        instruction, call = line.instruction, super().statement(number, line)
        if self.style == "marked":
            return f"with {MARK}({instruction.label!r}): {call}"
        if self.style == "watched":
            shown = [str(number), *(self.local(name) for name in instruction.outputs if name)]
            return f"{call}; {WATCH}({', '.join(shown)})"
        if self.style == "clocked" and instruction.op == WAIT:
            return call.replace("wait(", f"{CLOCK}({number}, ", 1)
        return call

    def functions(self, source: str) -> dict[str, Half]:
        begun = {name: node for node in self.program.nodes if node.collective for name in node.outputs}

        def watch(number: int, *values: Any) -> None:
            watcher = _watcher.get()
            assert watcher is not None
            watcher(self.lines_of["watched"][number], values)

        def clocked(number: int, pending: Pending) -> torch.Tensor:
            of = begun[self.lines_of["clocked"][number].args[0].name]
            with waiting(str(of.collective), self.program.axes[of.args[-1]]):
                return wait(pending)

        self.bound |= {MARK: record_function, WATCH: watch, CLOCK: clocked}
        plain = super().functions(source)
        others = cache(lambda style: super(ObservedSource, self).functions(self.styled(style)))

        def runs(name: str) -> Half:
            function = plain[name]

            def run(arguments: list[torch.Tensor]) -> Any:
                if _watcher.get() is not None:
                    return others("watched")[name](arguments)
                if is_profiling():
                    return others("marked")[name](arguments)
                return function(arguments) if _clock.get() is None else others("clocked")[name](arguments)

            return run

        return {name: runs(name) for name in plain}


compile = partial(compile_with, writer=ObservedSource)
"""`execute.compile`, for programs that may be observed."""
