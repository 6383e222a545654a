"""Runs that are killed, and go on with other numbers of ranks: the curve is that of a run that was not."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import assert_close, mean_square, whole
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

import autopar

X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).double()
STEPS, EVERY = 12, 3


class Model(nn.Module):
    """Dropout, buffers, a frozen parameter, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)
        self.dropout, self.unused = nn.Dropout(0.2), nn.Linear(3, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dropout(self.norm(self.first(x)).tanh())
        return self.last(hidden)


class Run:
    """What a user's script makes at every start."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        model = (Model() if model is None else model).double()
        self.module: Any = autopar.parallelize(model, args=(X,), loss_fn=mean_square, **options)
        self.optimizer = self.module.optimizer(torch.optim.AdamW, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 9], gamma=0.5)
        self.mean = AveragedModel(self.module, avg_fn=lambda mean, new, _: mean + (new - mean) / 2, use_buffers=True)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.module, self.optimizer, self.schedule, self.mean

    def step(self) -> float:
        loss = self.module(X)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.mean.update_parameters(self.module)
        return float(loss.item())


def trained(folder: str, dies: tuple[int, int, bool] | None = None) -> dict[int, tuple[float, ...]]:
    """Step -> its loss, its learning rate, a number that Python and one that numpy drew, and the sum of the mean's
    weights. The first rank writes them down at once; rank `dies[0]` is killed in step `dies[1]`, or while it is saved
    after that."""
    random.seed(0), np.random.seed(0)
    of = Run()
    torch.manual_seed(1)
    found = {}
    for step in range(autopar.load(f"{folder}/kept", *of.parts), STEPS):
        if dies is not None and (dist.get_rank(), step, False) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        rate, loss = of.schedule.get_last_lr()[0], of.step()
        means = sum(float(whole(value).sum()) for value in of.mean.state_dict().values())
        found[step] = (loss, rate, random.random(), float(np.random.rand()), means)
        if dist.get_rank() == 0:
            with Path(folder, "curve").open("a") as curve:
                curve.write(f"{step}: {found[step]}\n")
        if (step + 1) % EVERY == 0:
            if dies is not None and (dist.get_rank(), step, True) == dies:
                of.parts[2].state_dict = lambda: os.kill(os.getpid(), signal.SIGKILL)
            autopar.save(f"{folder}/kept", *of.parts, step=step + 1, keep=2)
    return found


@pytest.mark.timeout(120)
def test_a_run_that_is_killed_goes_on_with_as_many_ranks_as_there_are(tmp_path: Path) -> None:
    """On four, until one dies in a step; on three, until one dies while it saves; on eight to the end."""
    (tmp_path / "alone").mkdir()
    (alone,) = run(1, trained, str(tmp_path / "alone"))
    for ranks, dies in ((4, (2, 4, False)), (3, (1, 8, True))):
        assert any(outcome.error for outcome in outcomes(ranks, trained, str(tmp_path), dies, timeout_seconds=60.0))
    assert {path.name for path in (tmp_path / "kept").iterdir()} >= {"step-000003", "step-000006", "step-000009.part"}
    last = run(8, trained, str(tmp_path))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"step-000009", "step-000012"}
    assert all(of_rank == last[0] and min(of_rank) == 6 for of_rank in last)
    curve = [line.split(": ") for line in (tmp_path / "curve").read_text().splitlines()]
    assert [int(step) for step, _ in curve] == [*range(4), *range(3, 9), *range(6, STEPS)]
    for step, values in curve:
        assert eval(values) == pytest.approx(alone[int(step)], rel=1e-9), step


class Pair(nn.Module):
    """Two that learn against each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


def two_modules(folder: str, solver: str) -> list[float]:
    """Both step once a checkpoint is there."""
    one, other = Run(Pair(), solver=solver), Run(Pair(), solver=solver)
    parts = (one.module, other.module, other.optimizer, one.optimizer)
    if autopar.load(folder, *parts) == 0:
        one.step(), one.step(), other.step()
        autopar.save(folder, *parts, step=7)
    assert autopar.load(folder, other.module) == 7  # it comes first now, and gets what the first one had
    assert_close(whole(other.module.body.weight), whole(one.module.body.weight), "first")
    assert autopar.load(folder, *parts) == 7
    assert Path(folder, "step-000007", "plan1.json").exists()
    assert {float(states["step"]) for states in one.optimizer.state.values()} == {2.0}
    return [one.step(), other.step()]


def test_several_modules_and_their_optimizers(tmp_path: Path) -> None:
    expected = run(2, two_modules, str(tmp_path), "ddp")
    assert run(3, two_modules, str(tmp_path), "fsdp") == [pytest.approx(expected[0])] * 3


def refused(folder: str) -> None:
    of, other = Run(solver="ddp"), Run(Pair(), solver="ddp")
    parts = of.parts[:2]
    autopar.save(folder, *parts, step=2)
    autopar.save(folder, *parts, step=2)  # in the place of the first one
    for message, call in {
        "no parallel module is among the parts": lambda: autopar.save(folder, of.optimizer, step=1),
        r"step is -1 and keep 3": lambda: autopar.save(folder, *parts, step=-1),
        "has no load_state_dict": lambda: autopar.save(folder, *parts, {"loss": 1.0}, step=1),
        "different steps, or to different folders": lambda: autopar.save(folder, *parts, step=dist.get_rank()),
        r"cannot load .*step-000002 \(rank 0: .*model_1": lambda: autopar.load(folder, *parts, *other.parts[:2]),
        r"cannot load .*step-000002 \(rank 0: .*body": lambda: autopar.load(folder, other.module),
        r"cannot save .*kept/file": lambda: autopar.save(f"{folder}/file", *parts, step=1),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    other.step()
    with pytest.raises(ValueError, match="AdamW has states of which each rank holds a part"):
        autopar.save(folder, of.module, other.optimizer, step=1)
    with torch.device("meta"):
        empty = Run(Pair(), solver="ddp")
    with pytest.raises(ValueError, match=r"body.weight is on meta, .* to_empty first"):
        autopar.load(folder, empty.module)


def test_what_cannot_be_saved_or_loaded_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    run(2, refused, str(tmp_path / "kept"))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["file", "step-000002"]


def test_plain_pytorch_reads_a_checkpoint(tmp_path: Path) -> None:
    (module,) = {value for value in map(float, run(2, saved, str(tmp_path)))}
    state: dict[str, Any] = {"model": Model().double().state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "step-000001")
    assert sum(float(value.sum()) for value in state["model"].values()) == pytest.approx(module)


def saved(folder: str) -> float:
    of = Run()
    of.step()
    autopar.save(folder, *of.parts, step=1)
    return sum(float(whole(value).sum()) for value in of.module.state_dict().values())


def in_stages(folder: str, *, staged: bool) -> tuple[int, float]:
    """A model in two stages saves after two steps, and one without stages goes on; its next loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    of = Run(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)) if staged else None)
    first = autopar.load(folder, *of.parts[:3])
    if staged:
        of.step(), of.step()
        autopar.save(folder, *of.parts[:3], step=2)
    return first, of.step()


def test_stages_are_saved_for_ranks_that_have_none(tmp_path: Path) -> None:
    expected = run(2, partial(in_stages, staged=True), str(tmp_path))
    found = run(3, partial(in_stages, staged=False), str(tmp_path))
    assert [first for first, _ in expected] == [0, 0] and [first for first, _ in found] == [2, 2, 2]
    assert [loss for _, loss in found] == [pytest.approx(expected[0][1])] * 3
