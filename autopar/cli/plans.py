"""Commands about plans: what makes them, what compares them, and what asks about saved ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar import files
from autopar.cluster import library
from autopar.planning.request import ASKED, AUTO, NAMES, Request, Source, quiet
from autopar.planning.saved import is_plan, saved
from autopar.report.telling import notes

from . import common
from .common import DRAWING, READING, working
from .later import Deferred

if TYPE_CHECKING:
    import torch

    import autopar
    from autopar import testing
    from autopar.ir import text
    from autopar.passes import flow
    from autopar.planning import reading
    from autopar.report import export
    from autopar.report import figure as figures

    from . import loading
else:
    torch = Deferred("torch")
    autopar = Deferred("autopar")
    flow = Deferred("autopar.passes.flow")
    text = Deferred("autopar.ir.text")
    testing = Deferred("autopar.testing")
    reading = Deferred("autopar.planning.reading")
    export = Deferred("autopar.report.export")
    figures = Deferred("autopar.report.figure")
    loading = Deferred("autopar.cli.loading")

PLAN = typer.Argument(help="What plan --out wrote.")


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
    save: common.Saved = None,
    full: common.Full = False,
    as_json: common.AsJson = False,
) -> None:
    """Plan a model on a mesh, without devices.

    Example: autopar plan hf:LlamaConfig --set num_hidden_layers=4 --mesh dp=2,tp=4 --cluster dgx-a100
    """
    autopar.Plan.check_path(save)
    with working():
        plan = loading.ask(autopar.plan, common.meshes(mesh), model, options)
    common.show(loading.kept(plan, Source(**model), save), common.chosen(as_json), full=full)


@common.asks(model=Source, options=Request, without=("cluster", "solver", "lengths", "within"))
def compare_command(
    model: common.Typed,
    mesh: Annotated[list[str], typer.Option(help="Axes and sizes, such as dp=2,tp=4. Repeatable.")],
    options: common.Typed,
    cluster: Annotated[list[str] | None, typer.Option(help=f"{common.CLUSTER_HELP} Repeatable.")] = None,
    solver: Annotated[
        list[str] | None, typer.Option(help=f"{common.SOLVER_HELP} Repeatable; auto and presets if not given.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Where to draw it, such as plans.svg.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="A folder for the plans, each a file for show, diff and what-if.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where to keep what is done, so that the same command goes on from there.")
    ] = None,
    form: common.Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Plans of several solvers, presets, meshes and clusters side by side, best first."""
    form = common.chosen(as_json, form)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, a file: give a folder for the plans")
    meshes = [common.mesh_shape(text) for text in mesh]
    clusters, solvers = (list(dict.fromkeys(names or ())) or None for names in (cluster, solver))
    ask = partial(loading.ask, autopar.compare, meshes, model, options, solvers=solvers, cluster=clusters, keep=keep)
    goes_on = "goes on from there" if keep is not None else "would go on from there with --keep FILE"
    comparison, status = common.so_far(ask, quiet, f"the same command {goes_on}")
    if figure is not None:
        with working(DRAWING):
            figures.draw(comparison, figure)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, plan in comparison.plans.items():
            loading.kept(plan, Source(**model), folder / f"{re.sub('[^A-Za-z0-9.,=_-]', '_', name)}.json")
    common.show(comparison, form, full=True)
    if status or not comparison.plans:
        raise typer.Exit(status or 1)


@common.asks(model=Source, options=Request, without=("solver", "lengths", "within"))
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
    form = common.chosen(as_json, form)
    sizes = common.integers(devices, "--devices")
    path = keep or files.cached("fit.sqlite")
    before: dict[int, Any] = {}

    def found(result: autopar.Fit) -> None:
        """Says what is the fastest of its size so far."""
        for size in result.sizes:
            best = result.best(size)
            if best is not None and before.get(size) != best:
                notes().print(f"{size:,} devices, so far: {best}", markup=False, soft_wrap=True)
            before[size] = best

    more: dict[str, Any] = {"strategies": strategy or None, "axes": axes, "keep": path}
    ask = partial(loading.ask, autopar.fit, sizes, model, options, **more)
    result, status = common.so_far(ask, found, "the same command goes on from there")
    if result.kept:
        notes().print(f"{result.kept} answers were known from before, kept in {path}", soft_wrap=True)
    common.show(result, form)
    if status or not any(trial.fits for trial in result.trials):
        raise typer.Exit(status or 1)


