"""What commands have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

P = ParamSpec("P")
T = TypeVar("T")

BAD_INPUT = 2


def out() -> Console:
    """Standard output; as wide as it takes where that is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def notes() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


def reports_bad_input(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose ValueErrors are one line on standard error, and exit status 2."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except ValueError as error:
            fail(error)

    return checked


def fail(what: object) -> NoReturn:
    notes().print(f"error: {what}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}: give whole numbers with commas between, such as 2,2")
    return tuple(int(part) for part in parts)


@contextmanager
def progress(enabled: bool = True) -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error for what is long: call it with the part that is done and what is being done. In place
    of the bar, where that is no terminal, a line for every tenth."""
    console = notes()
    if not enabled:
        yield lambda part, what: None
    elif console.is_terminal:
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda part, what: bar.update(task, completed=part, description=what)
    else:
        told = -1

        def tell(part: float, what: str) -> None:
            nonlocal told
            if int(part * 10) > told:
                told = int(part * 10)
                console.print(f"{part:4.0%} {what}", markup=False)

        yield tell
