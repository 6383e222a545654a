"""Whatever is printed fits the width that it is printed for, and says all of it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from tower import given

import autopar
from autopar.report.comparison import Comparison
from autopar.report.rendering import rendered
from autopar.report.sections import Grid, Section
from autopar.report.simulation import Simulation
from autopar.testing import Check, check

MESH = {"dp": 2, "tp": 2}
WIDTHS = pytest.mark.parametrize("width", [80, 120])


def arguments() -> dict[str, Any]:
    return given("tower")


@cache
def comparison() -> Comparison:
    of = arguments()
    solvers = ["atp", "ddp", "fsdp", "megatron_sp", "meshslice"]  # of which one has a plan, and on one mesh
    return autopar.compare(
        of.pop("model"), [MESH, {"dp": 4}], cluster="dgx-h100", memory_limit_bytes=61_100, solvers=solvers, **of
    )


@cache
def simulation() -> Simulation:
    of = arguments()
    return autopar.simulate(of.pop("model"), MESH, cluster="dgx-h100", solver="megatron", **of)


@cache
def checked() -> Check:
    of = arguments()
    model = of.pop("model").to_empty(device="cpu")
    return check(model, MESH, of["args"], loss_fn=of["loss_fn"], plans=1, steps=2)


def fits(text: str, width: int) -> bool:
    return max(map(len, text.splitlines())) <= width


@WIDTHS
def test_a_comparison_fits(width: int) -> None:
    text = comparison().text(width)
    assert fits(text, width) and fits(comparison().text(width, full=True), width)
    words = " ".join(text.split())
    assert all(head in words for head in ("step", "peak memory", "exposed", "sent", "above floor"))
    assert all(name in words for name in comparison().results)
    assert any(isinstance(result, str) for result in comparison().results.values()) and "no plan:" in words


@WIDTHS
def test_a_simulation_fits(width: int) -> None:
    text = simulation().text(width)
    assert fits(text, width) and "exposed" in text and str(simulation()) == simulation().text(80)


@WIDTHS
def test_a_check_fits(width: int) -> None:
    assert fits(checked().text(width), width) and "loss" in checked().text(width)


@cache
def planned(name: str) -> autopar.Plan:
    of = given(name)
    return autopar.plan(of.pop("model"), MESH, cluster="dgx-h100", solver="megatron", **of)


@WIDTHS
@pytest.mark.parametrize("name", ["tower", "gpt2"])
def test_all_that_a_plan_says_fits(name: str, width: int) -> None:
    plan = planned(name)
    text = plan.text(full=True, width=width)
    assert fits(text, width)
    words = re.sub(r"\s+", "", text)
    patterns = {
        ".".join("*" if part.isdigit() else part for part in parameter.split(".")) for parameter in plan.parameters
    }
    assert all(pattern in words or pattern.replace("*", "0") in words for pattern in patterns)


def test_a_table_that_is_too_wide_is_several() -> None:
    rows = [("first", "1" * 30, "2" * 30, "3" * 30), ("second", "4", "5", "6")]
    heads = ("name", "one", "two", "three")
    assert rendered([Section("", [Grid(heads, rows)])], 200).count("name") == 1
    text = rendered([Section("", [Grid(heads, rows)])], 80)
    assert text.count("name") == 2 and fits(text, 80)
    assert text.count("first") == 2 and all(digit * 30 in text for digit in "123")


def test_figures_are_not_broken() -> None:
    grid = Grid(("what", "bytes"), [("a rather long name of something", "12.3 GiB")], keys=0, right=(1,))
    text = rendered([Section("", [grid])], 30)
    assert "12.3 GiB" in text and fits(text, 30)
