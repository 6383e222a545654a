"""The timeline of a program: what waits for what, what hides, and what the search's own prices add up to."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import models
import pytest
import torch
from torch import nn

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.links import ALGORITHMS, KINDS
from autopar.cluster.loads import loads, prices
from autopar.cluster.machine import Cluster, Device, Level, Operators, operator_key
from autopar.cost.bucketed import PACKING
from autopar.cost.streams import timeline
from autopar.cost.timeline import COMPUTE, Timeline
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.planning.account import least_seconds
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.solve.effort import Effort

SIZE = 1000
OP, REDUCE = 3e-3, 0.01
"""Seconds of an elementwise op of two operands (12 kB at 4 MB/s), and of an all-reduce over two ranks."""


@functools.cache
def captured(name: str) -> Planner:
    case = models.case(name)
    return Planner(case.model, {"a": 4}, case.args, case.kwargs, loss_fn=case.loss_fn)


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
        made.append(Node(op=name, args=args, outputs=(result,)))
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


def test_two_axes_share_the_links_of_a_level() -> None:
    """On one level of four, the groups of the outer axis have half of a link each and use all of it, and so do those of
    the inner axis, whose groups of two have their own: together each takes longer, and both as long as in turn."""
    lines = ("r = all_reduce x sum 0", "s = all_reduce x sum 1", "v = wait r", "w = wait s")
    found = timeline(program(*lines, axes="ab"), machine(4))
    alone = [event.alone_seconds for event in found.events]
    outer, inner = (collective_seconds("all_reduce", 4 * SIZE, link) for link in machine(4).links((2, 2)))
    assert alone == pytest.approx([outer, inner])
    assert [event.seconds for event in found.events] == pytest.approx([outer + inner, 2 * inner])
    assert found.seconds == pytest.approx(sum(alone))
    assert found.communication_seconds == pytest.approx(sum(alone))
    in_turn = timeline(program(lines[0], lines[2], lines[1], lines[3], axes="ab"), machine(4))
    assert [event.seconds for event in in_turn.events] == pytest.approx(alone)


def test_what_an_algorithm_leaves_of_the_links_of_a_level() -> None:
    """Over all of 2 x 4 devices with 25 GB/s out of a node and 100 GB/s out of a device: a ring fills the slowest level
    and leaves three quarters of the other; level by level they take turns, 1 / 25 on one and 1.5 / 100 on the other."""
    levels = (
        Level(name="net", size=2, bytes_per_second=25e9, group_bytes_per_second=25e9, latency_seconds=0.0),
        Level(name="node", size=4, bytes_per_second=100e9, group_bytes_per_second=100e9, latency_seconds=0.0),
    )
    (link,) = replace(machine(2), levels=levels, algorithms=ALGORITHMS).links((8,))
    assert loads("all_reduce", "ring", link) == ((0, 1.0), (1, 0.25))
    between, within = 1 / 25, 1.5 / 100
    expected = ((0, pytest.approx(between / (between + within))), (1, pytest.approx(within / (between + within))))
    assert loads("all_reduce", "hierarchical", link) == expected
    for kind in KINDS:
        for name, price in prices(kind, 1e6, link).items():
            assert price.moving and all(0 < part <= 1 for _, part in loads(kind, name, link)), (kind, name)


def test_a_collective_and_an_operator_share_memory_where_the_device_says_so() -> None:
    """An all-reduce over two ranks sends its bytes once. With two bytes of memory for each, at a tenth of the memory's
    rate, it takes 0.2 of what the operator, which waits for memory alone, needs: both slow down to 1 / 1.2."""
    lines = ("r = all_reduce x sum 0", "y = add.Tensor x x", "w = wait r")
    on = machine(2)
    shared = replace(on, device=replace(on.device, memory_bytes_per_link_byte=2.0))
    found = timeline(program(*lines), shared)
    reduce, add = found.events
    assert add.seconds == pytest.approx(1.2 * OP)
    assert reduce.seconds == pytest.approx(REDUCE + 0.2 * OP)
    assert timeline(program(*lines), on).seconds == pytest.approx(REDUCE)


def test_operators_go_on_with_what_collectives_leave_of_the_processor() -> None:
    """A collective that takes a quarter: of both, begun at once, the longer one takes a quarter of the shorter more."""
    reduce, add, wait = "r = all_reduce x sum 0", "y = add.Tensor x x", "w = wait r"
    on = machine(2)
    shared = replace(on, levels=tuple(replace(level, compute_share=0.25) for level in on.levels))
    assert timeline(program(reduce, add, wait), shared).seconds == pytest.approx(REDUCE + 0.25 * OP)
    longer = [f"{name} = add.Tensor x x" for name in ("y", "z", "u", "v", "p", "q")]
    assert len(longer) * OP > REDUCE
    found = timeline(program(reduce, *longer, wait), shared)
    assert found.seconds == pytest.approx(len(longer) * OP + 0.25 * REDUCE)
    assert timeline(program(reduce, wait, add), shared).seconds == pytest.approx(REDUCE + OP), "apart, each is alone"


def test_a_rank_may_be_busy_with_the_start_of_a_collective() -> None:
    lines = ("y = add.Tensor x x", "r = all_reduce y sum 0", "w = wait r")
    on, vector = machine(2), TensorMeta((SIZE,), torch.float32)
    known = Operators(seconds={operator_key("collective.all_reduce", [vector], [vector]): OP})
    found = timeline(program(*lines), replace(on, device=replace(on.device, operators=known)))
    assert [(e.op, e.stream) for e in found.events][1:] == [("collective.all_reduce", s) for s in (COMPUTE, "a")]
    assert found.events[2].start_seconds == pytest.approx(2 * OP)
    assert found.exposed_seconds == pytest.approx(sum(stall.seconds for stall in found.stalls)) == pytest.approx(REDUCE)


def test_what_is_exposed_adds_up_over_kinds_and_axes() -> None:
    """Of the first all-reduce the rank waits for all but an operator; the second, behind it on the axis, is hidden but
    for what is left after two more."""
    lines = (
        *("r = all_reduce x sum 0", "s = all_reduce x sum 0", "y = add.Tensor x x", "v = wait r"),
        *("z = add.Tensor y v", "u = add.Tensor y z", "w = wait s"),
    )
    found = timeline(program(*lines), machine(2))
    assert [stall.seconds for stall in found.stalls] == pytest.approx([REDUCE - OP, REDUCE - 2 * OP])
    (row,) = found.communication
    assert (row.kind, row.axis, row.count, row.bytes) == ("all_reduce", "a", 2, 2 * 4 * SIZE)
    assert row.exposed_seconds == pytest.approx(found.exposed_seconds) == pytest.approx(2 * REDUCE - 3 * OP)
    assert row.hidden_seconds == pytest.approx(3 * OP)
    waited = timeline(program("r = all_reduce x sum 0", "s = all_reduce x sum 0", "y = add.Tensor x x"), machine(2))
    assert waited.communication[0].exposed_seconds == pytest.approx(2 * REDUCE - OP)


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


@pytest.mark.parametrize("preset", ["dp", "fsdp", "ddp", "meshslice"])
def test_copies_of_what_travels_alone_are_those_of_the_program(preset: str) -> None:
    """Where no collective is small enough for a bucket, the operators of the program take what the search prices."""
    planner = wide()
    plan = planner.plan(solver=preset, memory_limit_bytes=math.inf)
    plain = timeline(codegen(planner.space, planner.assignment(plan)), planner.cluster)
    local_seconds = plan.account.compute_seconds + plan.account.copy_seconds
    assert plain.busy_seconds(COMPUTE) == pytest.approx(local_seconds, rel=1e-9)


@pytest.mark.parametrize("solver", ["dp", "fsdp", "ddp", "megatron", "meshslice"])
def test_what_travels_in_buckets_takes_the_operators_that_it_is_priced_for(solver: str) -> None:
    """Small tensors take more launches than bytes: each gathered one is put together from ranks' parts by itself."""
    planner = captured("gpt2").on({"dp": 4, "tp": 2}, "dgx-h100")
    plan = planner.plan(solver=solver)
    local_seconds = plan.account.compute_seconds + plan.account.copy_seconds
    events = planner.timeline(plan).events
    buckets = sum(event.op == "aten.cat.default" for event in events)
    busy = sum(event.seconds for event in events if event.stream == COMPUTE)
    launches = (busy - local_seconds) / planner.cluster.device.seconds_per_op
    assert -0.01 * len(events) <= launches <= PACKING * buckets + 0.01 * len(events)


