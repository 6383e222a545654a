"""Clusters: how a mesh lies on levels, what a collective costs there, and what a bad file is told."""

from __future__ import annotations

import itertools
import math
import re
import runpy
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.library import CLUSTERS, named_cluster, parse_cluster, read_cluster
from autopar.cluster.links import ALGORITHMS, KINDS, Link
from autopar.cluster.loads import price, prices
from autopar.cluster.machine import Cluster, Device, Level, Operators
from autopar.cost.bucketed import LARGEST_BUCKET_BYTES, LATENCY_PART, SMALLEST_BUCKET_BYTES, bucket_bytes
from autopar.ir.graph import TensorMeta
from autopar.planning.planner import Planner

DEVICE = Device(
    name="a device",
    flops_per_second={"float32": 1e12},
    memory_bytes=1e9,
    memory_bytes_per_second=1e9,
    seconds_per_op=0.0,
)


def level(size: int, rate: float = 1e9, **more: object) -> Level:
    given: dict[str, object] = {"bytes_per_second": rate, "group_bytes_per_second": rate, "latency_seconds": 0.0}
    return Level(name=f"level of {size}", size=size, **(given | more))  # type: ignore[arg-type]


def cluster(*levels: Level, algorithms: tuple[str, ...] = ALGORITHMS) -> Cluster:
    return Cluster(name="a cluster", device=DEVICE, levels=levels, algorithms=algorithms)


