"""What the README, the docs and the examples say runs as written."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from house import FLOORS
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli import main
from autopar.ir.layout import Split
from autopar.planning.planner import Planner

ROOT = Path(__file__).parents[2]
README, *_ = PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = runpy.run_path(str(ROOT / "docs/modules.py"))
PICTURES = runpy.run_path(str(ROOT / "docs/images/draw.py"))


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(name: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), flags=re.DOTALL | re.MULTILINE)
    return [text for word, text in fenced if word == language]


def block(name: str, with_text: str, language: str = "python") -> str:
    (found,) = (b for b in blocks(name, language) if with_text in b)
    return found


def torchrun(script: Path) -> str:
    """What a script on two ranks prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def as_main(script: Path, arguments: Sequence[str]) -> str:
    """What a script prints on this rank."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def on_ranks(script: Path, *arguments: str) -> str:
    """As `torchrun`, in a quarter of the time: ranks do not import PyTorch, and what scripts take of transformers, each
    for itself."""
    from transformers import LlamaForCausalLM  # noqa: F401

    return str(run(4, as_main, script, arguments)[0])


def test_training_as_in_the_docs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shorter = block("docs/training.md", "print(model.plan)").replace("num_hidden_layers=4", "num_hidden_layers=1")
    script.write_text(shorter)
    printed = on_ranks(script)
    assert re.search(r"LlamaForCausalLM \(.* parameters, float32\) on dp=2 x tp=2 of local", printed)
    assert "def forward(" in printed


def test_resuming_as_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another mesh than the one that wrote the checkpoint, the losses are those of the run without a restart."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    text = block(
        "docs/training.md", 'for step in range(autopar.load("checkpoints", model, optimizer, schedule)'
    ).replace("kwargs=loader[0]", 'kwargs=loader[0], solver="fsdp"')
    printed = []
    for shape in ('(2, 2), mesh_dim_names=("dp", "tp")', '(4,), mesh_dim_names=("dp",)'):
        script.write_text(text.replace('(2, 2), mesh_dim_names=("dp", "tp")', shape))
        printed.append(re.findall(r"^step (\d): loss (\S+)$", on_ranks(script), flags=re.MULTILINE))
        shutil.rmtree(tmp_path / "checkpoints/step-000010")  # as if the run had been killed before
    whole, resumed = ([(int(step), float(loss)) for step, loss in lines] for lines in printed)
    assert [step for step, _ in whole] == [*range(10)] and [step for step, _ in resumed] == [*range(5, 10)]
    assert whole[9][1] < whole[0][1] - 0.1
    assert [loss for _, loss in resumed] == pytest.approx([loss for _, loss in whole[5:]], abs=2e-5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000005"]
    assert autopar.Plan.load("checkpoints/step-000005/plan.json").mesh == {"dp": 2, "tp": 2}


def weights_there_and_back() -> None:
    """What the docs do with weights of plain PyTorch, on a model of these names."""
    plain, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), "weights.pt")
    dist.barrier()
    names = {"torch": torch, "model": autopar.parallelize(copy.deepcopy(plain), mesh, (x,), loss_fn=torch.sum)}
    with torch.no_grad():
        names["model"].weight.zero_()
    exec(block("docs/training.md", 'torch.load("weights.pt"'), names)
    assert torch.equal(names["model"].weight.full_tensor(), plain.weight)
    if dist.get_rank() == 0:
        Path("weights.pt").unlink()
    exec(block("docs/training.md", "get_model_state_dict"), names)
    if dist.get_rank() == 0:
        written = torch.load("weights.pt", weights_only=True)
        assert written.keys() == plain.state_dict().keys()
        assert all(torch.equal(written[name], value) for name, value in plain.state_dict().items())


def test_weights_of_plain_pytorch_as_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(2, weights_there_and_back)


def test_the_diff_of_the_readme_is_of_the_script_that_trains() -> None:
    """Which the test above runs."""
    (diff,) = blocks("README.md", "diff")
    script = block("docs/training.md", "print(model.plan)")
    assert {line[0] for line in diff.splitlines()} == {"+", " "}
    assert "\n".join(line[1:] for line in diff.splitlines() if line[0] == "+") in script
    assert all(line[1:] in script.splitlines() for line in diff.splitlines())


def test_planning_as_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorter = block("docs/planning.md", "vocab_size=128256").replace("num_hidden_layers=32", "num_hidden_layers=1")
    made: dict[str, Any] = {}
    exec(compile(shorter, "planning.md", "exec"), made)
    assert autopar.Plan.load("plan.json").cluster == "dgx-h100"
    exec(compile(block("docs/planning.md", "constraints = {"), "planning.md", "exec"), made)
    assert made["plan"].constraints == made["constraints"]
    assert made["plan"].parameters["lm_head.weight"].at_rest[1] == "S(0)"


def test_the_command_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(block("README.md", "autopar plan", "bash"))
    assert name == "autopar"
    shorter = ["--set", "num_hidden_layers=1", "--out", str(tmp_path / "plan.json")]
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments[: arguments.index("--out")], *shorter])
        main()
    assert not ended.value.code
    printed, shown = capsys.readouterr().out.splitlines(), page("README.md").splitlines()
    assert printed[0].rpartition(") on ")[2] in (line.rpartition(") on ")[2] for line in shown)
    rows = re.compile(r"(?:model\.embed_tokens|model\.norm|lm_head|input_ids|labels) .*")
    claimed, true = (
        {found[0] for line in text if (found := rows.match(" ".join(line.split())))} for text in (shown, printed)
    )
    assert len(claimed) > 2 and claimed <= true
    assert autopar.Plan.load(tmp_path / "plan.json").mesh == {"dp": 8, "tp": 8}


def test_comparing_as_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("docs/planning.md", "autopar.compare"), "planning.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    shown = block("docs/planning.md", "exposed  ", "").splitlines()
    assert [line.split()[:2] for line in printed] == [line.split()[:2] for line in shown]


def test_editing_as_in_the_docs(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    exec(block("docs/training.md", "print(model.plan)").split("mesh = ")[0], made)
    planner = Planner(made["model"], {"dp": 2, "tp": 2}, kwargs=made["loader"][0])
    planner.plan(solver="megatron").save(tmp_path / "plan.json")
    text, before, after = (tmp_path / "plan.json").read_text(), '"R S0%256 keep"', '"S1%128 S0%256 keep"'
    for choice in (before, after):
        assert choice.strip('"') in page("docs/planning.md")
    assert f'"model_embed_tokens_weight": {before}' in text
    (tmp_path / "plan.json").write_text(text.replace(before, after, 1))
    program = planner.program(autopar.Plan.load(tmp_path / "plan.json"))
    layouts = {i.target: i.layout for i in program.inputs}
    assert layouts["model.embed_tokens.weight"] == (Split(1, 128), Split(0, 256))


def test_the_guide_on_checks() -> None:
    exec(compile(block("docs/guide.md", "check(model"), "guide.md", "exec"), {})


def test_the_readme_is_short() -> None:
    """A newcomer reads it in a minute; what is more stands on a page of docs/."""
    assert len(page("README.md").splitlines()) <= 150


def test_the_chart_is_of_the_table_and_the_docs_agree() -> None:
    ratios = sorted(cell.ratio for cell in PICTURES["cells"](page("docs/lab.md")))
    assert len(ratios) == 8
    for name in ("README.md", "docs/speed.md"):
        assert f"{ratios[0]} to {ratios[-1]} of the step" in page(name)


def test_every_floor_has_a_row_in_its_order() -> None:
    rows = re.findall(r"^\| `(?:autopar/)?(\w+)(?:/|\.py)` \|", page("docs/code.md"), flags=re.MULTILINE)
    floor = {name: number for number, names in enumerate(FLOORS) for name in names if name.isalpha()}
    assert sorted(rows) == sorted(floor)
    assert [floor[name] for name in rows] == sorted(floor.values())


def test_every_module_says_what_it_is_for() -> None:
    """So that docs/modules.py lists them all, and no list by hand goes stale."""
    silent = [str(file) for file in MODULES["modules"]("autopar", "passes", "runtime") if not MODULES["purpose"](file)]
    assert not silent


def test_what_the_docs_name_in_modules_exists() -> None:
    named = {name for path in PAGES for name in re.findall(r"\bautopar(?:\.\w+){2,}", path.read_text())}
    assert "autopar.ops.table" in named and "autopar.runtime.memory.step_bytes" in named
    for name in sorted(named):
        pkgutil.resolve_name(name)


def test_benchmarks_and_examples_import_what_exists() -> None:
    """Many of them take minutes, or root, and no test runs those."""
    files = [file for folder in ("benchmarks", "examples") for file in (ROOT / folder).glob("*.py")]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar"):
            for alias in node.names:
                pkgutil.resolve_name(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    wrong = []
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="(.+?)"', text)
    for target in targets:
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    paths = re.findall(r"`((?:autopar|passes|runtime|tests|benchmarks|examples|docs)/[\w./-]*)`", text)
    wrong += [name for name in paths if not (ROOT / name).exists()]
    assert not wrong


def anchors(file: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_training_example_equals_one_process() -> None:
    small = ["--steps", "3", "--batch", "4", "--sequence", "16", "--solver", "megatron"]
    last = on_ranks(ROOT / "examples/train_llama.py", *small).splitlines()[-1]
    found = re.search(r"relative difference: loss (\S+), parameters (\S+);", last)
    assert found is not None, last
    assert float(found[1]) < 1e-5 and float(found[2]) < 1e-4


SMALL = {
    "resnet.py": ["--size", "32", "--width", "8", "--blocks", "1", "1"],
    "unet.py": ["--channels", "8", "16"],
    "vit.py": ["--layers", "1", "--hidden", "32"],
    "moe.py": ["--layers", "1", "--hidden", "32", "--experts", "4", "--sequence", "16"],
}


@pytest.mark.parametrize("name", SMALL)
def test_the_examples_equal_one_process(name: str) -> None:
    printed = on_ranks(ROOT / "examples" / name, "--steps", "3", "--batch", "8", "--solver", "ddp", *SMALL[name])
    last = printed.splitlines()[-1]
    number = r"(\d\.\de[-+]\d+)"
    wanted = rf"loss {number}, gradients of the first step {number}, parameters and buffers after the last {number};"
    found = re.search(wanted, last)
    assert found is not None, last
    assert float(found[1]) < 1e-5 and float(found[2]) < 1e-4 and float(found[3]) < 1e-4


def test_a_loop_of_ones_own_equals_the_same_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script, small = ROOT / "examples/own_loop.py", ["--sentences", "32", "--epochs", "2", "--solver", "fsdp"]
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [str(script), *small])
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    torch.set_num_threads(threads)
    texts = printed.getvalue(), on_ranks(script, *small)
    alone, parallel = (re.findall(r"validation loss (\S+),", text) for text in texts)
    assert len(alone) == 2 and parallel == alone
    assert "saved, made anew, and loaded" in printed.getvalue()


def test_an_elastic_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    script, curves = ROOT / "examples/elastic.py", []
    for folder, starts in (("alone", ((1, 6),)), ("many", ((2, 4), (3, 6)))):
        printed = [run(n, as_main, script, elastic(tmp_path / folder, steps))[0] for n, steps in starts]
        curves.append(re.findall(r"step (\d): loss (\d\.\d{7})", "".join(printed)))
    assert [int(step) for step, _ in curves[0]] == [*range(6)] and curves[1] == curves[0]
    assert "3 ranks" in printed[-1]


def elastic(folder: Path, steps: int) -> list[str]:
    return ["--folder", str(folder), "--steps", str(steps), "--every", "2", "--dtype", "float64", "--solver", "ddp"]


def test_planning_for_1024_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_1024.py", "--layers", "2", "--solver", "fsdp"])
    runpy.run_path(str(ROOT / "examples/plan_1024.py"), run_name="__main__")
    printed = capsys.readouterr().out
    row = r"^dp=\d+.* step 0\.\d\d s, [\d,]+ tokens/s a device, MFU \d\d\.\d%"
    assert len(re.findall(row, printed, flags=re.MULTILINE)) == 2
    assert "lm_head.weight: parameter" in printed and "self_attn: module" in printed


def test_starting_as_in_the_docs(tmp_path: Path) -> None:
    """By torchrun, which no other test waits for."""
    script = tmp_path / "train.py"
    shorter = block("docs/launch.md", "init_device_mesh(kind").replace("(10, 16, 64)", "(3, 8, 16)")
    script.write_text(shorter.replace("num_hidden_layers=2", "num_hidden_layers=1"))
    assert len(re.findall(r"^loss \d\.\d{4}, norm \d", torchrun(script), flags=re.MULTILINE)) == 3


def test_the_training_example_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["examples/train_llama.py"])
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples/train_llama.py"), run_name="__main__")
    assert "torchrun --standalone --nproc-per-node 4 examples/train_llama.py" in str(ended.value.code)


def test_the_walkthrough_ends_with_equal_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/walkthrough.py"), run_name="__main__")
    found = re.search(r"loss (\S+), eager (\S+); gradients differ by (\S+)", capsys.readouterr().out)
    assert found is not None
    assert found[1] == found[2] and float(found[3]) < 1e-5
