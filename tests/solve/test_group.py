"""A grouped problem is a restriction of the one that it was made of: same scores, and it says what it forbids."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same, case, eager, planners, simulated
from test_solve import random_problem, through_a_file, variable

from autopar.passes.blocks.partition import blocks
from autopar.passes.codegen.program import codegen
from autopar.solve.pricing import priced_at
from autopar.solve.problem import Choice, Infeasible, Problem, Tensor, evaluate, state_of
from autopar.solve.solvers import SOLVERS, solve

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from grouping.free import FreeTensor
from grouping.group import block_groups, group
from grouping.grouped import Grouped
from grouping.level import Level, best, operator_level
from grouping.widen import widened

REPLICATED, SPLIT = 0, 1
WANTS_WHOLE, WANTS_SPLIT = 1, 2
SLICES = {REPLICATED: WANTS_WHOLE | WANTS_SPLIT, SPLIT: WANTS_SPLIT}
"""A slice of what is whole is free, a split is had of a split; a gather costs 10 seconds."""


def gathered(name: str, producer: int, *consumers: int) -> Tensor:
    """A tensor between variables whose options are: work on the whole, work on a split."""
    return FreeTensor(
        name=name,
        producer=producer,
        produced=(REPLICATED, SPLIT),
        consumers=consumers,
        wanted=((WANTS_WHOLE, WANTS_SPLIT),) * len(consumers),
        costs={
            (made, wanted): (10.0 if made == SPLIT and wanted & WANTS_WHOLE else 0.0, 0.0)
            for made in (REPLICATED, SPLIT)
            for wanted in range(4)
        },
        free=SLICES,
    )


def known(tensor: Tensor) -> dict[str, Any]:
    """A tensor but for what is had of it for free."""
    return {field.name: getattr(tensor, field.name) for field in fields(Tensor)}


def chain(*seconds: tuple[float, float]) -> Problem:
    """Operators in a row, with seconds on the whole and on a split."""
    return Problem(
        variables=tuple(variable(f"v{i}", (whole, 8.0), (split, 2.0)) for i, (whole, split) in enumerate(seconds)),
        tensors=tuple(gathered(f"t{i}", i, i + 1) for i in range(len(seconds) - 1)),
    )


def optimum(problem: Problem, bytes_limit: float | None = None) -> float:
    try:
        return solve(problem, "exhaustive", bytes_limit=bytes_limit).score.objective
    except Infeasible:
        return math.inf


# ---- by hand ------------------------------------------------------------------------------------------


def test_members_go_from_whole_to_split_but_not_back() -> None:
    problem = chain((4, 1), (4, 1), (4, 1))
    grouped = group(replace(problem, tensors=(*problem.tensors, gathered("in", 0, 1, 2))), [[1, 2]], limited=True)
    inner = next(g for g in grouped.groups if len(g.members) == 2)
    assert (SPLIT, REPLICATED) not in inner.joint
    assert (SPLIT, SPLIT) in inner.joint


def test_a_group_that_splits_from_end_to_end_costs_the_sum_of_its_members() -> None:
    grouped = group(chain((4, 1), (4, 1), (4, 2)), [[0, 1, 2]])
    assert [v.seconds for v in grouped.problem.variables] == [(4.0,)]
    assert grouped.problem.tensors == ()
    assert grouped.expand(Choice(options=(0,))) == Choice(options=(SPLIT, SPLIT, SPLIT))


def test_what_a_group_forbids_is_a_gather_inside_and_costs_what_the_gather_would_have_saved() -> None:
    # the last member cannot split, and a gather is cheaper than to work on the whole before it
    problem = chain((40, 1), (1, 100))
    assert optimum(problem) == pytest.approx(1 + 10 + 1)
    assert optimum(group(problem, [[0, 1]]).problem) == pytest.approx(40 + 1)
    untold = replace(problem, tensors=tuple(Tensor(**known(t)) for t in problem.tensors))
    assert optimum(group(untold, [[0, 1]]).problem) == pytest.approx(1 + 10 + 1)


def test_where_no_joint_option_is_free_a_group_is_divided() -> None:
    problem = chain((4, 1), (4, 1))
    only = FreeTensor(
        **{**known(problem.tensors[0]), "wanted": ((WANTS_WHOLE, WANTS_WHOLE),)}, free={REPLICATED: 0, SPLIT: 0}
    )
    grouped = group(replace(problem, tensors=(only,)), [[0, 1]])
    assert grouped.divided == ("v0",)
    assert [g.members for g in grouped.groups] == [(0,), (1,)]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_tensor_that_a_group_makes_and_reads_is_gathered_once_for_all_its_readers(solver: str) -> None:
    # v0 makes, v1 reads in the group, v2 and v3 outside: both outside want the whole, for one gather
    problem = Problem(
        variables=tuple(
            variable(f"v{i}", (whole, 0.0), (split, 0.0))
            for i, (whole, split) in enumerate(((40, 1), (40, 1), (1, 40), (1, 40)))
        ),
        tensors=(gathered("t", 0, 1, 2, 3),),
    )
    grouped = group(problem, [[0, 1]])
    (tensor,) = grouped.problem.tensors
    assert tensor.producer in tensor.consumers
    solution = solve(grouped.problem, solver)
    assert solution.score.seconds == pytest.approx(1 + 1 + 10 + 1 + 1)
    assert grouped.expand(solution.choice) == Choice(options=(SPLIT, SPLIT, REPLICATED, REPLICATED))


def test_an_option_that_costs_no_more_but_for_bytes_is_left_out_only_without_a_limit() -> None:
    fast_and_large, slow_and_small = (1.0, 100.0), (2.0, 1.0)
    problem = Problem(variables=(variable("v", fast_and_large, slow_and_small), variable("w", (0.0, 0.0))))
    assert group(problem, [[0, 1]]).problem.option_count == 1
    limited = group(problem, [[0, 1]], limited=True)
    assert limited.problem.option_count == 2
    assert solve(limited.problem, "dp", bytes_limit=50).score.seconds == 2.0


def test_a_grouped_problem_prints_and_survives_a_file() -> None:
    grouped = group(chain((4, 1), (4, 1), (1, 9)), [[0, 1]]).problem
    told = through_a_file(grouped)
    assert (told.variables, str(told)) == (grouped.variables, str(grouped))
    assert [tensor.costs for tensor in told.tensors] == [tensor.costs for tensor in grouped.tensors]
    assert "v0 .. v1" in str(grouped)
    assert "2 x option 1" in str(grouped)


def test_bad_groups_are_refused() -> None:
    problem = chain((4, 1), (4, 1))
    with pytest.raises(ValueError, match=r"variable v0 is in 2 groups: a variable can be in one"):
        group(problem, [[0, 1], [0]])
    rng = random.Random(0)
    while not problem.repeats:
        problem = random_problem(rng)
    with pytest.raises(ValueError, match=r"variable v\d joins a repeat to its neighbours: leave it out of the groups"):
        group(problem, [problem.repeats[0].left])


# ---- at random ----------------------------------------------------------------------------------------


def random_groups(rng: random.Random, problem: Problem, apart: set[int]) -> list[list[int]]:
    """Some of the variables in up to two groups."""
    groups: list[list[int]] = [[], []]
    for v in range(len(problem.variables)):
        where = rng.randrange(3)
        if where < 2 and v not in apart:
            groups[where].append(v)
    return [members for members in groups if members]


def random_grouping(rng: random.Random, problem: Problem) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Groups of a problem and of the bodies of its repeats."""
    borders = {v for repeat in problem.repeats for v in (*repeat.left, *repeat.right)}
    bodies = [random_groups(rng, r.body, {*r.body_left, *r.body_right}) for r in problem.repeats]
    return random_groups(rng, problem, borders), bodies


