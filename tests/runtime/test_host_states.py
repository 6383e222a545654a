"""Optimizers whose states wait in the host's memory take the same steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from generator_programs import one_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.cluster.library import named_cluster
from autopar.cost.optimizers import OPTIMIZERS
from autopar.ir.graph import TensorMeta
from autopar.planning.training import named_optimizer
from autopar.runtime import host_states

OF_TORCH: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "one by one": (torch.optim.Adam, {"foreach": False, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "no states": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("on_shards", [False, True])
def test_steps_are_those_of_an_optimizer_on_the_device(name: str, on_shards: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(4, 8)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, (x,))
        kind, options = OF_TORCH[name]
        eager = kind(model.parameters(), lr=0.1, **options)
        make = partial(parallel.optimizer, kind) if on_shards else partial(kind, parallel.parameters())
        optimizer = autopar.states_on_host(make(lr=0.1, **options))
        for step in range(4):
            for each, its in ((model, eager), (parallel, optimizer)):
                its.zero_grad()
                each(x).square().sum().backward()
                its.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, q in zip(model.parameters(), parallel.parameters(), strict=True):
            assert torch.equal(p, q.full_tensor())
            for key, value in eager.state[p].items():
                other = optimizer.state[q][key]
                assert torch.equal(value, other.full_tensor() if isinstance(other, DTensor) else other)


def test_what_has_dims_is_moved_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = nn.Linear(4, 3), list[int]()
    started = host_states.to_host
    monkeypatch.setattr(host_states, "to_host", lambda x: (sizes.append(x.numel()), started(x))[1])
    optimizer = autopar.states_on_host(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert sizes == [12, 12, 3, 3]
        sizes.clear()


def test_what_is_no_optimizer_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"states_on_host is given Linear.*: give a torch.optim.Optimizer"):
        autopar.states_on_host(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_plans_count_the_copies_and_no_states_beside_activations() -> None:
    cluster, away = named_cluster("dgx-h100"), named_optimizer("adamw_on_host")
    meta = TensorMeta((1000, 1000), torch.bfloat16)
    copies = away.seconds(cluster.device, [meta]) - OPTIMIZERS["adamw"].seconds(cluster.device, [meta])
    assert copies == pytest.approx(2 * cluster.device.host_seconds(2 * 2 * 1e6))
    assert (away.bytes(meta), away.brought_bytes(meta)) == (4, 4 * 10**6)

    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))), torch.randn(4096, 256)
    here, there = (
        autopar.plan(model, {"dp": 2}, (x,), loss_fn=_mean, cluster="dgx-h100", optimizer=optimizer)
        for optimizer in ("adamw", "adamw_on_host")
    )
    states = sum(2 * p.numel() * 4 for p in model.parameters())
    assert 0.8 * states < here.bytes - there.bytes <= states and there.seconds > here.seconds
    with pytest.raises(ValueError, match=r"nothing says how quickly .* copies to its host: give host_bytes_per_second"):
        autopar.plan(model, {"dp": 2}, (x,), loss_fn=_mean, optimizer="adamw_on_host")
    silent = replace(cluster, device=replace(cluster.device, host_bytes_per_second=None))
    assert autopar.plan(model, {"dp": 2}, (x,), loss_fn=_mean, cluster=silent).seconds == here.seconds


def _mean(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()
