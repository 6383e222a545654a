"""Constraints: a plan keeps them, runs right under them, and what cannot be is said."""

from __future__ import annotations

import json
import random

import models
import pytest

from autopar.passes.space.choices import REPLICATED
from autopar.passes.space.parsing import parse_choice
from autopar.planning.constraints import Constraints, pins
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner

MESHES: tuple[dict[str, int], ...] = ({"tp": 4}, {"dp": 2, "tp": 2})


planner = models.planners(models.case)


def on(mesh: dict[str, int], name: str = "llama") -> Planner:
    return planner(name, mesh)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_parameters_and_inputs_lie_where_they_are_pinned() -> None:
    made = on({"dp": 2, "tp": 2})
    constraints = {
        EMBEDDING: {"tp": "S(1)", "dp": "R"},
        "model.layers.*.q_proj.weight": {"tp": "S(1)"},
        HEAD: {"dp": "S(0)", "tp": "S(0)"},
        "input_ids": {"dp": "S(0)", "tp": "R"},
        "labels": {"dp": "S(0)"},
    }
    plan = made.plan(constraints=constraints, cost="serial")
    assert plan.parameters[EMBEDDING].at_rest == ("R", "S(1)")
    assert all(p.at_rest[1] == "S(1)" for n, p in plan.parameters.items() if "q_proj" in n)
    assert plan.parameters[HEAD].at_rest == ("S(0)", "S(0)")
    assert plan.inputs["kwargs.input_ids"] == ("S(0)", "R") and plan.inputs["kwargs.labels"][0] == "S(0)"
    assert plan.objective_seconds >= made.plan(cost="serial").objective_seconds * (1 - 1e-9)
    case = models.case("llama")
    models.assert_same(models.simulated(made.program(plan), made.captured, case), models.eager(case))


def test_a_pin_says_periods_as_plans_do() -> None:
    space = on({"dp": 2, "tp": 2}).space
    (head,) = pins(space, {HEAD: {"tp": "S(0)"}}).values()
    assert list(pins(space, {HEAD: {"tp": "S(0%64)"}}).values()) == [head]
    assert {choice.period for choice in head[1]} == {64}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_module_is_kept_off_an_axis(mesh: dict[str, int]) -> None:
    made = on(mesh).on(mesh, models.without_latency())
    plan = made.plan(constraints={"model.layers.*.mlp": {"tp": "R"}})
    axis = list(mesh).index("tp")
    regions = zip(made.space.bodies, plan.segments, strict=True)
    decided = [(body.sites[n], text) for body, s in regions for run in s.runs for n, text in run.decisions.items()]
    inside = [(site, text) for site, text in decided if ".mlp" in site.module and site.kind == "op"]
    assert len(inside) > 10
    assert all(parse_choice(text).axes[axis] == REPLICATED for _, text in inside)
    assert any(parse_choice(text).axes[axis] != REPLICATED for site, text in decided if site.kind == "op")
    assert all(p.at_rest[axis] == "R" for n, p in plan.parameters.items() if ".mlp." in n)


@pytest.mark.parametrize("seed", range(4))
def test_any_split_that_is_offered_may_be_pinned(seed: int) -> None:
    """Of random parameters a random dim on a random axis: the plan has it there, and runs right."""
    rng = random.Random(seed)
    mesh = MESHES[seed % 2]
    made = on(mesh, "gpt2")
    shapes = {name: made.captured.graph.metas[value].shape for name, value in made.captured.graph.parameters.items()}
    constraints: dict[str, dict[str, str]] = {}
    for name in rng.sample(sorted(n for n in shapes if ".h." not in n), 3):
        axis, dim = rng.choice(list(mesh)), rng.randrange(len(shapes[name]))
        constraints[name] = {axis: f"S({dim})"}
    plan = made.plan(constraints=constraints, cost="serial")
    for name, placements in constraints.items():
        for axis, text in placements.items():
            at_rest = plan.parameters[name].at_rest[list(mesh).index(axis)]
            assert at_rest == text or at_rest.startswith(text[:-1] + "%"), (name, plan.parameters[name])
    case = models.case("gpt2")
    models.assert_same(models.simulated(made.program(plan), made.captured, case), models.eager(case))


def test_presets_and_limits_keep_constraints() -> None:
    made = on({"tp": 4})
    constraints = {EMBEDDING: {"tp": "S(0)"}}
    assert made.plan(solver="megatron", constraints=constraints).parameters[EMBEDDING].at_rest == ("S(0)",)
    free = made.plan(cost="serial", constraints=constraints)
    limited = made.plan(cost="serial", constraints=constraints, memory_limit_bytes=free.bytes * 0.9)
    assert limited.bytes <= free.bytes * 0.9
    assert limited.parameters[EMBEDDING].at_rest == ("S(0)",)
    assert (limited.constraints, limited.memory_limit_bytes) == (constraints, free.bytes * 0.9)
    assert Plan.from_json(json.loads(json.dumps(limited.to_json()))) == limited
    full = limited.text(full=True)
    assert f"pinned  {EMBEDDING} tp=S(0)" in full and "\nmemory limit " in full
    assert f"pinned  {EMBEDDING} tp=S(0)" in str(limited)
    assert "pinned" not in str(made.plan(solver="ddp")) and "\nno memory limit" in free.text(full=True)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is both in the preset and in the constraints"):
        made.plan(solver="ddp", constraints=constraints)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"model.embed.weight": {"tp": "R"}}, r"tp=R names nothing \(did you mean 'model.embed_tokens.weight'\?\)$"),
        ({"model.layers.*.self_atn": {"tp": "R"}}, r"names nothing \(did you mean 'model.layers.\*.self_attn'\?\)$"),
        ({"zzzz": {"tp": "S(0)"}}, r"names nothing: parameters and inputs are called like \w+"),
        ({HEAD: {"tpp": "R"}}, r"about mesh axis 'tpp' \(did you mean 'tp'\?\), and the mesh has dp, tp"),
        ({"model.layers.*.mlp.act_fn": {"tp": "S(0)"}}, r"S\(0\) names nothing: no parameter and no input lies in it"),
        ({HEAD: {"pp": "R"}}, r"about mesh axis 'pp', and the mesh has dp, tp"),
        ({HEAD: {"tp": "shard"}}, r"tp='shard' is no placement: give R \(replicated\), S\(d\) \(dim d split\)"),
        ({HEAD: {"tp": "S(2)"}}, r"lm_head.weight of shape \(64, 32\) can be split along S\(0\), S\(1\) on 2 ranks"),
        ({HEAD: {"tp": "S(0%3)"}}, r"can be split along S\(0%64\), S\(1%32\) on 2 ranks"),
        ({HEAD: {"tp": "S(0%)"}}, r"tp='S\(0%\)' is no placement: .* S\(d%p\) \(in periods of p\)"),
        ({HEAD: {"tp": "R"}, "lm_head": {"tp": "S(0)"}}, r"'lm_head.weight': tp=R and 'lm_head': tp=S\(0\) contradict"),
        ({"model.layers.0": {"tp": "R"}}, r"names 1 of 2 copies of a repeated layer .* name all of them"),
    ],
)
def test_what_cannot_be_is_one_clear_error(constraints: Constraints, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pins(on({"dp": 2, "tp": 2}).space, constraints)
