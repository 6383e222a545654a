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
from autopar.planning.planner import Planner
from autopar.planning.provenance import ELSEWHERE
from autopar.planning.request import Request
from autopar.planning.search import Search
from autopar.planning.starts import by_blocks

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


def ends(search: Search, made: Planner) -> Iterator[Assignment]:
    """Of descents from all replicated, the batch and the blocks on either axis, with either axis freed first."""
    options, descent = search.options, search.descent
    starts: list[dict[str, list[SiteChoice]]] = [options.replicated(), options.batch(without=-1)]
    starts += [by_blocks(options, made.searches.blocks(), axis) for axis in range(len(MESH))]
    axes = descent.axes()
    for start, order in itertools.product(starts, (axes, axes[::-1])):
        yield descent.descend(start, order, purse=descent.purse(made.effort.descents)).assignment


@pytest.mark.parametrize(("layers", "is_elsewhere"), [(1, True), (2, False)])
def test_no_other_descent_ends_with_a_shorter_step(layers: int, is_elsewhere: bool) -> None:
    made = planner(layers)
    plan = made.plan()
    search = made.search(Request(), made.searches.hiding(made.effort.hidden_part))
    others = {end: made.steps.estimated_seconds(end, None)[0] for end in set(ends(search, made))}
    assert plan.seconds <= min(others.values()) * (1 + 1e-9)
    # the cheapest as the search prices them is not the shortest
    assert plan.provenance is not None
    assert (plan.provenance.winner == ELSEWHERE) == is_elsewhere
    assert max(others.values()) > 1.01 * min(others.values())


def test_what_needs_more_than_the_limit_is_no_rival() -> None:
    """The other descent's plan is the shortest, and needs more memory than the search's own."""
    made = planner(1)
    free = made.plan()
    tight = made.plan(memory_limit_bytes=free.bytes - 1)
    assert tight.bytes < free.bytes
    assert tight.seconds >= free.seconds
