"""What changes from one plan to another, and what gives where something else is asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tower import autopar_, planned

import autopar
from autopar.planning.plan import Plan
from autopar.report.difference import Difference, difference
from autopar.report.facts import count_text


@cache
def plan(solver: str = "dp", **options: Any) -> Plan:
    return planned("tower", solver=solver, **options)


@cache
def between(before: str, after: str) -> Difference:
    return difference(plan(before), plan(after))


def test_the_same_plan_differs_in_nothing() -> None:
    same = difference(plan("ddp"), plan("ddp"))
    assert not any((same.asked, same.figures, same.collectives, same.moved)) and same.operators == 0
    assert str(same) == "the plans are the same" or "nothing: the plan stays as it is" in str(same)


def test_figures_are_the_plans() -> None:
    before, after = plan("ddp"), plan("fsdp")
    figures = {change.what: change for change in between("ddp", "fsdp").figures}
    assert (figures["step"].before, figures["step"].after) == (before.seconds, after.seconds)
    assert (figures["peak of a rank"].before, figures["peak of a rank"].after) == (before.bytes, after.bytes)
    asked = {change.what: (change.before, change.after) for change in between("ddp", "fsdp").asked}
    assert asked == {"solver": ("ddp", "fsdp")}


def test_json_has_figures_with_their_units() -> None:
    before, after = plan("ddp"), plan("fsdp")
    told = json.loads(json.dumps(between("ddp", "fsdp").to_json()))
    assert (told["before"]["step_seconds"], told["after"]["step_seconds"]) == (before.seconds, after.seconds)
    assert (told["before"]["solver"], told["after"]["peak_memory_bytes"]) == ("ddp", after.bytes)
    step = next(change for change in told["figures"] if change["what"] == "step")
    assert step == {"what": "step", "before": before.seconds, "after": after.seconds, "unit": "seconds"}
    sent = {change["what"]: change["after"] for change in told["collectives"]}
    assert after.timing is not None
    for row in after.timing.communication:
        assert sent.get(f"{row.kind} {row.axis}", {"bytes": row.bytes})["bytes"] == row.bytes
    assert any(change["before"] is None and change["after"]["count"] > 0 for change in told["collectives"])


def test_plans_of_two_models_say_so_first() -> None:
    other = planned("convolutions", solver="ddp")
    told = difference(plan("ddp"), other)
    names = [f"{made.model} ({count_text(made.provenance.parameter_count)} parameters)"
             for made in (plan("ddp"), other) if made.provenance is not None]  # fmt: skip
    assert told.models == tuple(names) and told.to_json()["models"] == tuple(names)
    first = " ".join(str(told).split("\n\n")[0].split())
    assert first == f"plans of two different models, whose figures are of different work: {' and '.join(names)}"
    assert between("ddp", "fsdp").models == () and "two different models" not in str(between("ddp", "fsdp"))


def test_what_moved_is_grouped_by_layers() -> None:
    moved = between("ddp", "megatron").moved
    assert len(moved) < len(plan("ddp").parameters)
    assert any(row.before == "replicated" and "column on tp" in row.after for row in moved)
    assert any("layers.*" in row.names for row in moved)


def test_layers_are_counted_by_parameter() -> None:
    """Weights move in three layers, and biases in two of them."""
    before = plan("ddp")
    names = [f"layers.{k}.weight" for k in range(3)] + ["layers.0.bias", "layers.1.bias"]
    split = {n: replace(before.parameters[n], at_rest=("R", "S(0)"), in_use=(("R", "S(0)"),)) for n in names}
    moved = difference(before, replace(before, parameters={**before.parameters, **split})).moved
    told = {row.names for row in moved if row.after == "column on tp"}
    assert told == {"layers.* (3 layers): weight", "layers.* (2 layers): bias"}


def test_traffic_is_told_by_kind_and_axis() -> None:
    told = {change.what for change in between("ddp", "fsdp").collectives}
    assert any(re.fullmatch(r"(all_gather|reduce_scatter) (dp|tp)", what) for what in told)


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_width(width: int) -> None:
    lines = between("ddp", "megatron").text(width).splitlines()
    assert max(map(len, lines)) <= width


def test_plans_on_different_meshes_are_compared(tmp_path: Path) -> None:
    other = planned("tower", solver="ddp")
    flat = Plan.from_json({**json.loads(json.dumps(other.to_json())), "mesh": {"x": 2, "y": 2}})
    told = difference(plan("ddp"), flat)
    assert told.operators is None and "dp=2, tp=2" in str(told)


def test_the_library_names_it() -> None:
    assert autopar.difference(plan("ddp"), plan("fsdp")) == between("ddp", "fsdp")


# --- the command line


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    made = autopar_(
        *("plan", "tower:build", "--batch", "64", "--mesh", "dp=2,tp=2", "--cluster", "dgx-h100"),
        *("--solver", "ddp", "--out", path),
    )
    assert made.exit_code == 0, made.output
    return path


def test_what_if_is_the_plan_for_what_was_asked(saved: str, tmp_path: Path) -> None:
    path = str(tmp_path / "other.json")
    told = autopar_("what-if", saved, "--batch", "128", "--solver", "fsdp", "--out", path)
    assert told.exit_code == 0, told.output
    after = Plan.load(path)
    assert after.solver == "fsdp" and after.provenance is not None and after.provenance.source is not None
    assert after.provenance.source.batch == 128 and after.provenance.inputs["args.0"] == "float32[128, 32]"
    assert "what changed" in told.stdout and "samples/s a device" in told.stdout
    assert "it is fsdp's plan instead of ddp's plan" in told.stdout
    shown = autopar_("diff", saved, path)
    assert shown.stdout == told.stdout


def test_what_if_ends_after_the_seconds_that_it_is_given(saved: str, tmp_path: Path) -> None:
    path = str(tmp_path / "soon.json")
    assert autopar_("what-if", saved, "--solver", "auto", "--effort", "0.001", "--out", path).exit_code == 0
    after = Plan.load(path)
    assert after.provenance is not None and (after.provenance.effort_seconds, after.provenance.is_cut) == (0.001, True)


def test_what_if_keeps_what_is_not_given(saved: str) -> None:
    told = json.loads(autopar_("what-if", saved, "--cluster", "dgx-a100", "--json").stdout)
    assert [change["what"] for change in told["asked"]] == ["cluster", "memory limit"]
    pinned = json.loads(autopar_("what-if", saved, "--solver", "dp", "--pin", "head.weight:tp=S(0)", "--json").stdout)
    assert {change["what"] for change in pinned["asked"]} == {"solver", "pinned"}
    assert any("head" in row["names"] and "tp" in row["after"] for row in pinned["moved"])


def test_what_if_asked_nothing_says_what_can_be_asked(saved: str) -> None:
    failed = autopar_("what-if", saved)
    assert failed.exit_code == 2 and "say what would be different, such as --memory-limit 20GiB" in failed.stderr


def test_what_if_nothing_fits_says_what_would(saved: str) -> None:
    failed = autopar_("what-if", saved, "--memory-limit", "1KB")
    assert failed.exit_code == 2 and "The smallest peak that was reached" in failed.output.replace("\n", " ")