@common.asks(model=Source, options=Request, without=("lengths",), again=True)
def simulate_command(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="A model as for plan, or what plan --out wrote.")],
    model: common.Typed,
    options: common.Typed,
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, such as dp=2,tp=4, for a model.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Where to write the timeline, for Perfetto.")] = None,
    real: Annotated[
        Path | None,
        typer.Option(help="What torch.profiler exported of a real step: says what deviates most, and joins --trace."),
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
    with working():
        if given is None:
            on, source, model = common.mesh_shape(mesh or ""), None, {"model": target, **model}
        else:
            on, source = dict(given.mesh), loading.source_of(given, model)
            options = {"cluster": reading.cluster_of(given), **options}
        simulation = loading.ask(autopar.simulate, on, model, options, source=source, plan=given)
    used = simulation.plan
    if trace is not None or real is not None:
        with working("writing the trace"):
            both = simulation.trace(real)
            simulation = replace(simulation, real=both if real else None)
            if trace is not None:
                trace.write_text(json.dumps(both))
    if figure is not None:
        with working(DRAWING):
            figures.draw_timeline(simulation.timeline, figure, f"{used.model} on {used.cluster}, by {used.solver}")
    common.show(simulation, common.chosen(as_json))


@common.asks(model=Source, again=True, defaults={})
def show_command(
    path: Annotated[Path, PLAN],
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
    save: common.Out = None,
    as_json: common.AsJson = False,
) -> None:
    """Print a saved plan, its program or its graph. The figures of an edited plan are computed again, if it says how
    its model is built.

    Example: autopar show plan.json --program --format dot --out program.dot
    """
    if program and graph:
        raise ValueError("--program and --graph were both given: give one of them")
    formats = (common.TEXT, common.JSON, *(["dot"] if program or graph else []), *([FX] if program else []))
    form = common.chosen(as_json, form, formats)
    if form == FX and save is None:
        raise ValueError("--format fx writes a file: give --out, such as --out program.pt")
    plan = current(path, model, needs_model=program or graph)
    written = ""
    if not program and not graph:
        written = json.dumps(plan.to_json()) if form == common.JSON else plan.text(full=full)
    else:
        with working("writing the program" if program else READING):
            shown = plan.program() if program else plan.joint_graph()
            if form == FX and save is not None:
                torch.save(autopar.graph_module(shown), save)  # type: ignore[arg-type]
                common.wrote(save)
            elif form == "dot":
                written = export.to_dot(shown)
            else:
                written = json.dumps(export.to_json(shown)) if form == common.JSON else str(shown)
    if written:
        common.deliver(f"{written}\n", save)


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
    save: common.Out = None,
) -> None:
    """Rewrite a program, and print it as a text that this command reads again. Of a plan, it is the plan's program.

    Example: autopar lower plan.json --passes '' --out program.txt
    """
    if is_plan(str(source)):
        if cluster is not None:
            raise ValueError(f"--cluster goes with a program, and {source} is a plan: it has a cluster")
        plan = current(source, model, needs_model=True)
        with working("writing the program"):
            program = plan.program(passes)
    else:
        with files.reading(f"{source} is no program", "give one that autopar lower wrote"):
            program = text.parsed_program(files.text_of(source))
        program = flow.lowered(program, passes or "", library.named_cluster(cluster, device_type="cpu"))
    common.deliver(text.text_of(program), save)


CHECKED = {"batch": 4, "sequence": 16, "dtype": "float64"}
"""Of a small model, in the dtype in which everything is computed."""


