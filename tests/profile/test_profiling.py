"""Profiled costs: what is measured, what is kept of it, and what plans make of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measured import PROGRAM, ROW
from models import mean_square, mlp
from papers import Layer
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cluster.collectives import collective_seconds
from autopar.cluster.library import named_cluster
from autopar.cluster.loads import price
from autopar.cluster.machine import Operators, operator_key
from autopar.cost.streams import timeline
from autopar.files.database import DatabaseError
from autopar.ir.graph import TensorMeta
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.segments.search import segments
from autopar.planning.planner import Planner
from autopar.planning.repriced import repriced
from autopar.planning.request import Request
from autopar.profile.database import CollectiveRow, OperatorRow, Profiles, links_key
from autopar.profile.programs import Costs, segment_programs, structure
from autopar.runtime.profiled import profiled

pytestmark = pytest.mark.timeout(120)


# --- the database


def test_what_was_written_is_read(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / "cache" / "p.sqlite")
    profiles.add([ROW, PROGRAM, replace(ROW, machine="two")])
    profiles.add([replace(ROW, seconds=2.0)])  # takes the place of the first
    assert Profiles(profiles.path).rows("operators", machine="one") == [replace(ROW, seconds=2.0)]
    assert profiles.rows("programs") == [PROGRAM]
    assert profiles.rows("operators", machine="three") == []
    counts = {"operators": 1, "collectives": 0, "programs": 0}
    assert profiles.machines()["two"] == counts

    other = Profiles(tmp_path / "other.sqlite")
    assert other.read(profiles.export()) == 3
    assert other.rows("programs") == [PROGRAM]
    with pytest.raises(ValueError, match="not what autopar profiles export wrote: application is missing"):
        other.read("{}")
    assert other.prune(machine="tw") == 1
    assert other.prune(older_than_days=1) == 1
    assert other.prune() == 1
    assert other.machines() == {}


def writes(path: str, name: str) -> None:
    profiles = Profiles(path)
    for number in range(40):
        profiles.add([replace(ROW, machine=name, key=str(number)), replace(PROGRAM, machine=name)])


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path = tmp_path / "p.sqlite"
    processes = [context.Process(target=writes, args=(str(path), name)) for name in ("one", "two")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    counts = {"operators": 40, "collectives": 0, "programs": 1}
    assert Profiles(path).machines() == {"one": counts, "two": counts}


@pytest.mark.parametrize("what", ["torn", "newer", "other columns"])
def test_a_broken_database_of_ours_is_set_aside(what: str, tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Profiles(path).add([PROGRAM])
    if what == "torn":
        content = path.read_bytes()
        path.write_bytes(content[:100] + b"\xff" * 400)
    else:
        change = "PRAGMA user_version = 99" if what == "newer" else "ALTER TABLE programs RENAME COLUMN model TO net"
        with sqlite3.connect(path) as connection:
            connection.execute(change)
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"p\.sqlite is no profile database .*set aside as .*p\.sqlite\.aside-1"):
        Profiles(path)
    assert (tmp_path / "p.sqlite.aside-1").read_bytes() == before
    assert Profiles(path).machines() == {}  # a new one


@pytest.mark.parametrize("what", ["weights", "short", "another's database", "torn beyond recognition"])
def test_a_file_that_autopar_did_not_write_stays_as_it_is(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if what == "another's database":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE theirs (a)")
    else:
        path.write_bytes(
            {"weights": b"\x40" + bytes(7) + b"{}" * 100, "short": b"x"}.get(what, b"SQLite format 3\0" * 9)
        )
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"model\.safetensors is no profile database, and was left as it is; give"):
        Profiles(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "p.sqlite").touch()
    Profiles(tmp_path / "p.sqlite").add([ROW])


@pytest.mark.parametrize("value", ["'long'", "-1.0", "9e999", "x'00'"])
def test_a_figure_that_is_no_number_is_an_error_that_says_where(value: str, tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Profiles(path).add([ROW])
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE operators SET seconds = {value}")
    with pytest.raises(DatabaseError, match=r"p\.sqlite: operators\.seconds is .*: a number.*; remove what is broken"):
        Profiles(path).rows("operators")
    assert Profiles(path).prune(machine="one") == 1
    assert Profiles(path).rows("operators") == []


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="a folder that can be written"):
        Profiles(tmp_path / "file" / "p.sqlite")
    with pytest.raises(DatabaseError, match="can be opened and written"):
        Profiles(tmp_path)


# --- prices


def test_measured_operators_go_before_rooflines() -> None:
    device = named_cluster("dgx-a100").device
    x, y = (TensorMeta((n, n), torch.float32) for n in (64, 128))
    roofs = [device.operator_seconds("aten.mm.default", (m, m), (m,), 2.0 * m.shape[0] ** 3) for m in (x, y)]
    known = Operators(
        seconds={operator_key("aten.mm.default", (x, x), (x,)): 1.0},
        ratios={"aten.mm.default": 3.0, "": 2.0},
        seconds_per_byte={"sgd": 5.0},
    )
    measured = replace(device, operators=known)
    assert measured.operator_seconds("aten.mm.default", (x, x), (x,), 1.0) == 1.0
    assert measured.operator_seconds("aten.mm.default", (y, y), (y,), 2.0 * 128**3) == 3.0 * roofs[1]
    assert measured.operator_seconds("aten.bmm.default", (x, x), (x,), 2.0 * 64**3) == 2.0 * roofs[0]
    assert measured.optimizer_seconds("sgd", 2.0) == 10.0
    assert measured.optimizer_seconds("adamw", 2.0) == device.optimizer_seconds("adamw", 2.0)


def test_measured_collectives_bend_the_formula() -> None:
    (plain,) = named_cluster("dgx-a100").links((8,))
    link = replace(plain, factors=(("all_reduce", ((1 << 10, 2.0), (1 << 20, 8.0))),))
    for size, factor in ((1, 2.0), (1 << 10, 2.0), (1 << 15, 4.0), (1 << 20, 8.0), (1 << 24, 8.0)):
        told = collective_seconds("all_reduce", size, link)
        assert told == pytest.approx(factor * collective_seconds("all_reduce", size, plain))
        assert price("all_reduce", size, link).seconds() == pytest.approx(told)
    assert collective_seconds("all_gather", 1 << 20, link) == collective_seconds("all_gather", 1 << 20, plain)
    assert links_key([link]) == links_key([plain])


def test_a_collective_that_was_disturbed_is_priced_as_its_neighbours_are(tmp_path: Path) -> None:
    cluster, slow = named_cluster("dgx-a100"), 1 << 20
    (link,) = cluster.links((8,))
    profiles = Profiles(tmp_path / "profiles.sqlite")
    for size in (slow // 4, slow // 2, slow, 2 * slow, 8 * slow):
        told = collective_seconds("all_reduce", size, link)
        taken = 2 * told * (9 if size == slow else 1)
        profiles.add(
            [
                CollectiveRow(
                    machine="machine", links=links_key([link]), kind="all_reduce", bytes=size, seconds=taken, runs=5
                )
            ]
        )
    costs = Costs(profiles=profiles, machine="machine", cluster=cluster, with_links=True)
    about = dict(machine="machine", program="", key="aten.mm.default", dtype="float32")
    profiles.add([OperatorRow(**about, seconds=1.0, spread=0.0, runs=1, flops=1.0, bytes=1)])
    (measured,) = costs.measured((8,)).links((8,))
    for size in (slow // 4, slow, 8 * slow):
        assert collective_seconds("all_reduce", size, measured) == pytest.approx(
            2 * collective_seconds("all_reduce", size, link)
        )


# --- segment programs


def planner_of(layers: int, mesh: dict[str, int]) -> Planner:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Layer(64, 4) for _ in range(layers))), torch.zeros(8, 16, 64)
    return Planner(model, mesh, (x,), loss_fn=mean_square, cluster="dgx-a100")


def test_what_is_measured_does_not_grow_with_depth() -> None:
    """CFP Eq. 7 and the segment programs of a plan are those of a model of any depth."""
    counts, keys = [], []
    for layers in (5, 9):
        planner = planner_of(layers, {"dp": 2, "tp": 2})
        counts.append(segment_programs(planner.captured.graph, planner.segments, (2, 2)))
        plan = planner.plan(solver="megatron")
        segment = planner.writer.segment_program(planner.assignment(plan), plan.bucket_bytes)
        keys.append(structure(segment))
        assert len(segment.forward) < len(planner.program(plan).forward)
    assert counts[0] == counts[1]
    assert keys[0] == keys[1]


def test_measured_prices_do_not_change_the_program_of_a_plan(tmp_path: Path) -> None:
    """What was measured is what runs, though by what was measured another route would be cheaper."""
    planner = planner_of(3, {"dp": 2, "tp": 2})
    profiles = Profiles(tmp_path / "p.sqlite")
    about = dict(machine="machine", program="", key="aten.mm.default", dtype="float32")
    profiles.add([OperatorRow(**about, seconds=1.0, spread=0.0, runs=1, flops=1.0, bytes=1)])
    for link in planner.cluster.links((2, 2)):
        size = 1 << 20
        taken = 1000 * collective_seconds("all_reduce", size, link)
        about = dict(machine="machine", links=links_key([link]), kind="all_reduce", runs=5)
        profiles.add([CollectiveRow(**about, bytes=size, seconds=taken)])
    costs = Costs(profiles=profiles, machine="machine", cluster=planner.cluster, with_links=True)
    plan, measured = planner.plan(solver="ddp"), planner.profiled(costs)
    one, other = (p.assignment(plan) for p in (planner, measured))
    quickest = planner.on(planner.mesh, measured.cluster)
    assert structure(codegen(quickest.space, quickest.assignment(plan))) != structure(codegen(planner.space, one))
    assert structure(codegen(measured.space, other)) == structure(codegen(planner.space, one))
    assert structure(planner.program(plan)) == structure(measured.program(plan))
    told, priced = repriced(planner, plan).account, repriced(measured, plan).account
    assert told.communication_seconds < priced.communication_seconds
    both = [sorted((r.kind, r.axis, r.count, r.bytes) for r in found.collectives) for found in (told, priced)]
    assert both[0] == both[1]
    segments = [
        structure(p.writer.segment_program(a, plan.bucket_bytes)) for p, a in ((planner, one), (measured, other))
    ]
    assert segments[0] == segments[1]


def test_programs_to_profile_are_those_of_the_paper_and_of_residuals() -> None:
    """CFP 5.5 counts 2 x 81 configurations of two unique segments, and pairs of the last block of one with the first of
    the next; residual connections make more blocks depend on each other here: 8 pairs of 9."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(Layer(256, 8) for _ in range(4))), torch.zeros(8, 64, 256)
    graph = capture(model, (x,), {}).graph
    assert segment_programs(graph, segments(graph), (4,)) == 2 * 3**4 + 8 * 3 * 3


