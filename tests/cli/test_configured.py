"""`autopar.toml`, and models by a configuration file of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autopar.cli
from autopar.cli import app
from autopar.cli.loading import load
from autopar.planning.plan import Plan

FILE = """
cluster = "dgx-h100"
mesh = {dp = 2, tp = 2}
batch = 16
solver = "ilp"
pin = ["head.weight:tp=R"]
micro-batches = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def autopar_(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_file_says_what_is_not_typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "autopar.toml").write_text(FILE)
    monkeypatch.setattr(autopar.cli, "TYPED", ["plan", "tower:build"])
    done = autopar_("plan", "tower:build", "--out", "plan.json")
    assert done.exit_code == 0, done.output
    assert "autopar.toml: --cluster dgx-h100 --mesh dp=2,tp=2 --batch 16" in done.stderr
    plan = Plan.load(folder / "plan.json")
    assert (plan.mesh, plan.cluster, plan.solver) == ({"dp": 2, "tp": 2}, "dgx-h100", "ilp")
    assert plan.constraints == {"head.weight": {"tp": "R"}}
    assert plan.provenance is not None and plan.provenance.items == 2 * 16 and plan.training.micro_batches == 2


@pytest.mark.parametrize("on", ["true", "false"])
def test_a_switch_is_on_or_off(folder: Path, on: str) -> None:
    (folder / "autopar.toml").write_text(f'cluster = "dgx-h100"\nmesh = "dp=2"\noffload = {on}\n')
    done = autopar_("plan", "tower:build", "--batch", "8", "--out", "plan.json")
    assert done.exit_code == 0, done.output
    assert ("--offload" in done.stderr) == (on == "true")
    typed = autopar_("plan", "tower:build", "--batch", "8", "--cluster", "v100-nvlink", "--offload")
    assert typed.exit_code == 2 and "host_bytes_per_second" in typed.output + typed.stderr


def test_the_command_line_wins(folder: Path) -> None:
    (folder / "autopar.toml").write_text(FILE)
    done = autopar_(
        "plan", "tower:build", "--mesh", "a=4", "--pin", "head.weight:a=R", "--solver=ddp", "--out", "plan.json"
    )
    assert done.exit_code == 0, done.output
    plan = Plan.load(folder / "plan.json")
    assert (plan.mesh, plan.solver, plan.constraints) == ({"a": 4}, "ddp", {"head.weight": {"a": "R"}})
    assert "--mesh" not in done.stderr and "--batch 16" in done.stderr
    shown = autopar_("show", "plan.json")  # takes nothing from the file
    assert shown.exit_code == 0 and "autopar.toml" not in shown.stderr


def test_settings_are_merged(folder: Path) -> None:
    (folder / "autopar.toml").write_text('mesh = "a=2"\n[set]\nnum_hidden_layers = 2\nhidden_size = 32\n')
    pytest.importorskip("transformers")
    arguments = ["--set", "hidden_size=64", "--set", "num_attention_heads=4", "--set", "vocab_size=64", "--seq", "8"]
    arguments += ["--set", "intermediate_size=32", "--set", "num_key_value_heads=2"]
    done = autopar_("plan", "hf:LlamaConfig", *arguments, "--json")
    assert done.exit_code == 0, done.output
    parameters = json.loads(done.stdout)["parameters"]
    assert parameters["model.embed_tokens.weight"]["shape"] == [64, 64]
    assert "model.layers.1.mlp.up_proj.weight" in parameters and "model.layers.2.mlp.up_proj.weight" not in parameters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clustr = 'x'", "autopar.toml: clustr is unknown (did you mean 'cluster'?); the fields here are batch"),
        ("memory_limit = '4GB'", "(did you mean 'memory-limit'?)"),
        ("batch = ", "autopar.toml: it is not TOML (Invalid value"),
        ("set = 3", "set is 3: a table, such as [set]"),
        ("batch = [3]", "batch is [3]: a text or a number"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(folder: Path, text: str, message: str) -> None:
    (folder / "autopar.toml").write_text(text)
    failed = autopar_("plan", "tower:build", "--mesh", "a=2")
    assert failed.exit_code == 2
    assert message in failed.output.replace("\n", " ")
    assert autopar_("plan", "--help").exit_code == 0


def test_a_model_is_given_by_its_configuration_file(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32, vocab_size=128
    )
    config.save_pretrained(folder / "mine")
    import torch

    expected = load(
        "hf:LlamaConfig", json.loads(config.to_json_string(use_diff=True)) | {}, batch=4, sequence=8, dtype="bfloat16"
    )
    for spec in (str(folder / "mine"), str(folder / "mine" / "config.json")):
        loaded = load(spec, {}, batch=4, sequence=8, dtype="bfloat16")
        shapes = {name: (p.shape, p.dtype) for name, p in loaded.model.named_parameters()}
        assert shapes["lm_head.weight"] == (torch.Size([128, 64]), torch.bfloat16)
        assert shapes == {name: (p.shape, p.dtype) for name, p in expected.model.named_parameters()}
    smaller = load(str(folder / "mine"), {"num_hidden_layers": 1}, batch=4, sequence=8, dtype="float32")
    assert not [name for name, _ in smaller.model.named_parameters() if "layers.1." in name]
    with pytest.raises(ValueError, match="did you mean 'num_hidden_layers'"):
        load(str(folder / "mine"), {"num_hiden_layers": 1}, batch=4, sequence=8, dtype="float32")
    for text, message in (("[]", "no model_type"), ('{"model_type": "lama"}', "did you mean"), ("{", "is not JSON")):
        (folder / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(folder / "bad.json"), {}, batch=4, sequence=8, dtype="float32")
