"""Commands about machines: lab, calibrate, clusters."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cluster import library
from autopar.cluster.library import write
from autopar.cluster.links import KINDS, interpolated
from autopar.planning.request import says
from autopar.planning.texts import short_bytes, short_seconds
from autopar.report.sections import Grid, Lines, Part, Row
from autopar.report.telling import notes

from .common import AsJson, Typed, asks, deliver, integers, progress, reports_bad_input, say, titled
from .later import Deferred

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from autopar.cluster import calibration, measurements
    from autopar.cluster.machine import Cluster, Device, Groups, Level
    from autopar.extras import lab
    from autopar.runtime import measure
    from autopar.runtime.measure import operators
else:
    torch = Deferred("torch")
    lab = Deferred("autopar.extras.lab")
    calibration = Deferred("autopar.cluster.calibration")
    measurements = Deferred("autopar.cluster.measurements")
    measure = Deferred("autopar.runtime.measure")
    operators = Deferred("autopar.runtime.measure.operators")

SMALL_BYTES = 1 << 18
SHOWN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The cluster that this machine pretends to be, as a person types it."""

    nodes: int = field(
        default=1, metadata=says(help="Nodes; with one, all ranks are behind equal links.", range="[1, inf)", typed=int)
    )
    ranks: int = field(default=2, metadata=says(help="Ranks in a node.", range="[1, inf)", typed=int))
    inter: str = field(default="400mbit", metadata=says(help="Rate of the link of a node."))
    intra: str = field(default="6gbit", metadata=says(help="Rate of the link of a rank."))
    levels: str | None = field(
        default=None,
        metadata=says(help="Instead: levels from the outermost in, such as 2:100mbit,2:1gbit,2:6gbit."),
    )
    cluster: str | None = field(
        default=None, metadata=says(help="Instead: a cluster of the library or a TOML file, divided by --scale.")
    )
    sizes: str | None = field(
        default=None, metadata=says(help="With --cluster: children to take of each of its levels, such as 2,2.")
    )
    scale: str = field(
        default="auto",
        metadata=says(help="With --cluster: what its rates are divided by; auto measures this machine."),
    )
    dtype: str = field(default="bfloat16", metadata=says(help="With --cluster: the dtype that is trained in there."))
    threads: int = field(default=1, metadata=says(help="Threads of a rank.", range="[1, inf)", typed=int))

    def shape(self) -> lab.Shape:
        """The links between ranks. Raises ValueError for what is none."""
        if self.cluster is not None:
            return self._part_of(library.named_cluster(self.cluster))
        if self.sizes is not None:
            raise ValueError("--sizes goes with --cluster: give --nodes and --ranks, or --levels")
        if self.levels is not None:
            return lab.Shape(tuple(map(_level, self.levels.split(","))))
        return (
            lab.flat(self.ranks, self.intra)
            if self.nodes == 1
            else lab.nodes(self.nodes, self.ranks, self.inter, self.intra)
        )

    def _part_of(self, cluster: Cluster) -> lab.Shape:
        if self.sizes is not None:
            parts = integers(self.sizes, "--sizes")
        elif cluster.devices <= 8:
            parts = tuple(level.size for level in cluster.levels)
        else:
            names = ", ".join(f"{level.name} ({level.size})" for level in cluster.levels)
            raise ValueError(
                f"cluster {cluster.name} has {cluster.devices} devices: say with --sizes how many of {names}"
            )
        if self.scale != "auto":
            return lab.part_of(cluster, parts, _number(self.scale, "--scale"))
        lab.check_part(cluster, parts)
        flat, each = lab.flat(math.prod(parts), "10gbit"), operators.matmul_flops_per_second
        here = statistics.median(lab.run(flat, each, threads=self.threads, timeout_seconds=120.0))
        divisor = lab.divisor(cluster, here, self.dtype)
        notes().print(f"{here / 1e9:.3g} GFLOP/s a rank here: rates divided by {divisor:.4g}")
        return lab.part_of(cluster, parts, divisor)


def _level(text: str) -> lab.Links:
    size, colon, rate = text.partition(":")
    if not colon or not size.strip().isdecimal():
        raise ValueError(f"--levels has {text!r}: write SIZE:RATE for each level, such as 2:400mbit,2:6gbit")
    return lab.Links(size=int(size), bytes_per_second=lab.rate(rate))


