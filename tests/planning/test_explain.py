"""What a plan answers about itself: an alternative costs what the plan that is edited, or pinned, to it costs."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tower import CASES, autopar_, given, planned

import autopar
from autopar.planning.account import account, sources
from autopar.planning.plan import Plan
from autopar.planning.reading import refreshed
from autopar.report.explain.answer import Alternative, Explanation
from autopar.solve.dp import solve_dp


@cache
def plan(name: str) -> Plan:
    return planned(name, solver="megatron") if name == "gpt2" else planned(name)


def edited(made: Plan, name: str, choice: str) -> Plan:
    """With another choice for a parameter: of the whole plan, or of all copies of a layer."""
    site = next(s for s in _sites(made) if s.endswith(re.sub(r"\W", "_", name)))
    change = lambda decisions: {**decisions, site: choice} if site in decisions else decisions  # noqa: E731
    segments = tuple(
        replace(segment, runs=tuple(replace(run, decisions=change(run.decisions)) for run in segment.runs))
        for segment in made.segments
    )
    return replace(made, decisions=change(made.decisions), segments=segments)


def _sites(made: Plan) -> list[str]:
    return [*made.decisions, *(s for segment in made.segments for run in segment.runs for s in run.decisions)]


# --- what alternatives cost


QUESTIONS = {
    "tower": ["layers.1.weight", "head.weight"],
    "convolutions": ["0.weight", "4.weight"],
    "gpt2": ["transformer.h.0.mlp.c_fc.weight", "transformer.wpe.weight"],
}


@pytest.mark.parametrize("name", CASES)
def test_an_alternative_costs_what_the_plan_edited_to_it_costs(name: str) -> None:
    checked = 0
    for parameter in QUESTIONS[name]:
        explanation = plan(name).explain(parameter)
        for alternative in explanation.alternatives[:5]:
            assert alternative.is_exact
            read = refreshed(plan(name).planner, edited(plan(name), parameter, alternative.choice))
            assert (read.seconds, read.bytes) == (alternative.seconds, alternative.bytes)
            assert read.account.seconds == pytest.approx(alternative.serial_seconds)
            checked += 1
    assert checked == 10


@pytest.mark.parametrize("name", ["tower", "convolutions"])
def test_a_planned_alternative_is_the_plan_pinned_to_it(name: str) -> None:
    parameter = QUESTIONS[name][0]
    explanation = plan(name).explain(parameter, replan=2)
    again = [alternative for alternative in explanation.alternatives if alternative.replanned]
    assert len(again) == 2
    for alternative in again:
        assert alternative.replanned is not None
        pins = pins_of(alternative)
        pattern = "layers.*.weight" if name == "tower" else parameter
        pinned = planned(name, constraints={pattern: pins})
        assert (pinned.seconds, pinned.bytes) == (alternative.replanned.seconds, alternative.replanned.bytes)


def pins_of(alternative: Alternative) -> dict[str, str]:
    """Of the words "S(0) on dp, R on tp, keep"."""
    pins = {}
    for part in alternative.words.split(", "):
        text, _, axes = part.partition(" [")[0].partition(" on ")
        pins |= {axis: text.partition(" ")[0] for axis in axes.split(" and ") if axis}
    return pins


# --- what is asked for


def answer(name: str) -> Explanation:
    return plan("tower").explain(name)


def test_parameters_inputs_modules_operators_and_collectives_are_explained() -> None:
    assert answer("head.weight").kind == "parameter"
    assert answer("layers.*.weight").name == answer("layers.2.weight").name == "layers.*.weight"
    assert answer("args.0").kind == "input"
    module = answer("head")
    assert module.kind == "module" and any("head.weight" in row or "weight" in row for row in module.rows[1:])
    operator = next(row[0].split()[0] for row in module.rows[1:] if "mm" in row[0])
    assert answer(operator).kind == "operator" and answer(operator).alternatives
    axis = plan("gpt2").account.collectives[0].axis
    collectives = plan("gpt2").explain(axis)
    assert collectives.kind == "collective" and len(collectives.rows) > 1


def test_the_seconds_of_a_collectives_sources_add_up() -> None:
    planner = plan("gpt2").planner
    assignment = planner.assignment(plan("gpt2"))
    told = sum(source.seconds for source in sources(planner.space, assignment))
    assert told == pytest.approx(account(planner.space, assignment).communication_seconds)


def test_a_name_that_nothing_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"called 'haed.weight' \(did you mean 'head.weight'\?\)$"):
        answer("haed.weight")
    with pytest.raises(ValueError, match=r"called 'zzzz': names are such as \w"):
        answer("zzzz")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["head.weight", "layers.0.weight", "head", "tp", "dp"])
def test_an_answer_fits_the_width(name: str, width: int) -> None:
    told = answer(name)
    text = told.text(width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count(" more, which ") == (1 if told.omitted else 0)
    assert len({a.words for a in told.alternatives}) == len(told.alternatives)


def test_memory_that_binds_is_said() -> None:
    free = planned("tower", solver="ddp")
    binding = replace(free, memory_limit_bytes=free.bytes + 1, memory_limit_from="given")
    explanation = plan("tower").explain("head.weight")
    assert explanation.binds
    tight = autopar.read_plan(binding, **given("tower"))
    for alternative in tight.explain("head.weight").alternatives:
        if (alternative.bytes or 0) > free.bytes + 1:
            assert alternative.against == "does not fit the memory limit"


def test_the_history_of_a_plan_is_what_its_solver_saw() -> None:
    """On one axis the problem is the plan's own: solved again it costs as much, and its solution is the plan."""
    arguments = given("tower")
    made = autopar.plan(arguments.pop("model"), {"tp": 4}, cluster="dgx-h100", cost="serial", solver="dp", **arguments)
    history = made.history()
    assert list(history) == ["graph", "layouts", "problem", "solution", "program"]
    assert history["graph"] == made.joint_graph() and history["program"] == made.program()
    assert solve_dp(history["problem"]).score.seconds == pytest.approx(made.objective_seconds)
    decided = history["solution"].rest
    assert {name: str(choice) for name, choice in decided.items()} == dict(made.decisions)
    assert all(str(choice) in history["layouts"][name] for name, choice in decided.items())
    assert history["layouts"]["head_weight"]["S0%64 keep"] == "tp:S(0%64) -> tp:S(0%64)"
    two = plan("tower").history()
    assert all(choice.split()[1] == str(two["solution"].rest[name].axes[1])
               for name, own in two["layouts"].items() if name in two["solution"].rest for choice in own)  # fmt: skip


