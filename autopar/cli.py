"""The command line: `autopar lab`. It reads options, calls the library and prints."""

from __future__ import annotations

import math
import statistics
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from . import lab
from .clusters import named_cluster

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Parallelize PyTorch models over a device mesh.",
)
errors = Console(stderr=True)


@app.callback()
def _autopar() -> None:
    """Makes `app` a group, however few commands it has."""


def _fail(what: object) -> NoReturn:
    errors.print(f"error: {what}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


@app.command("lab", rich_help_panel="Machines")
def lab_command(
    command: Annotated[list[str], typer.Argument(help="What each rank runs, after --.", metavar="-- COMMAND")],
    nodes: Annotated[int, typer.Option(help="Nodes; with one, all ranks are behind equal links.")] = 1,
    ranks: Annotated[int, typer.Option(help="Ranks in a node.")] = 2,
    inter: Annotated[str, typer.Option(help="Rate of the link of a node.")] = "400mbit",
    intra: Annotated[str, typer.Option(help="Rate of the link of a rank.")] = "6gbit",
    levels: Annotated[
        str | None, typer.Option(help="Instead: levels from the outermost in, such as 2:100mbit,2:1gbit,2:6gbit.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Instead: a cluster of the library or a TOML file, divided by --scale.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="With --cluster: children to take of each of its levels, such as 2,2.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="With --cluster: what its rates are divided by; auto measures this machine.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="With --cluster: the dtype that is trained in there.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of a rank.")] = 1,
) -> None:
    """Run a command on the ranks of a cluster that this machine pretends to be.

    Each rank has a network namespace of its own, behind links as slow as they are told to be. Needs
    root, ip and tc. Example: autopar lab --nodes 2 --ranks 2 -- python train.py
    """
    try:
        shape = _shape(nodes, ranks, inter, intra, levels)
        if cluster is not None:
            shape = _emulated(cluster, sizes, scale, dtype, threads)
        elif sizes is not None:
            raise ValueError("--sizes goes with --cluster: give --nodes and --ranks, or --levels")
        errors.print(f"lab of {shape.ranks} ranks: {shape}", highlight=False)
        status = lab.launch(shape, command, threads=threads)
    except ValueError as error:
        _fail(error)
    raise typer.Exit(status)


def _shape(nodes: int, ranks: int, inter: str, intra: str, levels: str | None) -> lab.Shape:
    if levels is not None:
        made = []
        for level in levels.split(","):
            size, colon, link = level.partition(":")
            if not colon or not size.strip().isdecimal():
                raise ValueError(f"--levels has {level!r}: write SIZE:RATE for each level, such as 2:400mbit,2:6gbit")
            made.append(lab.Links(size=int(size), bytes_per_second=lab.rate(link)))
        return lab.Shape(tuple(made))
    return lab.flat(ranks, intra) if nodes == 1 else lab.nodes(nodes, ranks, inter, intra)


def _emulated(cluster: str, sizes: str | None, scale: str, dtype: str, threads: int) -> lab.Shape:
    from .runtime.measure import matmul_flops_per_second

    found = named_cluster(cluster)
    if sizes is not None:
        parts = tuple(_whole(part, "--sizes") for part in sizes.split(","))
    elif found.devices <= 8:
        parts = tuple(level.size for level in found.levels)
    else:
        names = ", ".join(f"{level.name} ({level.size})" for level in found.levels)
        raise ValueError(f"cluster {found.name} has {found.devices} devices: say with --sizes how many of {names}")
    if scale != "auto":
        return lab.part_of(found, parts, _number(scale, "--scale"))
    lab.check_part(found, parts)
    flat = lab.flat(math.prod(parts), "10gbit")
    here = statistics.median(lab.run(flat, matmul_flops_per_second, threads=threads, timeout_seconds=120.0))
    divisor = lab.divisor(found, here, dtype)
    errors.print(f"{here / 1e9:.3g} GFLOP/s a rank here: rates divided by {divisor:.4g}", highlight=False)
    return lab.part_of(found, parts, divisor)


def _whole(text: str, option: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{option} has {text!r}: give whole numbers with commas between, such as 2,2")
    return int(text)


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{option} is {text!r}: give a number above 0, or auto")
    return value


def main() -> None:
    app()


if __name__ == "__main__":
    main()
