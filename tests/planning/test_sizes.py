"""`autopar fit`: each trial is the plan of its mesh and strategy, sizes that cannot be do not stop the others, and what
is done is kept."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tower import Tower, given
from typer.testing import CliRunner

import autopar
from autopar import extensions
from autopar.cli import app
from autopar.planning.planner import Planner
from autopar.report import kept, question
from autopar.report.fit import Fit, hand_mesh
from autopar.report.kept import Kept, key_of
from autopar.report.question import Question, Variant

STRATEGIES = ("ddp", "fsdp", "megatron")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others register keeps answers from being kept."""
    for table in extensions.TABLES:
        monkeypatch.setattr(table, "added", {})


def fitted(**changes: Any) -> Fit:
    arguments = {
        "devices": [4, 8],
        "strategies": ["dp", *STRATEGIES],
        **given("tower"),
        "cluster": "dgx-a100",
        **changes,
    }
    return autopar.fit(arguments.pop("model"), arguments.pop("devices"), **arguments)


def test_a_trial_is_the_plan_of_its_mesh_and_strategy() -> None:
    result = fitted(devices=[4])
    assert {trial.strategy for trial in result.trials} == {"dp", *STRATEGIES}
    for trial in result.trials:
        plan = autopar.plan(
            given("tower")["model"], trial.mesh, **{k: v for k, v in given("tower").items() if k != "model"},
            cluster="dgx-a100", solver=trial.strategy,
        )  # fmt: skip
        assert (trial.seconds, trial.bytes) == (plan.seconds, plan.bytes)
        assert trial.utilization == plan.utilization
        assert trial.items_per_second == pytest.approx(64 / plan.seconds)
    best = result.best(4)
    assert best is not None and best.seconds == min(trial.seconds for trial in result.trials)


def test_the_search_gets_the_meshes_that_promise_most_and_presets_the_one_of_the_machines() -> None:
    result = fitted(devices=[64], strategies=["dp", "fsdp"])
    by_hand = {"dp": 8, "tp": 8}
    assert {tuple(t.mesh.items()) for t in result.trials if t.strategy != "dp"} == {tuple(by_hand.items())}
    searched = [t for t in result.trials if t.strategy == "dp"]
    assert len(searched) == 4 and by_hand in [dict(t.mesh) for t in searched]
    assert hand_mesh(autopar.CLUSTERS["dgx-a100"], 4) == {"a": 4}
    assert hand_mesh(autopar.CLUSTERS["dgx-a100"], 12) == {"a": 12}
    assert hand_mesh(autopar.CLUSTERS["dgx-a100"], 1024) == {"dp": 128, "tp": 8}


def test_what_cannot_be_does_not_stop_the_others() -> None:
    devices = autopar.CLUSTERS["dgx-a100"].devices
    free = {trial.strategy: trial.bytes for trial in fitted(devices=[4], strategies=["ddp", "fsdp"]).trials}
    limit = (free["ddp"] + free["fsdp"]) / 2
    result = fitted(devices=[4, 2 * devices], strategies=["ddp", "fsdp"], memory_limit_bytes=limit)
    ddp, fsdp = (next(t for t in result.of(4) if t.strategy == name) for name in ("ddp", "fsdp"))
    assert fsdp.fits and not ddp.fits and ddp.needed_bytes is not None and ddp.needed_bytes > limit
    (none,) = result.of(2 * devices)
    assert not none.fits and f"has {devices:,} devices" in none.reason
    assert result.best(2 * devices) is None
    text = result.text()
    assert "4 devices: 1 of 2 fit" in text and f"{2 * devices:,} devices: NO" in text
    assert "NO  ddp on a=4: needs" in text


def test_an_interrupted_fit_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped at its fifth answer; the next call computes the others alone."""
    computed: list[str] = []

    def stopping(part: float, what: str) -> None:
        computed.append(what)
        if len(computed) == 6:
            raise KeyboardInterrupt

    file = tmp_path / "done.sqlite"
    with pytest.raises(KeyboardInterrupt):
        fitted(keep=file, report=stopping)
    rest: list[str] = []
    again = fitted(keep=file, report=lambda part, what: rest.append(what))
    assert again.kept == 4  # reading the model was no answer, and the fifth did not come to its end
    whole = fitted()
    assert again.to_json() == whole.to_json() and whole.kept == 0
    last: list[str] = []
    assert fitted(keep=file, report=lambda part, what: last.append(what)).to_json() == whole.to_json()
    assert last == ["reading the model", ""]
    one = {"devices": [4], "strategies": ["ddp"], "keep": file}
    assert fitted(**one).kept == 1 and fitted(**one, memory_limit_bytes=1e9).kept == 0
    monkeypatch.setattr(question, "code_digest", lambda: "other code")
    assert fitted(**one).kept == 0


def test_the_digest_of_the_code_is_that_of_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has the package beside environments and builds of thousands of files."""
    read: list[Path] = []
    whole = Path.read_bytes

    def noted(file: Path) -> bytes:
        read.append(file)
        return whole(file)

    monkeypatch.setattr(Path, "read_bytes", noted)
    kept.code_digest.cache_clear()
    kept.code_digest()
    root = Path(autopar.__file__).parent.parent
    assert {file.relative_to(root).parts[0] for file in read} == {"autopar", "passes", "runtime"}


