"""Fused optimizers step on what each rank holds, and no step differs from the one on one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import assert_close, mean_square, whole
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import autopar

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.01, amsgrad=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=torch.tensor(0.01), weight_decay=0.1, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "sgd without momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
}
X = torch.arange(24.0).reshape(4, 6).cos()


def mlp() -> nn.Module:
    """Rows that two ranks hold unevenly, and a bias of which one of them holds nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def parallel(solver: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    return autopar.parallelize(mlp(), mesh, (X,), loss_fn=mean_square, solver=solver)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any], steps: int = 3) -> None:
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(module: nn.Module, beside: nn.Module, what: str) -> None:
    for (name, one), other in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert_close(whole(one.detach()), other.detach(), f"{what}: {name}", 1e-4)


def stepped(solver: str) -> None:
    module = parallel(solver)
    for kind, make in FUSED.items():
        beside = mlp()
        module.load_state_dict(beside.state_dict())
        one, other = (make(m.parameters(), fused=True) for m in (module, beside))
        losses = (lambda m=module: m(X), lambda b=beside: mean_square(b(X)))
        train(module, one, losses[0]), train(beside, other, losses[1])
        same(module, beside, kind)
        for parameter, twin in zip(module.parameters(), beside.parameters(), strict=True):
            for key, value in other.state[twin].items():
                if value is not None:
                    assert_close(whole(one.state[parameter][key]), value, f"{kind}: {key}", 1e-4)
        # its state goes to an optimizer that is not fused, and comes back
        plain, again = make(module.parameters()), make(module.parameters(), fused=True)
        for taker, giver in ((plain, one), (again, plain)):
            state = copy.deepcopy(giver.state_dict())
            for group in state["param_groups"]:
                group["fused"] = taker is again
            taker.load_state_dict(state)
            train(module, taker, losses[0], 2), train(beside, other, losses[1], 2)
            same(module, beside, f"{kind} with the state of another")


@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
def test_fused_steps_are_those_of_one_device(solver: str) -> None:
    run(2, stepped, solver)


def scaled() -> None:
    """One step that overflows, which changes nothing, and one that does not."""
    module, beside = parallel("fsdp"), mlp()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (module, beside)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optimizers]
    for factor in (float("inf"), 1.0):
        losses = (module(X), mean_square(beside(X)))
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        same(module, beside, f"loss times {factor}")
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0


def test_a_fused_step_under_a_scaler() -> None:
    run(2, scaled)


def partial() -> None:
    parallel("ddp")  # of which the process has one
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optimizer.step()
    assert torch.equal(whole(parameter.detach()), torch.full((4,), -1.0))


def test_a_gradient_that_is_a_partial_sum_is_added_up() -> None:
    run(2, partial)


# -- checkpoints, whatever was stepped when they were written


