"""What commands share: their options and their output."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from autopar.cluster import library
from autopar.extensions import GROUP, nearest
from autopar.planning.request import ASKED, AUTO, NUMBER, Option, check, check_dtype, check_optimizer, options_of
from autopar.planning.saved import saved
from autopar.report.rendering import comma_separated, markdown, rendered
from autopar.report.sections import Grid, Lines, Part, Section
from autopar.report.telling import Ticker, complain, following, notes

from .later import Deferred
from .usage import BAD_INPUT

if TYPE_CHECKING:
    from autopar.passes.capture import source
else:
    source = Deferred("autopar.passes.capture.source")


TEXT, JSON, CSV, MARKDOWN = TABULAR = ("text", "json", "csv", "markdown")
"""The formats of commands that print rows."""

P = ParamSpec("P")
T = TypeVar("T")


def reports_bad_input(command: Callable[P, T]) -> Callable[P, T]:
    """The command, with each ValueError, and what a model raises, as one line on standard error and exit status 2.
    What is wrong with its options in themselves is said first."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            check_options(kwargs)
            return command(*args, **kwargs)
        except Exception as error:
            if "torch" in sys.modules and (where := source.raised_by_model(error)):
                fail(f"{type(error).__name__}{where}: {error}")
            if isinstance(error, ValueError):
                fail(error)
            raise

    return checked


def say(*groups: Sequence[Part]) -> None:
    """Prints lines and tables as wide as all pages are, with an empty line between groups."""
    typer.echo(rendered((Section("", parts) for parts in groups), width=None))


def titled(title: str, table: Grid) -> Sequence[Part]:
    """A table under a sentence."""
    return [Lines([f"{title}:"], indent=0), table]


def show(answer: Any, form: str = TEXT, *, full: bool = False) -> None:
    """Prints an answer, or all that it says where it says more, in one of the formats TABULAR that it has."""
    texts: dict[str, Callable[[], str]] = {
        TEXT: lambda: answer.text(width=None, **({"full": True} if full else {})),
        JSON: lambda: json.dumps(answer.to_json()),
        CSV: lambda: comma_separated(answer.rows()),
        MARKDOWN: lambda: markdown(answer.rows()),
    }
    typer.echo(texts[form]())


def deliver(text: str, path: Path | None) -> None:
    """Prints a text, or writes it to a file if there is one."""
    if path is None:
        typer.echo(text, nl=False)
    else:
        path.write_text(text)
        wrote(path)


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


READING, DRAWING = "reading the model", "drawing"


@contextmanager
def working(doing: str = READING, *, foresees: bool = True, **how: bool) -> Iterator[Ticker]:
    """Says what the planner is doing, how far it is, what it found, and how long the rest takes."""
    with Ticker(doing, follows=True, foresees=foresees, **how) as ticker, following(ticker.tell, ticker.found):
        yield ticker


@contextmanager
def progress(enabled: bool = True) -> Iterator[Callable[[float, str], None]]:
    """Yields a function of the part that is done and the current work, which draws a bar on standard error; lines if
    that is no terminal."""
    with working("starting", foresees=False, bar=True, enabled=enabled) as ticker:
        yield lambda part, what: ticker.tell(what, part)


def so_far(ask: Callable[..., T], found: Callable[[T], None], then: str) -> tuple[T, int]:
    """What a verb answers that makes several plans, of which `found` gets what is known after each; and an exit status:
    0, or that of a signal, which ends it with what it had. Says what to do `then`."""
    known: list[T] = []

    def each(answer: T) -> None:
        found(answer)
        known.append(answer)

    try:
        with progress() as tell, _signals_exit():
            tell(0.0, "reading the model")
            return ask(report=tell, each=each), 0
    except SystemExit as ended:
        if not known:
            raise
        notes().print(f"ended early, with what it had: {then}", soft_wrap=True)
        return known[-1], int(ended.code or 0)