def test_what_is_kept_depends_on_the_model_the_batch_and_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "done.sqlite"
    first = {"devices": [4], "strategies": ["ddp"], "keep": file}
    fitted(**first)
    assert fitted(**first).kept == 1
    assert fitted(**first, cluster="dgx-h100").kept == 0
    assert fitted(**first, optimizer="sgd").kept == 0
    two = fitted(**first, micro_batches=2)  # a step of twice as many rows
    assert two.kept == 0 and two.trials[0].work[0] == 2 * fitted(**first).trials[0].work[0]
    for _ in range(2):  # what ends by the clock may be another answer the next time
        assert fitted(**first, effort=60.0).kept == 0
    assert fitted(**first, args=(torch.randn(32, 32),)).kept == 0
    model = Tower()
    model.head = torch.nn.Linear(32, 65, bias=False)
    assert fitted(**first, model=model).kept == 0


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("mine, and not yours at all" * 50)
    with pytest.raises(ValueError, match="is no file of answers, and was left as it is"):
        Kept(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("create table mine (a)")
    with pytest.raises(ValueError, match="is no file of answers, and was left as it is"):
        Kept(other)
    with pytest.raises(ValueError, match="is a folder; give a file of answers"):
        Kept(tmp_path)
    kept = Kept(tmp_path / "new" / "done.sqlite")
    kept.put(key_of("a", 1), {"is": 0.5})
    assert Kept(tmp_path / "new" / "done.sqlite").get(key_of("a", 1)) == {"is": 0.5}
    assert kept.get(key_of("a", 2)) is None


def test_the_time_that_is_left_is_that_of_what_was_computed() -> None:
    told: list[tuple[float, str]] = []
    planner = Planner(mesh_shape={"a": 4}, cluster="dgx-a100", **given("tower"))
    asked = Question(planner, total=10.0, report=lambda part, what: told.append((part, what)))
    asked.answer(Variant(name="one", mesh={"a": 4}, request=replace(planner.asked, solver="ddp"), weight=2.0))
    asked.done, asked.computed, asked.seconds = 4.0, 2.0, 100.0  # the other 2 were kept
    asked.answer(Variant(name="two", mesh={"a": 2, "b": 2}, request=replace(planner.asked, solver="ddp"), weight=2.0))
    assert told == [(0.0, "one"), (0.4, "two, about 5 min left")]


def test_a_fit_that_a_signal_ends_prints_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` ends it, in its third trial."""
    planned, plans = Planner.planned, list[str]()

    def slow(self: Planner, request: Any) -> Any:
        plans.append(request.solver)
        if len(plans) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return planned(self, request)

    monkeypatch.setattr(Planner, "planned", slow)
    command = ["fit", "tower:build", "--devices", "4", "--cluster", "dgx-a100", "--keep", str(tmp_path / "done")]
    command += [word for strategy in STRATEGIES for word in ("--strategy", strategy)]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 128 + signal.SIGTERM and plans == list(STRATEGIES)
    assert "4 devices: 2 of 2 fit" in ended.stdout and "megatron" not in ended.stdout
    assert "4 devices, so far: " in ended.stderr and "ended early" in ended.stderr
    whole = CliRunner().invoke(app, command)
    assert "2 answers were known" in whole.stderr and "4 devices: 3 of 3 fit" in whole.stdout


def test_a_comparison_that_a_signal_ends_prints_what_it_has_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, plans = Planner.planned, list[str]()

    def slow(self: Planner, request: Any) -> Any:
        plans.append(request.solver)
        if len(plans) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return planned(self, request)

    monkeypatch.setattr(Planner, "planned", slow)
    command = ["compare", "tower:build", "--mesh", "a=4", "--cluster", "dgx-a100", "--json"]
    command += [word for strategy in STRATEGIES for word in ("--solver", strategy)]
    ended = CliRunner().invoke(app, [*command, "--keep", str(tmp_path / "done")])
    assert ended.exit_code == 128 + signal.SIGINT and "ended early" in ended.stderr
    first = json.loads(ended.stdout)["rows"]
    assert [row["plan"] for row in first] == ["ddp"]
    whole = CliRunner().invoke(app, [*command, "--keep", str(tmp_path / "done")])
    assert plans == ["ddp", "fsdp", "fsdp", "megatron"]
    assert first[0] in json.loads(whole.stdout)["rows"] and len(json.loads(whole.stdout)["rows"]) == 3


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_width(width: int) -> None:
    result = fitted(strategies=["ddp", "fsdp"], memory_limit_bytes=70_000)
    assert "NO" in result.text(width) and result.best(8) is not None
    assert max(map(len, result.text(width).splitlines())) <= width


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": []}, "devices is"),
        ({"devices": [0]}, "devices is"),
        ({"devices": "64"}, "devices is"),
        ({"strategies": ["megatorn"]}, "did you mean 'megatron'"),
        ({"strategies": []}, "strategies is empty"),
        ({"axes": 0}, "axes is 0"),
    ],
)
def test_bad_input_says_what_to_give(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(**changes)


def test_the_command_prints_what_the_library_finds(tmp_path: Path) -> None:
    command = ["fit", "tower:build", "--devices", "4,8", "--cluster", "dgx-a100", "--strategy", "fsdp"]
    command += ["--keep", str(tmp_path / "done.sqlite")]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(t["devices"], t["strategy"], t["fits"]) for t in told["trials"]] == [(4, "fsdp", True), (8, "fsdp", True)]
    again = CliRunner().invoke(app, command)
    assert "2 answers were known from before" in again.stderr
    assert "the fastest on each number of devices" in again.stdout
    failed = CliRunner().invoke(app, ["fit", "tower:build", "--devices", "four"])
    assert failed.exit_code == 2 and "give integers with commas" in failed.output