class Scored(nn.Module):
    """`score` takes part in the loss where `scores` says so; without, it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.up, self.down = nn.Linear(6, 1), nn.Linear(6, 5), nn.Linear(5, 1)
        self.scores = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.up(x).tanh())
        return (h + self.score(x) if self.scores else h).square().mean()


class Lion(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["mean"], self.state[p]["count"] = torch.zeros_like(p), torch.zeros(())
                self.state[p]["count"] += 1
                mean = self.state[p]["mean"].lerp_(p.grad, 0.1)
                p.sub_(mean.sign() * (group["lr"] / float(self.state[p]["count"])))


Act = Callable[[Any], Any]


def frozen(on: bool) -> Act:
    return lambda module: module.up.requires_grad_(not on)


def scoring(module: Any) -> None:
    module.scores = True


HISTORIES: dict[str, tuple[dict[int, Act], int, bool]] = {
    "never reached": ({}, 2, False),
    "reached later": ({3: scoring}, 2, False),
    "saved before a step": ({}, 0, False),
    "unfrozen before loading": ({0: frozen(True), 2: frozen(False)}, 2, True),
    "unfrozen after loading": ({0: frozen(True), 2: frozen(False)}, 2, False),
    "frozen after steps": ({1: frozen(True), 3: frozen(False)}, 2, False),
    "frozen and unfrozen after steps": ({1: frozen(True), 2: frozen(False)}, 2, True),
}
"""What is done before which step, before which the checkpoint is written, and whether it is done before it is read."""


def stock(kind: Any, params: Any, **options: Any) -> Any:
    return kind(params, **options)


RESUMED: dict[str, Callable[[Any, Any], torch.optim.Optimizer]] = {
    "adamw": lambda m, p: torch.optim.AdamW(p, lr=0.01),
    "adamw on shards": lambda m, p: getattr(m, "optimizer", stock)(torch.optim.AdamW, p, lr=0.01),
    "sgd": lambda m, p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lion": lambda m, p: Lion(p),
}
GROUPS: dict[str, Callable[[Any], Any]] = {
    "one group": lambda m: [{"params": [*m.parameters()]}],
    "empty groups": lambda m: [{"params": []}, {"params": [*m.up.parameters()], "lr": 0.02}, {"params": []},
                               {"params": [*m.score.parameters(), *m.down.parameters()]}, {"params": []}],
}  # fmt: skip


def trained(module: Any, optimizer: Any, steps: range, acts: dict[int, Act]) -> list[float]:
    losses = []
    for step in steps:
        acts.get(step, lambda module: None)(module)
        loss = module(X * (step + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(whole(loss)))
    return losses


def resumed(folder: str, kind: str, groups: str, plainly: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    modules = {solver: autopar.parallelize(Scored(), mesh, (X,), solver=solver) for solver in ("fsdp", "ddp")}

    def made(solver: str | None) -> tuple[Any, torch.optim.Optimizer]:
        """As at the start: a parallel module is captured once for all histories, and gets its first values again."""
        model: Any = Scored()
        module: Any = model if solver is None else modules[solver]
        module.load_state_dict(model.state_dict())
        module.requires_grad_(True).zero_grad()
        module.scores = False
        return module, RESUMED[kind](module, GROUPS[groups](module))

    for history, (acts, saved, early) in HISTORIES.items():
        if (kind == "lion" and not saved) or (plainly and "reached" not in history):
            continue  # PyTorch steps what it does not know, and drops what frozen weights have
        expected = trained(*made(None), range(5), acts)
        module, optimizer = made("fsdp")
        found = trained(module, optimizer, range(saved), acts)
        weights, states = get_state_dict(module, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/{history}")
        assert not (set(optimizer.state) - {p for p in module.parameters() if saved})
        module, optimizer = made(None if plainly else "ddp")
        for step in range(saved + early):
            acts.get(step, lambda module: None)(module)
        weights, states = get_state_dict(module, optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=f"{folder}/{history}")
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert [group["lr"] for group in optimizer.param_groups] == [g["lr"] for g in made(None)[1].param_groups]
        rest = {step: act for step, act in acts.items() if step >= saved + early}
        assert found + trained(module, optimizer, range(saved, 5), rest) == pytest.approx(expected, rel=1e-5), history


@pytest.mark.parametrize(
    ("kind", "groups", "plainly"),
    [(kind, "one group", False) for kind in RESUMED] + [("adamw", "empty groups", False), ("adamw", "one group", True)],
)
def test_a_checkpoint_is_read_whatever_was_stepped(tmp_path: Path, kind: str, groups: str, plainly: bool) -> None:
    """On another plan, or in plain PyTorch."""
    run(2, resumed, str(tmp_path), kind, groups, plainly)


def optimizers_of_the_model_that_was_given() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batch, model, said = torch.ones(8, 6), mlp(), []
    before = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    parallel = autopar.parallelize(model, mesh, (batch,), loss_fn=mean_square, solver="fsdp")
    logger = logging.getLogger("autopar")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    for _ in range(2):
        parallel(batch).backward()
        before.step()
    parallel.optimizer(torch.optim.SGD, lr=0.1).step()
    mean_square(model(batch)).backward()  # the model itself trains, as a reference may
    before.step()
    logger.removeHandler(handler)
    with pytest.raises(ValueError, match="not the parallel module's parameters"):
        parallel.optimizer(torch.optim.AdamW, [{"params": [*model.parameters()]}])
    return said


def test_an_optimizer_of_the_model_that_was_given_is_told() -> None:
    """It was made before parallelize, and would train nothing without a word."""
    for said in run(2, optimizers_of_the_model_that_was_given):
        (warned,) = [text for text in said if "SGD steps parameters of the model" in text]
        assert "Make the optimizer of these, after parallelize" in warned
