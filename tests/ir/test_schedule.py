"""Schedules as data: what is refused, texts that parse back, files of torch, transfers that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import named, some_edges

from autopar.ir.schedule import Action, Schedule, chain, parsed_schedule, with_transfers
from autopar.solve.schedules import scheduled

TWO = """1f1b: stages on devices 0 1, 2 micro-batches
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1"""


def test_a_schedule_is_a_line_of_actions_for_each_device() -> None:
    assert str(scheduled("1f1b", 2, 2)) == TWO
    assert parsed_schedule(TWO) == scheduled("1f1b", 2, 2)


def test_micro_batches_in_flight_are_counted_by_stage_or_by_device() -> None:
    schedule = parsed_schedule(
        "name: stages on devices 0 1 0, 2 micro-batches\n0F0 0F1 2F0 2I0 0B0 2F1 2B1 0B1 2W0\n1F0 1F1 1B0 1B1"
    )
    assert schedule.in_flight(range(3)) == [2, 2, 1]
    assert schedule.in_flight(schedule.devices) == [3, 2], "a gradient of weights holds none"


def test_a_receive_comes_ahead_of_its_unit_only_where_two_devices_would_wait_for_each_other() -> None:
    """Device 0 sends F1 while device 1 sends B0: device 1 receives F1 first, which it needs sooner than 0 needs B0."""
    _, first, second = str(with_transfers(parsed_schedule(TWO), chain(2))).splitlines()
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert second == "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"


def test_skips_have_transfers_of_their_own_and_values_within_a_device_none() -> None:
    schedule = scheduled("zb-v", 2, 1, chunks=2)
    made = with_transfers(schedule, [*chain(4), (0, 2, "F"), (2, 0, "B"), (0, 3, "F"), (3, 0, "B")])
    _, first, second = str(made).splitlines()
    assert first == "0F0 0SEND_F0 0SEND_F0:2 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0:2 0RECV_B0 0I0 0W0"
    assert second == "1RECV_F0 1F0 2RECV_F0:0 2F0 2SEND_F0 2RECV_B0 2I0 2SEND_B0:0 2W0 1I0 1SEND_B0 1W0"
    assert parsed_schedule(str(made)) == made
    with pytest.raises(ValueError, match="zb-v: torch's runtime has no skips between stages, such as 0SEND_F0:2"):
        made.to_csv()


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0B1", "", "1f1b: 0B1 is missing"),
        ("1F1 1B1", "", "1f1b: 1F1 is missing"),
        ("0B1", "0I1", "1f1b: 0W1 is missing"),
        ("0B1", "0W1 0I1", "1f1b: 0W1 comes twice, or before what it needs"),
        ("0B1", "0B1 0W1", "1f1b: 0W1 comes twice, or before what it needs"),
        ("0B1", "0B1 0B1", "1f1b: 0B1 comes twice, or before what it needs"),
        ("0F0 0F1 0B0", "0B0 0F1 0F0", "1f1b: 0B0 comes twice, or before what it needs"),
        ("0B1", "0B1 1B1", "1f1b: 1B1 is not on the device of a stage, but on 0"),
        ("0B1", "0B1 2F0", "1f1b: 2F0 is not on the device of a stage, but on 0"),
        ("0B1", "0B1 0F2", "1f1b: 0F2 is not on the device of a stage, but on 0"),
        ("devices 0 1", "devices 0 0", "1f1b: 1F0 is not on the device of a stage, but on 1"),
        ("0F0 0F1 0B0", "0F0 0B0 0F1", None),
        ("1F0 1B0 1F1", "1F1 1F0 1B0", None),
        (
            "0F0 0F1 0B0 0B1\n1F0 1B0 1F1",
            "0F0 0B0 0F1 0B1\n1F1 1F0 1B0",
            "wait for each other: device 0 at 0B0, device",
        ),
        ("0B1", "0B1 0SEND_F1", "1f1b: 1RECV_F1 is missing, and its counterpart is there"),
        ("0F0 ", "0SEND_F0 0F0 ", "1f1b: 0SEND_F0 is there twice, or on the wrong side of its unit"),
        ("1F0 ", "1F0 1RECV_F0 ", "1f1b: 1RECV_F0 is there twice, or on the wrong side of its unit"),
    ],
)
def test_what_cannot_be_run_is_refused(old: str, new: str, message: str | None) -> None:
    changed = parsed_schedule(TWO.replace(old, new))
    if message is None:
        changed.check()
    else:
        with pytest.raises(ValueError, match=message):
            changed.check()


def test_sends_that_wait_for_each_other_are_refused() -> None:
    text = """1f1b: stages on devices 0 1, 2 micro-batches
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0B1
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1"""
    with pytest.raises(ValueError, match="wait for each other: device 0 at 0SEND_F1, device 1 at 1SEND_B0"):
        parsed_schedule(text).check()
    parsed_schedule(text.replace("1SEND_B0 1RECV_F1", "1RECV_F1 1SEND_B0")).check()


@pytest.mark.parametrize("text", ["0G0", "F0", "0F", "0SEND_W1", "0SEND_1", "0F0:1x"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no action of a schedule: write 0F1"):
        parsed_schedule(text)


# ------------------------------------------------------------------------------------------------- transfers


def runs(schedule: Schedule, *, blocking: bool) -> bool:
    """Whether all devices come to their end: a receive waits until its send is reached, a blocking send for both."""
    at, done = [0] * len(schedule.orders), set[Action]()
    moving = True
    while moving:
        moving = False
        reached = {order[n] for n, order in zip(at, schedule.orders, strict=True) if n < len(order)} | done
        for device, order in enumerate(schedule.orders):
            while at[device] < len(order):
                action = order[at[device]]
                waits = action.kind == "receive" or (action.kind == "send" and blocking)
                if waits and action.mirror not in (reached if blocking else done):
                    break
                done.add(action)
                at[device] += 1
                moving = True
                if blocking and waits:
                    break  # what else is reached is seen in the next round
    return all(n == len(order) for n, order in zip(at, schedule.orders, strict=True))


@given(named(), st.data())
@settings(max_examples=60, deadline=None)
def test_transfers_cannot_deadlock_and_come_in_the_order_of_their_sends(schedule: Schedule, data: Any) -> None:
    edges = data.draw(some_edges(schedule.stages))
    made = with_transfers(schedule, edges)
    made.check()
    assert runs(made, blocking=True)
    assert runs(made, blocking=False)
    assert parsed_schedule(str(made)) == made
    units = [tuple(a for a in order if a.kind not in ("send", "receive")) for order in made.orders]
    assert units == [*schedule.orders]
    sent, received = defaultdict(list), defaultdict(list)
    place = {action: at for order in made.orders for at, action in enumerate(order)}
    for device, order in enumerate(made.orders):
        for action in order:
            if action.kind == "send":
                sent[device, made.devices[action.peer]].append(action.mirror)
                kinds = ("F",) if action.of == "F" else ("B", "I")
                unit = next(u for k in kinds if (u := Action(action.stage, k, action.micro_batch)) in place)
                between = order[place[unit] + 1 : place[action]]
                assert all(a.kind in ("send", "receive") for a in between)
            if action.kind == "receive":
                received[made.devices[action.peer], device].append(action)
    assert sent == received
    crossing = [edge for edge in edges if made.devices[edge[0]] != made.devices[edge[1]]]
    assert sum(map(len, sent.values())) == len(crossing) * schedule.micro_batches
    late = _latest(schedule, edges)
    if runs(late, blocking=True):
        assert made == late


def _latest(schedule: Schedule, edges: dict[Any, float]) -> Schedule:
    """Each receive right before its unit, whatever comes of it."""
    passes = {"F": "F", "B": "B", "I": "B"}
    orders = []
    for device, order in enumerate(schedule.orders):
        made: list[Action] = []
        for unit in order:
            of, number = passes.get(unit.kind), unit.micro_batch
            for source, target, kind in edges:
                if (target, kind) == (unit.stage, of) and schedule.devices[source] != device:
                    made.append(Action(target, "receive", number, source, kind))
            made.append(unit)
            for source, target, kind in edges:
                if (source, kind) == (unit.stage, of) and schedule.devices[target] != device:
                    made.append(Action(source, "send", number, target, kind))
        orders.append(tuple(made))
    return replace(schedule, orders=tuple(orders))


# ------------------------------------------------------------------------------------------------- torch


@given(named())
@settings(max_examples=40, deadline=None)
def test_torch_reads_what_is_written_for_it_and_comes_to_its_end(schedule: Schedule) -> None:
    made = with_transfers(schedule, chain(schedule.stages))
    with TemporaryDirectory() as place:
        for written, form in ((schedule, "compute_only"), (made, "compute_comms")):
            file = Path(place, f"{form}.csv")
            file.write_text(written.to_csv())
            assert replace(parsed_schedule(file.read_text()), name=written.name) == written
            runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
            runtime.pp_group_size, runtime._num_stages = len(written.orders), written.stages
            runtime._n_microbatches, runtime._stages = written.micro_batches, []
            runtime._defer_pp_recv, runtime.pipeline_order = False, {}
            runtime._load_csv(str(file), format=form)
            theirs = runtime.pipeline_order_with_comms
            assert runtime.stage_index_to_group_rank == dict(enumerate(written.devices))
    runtime._simulate()
    assert [[*map(str, row)] for row in theirs.values()] == [[*map(str, order)] for order in made.orders]


def test_actions_of_data_parallelism_are_left_out_and_what_overlaps_is_written_in_turn() -> None:
    text = "0UNSHARD,0F0,,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD,0RESHARD\n"
    assert str(parsed_schedule(text)) == "csv: stages on devices 0, 2 micro-batches\n0F0 0F1 0B0 0B1"
