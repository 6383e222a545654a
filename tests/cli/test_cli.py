"""The command line: what it is told, what it prints, and what it says of bad input."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import autopar
from autopar.cli import app
from autopar.cli.common import mesh_shape
from autopar.cli.loading import load
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import byte_count, constraints_of, parsed, settings_of

pytestmark = pytest.mark.timeout(180)

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SETTINGS = [part for key, value in LLAMA.items() for part in ("--set", f"{key}={value}")]
SIZES = ["--batch", "4", "--seq", "16"]


def autopar_(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def build(width: int, batch: int = 2) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    """A model for module:callable."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU()), (torch.randn(batch, width),), torch.mean


# --- what is read


def test_the_mesh_may_be_chosen_and_parameters_pinned() -> None:
    arguments = ["plan", "test_cli:build", "--set", "width=8", "--batch", "4", "--json", "--pin", "0.weight:a=S(1)"]
    plan = json.loads(autopar_(*arguments, "--mesh", "4").stdout)
    assert math.prod(plan["mesh"].values()) == 4
    assert plan["parameters"]["0.weight"]["at_rest"][0].startswith("S(1")


def test_meshes_sizes_and_settings_are_read() -> None:
    assert constraints_of(["w:a=S(0)", "w:b=R", "v.*:a=R"]) == {"w": {"a": "S(0)", "b": "R"}, "v.*": {"a": "R"}}
    with pytest.raises(ValueError, match="write NAME:AXIS=PLACEMENT"):
        constraints_of(["w=S(0)"])
    with pytest.raises(ValueError, match="contradicts a=R for the same name"):
        constraints_of(["w:a=R", "w:a=S(0)"])
    assert mesh_shape("dp=2, tp=4") == {"dp": 2, "tp": 4}
    assert byte_count("40GB") == 40e9
    assert byte_count("1.5GiB") == 1.5 * 2**30
    assert byte_count("100") == 100
    assert parsed(settings_of(["a=1", "b=0.5", "c=true", "d=gelu", "e=[1, 2]"])) == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": "gelu",
        "e": [1, 2],
    }


def test_a_callable_is_given_what_it_takes() -> None:
    loaded = load("test_cli:build", {"width": 8}, batch=6, sequence=3, dtype="float32")
    assert loaded.args[0].shape == (6, 8)
    assert loaded.loss_fn is torch.mean