# --- one device alone


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return mlp(), torch.randn(8, 16)


def test_hybrid_costs_are_measured_once_on_one_device(tmp_path: Path) -> None:
    model, x = small()
    path = tmp_path / "p.sqlite"

    def found() -> Any:
        planner = Planner(
            model,
            {"dp": 2, "tp": 2},
            (x,),
            loss_fn=mean_square,
            cluster="dgx-a100",
            optimizer="sgd",
            profiles=path,
        )
        return planner, *profiled(planner, None, Request())

    planner, plan, told = found()
    assert plan.cost == "hybrid"
    assert told.measured >= 1 and told.recorded == 0
    machine = next(iter(Profiles(path).machines()))
    costs = Costs(profiles=Profiles(path), machine=machine, cluster=planner.cluster, with_links=False)
    # the plan's step is made of measured operators, and of the cluster's links
    assert plan.seconds == pytest.approx(repriced(planner.profiled(costs), plan).seconds)
    keys = {row.key for row in costs.profiles.rows("operators")}
    for event in timeline(planner.program(plan), costs.measured((2, 2))).events:
        assert event.stream != "compute" or any(key.startswith(event.op + " ") for key in keys)
    # another run, of another process maybe, measures nothing
    _, again, known = found()
    assert (known.measured, known.recorded) == (0, told.measured + told.recorded)
    assert again.decisions == plan.decisions