# --- plans that were saved


def test_a_plan_without_its_model_says_how_to_read_it(tmp_path: Path) -> None:
    plan("tower").save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"autopar\.read_plan"):
        loaded.explain("head.weight")
    read = autopar.read_plan(tmp_path / "plan.json", **given("tower"))
    assert read == plan("tower") == loaded
    assert read.explain("head.weight").alternatives == answer("head.weight").alternatives


def test_what_answers_stays_in_the_process() -> None:
    again = pickle.loads(pickle.dumps(plan("tower")))
    assert again == plan("tower") and "planner" not in again.__dict__


def test_an_edited_plan_is_read_with_its_own_figures(tmp_path: Path) -> None:
    made = plan("tower")
    parameter = answer("head.weight")
    other = edited(made, "head.weight", parameter.alternatives[-1].choice)
    other.save(tmp_path / "plan.json")
    read = autopar.read_plan(tmp_path / "plan.json", **given("tower"))
    assert not read.is_edited and read.seconds == parameter.alternatives[-1].seconds
    assert "edited by hand; before, the step was" in str(read)


def test_a_plan_is_read_on_another_cluster_and_for_another_optimizer() -> None:
    made = plan("tower")
    read = autopar.read_plan(made, **given("tower"), cluster="dgx-a100", optimizer="sgd")
    assert read.digest == made.digest and read.cluster == "dgx-a100" and read.seconds > made.seconds
    assert read.peak.optimizer == 0 and read.objective_bound_seconds == 0
    assert 0 < read.lower_bound_seconds <= read.seconds


def test_the_command_line_answers_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    made = autopar_(
        *("plan", "tower:build", "--batch", "64", "--mesh", "dp=2,tp=2", "--cluster", "dgx-h100", "--out", path)
    )
    assert made.exit_code == 0, made.output
    shown = autopar_("explain", path, "head.weight", "--json")
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert told["name"] == "head.weight"
    assert [a["seconds"] for a in told["alternatives"]] == [a.seconds for a in answer("head.weight").alternatives]
    assert autopar_("explain", path, "nothing.here").exit_code == 2
    alone = autopar_("explain", path, "head.weight", "--batch", "8")
    assert alone.exit_code == 2 and "--batch goes with --model" in alone.stderr
    data = json.loads(Path(path).read_text())
    name = next(site for site in data["decisions"] if site.endswith("head_weight"))
    data["decisions"][name] = told["alternatives"][-1]["choice"]
    Path(path).write_text(json.dumps(data))
    assert "edited by hand" in autopar_("show", path).stdout
    before = str(tmp_path / "before.json")
    again = autopar_(
        *(
            "plan",
            "tower:build",
            "--batch",
            "64",
            "--mesh",
            "dp=2,tp=2",
            "--cluster",
            "dgx-h100",
            "--out",
            before,
        )
    )
    assert again.exit_code == 0, again.output
    old, new = (json.loads(autopar_("show", file, "--json").stdout)["seconds"] for file in (before, path))
    told = json.loads(autopar_("diff", before, path, "--json").stdout)
    assert old != new and new in _numbers(told), "an edited plan is compared by its own figures"


def _numbers(told: Any) -> list[float]:
    items = told.values() if isinstance(told, dict) else told if isinstance(told, list) else ()
    return [told] if isinstance(told, float) else [number for item in items for number in _numbers(item)]


def test_a_collective_that_the_plan_does_not_have() -> None:
    made = plan("tower")
    there = {(c.kind, c.axis) for c in made.account.collectives}
    kind, axis = next(
        (k, a) for k in ("all_to_all", "all_gather", "reduce_scatter") for a in made.mesh if (k, a) not in there
    )
    told = made.explain(f"{kind} {axis}")
    assert not told.rows and "nothing; the plan has" in str(told)


def test_a_plan_that_does_not_say_its_model_asks_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    plan("tower").save(path)
    failed = autopar_("explain", path, "head.weight")
    assert failed.exit_code == 2 and "give --model" in failed.output
    shown = autopar_("explain", path, "head.weight", "--model", "tower:build", "--batch", "64")
    assert shown.exit_code == 0 and "head.weight: parameter" in shown.stdout
