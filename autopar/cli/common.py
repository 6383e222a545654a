"""What commands have in common, and the options of those about models and plans."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.cost.optimizers import OPTIMIZERS
from autopar.planning.costs import COSTS
from autopar.planning.presets import PRESETS
from autopar.solve import SOLVERS

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


UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (k + 1) for k, p in enumerate("KMGT")}}
UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGT")}

Model = Annotated[str, typer.Argument(help="module:callable, or hf:ConfigClass such as hf:LlamaConfig.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE of the configuration, or of the callable. Repeatable.")
]
Batch = Annotated[int, typer.Option(min=1, help="Global batch size.")]
Length = Annotated[int, typer.Option("--seq", min=1, help="Sequence length.")]
Dtype = Annotated[str, typer.Option(help="Of the model.")]
Cost = Annotated[str, typer.Option(help=f"What is least: {', '.join(COSTS)}.")]
Limit = Annotated[str | None, typer.Option("--memory-limit", help="Of a rank, such as 40GB.")]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0) or model.layers.*.mlp:dp=R. Repeatable."
    ),
]
Kept = Annotated[
    str,
    typer.Option("--optimizer", help=f"Whose states count: {', '.join(OPTIMIZERS)}; or bytes per element."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
KNOWN = f"One of {', '.join(SOLVERS)}; or a preset: {', '.join(PRESETS)}."


def mesh_shape(text: str) -> dict[str, int]:
    """Of "dp=2,tp=4"."""
    found: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        if not equals or not size.isdecimal() or name in found:
            raise ValueError(f"--mesh is {text!r}: write each axis once, with its size, such as dp=2,tp=4")
        found[name] = int(size)
    return found


def constraints(texts: list[str]) -> dict[str, dict[str, str]]:
    """Of "lm_head.weight:tp=S(0)", each."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:=]+):(\w+)=(.+)", text)
        if match is None:
            raise ValueError(f"--pin is {text!r}: write NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0)")
        name, axis, placement = match.groups()
        if found.setdefault(name, {}).setdefault(axis, placement) != placement:
            raise ValueError(
                f"--pin {text!r} contradicts {axis}={found[name][axis]} for the same name: give one of them"
            )
    return found


def byte_count(text: str | None) -> float | None:
    """Of "40GB" or "40GiB"."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"--memory-limit is {text!r}: give bytes, such as 40GB or 40GiB")
    count: float = float(found[1]) * UNITS[found[2]]
    return count


def optimizer_of(text: str) -> str | float:
    """A name, or a number of bytes."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text
