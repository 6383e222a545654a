"""What commands share: their options and their output."""

import functools
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, Protocol, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.cluster import library
from autopar.extensions import GROUP, nearest, unknown
from autopar.planning.rendering import Row, comma_separated, markdown, page_width, rendered, tables
from autopar.planning.saved import saved
from autopar.report.telling import Ticker, complain, following, notes

from .later import Later
from .names import AUTO, COSTS, DTYPES, OPTIMIZERS, PRESETS, SOLVERS
from .usage import BAD_INPUT

if TYPE_CHECKING:
    from autopar.passes.capture import shown
else:
    shown = Later("autopar.passes.capture.shown")


P = ParamSpec("P")
T = TypeVar("T")


def out() -> Console:
    """Standard output, as wide as the pages that are printed."""
    return Console(highlight=False, width=page_width())


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, keys: int = 1, right: Collection[int] = (), title: str = ""
) -> None:
    """Prints a table, in several parts where it is wider than the page; each begins with the first `keys` columns."""
    width = page_width()
    parts = tables(heads, rows, width, keys=keys, right=right)
    texts = [rendered([part], width) for part in parts]
    typer.echo("\n".join(([f"{title}:"] if title else []) + ["\n\n".join(texts)]))


def reports_bad_input(command: Callable[P, T]) -> Callable[P, T]:
    """The command, with each ValueError, and what a model raises, as one line on standard error and exit status 2.
    What is wrong with its options in themselves is said first."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            check_options(kwargs)
            return command(*args, **kwargs)
        except Exception as error:
            if "torch" in sys.modules and (where := shown.raised_by_model(error)):
                fail(f"{type(error).__name__}{where}: {error}")
            if isinstance(error, ValueError):
                fail(error)
            raise

    return checked


def fail(what: object) -> NoReturn:
    complain(what)
    raise typer.Exit(BAD_INPUT)


def wrote(path: Path) -> None:
    """Says where a file is."""
    notes().print(f"wrote {path}", soft_wrap=True, markup=False)


def integers(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}: give integers with commas between, such as 2,2")
    return tuple(int(part) for part in parts)


@contextmanager
def progress(enabled: bool = True) -> Iterator[Callable[[float, str], None]]:
    """Yields a function of the part that is done and the current work, which draws a bar on standard error; lines if
    that is no terminal."""
    console = notes()
    if not enabled:
        yield lambda part, what: None
    elif console.is_terminal and not console.quiet:
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def tell(part: float, what: str) -> None:
                bar.update(task, completed=part, description=what)

            with following(lambda what, part: tell(part, what)):
                yield tell
    else:
        with Ticker("starting", follows=True) as ticker, following(ticker.tell):
            yield lambda part, what: ticker.tell(what, part)


UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (k + 1) for k, p in enumerate("KMGT")}}
UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGT")}

Model = Annotated[
    str,
    typer.Argument(
        help="module:callable, hf:ConfigClass such as hf:LlamaConfig, or a config.json of Hugging Face or its folder."
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE of the configuration, or of the callable. Repeatable.")
]
Batch = Annotated[int, typer.Option(min=1, help="Global batch size.")]
Length = Annotated[int, typer.Option("--seq", min=1, help="Sequence length.")]
Dtype = Annotated[str, typer.Option(help="The model's, such as float32, bfloat16 or float16.")]
Cost = Annotated[str, typer.Option(help=f"What the plan minimizes: {', '.join(COSTS)}.")]
Limit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Per rank, such as 40GB, or none. Default: device memory less the cluster's reserve and --headroom.",
    ),
]
Headroom = Annotated[
    float | None,
    typer.Option("--headroom", help="Part of device memory to keep free beyond the cluster's reserve. Default: 0.05."),
]
Effort = Annotated[
    float | None,
    typer.Option(
        "--effort",
        help="Time budget of the search in seconds; returns the best plan found. Default: run to completion.",
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0) or model.layers.*.mlp:dp=R. Repeatable."
    ),
]
Kept = Annotated[
    str,
    typer.Option("--optimizer", help=f"Its states count as memory: {', '.join(OPTIMIZERS)}; or bytes per element."),
]
Again = Annotated[
    str,
    typer.Option(
        "--recompute",
        help="What backward makes again: auto (the planner chooses), asked (what torch.utils.checkpoint marks), none.",
    ),
]
Micros = Annotated[
    int, typer.Option("--micro-batches", min=1, help="Calls of a step, each of --batch; gradients are reduced once.")
]
Format = Annotated[
    str | None, typer.Option("--format", help="text, json, csv (figures in seconds and bytes) or markdown.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all as JSON, for scripts, instead of as text.")]
UsedIn = Annotated[
    str | None,
    typer.Option("--param-dtype", help="What parameters are cast to in use; they rest in --dtype, as masters."),
]
ReducedIn = Annotated[
    str | None,
    typer.Option("--reduce-dtype", help="What gradients are reduced in. Not given: what they are computed in."),
]
Full = Annotated[bool, typer.Option("--full", help="All that the plan says, instead of one page.")]
CLUSTER_HELP = "A name of the library (see autopar clusters), or a TOML file"
SOLVER_HELP = f"One of {', '.join(SOLVERS)}; or a preset: {', '.join(PRESETS)}."


TEXT, JSON, CSV, MARKDOWN = TABULAR = ("text", "json", "csv", "markdown")
"""The formats of commands that print rows."""


def chosen(form: str | None, as_json: bool, among: Sequence[str] = TABULAR) -> str:
    """The format that --format or --json asks for, text if neither does."""
    if form is not None and form not in among:
        raise ValueError(f"--format is {form!r}{nearest(form, among)}: give {', '.join(among[:-1])} or {among[-1]}")
    if as_json and form not in (None, JSON):
        raise ValueError(f"--json and --format {form} were both given: give one of them")
    return form or (JSON if as_json else TEXT)


class Tabular(Protocol):
    """An answer that consists of rows."""

    def rows(self) -> list[Row]: ...

    def to_json(self) -> Any: ...

    def text(self, width: int) -> str: ...


def print_rows(answer: Tabular, form: str) -> None:
    """Prints an answer in one of the formats TABULAR."""
    written = {
        TEXT: lambda: answer.text(page_width()),
        JSON: lambda: json.dumps(answer.to_json()),
        CSV: lambda: comma_separated(answer.rows()),
        MARKDOWN: lambda: markdown(answer.rows()),
    }
    typer.echo(written[form]())


def writable(path: Path | None, option: str) -> None:
    """Raises ValueError for a file that cannot be written, before anything is computed for it."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{option} is {path}, a folder: give the path of a file")
    if not folder.is_dir():
        raise ValueError(f"{option} is {path}, and there is no folder {folder}: create it, or give another path")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} is {path}, which cannot be written: give the path of another file")


