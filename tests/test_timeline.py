"""The timeline of a program: what waits for what, what hides, and what the search's own prices add up to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import models
import pytest
import torch

from autopar.api import Planner
from autopar.cluster import Cluster, Device, Level
from autopar.clusters import CLUSTERS
from autopar.collectives import collective_seconds
from autopar.graph import Ref, TensorMeta
from autopar.passes.codegen import codegen
from autopar.presets import PRESETS
from autopar.program import Instruction, Program
from autopar.timeline import COMPUTE, Timeline, timeline

SIZE = 1000
OP, REDUCE = 3e-3, 0.01
"""Seconds of an elementwise op of two operands (12 kB at 4 MB/s), and of an all-reduce over two ranks."""


def machine(*sizes: int) -> Cluster:
    device = Device(
        name="a device",
        flops_per_second={"float32": 1e12},
        memory_bytes=1e9,
        memory_bytes_per_second=4e6,
        seconds_per_op=0.0,
    )
    levels = tuple(
        Level(name=str(n), size=n, bytes_per_second=4e5, group_bytes_per_second=4e5, latency_seconds=0.0) for n in sizes
    )
    return Cluster(name="a cluster", device=device, levels=levels, algorithms=("ring", "pairwise", "message"))


def program(*lines: str, axes: Sequence[str] = ("a",)) -> Program:
    """Forward instructions `result = op operand ...` on vectors; numbers are constants."""
    made = []
    for line in lines:
        result, op, *operands = line.replace("=", " ").split()
        args = tuple(int(o) if o.isdigit() else o if o == "sum" else Ref(o) for o in operands)
        name = f"collective.{op}" if op in ("all_reduce", "wait") else f"aten.{op}"
        made.append(Instruction(op=name, args=args, outputs=(result,)))
    metas = dict.fromkeys(["x", *(i.outputs[0] for i in made)], TensorMeta((SIZE,), torch.float32))
    return Program(
        axes=tuple(axes),
        mesh=(2,) * len(axes),
        inputs=(),
        forward=tuple(made),
        backward=(),
        saved=(),
        outputs=(),
        metas=metas,
    )


def test_operators_follow_each_other_and_a_collective_runs_beside_them() -> None:
    found = timeline(program("r = all_reduce x sum 0", "y = add.Tensor x x", "z = add.Tensor y x"), machine(2))
    assert [e.stream for e in found.events] == ["a", COMPUTE, COMPUTE]
    assert found.busy_seconds(COMPUTE) == pytest.approx(2 * OP)
    assert found.seconds == pytest.approx(REDUCE)
    assert found.exposed_seconds == pytest.approx(REDUCE - 2 * OP)


def test_a_wait_stands_still_for_what_is_left() -> None:
    lines = ("r = all_reduce x sum 0", "y = add.Tensor x x", "w = wait r", "z = add.Tensor w y")
    found = timeline(program(*lines), machine(2))
    assert found.seconds == pytest.approx(REDUCE + OP)
    assert found.exposed_seconds == pytest.approx(REDUCE - OP)
    at_once = timeline(program(lines[0], lines[2], lines[1], lines[3]), machine(2))
    assert at_once.seconds == pytest.approx(REDUCE + 2 * OP)


def test_an_axis_is_one_stream_and_two_axes_are_two() -> None:
    lines = ("r = all_reduce x sum 0", "s = all_reduce x sum {}", "v = wait r", "w = wait s")
    one = timeline(program(*(line.format(0) for line in lines)), machine(2))
    assert one.seconds == pytest.approx(2 * REDUCE)
    two = timeline(program(*(line.format(1) for line in lines), axes="ab"), machine(2, 2))
    slowest = max(e.seconds for e in two.events)
    assert two.seconds == pytest.approx(slowest) and two.communication_seconds > slowest


def test_what_a_view_moved_is_laid_out_once_it_must_be() -> None:
    """Of [10, 100]: transposed, then in a row, which copies; in a row as it lies; a column, and a row."""
    given = program("p = t.default x", "q = reshape.default p 1000", "r = reshape.default x 1000")
    square = TensorMeta((10, SIZE // 10), torch.float32)
    args = {"q": (Ref("p"), (SIZE,)), "r": (Ref("x"), (SIZE,))}
    forward = tuple(replace(i, args=args.get(i.outputs[0], i.args)) for i in given.forward)
    metas = {**given.metas, "x": square, "p": TensorMeta((SIZE // 10, 10), torch.float32)}
    found = timeline(replace(given, forward=forward, metas=metas), machine(2))
    assert [e.name for e in found.events] == ["q"]
    assert found.seconds == pytest.approx(2 * SIZE * 4 / 4e6)


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_parts_are_those_that_the_search_prices(preset: str, mesh: dict[str, int]) -> None:
    """Without latencies a bucket changes nothing on links. Local copies of what travels are priced by its bytes, and
    the program makes those that it needs."""
    local = CLUSTERS["local"]
    level = replace(local.levels[0], latency_seconds=0.0)
    device = replace(local.device, seconds_per_op=0.0)
    cluster = replace(local, levels=(level,), device=device)
    case = models.case("gpt2")
    planner = Planner(case.model, mesh, case.args, case.kwargs, loss_fn=case.loss_fn, cluster=cluster)
    try:
        plan = planner.plan(solver=preset)
    except ValueError as error:
        pytest.skip(f"not on this mesh: {error}")
    plain = codegen(planner.space, planner.assignment(plan))
    found = timeline(plain, cluster)
    links = cluster.links(tuple(mesh.values()))
    issued = sum(collective_seconds(k, size, links[list(mesh).index(a)]) for k, a, size in plain.collectives())
    assert found.communication_seconds == pytest.approx(issued)
    assert found.communication_seconds == pytest.approx(plan.account.communication_seconds, rel=1e-6)
    bucketed = timeline(planner.program(plan), cluster)
    local_seconds = plan.account.compute_seconds + plan.account.copy_seconds
    assert found.busy_seconds(COMPUTE) == pytest.approx(local_seconds, rel=0.3)
    travelling = sum(size for _, _, size in plain.collectives())
    copies = 4 * travelling / device.memory_bytes_per_second  # into buckets, and out of them
    assert 0 <= bucketed.busy_seconds(COMPUTE) - found.busy_seconds(COMPUTE) <= copies
    assert bucketed.communication_seconds == pytest.approx(found.communication_seconds)
    assert max(bucketed.busy_seconds(s) for s in (COMPUTE, *mesh)) <= bucketed.seconds
    assert bucketed.seconds <= bucketed.busy_seconds(COMPUTE) + bucketed.communication_seconds


def test_the_trace_has_a_thread_for_each_stream() -> None:
    found: Timeline = timeline(program("r = all_reduce x sum 0", "y = add.Tensor x x", "w = wait r"), machine(2))
    trace = json.loads(json.dumps(found.to_chrome()))
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"} == {COMPUTE, "a"}
    spans = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert spans["collective.all_reduce"]["dur"] == pytest.approx(REDUCE * 1e6)
    assert spans["aten.add.Tensor"]["tid"] != spans["collective.all_reduce"]["tid"]
