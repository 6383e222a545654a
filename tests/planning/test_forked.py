"""What a second process computes is what this one would have, and it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import ranks
from models import case, planners

from autopar.planning import forked as module
from autopar.planning.forked import forked
from autopar.solve.effort import Effort

pytestmark = pytest.mark.skipif(not module._can_fork(), reason="one core: nothing is computed beside")


def children() -> list[str]:
    me = os.getpid()
    return Path(f"/proc/{me}/task/{me}/children").read_text().split()


def test_another_process_answers() -> None:
    before = children()
    with forked(lambda: (os.getpid(), {"a": [1, 2]})) as answer:
        process, found = answer()
        assert process != os.getpid() and found == {"a": [1, 2]}
        assert answer() == (process, found)
    assert children() == before


def test_what_is_not_worth_it_is_computed_here_when_asked() -> None:
    asked = []
    with forked(lambda: asked.append(1) or os.getpid(), worthwhile=False) as answer:
        assert not asked
        assert answer() == answer() == os.getpid() and asked == [1]


def test_an_error_is_raised_where_the_answer_is_asked_for() -> None:
    def fails() -> None:
        raise ValueError("no plan fits in 3 bytes")

    with forked(fails) as answer, pytest.raises(ValueError, match="no plan fits in 3 bytes"):
        answer()


def test_what_it_logs_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    with forked(lambda: logging.getLogger("autopar").info("a descent of %d ms", 3)) as answer:
        assert not caplog.messages
        answer()
    assert caplog.messages == ["a descent of 3 ms"]


def test_a_process_that_dies_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def dies(parent: int = os.getpid()) -> int:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    with forked(dies) as answer:
        assert answer() == 7
    assert "gave no answer" in caplog.text


def test_so_is_one_that_stands_still(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)

    def hangs(parent: int = os.getpid()) -> int:
        if os.getpid() != parent:
            time.sleep(600)
        return 7

    before = children()
    with forked(hangs) as answer:
        assert answer() == 7
    assert "gave no answer" in caplog.text and children() == before


def test_one_that_nobody_asks_is_ended() -> None:
    before = children()
    with pytest.raises(KeyError), forked(lambda: time.sleep(600)):
        assert children() != before
        raise KeyError
    assert children() == before


def waits_beside() -> None:
    with forked(lambda: time.sleep(600)):
        print(*children(), flush=True)
        print("started", flush=True)
        time.sleep(600)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent = ranks.start(tmp_path, waits_beside)
    child = int(parent.lines_until("started")[0])
    parent.send_signal(signal.SIGKILL)
    assert parent.status() == -signal.SIGKILL
    for _ in range(100):
        if not Path(f"/proc/{child}/stat").exists() or ") Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail(f"process {child} outlived its parent")


@pytest.mark.parametrize(("name", "part"), [("gpt2", None), ("mlp with loss_fn", 0.8)])
def test_plans_are_the_same_whoever_finds_them(name: str, part: float | None) -> None:
    """Free, and under a limit of a part of that."""
    planner = planners(case)(name, {"a": 2, "b": 2})
    limit = None if part is None else part * planner.plan().bytes
    plans = {}
    for options in (10**9, 0):
        made = planner.on(planner.mesh, planner.cluster, Effort(apart_options=options))
        plans[options] = dataclasses.replace(made.plan(memory_limit_bytes=limit), solve_seconds=0.0)
    assert plans[0] == plans[10**9]
