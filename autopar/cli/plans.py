"""Commands about plans: plan, compare, simulate, show, check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar import files
from autopar.planning.rendering import page_width
from autopar.planning.request import ASKED, AUTO, Request, Source
from autopar.planning.saved import is_plan

from . import common
from .later import Later
from .questions import current, opened
from .working import DRAWING, READING, working

if TYPE_CHECKING:
    import torch

    from autopar import api, testing
    from autopar.cluster import library as clusters
    from autopar.ir import text
    from autopar.passes import flow
    from autopar.planning import plan as planning
    from autopar.planning import reading
    from autopar.report import export
    from autopar.report import figure as figures
    from autopar.report import simulation as simulations
    from autopar.runtime import fx

    from . import loading
else:
    torch = Later("torch")
    api = Later("autopar.api")
    clusters = Later("autopar.cluster.library")
    flow = Later("autopar.passes.flow")
    text = Later("autopar.ir.text")
    testing = Later("autopar.testing")
    planning = Later("autopar.planning.plan")
    reading = Later("autopar.planning.reading")
    export = Later("autopar.report.export")
    figures = Later("autopar.report.figure")
    fx = Later("autopar.runtime.fx")
    simulations = Later("autopar.report.simulation")
    loading = Later("autopar.cli.loading")


def add(app: typer.Typer) -> None:
    app.command("plan", rich_help_panel="Plans")(plan_command)
    app.command("compare", rich_help_panel="Plans")(compare_command)
    app.command("simulate", rich_help_panel="Plans")(simulate_command)
    app.command("show", rich_help_panel="Plans")(show_command)
    app.command("lower", rich_help_panel="Plans")(lower_command)
    app.command("check", rich_help_panel="Plans")(check_command)


@common.asks(model=Source, options=Request)
def plan_command(
    model: common.Typed,
    mesh: Annotated[
        str,
        typer.Option(
            help="Axes and sizes, outermost first, such as dp=2,tp=4; or a number of devices, or auto: chosen."
        ),
    ],
    options: common.Typed,
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
        on = "auto" if mesh == "auto" else int(mesh) if mesh.isdecimal() else common.mesh_shape(mesh)
        plan = loading.with_source(loading.ask(api.plan, on, model, options), Source(**model))
    if save is not None:
        plan.save(save)
        common.wrote(save)
    typer.echo(json.dumps(plan.to_json()) if as_json else plan.text(full=full))


@common.asks(model=Source, options=Request, without=("cluster", "solver"))
def compare_command(
    model: common.Typed,
    mesh: Annotated[list[str], typer.Option(help="Axes and sizes, such as dp=2,tp=4. Repeatable.")],
    options: common.Typed,
    cluster: Annotated[list[str] | None, typer.Option(help=f"{common.CLUSTER_HELP} Repeatable.")] = None,
    solver: Annotated[
        list[str] | None, typer.Option(help=f"{common.SOLVER_HELP} Repeatable; auto and presets if not given.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Where to draw it, such as plans.svg.")] = None,
    save: Annotated[
        Path | None, typer.Option("--out", help="A folder for the plans, each a file for show, diff and what-if.")
    ] = None,
    form: common.Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Plans of several solvers, presets, meshes and clusters side by side, best first."""
    form = common.chosen(form, as_json)
    common.drawable(figure)
    if save is not None and save.exists() and not save.is_dir():
        raise ValueError(f"--out is {save}, a file: give a folder for the plans")
    meshes = [common.mesh_shape(text) for text in mesh]
    with common.progress() as tell:
        tell(0.0, "reading the model")
        clusters, solvers = (list(dict.fromkeys(names or ())) or None for names in (cluster, solver))
        comparison = loading.ask(api.compare, meshes, model, options, solvers=solvers, cluster=clusters, report=tell)
    if figure is not None:
        with working(DRAWING):
            figures.draw(comparison, figure)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        for name, plan in comparison.plans.items():
            file = save / f"{re.sub('[^A-Za-z0-9.,=_-]', '_', name)}.json"
            loading.with_source(plan, Source(**model)).save(file)
            common.wrote(file)
    if form == common.TEXT:
        typer.echo(comparison.full_text(page_width()))
    else:
        common.print_rows(comparison, form)
    if not comparison.plans:
        raise typer.Exit(1)


