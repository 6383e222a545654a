"""The command report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.planning.request import Source

from . import common
from .later import Deferred
from .questions import PLAN, current
from .working import working

if TYPE_CHECKING:
    from autopar.planning import plan as planning
    from autopar.report import html
else:
    planning = Deferred("autopar.planning.plan")
    html = Deferred("autopar.report.html")


def add(app: typer.Typer) -> None:
    app.command("report", rich_help_panel="Plans")(report_command)


@common.asks(model=Source, again=True, defaults={})
def report_command(
    path: Annotated[Path, PLAN],
    model: common.Typed,
    save: Annotated[Path, typer.Option("--out", "-o", help="Where to write the page, such as plan.html.")],
) -> None:
    """Write a saved plan as one HTML page that needs no network.

    Example: autopar report plan.json -o plan.html
    """
    common.writable(save, "--out")
    if save.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out is {save}: give the path of a page, which ends in .html")
    plan = current(path, model, needs_model=True)
    with working():
        html.save_report(plan, save)
    common.wrote(save)
