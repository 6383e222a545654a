"""Calibration: a cluster's figures are found again from what it would cost, and from ranks in a lab."""

from __future__ import annotations

import json
import math
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measured import CLUSTER, SIZES, measurements
from ranks import run
from typer.testing import CliRunner

from autopar.cli import app
from autopar.cluster.calibration import check, compute_check, fit, step_range
from autopar.cluster.collectives import collective_seconds
from autopar.cluster.library import CLUSTERS, parse_cluster, read_cluster
from autopar.cluster.library.write import cluster_toml
from autopar.cluster.links import GLOO, KINDS
from autopar.cluster.loads import price, prices
from autopar.cluster.machine import Cluster, Level
from autopar.cluster.measurements import Measurements, Sample
from autopar.extras import lab
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ops.rule import Call
from autopar.ops.rules import RULES, rule_of
from autopar.runtime.measure.operators import (
    MOVERS,
    RING_BYTES,
    RING_MOST,
    RING_NEAR,
    arithmetic,
    copies_beyond_caches,
    in_turn,
    seconds_apart,
)

pytestmark = pytest.mark.timeout(180)


def test_the_figures_of_a_cluster_are_found_again() -> None:
    found = fit(measurements(CLUSTER), "found")
    for level, known in zip(found.levels, CLUSTER.levels, strict=True):
        assert (level.name, level.size, level.devices_per_link) == (known.name, known.size, known.devices_per_link)
        assert (level.overlap, level.compute_share) == (known.overlap, known.compute_share)
        assert level.group_bytes_per_second == pytest.approx(known.group_bytes_per_second, rel=0.01)
        for one, other in zip(level.measured, known.measured, strict=True):
            assert one.kind == other.kind
            assert one.efficiency == pytest.approx(other.efficiency, rel=0.02)
            assert one.latency_seconds == pytest.approx(other.latency_seconds, rel=0.02)
    assert found.device.flops_per_second == pytest.approx(CLUSTER.device.flops_per_second, rel=0.01)
    for key in ("memory_bytes_per_second", "memory_efficiency", "operator_ratios"):
        assert getattr(found.device, key) == getattr(CLUSTER.device, key)
    assert found.device.reached(1e6) == pytest.approx(0.5, rel=0.02)
    assert not found.device.has_peak  # what was measured is no peak


def test_the_range_of_steps_is_that_of_the_measured_errors() -> None:
    """Nothing errs where all costs what is predicted. Where products err, a third of a step does."""
    exact = measurements(CLUSTER)
    assert fit(exact, "found").step_range == pytest.approx((1.0, 1.0), abs=0.02)
    noisy = replace(
        exact, samples=tuple(replace(s, quartiles=(0.9 * s.seconds, 1.3 * s.seconds)) for s in exact.samples)
    )
    assert fit(noisy, "found").step_range == pytest.approx(((2 + 0.9) / 3, (2 + 1.3) / 3), abs=0.02)
    cluster = fit(exact, "found")
    products = [(*row[:4], row[4] * 1.6) for row in exact.compute.matmuls]
    slower = replace(exact, compute=replace(exact.compute, matmuls=tuple(products)))  # type: ignore[arg-type]
    assert step_range(slower, cluster) == pytest.approx(((2 + 1.6) / 3, (2 + 1.6) / 3), abs=0.02)
    text = cluster_toml(fit(noisy, "found"), "a test")
    assert parse_cluster(text, "a file").within(3.0) == pytest.approx((2.9, 3.3), abs=0.06)


def rounds_within(seconds: float) -> tuple[int, int]:
    from autopar.runtime.measure import collectives

    levels = (dist.get_world_size(),)
    setattr(collectives, "ROUNDS_SECONDS", {"cpu": seconds})  # noqa: B010
    mine, first = collectives.groups_of(levels)
    cpu = torch.device("cpu")
    samples, rounds = collectives.collective_samples(levels, mine, first, (1 << 10,), 4, cpu, lambda part, what: None)
    return len(samples), rounds


@pytest.mark.parametrize(("seconds", "rounds"), [(math.inf, 4), (600.0, 4), (0.0, 1)])
def test_rounds_end_in_time_on_all_ranks(seconds: float, rounds: int) -> None:
    assert run(2, rounds_within, seconds) == [(len(KINDS), rounds)] * 2


def by_levels(measured: Measurements) -> Cluster:
    """What is fitted, without the curves."""
    return replace(fit(measured, "found"), groups=())


