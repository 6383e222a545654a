"""Commands that ask about saved plans: explain, diff, what-if."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.planning.rendering import page_width
from autopar.planning.saved import saved

from . import common
from .later import Later
from .working import working

if TYPE_CHECKING:
    from autopar import api
    from autopar.planning import plan as planning
    from autopar.planning import provenance, reading
    from autopar.planning.explain import engine
    from autopar.report import difference as differences

    from . import loading
else:
    api = Later("autopar.api")
    provenance = Later("autopar.planning.provenance")
    reading = Later("autopar.planning.reading")
    engine = Later("autopar.planning.explain.engine")
    planning = Later("autopar.planning.plan")
    differences = Later("autopar.report.difference")
    loading = Later("autopar.cli.loading")

PLAN = typer.Argument(help="What plan --out wrote.")

ModelAgain = Annotated[
    str | None, typer.Option("--model", help="The plan's model, as for plan, if the plan does not say how to build it.")
]
SettingsAgain = Annotated[list[str] | None, typer.Option("--set", help="With --model, as for plan.")]
BatchAgain = Annotated[int | None, typer.Option("--batch", min=1, help="With --model, as for plan.")]
LengthAgain = Annotated[int | None, typer.Option("--seq", min=1, help="With --model, as for plan.")]
DtypeAgain = Annotated[str | None, typer.Option("--dtype", help="With --model, as for plan.")]


def add(app: typer.Typer) -> None:
    app.command("explain", rich_help_panel="Plans")(explain_command)
    app.command("diff", rich_help_panel="Plans")(diff_command)
    app.command("what-if", rich_help_panel="Plans")(what_if_command)


@common.reports_bad_input
def explain_command(
    path: Annotated[Path, PLAN],
    name: Annotated[str, typer.Argument(help="A parameter, input, module or operator, or a collective and an axis.")],
    replan: Annotated[
        int, typer.Option(min=0, help="For how many alternatives to plan everything else again: each takes a while.")
    ] = 0,
    model: ModelAgain = None,
    settings: SettingsAgain = None,
    batch: BatchAgain = None,
    sequence: LengthAgain = None,
    dtype: DtypeAgain = None,
    as_json: common.AsJson = False,
) -> None:
    """Why something is planned as it is: what else it could be, and what that would cost.

    Example: autopar explain plan.json lm_head.weight --replan 3
    """
    plan = opened(path)
    source = source_given(plan, model, settings, batch, sequence, dtype)
    with working():
        explanation = reopened(plan, source).explain(name, replan=replan)
    typer.echo(json.dumps(explanation.to_json()) if as_json else explanation.text(page_width()))


@common.reports_bad_input
def diff_command(before: Annotated[Path, PLAN], after: Annotated[Path, PLAN], as_json: common.AsJson = False) -> None:
    """What changes from one saved plan to another: the step, the memory, what travels, and what moved. The figures of a
    plan that was edited are computed again."""
    for path in (before, after):
        saved(path)
    _show(differences.difference(current(before), current(after)), as_json)


@common.reports_bad_input
def what_if_command(
    path: Annotated[Path, PLAN],
    pin: common.Pins = None,
    memory_limit: common.Limit = None,
    headroom: Annotated[float | None, typer.Option(help="Another part of the memory to leave free.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Another mesh, such as dp=4,tp=16.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Another cluster: of the library, or a TOML file.")] = None,
    solver: Annotated[str | None, typer.Option(help=common.SOLVER_HELP)] = None,
    optimizer: Annotated[str | None, typer.Option(help="Another optimizer.")] = None,
    recompute: Annotated[str | None, typer.Option(help="auto, asked or none: what backward makes again.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Another number of calls of a step.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Another global batch size.")] = None,
    sequence: Annotated[int | None, typer.Option("--seq", min=1, help="Another sequence length.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Another dtype of the model.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Another setting, repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="The model, if the plan does not say how to build it.")] = None,
    effort: common.Effort = None,
    save: Annotated[Path | None, typer.Option("--out", help="Where to save the new plan.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Plan again with something changed, and show what that changes. All that is not given stays as in the plan.

    Example: autopar what-if plan.json --memory-limit 20GiB
    """
    common.writable(save, "--out")
    changes = (pin, memory_limit, headroom, mesh, cluster, solver, optimizer, recompute, micro_batches, batch, sequence)
    if all(change is None for change in (*changes, dtype, settings, effort)):
        raise ValueError(
            "what-if was asked nothing: say what would be different, such as --memory-limit 20GiB, --mesh dp=4,tp=2, "
            "--solver fsdp, --batch 16 or --pin NAME:AXIS=PLACEMENT; autopar what-if --help lists all"
        )
    planning.Plan.check_path(save)
    before = opened(path)
    source = changed(source_given(before, model, None, None, None, None), before, settings, batch, sequence, dtype)
    asked = engine.request_of(before)
    limit = common.byte_count(memory_limit)
    with working():
        loaded = loading.built(before, source)
        after = api.plan(
            loaded.model,
            dict(before.mesh) if mesh is None else common.mesh_shape(mesh),
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            solver=solver or asked.solver,
            cost=asked.cost,
            cluster=reading.cluster_of(before) if cluster is None else cluster,
            memory_limit_bytes=asked.memory_limit_bytes if limit is None else limit,
            headroom=asked.headroom if headroom is None else headroom,
            optimizer=reading.optimizer_of(before) if optimizer is None else common.optimizer_of(optimizer),
            constraints={**(asked.constraints or {}), **common.constraints(pin or [])},
            effort=effort,
            recompute=recompute or before.training.recompute,  # type: ignore[arg-type]
            micro_batches=micro_batches or before.training.micro_batches,
            precision=before.training.precision,
        )
    after = loading.with_source(after, source)
    if save is not None:
        after.save(save)
        common.wrote(save)
    _show(differences.difference(before, after), as_json)


