"""The command fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.planning.fit.kept import default_path
from autopar.planning.rendering import page_width
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


@common.reports_bad_input
def fit_command(
    model: common.Model,
    devices: Annotated[str, typer.Option(help="Numbers of devices, such as 64,256,1024.")],
    batch: common.Batch = 8,
    sequence: common.Length = 128,
    settings: common.Settings = None,
    dtype: common.Dtype = "float32",
    cluster: Annotated[str | None, typer.Option(help=f"{common.CLUSTER_HELP}.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"{common.SOLVER_HELP} Repeatable; the search and presets if not given.")
    ] = None,
    axes: Annotated[int, typer.Option(min=1, max=4, help="The most axes of a mesh.")] = 2,
    memory_limit: common.Limit = None,
    headroom: common.Headroom = None,
    optimizer: common.Kept = "adamw",
    pin: common.Pins = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where to keep what is done; in the user's cache if not given.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Which numbers of devices, meshes and strategies fit a model, and how fast they are. Continues where it was
    interrupted.

    Example: autopar fit hf:LlamaConfig --dtype bfloat16 --seq 4096 --batch 64 --devices 64,256 --cluster dgx-h100
    """
    common.writable(keep, "--keep")
    sizes = common.integers(devices, "--devices")
    path = keep or default_path()
    with common.progress() as tell:
        tell(0.0, "reading the model")
        loaded = loading.load(model, common.parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
        result = fits.fit(
            loaded.model,
            sizes,
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            cluster=cluster,
            strategies=strategy or None,
            axes=axes,
            memory_limit_bytes=common.byte_count(memory_limit),
            headroom=headroom,
            optimizer=common.optimizer_of(optimizer),
            constraints=common.constraints(pin or []),
            keep=path,
            report=tell,
        )
    if result.kept:
        notes().print(f"{result.kept} answers were known from before, kept in {path}", soft_wrap=True)
    typer.echo(json.dumps(result.to_json()) if as_json else result.text(page_width()))
    if not any(trial.fits for trial in result.trials):
        raise typer.Exit(1)