def test_what_was_fitted_predicts_what_was_measured_also_on_axes_that_span_levels() -> None:
    measured = measurements(CLUSTER)
    rows = check(measured, by_levels(measured))
    assert {row.axis for row in rows} == {
        "nodes",
        "ranks",
        "nodes+ranks",
        "2 ranks",
        "2 ranks, 2 apart",
        "4 ranks, 2 apart",
    }
    assert len(rows) == 6 * len(KINDS) * len(SIZES)
    assert max(abs(row.error) for row in rows) < 0.02
    assert max(abs(p / m - 1) for *_, p, m in compute_check(measured, fit(measured, "found"))) < 0.02


def test_sizes_that_something_disturbed_do_not_bend_the_fit() -> None:
    measured = measurements(CLUSTER)
    disturbed = replace(
        measured,
        samples=tuple(replace(s, seconds=3 * s.seconds) if s.bytes == SIZES[3] else s for s in measured.samples),
    )
    rows = [row for row in check(measured, by_levels(disturbed)) if row.bytes != SIZES[3]]
    assert max(abs(row.error) for row in rows) < 0.05


def test_what_no_line_says_is_kept_as_it_was_measured() -> None:
    """Large messages between two ranks take turns, axes within a level find links of their own: each axis of a mesh is
    priced by what was measured of such groups, sizes in between by both neighbours, and a part of a bucket as one."""
    measured = measurements(CLUSTER)

    def slower(sample: Sample) -> float:
        return sample.seconds * (1.5 if sample.axis == (2, 1) and sample.bytes >= SIZES[5] else 1.0)

    uneven = replace(measured, samples=tuple(replace(s, seconds=slower(s)) for s in measured.samples))
    found = fit(uneven, "found")
    assert max(abs(row.error) for row in check(uneven, found)) < 0.005
    assert max(abs(row.error) for row in check(uneven, by_levels(uneven))) > 0.3
    pairs, plain = (cluster.links((4, 2))[1] for cluster in (found, by_levels(uneven)))
    for size, factor in ((SIZES[4], 1.0), (2 * SIZES[4], math.sqrt(1.5)), (SIZES[5], 1.5), (4 * SIZES[-1], 1.5)):
        told = [price("all_gather", size, link).seconds() for link in (pairs, plain)]
        assert told[0] == pytest.approx(factor * told[1], rel=0.02)
    part = [collective_seconds("all_gather", SIZES[5] / 8, link, share=1 / 8) for link in (pairs, plain)]
    assert part[0] == pytest.approx(1.5 * part[1], rel=0.02)
    apart = (found.links((4, 2))[0], found.links((2, 4))[1])
    assert all(link.factors and link.factors != pairs.factors for link in apart)
    assert found.links((8,))[0].factors and not found.links((2,), order=(0,))[0].stages[0].ring


def test_rates_of_products_that_fall_with_size_become_their_mean() -> None:
    measured = measurements(CLUSTER)
    rates = {100: 20e9, 200: 40e9, 400: 30e9}
    matmuls = tuple(("float32", n, n, n, 2 * n**3 / rate + 2e-6) for n, rate in rates.items())
    device = fit(replace(measured, compute=replace(measured.compute, matmuls=matmuls)), "found").device
    mean = math.sqrt(40e9 * 30e9)
    assert device.flops_per_second["float32"] == pytest.approx(mean, rel=0.01)
    assert device.efficiency == ((2 * 100**3, pytest.approx(20e9 / mean, rel=0.01)), (2 * 200**3, 1.0))


def test_a_cluster_of_other_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster dgx-a100 is 1024 x 8, and 2 x 4 was measured"):
        check(measurements(CLUSTER), CLUSTERS["dgx-a100"])


def test_measurements_are_saved_and_read() -> None:
    measured = measurements(CLUSTER)
    assert Measurements.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_what_was_saved_before_shares_were_measured_is_read() -> None:
    saved = measurements(CLUSTER).to_json()
    del saved["together"]
    assert [level.compute_share for level in fit(Measurements.from_json(saved), "found").levels] == [0.0, 0.0]


# --- the format


