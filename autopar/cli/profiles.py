"""Commands about profiled costs: profile, profiles."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar import files
from autopar.files import reading, text_of
from autopar.planning.request import ASKED, Request, Source
from autopar.planning.texts import short_bytes, short_seconds
from autopar.report.sections import Grid, Lines, Row
from autopar.report.telling import notes

from . import common
from .later import Deferred

if TYPE_CHECKING:
    from autopar.planning import planner as planners
    from autopar.profile import database as databases
    from autopar.runtime import profiled, profiler

    from . import loading
else:
    planners = Deferred("autopar.planning.planner")
    databases = Deferred("autopar.profile.database")
    profiled = Deferred("autopar.runtime.profiled")
    profiler = Deferred("autopar.runtime.profiler")
    loading = Deferred("autopar.cli.loading")

File = Annotated[Path | None, typer.Option(help=ASKED["profiles"].help)]


@common.asks(model=Source, options=Request, without=("cost", "lengths"))
def profile_command(
    model: common.Typed,
    mesh: common.Mesh,
    options: common.Typed,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    save: common.Saved = None,
) -> None:
    """Measure the segments of a model ahead of time, and plan by these measurements.

    Every rank runs it: torchrun --no-python --nproc-per-node 4 autopar profile hf:LlamaConfig --mesh dp=2,tp=2. Started
    alone, it measures operators on this device and leaves links to the cluster (cost hybrid).
    """
    shape = common.mesh_shape(mesh)
    request = Request(device_type=device, **loading.keywords(options))
    rank = int(os.environ.get("RANK", 0))
    with common.progress(rank == 0) as tell, profiler.ranks_here(shape, device) as ranks:
        tell(0.0, "reading the model")
        planner = loading.ask(planners.Planner, shape, model, {}, request=request)
        plan, summary = profiled.profiled(planner, ranks, request, report=tell)
    if rank == 0:
        if save is not None:
            plan.save(save)
        typer.echo(f"{plan}\n")
        common.say([Lines([str(summary)], indent=0)])


@common.reports_bad_input
def list_command(profiles: File = None) -> None:
    """Segment programs that were measured, and how much else."""
    database = _opened(profiles)
    rows: list[Row] = [
        {
            "model": row.model,
            "mesh": row.mesh,
            "plan": row.label,
            "program": row.structure,
            "step_seconds": row.seconds,
            "spread_seconds": row.spread,
            "runs": f"{row.runs}{', stopped' if row.abandoned else ''}",
            "peak_bytes": row.peak_bytes,
            "when": datetime.datetime.fromtimestamp(row.measured_at).isoformat(" ", "minutes"),
        }
        for row in sorted(database.rows("programs"), key=lambda row: row.measured_at)
    ]
    machines = [
        f"{machine}: {', '.join(f'{count} {name}' for name, count in counts.items())}"
        for machine, counts in database.machines().items()
    ]
    lines = Lines([*machines, str(database.path)], indent=0)
    common.say([Grid.of(rows, keys=3), lines])


@common.reports_bad_input
def show_command(
    program: Annotated[str, typer.Argument(help="What list shows of it, or the first letters.")],
    profiles: File = None,
) -> None:
    """One segment program, and the slowest operators of its machine."""
    database = _opened(profiles)
    matches: list[databases.ProgramRow] = [
        row for row in database.rows("programs") if row.structure.startswith(program)
    ]
    if not matches:
        raise ValueError(f"no program {program!r} in {database.path}: see autopar profiles list")
    told: list[str] = []
    for row in matches:
        told += (
            f"{row.label} plan of {row.model} on {row.mesh}, program {row.structure}",
            f"machine {row.machine}",
            f"step {short_seconds(row.seconds)} +- {short_seconds(row.spread)} in {row.runs} runs, of which "
            f"operators {short_seconds(row.compute_seconds)}, waiting {short_seconds(row.waiting_seconds)}; composed "
            f"of its parts {short_seconds(row.composed_seconds)}; optimizer {short_seconds(row.optimizer_seconds)}; "
            f"peak {short_bytes(row.peak_bytes)}",
        )
    operators = sorted(database.rows("operators", machine=matches[0].machine), key=lambda row: -row.seconds)
    slowest: list[Row] = [
        {"operator on local shapes": row.key, "seconds": row.seconds, "spread_seconds": row.spread, "runs": row.runs}
        for row in operators[:20]
    ]
    common.say([Lines(told, indent=0), Grid.of(slowest)])


@common.reports_bad_input
def export_command(
    exported: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON file to write.")], profiles: File = None
) -> None:
    """Write everything as JSON."""
    common.deliver(_opened(profiles).export() + "\n", exported)


@common.reports_bad_input
def import_command(
    file: Annotated[Path, typer.Argument(help="What export wrote, maybe on another machine.")], profiles: File = None
) -> None:
    """Add what export wrote."""
    with reading(str(file), "give the path of a file that profiles export wrote"):
        text = text_of(file)
    notes().print(f"read {databases.Profiles(profiles).read(text)} rows")


@common.reports_bad_input
def prune_command(
    machine: Annotated[str | None, typer.Option(help="Measurements on machines with this in their name.")] = None,
    older_than: Annotated[float | None, typer.Option(help="Segment programs of more than so many days ago.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that there is.")] = False,
    profiles: File = None,
) -> None:
    """Remove old measurements."""
    if not everything and machine is None and older_than is None:
        raise ValueError("nothing to do: give --machine TEXT, --older-than DAYS, or --all")
    notes().print(f"removed {_opened(profiles).prune(machine=machine, older_than_days=older_than)} rows")


def _opened(path: Path | None) -> databases.Profiles:
    path = path or files.cached(databases.FILE)
    if not path.exists():
        raise ValueError(f"{path}: no profile database there; autopar profile creates one, or give --profiles FILE")
    return databases.Profiles(path)


profiles_command = typer.Typer(no_args_is_help=True, help="The profile database.")
for _name in ("list", "show", "export", "import", "prune"):
    profiles_command.command(_name)(globals()[f"{_name}_command"])
