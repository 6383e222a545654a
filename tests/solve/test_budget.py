"""Every solve and every search ends: where the effort is spent, a cheaper way answers, and the bound stays honest."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.passes.space.problem import ProblemBuilder
from autopar.planning.options import joint, resting_bytes
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.request import Request
from autopar.planning.search import Search
from autopar.solve.effort import EFFORT, Effort, Meter, Purse
from autopar.solve.elimination import FILL_WEIGHTS, greedy_order, schedule
from autopar.solve.problem import UNIONS_MOST, Infeasible, TooWide, unions_of


def planner(mesh: dict[str, int] | None = None, effort: Effort = EFFORT) -> Planner:
    return _captured().on(mesh or {"a": 2, "b": 2}, None, effort)


@cache
def _captured() -> Planner:
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 7), nn.Tanh())
    return Planner(model, {"a": 2}, (torch.randn(6, 6),), loss_fn=torch.sum)


class Tangle(nn.Module):
    """Each step reads several before it, so that elimination makes wide tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.first(x)]
        for step in range(1, 12):
            found.append(torch.tanh(sum(found[back] for back in range(max(0, step - 4), step))))
        return found[-1].square().mean()


SPENT = {
    "elimination": Effort(elimination_entries=1),
    "message passing too": Effort(elimination_entries=1, message_entries=0),
    "the integer program too": Effort(elimination_entries=1, message_entries=0, program_columns=0),
    "its nodes": Effort(elimination_entries=1, message_entries=0, program_work=0, program_iterations=1),
}


@pytest.mark.parametrize("spent", SPENT)
@pytest.mark.parametrize("solver", ["dp", "ilp"])
def test_a_spent_effort_still_gives_a_plan(spent: str, solver: str) -> None:
    best = planner().plan(cost="serial")
    short = planner(effort=SPENT[spent])
    plan = short.plan(cost="serial", solver=solver)
    assert plan.objective_bound_seconds <= best.objective_seconds <= plan.objective_seconds * (1 + 1e-9)
    assert short.plan(cost="serial", solver=solver).digest == plan.digest
    assert short.program(plan).forward


@pytest.mark.parametrize("work", [0.0, 1e6])
@pytest.mark.parametrize("solver", ["dp", "ilp", *PRESETS])
def test_a_search_whose_work_is_spent_answers(work: float, solver: str) -> None:
    best = planner().plan(cost="serial", solver=solver)
    short = planner(effort=Effort(work=work))
    plan = short.plan(cost="serial", solver=solver)
    assert plan.objective_bound_seconds <= best.objective_seconds * (1 + 1e-9)
    assert best.objective_seconds <= plan.objective_seconds * (1 + 1e-9)
    assert short.program(plan).forward


@pytest.mark.parametrize("work", [0.0, 3e7])
def test_a_spent_search_gives_the_same_plan_in_one_process_and_in_two(work: float) -> None:
    made = Planner(Tangle(), {"a": 2}, (torch.randn(8, 8),))
    digests = set()
    for most in (1, 10**9):  # joint options from which on parts are worth a process of their own
        effort = Effort(work=work, apart_options=most)
        digests.add(made.on({"a": 2, "b": 2}, None, effort).plan().digest)
    assert len(digests) == 1


@pytest.mark.parametrize("work", [0.0, 1e6])
def test_a_spent_search_keeps_the_memory_limit_or_says_what_needs_the_least(work: float) -> None:
    mesh = {"a": 2, "b": 3}
    limit = 0.95 * planner(mesh).plan().bytes
    made = planner(mesh, Effort(work=work))
    assert made.plan(memory_limit_bytes=limit).bytes <= limit
    with pytest.raises(Infeasible, match=r"no plan fits in 1 B, .*\. The smallest peak"):
        made.plan(memory_limit_bytes=1)


def test_what_was_solved_with_more_work_is_not_taken_for_what_less_finds() -> None:
    made = planner()

    def found(*works: float) -> list[tuple[float, bool]]:
        search = Search(ProblemBuilder(made.space), "dp")
        whole = {name: site.choices[2][:2] for name, site in search.sites.items()}
        allowed = {n: joint(search.sites[n], [c, c], None) for n, c in whole.items()}
        allowed = {n: [c for c in cs if made.space.option(search.sites[n], c) is not None] for n, cs in allowed.items()}
        solved = [search.solve(allowed, "dp", purse=Purse(left=work)) for work in works]
        return [(one.score.objective, one.cut_at is not None) for one in solved]

    full, none = found(math.inf)[0], found(0.0)[0]
    assert not full[1]
    assert none[1]
    assert found(math.inf, 0.0, math.inf) == [full, none, full]


def naive_order(sizes: list[int], scopes: list[tuple[int, int]], most: float = math.inf) -> list[int]:
    """Min-fill as its definition says: every node's fill is computed again after each elimination. Nodes whose tables
    have more than `most` entries wait."""
    near = {
        node: {other for scope in scopes if node in scope for other in scope} - {node} for node in range(len(sizes))
    }
    logs = [math.log2(size) for size in sizes]
    order = []
    while light := [node for node in near if math.prod(sizes[n] for n in (node, *near[node])) <= most]:

        def key(node: int) -> tuple[float, int]:
            pairs = itertools.combinations(sorted(near[node]), 2)
            fill = sum(logs[a] * logs[b] for a, b in pairs if b not in near[a])
            return round(fill + FILL_WEIGHTS[0] * (logs[node] + sum(logs[a] for a in near[node])), 6), node

        node = min(light, key=key)
        order.append(node)
        neighbours = near.pop(node)
        for other in neighbours:
            near[other] = (near[other] | neighbours) - {node, other}
    return order


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_an_order_of_elimination_takes_the_least_fill_each_time(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 12))
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 4, 8]), min_size=count, max_size=count))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] != pair[1])
    scopes = data.draw(st.lists(pairs, max_size=3 * count))
    most = data.draw(st.sampled_from([math.inf, 16, 64, 200]))
    _, order = greedy_order(sizes, scopes, set(), FILL_WEIGHTS[0], [1.0] * count, most=most)
    assert order == naive_order(sizes, scopes, most)