def test_what_needs_ranks_says_so() -> None:
    model, x = small()
    with pytest.raises(ValueError, match="profiled costs are measured by the ranks"):
        autopar.plan(model, {"dp": 2}, (x,), loss_fn=mean_square, cost="profiled")


# --- on ranks


def trains(path: str) -> tuple[float, float, float, int]:
    """Loss of a profiled plan and of the model alone, the predicted step without the optimizer's, and how many programs
    are known afterwards."""
    model, x = small()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    module = autopar.parallelize(model, mesh, (x,), loss_fn=mean_square, cost="profiled", profiles=path)
    loss = module(x)
    loss.backward()
    assert module.plan.cost == "profiled"
    plan = module.plan
    step = plan.seconds - plan.account.optimizer_seconds
    return loss.item(), mean_square(model(x)).item(), step, len(Profiles(path).rows("programs"))


def test_ranks_measure_and_train_by_what_they_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "p.sqlite")
    first, second = run(2, trains, path), run(2, trains, path)
    assert first[0] == first[1] and first[0][0] == pytest.approx(first[0][1], rel=1e-5)
    assert first[0][3] == second[0][3] >= 1  # the second run measured nothing
    (machine,) = Profiles(path).machines()
    assert "2 ranks a host" in machine
    rows = Profiles(path).rows("programs")
    assert all(row.seconds > 0 and row.peak_bytes > 0 and row.runs >= 2 for row in rows)
    # the plan's step is that of a measured program, and the second run's that which the first one measured
    for _, _, step, _ in (first[0], second[0]):
        assert any(step == pytest.approx(row.seconds, rel=1e-6) for row in rows)


