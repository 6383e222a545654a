"""The lower bound on the step: no program of any assignment computes for less, site by site and in all, and some take
no more."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import models
import plans
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given
from hypothesis import strategies as st
from models import captured
from pairwise import pairwise
from torch import nn

from autopar import Precision
from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Device, Operators
from autopar.cost.streams import timeline
from autopar.cost.timeline import COMPUTE
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.planning.bound import least_seconds_of_sites, least_step_seconds, without_falling_efficiency
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.request import Gathers, Request
from autopar.solve.effort import Effort

GRID = {"dp": 2, "tp": 2}
MESHES = ({"a": 4}, GRID, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2})
NAMES = ("gpt2", "llama tied", "mlp with loss_fn")
MIXED = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = Precision(reduce_dtype=torch.bfloat16)
ROUNDING = 1 + 1e-9


class Weighted(nn.Module):
    """Its weight is divided by a sum over all of it: that leads to operators which run once for all micro-batches where
    what is gathered is held. It is used twice, so its gradient is a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight / (1 + self.weight.square().sum())
        return (F.relu(x @ weight) @ self.weight * self.head).square().mean()


def places(space: Space) -> Iterator[tuple[Site, str]]:
    """Every operator that is decided, with the name of its node in each copy of its layer."""
    nodes = space.graph.nodes
    firsts = [[{}]]
    for repeat in space.repeats:
        copies = (zip(repeat.copies[0], copy, strict=True) for copy in repeat.copies)
        firsts.append([{nodes[first].name: nodes[here].name for first, here in copy} for copy in copies])
    for region, copies in zip(space.regions(), firsts, strict=True):
        for site in region.sites.values():
            for renamed in copies if site.kind == "op" else ():
                yield site, renamed.get(site.name, site.name)


def computed(planner: Planner, assignment: Assignment) -> Mapping[str, float]:
    """Name of a graph's node -> the seconds of what a rank computes for it in a step."""
    seconds: dict[str, float] = defaultdict(float)
    for part in planner.steps.parts(planner.writer.written(assignment)):
        serves = {name: node.serves for node in part.program.nodes for name in node.outputs if name}
        for event in timeline(part.program, planner.space.cluster, planner.operators).events:
            if event.stream == COMPUTE:
                seconds[serves[event.name]] += part.times * event.seconds
    return seconds


def check(planner: Planner, assignment: Assignment) -> None:
    """Of an assignment: every operator in every copy, and the step."""
    space, seconds = planner.space, computed(planner, assignment)
    least, operators = least_seconds_of_sites(space), list(places(space))
    assert sum(least[site.key] > 0 for site, _ in operators) >= 5
    for site, name in operators:
        assert least[site.key] <= seconds[name] * ROUNDING, f"{name}, {site.rule}"
    assert 0 < least_step_seconds(space) <= planner.evaluate(assignment).seconds * ROUNDING


@pytest.mark.parametrize(("name", "mesh", "cluster", "seed"), pairwise(NAMES, MESHES[1:], (None, "dgx-h100"), (0, 1)))
def test_no_operator_takes_less(name: str, mesh: dict[str, int], cluster: str | None, seed: int) -> None:
    planner = captured(models.case, name).on(mesh, cluster)
    check(planner, plans.random_assignment(planner.space, seed))


@pytest.mark.parametrize("name", ["Mixtral", "examples/unet.py"])
def test_nor_do_those_of_experts_and_images(name: str) -> None:
    made = zoo.ZOO[name](2)
    planner = Planner(made.model, GRID, made.args, made.kwargs, loss_fn=made.loss_fn)
    check(planner, plans.random_assignment(planner.space, 0))


@functools.cache
def training(name: str, precision: Precision, micro_batches: int) -> Planner:
    if name == "weighted":
        made, args, kwargs, loss_fn = Weighted(), (torch.randn(8, 32),), {}, None
    else:
        case = models.case(name)
        made, args, kwargs, loss_fn = case.model, case.args, case.kwargs, case.loss_fn
    asked = Request(precision=precision, micro_batches=micro_batches)
    return Planner(made, GRID, args, kwargs, loss_fn=loss_fn, request=asked)


@pytest.mark.parametrize(
    ("name", "precision", "micro_batches", "gathers", "seed"),
    pairwise(
        ("gpt2", "weighted", "llama of 4 layers"), (Precision(), MIXED, NARROW), (1, 2, 4), ("each", "once"), range(4)
    ),
)
def test_nor_in_steps_of_several_micro_batches_and_dtypes(
    name: str, precision: Precision, micro_batches: int, gathers: Gathers, seed: int
) -> None:
    planner = training(name, precision, micro_batches).gathering(gathers)
    check(planner, plans.random_assignment(planner.space, seed))


@pytest.mark.parametrize("solver", ["auto", "dp", *PRESETS])
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_no_plan_is_below_it(mesh: dict[str, int], solver: str) -> None:
    """Those of all solvers on a mesh have one bound; what was proved of a preset is beside it."""
    planner = captured(models.case, "llama of 4 layers").on(mesh, "dgx-h100")
    plan = planner.plan(solver=solver)
    assert plan.lower_bound_seconds == least_step_seconds(planner.space) <= plan.seconds
    assert plan.gap is not None and 0 <= plan.gap < 1
    assert plan.objective_bound_seconds <= plan.objective_seconds * ROUNDING
    assert (plan.objective_gap is not None) == (solver in PRESETS)


