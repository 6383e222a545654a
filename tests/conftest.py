"""What the suite says at its end beside pytest's own: how much the oracle tried. Its processes take a thread each, and
look for garbage in cycles rarely: tests make many objects and few cycles, and it was a sixth of their time."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar.ops.oracle import Report, RuleError
from autopar.ops.rules import RULES


class Tally(logging.Handler):
    """Counts what the oracle's log reports, op by op, and the tests that end with a wrong rule. Workers of xdist
    send what they counted to the one that prints."""

    def __init__(self) -> None:
        super().__init__()
        self.instances: Counter[str] = Counter()
        self.bad = 0

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and isinstance(report := record.args[0], Report) and report.op in RULES.rows:
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


LONGEST = (
    *("models", "examples", "calibration", "stamp", "parity", "promises", "generated", "masks", "checkpoints", "lab"),
    *("failures", "integrations", "random", "experts", "golden", "ops", "modes", "convolution", "trackers", "ways"),
    *("recompute", "side_by_side", "state", "docs", "devices", "runtime", "attention", "accumulation", "progress"),
    *("segments", "structures", "beside", "bad_input", "precision", "extending", "pinned", "capture", "timeline"),
    *("papers_program", "profiling", "strides", "overlap", "memory", "bucket", "solve", "widths"),
)
"""What the files are of that begin first, the longest before all: the last ones are short, and no worker is left with a
long one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{subject}.py": place for place, subject in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 100)
    tally = Tally()
    logger = logging.getLogger("autopar.ops.oracle")
    logger.addHandler(tally)
    logger.setLevel(logging.DEBUG)
    config.pluginmanager.register(tally, "oracle")