@functools.cache
def wide() -> Planner:
    """Of a layer with matrices of 32 MiB."""
    with torch.device("meta"):
        layers = (nn.Linear(4096, 4096, bias=False), nn.GELU(), nn.Linear(4096, 4096, bias=False))
        model = nn.Sequential(*layers).to(torch.bfloat16)
        inputs = torch.zeros(64, 128, 4096, dtype=torch.bfloat16)
    return Planner(model, {"dp": 2, "tp": 4}, (inputs,), loss_fn=lambda y: y.float().mean(), cluster="dgx-h100")


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_parts_are_those_that_the_search_prices(preset: str, mesh: dict[str, int]) -> None:
    """Without latencies a bucket changes nothing on links. Local copies of what travels are priced by its bytes, and
    the program makes those that it needs."""
    cluster = models.without_latency()
    planner = captured("gpt2").on(mesh, cluster)
    try:
        plan = planner.plan(solver=preset)
    except ValueError as error:
        pytest.skip(f"not on this mesh: {error}")
    plain = codegen(planner.space, planner.assignment(plan))
    found = timeline(plain, cluster)
    assert sum(row.exposed_seconds for row in found.communication) == pytest.approx(found.exposed_seconds)
    links = cluster.links(tuple(mesh.values()))
    issued = sum(collective_seconds(k, size, links[list(mesh).index(a)]) for k, a, size in plain.collectives())
    assert found.communication_seconds == pytest.approx(issued)
    assert found.communication_seconds == pytest.approx(plan.account.communication_seconds, rel=1e-6)
    bucketed = timeline(planner.program(plan), cluster)
    assert sum(row.exposed_seconds for row in bucketed.communication) == pytest.approx(bucketed.exposed_seconds)
    assert 0 < bucketed.utilization < 1
    local_seconds = plan.account.compute_seconds + plan.account.copy_seconds
    # what is priced for copies into buckets is what they take at least
    assert found.busy_seconds(COMPUTE) <= 1.03 * local_seconds
    assert local_seconds <= bucketed.busy_seconds(COMPUTE)
    travelling = sum(size for _, _, size in plain.collectives())
    copies = 4 * travelling / cluster.device.memory_bytes_per_second  # into buckets, and out of them
    assert 0 <= bucketed.busy_seconds(COMPUTE) - found.busy_seconds(COMPUTE) <= copies
    assert bucketed.communication_seconds == pytest.approx(found.communication_seconds)
    assert max(bucketed.busy_seconds(s) for s in (COMPUTE, *mesh)) <= bucketed.seconds
    assert bucketed.seconds <= bucketed.busy_seconds(COMPUTE) + bucketed.communication_seconds