def test_nor_are_plans_within_a_limit() -> None:
    planner = captured(models.case, "gpt2").on(GRID, "dgx-h100")
    free = planner.plan()
    plan = planner.plan(memory_limit_bytes=0.6 * free.bytes)
    assert free.lower_bound_seconds == plan.lower_bound_seconds <= min(plan.seconds, free.seconds)


def test_one_rank_computes_just_that() -> None:
    """Where nothing is communicated, made from nothing or expanded, the bound is the step."""
    planner = captured(models.case, "mlp with loss_fn").on({"a": 1}, "dgx-h100")
    plan = planner.plan()
    assert plan.seconds == pytest.approx(plan.lower_bound_seconds, rel=1e-9) and plan.gap == pytest.approx(0, abs=1e-9)


def test_products_that_are_split_both_ways_take_their_share() -> None:
    """A product of 8192 x 8192 on 4 x 4 ranks: a sixteenth of the arithmetic, with all of it at the rate of that."""
    planner = Planner(nn.Linear(8192, 8192, bias=False, device="meta"), {"a": 4, "b": 4}, (torch.zeros(8192, 8192),))
    planner = planner.on({"a": 4, "b": 4}, "dgx-h100")
    space = planner.space
    products = [site for site in space.rest.sites.values() if site.rule is not None and site.rule.contraction]
    device, flops = space.cluster.device, 2 * 8192**3 / 16
    assert products
    for site in products:
        arithmetic = device.compute_seconds(flops, torch.float32)
        assert least_seconds_of_sites(space)[site.key] == pytest.approx(device.seconds_per_op + arithmetic)


def test_an_effort_that_expands_nothing_bounds_less() -> None:
    space = captured(models.case, "gpt2").on(GRID, "dgx-h100").space
    none, some = (least_step_seconds(space, Effort(bound_options=most)) for most in (0, 5000))
    assert 0 < none < some


def test_measured_operators_have_no_bound() -> None:
    space = captured(models.case, "gpt2").on(GRID, None).space
    device = replace(space.cluster.device, operators=Operators())
    assert least_step_seconds(replace(space, cluster=replace(space.cluster, device=device))) == 0.0


def test_layers_of_one_name_and_two_widths_have_a_bound() -> None:
    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    layers = nn.Sequential(*(Layer(16) for _ in range(3)), nn.Linear(16, 8), *(Layer(8) for _ in range(3)))
    made = Planner(layers, {"a": 2, "b": 2}, (torch.randn(8, 16),), loss_fn=torch.sum)
    names = [region.name for region in made.space.regions()]
    assert len(names) == 3 and names[1] == names[2]
    check(made, plans.random_assignment(made.space, 0))


curves = st.lists(st.floats(0.01, 4.0), min_size=1, max_size=5).map(
    lambda values: tuple((10.0 ** (3 + i), value) for i, value in enumerate(values))
)
sizes = st.floats(1.0, 1e9)


@given(efficiency=curves, memory_efficiency=curves, parts=st.lists(st.tuples(sizes, sizes), min_size=2, max_size=8))
def test_parts_take_no_less_than_the_whole(
    efficiency: tuple[tuple[float, float], ...],
    memory_efficiency: tuple[tuple[float, float], ...],
    parts: list[tuple[float, float]],
) -> None:
    """On a device that is quicker with small tensors, which fit into caches, and on any other."""
    given_device = replace(named_cluster("dgx-h100").device, efficiency=efficiency, memory_efficiency=memory_efficiency)
    device = without_falling_efficiency(given_device)

    def seconds(device: Device, flops: float, moved: float) -> float:
        return device.roofline_seconds(flops, moved, torch.bfloat16)

    whole = [sum(part) for part in zip(*parts, strict=True)]
    assert seconds(device, *whole) <= sum(seconds(device, *part) for part in parts) * ROUNDING
    for part in parts:
        assert seconds(device, *part) <= min(seconds(device, *whole), seconds(given_device, *part)) * ROUNDING


def test_files_from_before_have_a_bound_of_the_objective() -> None:
    plan = captured(models.case, "mlp with loss_fn").on(GRID, None).plan()
    written = plan.to_json()
    assert Plan.from_json(written) == plan
    before = {name: value for name, value in written.items() if name != "objective_bound_seconds"}
    read = Plan.from_json({**before, "lower_bound_seconds": 0.5 * plan.objective_seconds})
    assert read.gap is None and read.objective_gap == pytest.approx(0.5)


def test_the_page_says_both() -> None:
    """On one axis what the solver proved of the objective stands beside the bound on the step; on two there is none."""
    planners = (captured(models.case, "llama of 4 layers").on(mesh, "dgx-h100") for mesh in MESHES[:2])
    of_one, of_two = (planner.plan(cost="serial") for planner in planners)
    for plan in (of_one, of_two):
        page = " ".join(plan.text().split())
        assert f"within {plan.gap:.1%} of the compute floor (" in page
        assert ("without overlap, as proved" in page) == (plan is of_one)
