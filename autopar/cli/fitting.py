"""The command fit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.planning.request import Request, Source
from autopar.report.kept import default_path
from autopar.report.telling import notes

from . import common
from .later import Deferred

if TYPE_CHECKING:
    from autopar.report import fit as fits

    from . import loading
else:
    fits = Deferred("autopar.report.fit")
    loading = Deferred("autopar.cli.loading")


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
    before: dict[int, Any] = {}

    def found(result: fits.Fit) -> None:
        """Says what is the fastest of its size so far."""
        for size in result.sizes:
            best = result.best(size)
            if best is not None and before.get(size) != best:
                notes().print(f"{size:,} devices, so far: {fits.trial_words(best)}", markup=False, soft_wrap=True)
            before[size] = best

    more: dict[str, Any] = {"strategies": strategy or None, "axes": axes, "keep": path}
    ask = functools.partial(loading.ask, fits.fit, sizes, model, options, **more)
    result, status = common.so_far(ask, found, "the same command goes on from there")
    if result.kept:
        notes().print(f"{result.kept} answers were known from before, kept in {path}", soft_wrap=True)
    common.print_rows(result, form)
    if status or not any(trial.fits for trial in result.trials):
        raise typer.Exit(status or 1)