@asks(machine=Emulated)
def lab_command(
    command: Annotated[list[str], typer.Argument(help="What each rank runs, after --.", metavar="-- COMMAND")],
    machine: Typed,
) -> None:
    """Run a command on the ranks of a cluster that this machine pretends to be.

    Each rank has a network namespace of its own, behind links as slow as the options say. Needs
    root, ip and tc. Example: autopar lab --nodes 2 --ranks 2 -- python train.py
    """
    emulated = Emulated(**machine)
    shape = emulated.shape()
    notes().print(f"lab of {shape.ranks} ranks: {shape}")
    raise typer.Exit(lab.launch(shape, command, threads=emulated.threads))


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{option} is {text!r}: give a number above 0, or auto")
    return value


@reports_bad_input
def calibrate_command(
    save: Annotated[Path | None, typer.Option("--out", help="The cluster file to write.")] = None,
    check_file: Annotated[
        str | None, typer.Option("--check", help="Compare measurements with this cluster's predictions; fit nothing.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Sizes of levels from the outermost in; nodes and their ranks if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name; the file's if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 7,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    record: Annotated[Path | None, typer.Option("--save", help="Where to write the measurements, as JSON.")] = None,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read what --save wrote.")] = None,
) -> None:
    """Measure this machine, and write a cluster file with the rates that it reaches.

    Every rank runs it: autopar lab --nodes 2 --ranks 2 -- autopar calibrate --out lab.toml, or
    torchrun --no-python --nproc-per-node 4 autopar calibrate --out local.toml
    """
    if save is None and check_file is None and record is None:
        raise ValueError("nothing to do: give --out FILE, --check FILE or --save FILE")
    checked = library.named_cluster(check_file) if check_file is not None else None
    measured = _measured(levels, rounds, device, read)
    if measured is None:
        return
    if record is not None:
        record.write_text(json.dumps(measured.to_json(), indent=1))
    cluster = checked or calibration.fit(measured, name or (save.stem if save is not None else "calibrated"))
    if checked is None and save is not None:
        when = datetime.datetime.now(datetime.UTC).date().isoformat()
        ranks = math.prod(measured.levels)
        source = f"autopar calibrate, {when}: {ranks} ranks, {measured.backend}, torch {torch.__version__}"
        summary = _summary(calibration.check(measured, _formulas(cluster)))
        heading = f"Made by autopar calibrate, {when}; medians of {measured.rounds} rounds. By the levels alone:"
        deliver(write.cluster_toml(cluster, source, f"{heading}\n{summary}"), save)
    _print_check(measured, cluster if checked is not None else _formulas(cluster))


def _formulas(cluster: Cluster) -> Cluster:
    """The cluster without measured groups, with which its formulas are compared."""
    return replace(cluster, groups=())


def _measured(levels: str | None, rounds: int, device: str, read: Path | None) -> measurements.Measurements | None:
    """On the first rank, or read from a file; None on other ranks."""
    if read is not None:
        return measurements.Measurements.load(read)
    sizes = None if levels is None else integers(levels, "--levels")
    with progress() as tell:
        rank, measured = measure.measured_here(
            sizes, rounds=rounds, device_type=device, report=lambda rank: tell if rank == 0 else lambda part, what: None
        )
    return measured if rank == 0 else None


def _print_check(measured: measurements.Measurements, cluster: Cluster) -> None:
    rows = calibration.check(measured, cluster)
    sizes = sorted({row.bytes for row in rows})
    lines = []
    for (kind, axis), same in itertools.groupby(rows, key=lambda row: (row.kind, row.axis)):
        by_size = {row.bytes: row for row in same}
        lines.append((kind, axis, *(_cell(by_size[size]) for size in sizes)))
    heads = ("collective", "axis", *(short_bytes(size) for size in sizes))
    collectives = Grid(heads, lines, keys=2, right=range(2, len(heads)))
    products = []
    for dtype, shape, predicted, seconds in calibration.compute_check(measured, cluster):
        error = f"{predicted / seconds - 1:+.0%}"
        products.append((shape, dtype, short_seconds(predicted), short_seconds(seconds), error))
    say(
        titled("predicted / measured, ms", collectives),
        [Grid(("product", "dtype", "predicted", "measured", "error"), products, right=(2, 3, 4))],
        [Lines([_summary(rows)], indent=0)],
    )


def _cell(row: calibration.Prediction) -> str:
    return f"{row.predicted_seconds * 1e3:.3g} / {row.measured_seconds * 1e3:.3g} {row.error:+.0%}"