def test_an_order_around_hubs_takes_no_longer_than_one_without() -> None:
    """Two nodes that share a table with each of many are not weighed again and again."""
    count = 6000
    chain = [(node, node + 1) for node in range(2, count - 1)]
    hubs = [(hub, node) for hub in (0, 1) for node in range(2, count)]
    sizes = [2] * count
    _, order = greedy_order(sizes, [*chain, *hubs], set(), FILL_WEIGHTS[0], [1.0] * count, most=64)
    assert order is not None
    assert sorted(order) == list(range(count)), "once their neighbours are gone, hubs are light, too"


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "megatron", "atp"])
def test_no_plan_of_a_preset_needs_less_than_its_parameters_at_rest(preset: str) -> None:
    """That bound is what excludes a preset from a search within a limit."""
    made = planner()
    allowed = made.preset(preset)
    best = made.search(Request(memory_limit_bytes=math.inf)).run(allowed)
    needed = resting_bytes(made.space, allowed)
    assert 0 < needed <= made.evaluate(best.assignment).bytes


def test_an_order_whose_tables_are_too_large_is_given_up_and_its_work_is_counted() -> None:
    sizes, scopes = (10,) * 8, tuple(itertools.combinations(range(8), 2))
    with pytest.raises(TooWide, match="a table of more than 1000 entries"):
        schedule(sizes, scopes, (), Meter(effort=Effort(table_entries=1000)))
    meter = Meter()
    with pytest.raises(TooWide, match="more than 1000 in all tables"):
        schedule(sizes, scopes, (), meter, entries=1000)
    assert meter.done > 0
    wide = Meter(effort=Effort(table_entries=10**8))
    assert schedule(sizes, scopes, (), wide, entries=1e9).largest == 10**8
    with pytest.raises(TooWide, match="no work is left"):
        schedule(sizes, scopes, (), Meter(most=0.0))


def test_a_meter_takes_what_is_left_and_remembers_what_it_refused() -> None:
    meter = Meter(most=10)
    assert meter.takes(10)
    assert not meter.is_cut
    assert not meter.takes(1)
    assert meter.is_cut
    assert meter.done == 10


def test_shares_of_a_search_are_all_of_its_work() -> None:
    with pytest.raises(AssertionError):
        replace(EFFORT, limit=0.5)


WIDE = {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seconds", [1e-6, 0.2])
def test_a_search_ends_with_its_seconds_and_says_so(seconds: float, limited: bool) -> None:
    """It keeps the limit, no preset is cheaper by the prices, and what it lacks is said."""
    on = planner(WIDE)
    limit = 0.7 * on.plan(memory_limit_bytes=math.inf).bytes if limited else math.inf
    plan = on.planned(Request(memory_limit_bytes=limit, effort=seconds))
    about = plan.provenance
    assert about is not None
    assert about.effort_seconds == seconds
    assert plan.bytes <= limit
    on.program(plan)
    if seconds == 1e-6:
        assert about.is_cut
        assert "effort=1e-06" in str(plan)
    if not limited:
        presets = [on.plan(solver=preset, memory_limit_bytes=math.inf) for preset in ("ddp", "fsdp")]
        assert all(
            plan.seconds <= preset.seconds or plan.objective_seconds <= preset.objective_seconds for preset in presets
        )


def test_a_search_without_seconds_says_nothing_of_them() -> None:
    plan = planner(WIDE).plan()
    assert plan.provenance is not None
    assert plan.provenance.effort_seconds is None
    assert not plan.provenance.is_cut
    assert "effort" not in str(plan)


def test_a_search_without_seconds_left_that_finds_nothing_says_that_it_was_cut() -> None:
    with pytest.raises(Infeasible, match=r"The search ended with the effort of 1e-06 s: give it more"):
        planner(WIDE).planned(Request(memory_limit_bytes=100, effort=1e-6))


def test_several_meshes_share_the_seconds_of_a_search() -> None:
    plan = planner(WIDE).over([{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}], Request(effort=1e-6))
    assert plan.provenance is not None and plan.provenance.is_cut


@pytest.mark.parametrize("effort", [0, -1.0, math.nan, True, "3"])
def test_an_effort_that_is_none_is_refused(effort: Any) -> None:
    with pytest.raises(ValueError, match=r"effort is .*: give the seconds after which the search ends"):
        Request(effort=effort)


def test_a_tensor_of_too_many_sets_of_layouts_is_too_wide_before_its_table_is_made() -> None:
    """As the loops of a decomposition make it, each of which reads a value in many layouts."""
    few = [tuple(1 << bit for bit in range(4))] * 4
    assert len(unions_of(few)) == 1 + 4 + 6 + 4  # of one, two, three and four layouts
    many = [tuple(1 << bit for bit in range(7 * reader, 7 * reader + 7)) for reader in range(8)]
    with pytest.raises(TooWide, match=f"over {UNIONS_MOST} sets of layouts: give them fewer options"):
        unions_of(many)
