"""Commands about plans: plan, compare, simulate, show, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.planning.rendering import page_width

from . import common
from .later import Later
from .names import AUTO
from .questions import current, opened
from .working import DRAWING, working

if TYPE_CHECKING:
    import torch

    from autopar import api, testing
    from autopar.ir import precision as dtypes
    from autopar.planning import plan as planning
    from autopar.report import figure as figures
    from autopar.report import simulation as simulations

    from . import loading
else:
    torch = Later("torch")
    api = Later("autopar.api")
    dtypes = Later("autopar.ir.precision")
    testing = Later("autopar.testing")
    planning = Later("autopar.planning.plan")
    figures = Later("autopar.report.figure")
    simulations = Later("autopar.report.simulation")
    loading = Later("autopar.cli.loading")


def add(app: typer.Typer) -> None:
    app.command("plan", rich_help_panel="Plans")(plan_command)
    app.command("compare", rich_help_panel="Plans")(compare_command)
    app.command("simulate", rich_help_panel="Plans")(simulate_command)
    app.command("show", rich_help_panel="Plans")(show_command)
    app.command("check", rich_help_panel="Plans")(check_command)


def _precision(param_dtype: str | None, reduce_dtype: str | None) -> dtypes.Precision:
    """What was typed as a policy, which says what is no dtype."""
    return dtypes.Precision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)  # type: ignore[arg-type]


@common.reports_bad_input
def plan_command(
    model: common.Model,
    mesh: Annotated[
        str,
        typer.Option(
            help="Axes and sizes, outermost first, such as dp=2,tp=4; or a number of devices, or auto: chosen."
        ),
    ],
    batch: common.Batch = 8,
    sequence: common.Length = 128,
    settings: common.Settings = None,
    dtype: common.Dtype = "float32",
    cluster: Annotated[str | None, typer.Option(help=f"{common.CLUSTER_HELP}.")] = None,
    solver: Annotated[str, typer.Option(help=common.SOLVER_HELP)] = AUTO,
    cost: common.Cost = "analytical",
    memory_limit: common.Limit = None,
    headroom: common.Headroom = None,
    optimizer: common.Kept = "adamw",
    pin: common.Pins = None,
    effort: common.Effort = None,
    recompute: common.Again = "auto",
    micro_batches: common.Micros = 1,
    param_dtype: common.UsedIn = None,
    reduce_dtype: common.ReducedIn = None,
    save: Annotated[Path | None, typer.Option("--out", help="Where to save the plan.")] = None,
    full: common.Full = False,
    as_json: common.AsJson = False,
) -> None:
    """Plan a model on a mesh, without devices.

    Example: autopar plan hf:LlamaConfig --set num_hidden_layers=4 --mesh dp=2,tp=4 --cluster dgx-a100
    """
    common.writable(save, "--out")
    planning.Plan.check_path(save)
    with working():
        loaded = loading.load(model, common.parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
        plan = api.plan(
            loaded.model,
            "auto" if mesh == "auto" else int(mesh) if mesh.isdecimal() else common.mesh_shape(mesh),
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            cluster=cluster,
            solver=solver,
            cost=cost,
            memory_limit_bytes=common.byte_count(memory_limit),
            headroom=headroom,
            optimizer=common.optimizer_of(optimizer),
            constraints=common.constraints(pin or []),
            effort=effort,
            recompute=recompute,  # type: ignore[arg-type]
            micro_batches=micro_batches,
            precision=_precision(param_dtype, reduce_dtype),
        )
    plan = loading.recorded(plan, model, settings or [], batch=batch, sequence=sequence, dtype=dtype)
    if save is not None:
        plan.save(save)
    _print(plan, as_json, full)


@common.reports_bad_input
def compare_command(
    model: common.Model,
    mesh: Annotated[list[str], typer.Option(help="Axes and sizes, such as dp=2,tp=4. Repeatable.")],
    batch: common.Batch = 8,
    sequence: common.Length = 128,
    settings: common.Settings = None,
    dtype: common.Dtype = "float32",
    cluster: Annotated[list[str] | None, typer.Option(help=f"{common.CLUSTER_HELP}. Repeatable.")] = None,
    solver: Annotated[
        list[str] | None, typer.Option(help=f"{common.SOLVER_HELP} Repeatable; auto and presets if not given.")
    ] = None,
    cost: common.Cost = "analytical",
    memory_limit: common.Limit = None,
    headroom: common.Headroom = None,
    optimizer: common.Kept = "adamw",
    pin: common.Pins = None,
    recompute: common.Again = "auto",
    micro_batches: common.Micros = 1,
    param_dtype: common.UsedIn = None,
    reduce_dtype: common.ReducedIn = None,
    figure: Annotated[Path | None, typer.Option(help="Where to draw it, such as plans.svg.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Plans of several solvers, presets, meshes and clusters side by side, best first."""
    common.drawable(figure)
    meshes, limit = [common.mesh_shape(text) for text in mesh], common.byte_count(memory_limit)
    with common.progress() as tell:
        tell(0.0, "reading the model")
        loaded = loading.load(model, common.parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
        comparison = api.compare(
            loaded.model,
            meshes,
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            solvers=list(dict.fromkeys(solver)) if solver else None,
            cost=cost,
            cluster=list(dict.fromkeys(cluster)) if cluster else None,
            memory_limit_bytes=limit,
            headroom=headroom,
            optimizer=common.optimizer_of(optimizer),
            constraints=common.constraints(pin or []),
            recompute=recompute,  # type: ignore[arg-type]
            micro_batches=micro_batches,
            precision=_precision(param_dtype, reduce_dtype),
            report=tell,
        )
    if figure is not None:
        with working(DRAWING):
            figures.draw(comparison, figure)
    if as_json:
        typer.echo(json.dumps(comparison.to_json()))
    else:
        width = page_width()
        typer.echo(f"{comparison.text(width)}\n\n{comparison.collectives(width)}")
    if not any(isinstance(result, planning.Plan) for result in comparison.results.values()):
        raise typer.Exit(1)


@common.reports_bad_input
def simulate_command(
    model: common.Model,
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, such as dp=2,tp=4; the plan's with --plan.")] = None,
    batch: common.Batch = 8,
    sequence: common.Length = 128,
    settings: common.Settings = None,
    dtype: common.Dtype = "float32",
    cluster: Annotated[str | None, typer.Option(help=f"{common.CLUSTER_HELP}; the plan's with --plan.")] = None,
    plan: Annotated[Path | None, typer.Option(help="What plan --out wrote, for the same model.")] = None,
    solver: Annotated[str, typer.Option(help=common.SOLVER_HELP)] = AUTO,
    memory_limit: common.Limit = None,
    optimizer: common.Kept = "adamw",
    pin: common.Pins = None,
    recompute: common.Again = "auto",
    micro_batches: common.Micros = 1,
    param_dtype: common.UsedIn = None,
    reduce_dtype: common.ReducedIn = None,
    trace: Annotated[Path | None, typer.Option(help="Where to write the timeline, for Perfetto.")] = None,
    real: Annotated[
        Path | None,
        typer.Option(help="With --trace: what torch.profiler exported of a real step, to be put beside it."),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Where to draw the timeline, such as step.svg.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Show how long a step takes on a cluster, when each operator and collective runs, and what overlap hides.

    Example: autopar simulate hf:LlamaConfig --mesh dp=8,tp=8 --cluster dgx-h100 --dtype bfloat16 --trace step.json
    """
    given = None if plan is None else opened(plan)
    if given is None and mesh is None:
        raise ValueError("--mesh is missing: give axes and sizes, such as dp=2,tp=4, or --plan FILE")
    if real is not None and trace is None:
        raise ValueError("--real goes with --trace: say where to write both as one trace")
    common.drawable(figure)
    common.writable(trace, "--trace")
    with working():
        loaded = loading.load(model, common.parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype)
        simulation = simulations.simulate(
            loaded.model,
            dict(given.mesh) if mesh is None and given is not None else common.mesh_shape(mesh or ""),
            loaded.args,
            loaded.kwargs,
            plan=given,
            loss_fn=loaded.loss_fn,
            solver=solver,
            cluster=given.cluster if cluster is None and given is not None else cluster,
            memory_limit_bytes=common.byte_count(memory_limit),
            optimizer=common.optimizer_of(optimizer),
            constraints=common.constraints(pin or []),
            recompute=recompute,  # type: ignore[arg-type]
            micro_batches=micro_batches,
            precision=_precision(param_dtype, reduce_dtype),
        )
    timeline, used = simulation.timeline, simulation.plan
    if trace is not None:
        with working("writing the trace"):
            trace.write_text(json.dumps(timeline.to_chrome() if real is None else simulations.merged(timeline, real)))
    if figure is not None:
        with working(DRAWING):
            figures.draw_timeline(timeline, figure, f"{used.model} on {used.cluster}, by {used.solver}")
    typer.echo(json.dumps(simulation.to_json()) if as_json else simulation.text(page_width()))


@common.reports_bad_input
def show_command(
    path: Annotated[Path, typer.Argument(help="What plan --out wrote.")],
    full: common.Full = False,
    as_json: common.AsJson = False,
) -> None:
    """Print a saved plan; the figures of one that was edited are computed again, if it says how its model is built."""
    _print(current(path), as_json, full)


def _print(plan: planning.Plan, as_json: bool, full: bool) -> None:
    typer.echo(json.dumps(plan.to_json()) if as_json else plan.text(full=full))


@common.reports_bad_input
def check_command(
    model: common.Model,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, outermost first, such as dp=2,tp=2.")],
    batch: common.Batch = 4,
    sequence: common.Length = 16,
    settings: common.Settings = None,
    dtype: Annotated[str, typer.Option(help="The dtype in which everything is computed.")] = "float64",
    solver: Annotated[str, typer.Option(help=common.SOLVER_HELP)] = AUTO,
    plans: Annotated[int, typer.Option(min=0, help="Random plans to check beside the solver's.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of SGD to compare.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights, the random plans and dropout.")] = 0,
    as_json: common.AsJson = False,
) -> None:
    """Run a model's plan on simulated ranks, without devices, and compare it with PyTorch. Exit status 1: they differ.

    Example: autopar check hf:LlamaConfig --set num_hidden_layers=2 --set hidden_size=64 --mesh dp=2,tp=2 --plans 10
    """
    with working(), torch.random.fork_rng():
        torch.manual_seed(seed)
        loaded = loading.load(
            model, common.parsed(settings or []), batch=batch, sequence=sequence, dtype=dtype, device="cpu"
        )
    with working("checking"):
        report = testing.check(
            loaded.model,
            common.mesh_shape(mesh),
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            solver=solver,
            plans=plans,
            seed=seed,
            dtype=getattr(torch, dtype),
            steps=steps,
        )
    typer.echo(json.dumps(report.to_json()) if as_json else report.text(page_width()))
    if not report.equal:
        raise typer.Exit(1)
