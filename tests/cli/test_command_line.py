"""The command line as a whole: what comes without PyTorch, and what is checked first."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import COMMANDS, app, command_of
from autopar.cost.optimizers import OPTIMIZERS
from autopar.ir.precision import NARROW
from autopar.planning.costs import COSTS
from autopar.planning.presets import PRESETS
from autopar.planning.request import NAMES, Request
from autopar.solve.schedules import SCHEDULES
from autopar.solve.solvers import AUTO, SOLVERS


def autopar_(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


# --- without PyTorch

TYPOS = (
    ["--solver", "auo"],
    ["--cluster", "dgx-h10"],
    ["--cost", "analitical"],
    ["--dtype", "bfloat61"],
    ["--param-dtype", "bf16"],
    ["--gather-dtype", "float8"],
    ["--optimizer", "adamv"],
    ["--memory-limit", "4X"],
    ["--pin", "head:tp"],
    ["--set", "hidden_size"],
)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        *((arguments, 0) for arguments in (["--help"], ["--version"], ["profiles", "list", "--help"])),
        *(([name, "--help"], 0) for name in COMMANDS),
        *((["clusters", *name], 0) for name in ([], ["dgx-h100"], ["--json"])),
        *((["clusters", name], 2) for name in ("gb2000", "missing.toml")),
        *((["plan", "hf:LlamaConfig", "--mesh", "a=2", *typo], 2) for typo in TYPOS),
        (["compare", "hf:LlamaConfig", "--mesh", "a=2", "--solver", "auto", "--solver", "fspd"], 2),
        (["fit", "hf:LlamaConfig", "--devices", "2", "--strategy", "fspd"], 2),
        (["plan", "hf:LlamaConfig", "--mesh", "a"], 2),
        (["diff", "missing.json", "missing.json"], 2),
        (["what-if", "missing.json", "--solver", "fspd"], 2),
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


def test_names_that_a_models_module_may_register_are_looked_up_after_it_is_imported() -> None:
    made = autopar_("plan", "test_command_line:registers", "--mesh", "a=2", "--cluster", "of-this-module", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["cluster"] == "of-this-module"


def registers() -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    cluster = replace(autopar.CLUSTERS["dgx-a100"], name="of-this-module")
    autopar.register_cluster(cluster, replace=True)
    return nn.Linear(8, 8), (torch.zeros(8, 8),), torch.Tensor.sum


def test_the_names_in_help_are_those_of_the_tables() -> None:
    import_module("autopar.api")  # which registers the modes that measure
    assert tuple(SOLVERS.own) == NAMES["solver"] and Request().solver == AUTO
    assert tuple(PRESETS.own) == NAMES["preset"]
    assert {*COSTS.own, "hybrid", "profiled"} == {*NAMES["cost"]} <= {*COSTS}
    assert (*OPTIMIZERS, "adamw_on_host", "adamw_fp32_on_host") == NAMES["optimizer"]
    assert tuple(SCHEDULES.own) == NAMES["schedule"]
    assert NAMES["gather dtype"] == NARROW


def test_autopar_is_a_module_that_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "autopar", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == autopar_("--version").stdout == "autopar 0.2.0\n"


def test_every_name_of_the_package_is_there() -> None:
    assert all(hasattr(autopar, name) for name in autopar.__all__)
    assert set(autopar.__all__) == set(autopar.MODULE_OF)
    assert set(autopar.__all__) <= set(dir(autopar))
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        autopar.plam  # noqa: B018


def test_the_list_of_commands_is_that_of_the_modules() -> None:
    written = {
        (name.removesuffix("_command").replace("_", "-"), module)
        for module in {command.module for command in COMMANDS.values()}
        for name in vars(import_module(f"autopar.cli.{module}"))
        if name.endswith("_command")
    }
    of_group = {(name, "profiles") for name in command_of("profiles").commands}
    assert written == {(name, command.module) for name, command in COMMANDS.items()} | of_group
    every = [leaf for one in map(command_of, COMMANDS) for leaf in getattr(one, "commands", {"": one}).values()]
    assert all("--quiet" in [o for parameter in leaf.params for o in parameter.opts] for leaf in every)
    shown = autopar_("--help").stdout
    assert all(f" {name} " in shown for name in COMMANDS)


# --- what is wrong


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["pln"], "autopar has no command 'pln' (did you mean 'plan'?)"),
        (["plan", "m", "--mesh", "a=2", "--bach", "3"], "has no option '--bach' (did you mean '--batch'?)"),
        (["plan", "hf:LlamaConfg", "--mesh", "a=2"], "(did you mean 'LlamaConfig'?)"),
        (["plan", "hf:LlamaConfig", "--set", "hiden_size=3", "--mesh", "a=2"], "(did you mean 'hidden_size'?)"),
        (["plan", "hf:LlamaConfig", "--dtype", "bfloat61", "--mesh", "a=2"], "(did you mean 'bfloat16'?)"),
        (["plan", "tower:build", "--mesh", "a=2", "--solver", "megatorn"], "(did you mean 'megatron'?)"),
        (["plan", "tower:build", "--mesh", "a=2", "--cluster", "dgx-h10"], "(did you mean 'dgx-h100'?)"),
        (["plan", "tower:build", "--mesh", "a=2", "--cost", "analitical"], "(did you mean 'analytical'?)"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(arguments: list[str], hint: str) -> None:
    if any(argument.startswith("hf:") for argument in arguments):
        pytest.importorskip("transformers")
    failed = autopar_(*arguments)
    assert failed.exit_code == 2
    assert hint in failed.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["plan", "m", "--mesh", "a=2", "--batch", "0"], "--batch is '0': give an integer of at least 1"),
        (["plan", "m", "--mesh", "a=2", "--seq=long"], "--seq is 'long': give an integer of at least 1"),
        (["fit", "m", "--devices", "4", "--axes", "9"], "--axes is '9': give an integer from 1 to 4"),
        (["what-if", "plan.json", "--headroom", "much"], "--headroom is 'much': give a number"),
        (["plan", "m"], "--mesh is missing: give axes and sizes, outermost first, such as dp=2,tp=4"),
        (["diff", "plan.json"], "AFTER is missing: give what plan --out wrote"),
        (["plan", "m", "n", "--mesh", "a=2"], "unexpected extra argument"),
    ],
)
def test_an_option_alone_is_refused_in_one_line(arguments: list[str], error: str) -> None:
    failed = autopar_(*arguments)
    assert failed.exit_code == 2 and failed.stdout == ""
    assert len(failed.stderr.splitlines()) == 1 and failed.stderr.startswith("error: ") and error in failed.stderr


def test_a_number_of_the_file_is_refused_as_one_that_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("autopar.toml").write_text("batch = 0")
    assert "--batch is '0': give an integer of at least 1" in autopar_("plan", "m", "--mesh", "a=2").stderr


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


@pytest.mark.parametrize(
    "arguments",
    [["report", "--out", "page.html"], ["show", "--graph"], ["explain", "0.weight"], ["what-if", "--batch", "4"]],
)
def test_a_plan_runs_nothing_but_what_is_its_readers_own(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is handed on as a file: what builds its model must be its reader's own, or be typed."""
    plan = json.loads((Path(__file__).parents[1] / "saved" / "plan-format-2.json").read_text())
    plan["provenance"]["source"] = {"model": "subprocess:getoutput", "settings": {"cmd": "touch touched"}}
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(plan))
    command, *options = arguments
    refused = autopar_(command, "plan.json", *options)
    assert refused.exit_code == 2 and "give --model subprocess:getoutput if you trust it" in refused.stderr
    assert not Path("touched").exists()
