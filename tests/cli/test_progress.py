"""What is said while something takes long: no command is silent, and the part of a search that is told is known."""

from __future__ import annotations

import json
import logging
import math
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_widths import fits
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import COMMANDS, app
from autopar.planning.plan import Plan
from autopar.planning.progress import SEARCHING, WHOLE, Stage
from autopar.planning.request import Request
from autopar.planning.texts import short_bytes
from autopar.report import telling

MESH = {"a": 2, "b": 2}

SLOW_SECONDS, SILENT_SECONDS = 3.5, 3.0
"""How long the slow model takes, and the longest silence on a busy machine; on an idle one it is 2 s."""


class Net(nn.Module):
    """A model that asks for somebody to say that it is read."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.asks or is_told()
        return self.layers(x).square().mean()


def is_told() -> bool:
    return any(thread.name == telling.THREAD for thread in threading.enumerate())


def build(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    assert is_told()
    return Net(asks=True), (torch.zeros(batch, 32),)


def slow(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    time.sleep(SLOW_SECONDS)
    return Net(asks=False), (torch.zeros(batch, 32),)


def planned(**given: Any) -> autopar.Plan:
    return autopar.plan(Net(asks=False), MESH, (torch.zeros(8, 32),), cluster="dgx-a100", **given)


@contextmanager
def unsaid() -> Iterator[list[str]]:
    """What the planner logs while nobody says that something is done."""
    found = list[str]()
    logger, handler = logging.getLogger("autopar"), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        if not is_told():
            found.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- no command is silent


MODEL = ("test_progress:build", "--mesh", "a=2,b=2", "--batch", "8")

WORKING = {
    "plan": MODEL,
    "compare": (*MODEL, "--solver", "ddp", "--solver", "fsdp"),
    "simulate": MODEL,
    "check": MODEL,
    "fit": ("test_progress:build", "--devices", "4", "--cluster", "dgx-a100", "--batch", "8", "--keep", "kept.json"),
    "profile": (*MODEL, "--profiles", "profiles.db"),
    "show": ("edited.json",),
    "report": ("plan.json", "-o", "plan.html"),
    "lower": ("plan.json", "--out", "program.txt"),
    "explain": ("plan.json", "layers.0.weight", "--replan", "1"),
    "diff": ("plan.json", "edited.json"),
    "what-if": ("plan.json", "--batch", "16"),
    "export": ("plan.json", "--to", "fsdp2", "--out", "split.py"),
    "import": ("foreign.json", *MODEL),
}
"""Commands that plan, or look into a plan with its model."""

OTHERS = {"lab", "calibrate", "clusters", "profiles"}
"""Commands without a model: what they do is quick, or ranks that they start do it."""


def test_every_command_is_here() -> None:
    assert {*WORKING} | OTHERS == {*COMMANDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, and an edited one."""
    there = tmp_path_factory.mktemp("plans")
    done = CliRunner().invoke(app, ["plan", *MODEL, "--solver", "ddp", "--out", str(there / "plan.json")])
    assert done.exit_code == 0, done.output
    data = json.loads((there / "plan.json").read_text())
    data["bucket_bytes"] //= 8
    (there / "edited.json").write_text(json.dumps(data))
    (there / "foreign.json").write_text(json.dumps({"layers.*": "free_full_weight"}))
    return there


