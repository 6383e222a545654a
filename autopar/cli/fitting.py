"""The command fit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.planning.request import Request, Source
from autopar.report.kept import default_path
from autopar.report.telling import notes

from . import common
from .later import Later

if TYPE_CHECKING:
    from autopar.report import fit as fits

    from . import loading
else:
    fits = Later("autopar.report.fit")
    loading = Later("autopar.cli.loading")


def add(app: typer.Typer) -> None:
    app.command("fit", rich_help_panel="Plans")(fit_command)


@common.asks(model=Source, options=Request, without=("solver",))
def fit_command(
    model: common.Typed,
    devices: Annotated[str, typer.Option(help="Numbers of devices, such as 64,256,1024.")],
    options: common.Typed,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"{common.SOLVER_HELP} Repeatable; the search and presets if not given.")
    ] = None,
    axes: Annotated[int, typer.Option(min=1, max=4, help="The most axes of a mesh.")] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="Where to keep what is done; in the user's cache if not given.")
    ] = None,
    form: common.Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Which numbers of devices, meshes and strategies fit a model, and how fast they are. Continues where it was
    interrupted, and then prints what it has.

    Example: autopar fit hf:LlamaConfig --dtype bfloat16 --seq 4096 --batch 64 --devices 64,256 --cluster dgx-h100
    """
    form = common.chosen(form, as_json)
    common.writable(keep, "--keep")
    sizes = common.integers(devices, "--devices")
    path = keep or default_path()
    known: list[fits.Fit] = []

    def found(result: fits.Fit) -> None:
        """Says what is the fastest of its size so far."""
        for size in result.sizes:
            best = result.best(size)
            if best is not None and not (known and known[-1].best(size) == best):
                notes().print(f"{size:,} devices, so far: {fits.trial_words(best)}", markup=False, soft_wrap=True)
        known.append(result)

    status = 0
    try:
        with common.progress() as tell, signals_exit():
            tell(0.0, "reading the model")
            result = loading.ask(
                *(fits.fit, sizes, model, options),
                strategies=strategy or None,
                axes=axes,
                keep=path,
                report=tell,
                each=found,
            )
    except SystemExit as ended:
        if not known:
            raise
        result, status = known[-1], int(ended.code or 0)
        notes().print("ended early, with what it had: the same command goes on from there")
    if result.kept:
        notes().print(f"{result.kept} answers were known from before, kept in {path}", soft_wrap=True)
    common.print_rows(result, form)
    if status or not any(trial.fits for trial in result.trials):
        raise typer.Exit(status or 1)


@contextmanager
def signals_exit() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM raise SystemExit with the status that a shell gives a process that they end."""

    def ended(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, ended) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
