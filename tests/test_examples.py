"""What the README and the examples say runs as written."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.ir.layout import Split
from autopar.planning.planner import Planner

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def block(with_text: str) -> str:
    (found,) = (b for b in BLOCKS if with_text in b)
    return found


def torchrun(*arguments: str | Path, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    result = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_training_as_in_the_readme(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("init_device_mesh"))
    printed = torchrun("train.py", folder=tmp_path)
    assert "plan of LlamaForCausalLM on mesh dp=2, tp=2" in printed
    assert "def forward(" in printed


def test_planning_as_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorter = block("dgx-h100").replace("num_hidden_layers=32", "num_hidden_layers=3")
    exec(compile(shorter, "README.md", "exec"), {})
    assert autopar.Plan.load("plan.json").cluster == "dgx-h100"


def test_comparing_as_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("autopar.compare"), "README.md", "exec"), {})
    solvers = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert solvers[0] == "dp" and len(solvers) == 5


def test_editing_as_in_the_readme(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    exec(block("init_device_mesh").split("mesh = ")[0], made)
    planner = Planner(made["model"], {"dp": 2, "tp": 2}, kwargs=made["loader"][0])
    planner.plan(solver="megatron").save(tmp_path / "plan.json")
    text, before, after = (tmp_path / "plan.json").read_text(), '"R S0%256 keep"', '"S1%128 S0%256 keep"'
    for choice in (before, after):
        assert choice.strip('"') in README
    assert f'"model_embed_tokens_weight": {before}' in text
    (tmp_path / "plan.json").write_text(text.replace(before, after, 1))
    program = planner.program(autopar.Plan.load(tmp_path / "plan.json"))
    layouts = {i.target: i.layout for i in program.inputs}
    assert layouts["model.embed_tokens.weight"] == (Split(1, 128), Split(0, 256))


def test_the_guide_on_operators_of_your_own(tmp_path: Path) -> None:
    """In a process of its own, for the operator's name is taken once."""
    text = (ROOT / "docs/guide.md").read_text()
    (tmp_path / "guide.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)))
    result = subprocess.run([sys.executable, "guide.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"mylib\.scale_rows\.default: \d+ instances, factors m, k\n", result.stdout)


def test_the_readme_names_every_file() -> None:
    rows = re.findall(r"^\| (`.*?) \|", README, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\.py|/)`", row)}
    files = {p.stem for folder in ("autopar", "passes", "runtime") for p in (ROOT / folder).glob("*.py")}
    assert files - {"__init__"} <= named


def test_the_training_example_equals_one_process() -> None:
    small = ["--steps", "3", "--batch", "4", "--sequence", "16", "--solver", "megatron"]
    last = torchrun("examples/train_llama.py", *small, folder=ROOT).splitlines()[-1]
    found = re.search(r"relative difference: loss (\S+), parameters (\S+);", last)
    assert found is not None, last
    assert float(found[1]) < 1e-5 and float(found[2]) < 1e-4


SMALL = {"resnet.py": ["--size", "32", "--width", "8", "--blocks", "1", "1"], "unet.py": ["--channels", "8", "16"]}


@pytest.mark.parametrize("name", SMALL)
def test_the_image_examples_equal_one_process(name: str) -> None:
    small = ["--steps", "3", "--batch", "8", "--solver", "ddp", *SMALL[name]]
    last = torchrun(f"examples/{name}", *small, folder=ROOT).splitlines()[-1]
    number = r"(\d\.\de[-+]\d+)"
    wanted = rf"loss {number}, gradients of the first step {number}, parameters and buffers after the last {number};"
    found = re.search(wanted, last)
    assert found is not None, last
    assert float(found[1]) < 1e-5 and float(found[2]) < 1e-4 and float(found[3]) < 1e-4


def test_the_training_example_says_how_to_start_it() -> None:
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "examples/train_llama.py"]
    result = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert result.returncode == 1
    assert "torchrun --standalone --nproc-per-node 4 examples/train_llama.py" in result.stderr


def test_the_walkthrough_ends_with_equal_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/walkthrough.py"), run_name="__main__")
    found = re.search(r"loss (\S+), eager (\S+); gradients differ by (\S+)", capsys.readouterr().out)
    assert found is not None
    assert found[1] == found[2] and float(found[3]) < 1e-5
