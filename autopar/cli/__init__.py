"""The command line. It reads options, calls the library and prints."""

import sys

import typer

from . import common, machines, plans, profiles, questions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Parallelize PyTorch models over a device mesh.",
)
plans.add(app)
questions.add(app)
machines.add(app)
profiles.add(app)


def main() -> None:
    common.TYPED[:] = sys.argv[1:]
    app()