def drawable(path: Path | None, option: str = "--figure") -> None:
    """As `writable`, and raises ValueError if figures cannot be drawn."""
    writable(path, option)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install 'autopar[figure]'")


def mesh_shape(text: str) -> dict[str, int]:
    """Parses "dp=2,tp=4"."""
    shape: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        if not equals or not size.isdecimal() or name in shape:
            raise ValueError(f"--mesh is {text!r}: write each axis once, with its size, such as dp=2,tp=4")
        shape[name] = int(size)
    return shape


def constraints(texts: list[str]) -> dict[str, dict[str, str]]:
    """Parses texts such as "lm_head.weight:tp=S(0)"."""
    placements: dict[str, dict[str, str]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:=]+):(\w+)=(.+)", text)
        if match is None:
            raise ValueError(f"--pin is {text!r}: write NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0)")
        name, axis, placement = match.groups()
        if placements.setdefault(name, {}).setdefault(axis, placement) != placement:
            raise ValueError(
                f"--pin {text!r} contradicts {axis}={placements[name][axis]} for the same name: give one of them"
            )
    return placements


def byte_count(text: str | None) -> float | None:
    """Parses "40GB" or "40GiB"; "none" and "inf" are no limit, and None leaves it to the cluster's devices."""
    if text is None:
        return None
    if text.strip().lower() in ("none", "inf"):
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"--memory-limit is {text!r}: give bytes, such as 40GB or 40GiB, or none for no limit")
    count: float = float(match[1]) * UNITS[match[2]]
    return count


def check_dtype(name: str, option: str = "--dtype") -> None:
    if name not in DTYPES:
        raise ValueError(f"{option} is {name!r}{nearest(name, DTYPES)}: give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


def _check_solver(name: str) -> None:
    if name not in (*SOLVERS, *PRESETS):
        raise ValueError(unknown("solver", name, {"solvers": SOLVERS, "presets": PRESETS}))


def _check_cost(name: str) -> None:
    if name not in COSTS:
        raise ValueError(unknown("cost", name, COSTS))


def _check_optimizer(text: str) -> None:
    if isinstance(optimizer_of(text), str) and text not in OPTIMIZERS:
        raise ValueError(f"{unknown('optimizer', text, OPTIMIZERS)}; or give bytes per element of a parameter")


def _check_mesh(text: str) -> None:
    if text != AUTO and not text.isdecimal():
        mesh_shape(text)


CHECKS: Mapping[str, Callable[[str], object]] = {
    "mesh": _check_mesh,
    "settings": lambda text: parsed([text]),
    "dtype": check_dtype,
    "param_dtype": lambda name: check_dtype(name, "--param-dtype"),
    "reduce_dtype": lambda name: check_dtype(name, "--reduce-dtype"),
    "memory_limit": byte_count,
    "optimizer": _check_optimizer,
    "pin": lambda text: constraints([text]),
}
"""Parameters of commands, and what raises ValueError for a value that is wrong whatever the model is."""

NAMED: Mapping[str, Callable[[str], object]] = {
    "solver": _check_solver,
    "strategy": _check_solver,
    "cluster": library.named_cluster,
    "cost": _check_cost,
}
"""Those of names to which the module of a model, and installed packages, may add theirs."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that are wrong in themselves, before PyTorch is there, which takes seconds to
    import."""
    for name, check in {**CHECKS, **({} if _may_add_names(options) else NAMED)}.items():
        value = options.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                check(each)


def _may_add_names(options: Mapping[str, Any]) -> bool:
    """Whether there may be names that are registered once PyTorch is there."""
    model, path = options.get("model") or options.get("target"), options.get("path")
    if model is None and path is not None and NAMED.keys() & {name for name, value in options.items() if value}:
        model = ((saved(path).get("provenance") or {}).get("source") or {}).get("model")
    of_module = isinstance(model, str) and ":" in model and not model.startswith("hf:")
    return of_module or "torch" in sys.modules or bool(entry_points(group=GROUP))


def optimizer_of(text: str) -> str | float:
    """A name, or a number of bytes."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Parses KEY=VALUE texts; a value is JSON, or else a text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set has {setting!r}: write KEY=VALUE, such as hidden_size=1024")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or brackets in brackets
            raise ValueError(
                f"--set {key} is a JSON value that cannot be read ({error}): write a simpler one"
            ) from error
    return values
