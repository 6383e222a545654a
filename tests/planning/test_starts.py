"""Starts: a plan on several axes is no longer than what its search would have come to from elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Assignment
from autopar.planning.options import taken
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.request import Request
from autopar.planning.steps import QUICK

MESH = {"dp": 8, "tp": 8}
WIDTH, BATCH, SEQUENCE = 1024, 16, 128


class Gated(nn.Module):
    """The MLP of a Llama, with its norm and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def planner(layers: int) -> Planner:
    """For a batch so small that axes compete for it."""
    with torch.device("meta"):
        model = nn.Sequential(*(Gated() for _ in range(layers))).to(torch.bfloat16)
        x = torch.zeros(BATCH, SEQUENCE, WIDTH, dtype=torch.bfloat16)
    return Planner(model, MESH, (x,), loss_fn=models.mean_square, cluster="perlmutter")


def ends(made: Planner) -> Iterator[Assignment]:
    """Of descents from all replicated, and from what presets leave, with either axis freed first, as if nothing or half
    of the traffic in buckets overlapped."""
    for part in (0.0, 0.5):
        search = made.search(Request(), made.searches.hiding(part))
        options, descent = search.options, search.descent
        starts: list[dict[str, list[SiteChoice]]] = [options.replicated()]
        for preset in PRESETS:
            try:
                cheapest = search.explore(made.preset(preset), bounded=False)
            except ValueError:
                continue
            starts.append(taken(made.space, cheapest.assignment))
        for start, order in itertools.product(starts, (descent.axes(), descent.axes()[::-1])):
            yield descent.descend(start, order, purse=descent.purse(made.effort.descents)).assignment


@pytest.mark.parametrize("layers", [1, 2])
def test_no_other_descent_ends_with_a_shorter_step(layers: int) -> None:
    made = planner(layers)
    plan = made.plan()
    others = {end: made.evaluate(end, QUICK).seconds for end in set(ends(made))}
    assert plan.seconds <= min(others.values()) * (1 + 1e-9)
    assert max(others.values()) > 1.01 * min(others.values())


def test_what_needs_more_than_the_limit_is_no_rival() -> None:
    """The other descent's plan is the shortest, and needs more memory than the search's own."""
    made = planner(1)
    free = made.plan()
    tight = made.plan(memory_limit_bytes=free.bytes - 1)
    assert tight.bytes < free.bytes
    assert tight.seconds >= free.seconds
