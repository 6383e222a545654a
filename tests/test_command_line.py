"""The command line as a whole: what comes without PyTorch, and what is checked first."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import autopar
from autopar.cli import COMMANDS, app, command_of
from autopar.cost.optimizers import OPTIMIZERS
from autopar.planning.costs import COSTS
from autopar.planning.presets import PRESETS
from autopar.planning.request import NAMES, Request
from autopar.solve import AUTO, SOLVERS


def autopar_(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


# --- without PyTorch


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        *((arguments, 0) for arguments in (["--help"], ["--version"], ["profiles", "list", "--help"])),
        *(([name, "--help"], 0) for name in COMMANDS),
        *((["clusters", *name], 0) for name in ([], ["dgx-h100"], ["--json"])),
        *((["clusters", name], 2) for name in ("gb2000", "missing.toml")),
    ],
)
def test_what_needs_no_tensors_does_not_import_pytorch(arguments: list[str], status: int) -> None:
    """PyTorch takes seconds to import; `--help` takes 0.2 s, and clusters 0.5."""
    code = (
        "import sys\nfrom autopar.cli import main\n"
        f"sys.argv = {['autopar', *arguments]}\n"
        "try:\n    main()\nfinally:\n    print(sorted({'torch', 'autopar.api'} & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status and done.stderr.splitlines()[-1] == "[]"
    assert bool(done.stdout) == (not status)


def test_the_names_in_help_are_those_of_the_tables() -> None:
    import_module("autopar.api")  # which registers the modes that measure
    assert tuple(SOLVERS.own) == NAMES["solver"] and Request().solver == AUTO
    assert tuple(PRESETS.own) == NAMES["preset"]
    assert {*COSTS.own, "hybrid", "profiled"} == {*NAMES["cost"]} <= {*COSTS}
    assert tuple(OPTIMIZERS) == NAMES["optimizer"]


def test_autopar_is_a_module_that_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "autopar", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == autopar_("--version").stdout == "autopar 0.1.0\n"


def test_every_name_of_the_package_is_there() -> None:
    assert all(hasattr(autopar, name) for name in autopar.__all__)
    assert set(autopar.__all__) == set(autopar.MODULE_OF)
    assert set(autopar.__all__) <= set(dir(autopar))
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        autopar.plam  # noqa: B018


def test_the_list_of_commands_is_that_of_the_modules() -> None:
    there = {}
    for module in {command.module for command in COMMANDS.values()}:
        every = typer.Typer()
        import_module(f"autopar.cli.{module}").add(every)
        there |= dict.fromkeys(typer.main.get_group(every).commands, module)  # type: ignore[attr-defined]
    assert there == {name: command.module for name, command in COMMANDS.items()}
    every = [leaf for one in map(command_of, COMMANDS) for leaf in getattr(one, "commands", {"": one}).values()]
    assert all("--quiet" in [o for parameter in leaf.params for o in parameter.opts] for leaf in every)
    shown = autopar_("--help").stdout
    assert all(f" {name} " in shown for name in COMMANDS)


# --- what is wrong


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["pln"], "did you mean 'plan'?"),
        (["plan", "hf:LlamaConfg", "--mesh", "a=2"], "(did you mean 'LlamaConfig'?)"),
        (["plan", "hf:LlamaConfig", "--set", "hiden_size=3", "--mesh", "a=2"], "(did you mean 'hidden_size'?)"),
        (["plan", "hf:LlamaConfig", "--dtype", "bfloat61", "--mesh", "a=2"], "(did you mean 'bfloat16'?)"),
        (["plan", "test_explain:build", "--mesh", "a=2", "--solver", "megatorn"], "(did you mean 'megatron'?)"),
        (["plan", "test_explain:build", "--mesh", "a=2", "--cluster", "dgx-h10"], "(did you mean 'dgx-h100'?)"),
        (["plan", "test_explain:build", "--mesh", "a=2", "--cost", "analitical"], "(did you mean 'analytical'?)"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(arguments: list[str], hint: str) -> None:
    if any(argument.startswith("hf:") for argument in arguments):
        pytest.importorskip("transformers")
    failed = autopar_(*arguments)
    assert failed.exit_code == 2
    assert hint in failed.output


def test_files_to_write_are_checked_before_anything_is_planned(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    for path, message in (
        (tmp_path / "no" / "plan.json", "there is no folder"),
        (tmp_path, "a folder: give the path of a file"),
        (other, "is no plan: move it away"),
    ):
        failed = autopar_("plan", "no_such_module:build", "--mesh", "a=2", "--out", str(path))
        assert failed.exit_code == 2
        assert message in failed.output.replace("\n", " ")
    assert other.read_text() == "mine"
    failed = autopar_(
        "simulate", "no_such_module:build", "--mesh", "a=2", "--trace", str(tmp_path / "no" / "step.json")
    )
    assert "--trace is" in failed.output and "there is no folder" in failed.output.replace("\n", " ")
    failed = autopar_("compare", "no_such_module:build", "--mesh", "a=2", "--figure", str(tmp_path))
    assert "--figure is" in failed.output