def groups(mesh: tuple[int, ...], axis: int, order: tuple[int, ...]) -> list[list[int]]:
    """The devices of each group of an axis."""
    found: dict[tuple[int, ...], list[int]] = {}
    for place in itertools.product(*(range(n) for n in mesh)):
        device = 0
        for a in order:
            device = device * mesh[a] + place[a]
        found.setdefault((*place[:axis], *place[axis + 1 :]), []).append(device)
    return list(found.values())


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Sizes of levels, a mesh of powers of two that fills them, and an order of its axes."""
    sizes = draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3))
    left = math.prod(sizes)
    mesh = []
    while left > 1 and len(mesh) < 3:
        mesh.append(draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if n <= left])))
        left //= mesh[-1]
    mesh.append(left)
    order = draw(st.permutations(range(len(mesh))))
    return sizes, tuple(mesh), tuple(order)


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_groups_that_leave_a_child_share_what_leaves_it(
    case: tuple[list[int], tuple[int, ...], tuple[int, ...]],
) -> None:
    """Counted device by device: how many children of a level a group has ranks in, how many ranks in
    each, and how many groups leave a child at that level."""
    sizes, mesh, order = case
    made = cluster(*(level(size, 1e9 * (k + 1)) for k, size in enumerate(sizes)))
    for axis, link in enumerate(made.links(mesh, order)):
        stages = {stage.name: stage for stage in link.stages}
        above = math.prod(sizes)
        for k, size in enumerate(sizes):
            below = above // size
            crossing: dict[int, int] = {}
            shapes = set()
            for group in groups(mesh, axis, order):
                for parent in {device // above for device in group}:
                    inside = [device // below for device in group if device // above == parent]
                    if len(set(inside)) > 1:
                        shapes.add((len(set(inside)), inside.count(inside[0])))
                        for child in set(inside):
                            crossing[child] = crossing.get(child, 0) + 1
            named = made.levels[k].name
            assert (named in stages) == bool(crossing) or sizes.count(size) > 1
            if crossing and sizes.count(size) == 1:
                stage = stages[named]
                assert shapes == {(stage.width, stage.members)}
                assert {1e9 * (k + 1) / n for n in crossing.values()} == {stage.bytes_per_second}
            above = below
        assert math.prod(stage.width for stage in link.stages) == link.ranks


def test_an_axis_that_is_not_aligned_crosses_nodes() -> None:
    """Ranks 3, 4, 5 of a (2, 3) mesh lie in two nodes of four, rank 3 alone in its node, with one port of four."""
    _, three = cluster(level(2, 1.0), level(4, 100.0)).links((2, 3))
    assert three.bytes_per_second == 0.25
    assert [stage.width for stage in three.stages] == [2, 3]


def test_axes_in_the_order_that_is_given() -> None:
    made = cluster(level(2, 1.0), level(4, 100.0))
    assert [link.bytes_per_second for link in made.links((2, 4))] == [0.25, 100.0]
    assert [link.bytes_per_second for link in made.links((2, 4), order=(1, 0))] == [100.0, 0.5]
    with pytest.raises(ValueError, match=re.escape("order (0, 0) of a mesh of 2 axes: give each of 0..1 once")):
        made.links((2, 4), order=(0, 0))


def test_a_device_cannot_use_the_ports_of_others() -> None:
    """Eight ports a node: a group with one device in each of two nodes has one of them, alone or not."""
    own, shared = (cluster(level(2, 8.0, devices_per_link=n), level(8, 100.0)) for n in (1, 8))
    assert own.links((2, 8))[0].bytes_per_second == shared.links((2, 8))[0].bytes_per_second == 1.0
    assert own.links((16,))[0].bytes_per_second == shared.links((16,))[0].bytes_per_second == 8.0
    # a shift sends from one device of the node only
    assert collective_seconds("shift", 8.0, own.links((16,))[0]) == 8.0
    assert collective_seconds("shift", 8.0, shared.links((16,))[0]) == 1.0


def test_a_mesh_that_does_not_fit() -> None:
    with pytest.raises(
        ValueError, match="a mesh of 4 x 4 = 16 ranks does not fit cluster a cluster of 2 x 4 = 8 devices"
    ):
        cluster(level(2), level(4)).links((4, 4))


def test_a_matrix_of_links_corrects_the_group_bandwidth() -> None:
    """The hybrid cube mesh of V100: four GPUs of a face have four links each among them, pairs across one or two,
    and children without a link relay."""
    nvlink = CLUSTERS["v100-nvlink"]
    one = 25e9 * 0.8
    assert nvlink.links((8,))[0].bytes_per_second == 6 * one
    across, face = nvlink.links((2, 4))
    assert (across.bytes_per_second, face.bytes_per_second) == (one, 4 * one)
    assert face.stages[0].pair_bytes_per_second == one
    assert nvlink.links((8,))[0].stages[0].pair_bytes_per_second == 2 * one / 2


def test_a_ring_that_goes_around_has_both_ways() -> None:
    """Rows of a 4 x 4 torus of links of 25: the whole row is a ring, half of it is a line; an axis that jumps
    over every other shares the links with the groups in between."""
    ring = {"topology": "ring", "bytes_per_second": 100.0, "group_bytes_per_second": 200.0}
    torus = cluster(level(4, **ring), level(4, topology="ring", rate=25.0, group_bytes_per_second=50.0))
    assert [link.bytes_per_second for link in torus.links((4, 4))] == [50.0, 50.0]
    assert [link.bytes_per_second for link in torus.links((4, 2, 2))] == [50.0, 25.0, 25.0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64])
def test_algorithms_in_closed_form(ranks: int) -> None:
    """On one switch: rings, halving and trees as their papers count steps and bytes."""
    link = cluster(level(ranks, 2.0, latency_seconds=3.0, launch_seconds=5.0)).links((ranks,))[0]
    found = prices("all_reduce", 100.0, link)
    n, steps = ranks, math.ceil(math.log2(ranks))
    assert found["ring"].seconds() == pytest.approx(5 + 2 * (n - 1) * (3 + 100 / n / 2))
    assert found["tree"].seconds() == pytest.approx(5 + 2 * steps * 3 + 2 * 100 / 2)
    if n & (n - 1) == 0:
        assert found["halving"].seconds() == pytest.approx(5 + 2 * steps * 3 + 2 * (n - 1) / n * 100 / 2)
    gather = prices("all_gather", 100.0, link)
    assert gather["ring"].seconds() == pytest.approx(5 + (n - 1) * (3 + 100 / n / 2))
    exchange = prices("all_to_all", 100.0, link)
    assert prices("reduce_scatter", 100.0, link) == {**gather, "pairwise": exchange["pairwise"]}
    assert exchange["pairwise"].seconds() == pytest.approx(5 + (n - 1) * (3 + 100 / n / 2))
    assert exchange["bruck"].seconds() == pytest.approx(5 + steps * (3 + 100 / 2 / 2))
    assert prices("shift", 100.0, link)["message"].seconds() == pytest.approx(5 + 3 + 100 / 2)


def test_levels_in_closed_form() -> None:
    """Two nodes of four: by level, (w - 1) / w of the bytes on each; in one ring, all at the slower rate, with two
    of its eight hops between the nodes."""
    link = cluster(level(2, 1.0, latency_seconds=7.0), level(4, 10.0, latency_seconds=2.0)).links((8,))[0]
    found = prices("all_gather", 80.0, link)
    assert found["ring"].seconds() == pytest.approx(7 * (2 * 7 + 6 * 2) / 8 + 7 / 8 * 80 / 1)
    assert found["hierarchical"].seconds() == pytest.approx(7 + 3 * 2 + 1 / 2 * 80 / 1 + 3 / 4 * 80 / 10)
    # of a rank's 80 bytes 40 leave the node, with those of three others, and 3/4 of the rest stay in it
    exchange = prices("all_to_all", 80.0, link)
    assert exchange["pairwise"].seconds() == pytest.approx(7 * 7 + 4 * 40 / 1)
    assert exchange["hierarchical"].seconds() == pytest.approx(7 + 3 * 2 + 4 * 40 / 1 + 60 / 10)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_cheapest_algorithm_is_taken_and_more_bytes_never_cost_less(name: str) -> None:
    made = CLUSTERS[name]
    mesh = (2, 2, 2)
    for kind, link in itertools.product(KINDS, made.links(mesh)):
        last = 0.0
        for size in (1.0, 1e3, 1e6, 1e9):
            every = prices(kind, size, link)
            seconds = collective_seconds(kind, size, link)
            assert seconds == min(p.seconds() for p in every.values()) == price(kind, size, link).seconds()
            assert seconds >= last
            assert collective_seconds(kind, size, link, 0.1) <= seconds
            assert collective_seconds(kind, size, link.widened(2.0)) <= seconds
            last = seconds


def test_a_bucket_is_as_large_as_hides_the_latency_of_its_link() -> None:
    """And no larger: what is started later overlaps with less. Between bounds."""
    slow, fast = (cluster(level(4, rate, latency_seconds=1e-3)).links((4,))[0] for rate in (10e6, 100e6))
    for link in (slow, fast):
        cheapest = price("all_reduce", bucket_bytes(link), link)
        assert cheapest.fixed == pytest.approx(LATENCY_PART * cheapest.moving, rel=1e-4)
    assert bucket_bytes(fast) == pytest.approx(10 * bucket_bytes(slow), rel=1e-4)
    without, long = (cluster(level(4, 1e9, latency_seconds=s)).links((4,))[0] for s in (0.0, 1.0))
    assert (bucket_bytes(without), bucket_bytes(long)) == (SMALLEST_BUCKET_BYTES, LARGEST_BUCKET_BYTES)


def test_small_and_large_bytes_take_different_algorithms() -> None:
    link = CLUSTERS["dgx-h100"].links((16, 8))[0]
    assert price("all_reduce", 1e3, link).algorithm != "ring"
    assert price("all_reduce", 3e10, link).algorithm in ("ring", "halving")
    assert {price("all_to_all", 10.0**k, link).algorithm for k in (2, 9)} == {"bruck", "pairwise"}


def test_a_library_has_the_algorithms_that_it_has() -> None:
    made = cluster(level(8, latency_seconds=1.0), algorithms=("ring", "pairwise", "message"))
    assert set(prices("all_reduce", 1.0, made.links((8,))[0])) == {"ring"}
    with pytest.raises(ValueError, match="none of the algorithms tree does all_gather over 8 ranks"):
        price("all_gather", 1.0, cluster(level(8), algorithms=("tree",)).links((8,))[0])
    with pytest.raises(ValueError, match="no collective is called 'gossip'"):
        price("gossip", 1.0, made.links((8,))[0])


def test_one_rank_sends_nothing() -> None:
    alone = cluster(level(4, latency_seconds=1.0)).links((1, 4))[0]
    assert alone == Link(1, ())
    assert all(collective_seconds(kind, 1e9, alone) == 0 for kind in KINDS)


def test_small_operators_reach_less_of_the_peak() -> None:
    device = CLUSTERS["dgx-h100"].device
    points = device.efficiency
    assert all(device.reached(size) == pytest.approx(part) for size, part in points)
    assert device.reached(1.0) == points[0][1] and device.reached(1e18) == points[-1][1]
    assert device.flops(torch.bfloat16) == pytest.approx(989e12 * points[-1][1])
    sizes = [10 ** (k / 4) for k in range(20, 60)]
    seconds = [device.compute_seconds(size, torch.bfloat16) for size in sizes]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(sizes[-1] / device.flops(torch.bfloat16))


def test_caches_hold_small_operands_and_some_operators_take_longer() -> None:
    device = replace(
        CLUSTERS["local"].device,
        memory_bytes_per_second=10e9,
        seconds_per_op=1e-6,
        memory_efficiency=((1e6, 1.0), (4e6, 0.25)),
        operator_ratios={"aten.silu.default": 3.0},
    )
    moved = [1e3, 1e6, 2e6, 4e6, 4e7]
    assert [device.moving_seconds(size) * 1e9 / size for size in moved] == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.4])
    x = TensorMeta((500, 500), torch.float32)  # a megabyte
    for op, ratio in (("aten.neg.default", 1.0), ("aten.silu.default", 3.0)):
        assert device.operator_seconds(op, [x], [x], 0.0) == pytest.approx(ratio * (1e-6 + 4e-4))
    # what was measured of single operators goes before all that
    measured = replace(device, operators=Operators(ratios={"": 0.5}))
    assert measured.operator_seconds("aten.silu.default", [x], [x], 0.0) == pytest.approx(0.5 * (1e-6 + 4e-4))


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_library_cites_and_adds_up(name: str, tmp_path: Path) -> None:
    text = (files("autopar.cluster.library") / f"{name}.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert (
        read_cluster(path) == named_cluster(path) == named_cluster(str(path)) == CLUSTERS[name] == named_cluster(name)
    )
    assert CLUSTERS[name].name == name and CLUSTERS[name].source


@pytest.fixture(scope="module")
def captured() -> Planner:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    return Planner(model, {"a": 4}, (torch.zeros(32, 64),), loss_fn=models.mean_square, cluster="dgx-h100")


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_model_is_planned_on_every_cluster(name: str, captured: Planner) -> None:
    made = captured.on({"a": 2, "b": 2}, name).plan()
    assert made.cluster == name and made.seconds > 0 and (made.headroom_bytes is None or made.headroom_bytes > 0)
    assert (made.utilization is not None) == CLUSTERS[name].device.has_peak == (name != "local")


@pytest.mark.parametrize(
    ("name", "close"),
    [("gb200", "'gb200-nvl72'"), ("L40S", "'aws-g6e'"), ("dgx-h10", "'dgx-h100'"), ("frontire", "'frontier'")],
)
def test_an_unknown_name_is_answered_with_names_and_devices_like_it(name: str, close: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown cluster {name!r} (did you mean {close}?); known: ")):
        named_cluster(name)


GOOD = """
name = "two"
devices = 8
source = "a test"

