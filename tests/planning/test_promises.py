"""What a plan promises is what its program does: collectives, seconds, bytes; and the same plan every time."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import plans
import pytest
import torch
from models import assert_same, case, eager, simulated
from pairwise import pairwise
from plans import count_collectives
from torch import nn

import autopar
from autopar.cost.streams import timeline
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.space.choices import KEEP, REGATHER, REPLICATED
from autopar.passes.space.items import total
from autopar.passes.space.problem import Assignment, ProblemBuilder
from autopar.passes.space.sites import Recomputed
from autopar.passes.space.space import Space
from autopar.passes.space.tensors import root_tensors, tensor_items
from autopar.planning.account import Account, account
from autopar.planning.options import Options, joint, taken
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.search import Search
from autopar.solve.problem import Choice, Infeasible, Score, evaluate, state_of

pytest.importorskip("transformers")

PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp")
PAPERS = ("atp", "par4d", "meshslice")
GRIDS: tuple[dict[str, int], ...] = ({"a": 2, "b": 2}, {"a": 4, "b": 2}, {"z": 2, "y": 2, "x": 2})
MODELS = ("gpt2", "llama tied", "llama of 4 layers", "mlp with loss_fn", "mlp with outputs")
MESHES: tuple[dict[str, int], ...] = ({"a": 4}, {"dp": 2, "tp": 2}, {"a": 2, "b": 2, "c": 2})


def mesh_id(mesh: dict[str, int]) -> str:
    return "x".join(map(str, mesh.values()))


def case_id(value: object) -> str:
    return mesh_id(value) if isinstance(value, dict) else str(value)


planner = models.planners(case)


@functools.cache
def _solved(name: str, axes: tuple[tuple[str, int], ...], solver: str) -> Plan:
    return planner(name, dict(axes)).plan(solver=solver, cost="serial")


def solved(name: str, mesh: dict[str, int], solver: str) -> Plan:
    return _solved(name, tuple(mesh.items()), solver)


def score_of(space: Space, assignment: Assignment) -> Score:
    """The evaluator's word on an assignment: the problem of the choices that it takes, and their indices."""
    problem, decoder = ProblemBuilder(space).build(taken(space, assignment))

    def indices(names: tuple[str, ...], decisions: Any) -> tuple[int, ...]:
        return tuple([o.choice for o in decoder.options[name]].index(decisions[name]) for name in names)

    return evaluate(
        problem,
        Choice(
            options=indices(decoder.rest, assignment.rest),
            repeats=tuple(
                tuple(Choice(options=indices(names, decisions)) for decisions in copies)
                for names, copies in zip(decoder.bodies, assignment.copies, strict=True)
            ),
        ),
    )


def check_promises(space: Space, assignment: Assignment, promised: Account) -> None:
    program = codegen(space, assignment)
    issued = count_collectives(program.collectives())
    assert {(c.kind, c.axis): (c.count, c.bytes) for c in promised.collectives} == issued
    score = score_of(space, assignment)
    assert promised.seconds == pytest.approx(score.seconds, rel=1e-9)
    assert promised.bytes == score.bytes
    joined = count_collectives(bucket(program).collectives())
    assert {key: size for key, (_, size) in joined.items()} == {key: size for key, (_, size) in issued.items()}
    assert all(count <= issued[key][0] for key, (count, _) in joined.items())


# ----------------------------------------------------------------------- what many read, in small tables


