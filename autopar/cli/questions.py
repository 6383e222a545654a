"""Commands that ask about saved plans: explain, diff, what-if."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.planning.request import Request, Source
from autopar.planning.saved import saved
from autopar.report.rendering import page_width

from . import common
from .later import Deferred
from .working import working

if TYPE_CHECKING:
    from autopar import api
    from autopar.planning import plan as planning
    from autopar.planning import reading
    from autopar.report import difference as differences

    from . import loading
else:
    api = Deferred("autopar.api")
    reading = Deferred("autopar.planning.reading")
    planning = Deferred("autopar.planning.plan")
    differences = Deferred("autopar.report.difference")
    loading = Deferred("autopar.cli.loading")

PLAN = typer.Argument(help="What plan --out wrote.")


def add(app: typer.Typer) -> None:
    app.command("explain", rich_help_panel="Plans")(explain_command)
    app.command("diff", rich_help_panel="Plans")(diff_command)
    app.command("what-if", rich_help_panel="Plans")(what_if_command)


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
    typer.echo(json.dumps(explanation.to_json()) if as_json else explanation.text(page_width()))


@common.reports_bad_input
def diff_command(before: Annotated[Path, PLAN], after: Annotated[Path, PLAN], as_json: common.AsJson = False) -> None:
    """What changes from one saved plan to another: the step, the memory, what travels, and what moved. The figures of a
    plan that was edited are computed again."""
    for path in (before, after):
        saved(path)
    _show(differences.difference(current(before), current(after)), as_json)


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
    common.writable(save, "--out")
    if mesh is None and not options and not model.keys() - {"model"}:
        raise ValueError(
            "what-if was asked nothing: say what would be different, such as --memory-limit 20GiB, --mesh dp=4,tp=2, "
            "--solver fsdp, --batch 16 or --pin NAME:AXIS=PLACEMENT; autopar what-if --help lists all"
        )
    planning.Plan.check_path(save)
    before = opened(path)
    source = loading.source_of(before, model, changes=True)
    on = dict(before.mesh) if mesh is None else common.mesh_shape(mesh)
    asked = reading.options_of(before)
    if "constraints" in options:
        options["constraints"] = {**(asked["constraints"] or {}), **options["constraints"]}
    with working():
        after = loading.ask(api.plan, on, model, {**asked, **options}, source=source)
    after = loading.with_source(after, source)
    if save is not None:
        after.save(save)
        common.wrote(save)
    _show(differences.difference(before, after), as_json)


def _show(told: differences.Difference, as_json: bool) -> None:
    typer.echo(json.dumps(told.to_json()) if as_json else told.text(page_width()))


def opened(path: Path) -> planning.Plan:
    """A saved plan. What is none is refused before PyTorch is there."""
    data = saved(path)
    return planning.Plan.from_json(data, str(path))


def current(path: Path, model: common.Typed | None = None, *, needs_model: bool = False) -> planning.Plan:
    """A saved plan; one that was edited, or `needs_model`, is read with its model, if it or what is typed of the
    `model` says how it is built. Raises ValueError if a model is needed and nothing says how."""
    plan = opened(path)
    source = loading.source_of(plan, model or {}, needed=needs_model)
    if source is None or not (needs_model or plan.is_edited):
        return plan
    with working():
        loaded = loading.built(source, model or {})
        return api.read_plan(plan, loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn)
