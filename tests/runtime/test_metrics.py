"""Metrics of a run: what is counted, by the programs that ran, and what is reported where."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.metrics import Measured

ROWS, FEATURES = 8, 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 4))


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def parallel(solver: str = "megatron", cluster: autopar.Cluster | None = None) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return autopar.parallelize(network(), mesh, (batch(),), loss_fn=mean_square, solver=solver, cluster=cluster)


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(rows))


def stepped(module: Any, metrics: Any, rows: tuple[int, ...]) -> Measured | None:
    """A step of several micro-batches."""
    for number, size in enumerate(rows):
        if number < len(rows) - 1:
            with module.no_sync():
                module(batch(size)).backward()
        else:
            module(batch(size)).backward()
    module.zero_grad()
    found: Measured | None = metrics.step()
    return found


def counts() -> None:
    made_up = autopar.CLUSTERS["local"]
    module = parallel(cluster=replace(made_up, device=replace(made_up.device, has_peak=True)))
    plan, found = module.plan, []
    metrics = autopar.Metrics(module, every=3, to=found.append)
    assert [stepped(module, metrics, (ROWS,)) is None for _ in range(6)] == [True, True, False, True, True, False]
    first, second = found
    # the first step, which warms up, is left out
    assert (first.step, first.steps) == (3, 2) and (second.step, second.steps) == (6, 3)
    for one in found:
        assert one.unit == "samples" and one.items_per_second * one.seconds == pytest.approx(ROWS)
        assert one.utilization * one.seconds == pytest.approx(plan.provenance.ideal_seconds)
        assert (one.predicted_seconds, one.predicted_bytes) == (plan.seconds, plan.bytes)
        assert {(w.kind, w.axis) for w in one.waited} == {(c.kind, c.axis) for c in plan.timing.communication}
        assert 0 < one.exposed_seconds < one.seconds
        assert one.predicted_exposed_seconds == pytest.approx(plan.exposed_seconds)
        assert 0 < one.bytes <= one.peak_bytes
    assert all(isinstance(value, float) for value in second.scalars().values())
    assert "samples/s, MFU" in str(second) and "all_reduce on tp" in str(second)


def test_a_step_counts_what_the_plan_says_of_it() -> None:
    run(2, counts)


def stages() -> None:
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), []
    module = autopar.parallelize(network(), mesh, (batch(),), loss_fn=mean_square, micro_batches=2, schedule="gpipe")
    metrics = autopar.Metrics(module, every=2, to=found.append)
    for _ in range(2):
        stepped(module, metrics, (ROWS,))
    (one,) = found
    assert [(w.kind, w.axis) for w in one.waited] == [("send", "pp")]
    assert 0 < one.exposed_seconds < one.seconds and one.predicted_exposed_seconds > 0


def test_stages_wait_for_what_is_sent_to_them() -> None:
    run(2, stages)


def other_steps() -> None:
    module = parallel("ddp")
    metrics = autopar.Metrics(module, every=2)
    stepped(module, metrics, (ROWS,))
    # micro-batches, of which the last is smaller and has a program of its own, whose capture does not count
    began = time.perf_counter()
    found = stepped(module, metrics, (ROWS, ROWS, 5))
    assert found is not None and found.items_per_second * found.seconds == pytest.approx(2 * ROWS + 5)
    assert found.seconds < time.perf_counter() - began
    stepped(module, metrics, (ROWS,))
    with metrics.paused():
        module(batch()).backward()
        time.sleep(0.3)
    found = stepped(module, metrics, (ROWS,))
    assert found is not None and found.items_per_second * found.seconds == pytest.approx(ROWS)
    metrics.close()
    with pytest.raises(ValueError, match=r"every is 0: give a number of steps"):
        autopar.Metrics(module, every=0)
    with pytest.raises(ValueError, match=r"to is 3: give a function, a writer with add_scalar, or None"):
        autopar.Metrics(module, to=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"module is a Linear: give what autopar\.parallelize returns"):
        autopar.Metrics(nn.Linear(2, 2))  # type: ignore[arg-type]
    autopar.Metrics(module)
    with pytest.raises(ValueError, match=r"the module has Metrics: close\(\) them first"):
        autopar.Metrics(module)


def test_micro_batches_smaller_batches_and_pauses() -> None:
    run(2, other_steps)


def same_numbers() -> None:
    """With a clock, without, and with one that was closed."""
    found = []
    for kind in ("clocked", "plain", "closed"):
        module = parallel("fsdp")
        if kind != "plain":
            metrics = autopar.Metrics(module, every=1, to=lambda measured: None)
            if kind == "closed":
                metrics.close()
        loss = module(batch())
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor() for p in module.parameters())])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_a_clock_changes_no_number() -> None:
    run(2, same_numbers)


class Written:
    def __init__(self) -> None:
        self.lines: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.lines.append((tag, scalar_value, global_step))


def reported() -> list[str]:
    said: list[str] = []
    logger = logging.getLogger("autopar")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)
    module, writer = parallel(), Written()
    metrics = autopar.Metrics(module, every=2)
    for _ in range(4):
        stepped(module, metrics, (ROWS,))
    metrics.close()
    metrics = autopar.Metrics(module, every=2, to=writer)
    for _ in range(2):
        stepped(module, metrics, (ROWS,))
    tags = {tag for tag, _, step in writer.lines if step == 2}
    assert {"autopar/samples_per_second", "autopar/exposed_seconds/all_reduce_tp/predicted"} <= tags
    return [line for line in said if line.startswith("step ")]


def test_the_first_rank_logs() -> None:
    first, second = run(2, reported)
    assert [line.split(":")[0] for line in first] == ["step 2", "step 4"] and second == []


def test_tensorboard_reads_what_is_written(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    run(1, with_tensorboard, tmp_path)


def with_tensorboard(folder: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    assert dist.get_world_size() == 1
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    module = autopar.parallelize(network(), mesh, (batch(),), loss_fn=mean_square, solver="ddp")
    with SummaryWriter(str(folder)) as writer:  # type: ignore[no-untyped-call]
        metrics = autopar.Metrics(module, every=2, to=writer)
        for _ in range(4):
            stepped(module, metrics, (ROWS,))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("autopar/samples_per_second")] == [2, 4]