class Shared(nn.Module):
    """Layers that share weights."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList([nn.Linear(6, 6) for _ in set(order)]), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in map(int, self.order):
            x = self.layers[layer](x).tanh()
        return x.square().mean()


@pytest.mark.parametrize(("micro_batches", "holds"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("order", ["01011", "0110"])
def test_tables_of_what_many_read_add_up_to_the_price_of_all_that_they_want(
    order: str, micro_batches: int, holds: bool
) -> None:
    """Of random options of those that read a weight, which keep it for backward or gather it again."""
    rng = random.Random(0)
    made = Planner(Shared(order), {"a": 2, "b": 2}, (torch.zeros(8, 6),))
    space = dataclasses.replace(made.space, micro_batches=micro_batches, holds=holds)
    options = Options(space, {}, 1.0)
    every = {name: joint(options.sites[name], axes, 1.0) for name, axes in options.everything().items()}
    problem, decoder = ProblemBuilder(space).build(
        {name: rng.sample(of, min(len(of), 6)) for name, of in every.items()}
    )
    assert not problem.repeats
    sites = [space.rest.sites[name] for name in decoder.rest]
    policies, parts = set(), 0
    for number, site in enumerate(sites):
        tensors = [tensor for tensor in problem.tensors if tensor.producer == number]
        reading = [
            (r, p) for r, s in enumerate(sites) for p, read in enumerate(s.reads) if read.alias.root in site.makes
        ]
        if site.kind != "parameter":
            continue
        parts = max(parts, len(tensors))
        tensor = next(t for t in root_tensors(space.rest, [], 1) if t.root in site.makes)
        moved = tensor.moved(space, tensor.readings(Recomputed()), again=False)
        for _ in range(300):
            at = [rng.randrange(len(variable.options)) for variable in problem.variables]
            chosen = [decoder.options[name][option] for name, option in zip(decoder.rest, at, strict=True)]
            wanted = [(chosen[r].reads[p], sites[r].reads[p].backward) for r, p in reading]
            policies.add(policy := chosen[number].choice.policy)
            direct = tensor_items(space, moved, chosen[number].makes[0], policy, wanted)
            costs = [tensor.costs.get(state_of(tensor, at)) for tensor in tensors]
            assert (direct is None) == (None in costs)
            if direct is not None:
                priced = tuple(map(sum, zip(*filter(None, costs), strict=True)))
                assert priced == pytest.approx(total(direct), rel=1e-12)
    assert policies == {KEEP, REGATHER} and parts == 3


@pytest.mark.parametrize("order", ["00000", "0110100111"])
def test_layers_that_run_again_and_again_are_planned_soon(order: str) -> None:
    """Their copies meet in many states, among them each weight's gradient so far: no table is of all of them twice."""
    plan = autopar.plan(Shared(order), {"a": 2, "b": 2}, (torch.zeros(8, 6),))
    every = autopar.plan(Shared(order), {"a": 2, "b": 2}, (torch.zeros(8, 6),), solver="ddp")
    assert plan.seconds <= every.seconds


# ------------------------------------------------------------------------------- what is priced is run


@pytest.mark.parametrize(("name", "mesh", "solver"), pairwise(MODELS, MESHES, PRESETS), ids=case_id)
def test_a_preset_does_what_it_promises(name: str, mesh: dict[str, int], solver: str) -> None:
    made, plan = planner(name, mesh), solved(name, mesh, solver)
    check_promises(made.space, made.assignment(plan), plan.account)
    assert plan.objective_seconds == pytest.approx(plan.account.seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "mesh", "solver"), pairwise(("gpt2", "llama tied", "mlp with loss_fn"), GRIDS, PAPERS), ids=case_id
)
def test_a_papers_preset_does_what_it_promises(name: str, mesh: dict[str, int], solver: str) -> None:
    made, plan = planner(name, mesh), solved(name, mesh, solver)
    check_promises(made.space, made.assignment(plan), plan.account)


@pytest.mark.parametrize("mesh", [{"a": 4}, {"dp": 1, "tp": 4}], ids=mesh_id)
@pytest.mark.parametrize("solver", ["ilp", "dp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_solver_does_what_it_promises(name: str, solver: str, mesh: dict[str, int]) -> None:
    made, plan = planner(name, mesh), solved(name, mesh, solver)
    check_promises(made.space, made.assignment(plan), plan.account)


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize("name", MODELS)
def test_any_plan_does_what_it_promises(name: str, seed: int, mesh: dict[str, int]) -> None:
    space = planner(name, mesh).space
    assignment = plans.random_assignment(space, seed)
    check_promises(space, assignment, account(space, assignment))


def test_a_plan_in_which_layers_differ_does_what_it_promises() -> None:
    """Under a memory limit some layers gather again and some do not."""
    made = planner("llama of 4 layers", {"a": 4})
    free = solved("llama of 4 layers", {"a": 4}, "dp")
    with pytest.raises(Infeasible) as caught:
        made.plan(solver="dp", cost="serial", memory_limit_bytes=1)
    least = caught.value.smallest_bytes
    limit = (least + free.bytes) / 2
    for solver in ("ilp", "dp"):
        plan = made.plan(solver=solver, cost="serial", memory_limit_bytes=limit)
        assert plan.bytes <= limit
        assert plan.account.seconds >= free.account.seconds * (1 - 1e-9)
        check_promises(made.space, made.assignment(plan), plan.account)


@pytest.mark.parametrize("solver", ["ilp", "dp"])
def test_the_solvers_objective_is_the_accounts(solver: str) -> None:
    """At every depth: what is decided for a layer counts once for each of its copies."""
    for name in ("llama tied", "llama of 4 layers"):
        made = planner(name, {"a": 4})
        found = Search(ProblemBuilder(made.space), solver).run()
        promised = account(made.space, found.assignment)
        assert promised.seconds == pytest.approx(found.score.seconds, rel=1e-9)
        assert promised.bytes == found.score.bytes


# -------------------------------------------------------------------------------------- the optimum


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 8}], ids=mesh_id)
@pytest.mark.parametrize("name", MODELS)
def test_solvers_agree_and_no_preset_is_cheaper(name: str, mesh: dict[str, int]) -> None:
    ilp, dp = solved(name, mesh, "ilp"), solved(name, mesh, "dp")
    assert ilp.objective_seconds == pytest.approx(dp.objective_seconds, rel=1e-6)
    for preset in (*PRESETS, *PAPERS):
        assert solved(name, mesh, preset).objective_seconds >= dp.objective_seconds * (1 - 1e-9), preset


