"""A model of three layers and a head, and others, as the verbs and the command line are given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.planning.plan import Plan

MESH = {"dp": 2, "tp": 2}


class Tower(nn.Module):
    """Three layers, the first of which is planned on its own, and a head of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(), nn.Linear(1024, 8)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tower": (Tower, (64, 32)),
    "convolutions": (convolutions, (16, 4, 8, 8)),
    "gpt2": (models.gpt2, (models.BATCH, models.SEQUENCE)),
}


def given(name: str) -> dict[str, Any]:
    """The arguments of `autopar.plan` but for the mesh."""
    if name == "gpt2":
        pytest.importorskip("transformers")
    make, shape = CASES[name]
    with torch.device("meta"):
        model = make()
    if name == "gpt2":
        ids = torch.zeros(shape, dtype=torch.long)
        return {"model": model, "kwargs": {"input_ids": ids, "labels": ids}}
    return {"model": model, "args": (torch.zeros(shape),), "loss_fn": models.mean_square}


def planned(name: str, **options: Any) -> Plan:
    arguments = given(name)
    return autopar.plan(arguments.pop("model"), MESH, cluster="dgx-h100", **arguments, **options)


def build(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    return Tower(), (torch.zeros(batch, 32),), models.mean_square


def autopar_(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))