[device]
name = "a device"
flops_per_second = { float32 = 1e12 }
memory_bytes = 1e9
memory_bytes_per_second = 1e9
seconds_per_op = 0.0
[device.source]
flops_per_second = "a"
memory_bytes = "b"
memory_bytes_per_second = "c"
seconds_per_op = "d"

[[level]]
name = "network"
size = 8
topology = "switch"
bytes_per_second = 1e9
group_bytes_per_second = 2e9
latency_seconds = 0
[level.source]
bytes_per_second = "e"
group_bytes_per_second = "f"
latency_seconds = "g"
"""

BAD = {
    "missing": ("size = 8\n", "", "level[0].size is missing: an integer, at least 1"),
    "no topology": ('topology = "switch"\n', "", "level[0].topology is missing: one of switch, full, ring (a torus"),
    "negative": (
        "memory_bytes = 1e9",
        "memory_bytes = -1e9",
        "device.memory_bytes is -1000000000.0: a number above 0; correct it there",
    ),
    "latency": (
        "latency_seconds = 0",
        "latency_seconds = -1",
        "level[0].latency_seconds is -1: a number of seconds, 0 or more, or a table of them by kind (all_reduce, ",
    ),
    "infinite": ("memory_bytes = 1e9", "memory_bytes = inf", "device.memory_bytes is inf: a number above 0"),
    "boolean": ("size = 8", "size = true", "level[0].size is True: an integer, at least 1"),
    "unknown": ("size = 8", "size = 8\nspeed = 3", "level[0].speed is unknown; the fields here are name, size"),
    "product": ("devices = 8", "devices = 9", "devices is 9, but the levels hold 8 = 8: write devices = 8"),
    "no source": (
        'latency_seconds = "g"',
        "",
        'level[0].latency_seconds has no source: write latency_seconds = "where',
    ),
    "idle source": ('"g"', '"g"\nlaunch_seconds = "h"', "level[0].source.launch_seconds cites a key that is not here"),
    "topology": (
        '"switch"',
        '"torus"',
        "level[0].topology is 'torus': one of switch, full, ring (a torus is one ring level for each of its dims)",
    ),
    "algorithms": ('"a test"', '"a test"\nalgorithms = ["ring"]', "algorithms is ['ring']: a list of ring, tree"),
    "rates": ("{ float32 = 1e12 }", "1e12", "device.flops_per_second is 1000000000000.0: a table of numbers"),
    "curve": (
        "memory_bytes = 1e9",
        "memory_bytes = 1e9\nefficiency = [[1e3, 0.1], [2e3, 0.9]]",
        "with no less time for more flops, such as [[1e9, 0.5], [1e12, 0.8]]",
    ),
    "bytes": (
        "memory_bytes = 1e9",
        "memory_bytes = 1e9\nmemory_efficiency = [[1e3, 0.1], [2e3, 0.9]]",
        "device.memory_efficiency is [[1000.0, 0.1], [2000.0, 0.9]]: a list of [bytes, part], rising bytes",
    ),
    "ratios": (
        "memory_bytes = 1e9",
        'memory_bytes = 1e9\noperator_ratios = { "aten.silu.default" = 0 }',
        "device.operator_ratios['aten.silu.default'] is 0: a number above 0",
    ),
    "matrix on a switch": (
        "bytes_per_second = 1e9\ngroup",
        "bytes_per_second = [[0, 1], [1, 0]]\ngroup",
        'level[0].bytes_per_second is a matrix: write topology = "full"',
    ),
    "lopsided matrix": (
        "bytes_per_second = 1e9\ngroup",
        "bytes_per_second = [[0, 1], [2, 0]]\ngroup",
        "level[0].bytes_per_second is [[0, 1], [2, 0]]: a symmetric matrix",
    ),
    "small matrix": (
        '"switch"\nbytes_per_second = 1e9',
        '"full"\nbytes_per_second = [[0, 1], [1, 0]]',
        "level[0].bytes_per_second has 2 rows: 8, one for each child",
    ),
    "no TOML": ("[[level]]", "[[level", "it is not TOML ("),
    "no level": (
        GOOD[GOOD.index("[[level]]") :],
        "",
        "level is missing: a table [[level]] for each, the outermost first",
    ),
    "no device": (
        GOOD[GOOD.index("[device]") : GOOD.index("[[level]]")],
        "",
        "device is missing: a table [device]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_says_where_and_what_to_write(case: str) -> None:
    here, there, told = BAD[case]
    assert parse_cluster(GOOD, "two.toml").devices == 8
    assert here in GOOD
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        parse_cluster(GOOD.replace(here, there, 1), "two.toml")
    assert str(refused.value).startswith("cluster file two.toml: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read \(No such file or directory\); give the path"):
        named_cluster(tmp_path / "none.toml")


DOC = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_the_file_in_the_docs_is_one() -> None:
    example = DOC.read_text().split("```toml\n")[1].split("```")[0]
    made = parse_cluster(example, "docs/clusters.md")
    between, within = made.links((2, 8))
    assert between.bytes_per_second == pytest.approx(100e9 * 0.9 / 8)
    assert within.bytes_per_second == 300e9


def test_the_tables_in_the_docs_are_those_of_the_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = DOC.parent.parent / "benchmarks" / "clusters.py"
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out.strip()
    assert told and told in DOC.read_text()
