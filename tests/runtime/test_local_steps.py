"""`parallel.optimizer` steps on what each rank holds, and `clip_grad_norm_` sends a number of each gradient: both as on
one device."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import assert_close, mean_square, whole
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.module import ParallelModule

X = torch.arange(24.0).reshape(4, 6).cos()

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adam, foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


class Net(nn.Module):
    """Rows that two ranks hold unevenly, a bias of which one of them holds nothing, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x) * self.scale
        return made


def parallel(solver: str, mesh: tuple[int, ...] = (2,)) -> ParallelModule:
    axes = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    return autopar.parallelize(Net(), axes, (X.to(torch.get_default_dtype()),), loss_fn=mean_square, solver=solver)


def train(module: Any, optimizer: torch.optim.Optimizer, steps: int = 3, clip: float | None = None) -> None:
    for _ in range(steps):
        loss = module(X) if isinstance(module, ParallelModule) else mean_square(module(X))
        loss.backward()
        if clip is not None:
            autopar.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def same(module: nn.Module, beside: nn.Module, what: str, tolerance: float = 1e-4) -> None:
    for (name, one), other in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(whole(one.detach()), other.detach(), f"{what}: {name}", tolerance)


def stepped(solver: str) -> None:
    hooked, module = [], parallel(solver)
    for what, (kind, options) in KINDS.items():
        beside = Net()
        module.load_state_dict(beside.state_dict())
        one, other = module.optimizer(kind, **options), kind(beside.parameters(), **options)
        assert isinstance(one, kind) and type(one).__name__ == kind.__name__
        one.register_step_post_hook(lambda *_, what=what: hooked.append(what))
        schedule = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (one, other)]
        for _ in range(2):
            train(module, one, 2), train(beside, other, 2)
            for each in schedule:
                each.step()
        same(module, beside, what)
        if kind is torch.optim.Rprop:  # which a stock one cannot do on DTensors
            continue
        stock = kind(module.parameters(), **options)
        for giver, taker in ((one, stock), (stock, one)):  # its states are those of a stock one
            taker.load_state_dict(copy.deepcopy(giver.state_dict()))
            train(module, taker, 1), train(beside, other, 1)
            same(module, beside, f"{what} with the state of another")
        for parameter, twin in zip(module.parameters(), beside.parameters(), strict=True):
            for key, value in other.state[twin].items():
                if value is not None:
                    assert_close(torch.as_tensor(whole(one.state[parameter][key])), torch.as_tensor(value), key, 1e-3)
    assert hooked == [what for what in KINDS for _ in range(4 if what == "Rprop" else 5)]


@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
def test_steps_on_shards_are_those_of_one_device(solver: str) -> None:
    run(2, stepped, solver)


def saved(folder: Path) -> None:
    """From (2, 2) to (4,)."""
    first, second = parallel("atp", (2, 2)), parallel("fsdp", (4,))
    one = first.optimizer(torch.optim.AdamW, lr=0.01)
    train(first, one)
    dcp.save({"model": first.state_dict(), "o": get_optimizer_state_dict(first, one)}, checkpoint_id=folder)
    other = second.optimizer(torch.optim.AdamW, lr=0.01)
    state: dict[str, Any] = {"model": second.state_dict(), "o": get_optimizer_state_dict(second, other)}
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state["model"])
    set_optimizer_state_dict(second, other, state["o"])
    train(first, one), train(second, other)
    same(second, whole_of(first), "another mesh")


def whole_of(module: ParallelModule) -> nn.Module:
    beside = Net()
    beside.load_state_dict({name: whole(value) for name, value in module.state_dict().items()})
    return beside


def test_states_go_to_another_mesh(tmp_path: Path) -> None:
    run(4, saved, tmp_path)


def written() -> None:
    kinds = (
        lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        lambda m: m.optimizer(torch.optim.AdamW),
        lambda m: m.optimizer(torch.optim.Muon, matrices(m)),
    )
    module = parallel("fsdp")
    for make in kinds:
        optimizer = make(module)
        module(X).backward()
        loss = module(X)
        optimizer.step()
        with pytest.raises(ValueError, match=r"was written between forward and backward, which reads it"):
            loss.backward()


def test_a_step_between_forward_and_backward_is_seen() -> None:
    run(2, written)


def grouped() -> None:
    """Groups of named parameters, one added later, and a parameter that is frozen."""
    module, beside = parallel("fsdp"), Net()
    named = list(module.named_parameters())
    one = module.optimizer(torch.optim.SGD, named[:2], lr=0.1, momentum=0.9)
    other = torch.optim.SGD(list(beside.named_parameters())[:2], lr=0.1, momentum=0.9)
    for each, optimizer in ((module, one), (beside, other)):
        train(each, optimizer, 1)
        optimizer.add_param_group({"params": list(each.named_parameters())[2:], "lr": 0.2})
        each.get_parameter("body.2.bias").requires_grad_(False)
        train(each, optimizer)
        optimizer.state.clear()
        train(each, optimizer)
    same(module, beside, "groups")


