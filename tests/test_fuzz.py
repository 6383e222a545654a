"""Random small models under random plans: loss and gradients are those of one device.

A model is a list of layers drawn by a seed, which is the test's name; run one again with
`pytest "tests/test_fuzz.py::test_a_random_plan_of_a_random_model[17]"`. A seed that once failed stays in FOUND.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, simulated
from plans import random_assignment
from torch import nn

from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner

SEEDS = range(12)
FOUND = (1,)
MESHES = ({"a": 4}, {"a": 2, "b": 2}, {"a": 3}, {"a": 2, "b": 3})


class Apply(nn.Module):
    """A function of one tensor as a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Joined(nn.Module):
    """The input beside what layers make of it, along a dim."""

    def __init__(self, dim: int, *layers: nn.Module) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.layers(x)], self.dim)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Bilinear(nn.Module):
    """An einsum with a weight of three dims."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(parts, width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsi,pij,bsj->bsp", x, self.weight, x)


def sequence_model(draw: random.Random) -> tuple[nn.Module, tuple[int, ...], int]:
    """(layers on [batch, sequence, width], shape of that, its width at the end)"""
    width = draw.choice([6, 8, 12, 10])
    shape = (draw.choice([4, 8, 7]), draw.choice([4, 6, 5, 8]), width)
    layers: list[nn.Module] = []
    length = shape[1]
    for _ in range(draw.randint(2, 5)):
        kind = draw.choice(["linear", "mlp", "attention", "norm", "slice", "cat", "einsum", "mix", "flip", "softmax"])
        if kind == "linear":
            layers.append(nn.Linear(width, width := draw.choice([6, 8, 12, 9])))
        elif kind == "mlp":
            inner = draw.choice([8, 12, 15])
            layers.append(Residual(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)))
        elif kind == "attention":
            heads = draw.choice([h for h in (1, 2, 3, 4) if width % h == 0])
            layers.append(Residual(nn.RMSNorm(width), Attention(width, heads, draw.random() < 0.5)))
        elif kind == "norm":
            layers.append(draw.choice([nn.LayerNorm, nn.RMSNorm])(width))
        elif kind == "slice" and length > 3:
            start = draw.choice([0, 1, 2])
            length -= start
            layers.append(Apply(lambda x, start=start: x[:, start:]))  # type: ignore[misc]
        elif kind == "cat":
            extra = draw.choice([2, 4, width])
            layers.append(Joined(2, nn.Linear(width, extra), nn.SiLU()))
            width += extra
        elif kind == "einsum":
            parts = draw.choice([4, 6, 3])
            layers.append(Bilinear(width, parts))
            width = parts
        elif kind == "mix":
            # over the sequence, as MLP-Mixer does
            layers.append(nn.Sequential(Apply(lambda x: x.mT), nn.Linear(length, length), Apply(lambda x: x.mT)))
        elif kind == "flip":
            layers.append(Apply(lambda x: torch.cat([x.flip(1)[:, :1], x[:, 1:].roll(1, 2)], 1)))
        elif kind == "softmax":
            layers.append(Apply(lambda x: x * x.softmax(1) + x.cumsum(1).tanh()))
    return nn.Sequential(*layers), shape, width


def image_model(draw: random.Random) -> tuple[nn.Module, tuple[int, ...], int]:
    """(layers from [batch, channels, y, x] to [batch, width], shape of the former, width)"""
    channels = draw.choice([4, 6, 3])
    shape = (draw.choice([4, 6, 8]), channels, 8, draw.choice([8, 12]))
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(["conv", "down", "depthwise", "norm", "residual", "cat", "pool"])
        if kind == "conv":
            layers += [nn.Conv2d(channels, channels := draw.choice([4, 6, 8]), 3, padding=1), nn.ReLU()]
        elif kind == "down":
            up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
            layers += [nn.Conv2d(channels, channels, 3, stride=2, padding=1), up]
        elif kind == "depthwise":
            layers.append(nn.Conv2d(channels, channels, 3, padding=1, groups=channels))
        elif kind == "norm":
            layers.append(nn.GroupNorm(2 if channels % 2 == 0 else 1, channels))
        elif kind == "residual":
            layers.append(Residual(nn.Conv2d(channels, channels, 1), nn.GELU()))
        elif kind == "cat":
            layers.append(Joined(1, nn.Conv2d(channels, 2, 1)))
            channels += 2
        elif kind == "pool":
            layers += [nn.AvgPool2d(2), nn.Upsample(scale_factor=2)]
    layers.append(Apply(lambda x: x.mean((2, 3))))
    return nn.Sequential(*layers), shape, channels


class Whole(nn.Module):
    """Layers, a head, and a mean loss over classes or over distances."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        make = draw.choice([sequence_model, sequence_model, image_model])
        self.layers, shape, width = make(draw)
        self.classes = draw.choice([0, 10, 12, 7])
        self.embedding = nn.Embedding(11, shape[-1]) if make is sequence_model and draw.random() < 0.5 else None
        self.head = nn.Linear(width, self.classes or 3)
        self.shape = shape[:-1] if self.embedding is not None else shape

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.head(self.layers(x if self.embedding is None else self.embedding(x)))
        if not self.classes:
            return F.mse_loss(found, found.detach().cos())
        labels = labels[: found[..., 0].numel()]
        return F.cross_entropy(found.flatten(0, -2), labels, ignore_index=0)

    def batch(self, step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(0, max(self.classes, 1), (self.shape[0] * (self.shape[1] + 8),), generator=generator)
        if self.embedding is not None:
            return (torch.randint(0, 11, self.shape, generator=generator),), {"labels": labels}
        return (torch.randn(self.shape, generator=generator, dtype=torch.float64),), {"labels": labels}


@pytest.mark.parametrize("seed", sorted({*SEEDS, *FOUND}))
def test_a_random_plan_of_a_random_model(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Whole(draw).double()
    case = Case(model=model, batch=model.batch)
    expected = eager(case)
    mesh = draw.choice(MESHES)
    planner = Planner(model, mesh, case.args, case.kwargs)
    for _ in range(3):
        assignment = random_assignment(planner.space, draw.randrange(1_000_000))
        program = bucket(codegen(planner.space, assignment))
        assert_same(simulated(program, planner.captured, case), expected, 1e-9)


class Integers(nn.Module):
    """Weighs vectors by whole numbers: quotients, remainders, and a product of matrices of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, n: torch.Tensor, by: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        parts = n // by + n % by + torch.fmod(n, by) + torch.div(n, by, rounding_mode="trunc")
        product = torch.addmm(torch.ones(5, dtype=torch.int64), n[:, None] + table, table.T @ table[:, :5])
        return (self.layer(x) * (parts[:, None] + product).float()).pow(2).mean()


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.values())))
def test_whole_numbers(mesh: dict[str, int]) -> None:
    """Padding is no divisor, and whole numbers have no shares of a bias."""
    generator = torch.Generator().manual_seed(0)

    def batch(step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        n, by, table = (torch.randint(1, 5, shape, generator=generator) for shape in ((7,), (7,), (7, 8)))
        return (torch.randn(7, 6, generator=generator), 9 * n, by, table), {}

    given = batch(0)
    case = Case(model=Integers(), batch=lambda step: given)
    planner, expected = Planner(case.model, mesh, case.args), eager(case)
    for program in (
        planner.program(planner.plan(solver="ddp")),
        *(bucket(codegen(planner.space, random_assignment(planner.space, seed))) for seed in range(6)),
    ):
        assert_same(simulated(program, planner.captured, case), expected)
