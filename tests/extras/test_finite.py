"""The switch that names where NaN and infinities come from: instruction, module and rank, the same on every rank."""

from __future__ import annotations

import pytest
import torch
from models import assert_close, whole, without_latency
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.module import ParallelModule


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Rooted(nn.Module):
    """Masks with infinities, and takes roots, whose gradient at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.root = nn.Parameter(torch.ones(4)), Root()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.root(x * self.scale)
        mask = torch.full((4, 4), float("-inf")).triu(1)
        return ((y @ y.t()).unsqueeze(-1)[:, :4, 0] + mask.repeat(x.shape[0] // 4, 1)).softmax(-1).square().sum()


def told(module: ParallelModule, x: torch.Tensor) -> str:
    with pytest.raises(FloatingPointError) as caught:
        module(x).backward()
    return str(caught.value)


def watched() -> tuple[str, str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    good = torch.linspace(1, 2, 32).reshape(8, 4)
    split = {"args.0": {"a": "S(0)"}}
    module = autopar.parallelize(Rooted(), mesh, (good,), constraints=split, cluster=without_latency())
    negative, zero, nan = good.clone(), good.clone(), good.clone()
    negative[6, 1], zero[5, 2], nan[1, 1] = -1.0, 0.0, float("nan")
    assert not module(negative).isfinite(), "without the switch nothing is said"
    module.check_finite()
    beside = Rooted()
    loss, expected = module(good), beside(good)
    loss.backward(), expected.backward()
    assert_close(whole(loss), expected.detach(), "loss")
    assert_close(whole(module.scale.grad), beside.scale.grad, "gradient of scale")
    found = told(module, negative), told(module, zero), told(module, nan)
    module.check_finite(False)
    module(nan).backward()
    return found


def test_what_made_the_first_nan_is_named() -> None:
    first, second = run(2, watched)
    assert first == second, "the same on every rank"
    negative, zero, nan = first
    assert negative.startswith(
        "in the forward pass of call 3, output is not finite: the first NaN came on rank 1, in `"
    )
    assert "aten.sqrt.default" in negative and "of module 'root'" in negative
    assert zero.startswith("in the backward pass of call 4, gradient of scale is not finite")
    assert "the first infinity came on rank 1, in `" in zero and "of module 'root'" in zero
    assert "the first NaN came on rank 0, input args.0, as it was given" in nan
