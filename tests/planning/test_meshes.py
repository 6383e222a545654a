"""The mesh that is chosen is the best of all, and its plan runs."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import models
import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.planning.meshes import in_stages, may_gain, meshes, promising
from autopar.planning.planner import Planner
from autopar.planning.request import Request
from autopar.solve.effort import EFFORT


def test_meshes_are_all_ordered_products() -> None:
    assert meshes(1) == [{"a": 1}]
    assert meshes(7) == [{"a": 7}]
    assert [tuple(m.values()) for m in meshes(12, 2)] == [(12,), (2, 6), (3, 4), (4, 3), (6, 2)]
    for devices, most in ((8, 3), (60, 3), (1024, 3), (1024, 4)):
        found = [tuple(m.values()) for m in meshes(devices, most)]
        assert len(set(found)) == len(found) and all(math.prod(m) == devices and len(m) <= most for m in found)
    # 2^10 in at most three parts, in order
    assert len(meshes(1024, 3)) == sum(math.comb(9, parts - 1) for parts in (1, 2, 3))


@functools.cache
def planner(name: str, cluster: str) -> Planner:
    case = models.case(name)
    return Planner(case.model, {"a": 8}, case.args, case.kwargs, loss_fn=case.loss_fn, cluster=cluster)


@pytest.mark.parametrize("cluster", ["dgx-h100", "local"])
@pytest.mark.parametrize("solver", ["dp", "megatron"])
def test_no_mesh_has_a_better_plan(cluster: str, solver: str) -> None:
    made = planner("mlp with loss_fn", cluster)
    candidates = meshes(8)
    best = made.over(candidates, Request(solver=solver))
    each = {str(mesh): made.on(mesh, made.cluster).plan(solver=solver).seconds for mesh in candidates}
    assert best.seconds <= min(each.values()) * (1 + 1e-6), each
    assert best.seconds == pytest.approx(each[str(dict(best.mesh))])


def test_a_plan_on_a_chosen_mesh_runs() -> None:
    case = models.case("mlp with loss_fn")
    plan = autopar.plan(case.model, 6, case.args, case.kwargs, loss_fn=case.loss_fn, cluster="local")
    assert math.prod(plan.mesh.values()) == 6
    made = Planner(case.model, plan.mesh, case.args, case.kwargs, loss_fn=case.loss_fn)
    models.assert_same(models.simulated(made.program(plan), made.captured, case), models.eager(case))


def test_auto_takes_all_devices_of_the_cluster() -> None:
    machine: Cluster = named_cluster("a100-nvlink-pairs", device_type="cpu")
    case = models.case("mlp with loss_fn")
    plan = autopar.plan(case.model, "auto", case.args, case.kwargs, loss_fn=case.loss_fn, cluster=machine)
    assert math.prod(plan.mesh.values()) == machine.devices


def test_a_search_says_what_it_covers_and_warns_of_a_batch_too_small_for_it(caplog: pytest.LogCaptureFixture) -> None:
    made = planner("mlp with loss_fn", "dgx-h100")
    rows = made.captured.input_leaves[0].meta.shape[0]  # type: ignore[union-attr]
    caplog.set_level(logging.DEBUG, "autopar")
    made.over([{"a": rows}], Request(solver="ddp"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    made.over([{"a": 2 * rows}, {"a": 2, "b": rows}], Request(solver="megatron"))
    assert f"searching 2 meshes of {2 * rows} devices" in {getattr(record, "doing", "") for record in caplog.records}
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert f"batch has {rows} rows, and the search is over meshes of {2 * rows} devices, of which 2 or more" in warning


def test_the_best_few_meshes_at_a_quick_look_are_promising() -> None:
    """A look may be off for the best; each knows what it must undercut to matter."""
    candidates = meshes(16)
    true = {tuple(mesh.items()): 1.0 + 0.1 * number for number, mesh in enumerate(candidates)}
    known: list[float] = []

    def look(mesh: Mapping[str, int], below: float) -> float:
        assert below == (sorted(known)[EFFORT.mesh_finalists - 1] if len(known) >= EFFORT.mesh_finalists else math.inf)
        known.append(true[tuple(mesh.items())] + (0.15 if mesh == candidates[0] else 0.0))
        return known[-1]

    assert promising(candidates, look) == [candidates[1], candidates[0], candidates[2]]
    assert len(known) == len(candidates)


# ---- stages of a pipeline


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3, 4), (6, 4), (5,), (4, 2, 2), (1,)])
def test_stages_take_the_place_of_outermost_axes(sizes: tuple[int, ...]) -> None:
    mesh = dict(zip("abc", sizes, strict=False))
    found = list(in_stages(mesh, 8))
    assert all(math.prod(each.values()) == math.prod(sizes) for each in found)
    assert [each["pp"] for each in found] == [n for n in (2, 4, 8) if math.prod(math.gcd(n, s) for s in sizes) >= n]
    for each in found:
        assert next(iter(each)) == "pp" and all(size > 1 for size in each.values())
        inner = [axis for axis in each if axis != "pp"]
        assert inner == sorted(inner)
    assert len(list(in_stages(mesh, 1))) == 0


class Deep(nn.Module):
    """Layers whose weights are larger than what goes from one to the next."""

    def __init__(self, width: int = 256, layers: int = 8, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        y: torch.Tensor = self.norm(x)
        return y.square().mean()


BATCH = (torch.zeros(256, 256),)

SLOW = str(Path(__file__).parents[2] / "benchmarks" / "lab" / "2x2-slow.toml")
"""Four devices, between which links are slow beside what they compute."""


def test_stages_are_chosen_where_they_are_quicker(tmp_path: Path) -> None:
    model = Deep()
    plan, flat = autopar.plan(model, 4, BATCH, cluster=SLOW), autopar.plan(model, 4, BATCH, cluster=SLOW, solver="dp")
    assert plan.pipeline is not None and plan.mesh["pp"] > 1 and plan.provenance is not None
    assert plan.provenance.winner == "search in stages" and flat.pipeline is None
    (without,) = (c for c in plan.provenance.candidates if c.name == "search without stages")
    assert plan.seconds < without.seconds <= flat.seconds * (1 + 1e-6)
    assert "in stages; without stages a step takes" in " ".join(str(plan).split())
    assert plan.explain("layers.0").sections  # the plan has its model, in its micro-batches
    plan.save(tmp_path / "plan.json")
    again = autopar.read_plan(tmp_path / "plan.json", model, BATCH)
    assert again.seconds == plan.seconds and again.pipeline == plan.pipeline
    trials = autopar.fit(model, [4], BATCH, cluster=SLOW, strategies=["auto", "ddp"]).trials
    assert trials[0].mesh == dict(plan.mesh) and trials[0].seconds == plan.seconds
    assert sum("pp" in trial.mesh for trial in trials) == 2


def test_stages_that_are_slower_are_said() -> None:
    plan = autopar.plan(Deep(512, layers=4), 8, (torch.zeros(64, 512),), cluster="dgx-h100")
    assert plan.pipeline is None and plan.provenance is not None and may_gain(plan)
    (staged,) = (c for c in plan.provenance.candidates if c.name == "search in stages")
    assert staged.seconds >= plan.seconds and "; in stages a step takes" in " ".join(str(plan).split())


def test_what_takes_no_stages_is_planned_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    plan = autopar.plan(Deep(norm=True), 4, BATCH, cluster=SLOW)
    assert plan.pipeline is None and may_gain(plan)
    assert "pp" not in plan.mesh and any("mesh {'pp': 2" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("given", [0, -8, True, "all", 2.0])
def test_what_is_no_number_of_devices_is_said(given: object) -> None:
    case = models.case("mlp with loss_fn")
    with pytest.raises(ValueError, match="give axis names with sizes, a number of devices, or 'auto'"):
        autopar.plan(case.model, given, case.args, case.kwargs, loss_fn=case.loss_fn)  # type: ignore[arg-type]


def test_where_no_mesh_fits_the_limit_the_error_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"no plan fits in 1000 B, .*\. The smallest peak"):
        planner("mlp with loss_fn", "local").over(meshes(4), Request(memory_limit_bytes=1000.0))