@common.asks(model=Source, defaults=CHECKED)
def check_command(
    model: common.Typed,
    mesh: common.Mesh,
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
    common.show(report, common.chosen(as_json))
    if not report.equal:
        raise typer.Exit(1)


@common.asks(model=Source, again=True, defaults={})
def report_command(
    path: Annotated[Path, PLAN],
    model: common.Typed,
    save: Annotated[Path, typer.Option("--out", "-o", help="Where to write the page, such as plan.html.")],
) -> None:
    """Write a saved plan as one HTML page that needs no network.

    Example: autopar report plan.json -o plan.html
    """
    if save.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out is {save}: give the path of a page, which ends in .html")
    plan = current(path, model, needs_model=True)
    with working():
        autopar.save_report(plan, save)
    common.wrote(save)


@common.asks(model=Source, again=True, defaults={})
def explain_command(
    path: Annotated[Path, PLAN],
    name: Annotated[str, typer.Argument(help="A parameter, input, module or operator, or a collective and an axis.")],
    model: common.Typed,
    replan: Annotated[
        int, typer.Option(min=0, help="For how many alternatives to plan everything else again: each takes a while.")
    ] = 0,
    as_json: common.AsJson = False,
) -> None:
    """Why something is planned as it is: what else it could be, and what that would cost.

    Example: autopar explain plan.json lm_head.weight --replan 3
    """
    plan = current(path, model, needs_model=True)
    with working():
        explanation = plan.explain(name, replan=replan)
    common.show(explanation, common.chosen(as_json))


@common.reports_bad_input
def diff_command(before: Annotated[Path, PLAN], after: Annotated[Path, PLAN], as_json: common.AsJson = False) -> None:
    """What changes from one saved plan to another: the step, the memory, what travels, and what moved. The figures of a
    plan that was edited are computed again."""
    for path in (before, after):
        saved(path)
    common.show(autopar.difference(current(before), current(after)), common.chosen(as_json))


@common.asks(model=Source, options=Request, again=True, defaults={})
def what_if_command(
    path: Annotated[Path, PLAN],
    options: common.Typed,
    model: common.Typed,
    mesh: Annotated[str | None, typer.Option(help="Another mesh, such as dp=4,tp=16.")] = None,
    save: Annotated[Path | None, typer.Option("--out", help="Where to save the new plan.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Plan again with something changed, and show what that changes. All that is not given stays as in the plan.

    Example: autopar what-if plan.json --memory-limit 20GiB
    """
    if mesh is None and not options and not model.keys() - {"model"}:
        raise ValueError(
            "what-if was asked nothing: say what would be different, such as --memory-limit 20GiB, --mesh dp=4,tp=2, "
            "--solver fsdp, --batch 16 or --pin NAME:AXIS=PLACEMENT; autopar what-if --help lists all"
        )
    autopar.Plan.check_path(save)
    before = opened(path)
    source = loading.source_of(before, model, changes=True)
    on = dict(before.mesh) if mesh is None else common.mesh_shape(mesh)
    with working():
        after = loading.ask(autopar.plan, on, model, reading.options_of(before, **options), source=source)
    after = loading.kept(after, source, save)
    common.show(autopar.difference(before, after), common.chosen(as_json))


@common.asks(model=Source, again=True, defaults={})
def export_command(
    path: Annotated[Path, PLAN],
    to: Annotated[str, typer.Option(help=f"The library: {', '.join(NAMES['library'])}.")],
    model: common.Typed,
    save: common.Out = None,
) -> None:
    """Write a saved plan as a script for another library. Where that cannot express all of it, the script is of the
    shortest plan that it can express, and what it cannot is said.

    Example: autopar export plan.json --to fsdp2 --out split.py
    """
    plan = current(path, model, needs_model=True)
    with working():
        written = plan.export(to)
    for line in written.missing:
        notes().print(f"{to} cannot express {line}", markup=False, soft_wrap=True)
    common.deliver(written.script, save)


@common.asks(model=Source, options=Request, without=("solver", "lengths", "within"))
def import_command(
    foreign: Annotated[Path, typer.Argument(help="Names of modules and styles: Python or JSON of another library.")],
    model: common.Typed,
    mesh: common.Mesh,
    options: common.Typed,
    save: common.Saved = None,
    as_json: common.AsJson = False,
) -> None:
    """Price a plan of another library, and show what changes from it to the best plan.

    Example: autopar import tp_plan.json hf:LlamaConfig --mesh dp=2,tp=4 --cluster dgx-h100
    """
    autopar.Plan.check_path(save)
    with working():
        before = loading.ask(autopar.plan, common.mesh_shape(mesh), model, {**options, "within": str(foreign)})
        after = before.planner.plan(within=None)
    common.show(autopar.difference(loading.kept(before, Source(**model), save), after), common.chosen(as_json))


def opened(path: Path) -> autopar.Plan:
    """A saved plan. What is none is refused before PyTorch is there."""
    data = saved(path)
    return autopar.Plan.from_json(data, str(path))


def current(path: Path, model: common.Typed | None = None, *, needs_model: bool = False) -> autopar.Plan:
    """A saved plan; one that was edited, or `needs_model`, is read with its model, if it or what is typed of the
    `model` says how it is built. Raises ValueError if a model is needed and nothing says how."""
    plan = opened(path)
    source = loading.source_of(plan, model or {}, needed=needs_model)
    if source is None or not (needs_model or plan.is_edited):
        return plan
    with working():
        loaded = loading.built(source, model or {})
        return autopar.read_plan(plan, loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn)