@pytest.mark.parametrize("mesh", [{"a": 4}, {"dp": 2, "tp": 2}], ids=mesh_id)
@pytest.mark.parametrize("name", ["gpt2", "llama tied", "mlp with loss_fn"])
def test_a_plan_is_the_quicker_of_two_with_what_overlaps(name: str, mesh: dict[str, int]) -> None:
    """Serial: the cheapest as if nothing overlapped. The other is never slower on the timeline."""
    serial, best = solved(name, mesh, "dp"), planner(name, mesh).plan()
    assert best.seconds <= serial.seconds
    assert best.objective_seconds >= serial.objective_seconds * (1 - 1e-9)
    assert best.objective_seconds == pytest.approx(best.account.seconds, rel=1e-6)
    assert best.lower_bound_seconds == serial.lower_bound_seconds <= best.seconds
    for plan in (serial, best):
        step = timeline(planner(name, mesh).program(plan), planner(name, mesh).cluster)
        assert plan.seconds == pytest.approx(step.seconds + plan.account.optimizer_seconds)
        assert plan.exposed_seconds == pytest.approx(step.exposed_seconds)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"a": 2, "b": 2}], ids=mesh_id)
@pytest.mark.parametrize("name", ["gpt2", "llama tied", "mlp with loss_fn"])
def test_no_preset_is_cheaper_on_two_axes(name: str, mesh: dict[str, int]) -> None:
    best = solved(name, mesh, "dp")
    assert best.lower_bound_seconds <= best.seconds
    for preset in (*PRESETS, *PAPERS):
        assert solved(name, mesh, preset).objective_seconds >= best.objective_seconds * (1 - 1e-9), preset


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_exhaustive_search_agrees_on_real_problems(depth: int, ranks: int) -> None:
    """With two random options a site beside the whole, so that everything can be tried."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(depth)))
    made = Planner(model, {"a": ranks}, (torch.randn(8, 8),), loss_fn=torch.sum)
    objectives = {}
    for solver in ("exhaustive", "ilp", "dp"):
        search = Search(ProblemBuilder(made.space), solver)
        allowed = {
            name: [choice for choice in joint(site, [site.choices[ranks]], None) if made.space.option(site, choice)]
            for name, site in search.sites.items()
        }
        if depth > 1:
            for name, site in search.sites.items():
                split = [choice for choice in allowed[name] if choice.axes != (REPLICATED,)]
                allowed[name] = [made.space.replicated(site), *split[:1]]
        objectives[solver] = search.run(allowed).score.objective
    assert objectives["ilp"] == pytest.approx(objectives["exhaustive"], rel=1e-9)
    assert objectives["dp"] == pytest.approx(objectives["exhaustive"], rel=1e-9)


# -------------------------------------------------------------------------------- the same every time

PRINT_PLAN = """
import json, sys
sys.path[:0] = {path!r}
import models, autopar
for name, solver in {asked!r}:
    made = models.case(name)
    plan = autopar.plan(made.model, {mesh!r}, made.args, made.kwargs, loss_fn=made.loss_fn, solver=solver)
    print(json.dumps({{**plan.to_json(), "solve_seconds": 0}}))
"""


def text(plan: Plan) -> str:
    return json.dumps({**plan.to_json(), "solve_seconds": 0})


def test_the_same_plans_in_another_process() -> None:
    """Byte for byte, whatever the order of Python's sets there."""
    mesh, asked = {"a": 4}, [("gpt2", "dp"), ("mlp with loss_fn", "ilp")]
    here = [text(planner(name, mesh).plan(solver=solver)) for name, solver in asked]
    script = PRINT_PLAN.format(path=sys.path, asked=asked, mesh=mesh)
    made = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert made.stdout.strip().splitlines()[-len(here) :] == here