@pytest.mark.parametrize(
    "cluster", [CLUSTER, fit(measurements(CLUSTER), "found"), *CLUSTERS.values()], ids=lambda cluster: cluster.name
)
def test_a_written_cluster_is_read_back(cluster: Cluster) -> None:
    assert parse_cluster(cluster_toml(cluster, "a test", "two\nlines"), "a file") == cluster


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("benchmarks/lab/*.toml")), ids=lambda p: p.stem)
def test_calibrated_clusters_are_read(path: Path) -> None:
    assert read_cluster(path).levels[-1].measured


@pytest.mark.parametrize(
    ("line", "instead", "error"),
    [
        (
            "all_gather = 0.8",
            "all_gather = 1.8",
            r"level\[0\].efficiency\['all_gather'\] is 1.8: a part above 0 and at most 1",
        ),
        ("all_gather = 0.8, ", "", "efficiency is {.*: a table of them by kind"),
        ("all_reduce = 0.001", "all_reduce = -0.001", r"latency_seconds\['all_reduce'\] is -0.001: a number of"),
        ('all_gather = ["ring"]', 'all_gather = ["tree"]', "algorithms is .* with one of ring, .*, message that does"),
        ('all_reduce = ["ring"]', 'all_reduce = ["pairwise"]', "algorithms is .*: a table of lists by kind"),
    ],
)
def test_bad_tables_by_kind_are_refused(line: str, instead: str, error: str) -> None:
    text = cluster_toml(CLUSTER, "a test")
    assert line in text
    with pytest.raises(ValueError, match=error):
        parse_cluster(text.replace(line, instead), "a file")


@pytest.mark.parametrize(
    ("line", "instead", "error"),
    [
        ("stride = 4", "stride = 3", r"groups\[.\] are of 2 ranks, 3 apart, which do not divide 8 devices"),
        ("all_reduce = [[1024", "all_reduce = [[-1024", r"seconds\['all_reduce'\]\[0\]\[0\] is -1024: an int"),
        ("all_reduce = [[1024", "all_reduse = [[1024", r"a key of groups\[0\].seconds is 'all_reduse' \(did you"),
        ("[groups.source]\nseconds", "[groups.source]\nsecond", r"groups\[0\].seconds has no source"),
    ],
)
def test_bad_curves_are_refused(line: str, instead: str, error: str) -> None:
    text = cluster_toml(fit(measurements(CLUSTER), "found"), "a test")
    assert line in text
    with pytest.raises(ValueError, match=error):
        parse_cluster(text.replace(line, instead), "a file")


def test_gloo_sends_each_part_to_the_rank_that_adds_it_up() -> None:
    """Half of what its own reduce-scatter moves, which is an all-reduce."""
    level = Level(name="a", size=4, bytes_per_second=1e9, group_bytes_per_second=1e9, latency_seconds=1e-3)
    link = Cluster(name="gloo", device=CLUSTER.device, levels=(level,), algorithms=GLOO).links((4,))[0]
    assert list(prices("reduce_scatter", 1e6, link)) == ["pairwise"]
    assert price("reduce_scatter", 1e6, link).seconds() == pytest.approx(price("all_reduce", 1e6, link).seconds() / 2)


def test_latencies_pass_while_bytes_travel_where_the_slowest_level_says_so() -> None:
    slow, fast = (
        replace(level, efficiency=1.0, latency_seconds=level.most_latency_seconds) for level in CLUSTER.levels
    )
    link = replace(CLUSTER, levels=(slow, fast)).links((8,))[0]
    assert link.overlap == slow.overlap == 1.0
    found = price("all_reduce", 1e6, link)
    assert found.seconds() == max(found.fixed, found.moving)
    within = replace(CLUSTER, levels=(slow, fast)).links((2, 4))[1]
    found = price("all_reduce", 1e6, within)
    assert found.seconds() == pytest.approx(0.75 * found.fixed + found.moving)
    assert collective_seconds("all_reduce", 1e6, within) == found.seconds()
    assert price("all_reduce", 0.0, within).seconds() == found.fixed


# --- on ranks


def measured_in_the_lab(levels: list[int]) -> dict[str, Any]:
    """With fewer sizes of operators than otherwise: each operator and each dtype is measured, at two sizes or more."""
    from autopar.runtime.measure import measure, operators

    setattr(operators, "ROWS", {"cpu": (8, 512)})  # noqa: B010
    setattr(operators, "MATMULS", ((64, 64, 64), (256, 256, 256)))  # noqa: B010
    return measure(levels, sizes=(1 << 10, 1 << 20), rounds=3, seconds=0.05).to_json()