@pytest.mark.parametrize(
    ("name", "mesh", "cluster", "part"),
    [
        ("gpt2 untied", {"a": 4}, "dgx-h100", None),
        ("gpt2 untied", {"dp": 2, "tp": 2}, "dgx-h100", None),
        ("gpt2 untied", {"dp": 2, "tp": 2}, "local", None),
        ("mlp with loss_fn", {"dp": 2, "tp": 2}, "a100-pcie", None),
        ("mlp with loss_fn", {"a": 4}, "local", 0.9),
    ],
)
def test_no_preset_has_a_shorter_step_than_the_free_plan(
    name: str, mesh: dict[str, int], cluster: str, part: float | None
) -> None:
    """With what overlaps; and under a limit, of a part of what the fastest plan needs."""
    planner = captured(name).on(mesh, cluster)
    free = planner.plan()
    limit = None if part is None else part * free.bytes
    if limit is not None:
        free = planner.plan(memory_limit_bytes=limit)
        assert free.bytes <= limit
    steps = {}
    for preset in PRESETS:
        try:
            made = planner.plan(solver=preset, memory_limit_bytes=limit)
        except ValueError:
            continue
        steps[preset] = made.seconds
        assert made.seconds >= least_seconds(planner.space, planner.assignment(made))
    assert steps and free.seconds <= min(steps.values()) * (1 + 1e-6), steps
    assert free.seconds == timeline(planner.program(free), planner.cluster).seconds + free.account.optimizer_seconds


def test_presets_that_leave_too_much_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    made = captured("gpt2 untied").on({"dp": 2, "tp": 2}, "dgx-h100")
    with_them = made.plan()
    with caplog.at_level("INFO", logger="autopar"):
        without = made.on(made.mesh, made.cluster, Effort(preset_options=0)).plan()
    assert {f"no plan by {name}: it leaves" in caplog.text for name in PRESETS} == {True}
    assert with_them.seconds <= without.seconds <= made.plan(cost="serial").seconds


def test_what_is_kept_off_an_axis_is_kept_off_it_in_every_candidate() -> None:
    """A preset wins without constraints; with them, no plan breaks them."""
    planner = captured("gpt2 untied").on({"dp": 2, "tp": 2}, "dgx-h100")
    plan = planner.plan(constraints={"transformer.h.*": {"tp": "R"}})
    layers = [p for name, p in plan.parameters.items() if name.startswith("transformer.h.")]
    assert layers and all(p.at_rest[1] == "R" for p in layers)


def test_the_trace_has_a_thread_for_each_stream() -> None:
    found: Timeline = timeline(program("r = all_reduce x sum 0", "y = add.Tensor x x", "w = wait r"), machine(2))
    trace = json.loads(json.dumps(found.to_chrome()))
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"} == {COMPUTE, "a"}
    spans = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert spans["collective.all_reduce r"]["dur"] == pytest.approx(REDUCE * 1e6)
    assert spans["aten.add.Tensor y"]["tid"] != spans["collective.all_reduce r"]["tid"]
    assert spans["collective.wait r"]["tid"] == spans["aten.add.Tensor y"]["tid"]
    assert spans["collective.wait r"]["dur"] == pytest.approx((REDUCE - OP) * 1e6)