def test_shared_values_stand_in_one_order_in_every_process() -> None:
    for region in planner("llama of 4 layers", {"a": 2}).space.bodies:
        shared = [site.name for site in region.sites.values() if site.kind == "shared"]
        assert len(shared) > 1 and shared == sorted(shared)


def test_plans_of_two_meshes_do_not_disturb_each_other() -> None:
    first = planner("llama tied", {"a": 4})
    plan = first.plan(solver="dp", cost="serial")
    before = text(plan), first.program(plan).digest
    for other in ({"dp": 2, "tp": 2}, {"a": 2}, {"a": 8}):
        first.on(other, None).plan(solver="megatron")
    plan = first.plan(solver="dp", cost="serial")
    assert (text(plan), first.program(plan).digest) == before


def test_an_axis_of_one_rank_changes_nothing() -> None:
    flat, wide = solved("llama tied", {"tp": 4}, "dp"), solved("llama tied", {"dp": 1, "tp": 4}, "dp")
    assert wide.objective_seconds == pytest.approx(flat.objective_seconds, rel=1e-9)
    assert [(c.kind, c.axis, c.count, c.bytes) for c in wide.account.collectives] == [
        (c.kind, c.axis, c.count, c.bytes) for c in flat.account.collectives
    ]


# --------------------------------------------------------------------------------------- plan files


@pytest.mark.parametrize("solver", ["megatron_sp", "dp"])
def test_a_plan_survives_its_file(tmp_path: Path, solver: str) -> None:
    made, plan = planner("gpt2", {"a": 4}), solved("gpt2", {"a": 4}, solver)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert made.program(loaded).digest == made.program(plan).digest


def test_an_edited_plan_runs_as_edited() -> None:
    """A parameter of a data-parallel plan, sharded at rest by hand: one all-gather more."""
    mesh = {"a": 4}
    made, plan = planner("mlp with loss_fn", mesh), solved("mlp with loss_fn", mesh, "ddp")
    name = made.captured.graph.parameters["0.weight"]
    edited = dataclasses.replace(plan, decisions={**plan.decisions, name: "S0%32 keep"})
    program = made.program(edited)
    (stored,) = (i for i in program.inputs if i.target == "0.weight")
    assert str(stored.layout[0]) == "S(0%32)"
    assert_same(simulated(program, made.captured, case("mlp with loss_fn")), eager(case("mlp with loss_fn")))
    kinds = [kind for kind, _, _ in codegen(made.space, made.assignment(edited)).collectives()]
    assert "all_gather" in kinds and "reduce_scatter" in kinds


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ("S0%7 keep", "cannot take 'S0%7 keep'"),
        ("S5%32 keep", "cannot take 'S5%32 keep'"),
        ("S0%32", "cannot take 'S0%32'"),
        ("R R keep", "cannot take 'R R keep'"),
        ("sharded", "'sharded' is no choice"),
        ("Sx%y keep", "'Sx%y' is no choice"),
        ("P keep", "cannot take 'P keep'"),
        ("", "cannot take ''"),
    ],
)
def test_a_nonsense_edit_is_refused(decision: str, message: str) -> None:
    made, plan = planner("mlp with loss_fn", {"a": 4}), solved("mlp with loss_fn", {"a": 4}, "ddp")
    name = made.captured.graph.parameters["0.weight"]
    with pytest.raises(ValueError, match=r"parameter .*0\.weight") as caught:
        made.program(dataclasses.replace(plan, decisions={**plan.decisions, name: decision}))
    assert message in str(caught.value)
    assert "write one choice for each axis: on a R, S0%32, S1%16" in str(caught.value)


def test_an_edit_that_contradicts_itself_is_refused() -> None:
    """No tensor becomes a partial sum by itself: an operator that takes one must be given one."""
    made, plan = planner("llama tied", {"a": 4}), solved("llama tied", {"a": 4}, "ddp")
    refused = 0
    for name, site in made.space.rest.sites.items():
        if site.kind == "op" and any(choice.is_partial for choice in site.choices[4]):
            edited = dataclasses.replace(plan, decisions={**plan.decisions, name: "P0"})
            try:
                made.program(edited)
            except ValueError as error:
                assert "cannot be had" in str(error)
                refused += 1
    assert refused