def _summary(rows: list[calibration.Prediction]) -> str:
    """The errors of predictions, by axes and sizes."""
    lines = []
    for fitted, small in itertools.product((True, False), (True, False)):
        errors = [abs(row.error) for row in rows if row.fitted == fitted and (row.bytes < SMALL_BYTES) == small]
        if errors:
            where = "one level" if fitted else "other axes"
            size = f"{'under' if small else 'from'} {short_bytes(SMALL_BYTES)}"
            near = sum(error <= 0.15 for error in errors)
            lines.append(
                f"collectives on {where}, {size}: {near} of {len(errors)} within 15%, "
                f"median error {statistics.median(errors):.0%}"
            )
    return "\n".join(lines)


@reports_bad_input
def clusters_command(
    name: Annotated[
        str | None, typer.Argument(help="A cluster of the library, or a TOML file: checked, and shown.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The library of clusters, or one of them."""
    clusters = dict(sorted(library.CLUSTERS.items())) if name is None else {name: _cluster(name)}
    if as_json:
        typer.echo(json.dumps({key: _facts(cluster) for key, cluster in clusters.items()}, indent=2))
        return
    if name is None:
        library_rows: list[Row] = [
            {
                "cluster": key,
                "devices": cluster.devices,
                "device": cluster.device.name,
                "memory (for a step)": _memory(cluster.device),
                "levels, from the outermost in": ", ".join(f"{level.name} {level.size}" for level in cluster.levels),
            }
            for key, cluster in clusters.items()
        ]
        say([Grid.of(library_rows)])
        return
    (cluster,) = clusters.values()
    device = cluster.device
    rates = ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in device.flops_per_second.items())
    moving = ", ".join(f"{short_bytes(size)} reaches {part:.0%}" for size, part in device.memory_curve)
    most = "the peak" if device.has_peak else "most"
    told = [
        f"{cluster.name}: {cluster.source}",
        f"{cluster.devices} x {device.name}: TFLOP/s {rates} at {most}, of which an operator of "
        + ", ".join(f"{flops:.2g} flops reaches {part:.0%}" for flops, part in device.efficiency)
        + f"; {_memory(device)} at {short_bytes(device.memory_bytes_per_second)}/s"
        + (f", of which an operator that moves {moving}" if len(device.memory_curve) > 1 else "")
        + f"; {short_seconds(device.seconds_per_op)} an operator",
    ]
    if ratios := device.operator_ratios:
        told.append("of that, operators take: " + ", ".join(f"{op} {ratio:.2g}" for op, ratio in ratios.items()))
    shown: list[Sequence[Part]] = [[Lines(told, indent=0)], [Grid.of([_level_row(level) for level in cluster.levels])]]
    if cluster.groups:
        groups = Grid.of([_group_row(measured) for measured in cluster.groups], keys=2)
        shown.append(titled(f"collectives of {short_bytes(SHOWN_BYTES)}", groups))
    say(*shown)


def _level_row(level: Level) -> Row:
    pair = level.bytes_per_second
    return {
        "level": level.name,
        "size": level.size,
        "topology": level.topology,
        "out_of_a_child_bytes_per_second": level.group_bytes_per_second,
        "between_two_bytes_per_second": "a matrix" if isinstance(pair, tuple) else pair,
        "latency_a_step_seconds": level.most_latency_seconds,
        "launch_seconds": level.launch_seconds,
    }


def _group_row(measured: Groups) -> Row:
    curves = measured.seconds
    seconds = {f"{kind}_seconds": interpolated(curves[kind], SHOWN_BYTES) if kind in curves else None for kind in KINDS}
    return {"measured groups": f"{measured.ranks} ranks", "apart": measured.stride, **seconds}


def _memory(device: Device) -> str:
    """The memory, and what of it a step may take."""
    if device.memory_bytes is None or device.usable_bytes is None:
        return "unknown"
    return f"{short_bytes(device.memory_bytes)} ({short_bytes(device.usable_bytes)})"


def _cluster(name: str) -> Cluster:
    return library.read_cluster(name) if Path(name).is_file() else library.named_cluster(name)


def _facts(cluster: Cluster) -> dict[str, object]:
    """All that is known of a cluster, and what follows from it."""
    facts = asdict(cluster)
    facts["device"]["usable_bytes"] = cluster.device.usable_bytes
    return {"devices": cluster.devices, **facts}