def changed(
    source: provenance.Source | None,
    plan: planning.Plan,
    settings: list[str] | None,
    batch: int | None,
    sequence: int | None,
    dtype: str | None,
) -> provenance.Source:
    """How the model is built, with what is given instead. Raises ValueError if nothing says how."""
    source = loading.source_of(plan, source)
    values = {**source.settings, **dict(setting.partition("=")[::2] for setting in settings or [])}
    return provenance.Source(
        model=source.model,
        settings=values,
        batch=batch or source.batch,
        sequence=sequence or source.sequence,
        dtype=dtype or source.dtype,
    )


def _show(told: differences.Difference, as_json: bool) -> None:
    typer.echo(json.dumps(told.to_json()) if as_json else told.text(page_width()))


def source_given(
    plan: planning.Plan,
    model: str | None,
    settings: list[str] | None,
    batch: int | None,
    sequence: int | None,
    dtype: str | None,
) -> provenance.Source | None:
    """How to build the plan's model: as the plan says, or as given. Raises ValueError for options of a model that is
    not given."""
    known = plan.provenance.source if plan.provenance is not None else None
    if model is None:
        options = {"--set": settings, "--batch": batch, "--seq": sequence, "--dtype": dtype}
        if extra := [name for name, value in options.items() if value]:
            raise ValueError(f"{extra[0]} goes with --model, which says how to build the plan's model: give both")
        return known
    values = dict(setting.partition("=")[::2] for setting in settings or [])
    return provenance.Source(
        model=model, settings=values, batch=batch or 8, sequence=sequence or 128, dtype=dtype or "float32"
    )


def opened(path: Path) -> planning.Plan:
    """A saved plan. What is none is refused before PyTorch is there."""
    data = saved(path)
    return planning.Plan.from_json(data, str(path))


def current(path: Path, *model: Any, needs_model: bool = False) -> planning.Plan:
    """A saved plan; one that was edited, or `needs_model`, is read with its model, if it or the options of the `model`
    say how it is built. Raises ValueError if a model is needed and nothing says how."""
    plan = opened(path)
    source = source_given(plan, *(model or [None] * 5))
    if not needs_model and (source is None or not plan.is_edited):
        return plan
    with working():
        return reopened(plan, source)


def reopened(plan: planning.Plan, source: provenance.Source | None = None) -> planning.Plan:
    """A saved plan with its model. Raises ValueError if nothing says how to build it."""
    built = loading.built(plan, source)
    return api.read_plan(plan, built.model, built.args, built.kwargs, loss_fn=built.loss_fn)
