"""Commands about plans: plan, compare, simulate, show, check."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from autopar.api import compare
from autopar.api import plan as planned
from autopar.planning.plan import Plan
from autopar.report.comparison import Comparison
from autopar.report.figure import draw, draw_timeline
from autopar.report.simulation import merged, simulate
from autopar.testing import check

from .common import (
    KNOWN,
    AsJson,
    Batch,
    Cost,
    Dtype,
    Kept,
    Length,
    Limit,
    Model,
    Pins,
    Settings,
    byte_count,
    constraints,
    load,
    mesh_shape,
    notes,
    optimizer_of,
    parsed,
    progress,
    reports_bad_input,
)


def add(app: typer.Typer) -> None:
    app.command("plan", rich_help_panel="Plans")(plan_command)
    app.command("compare", rich_help_panel="Plans")(compare_command)
    app.command("simulate", rich_help_panel="Plans")(simulate_command)
    app.command("show", rich_help_panel="Plans")(show_command)
    app.command("check", rich_help_panel="Plans")(check_command)


@reports_bad_input
def plan_command(
    model: Model,
    mesh: Annotated[
        str,
        typer.Option(
            help="Axes and sizes, outermost first, such as dp=2,tp=4; or a number of devices, or auto: chosen."
        ),
    ],
    batch: Batch = 8,
    sequence: Length = 128,
    settings: Settings = None,
    dtype: Dtype = "float32",
    cluster: Annotated[str | None, typer.Option(help="Of the library, or a TOML file.")] = None,
    solver: Annotated[str, typer.Option(help=KNOWN)] = "dp",
    cost: Cost = "analytical",
    memory_limit: Limit = None,
    optimizer: Kept = "adamw",
    pin: Pins = None,
    save: Annotated[Path | None, typer.Option("--out", help="Where to save the plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model on a mesh, without devices.

    Example: autopar plan hf:LlamaConfig --set num_hidden_layers=4 --mesh dp=2,tp=4 --cluster dgx-a100
    """
    loaded = load(model, parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
    with working():
        plan = planned(
            loaded.model,
            "auto" if mesh == "auto" else int(mesh) if mesh.isdecimal() else mesh_shape(mesh),
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            cluster=cluster,
            solver=solver,
            cost=cost,
            memory_limit_bytes=byte_count(memory_limit),
            optimizer=optimizer_of(optimizer),
            constraints=constraints(pin or []),
        )
    if save is not None:
        plan.save(save)
    _print(plan, as_json)


@reports_bad_input
def compare_command(
    model: Model,
    mesh: Annotated[list[str], typer.Option(help="Axes and sizes, such as dp=2,tp=4. Repeatable.")],
    batch: Batch = 8,
    sequence: Length = 128,
    settings: Settings = None,
    dtype: Dtype = "float32",
    cluster: Annotated[list[str] | None, typer.Option(help="Of the library, or a TOML file. Repeatable.")] = None,
    solver: Annotated[list[str] | None, typer.Option(help=f"{KNOWN} Repeatable; dp and presets if not given.")] = None,
    cost: Cost = "analytical",
    memory_limit: Limit = None,
    optimizer: Kept = "adamw",
    pin: Pins = None,
    figure: Annotated[Path | None, typer.Option(help="Where to draw it, such as plans.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plans of several solvers, presets, meshes and clusters side by side, best first."""
    loaded = load(model, parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
    meshes, limit = [mesh_shape(text) for text in mesh], byte_count(memory_limit)
    with progress() as tell:
        found = compare(
            loaded.model,
            meshes,
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            solvers=list(dict.fromkeys(solver)) if solver else None,
            cost=cost,
            cluster=list(dict.fromkeys(cluster)) if cluster else None,
            memory_limit_bytes=limit,
            optimizer=optimizer_of(optimizer),
            constraints=constraints(pin or []),
            report=tell,
        )
    if figure is not None:
        draw(found, figure)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        typer.echo(f"{found}\n\n{found.collectives()}")
    _fail_without_plan(found)


def _fail_without_plan(found: Comparison) -> None:
    if not any(isinstance(result, Plan) for result in found.results.values()):
        raise typer.Exit(1)


@reports_bad_input
def simulate_command(
    model: Model,
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, such as dp=2,tp=4; the plan's with --plan.")] = None,
    batch: Batch = 8,
    sequence: Length = 128,
    settings: Settings = None,
    dtype: Dtype = "float32",
    cluster: Annotated[str | None, typer.Option(help="Of the library, or a TOML file; the plan's with --plan.")] = None,
    plan: Annotated[Path | None, typer.Option(help="What plan --out wrote, for the same model.")] = None,
    solver: Annotated[str, typer.Option(help=KNOWN)] = "dp",
    memory_limit: Limit = None,
    optimizer: Kept = "adamw",
    pin: Pins = None,
    trace: Annotated[Path | None, typer.Option(help="Where to write the timeline, for Perfetto.")] = None,
    real: Annotated[
        Path | None,
        typer.Option(help="With --trace: what torch.profiler exported of a real step, to be put beside it."),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Where to draw the timeline, such as step.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a step of a plan takes on a cluster, when each operator and collective runs, and what hides.

    Example: autopar simulate hf:LlamaConfig --mesh dp=8,tp=8 --cluster dgx-h100 --dtype bfloat16 --trace step.json
    """
    given = None if plan is None else Plan.load(plan)
    if given is None and mesh is None:
        raise ValueError("--mesh is missing: give axes and sizes, such as dp=2,tp=4, or --plan FILE")
    if real is not None and trace is None:
        raise ValueError("--real goes with --trace: say where to write both as one trace")
    loaded = load(model, parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
    with working():
        found = simulate(
            loaded.model,
            dict(given.mesh) if mesh is None and given is not None else mesh_shape(mesh or ""),
            loaded.args,
            loaded.kwargs,
            plan=given,
            loss_fn=loaded.loss_fn,
            solver=solver,
            cluster=given.cluster if cluster is None and given is not None else cluster,
            memory_limit_bytes=byte_count(memory_limit),
            optimizer=optimizer_of(optimizer),
            constraints=constraints(pin or []),
        )
    if trace is not None:
        trace.write_text(json.dumps(found.timeline.to_chrome() if real is None else merged(found.timeline, real)))
    if figure is not None:
        draw_timeline(found.timeline, figure, f"{found.plan.model} on {found.plan.cluster}, by {found.plan.solver}")
    typer.echo(json.dumps(found.to_json()) if as_json else found)


@reports_bad_input
def show_command(path: Annotated[Path, typer.Argument(help="What plan --out wrote.")], as_json: AsJson = False) -> None:
    """Print a saved plan."""
    _print(Plan.load(path), as_json)


def _print(plan: Plan, as_json: bool) -> None:
    typer.echo(json.dumps(plan.to_json()) if as_json else plan)


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


@contextmanager
def working() -> Iterator[None]:
    """Says on a terminal what the planner is at, by what it logs."""
    console = notes()
    if not console.is_terminal:
        yield
        return
    logger, level = logging.getLogger("autopar"), logging.getLogger("autopar").level
    with console.status("capture") as status:
        told = logging.Handler()
        told.emit = lambda record: status.update(record.getMessage().splitlines()[0][:100])  # type: ignore[method-assign]
        logger.addHandler(told)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(told)
            logger.setLevel(level)
