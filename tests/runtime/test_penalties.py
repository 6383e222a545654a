"""Losses with a term of parameters beside outputs, as training loops have them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar


def penalised(solver: str) -> tuple[list[torch.Tensor], ...]:
    """The losses and gradients of eager and of a parallel module."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, (x,), solver=solver)
    found = []
    for each in (model, parallel):
        term = sum((p.pow(2).sum() for p in each.parameters()), start=torch.zeros(()))
        loss = F.mse_loss(each(x), y) + 0.1 * (term.full_tensor() if isinstance(term, DTensor) else term)
        loss.backward()
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in each.parameters()]
        found.append([loss.detach(), *gradients])
    return tuple(found)


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron", "dp"])
def test_a_term_of_parameters_is_a_plain_number_by_full_tensor(solver: str) -> None:
    for expected, found in run(2, penalised, solver):
        for one, other in zip(expected, found, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
