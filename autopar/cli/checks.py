"""The command that tries a model on simulated ranks: check."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer

from autopar.testing import check

from .common import reports_bad_input
from .models import load, parsed
from .options import KNOWN, AsJson, Batch, Length, Model, Settings, mesh_shape


def add(app: typer.Typer) -> None:
    app.command("check", rich_help_panel="Plans")(check_command)


@reports_bad_input
def check_command(
    model: Model,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, outermost first, such as dp=2,tp=2.")],
    batch: Batch = 4,
    sequence: Length = 16,
    settings: Settings = None,
    dtype: Annotated[str, typer.Option(help="In which everything is computed.")] = "float64",
    solver: Annotated[str, typer.Option(help=KNOWN)] = "dp",
    plans: Annotated[int, typer.Option(min=0, help="Random plans beside it.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Of SGD.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the random plans and dropout.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a model's plan on simulated ranks, without devices, and compare it with PyTorch. Exit status 1: they differ.

    Example: autopar check hf:LlamaConfig --set num_hidden_layers=2 --set hidden_size=64 --mesh dp=2,tp=2 --plans 10
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loaded = load(model, parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype, device="cpu")
    found = check(
        loaded.model,
        mesh_shape(mesh),
        loaded.args,
        loaded.kwargs,
        loss_fn=loaded.loss_fn,
        solver=solver,
        plans=plans,
        seed=seed,
        dtype=getattr(torch, dtype),
        steps=steps,
    )
    typer.echo(json.dumps(found.to_json()) if as_json else found)
    if not found.equal:
        raise typer.Exit(1)
