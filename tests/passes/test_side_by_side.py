"""Runs of layers side by side, and layers that do not fit their run: planned, equal to one process, and as good as
without repeats."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import pytest
import torch
from models import Case, assert_same, eager, perturbed, simulated
from plans import random_assignment
from torch import nn

from autopar.passes.segments.segment import Segments
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x)))


def layers(count: int, activation: Callable[[], nn.Module] = nn.ReLU) -> list[nn.Module]:
    return [Layer(activation()) for _ in range(count)]


def in_full(stack: list[nn.Module]) -> nn.ModuleDict:
    """Layers that are captured one by one, since they are in no list."""
    return nn.ModuleDict({f"layer {number}": layer for number, layer in enumerate(stack)})


class Chain(nn.Module):
    """Layers one after the other; those of `frozen` do not train."""

    def __init__(self, *stack: nn.Module, frozen: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.body = nn.Sequential(*stack)
        for number in frozen:
            self.body[number].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class TwoStreams(nn.Module):
    """Two tensors cross from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([*layers(3), *layers(2, nn.GELU)])
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.stack)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, memory = 2 * x, x.sin()
        for layer, gate in zip(self.stack, self.gates, strict=True):
            y = layer(x)
            memory = memory + gate(y) * x
            x = y + memory.tanh()
        return (x * memory).mean()


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder's last layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(*layers(4)), nn.ModuleList(layers(3, nn.GELU))
        self.cross = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.decoder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, y = self.encoder(x), x.cos()
        for layer, cross in zip(self.decoder, self.cross, strict=True):
            y = layer(y) + cross(memory)
        return y.square().mean()


class Towers(nn.Module):
    """One tensor enters one run across its border, and another run across its own, or in each of its layers."""

    def __init__(self, *, in_each: bool) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Sequential(*layers(3)), layers(3, nn.GELU)
        self.right, self.in_each = nn.ModuleList(self.right), in_each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y, z = self.left(x), x
        for layer in self.right:
            y, z = (layer(y) * x, z) if self.in_each else (y, layer(z))
        return (y * z).mean()


class Tapped(nn.Module):
    """The output also uses what some of the layers make; some of the layers pass no gradient on."""

    def __init__(self, tapped: tuple[int, ...] = (), detached: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.stack, self.tapped, self.detached = in_full(layers(6)), tapped, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, layer in enumerate(self.stack.values()):
            x = layer(x.detach() if number in self.detached else x)
            if number in self.tapped:
                kept.append(x)
        return torch.stack([x, *kept]).mean(0).square().mean() + sum(t.sin().mean() for t in kept)


class Alike(nn.Module):
    """Layers that look alike, of which one is left out, one has the weight of another, or one a frozen bias."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.stack, self.what = in_full(layers(6)), what
        if what == "shared":
            self.stack["layer 4"].up.weight = self.stack["layer 1"].up.weight
        if what == "frozen bias":
            self.stack["layer 2"].up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.stack.values()):
            if (self.what, number) != ("left out", 3):
                x = layer(x)
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bias and none": (lambda: Chain(*(nn.Linear(8, 8, bias=k < 4) for k in range(8))), 2),
    "three activations": (lambda: Chain(*layers(3), *layers(3, nn.GELU), *layers(3, nn.Tanh)), 3),
    "periods of two": (lambda: Chain(*(Layer(a()) for a in (nn.ReLU, nn.GELU) * 3 + (nn.Tanh, nn.SiLU) * 3)), 2),
    "a single one between": (lambda: Chain(*layers(3), nn.Linear(8, 8), *layers(3, nn.GELU)), 2),
    "nested": (lambda: Chain(nn.Sequential(*layers(3)), nn.Sequential(*layers(3, nn.GELU))), 2),
    "two streams": (TwoStreams, 2),
    "encoder and decoder": (EncoderDecoder, 2),
    "towers": (lambda: Towers(in_each=False), 2),
    "an entry that others share": (lambda: Towers(in_each=True), 2),
    "frozen first": (lambda: Chain(*layers(6), frozen=(0, 1, 2)), 2),
    "frozen in the middle": (lambda: Chain(*layers(7), frozen=(2, 3)), 2),
    "frozen last": (lambda: Chain(*layers(6), frozen=(4, 5)), 2),
    "a tap in the middle": (lambda: Tapped((2,)), 1),
    "taps everywhere": (lambda: Tapped((0, 1, 2, 3, 4, 5)), 0),
    "detached once": (lambda: Tapped(detached=(3,)), 1),
    "detached everywhere": (lambda: Tapped((0, 2, 4), (1, 2, 3, 4, 5)), 0),
    "left out": (lambda: Alike("left out"), 1),
    "shared": (lambda: Alike("shared"), 0),
    "frozen bias": (lambda: Alike("frozen bias"), 1),
}
"""With the least number of repeats that are found."""


def batch(step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


def planned(name: str) -> tuple[Case, Planner]:
    torch.manual_seed(0)
    case = perturbed(Case(model=MODELS[name][0]().double(), batch=batch))
    return case, Planner(case.model, {"a": 2}, case.args)


def without_repeats(planner: Planner) -> Planner:
    flat = copy(planner)
    flat.segments = Segments(repeats=(), rest=tuple(range(len(planner.captured.graph.nodes))))
    return flat.on(planner.mesh, None)


@pytest.mark.parametrize("name", MODELS)
def test_runs_side_by_side(name: str) -> None:
    case, planner = planned(name)
    assert len(planner.segments.repeats) >= MODELS[name][1]
    best = planner.plan(cost="serial")
    assert best.objective_seconds == pytest.approx(without_repeats(planner).plan(cost="serial").objective_seconds)
    expected = eager(case)
    for mesh in ({"a": 2}, {"a": 2, "b": 2}):
        on = planner.on(mesh, None)
        plan = on.plan(cost="serial")
        assert Plan.from_json(plan.to_json()).digest == plan.digest
        for assignment in (on.assignment(plan), random_assignment(on.space, 0)):
            program = on.writer.written(assignment, 2**20)
            assert_same(simulated(program, on.captured, case), expected, 1e-12)
