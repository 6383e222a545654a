"""Named schedules against torch's own, and the searched one: within its memory, never worse than what is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import NAMED, equal_costs, some_costs

from autopar.cost.pipeline import bound_seconds, simulate
from autopar.extensions import scoped
from autopar.ir.schedule import Schedule, parsed_schedule
from autopar.solve.schedules import SCHEDULES, Scheduler, gpipe, register_schedule, scheduled

THEIRS = {
    "gpipe": (torch_schedules.ScheduleGPipe, 1),
    "1f1b": (torch_schedules.Schedule1F1B, 1),
    "interleaved": (torch_schedules.ScheduleInterleaved1F1B, 3),
    "zb-v": (torch_schedules.ScheduleZBVZeroBubble, 2),
    "dualpipe-v": (torch_schedules.ScheduleDualPipeV, 2),
}
"""torch has no ZB-H1 and ZB-H2 of one stage a device: its InterleavedZeroBubble has gradients of weights elsewhere."""


def orders_of_torch(name: str, devices: int, micro_batches: int) -> list[str]:
    """torch's own orders, without groups of processes."""
    schedule, chunks = THEIRS[name]
    made = object.__new__(schedule)
    made.pp_group_size, made._n_microbatches, made.n_local_stages = devices, micro_batches, chunks
    made._num_stages = made.num_stages = devices * chunks
    made.microbatches_per_round = micro_batches // max(1, micro_batches // devices)
    if chunks == 1:
        orders = made._get_pipeline_order()
    else:
        orders = {rank: made._calculate_single_rank_operations(rank) for rank in range(devices)}
    return [",".join(str(a) for a in orders[rank] if a and "REDUCE" not in str(a)) for rank in range(devices)]


@pytest.mark.parametrize("name", THEIRS)
def test_orders_are_those_of_torch_where_it_has_one(name: str) -> None:
    compared = 0
    for devices in range(1, 7):
        for micro_batches in range(1, 17):
            has_none = {
                "1f1b": micro_batches < devices,  # warms up with micro-batches that there are not
                "interleaved": micro_batches % max(1, micro_batches // devices) > 0,
                "dualpipe-v": micro_batches < 2 * devices,
            }
            if has_none.get(name):
                continue
            theirs = orders_of_torch(name, devices, micro_batches)
            ours = scheduled(name, devices, micro_batches, chunks=THEIRS[name][1])
            if name == "1f1b":  # torch's listing, which it does not run, counts from 1 on the last device
                theirs[-1] = ",".join(f"{devices - 1}F{n},{devices - 1}B{n}" for n in range(micro_batches))
            assert parsed_schedule("\n".join(theirs)).orders == ours.orders
            compared += 1
    assert compared >= 60


@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_interleaved_runs_for_any_number_of_micro_batches(p: int, m: int, v: int) -> None:
    schedule = scheduled("interleaved", p, m, chunks=v)
    schedule.check()
    rounds = max(1, m // p)
    group = -(-m // rounds)
    most = min(m * v, (v - 1) * group + 2 * (p - 1) + 1)
    assert simulate(schedule, equal_costs(p * v, 1, 1, 1, chunks=v)).in_flight[0] == most


# ------------------------------------------------------------------------------------------------- searched


@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from((1, 1, 2, 3)), st.floats(0, 1), st.data())
@settings(max_examples=50, deadline=None)
def test_searched_fits_and_is_no_worse_than_what_is_named(p: int, m: int, chunks: int, part: float, data: Any) -> None:
    costs = data.draw(some_costs(p * chunks))
    rows = [name for name in NAMED if SCHEDULES[name].chunks in (chunks, None)]
    named = {name: simulate(scheduled(name, p, m, chunks=chunks), costs) for name in rows}
    peaks = {name: max(size for size, _ in timeline.peaks) for name, timeline in named.items()}
    limit = min(peaks.values()) + part * (max(peaks.values()) - min(peaks.values()))
    found = scheduled("searched", p, m, chunks=chunks, costs=costs, limit_bytes=limit)
    found.check()
    timeline = simulate(found, costs)
    assert max(size for size, _ in timeline.peaks) <= limit * (1 + 1e-6)
    best = min(named[name].seconds for name in rows if peaks[name] <= limit)
    bound = bound_seconds(found.devices, m, costs, limit)
    assert bound * (1 - 1e-9) <= timeline.seconds <= best * (1 + 1e-6)
    assert scheduled("searched", p, m, chunks=chunks, costs=costs, limit_bytes=limit) == found


def test_searched_has_no_bubble_where_memory_allows() -> None:
    """With 2p micro-batches in flight F = I = W fills all, and 3p do for gradients of weights of half the seconds."""
    for weights, limit in ((1.0, 16), (0.5, 24)):
        costs = equal_costs(8, 1, 1, weights, kept=0.4)
        timeline = simulate(scheduled("searched", 8, 32, costs=costs, limit_bytes=limit), costs)
        assert timeline.bubble_rate < 1e-9
        assert timeline.seconds == pytest.approx(7 + 32 * (2 + weights))


def test_searched_says_what_the_least_memory_is() -> None:
    costs = equal_costs(4, 1, 1, 1)
    with pytest.raises(
        ValueError, match="no schedule of 1 stages on each of 4 devices holds at most 0\\.5 bytes, and 1f1b"
    ):
        scheduled("searched", 4, 8, costs=costs, limit_bytes=0.5)


# ------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1bb", (2, 2, 1), "unknown schedule '1f1bb' .did you mean '1f1b'"),
        ("1f1b", (2, 2, 2), "1f1b: 2 devices, 2 micro-batches and 2 stages on each device: .* and 1 stages"),
        ("zb-v", (2, 2, 1), "zb-v: .* give at least 1 of each, and 2 stages"),
        ("interleaved", (2, 0, 2), "interleaved: 2 devices, 0 micro-batches .* give at least 1 of each$"),
        ("searched", (2, 2, 1), "searched is made for the seconds and bytes of stages: give costs"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(name: str, numbers: tuple[int, int, int], message: str) -> None:
    devices, micro_batches, chunks = numbers
    with pytest.raises(ValueError, match=message):
        scheduled(name, devices, micro_batches, chunks=chunks)


def test_a_package_adds_a_schedule_which_is_checked_and_from_which_the_search_starts() -> None:
    def broken(devices: int, micro_batches: int) -> Schedule:
        return parsed_schedule("broken: stages on devices 0, 1 micro-batches\n0F0")

    with scoped():
        register_schedule(Scheduler(name="mine", run=gpipe))
        assert scheduled("mine", 2, 3) == replace(scheduled("gpipe", 2, 3), name="mine")
        for given, words in (
            (lambda d, m: gpipe(d, m - 1), "schedule 'other' of 2 devices, 3 .* has 2 as micro_batches: give 3"),
            (lambda d, m: gpipe(d + 1, m), "has {0: 1, 1: 1, 2: 1} as stages of each device: give {0: 1, 1: 1}"),
            (lambda d, m: None, "its run function returned a NoneType: give a Schedule"),
        ):
            with scoped(), pytest.raises(ValueError, match=words):
                register_schedule(Scheduler(name="other", run=given))
                scheduled("other", 2, 3)
        with pytest.raises(ValueError, match="schedule 'other' takes cost: give some of chunks, costs, limit_bytes"):
            Scheduler(name="other", run=gpipe, takes=("cost",))
        register_schedule(Scheduler(name="broken", run=broken))
        with pytest.raises(ValueError, match="broken: 0B0 is missing"):
            scheduled("searched", 1, 1, costs=equal_costs(1, 1, 1, 1))