@pytest.mark.parametrize("command", WORKING)
def test_no_command_works_in_silence(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with unsaid() as silent:
        done = CliRunner().invoke(app, [command, *WORKING[command]], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert not silent
    assert fits(done.output, 80)


@pytest.mark.parametrize("command", WORKING)
def test_quiet_commands_print_their_results_alone(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(telling, "NEXT_SECONDS", 0.01)
    done = CliRunner().invoke(app, [command, *WORKING[command], "--quiet"])
    assert done.exit_code == 0 and done.stderr == ""
    assert done.stdout or command in ("report", "lower", "export")
    failed = CliRunner().invoke(app, ["show", "no-such-plan.json", "-q"])
    assert failed.exit_code == 2 and "error: no-such-plan.json" in failed.stderr


def test_the_next_command_is_as_loud_as_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for options, lines in ((["-q"], 0), ([], 1)):
        done = CliRunner().invoke(app, ["report", "plan.json", "-o", "plan.html", *options])
        assert done.stderr.count("wrote plan.html") == lines


@pytest.mark.parametrize("arguments", [("clusters",), ("clusters", "perlmutter")])
@pytest.mark.parametrize("width", [80, 120])
def test_what_other_commands_print_fits(
    arguments: tuple[str, ...], width: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    shown = CliRunner().invoke(app, [*arguments], env={"COLUMNS": str(width)})
    assert shown.exit_code == 0 and fits(shown.output, width)


@pytest.mark.parametrize("command", ["compare", "simulate", "explain", "what-if", "fit"])
def test_what_commands_print_fits_a_wide_terminal(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, [command, *WORKING[command]], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert fits(done.output, 120)


@pytest.mark.parametrize("in_terminal", [False, True])
def test_a_person_never_waits_for_a_word(in_terminal: bool) -> None:
    """In a pipe and in a terminal, to the last byte and to the end of the process."""
    reading, writing = pty.openpty() if in_terminal else os.pipe()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "autopar", "plan", "test_progress:slow", "--mesh", "a=2", "--solver", "ddp"]
    with subprocess.Popen(command, stdout=writing, stderr=writing, env=env) as process:
        os.close(writing)
        longest, text = _longest_silence(reading)
        began = time.monotonic()
        assert process.wait(timeout=60) == 0
    os.close(reading)
    assert max(longest, time.monotonic() - began) < SILENT_SECONDS
    assert "reading the model" in text and "where the step goes" in text


def _longest_silence(source: int) -> tuple[float, str]:
    """The longest time without output until its end, and the output."""
    longest, text, last = 0.0, b"", time.monotonic()
    while True:
        there, _, _ = select.select([source], [], [], 60)
        try:
            got = os.read(source, 1 << 16) if there else b""
        except OSError:  # what the end of a terminal looks like
            got = b""
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        if not got:
            return longest, text.decode()
        text += got


def test_a_pipe_is_told_what_is_done_every_two_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert telling.FIRST_SECONDS + telling.NEXT_SECONDS < 2 and telling.EVERY_SECONDS + telling.NEXT_SECONDS < 2
    monkeypatch.setattr(telling, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.05)
    with telling.Ticker("reading the model") as ticker:
        time.sleep(0.08)
        ticker.tell("searching")
        time.sleep(0.1)
        ticker.tell("searching", 0.4)
        ticker.tell("searching", 0.2)
        time.sleep(0.1)
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert lines[0] == "reading the model, 0 s" and lines[-1] == "searching: 40%, 0 s"
    assert "searching, 0 s" in lines


def test_lines_in_a_pipe_come_ever_more_slowly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 7 minutes is some 35 lines, not 230: here it is 200 times as fast."""
    for name in ("FIRST_SECONDS", "EVERY_SECONDS", "PATIENT_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(telling, name, getattr(telling, name) / 200)
    with telling.Ticker("searching"):
        time.sleep(420 / 200)
    assert 10 <= len(capsys.readouterr().err.splitlines()) <= 40


def test_the_innermost_speaks_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_SECONDS", "NEXT_SECONDS", "EVERY_SECONDS"):
        monkeypatch.setattr(telling, name, 0.02)
    with telling.Ticker("reading the model", follows=True):
        with telling.Ticker("loading PyTorch"):
            time.sleep(0.1)
        inner = capsys.readouterr().err
        time.sleep(0.1)
    assert {line.split(",")[0] for line in inner.splitlines()} == {"loading PyTorch"}
    assert {line.split(",")[0] for line in capsys.readouterr().err.splitlines()} == {"reading the model"}


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with telling.Ticker("reading the model"):
        pass
    assert capsys.readouterr().err == ""


# --- how far a search is


@contextmanager
def told() -> Iterator[list[tuple[str, float]]]:
    found: list[tuple[str, float]] = []
    with telling.following(lambda what, part: found.append((what, part))):
        yield found


def test_a_part_lies_in_its_part() -> None:
    part = WHOLE.part(0.5, 1.0).part(0.5, 1.0)
    assert (part.begin, part.end) == (0.75, 1.0)
    assert [(one.begin, one.end) for one in WHOLE.part(0.0, 0.5).parts(2)] == [(0.0, 0.25), (0.25, 0.5)]
    ends = [WHOLE.exploring, WHOLE.limiting, WHOLE.comparing, WHOLE.writing]
    assert [one.end for one in ends[:-1]] == [one.begin for one in ends[1:]]
    assert (ends[0].begin, ends[-1].end) == (0.0, 1.0)


def test_a_search_says_how_far_it_is() -> None:
    with told() as found:
        plan = planned()
    parts = [part for what, part in found if what == SEARCHING]
    assert len(parts) == len(found) and all(0 <= part <= 1 for part in parts)
    assert parts[-1] == max(parts) == WHOLE.writing.begin
    assert any(0 < part < WHOLE.exploring.end for part in parts)
    with told() as found:
        limited = planned(memory_limit_bytes=0.9 * plan.bytes)
    assert limited.bytes <= 0.9 * plan.bytes
    assert {what for what, _ in found} == {f"{SEARCHING} within {short_bytes(0.9 * plan.bytes)} a rank"}
    assert any(WHOLE.limiting.begin < part < WHOLE.limiting.end for _, part in found)


def test_several_searches_are_parts_of_one() -> None:
    """Of meshes, of ways to gather, and of solvers that are compared."""
    model, args = Net(asks=False), (torch.zeros(8, 32),)
    with told() as found:
        autopar.plan(model, 4, args, cluster="dgx-a100")
    assert len({round(part, 3) for _, part in found}) > 10 and found[-1][1] > 0.8
    with told() as found:
        autopar.compare(model, MESH, args, cluster="dgx-a100", solvers=["auto", "ddp"])
    assert [what for what, _ in found] == sorted(what for what, _ in found)  # auto, then ddp
    assert all(part <= 0.5 for what, part in found if what == "auto")
    with told() as found:
        planned(micro_batches=2, solver="dp")
    assert min(part for _, part in found) < 0.4 and max(part for _, part in found) > 0.6


def test_nothing_is_told_to_a_log_that_did_not_ask(caplog: pytest.LogCaptureFixture) -> None:
    """Not while a person is told either."""
    with caplog.at_level(logging.INFO, "autopar"), told() as found:
        planned()
    assert found
    assert caplog.records and not [record for record in caplog.records if record.name == telling.PROGRESS]


# --- the best so far, how long the rest takes, and interrupts


def test_the_best_so_far_and_the_rest_are_told() -> None:
    ticker = telling.Ticker("searching", foresees=True)
    with telling.following(ticker.tell, ticker.found):
        stage = Stage(mesh={"a": 2, "b": 4})
        stage.found(0.010, is_serial=True)
        stage.tell(0.05)
        ticker.began -= 10.0
        assert ticker.line == "searching: 5%, 10 s, best so far 10.0 ms on a=2,b=4, if nothing overlapped"
        stage.found(0.013)
        stage.found(math.inf)
        stage.found(0.015)
        stage.tell(0.25)
        assert ticker.line == "searching: 25%, 10 s, about 30 s left, best so far 13.0 ms on a=2,b=4"
        ticker.began -= 90.0
        assert ticker.line == "searching: 25%, 100 s, about 5 min left, best so far 13.0 ms on a=2,b=4"
        stage.within(2**30).tell(0.6)
        assert ticker.line == "searching within 1.00 GiB a rank: 60%, 0 s"


class Interrupting(logging.Handler):
    """Interrupts this process at the first record of so much progress, so many times."""

    def __init__(self, least: float, times: int = 1) -> None:
        super().__init__()
        self.least, self.times = least, times

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "done", 0.0) >= self.least:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
            self.times = 0


@contextmanager
def interrupted(least: float, times: int = 1) -> Iterator[None]:
    logger, handler = logging.getLogger(telling.PROGRESS), Interrupting(least, times)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
def as_python_starts() -> Iterator[None]:
    """Interrupts raise KeyboardInterrupt; processes of xdist ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_python_starts")
@pytest.mark.parametrize("mesh", [MESH, 4])
def test_an_interrupt_ends_a_search_with_the_best_that_it_has(
    mesh: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupted(0.01):
        plan = autopar.plan(Net(asks=False), mesh, (torch.zeros(8, 32),), cluster="dgx-a100")
    assert signal.getsignal(signal.SIGINT) is before
    origin = plan.provenance
    assert origin is not None and origin.is_cut and origin.effort_seconds is None
    assert "an interrupt ended it" in " ".join(str(plan).split())
    assert "the search ends with the best that it has; interrupt again to stop now" in caplog.text
    plan.save(path := tmp_path / "plan.json")
    assert Plan.load(path).provenance == origin
    again = plan.planner.planned(Request())  # what is asked of it later is searched to its end
    assert again.provenance is not None and not again.provenance.is_cut


@pytest.mark.usefixtures("as_python_starts")
def test_a_second_interrupt_stops_a_search() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupted(0.01, times=2), pytest.raises(KeyboardInterrupt):
        planned()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("as_python_starts")
def test_whoever_handles_interrupts_keeps_them() -> None:
    """A trainer that saves at an interrupt, say; and in other threads Python allows no handler."""
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: got.append(number))
    try:
        with interrupted(0.01):
            plan = planned()
    finally:
        signal.signal(signal.SIGINT, before)
    assert got == [signal.SIGINT] and plan.provenance is not None and not plan.provenance.is_cut
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(planned).result().seconds == plan.seconds