@common.asks(model=Source, options=Request, again=True)
def simulate_command(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="A model as for plan, or what plan --out wrote.")],
    model: common.Typed,
    options: common.Typed,
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, such as dp=2,tp=4, for a model.")] = None,
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
    given = opened(Path(target)) if is_plan(target) else None
    if given is not None:
        extra = [
            ASKED[name].flag_of(part)
            for name, value in options.items()
            for part in (value if ASKED[name].parts else (name,))
            if name != "cluster"
        ]
        if extra or mesh is not None:
            raise ValueError(
                f"{[*extra, '--mesh'][0]} does not go with a saved plan, which has its own: autopar what-if makes "
                f"another plan, and --model says how to build the model of one that does not say it"
            )
    elif mesh is None:
        raise ValueError("--mesh is missing: give axes and sizes, such as dp=2,tp=4, or a saved plan")
    elif "model" in model:
        raise ValueError(f"--model goes with a saved plan, and {target} is a model: give one of them")
    if real is not None and trace is None:
        raise ValueError("--real goes with --trace: say where to write both as one trace")
    common.drawable(figure)
    common.writable(trace, "--trace")
    with working():
        if given is None:
            simulation = loading.ask(
                simulations.simulate, common.mesh_shape(mesh or ""), {"model": target, **model}, options
            )
        else:
            source = loading.source_of(given, model)
            options = {"cluster": reading.cluster_of(given), **options}
            simulation = loading.ask(simulations.simulate, dict(given.mesh), model, options, source=source, plan=given)
    timeline, used = simulation.timeline, simulation.plan
    if trace is not None:
        with working("writing the trace"):
            trace.write_text(json.dumps(timeline.to_chrome() if real is None else simulations.merged(timeline, real)))
    if figure is not None:
        with working(DRAWING):
            figures.draw_timeline(timeline, figure, f"{used.model} on {used.cluster}, by {used.solver}")
    typer.echo(json.dumps(simulation.to_json()) if as_json else simulation.text(page_width()))


@common.asks(model=Source, again=True, defaults={})
def show_command(
    path: Annotated[Path, typer.Argument(help="What plan --out wrote.")],
    model: common.Typed,
    full: common.Full = False,
    program: Annotated[
        bool, typer.Option("--program", help="Print the program that each rank runs, instead of the plan.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print the graph of the model, forward and backward, instead of the plan.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="text or json; of a program or graph also dot (Graphviz), of a program fx (torch.save)."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option("--out", help="Where to write it, instead of printing it.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Print a saved plan, its program or its graph. The figures of an edited plan are computed again, if it says how
    its model is built.

    Example: autopar show plan.json --program --format dot --out program.dot
    """
    if program and graph:
        raise ValueError("--program and --graph were both given: give one of them")
    formats = (common.TEXT, common.JSON, *(["dot"] if program or graph else []), *([FX] if program else []))
    form = common.chosen(form, as_json, formats)
    common.writable(save, "--out")
    if form == FX and save is None:
        raise ValueError("--format fx writes a file: give --out, such as --out program.pt")
    plan = current(path, model, needs_model=program or graph)
    if not program and not graph:
        written = json.dumps(plan.to_json()) if form == common.JSON else plan.text(full=full)
    else:
        with working("writing the program" if program else READING):
            shown = plan.program() if program else plan.joint_graph()
            if form == FX and save is not None:
                torch.save(fx.graph_module(shown), save)  # type: ignore[arg-type]
            elif form == "dot":
                written = export.to_dot(shown)
            else:
                written = json.dumps(export.to_json(shown)) if form == common.JSON else str(shown)
    if save is None:
        typer.echo(written)
        return
    if form != FX:
        save.write_text(written + "\n")
    common.wrote(save)


FX = "fx"


@common.asks(model=Source, again=True, defaults={})
def lower_command(
    source: Annotated[Path, typer.Argument(help="A program that lower wrote, or a plan that plan --out wrote.")],
    model: common.Typed,
    passes: Annotated[
        str | None,
        typer.Option(help="Rewrites, in order, such as 'bucket,slice{parts=4}'; none: ''. A plan's own, if not given."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Whose prices rewrites go by: a cluster of the library or a TOML file.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--out", help="Where to write it, instead of printing it.")] = None,
) -> None:
    """Rewrite a program, and print it as a text that this command reads again. Of a plan, it is the plan's program.

    Example: autopar lower plan.json --passes '' --out program.txt
    """
    common.writable(save, "--out")
    if is_plan(str(source)):
        if cluster is not None:
            raise ValueError(f"--cluster goes with a program, and {source} is a plan: it has a cluster")
        plan = current(source, model, needs_model=True)
        with working("writing the program"):
            program = plan.program(passes)
    else:
        with files.reading(f"{source} is no program", "give one that autopar lower wrote"):
            program = text.parsed_program(files.text_of(source))
        program = flow.lowered(program, passes or "", clusters.named_cluster(cluster, device_type="cpu"))
    written = text.text_of(program)
    if save is None:
        typer.echo(written, nl=False)
    else:
        save.write_text(written)
        common.wrote(save)


CHECKED = {"batch": 4, "sequence": 16, "dtype": "float64"}
"""Of a small model, in the dtype in which everything is computed."""


@common.asks(model=Source, defaults=CHECKED)
def check_command(
    model: common.Typed,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, outermost first, such as dp=2,tp=2.")],
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
        source = Source(**{**CHECKED, **model})
        loaded = loading.built(source, model, "cpu")
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
            dtype=getattr(torch, source.dtype),
            steps=steps,
        )
    typer.echo(json.dumps(report.to_json()) if as_json else report.text(page_width()))
    if not report.equal:
        raise typer.Exit(1)