def in_groups(rng: random.Random, problem: Problem, limited: bool) -> Grouped:
    most = rng.choice((1, 4, 1000))
    return group(problem, *random_grouping(rng, problem), limited=limited, options_most=most)


def in_blocks(rng: random.Random, problem: Problem, limited: bool) -> Grouped:
    made = widened(problem, limited=limited)
    assert made.problem.option_count <= problem.option_count
    return made


GROUPINGS = {"groups": in_groups, "blocks": in_blocks}
"""Where everything is free groups lose nothing; blocks never do."""


@pytest.mark.parametrize("grouping", GROUPINGS)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), solver=st.sampled_from(("dp", "ilp")))
def test_nothing_is_lost(grouping: str, seed: int, solver: str) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    expected = optimum(problem)
    try:
        grouped = GROUPINGS[grouping](rng, problem, False)
        solution = solve(grouped.problem, solver)
    except Infeasible:
        assert math.isinf(expected)
        return
    assert solution.score.objective == pytest.approx(expected, rel=1e-9)
    assert evaluate(problem, grouped.expand(solution.choice)).objective == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("grouping", GROUPINGS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_lost_under_a_limit(grouping: str, seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, blocked=0)
    grouped = GROUPINGS[grouping](rng, problem, True)
    limit = solve(problem, "exhaustive").score.bytes * rng.uniform(0.5, 1.0)
    assert optimum(grouped.problem, limit) == pytest.approx(optimum(problem, limit), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_group_has_the_best_of_all_assignments_without_communication_inside(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, depth=0)
    # a variable that reads what it makes is a group of one
    tensors = [
        FreeTensor(
            **{
                **known(tensor),
                "wanted": tuple(
                    (0,) * len(masks) if consumer == tensor.producer else masks
                    for consumer, masks in zip(tensor.consumers, tensor.wanted, strict=True)
                ),
            },
            free={made: rng.choice((0, 1, 3, 7)) for made in range(3)},
        )
        for tensor in problem.tensors
    ]
    problem = replace(problem, tensors=tuple(tensors))
    groups = random_groups(rng, problem, set())
    try:
        grouped = group(problem, groups, options_most=1000)
        found = optimum(grouped.problem)
    except Infeasible:
        found = math.inf
    else:
        if grouped.divided:
            assert found >= optimum(problem) * (1 - 1e-9)
            return
    assert found == pytest.approx(min(costs_without_communication(problem, groups), default=math.inf), rel=1e-9)


def costs_without_communication(problem: Problem, groups: list[list[int]]) -> list[float]:
    """Of every feasible assignment in which no group communicates inside."""
    costs = []
    for options in product(*(range(len(v.options)) for v in problem.variables)):
        if all(state_of(t, options) in t.costs and is_free(t, options, groups) for t in problem.tensors):
            costs.append(evaluate(problem, Choice(options=options)).objective)
    return costs


def is_free(tensor: Tensor, options: tuple[int, ...], groups: list[list[int]]) -> bool:
    inside = next((members for members in groups if tensor.producer in members), [tensor.producer])
    wanted = 0
    for consumer, masks in zip(tensor.consumers, tensor.wanted, strict=True):
        wanted |= masks[options[consumer]] if consumer in inside else 0
    assert isinstance(tensor, FreeTensor)
    return wanted & ~tensor.free[tensor.produced[options[tensor.producer]]] == 0


# ---- models -------------------------------------------------------------------------------------------

CLUSTERS = ("dgx-h100", "a100-pcie", "local")
ON = [
    *(("gpt2", {"tp": 4}, cluster) for cluster in CLUSTERS),
    *(("mlp with loss_fn", mesh, cluster) for mesh in ({"tp": 4}, {"dp": 2, "tp": 4}) for cluster in CLUSTERS),
]
"""More of them, and wider ones, in benchmarks/levels.py."""
PRICES = (0.0, 0.2, 20.0)
"""Of memory, times the seconds of the fastest plan over its bytes."""

planner = planners(case)


def variables(problem: Problem) -> int:
    return len(problem.variables) + sum(variables(repeat.body) for repeat in problem.repeats)


@pytest.mark.parametrize(("name", "mesh", "cluster"), ON)
def test_blocks_lose_nothing_and_are_fewer(name: str, mesh: dict[str, int], cluster: str) -> None:
    space = planner(name, mesh).on(mesh, cluster).space
    fastest = solve(operator_level(space, None), "dp").score
    for limited in (False, True):
        problem = operator_level(space, 1.0 if limited else None)
        made = widened(problem, limited=limited).problem
        assert variables(made) < (0.95 if limited or len(mesh) > 1 else 0.75) * variables(problem)
        assert made.option_count < (0.95 if limited else 0.85) * problem.option_count
        for price in PRICES if limited else PRICES[:1]:
            price *= fastest.seconds / fastest.bytes
            there, here = (solve(priced_at(p, price), "dp") for p in (problem, made))
            assert here.score.objective == pytest.approx(there.score.objective, rel=1e-9)


def test_a_block_has_communication_inside_where_that_pays() -> None:
    quiet, moving = (widened(chain(*seconds)).problem.variables for seconds in (((40, 1), (40, 1)), ((40, 1), (1, 40))))
    assert [v.seconds for v in quiet] == [(1 + 1,)]
    assert [v.seconds for v in moving] == [(1 + 10 + 1,)]


@pytest.mark.parametrize("level", ["block", "cfp"])
def test_a_plan_of_a_level_runs(level: Level) -> None:
    made = planner("llama", {"tp": 4})
    free, found = best(made.space, "operator"), best(made.space, level)
    lost = found.score.objective / free.score.objective - 1
    assert abs(lost) < 1e-9 if level == "block" else -1e-9 < lost < 0.05
    assert_same(simulated(codegen(made.space, found.assignment), made.captured, case("llama")), eager(case("llama")))


def test_parallel_blocks_hold_operators_with_their_backward() -> None:
    space = planner("llama of 4 layers", {"tp": 4}).space
    found = blocks(space.graph, 4, merge=False)
    for region in space.regions():
        sites = list(region.sites.values())
        groups = [[sites[number] for number in members] for members in block_groups(space, region, found)]
        members = [site for group in groups for site in group]
        assert len({site.name for site in members}) == len(members)
        assert all(site.kind == "op" for site in members)
        assert any(len({site.backward for site in group}) == 2 for group in groups)