def test_what_is_measured_is_counted_as_the_rules_count_it() -> None:
    assert all(RULES.get(op) is not None for op in MOVERS)
    for op, call, operands, flops in arithmetic(torch.device("cpu")):
        made = call(*operands)
        results = made if isinstance(made, tuple) else (made,)
        node = Node(
            op=op,
            args=tuple(Ref(f"x{i}") for i in range(len(operands))),
            kwargs=tuple(getattr(call, "keywords", {}).items()),
            outputs=tuple(f"y{i}" for i in range(len(results))),
        )
        metas, outputs = (tuple(TensorMeta(tuple(t.shape), t.dtype) for t in ts) for ts in (operands, results))
        rule = rule_of(Call(node, metas, outputs))
        assert rule is not None and rule.flops == flops > 0


def test_weights_come_from_memory() -> None:
    sizes = {1 << 20: RING_BYTES["cpu"] >> 22, 1 << 24: 2, 16: RING_MOST}
    assert {elements: copies_beyond_caches(torch.zeros(elements)) for elements in sizes} == sizes


@pytest.mark.parametrize("copies", [1, RING_NEAR])
def test_operators_are_measured_on_operands_that_come_again_later(copies: int) -> None:
    """Each call has others, and results stay until caches hold no more of later ones."""
    given: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def negative(x: torch.Tensor) -> torch.Tensor:
        result = -x
        given.append(x.data_ptr())
        made.append(weakref.ref(result))
        return result

    x = torch.zeros(1 << 22)
    call, kept = in_turn(negative, x, copies=copies), RING_BYTES["cpu"] // x.nbytes
    given.clear()
    made.clear()
    for _ in range(2 * kept):
        call()
    assert len(set(given)) == copies and given[copies:] == given[:-copies]
    assert [result() is not None for result in made] == [False] * kept + [True] * kept


def test_an_operator_of_a_program_finds_nothing_in_caches() -> None:
    """Its fixed cost is the device's; rates are those of operators that were measured again and again."""
    measured = measurements(CLUSTER)
    apart = replace(measured, compute=replace(measured.compute, seconds_per_op_apart=5e-6))
    one, other = fit(measured, "found"), fit(apart, "found")
    assert other == replace(one, device=replace(one.device, seconds_per_op=5e-6))
    assert seconds_apart(lambda: time.sleep(1e-3), 0.01) >= 1e-3


@pytest.mark.skipif(bool(lab.missing()), reason=f"a lab needs {', '.join(lab.missing())}")
def test_a_lab_is_measured_and_its_links_are_found(tmp_path: Path) -> None:
    shape = lab.flat(2, "160mbit")
    found = lab.run(shape, measured_in_the_lab, [2], timeout_seconds=200.0)
    assert found[0] == found[1]
    saved, written = tmp_path / "measured.json", tmp_path / "ours.toml"
    saved.write_text(json.dumps(found[0]))
    result = CliRunner().invoke(app, ["calibrate", "--read", str(saved), "--out", str(written)])
    assert result.exit_code == 0, result.output
    assert "reduce_scatter" in result.output
    cluster = parse_cluster(written.read_text(), str(written))
    (level,) = cluster.levels
    assert (cluster.name, level.size) == ("ours", 2)
    assert level.group_bytes_per_second == pytest.approx(20e6, rel=0.25)
    assert cluster.device.flops_per_second.keys() == {"float32", "bfloat16", "float64"}
    (both,) = found[0]["together"]
    assert both["axis"] == [2, 1] and 0 < both["collective_seconds"] < both["compute_seconds"]
    assert both["seconds"] > 0.5 * both["compute_seconds"] and 0 <= level.compute_share <= 1


def test_calibrate_without_ranks_says_how_to_start_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "ours.toml")])
    assert result.exit_code == 2
    assert "start them with torchrun" in " ".join(result.output.split())


def test_clusters_lists_shows_and_checks(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["clusters", "--json"])
    assert json.loads(listed.output).keys() == CLUSTERS.keys()
    path = tmp_path / "known.toml"
    path.write_text(cluster_toml(CLUSTER, "a test"))
    shown = CliRunner().invoke(app, ["clusters", str(path)])
    assert shown.exit_code == 0
    assert "made up" in shown.output
    path.write_text("name = 1")
    bad = CliRunner().invoke(app, ["clusters", str(path)])
    assert bad.exit_code == 2
    assert "name is 1: a text" in bad.output