def test_groups_and_frozen_parameters() -> None:
    run(2, grouped)


def scaled() -> None:
    module, beside = parallel("fsdp"), Net()
    for options in ({}, {"fused": True}):
        optimizers = [module.optimizer(torch.optim.AdamW, **options), torch.optim.AdamW(beside.parameters(), **options)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optimizers]
        for factor in (float("inf"), 1.0):
            for loss, optimizer, scaler in zip((module(X), mean_square(beside(X))), optimizers, scalers, strict=True):
                scaler.scale(loss * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            same(module, beside, f"loss times {factor}")

    def closure() -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = module(X)
        loss.backward()
        return loss

    assert math.isfinite(float(optimizers[0].step(closure).detach()))
    with pytest.raises(ValueError, match=r"LBFGS is not known to step .*: create it from parallel\.param"):
        module.optimizer(torch.optim.LBFGS)


def test_scaling_closures_and_what_is_refused() -> None:
    run(2, scaled)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


def with_muon(mesh: tuple[int, ...], solver: str) -> None:
    module, beside = parallel(solver, mesh), Net()
    for options in ({"lr": 0.05}, {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
        one = module.optimizer(torch.optim.Muon, matrices(module), **options)
        other = torch.optim.Muon(matrices(beside), **options)
        train(module, one), train(beside, other)
        same(module, beside, f"Muon {options}", 2e-2)  # of an iteration in bfloat16
    buffer = one.state[matrices(module)[0]]["momentum_buffer"]
    assert isinstance(buffer, DTensor) and buffer.placements == matrices(module)[0].placements


@pytest.mark.parametrize(
    ("mesh", "solver"), [((3,), "fsdp"), ((2, 2), "atp"), ((2,), "ddp")], ids=["uneven", "two axes", "replicated"]
)
def test_muon_is_that_of_one_device(mesh: tuple[int, ...], solver: str) -> None:
    run(math.prod(mesh), with_muon, mesh, solver)


ORDERS = (2.0, 1.0, 3.5, 0.5, 0.0, -1.0, math.inf, -math.inf)


def clipped(mesh: tuple[int, ...], solver: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 4e-2), (torch.float32, 1e-5)):
        torch.set_default_dtype(dtype)
        module, beside = parallel(solver, mesh), Net()
        extra, beside_extra = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        # in bfloat16 the smallest gradients, which these orders weigh most, are rounding
        for order in ORDERS if dtype != torch.bfloat16 else [order for order in ORDERS if order >= 1]:
            for each, more in ((module, extra), (beside, beside_extra)):
                each.zero_grad()
                (each(X.to(dtype)) if each is module else mean_square(each(X.to(dtype)))).backward()
                more.grad = torch.full((3,), 0.25)
            foreach = None if order == 2.0 else order > 0
            norm = autopar.clip_grad_norm_([*module.parameters(), extra], 0.05, order, foreach=foreach)
            wanted = torch.nn.utils.clip_grad_norm_([*beside.parameters(), beside_extra], 0.05, order, foreach=foreach)
            assert not isinstance(norm, DTensor) and norm.dtype == wanted.dtype
            assert_close(norm, wanted, f"norm {order} in {dtype}", tolerance)
            for one, other in zip([*module.parameters(), extra], [*beside.parameters(), beside_extra], strict=True):
                assert_close(whole(one.grad), other.grad, f"clipped by {order} in {dtype}", tolerance)
            seen: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(seen, float(norm))
            assert len(set(seen)) == 1
    assert autopar.clip_grad_norm_([], 1.0) == 0.0
    module.zero_grad()
    train(module, module.optimizer(torch.optim.SGD, lr=0.1), 1, clip=0.1)


@pytest.mark.parametrize(("mesh", "solver"), [((3,), "fsdp"), ((2, 2), "atp"), ((2,), "ddp")])
def test_clipping_is_that_of_one_device(mesh: tuple[int, ...], solver: str) -> None:
    run(math.prod(mesh), clipped, mesh, solver)


def not_finite() -> None:
    module = parallel("fsdp")
    for bad in (math.nan, math.inf):
        module.zero_grad()
        module(X).backward()
        if dist.get_rank() == 1:
            module.body[0].weight.grad.to_local()[0, 0] = bad
        for order in (2.0, math.inf, -1.0 if bad != bad else 1.0):
            with pytest.raises(RuntimeError, match=f"of order {order} of the gradients is {bad}, and"):
                autopar.clip_grad_norm_(module.parameters(), 1.0, order, error_if_nonfinite=True)


def test_what_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    run(2, not_finite)
