"""What the suite says at its end beside pytest's own: how much the oracle tried. Its processes take a thread each, and
look for garbage in cycles once a file: tests make many objects and few cycles, and it was a quarter of their time."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar.api  # noqa: F401 - which registers the costs that measure, before any scope begins
from autopar.extensions import scoped
from autopar.ops.oracle import Report, RuleError
from autopar.ops.registry import REGISTERED
from autopar.ops.rules import RULES


class Tally(logging.Handler):
    """Counts what the oracle's log reports, op by op, and the tests that end with a wrong rule. Workers of xdist
    send what they counted to the one that prints."""

    def __init__(self) -> None:
        super().__init__()
        self.instances: Counter[str] = Counter()
        self.bad = 0

    def emit(self, record: logging.LogRecord) -> None:
        of_one = isinstance(record.args, tuple) and isinstance(record.args[0], Report)
        if of_one and ((report := record.args[0]).op in RULES.rows or report.op in REGISTERED.own):
            self.instances[report.op] += report.instances

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        made: Any = yield
        self.bad += made.failed and call.excinfo is not None and isinstance(call.excinfo.value, RuleError)
        return made

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["oracle"] = (dict(self.instances), self.bad)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        instances, bad = getattr(node, "workeroutput", {}).get("oracle", ({}, 0))
        self.instances.update(instances)
        self.bad += bad

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.instances or self.bad:
            total = sum(self.instances.values())
            terminalreporter.write_line(f"oracle: {len(self.instances)} rules, {total} instances, {self.bad} bad")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """What a file's tests register ends with them, and so does their garbage: which file a process runs next is
    chance. What is left then belongs to modules, and nothing looks at it again."""
    with scoped():
        yield
    gc.collect()
    gc.freeze()


DURATIONS = Path(__file__).parent / "durations.json"
"""File -> seconds that its tests take, by which files begin: the longest first, so that no process is left with a long
one at the end. `tests/all.sh --record-durations` writes it anew."""


class Durations:
    """Adds up what the tests of each file take. Of several processes, the one that prints sees the tests of all."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[Path(report.location[0]).name] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            rounded = {name: max(1, round(seconds)) for name, seconds in sorted(self.seconds.items())}
            DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name} anew, from a whole run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds: dict[str, int] = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.path.name, sys.maxsize))  # what is new may be long


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    gc.disable()
    tally = Tally()
    logger = logging.getLogger("autopar.ops.oracle")
    logger.addHandler(tally)
    logger.setLevel(logging.DEBUG)
    config.pluginmanager.register(tally, "oracle")
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Durations(), "durations")