@contextmanager
def _signals_exit() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM raise SystemExit with the status that a shell gives a process that they end."""

    def ended(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, ended) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Typed = dict[str, Any]
"""The options of a record that a person or a file gave, as values by field."""


def asks(
    *, without: Collection[str] = (), again: bool = False, defaults: Mapping[str, Any] | None = None, **records: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a command whose parameters of these names are `Typed`: in their places stand the options of the records,
    `without` some. A plan's model, if it is to be given `again`, is an option. `--help` shows the defaults of the
    records or those given; none, with `{}`. Errors are those of `reports_bad_input`."""

    def of(command: Callable[..., None]) -> Callable[..., None]:
        places: dict[str, tuple[str, str, Option]] = {}
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name not in records:
                parameters.append(own.replace(kind=own.KEYWORD_ONLY))
                continue
            known = {f.name: None if f.default is MISSING else f.default for f in fields(records[own.name])}
            for field, option in options_of(records[own.name]).items():
                for name in () if field in without else option.parts or (field,):
                    places[name] = (own.name, field, option)
                    default = known[field] if defaults is None else defaults.get(field)
                    is_argument = field == "model" and not again
                    about = typer.Argument(help=option.help) if is_argument else _option(name, option)
                    parameters.append(
                        inspect.Parameter(
                            name,
                            own.KEYWORD_ONLY,
                            default=own.empty if is_argument else default,
                            annotation=Annotated[option.typed if default is not None else option.typed | None, about],
                        )
                    )

        def checked(context: typer.Context, **values: Any) -> None:
            typed: dict[str, Typed] = {group: {} for group in records}
            for name, (group, field, option) in places.items():
                value, source = values.pop(name), context.get_parameter_source(name)
                if source is None or source.name == "DEFAULT":
                    continue
                if option.parts:
                    typed[group].setdefault(field, {})[name] = value
                else:
                    typed[group][field] = value if option.read is None else option.read(value)
            command(**typed, **values)

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        checked.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        checked.__doc__, checked.__annotations__ = command.__doc__, {}
        return reports_bad_input(checked)

    return of


def _option(name: str, option: Option) -> Any:
    least = int(option.range[1:].split(",")[0]) if option.typed is int else None
    words = "The plan's model, if the plan does not say how to build it: " if name == "model" else ""
    words += f"{option.parts.get(name, option.help)} {option.spelled}".rstrip()
    return typer.Option(option.flag_of(name), min=least, help=words)


Format = Annotated[
    str | None, typer.Option("--format", help="text, json, csv (figures in seconds and bytes) or markdown.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all as JSON, for scripts, instead of as text.")]
Full = Annotated[bool, typer.Option("--full", help="All that the plan says, instead of one page.")]
Mesh = Annotated[str, typer.Option(help="Axes and sizes, outermost first, such as dp=2,tp=2.")]
Saved = Annotated[Path | None, typer.Option("--out", help="Where to save the plan.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where to write it, instead of printing it.")]
CLUSTER_HELP, SOLVER_HELP = ASKED["cluster"].help, ASKED["solver"].help


def chosen(as_json: bool, form: str | None = None, among: Sequence[str] = TABULAR) -> str:
    """The format that --format or --json asks for, text if neither does."""
    if form is not None and form not in among:
        raise ValueError(f"--format is {form!r}{nearest(form, among)}: give {', '.join(among[:-1])} or {among[-1]}")
    if as_json and form not in (None, JSON):
        raise ValueError(f"--json and --format {form} were both given: give one of them")
    return form or (JSON if as_json else TEXT)


def writable(path: Path | None, option: str = "--out") -> None:
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


def meshes(text: str) -> Any:
    """A mesh, a number of devices, or "auto"."""
    return AUTO if text == AUTO else int(text) if text.isdecimal() else mesh_shape(text)


def _check_device(kind: str) -> None:
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device is {kind!r}: give cpu or cuda")


CHECKS: Mapping[str, Callable[[Any], object]] = {
    "mesh": meshes,
    "device": _check_device,
    "dtype": check_dtype,
    "param_dtype": lambda name: check_dtype(name, "--param-dtype"),
    "reduce_dtype": lambda name: check_dtype(name, "--reduce-dtype"),
    "gather_dtype": lambda name: check_dtype(name, "--gather-dtype", "gather dtype"),
    "optimizer": lambda text: None if re.fullmatch(NUMBER, text) else check_optimizer(text),
    "save": writable,
    "keep": lambda path: writable(path, "--keep"),
    "trace": lambda path: writable(path, "--trace"),
    "record": lambda path: writable(path, "--save"),
    "exported": lambda path: writable(path, "FILE"),
    "figure": drawable,
}
"""Parameters of commands, and what raises ValueError for a value that is wrong whatever the model is: before anything
is computed."""

NAMED: Mapping[str, Callable[[str], object]] = {
    "solver": lambda name: check("solver", name),
    "strategy": lambda name: check("solver", name),
    "cluster": library.named_cluster,
    "cost": lambda name: check("cost", name),
}
"""Those of names to which the module of a model, and installed packages, may add theirs."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that are wrong in themselves, before PyTorch is there, which takes seconds to
    import."""
    for name, check_one in {**CHECKS, **({} if _may_add_names(options) else NAMED)}.items():
        value = options.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                check_one(each)


def _may_add_names(options: Mapping[str, Any]) -> bool:
    """Whether there may be names that are registered once PyTorch is there."""
    model, path = options.get("model") or options.get("target"), options.get("path")
    if model is None and path is not None and NAMED.keys() & {name for name, value in options.items() if value}:
        model = ((saved(path).get("provenance") or {}).get("source") or {}).get("model")
    of_module = isinstance(model, str) and ":" in model and not model.startswith("hf:")
    return of_module or "torch" in sys.modules or bool(entry_points(group=GROUP))