def dies(path: str, at: int, rank: int) -> None:
    """Profiles, and a rank is killed when the program of that number is to be measured."""
    from autopar.runtime import profiler

    model, x = small()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    planner = Planner(model, {"dp": 2, "tp": 1}, (x,), loss_fn=mean_square, profiles=path)
    orders = 0
    measured: Callable[..., Any] = profiler.Bench.measured

    def counted(bench: Any, order: Any) -> Any:
        nonlocal orders
        if orders == at and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        orders += 1
        return measured(bench, order)

    profiler.Bench.measured = counted  # type: ignore[method-assign]
    profiled(planner, mesh, Request())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_takes_nothing_with_it(rank: int, tmp_path: Path) -> None:
    """The other one says so by itself: `outcomes` would end it after 10 s, with another error."""
    path = tmp_path / "p.sqlite"
    found = outcomes(2, dies, str(path), 1, rank)
    assert "the process died" in str(found[rank].error)
    assert "A peer has probably died" in str(found[1 - rank].error)
    (kept,) = Profiles(path).rows("programs")  # what was measured before
    run(2, trains, str(path))
    assert kept in Profiles(path).rows("programs")  # and was not measured again


# --- the command line


def autopar_(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def build(width: int, batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    """A model for module:callable."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU()), (torch.randn(batch, width),), torch.mean


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, copy, written = tmp_path / "p.sqlite", tmp_path / "copy.sqlite", tmp_path / "p.json"
    monkeypatch.delenv("RANK", raising=False)
    options = ("--set", "width=8", "--mesh", "dp=2", "--profiles", path, "--out", tmp_path / "plan.json")
    done = autopar_("profile", "test_profiling:build", *options)
    assert done.exit_code == 0, done.output
    assert "segment programs (CFP Eq. 7)" in done.output and "measured" in done.output
    assert json.loads((tmp_path / "plan.json").read_text())["cost"] == "hybrid"
    listed = autopar_("profiles", "list", "--profiles", path)
    program = Profiles(path).rows("programs")[0].structure
    assert "Sequential" in listed.output and program in listed.output and "1 rank a host" in listed.output
    assert max(map(len, listed.output.splitlines())) <= 80
    shown = autopar_("profiles", "show", program[:8], "--profiles", path)
    assert f"program {program}" in shown.output and "aten." in shown.output
    assert autopar_("profiles", "export", written, "--profiles", path).exit_code == 0
    assert autopar_("profiles", "import", written, "--profiles", copy).exit_code == 0
    assert Profiles(copy).export() == Profiles(path).export()
    assert autopar_("profiles", "prune", "--all", "--profiles", copy).exit_code == 0
    assert Profiles(copy).machines() == {}
    for arguments, message in (
        (("prune",), "give --machine TEXT, --older-than DAYS, or --all"),
        (("show", "zzz"), "no program 'zzz'"),
        (("import", tmp_path / "none"), "No such file"),
        (("list", "--profiles", tmp_path / "none"), "no profile database there"),
    ):
        wrong = autopar_("profiles", *arguments, *(() if "--profiles" in arguments else ("--profiles", path)))
        assert wrong.exit_code == 2 and message in wrong.output