@pytest.mark.parametrize(
    ("name", "settings", "inputs"),
    [
        ("LlamaConfig", LLAMA, {"input_ids": (4, 16), "labels": (4, 16)}),
        ("ViTConfig", {"image_size": 32, "patch_size": 8}, {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
        ("DeiTConfig", {"image_size": 32, "patch_size": 8}, {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
        ("ResNetConfig", {"depths": [1, 1, 1, 1]}, {"pixel_values": (4, 3, 224, 224), "labels": (4,)}),
        ("T5Config", {"num_layers": 1}, {"input_ids": (4, 16), "labels": (4, 16)}),
    ],
)
def test_models_of_hugging_face_are_on_meta(name: str, settings: dict[str, Any], inputs: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    loaded = load(f"hf:{name}", settings, batch=4, sequence=16, dtype="bfloat16")
    assert {key: tuple(value.shape) for key, value in loaded.kwargs.items()} == inputs
    assert {p.device.type for p in loaded.model.parameters()} == {"meta"}
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


# --- what is printed


def test_plan_saves_what_show_prints(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "plan.json"
    planned = autopar_(
        "plan", "hf:LlamaConfig", *SETTINGS, *SIZES, "--mesh", "dp=2,tp=2", "--solver", "megatron", "--out", str(path)
    )
    assert planned.exit_code == 0, planned.output
    assert planned.stdout.strip() == str(Plan.load(path)).strip()
    assert autopar_("show", str(path)).stdout == planned.stdout
    assert Plan.from_json(json.loads(autopar_("show", str(path), "--json").stdout)) == Plan.load(path)


def test_lower_replays_what_a_plan_rewrote(tmp_path: Path) -> None:
    path, before = tmp_path / "plan.json", tmp_path / "program.txt"
    arguments = ["plan", "test_cli:build", "--set", "width=8", "--batch", "4", "--mesh", "a=2", "--solver", "fsdp"]
    assert autopar_(*arguments, "--out", str(path)).exit_code == 0
    plan = Plan.load(path)
    written = autopar_("lower", str(path), "--passes", "", "--out", str(before))
    assert written.exit_code == 0, written.output
    lowered = autopar_("lower", str(before), "--passes", plan.rewrites, "--cluster", plan.cluster)
    assert lowered.exit_code == 0, lowered.output
    assert lowered.stdout == autopar_("lower", str(path)).stdout
    assert "bucket_1" in lowered.stdout and "bucket_1" not in before.read_text()
    again = autopar_("lower", str(before))
    assert again.stdout == before.read_text()


@pytest.mark.parametrize(
    ("text", "passes", "message"),
    [
        ("mesh a=2\n", "slices", "unknown rewrite 'slices' (did you mean 'slice'?)"),
        ("mesh a=2\nx = input x: float32[4]\n", "", "line 2 of the program, `x = input x: float32[4]`: it has 0"),
        ("mesh a=2\n", "slice{at=(('mm',0,2),)}", "slice: the program has no place at mm"),
        ("forward\n", "", "the program has no mesh: begin with a line such as `mesh dp=2, tp=4`"),
    ],
)
def test_what_cannot_be_lowered_is_said(tmp_path: Path, text: str, passes: str, message: str) -> None:
    path = tmp_path / "program.txt"
    path.write_text(text)
    refused = autopar_("lower", str(path), "--passes", passes)
    assert refused.exit_code == 2
    assert message in " ".join(refused.output.split())


def test_plan_is_what_the_library_plans() -> None:
    arguments = ["plan", "test_cli:build", "--set", "width=8", "--batch", "4", "--mesh", "a=2", "--cost", "volume"]
    shown = autopar_(*arguments, "--json")
    assert shown.exit_code == 0, shown.output
    model, args, loss_fn = build(8, 4)
    plan = autopar.plan(model, {"a": 2}, args, loss_fn=loss_fn, cost="volume")
    found = Plan.from_json(json.loads(shown.stdout))
    assert found.decisions == plan.decisions and found.cost == "volume"


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("sgd", 0), ("12", 3)])
def test_the_states_of_the_optimizer_count(optimizer: str, states: int) -> None:
    arguments = ["plan", "test_cli:build", "--set", "width=8", "--batch", "4", "--mesh", "a=2", "--solver", "ddp"]
    shown = autopar_(*arguments, "--optimizer", optimizer, "--json")
    assert shown.exit_code == 0, shown.output
    peak = json.loads(shown.stdout)["peak"]
    counters = 4 * len(list(build(8, 4)[0].parameters())) if optimizer == "adamw" else 0
    assert peak["optimizer"] == states * peak["parameters"] + counters


def test_compare_takes_meshes_and_clusters(tmp_path: Path) -> None:
    arguments = ["compare", "test_cli:build", "--set", "width=8", "--batch", "8", "--solver", "ddp", "--solver", "dp"]
    arguments += ["--mesh", "a=2", "--mesh", "a=4", "--cluster", "dgx-a100", "--cluster", "local"]
    shown = autopar_(*arguments, "--json", "--out", str(tmp_path / "plans"))
    assert shown.exit_code == 0, shown.output
    rows = {row["plan"]: row for row in json.loads(shown.stdout)["rows"]}
    assert set(rows) == {f"{s} a={n} {c}" for s in ("ddp", "dp") for n in (2, 4) for c in ("dgx-a100", "local")}
    saved = [Plan.load(path) for path in (tmp_path / "plans").iterdir()]
    assert {(p.solver, p.cluster, p.mesh["a"]) for p in saved} == {
        (s, c, n) for s in ("ddp", "dp") for n in (2, 4) for c in ("dgx-a100", "local")
    }
    for plan in saved:
        row = rows[f"{plan.solver} a={plan.mesh['a']} {plan.cluster}"]
        assert (row["step_seconds"], row["peak_memory_bytes"]) == (plan.seconds, plan.bytes)
        assert (row["solver"], row["mesh"], row["cluster"]) == (plan.solver, f"a={plan.mesh['a']}", plan.cluster)
    text = autopar_(*arguments).stdout
    assert text.count("all_reduce") >= 4  # the gradients of data parallel plans
    assert text.splitlines()[0].split()[:3] == ["plan", "step", "peak"]


def test_compare_and_fit_print_tables_for_other_programs(tmp_path: Path) -> None:
    """CSV has figures in base units, Markdown as people read them; what has no plan is a row too."""
    model = ["test_cli:build", "--set", "width=8", "--batch", "1"]
    compare = ["compare", *model, "--mesh", "a=2", "--solver", "ddp", "--solver", "megatron"]
    found = {row["plan"]: row for row in json.loads(autopar_(*compare, "--format", "json").stdout)["rows"]}
    rows = {row["plan"]: row for row in csv.DictReader(io.StringIO(autopar_(*compare, "--format", "csv").stdout))}
    assert float(rows["megatron"]["step_seconds"]) == found["megatron"]["step_seconds"] > 0
    assert rows["ddp"]["step_seconds"] == "" and "splits the batch" in rows["ddp"]["error"]
    head, rule, *lines = autopar_(*compare, "--format", "markdown").stdout.splitlines()
    assert head.startswith("| plan | solver | mesh |") and set(rule) <= set("| -") and len(lines) == 2
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *lines)} == {head.count("|")}
    fit = ["fit", *model, "--devices", "2", "--strategy", "megatron", "--keep", str(tmp_path / "kept.sqlite")]
    (trial,) = csv.DictReader(io.StringIO(autopar_(*fit, "--format", "csv").stdout))
    assert float(trial["samples_per_second"]) == pytest.approx(1 / float(trial["step_seconds"]))
    assert "(did you mean 'markdown'?)" in autopar_(*fit, "--format", "markdwn").output.replace("\n", " ")


def test_compare_on_another_mesh_is_what_a_planner_for_it_finds() -> None:
    model, args, loss_fn = build(8, 8)
    planner = Planner(model, {"a": 2}, args, loss_fn=loss_fn)
    there = planner.on({"b": 2, "c": 2}, "dgx-a100").plan(solver="dp")
    assert (
        there.decisions
        == autopar.plan(model, {"b": 2, "c": 2}, args, loss_fn=loss_fn, cluster="dgx-a100", solver="dp").decisions
    )
    assert planner.plan(solver="dp").mesh == {"a": 2}


def test_compare_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["compare", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--solver", "ddp", "--figure"]
    assert autopar_(*arguments, str(tmp_path / "plans.svg")).exit_code == 0
    assert "<svg" in (tmp_path / "plans.svg").read_text()
    assert "the figure cannot be written" in autopar_(*arguments, str(tmp_path / "plans.nope")).output


def test_compare_says_once_what_several_presets_have_in_common() -> None:
    """The same plan stands in one row, and the same reason on one line; each has its own row in JSON."""
    model = ["compare", "test_cli:build", "--set", "width=8"]
    solvers = [word for name in ("atp", "par4d", "meshslice") for word in ("--solver", name)]
    text = autopar_(*model, "--mesh", "dp=2", *solvers)
    assert text.exit_code == 1
    assert "atp, par4d and meshslice: no plan: the preset splits products on one or" in text.stdout
    arguments = [*model, "--mesh", "a=2", "--solver", "atp", "--solver", "par4d"]
    told = autopar_(*arguments).stdout
    assert "par4d: the plan of atp too" in told and "\npar4d " not in told
    rows = json.loads(autopar_(*arguments, "--json").stdout)["rows"]
    assert [row["plan"] for row in rows] == ["atp", "par4d"]


def test_compare_without_any_plan_fails() -> None:
    arguments = ["compare", "test_cli:build", "--set", "width=8", "--batch", "1", "--mesh", "a=2", "--solver", "ddp"]
    failed = autopar_(*arguments)
    assert failed.exit_code == 1
    assert "ddp: no plan: preset 'ddp' splits the batch" in failed.stdout


# --- what is wrong


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["plan", "llama", "--mesh", "a=2"], "model 'llama': write module:callable"),
        (["plan", "hf:NoConfig", "--mesh", "a=2"], "transformers has no configuration 'NoConfig'"),
        (["plan", "hf:LlamaConfig", "--set", "hiden=3", "--mesh", "a=2"], "LlamaConfig has no hiden"),
        (["plan", "no_such_module:build", "--mesh", "a=2"], "No module named 'no_such_module'"),
        (
            ["plan", "test_cli:build", "--mesh", "a=2"],
            "missing a required argument: 'width'; it is given batch, sequence and dtype",
        ),
        (
            ["plan", "test_cli:mesh_shape", "--set", "text=a=2", "--mesh", "a=2"],
            "returned dict: return (model, inputs)",
        ),
        (["plan", "test_cli:build", "--set", "width", "--mesh", "a=2"], "--set has 'width': write KEY=VALUE"),
        (["plan", "test_cli:build", "--set", "width=8", "--mesh", "a"], "--mesh is 'a': write each axis once"),
        (
            ["plan", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--memory-limit", "4X"],
            "--memory-limit is '4X'",
        ),
        (
            ["plan", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--optimizer", "adagrad"],
            "unknown optimizer 'adagrad'",
        ),
        (["plan", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--solver", "best"], "unknown solver 'best'"),
        (["plan", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--dtype", "int8"], "--dtype is 'int8'"),
        (
            ["plan", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--dtype", "bfloat16"],
            "takes no dtype, so --dtype would change nothing",
        ),
        (
            ["plan", "test_cli:build", "--set", "width=8", "--mesh", "a=2", "--cluster", "mine"],
            "unknown cluster 'mine'",
        ),
        (["show", "no-such-plan.json"], "no-such-plan.json"),
        (["lab", "--levels", "2", "--", "true"], "--levels has '2': write SIZE:RATE"),
        (["lab", "--cluster", "dgx-a100", "--", "true"], "has 8192 devices: say with --sizes how many"),
        (["lab", "--sizes", "2,2", "--", "true"], "--sizes goes with --cluster"),
        (["calibrate"], "nothing to do: give --out FILE"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_line_and_exit_status_2(arguments: list[str], error: str) -> None:
    if any(argument.startswith("hf:") for argument in arguments):
        pytest.importorskip("transformers")
    failed = autopar_(*arguments)
    assert failed.exit_code == 2
    assert error in failed.output
    assert failed.stdout == ""


# --- check


class Calls(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return (self.layer(x) * self.calls[0]).mean()


def counting() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Calls(), (torch.randn(4, 8),)


def test_check_compares_a_model_with_pytorch() -> None:
    small = [*SETTINGS, "--set", "num_hidden_layers=1", "--batch", "2", "--seq", "4"]
    made = autopar_("check", "hf:LlamaConfig", *small, "--mesh", "tp=2", "--solver", "ddp")
    assert made.exit_code == 0, made.output
    assert "1 step on tp=2" in made.stdout
    arguments = ["check", "test_cli:build", "--set", "width=8", "--mesh", "dp=2", "--plans", "1", "--steps", "2"]
    assert "random 0" in autopar_(*arguments).stdout
    found = json.loads(autopar_(*arguments, "--json").stdout)
    assert found["equal"] and found["rows"][0]["plan"] == "auto" and found["rows"][0]["errors"]["loss"] <= 1e-12


def test_check_fails_where_something_differs_or_is_refused() -> None:
    made = autopar_("check", "test_cli:counting", "--mesh", "dp=2", "--steps", "2")
    assert made.exit_code in (1, 2), "a difference, or a refusal by name"
    assert "step 2: " in made.stdout or "calls" in made.stderr
    assert autopar_("check", "test_cli:counting", "--mesh", "dp").exit_code == 2
