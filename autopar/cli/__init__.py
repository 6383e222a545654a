"""The command line. It reads options, calls the library and prints.

What is here does not import PyTorch: a command's module is imported when the command runs.
"""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from autopar.extensions import nearest
from autopar.report.telling import SAID, complain, notes

from .usage import BAD_INPUT, in_one_sentence

PLANS, MACHINES, PROFILED = "Plans", "Machines", "Profiled costs"


@dataclass(frozen=True, slots=True)
class Command:
    """A command's module in this folder, the panel that `--help` shows it in, and what it does."""

    module: str
    panel: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "plan": Command("plans", PLANS, "Plan a model on a mesh, without devices."),
    "show": Command("plans", PLANS, "Print a saved plan."),
    "lower": Command("plans", PLANS, "Rewrite a program, or that of a saved plan: bucket, slice, chunk and others."),
    "report": Command("plans", PLANS, "Write a saved plan as one HTML page, to look at, search and hand on."),
    "explain": Command("plans", PLANS, "Why something is planned as it is, and what else it could be."),
    "diff": Command("plans", PLANS, "What changes from one saved plan to another."),
    "what-if": Command("plans", PLANS, "Plan again with something changed, and show what that changes."),
    "fit": Command("plans", PLANS, "Which numbers of devices, meshes and strategies fit a model, ranked."),
    "compare": Command("plans", PLANS, "Plans of several solvers, presets, meshes and clusters side by side."),
    "simulate": Command("plans", PLANS, "Show how long a step takes, when everything runs, and what overlap hides."),
    "export": Command("plans", PLANS, "Write a saved plan as a script for another library, such as FSDP2."),
    "import": Command("plans", PLANS, "Price another library's plan, and say what the best plan gains over it."),
    "check": Command("plans", PLANS, "Run a model's plan on simulated ranks, and compare it with PyTorch."),
    "lab": Command("machines", MACHINES, "Run a command on the ranks of a cluster that this machine pretends to be."),
    "calibrate": Command("machines", MACHINES, "Measure what ranks reach, and write a cluster file."),
    "clusters": Command("machines", MACHINES, "List the library of clusters, or show and check one."),
    "profile": Command("profiles", PROFILED, "Measure the segments of a model, and plan by what was measured."),
    "profiles": Command("profiles", PROFILED, "Show, export, import and prune what was measured."),
}


QUIET = ("--quiet", "-q")


def _quiet(
    quiet: Annotated[bool, typer.Option(*QUIET, help="Print results and errors, and no progress.")] = False,
) -> None:
    """Every command has this option, though none takes it: what is said on standard error asks `telling.SAID`."""


def command_of(name: str) -> Any:
    """A command, or a group of them, each with the option of every command."""
    every, module = typer.Typer(), import_module(f".{COMMANDS[name].module}", __name__)
    command = getattr(module, f"{name.replace('-', '_')}_command")
    if isinstance(command, typer.Typer):
        every.add_typer(command, name=name)
    else:
        every.command(name)(command)
    every.command("quiet")(_quiet)
    commands = typer.main.get_group(every).commands
    (option,) = commands["quiet"].params
    option.expose_value = False
    for leaf in getattr(commands[name], "commands", {name: commands[name]}).values():
        leaf.params.append(option)
    return commands[name]


class Commands(TyperGroup):
    """Lists commands without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What `--help` shows of a command."""
        command = COMMANDS.get(cmd_name)
        if command is None:
            return None
        return TyperCommand(cmd_name, help=command.help, rich_help_panel=command.panel)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        typed = tuple(args)
        with in_one_sentence(lambda: typed):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[__name__] = typed
        return context

    def invoke(self, ctx: Any) -> Any:
        with in_one_sentence(lambda: (*FROM_FILE, *ctx.meta[__name__])):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself. An unknown one is answered with the nearest that there is."""
        name, *rest = args
        if name not in COMMANDS:
            complain(f"autopar has no command {name!r}{nearest(name, COMMANDS)}; it has {', '.join(COMMANDS)}")
            raise typer.Exit(BAD_INPUT)
        is_help = "--help" in rest
        command = command_of(name)
        if is_help:
            return name, command, rest
        options = {text.lstrip("-") for parameter in command.params for text in parameter.opts}
        try:
            configured = import_module(".configured", __name__)  # whose types need not be built for --help
            FROM_FILE[:] = configured.configured(name, options, rest)
        except ValueError as error:
            complain(error)
            raise typer.Exit(BAD_INPUT) from None
        SAID["quiet"] = any(word in QUIET for word in takewhile(lambda word: word != "--", rest))
        if FROM_FILE:
            notes().print(f"{configured.FILE}: {shlex.join(FROM_FILE)}", style="dim", markup=False, soft_wrap=True)
        return name, command, [*FROM_FILE, *rest]


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {version('autopar')}")
        raise typer.Exit()


@app.callback()
def root(
    shown: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parallelize PyTorch models over a device mesh."""


TYPED: list[str] = []
"""The words of the command line as a person typed them; none where the library runs a command."""

FROM_FILE: list[str] = []
"""What `autopar.toml` adds to them."""


def main() -> None:
    TYPED[:] = sys.argv[1:]
    try:
        app(prog_name="autopar")
    finally:
        gc.freeze()  # at exit, Python looks through all objects for cycles: with a large model, for seconds
