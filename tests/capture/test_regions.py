"""Grad mode and autocast within each other: every operator is captured in the modes in which it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.testing import check


def cast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=enabled)


def no_grad_in_autocast(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with cast():
        with torch.no_grad():
            y = a(x)
        return b(y) + b(x)


def grad_in_autocast_in_no_grad(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), cast():
        y = a(x)
        with torch.enable_grad():
            return b(y)


def both_four_deep(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with cast(), torch.no_grad():
        with cast(enabled=False):
            y = a(x.float())
        with torch.enable_grad(), cast(torch.float16):
            return b(y)


def changed_and_not_put_back(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with cast():
        torch.set_grad_enabled(False)
        y = a(x)
    z = b(x)
    torch.set_grad_enabled(True)
    return y + z + b(x)


def autocast_off_in_autocast(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with cast(), cast(enabled=False):
        return a(x.float()) + b(x.float())


class Layers(nn.Module):
    def __init__(self, layer: Callable[..., torch.Tensor], count: int) -> None:
        super().__init__()
        self.layer = layer
        self.first, self.second = (nn.ModuleList(nn.Linear(6, 6) for _ in range(count)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for a, b in zip(self.first, self.second, strict=True):
            x = x + self.layer(a, b, x)
        return (x.float() * x.detach().float().cos()).mean()


@pytest.mark.parametrize("outer", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        no_grad_in_autocast,
        grad_in_autocast_in_no_grad,
        both_four_deep,
        changed_and_not_put_back,
        autocast_off_in_autocast,
    ],
)
def test_modes_within_modes(layer: Callable[..., torch.Tensor], outer: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Layers(layer, 6), torch.randn(4, 6)
    with contextlib.nullcontext() if outer is None else cast(outer):
        found = check(model, {"a": 2}, (x,), dtype=None)
    assert found.equal, found
    # a lost gradient would be infinitely far off; what is left is the rounding of sums
    assert found.rows[0].errors["gradients"] < 0.02, found
