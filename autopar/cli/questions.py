"""Commands that ask about saved plans: explain, diff, what-if."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.api import read_plan
from autopar.planning.page import page_width
from autopar.planning.plan import Plan
from autopar.planning.provenance import Source

from . import common
from .working import working

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
    plan = Plan.load(path)
    source = _source(plan, model, settings, batch, sequence, dtype)
    with working():
        explanation = reopened(plan, source).explain(name, replan=replan)
    typer.echo(json.dumps(explanation.to_json()) if as_json else explanation.text(page_width()))


def _source(
    plan: Plan,
    model: str | None,
    settings: list[str] | None,
    batch: int | None,
    sequence: int | None,
    dtype: str | None,
) -> Source | None:
    """How to build the plan's model: as the plan says, or as given."""
    known = plan.provenance.source if plan.provenance is not None else None
    if model is None:
        return known
    values = dict(setting.partition("=")[::2] for setting in settings or [])
    return Source(model=model, settings=values, batch=batch or 8, sequence=sequence or 128, dtype=dtype or "float32")


def reopened(plan: Plan, source: Source | None = None) -> Plan:
    """A saved plan with its model. Raises ValueError if nothing says how to build it."""
    loaded = common.built(plan, source)
    return read_plan(plan, loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn)
