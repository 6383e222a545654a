"""A plan fits by default: the limit is the device's memory less its reserve; and where nothing fits, what would."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import models
import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.library import CLUSTERS, named_cluster, parse_cluster
from autopar.cluster.library.write import cluster_toml
from autopar.cluster.machine import Cluster
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import Request, byte_count
from autopar.planning.texts import bytes_text
from autopar.solve.problem import Infeasible

MESH = {"a": 2, "b": 2}


def of_memory(usable_bytes: float, reserved_bytes: float | None = 100.0) -> Cluster:
    """A cluster whose devices have so much for a step."""
    cluster = named_cluster("dgx-a100")
    device = dataclasses.replace(
        cluster.device, memory_bytes=usable_bytes + (reserved_bytes or 0.0), reserved_bytes=reserved_bytes
    )
    return dataclasses.replace(cluster, device=device)


@functools.cache
def captured(batch: int, optimizer: str) -> Planner:
    """On one device: planners of a batch share its capture."""
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
        x = torch.zeros(batch, 256)
    return Planner(model, {"a": 1}, (x,), loss_fn=models.mean_square, optimizer=optimizer)


def planner(cluster: str | Cluster, batch: int = 256, mesh: dict[str, int] = MESH, optimizer: str = "adamw") -> Planner:
    named = named_cluster(cluster) if isinstance(cluster, str) else cluster
    return captured(batch, optimizer).on(mesh, named)


def decided(plan: Plan) -> Plan:
    """Without what says where the limit is from, and what the clock says."""
    return dataclasses.replace(plan, memory_limit_bytes=None, memory_limit_from="none", headroom=0.0, solve_seconds=0.0)


@pytest.mark.parametrize("solver", ["dp", "ddp"])
@pytest.mark.parametrize("cost", ["analytical", "serial"])
def test_a_plan_that_fits_is_that_without_a_limit(solver: str, cost: str) -> None:
    made = planner("dgx-h100")
    default = made.plan(solver=solver, cost=cost)
    lifted = made.plan(solver=solver, cost=cost, memory_limit_bytes=math.inf)
    assert decided(default) == decided(lifted)
    assert (default.memory_limit_bytes, default.memory_limit_from) == (74e9, "device")
    assert (lifted.memory_limit_bytes, lifted.memory_limit_from, lifted.headroom_bytes) == (None, "lifted", None)


@pytest.mark.parametrize("solver", ["dp", "fsdp"])
@pytest.mark.parametrize("cost", ["analytical", "serial"])
def test_a_plan_that_does_not_fit_is_planned_again_within_the_limit(solver: str, cost: str) -> None:
    free = planner("dgx-a100").plan(solver=solver, cost=cost)
    limit = 0.9 * free.bytes
    plan = planner(of_memory(limit)).plan(solver=solver, cost=cost)
    assert plan.bytes <= 0.95 * limit and plan.memory_limit_from == "device"
    given = planner(of_memory(limit)).plan(solver=solver, cost=cost, memory_limit_bytes=0.95 * limit)
    assert plan.seconds == pytest.approx(given.seconds) and given.memory_limit_from == "given"


def test_a_preset_that_does_not_fit_is_refused() -> None:
    free = planner("dgx-a100").plan(solver="ddp")
    with pytest.raises(Infeasible, match="less its reserve"):
        planner(of_memory(0.9 * free.bytes)).plan(solver="ddp")


def test_the_search_over_meshes_and_compare_keep_the_devices_memory() -> None:
    free = planner("dgx-a100").plan()
    cluster = of_memory(0.9 * free.bytes)
    made = planner(cluster)
    assert made.over([{"a": 4}, MESH], Request()).bytes <= 0.9 * free.bytes
    x = torch.zeros(256, 256, device="meta")
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    found = autopar.compare(model, MESH, (x,), loss_fn=models.mean_square, solvers=["dp", "fsdp"], cluster=cluster)
    assert all(isinstance(plan, Plan) and plan.bytes <= 0.9 * free.bytes for plan in found.results.values())


def test_a_cluster_without_a_figure_has_no_limit() -> None:
    plan = planner("local").plan()
    assert named_cluster("local").device.usable_bytes is None
    assert (plan.memory_limit_bytes, plan.memory_limit_from) == (None, "none")
    assert "no memory limit, since the cluster does not say" in plan.text(full=True)
    assert "the cluster names no memory to fit in" in str(plan)


def test_a_plan_says_limit_peak_and_headroom(tmp_path: Path) -> None:
    plan = planner("dgx-h100").plan()
    assert "memory limit 68.92 GiB (the device's memory less its reserve), headroom 68.9" in plan.text(full=True)
    assert "of 68.9 GiB a rank at the peak, 68.9 GiB to spare" in str(plan)
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["headroom_bytes"] == 74e9 - plan.bytes and data["memory_limit_from"] == "device"
    assert Plan.load(tmp_path / "plan.json") == plan
    del data["memory_limit_from"]
    assert Plan.from_json(data).memory_limit_from == "given"
    with pytest.raises(ValueError, match="memory_limit_from is 'moon': one of given, device, lifted, none"):
        Plan.from_json({**data, "memory_limit_from": "moon"})


# ------------------------------------------------------------------------------------- what would fit


def refused(made: Planner, limit: float) -> str:
    with pytest.raises(Infeasible) as caught:
        made.plan(cost="serial", memory_limit_bytes=limit)
    return str(caught.value)


def smallest(made: Planner) -> float:
    with pytest.raises(Infeasible) as caught:
        made.plan(cost="serial", memory_limit_bytes=1)
    return caught.value.smallest_bytes


def test_the_error_says_what_the_smallest_peak_consists_of() -> None:
    made = planner("dgx-a100")
    needs = smallest(made)
    message = refused(made, 0.9 * needs)
    told = re.search(r"The smallest peak that was reached is ([\d.]+ \w+) a rank, in \w+, `.*`.*: parameters ", message)
    assert told is not None and "optimizer (adamw) " in message and "temporaries " in message
    assert message.startswith(f"no plan fits in {bytes_text(0.9 * needs)}, the memory limit that was given.")
    assert "\n" not in message


def test_what_is_advised_fits() -> None:
    """More ranks, a smaller batch and a narrower optimizer, as the error says it."""
    made = planner("dgx-a100", batch=4096)
    limit = 0.8 * smallest(made)
    message = refused(made, limit)
    would = message.partition("It would fit with ")[2].partition(". It would not")[0]
    ranks, batch = (re.search(pattern, would) for pattern in (r"(\d+) ranks", r"a batch of (\d+)"))
    assert ranks is not None and batch is not None and "micro-batches of" in would
    wider = planner("dgx-a100", batch=4096, mesh={"a": int(ranks[1]) // 2, "b": 2})
    assert wider.plan(cost="serial", memory_limit_bytes=limit).bytes <= limit
    fewer = planner("dgx-a100", batch=int(batch[1]))
    assert fewer.plan(cost="serial", memory_limit_bytes=limit).bytes <= limit


def test_a_narrower_optimizer_is_advised_where_it_is_enough_and_only_there() -> None:
    made = planner("dgx-a100", batch=8, optimizer="adamw_fp32")
    needs = smallest(made)
    assert "the optimizer sgd_momentum instead of adamw_fp32 (about" in refused(made, 0.9 * needs)
    plain = planner("dgx-a100", batch=8, optimizer="sgd")
    assert "a narrower optimizer, since none keeps less than sgd" in refused(plain, 1)


def test_what_is_enough_together_is_said_last_and_fits() -> None:
    made = planner("a100-pcie", batch=512, optimizer="adamw_fp32", mesh={"a": 8})
    limit = 0.8 * smallest(made)
    told = re.search(r"\. Take a batch of (\d+) and the optimizer (\w+) together \(about .*\)\.$", refused(made, limit))
    assert told is not None
    changed = planner("a100-pcie", batch=int(told[1]), optimizer=told[2], mesh={"a": 8})
    assert changed.plan(cost="serial", memory_limit_bytes=1.01 * limit).bytes <= 1.01 * limit  # it said "about"


def test_what_is_not_enough_is_said() -> None:
    message = refused(planner("dgx-a100"), 1)
    assert "None of the usual remedies is enough alone. It would not fit with " in message
    assert "the optimizer sgd instead of adamw (about" in message
    assert re.search(r"\. Give a memory limit of at least [\d.]+ \w+, or a smaller model\.$", message)
    (ranks,) = re.findall(r"(\d+) ranks instead of 4 \(about ", message)
    assert int(ranks) <= 64 * 8
    full = planner("a100-pcie", mesh={"a": 8})
    assert "more ranks, since a100-pcie has no more than 8 devices" in refused(full, 1)


def test_the_error_says_that_the_limit_is_the_devices() -> None:
    made = planner(of_memory(1000.0, 200.0))
    with pytest.raises(
        ValueError,
        match=r"no plan fits in 950 B, the memory of A100 SXM 80GB \(1.17 KiB\) less its reserve \(200 B\) and 5% of ",
    ):
        made.plan()


# ---------------------------------------------------------------------------- the file, the command line


@pytest.mark.parametrize("name", sorted(set(CLUSTERS) - {"local", "ours"}))
def test_clusters_of_the_library_state_their_reserve(name: str) -> None:
    device = CLUSTERS[name].device
    if device.memory_bytes is not None and device.reserved_bytes is not None:
        assert 0 < device.reserved_bytes < 0.15 * device.memory_bytes


def test_a_file_without_a_reserve_gets_a_tenth() -> None:
    text = cluster_toml(of_memory(1e9, None), "here")
    read = parse_cluster(text, "here")
    assert "reserved_bytes" not in text and read.device.usable_bytes == 0.9e9
    assert parse_cluster(cluster_toml(named_cluster("dgx-h100"), "here"), "here").device.usable_bytes == 74e9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reserved_bytes = 6e+09", "reserved_bytes = -1", "device.reserved_bytes is -1: a number, 0 or more"),
        ("reserved_bytes = 6e+09", "reserved_bytes = 80e9", "is 80000000000.0: a number below memory_bytes = 8"),
        ("memory_bytes = 8e+10\n", "", "device.reserved_bytes is 6000000000.0: remove it, or write memory_bytes"),
        ('memory_bytes = "here"\n', "", "device.memory_bytes has no source"),
        ("[device.source]\n", '[device.source]\nfused_part = "x"\n', "source.fused_part cites a key that is not"),
        ('reserved_bytes = "here"\n', "", "reserved_bytes has no source"),
    ],
)
def test_a_bad_reserve_is_refused(old: str, new: str, message: str) -> None:
    text = cluster_toml(named_cluster("dgx-h100"), "here")
    assert old in text
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_cluster(text.replace(old, new, 1), "file.toml")


@pytest.mark.parametrize(("text", "limit"), [("none", math.inf), ("inf", math.inf), ("40GB", 40e9)])
def test_the_memory_limit_of_the_command_line(text: str, limit: float) -> None:
    assert byte_count(text) == limit


def test_sizes_round_up_where_they_are_to_suffice() -> None:
    sizes = (0, 980, 1024, 55.154e6, 148.44e9)
    assert [bytes_text(size) for size in sizes] == ["0 B", "980 B", "1.00 KiB", "52.60 MiB", "138.25 GiB"]
    assert [bytes_text(size, up=True) for size in sizes[3:]] == ["52.60 MiB", "138.25 GiB"]
    assert bytes_text(148.41e9) == "138.22 GiB" and byte_count(bytes_text(148.41e9, up=True)) >= 148.41e9
