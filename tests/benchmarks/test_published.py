"""Predictions beside published measurements: the rows, how well a step is known, and the memory that plans leave."""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.library import CLUSTERS, named_cluster, parse_cluster
from autopar.cluster.library.write import cluster_toml

ROOT = Path(__file__).parents[2]
TOLD: Mapping[str, Any] = tomllib.loads((ROOT / "benchmarks" / "published.toml").read_text())
ROWS = TOLD["row"]
PARAMETERS = {"llama3-8b": 8.03e9, "llama3-70b": 70.6e9, "llama2-7b": 6.74e9, "llama2-13b": 13.0e9, "mpt-7b": 6.65e9}


def planned(cluster: Any, **options: Any) -> autopar.Plan:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return autopar.plan(model, {"dp": 4}, (torch.zeros(512, 256),), loss_fn=torch.mean, cluster=cluster, **options)


def test_each_row_names_its_source_and_pins_what_it_measured() -> None:
    assert len(ROWS) >= 20
    for source in TOLD["sources"].values():
        assert source.keys() == {"where", "date", "hardware"}
    for row in ROWS:
        assert row["of"] in TOLD["sources"] and row["model"] in TOLD["models"] and row["cluster"] in CLUSTERS
        assert row["kernels"] in ("eager", "compiled")
        assert ("tokens_per_second" in row) != ("step_seconds" in row)
        assert row["rows"] % (row["micro_batches"] * row["mesh"]["dp"]) == 0
    assert len({(row["of"], row["entry"]) for row in ROWS}) == len(ROWS)
    assert TOLD["left_out"]


def test_models_of_rows_have_as_many_parameters_as_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from published_model import RECOMPUTE, Decoder

    assert {row["recompute"] for row in ROWS} <= set(RECOMPUTE)
    for name, count in PARAMETERS.items():
        with torch.device("meta"):
            model = Decoder(TOLD["models"][name], 16, "nothing")
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=0.01)


def test_a_step_has_the_range_of_its_cluster() -> None:
    cluster = replace(named_cluster("dgx-h100"), step_range=(0.9, 1.2))
    plan = planned(cluster)
    assert plan.range_seconds == pytest.approx((0.9 * plan.seconds, 1.2 * plan.seconds))
    assert list(plan.to_json()["range_seconds"]) == pytest.approx(plan.range_seconds)
    page = plan.text(width=120)
    assert " to " in next(line for line in page.splitlines() if line.strip().startswith("step"))
    assert parse_cluster(cluster_toml(cluster, "a test"), "text").step_range == (0.9, 1.2)
    assert planned(replace(cluster, step_range=None)).range_seconds is None


def test_default_plans_leave_headroom() -> None:
    cluster = named_cluster("dgx-h100")
    of_ddp = planned(cluster, solver="ddp").bytes
    usable = 1.02 * of_ddp
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=usable + 1e9, reserved_bytes=1e9))

    plan = planned(tight)
    assert plan.bytes <= 0.95 * usable and plan.headroom == 0.05
    assert plan.memory_limit_bytes == pytest.approx(usable)
    assert "to spare (headroom 5%)" in " ".join(plan.text(width=200).split())
    assert planned(tight, solver="ddp", headroom=0).bytes == of_ddp

    # where nothing fits but in the headroom, it is used, and the page warns
    brim = planned(tight, solver="ddp")
    assert 0.95 * usable < brim.bytes <= usable and brim.headroom == 0.0
    assert "of the memory limit is left" in " ".join(brim.text(width=200).split())


@pytest.mark.parametrize("headroom", [-0.1, 1.0, "5%", True])
def test_bad_headroom_is_refused(headroom: Any) -> None:
    with pytest.raises(ValueError, match=r"headroom is .*: give the part"):
        planned("dgx-h100", headroom=headroom)


def test_fusion_saves_of_operators_without_products_alone() -> None:
    device = named_cluster("dgx-h100").device
    fused = replace(device, fused_part=0.5)
    for flops, saved in ((0.0, 0.5), (1e12, 1.0)):
        seconds = [d.roofline_seconds(flops, 1e8, torch.bfloat16) for d in (device, fused)]
        assert seconds[1] == pytest.approx(saved * seconds[0])


def test_a_step_waits_for_the_slowest_of_its_devices() -> None:
    cluster = named_cluster("dgx-h100")
    cluster = replace(cluster, device=replace(cluster.device, spread=0.02))
    slowdowns = [cluster.among(ranks).device.slowdown for ranks in (1, 8, 128)]
    assert slowdowns == pytest.approx([1.0, 1.028, 1.052], abs=0.001)
    even = replace(cluster, device=replace(cluster.device, spread=0.0))
    assert planned(cluster).seconds > planned(even).seconds
    assert parse_cluster(cluster_toml(cluster, "a test"), "text").device.spread == 0.02