@pytest.mark.parametrize("where", ["layer", "rest"])
def test_an_edit_of_one_side_of_a_border_is_refused(where: str) -> None:
    """What a layer leaves in one layout, the next one cannot enter in another: both sides are written."""
    made, plan = planner("llama of 4 layers", {"a": 4}), solved("llama of 4 layers", {"a": 4}, "ddp")
    assert made.program(plan)
    (segment,) = plan.segments
    sites = made.space.rest.sites if where == "rest" else made.space.bodies[0].sites
    refused = 0
    for name in (name for name, site in sites.items() if site.kind == "border"):
        run = segment.runs[0]
        other = "R" if (plan.decisions if where == "rest" else run.decisions)[name] != "R" else "S0%8"
        if where == "rest":
            edited = dataclasses.replace(plan, decisions={**plan.decisions, name: other})
        else:
            runs = tuple(dataclasses.replace(r, decisions={**r.decisions, name: other}) for r in segment.runs)
            edited = dataclasses.replace(plan, segments=(dataclasses.replace(segment, runs=runs),))
        with pytest.raises(ValueError, match=r"border .* write the same choice on both sides"):
            made.program(edited)
        refused += 1
    assert refused >= 2


# ------------------------------------------------------------------------------------------- compare


def test_compare_prints_the_best_first() -> None:
    made = case("mlp with loss_fn")
    solvers = ["megatron", "ddp", "ilp", "dp", "fsdp"]
    table = autopar.compare(made.model, {"a": 4}, made.args, loss_fn=made.loss_fn, solvers=solvers)
    assert set(table.results) == set(solvers)
    header, *rows = str(table).split("\n\n")[0].splitlines()
    assert header.split()[0] == "plan" and len(rows) == len(table.alike())  # of equal plans the first
    plans = {name: p for name, p in table.results.items() if isinstance(p, Plan)}
    order = [plans[row.split()[0]].seconds for row in rows]
    assert order == sorted(order)
    assert plans[table.best].seconds == order[0]
    told = json.loads(json.dumps(table.to_json()))
    assert {row["plan"] for row in told["rows"]} == set(solvers)


def test_compare_says_why_there_is_no_plan() -> None:
    made = case("mlp with loss_fn")
    args = (torch.randn(1, 16),)
    table = autopar.compare(made.model, {"a": 4}, args, loss_fn=made.loss_fn, solvers=["ddp", "dp"])
    assert table.best == "dp"
    assert isinstance(table.results["ddp"], str) and "the batch is 1" in table.results["ddp"]
    assert "ddp: no plan: preset 'ddp' splits the batch by 4" in " ".join(str(table).split())


# ---------------------------------------------------------------------------------- ops without rule


class WithSort(nn.Module):
    """Sorting has no rule; what stands around it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.cummax(self.first(x), dim=1).values)


def test_an_op_without_a_rule_is_replicated_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    made = models.Case(model=WithSort(), batch=models.vectors, loss_fn=models.mean_square)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        built = Planner(made.model, {"a": 4}, made.args, loss_fn=made.loss_fn)
        plan = built.plan(solver="ddp")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("replicated, since the op has no rule: 1 x aten.cummax.default in the model")
    assert message.count("aten.cummax.default") == 1
    assert plan.without_rule["aten.cummax.default"] == 1
    assert "aten.cummax.default" in str(plan)
    assert_same(simulated(built.program(plan), built.captured, made), eager(made))


class Cummax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cummax(x, dim=1).values


def test_ops_without_a_rule_are_counted_in_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), Cummax()) for _ in range(4)]
    made = models.Case(model=nn.Sequential(Cummax(), *layers), batch=models.vectors, loss_fn=models.mean_square)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        built = Planner(made.model, {"a": 4}, made.args, loss_fn=made.loss_fn)
    assert built.space.repeats, "the layers are planned as one"
    assert built.space.without_rule["aten.cummax.default"] == 5
    (message,) = [record.getMessage() for record in caplog.records]
    assert "5 x aten.cummax.default in 0, *.1" in message


def test_a_space_with_other_prices_works_out_again_what_depends_on_them() -> None:
    """What was worked out is kept where nothing that it depends on differs, and nowhere else."""
    space = planner("mlp with loss_fn", {"a": 4}).space
    site = next(site for site in space.rest.sites.values() if site.kind == "op" and len(site.choices[4]) > 1)
    before = space.option(site, space.replicated(site))
    slower = dataclasses.replace(space.cluster, device=dataclasses.replace(space.cluster.device, seconds_per_op=1.0))
    assert dataclasses.replace(space, segments=space.segments).memo is space.memo
    after = dataclasses.replace(space, cluster=slower).option(site, space.replicated(site))
    assert before is not None and after is not None and after.seconds > before.seconds
    assert space.option(site, space.replicated(site)) is before
