"""Starts: a plan on several axes is no longer than what its search would have come to from elsewhere."""

from __future__ import annotations

import contextlib
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
from autopar.planning.presets.context import Context
from autopar.planning.request import Request
from autopar.planning.steps import QUICK
from autopar.solve.effort import Effort
from autopar.solve.problem import Infeasible

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


class ReadByMany(nn.Module):
    """One value, and the layers that read it."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.first, self.readers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(readers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return torch.as_tensor(sum(reader(h).sin().square().sum() for reader in self.readers))


def test_what_a_preset_fits_in_is_never_refused() -> None:
    """Where activations are most of the memory, what has the smallest sum of bytes has not the smallest peak."""
    torch.manual_seed(0)
    batch = models.tokens(0, batch=4, sequence=32)[1]
    made = Planner(models.llama(), {"a": 2}, kwargs=batch, cluster="dgx-h100")
    tried, kept, smallest = ("fsdp", "megatron", "megatron_sp"), [], []
    for preset in tried:
        with contextlib.suppress(Infeasible):
            kept.append(made.plan(solver=preset, memory_limit_bytes=560_000))
        with pytest.raises(Infeasible) as raised:
            made.plan(solver=preset, memory_limit_bytes=100_000)
        smallest.append(raised.value.smallest_bytes)
    assert kept, "the limit was chosen so that one does"
    plan = made.plan(memory_limit_bytes=560_000)
    assert plan.bytes <= 560_000 and plan.seconds <= min(one.seconds for one in kept) * 1.001
    with pytest.raises(Infeasible) as raised:
        made.plan(memory_limit_bytes=100_000)
    assert raised.value.smallest_bytes <= min(smallest), "and a refusal names the smallest peak that is known"


@pytest.mark.parametrize("entries", [16, 64, 256])
def test_a_search_begins_where_the_readers_of_a_value_are_too_many(entries: int) -> None:
    """No way of solving takes the table of all that they may want together: some of it stays as it is, and there are
    plans, within a limit too."""
    made = Planner(ReadByMany(5), {"a": 2, "b": 2}, (torch.randn(8, 8),))
    narrow = made.within(Effort(tensor_entries=entries))
    limit = 0.9 * made.plan().bytes
    assert narrow.plan(memory_limit_bytes=limit).bytes <= limit
    assert narrow.plan().seconds > 0


def test_a_digit_is_one_that_travels_and_no_other() -> None:
    made = planner(1)
    context = Context(made.space, made.searches.blocks())
    assert context.digits(0, "batch").splits
    with pytest.raises(ValueError, match=r"unknown digit 'features' \(did you mean 'feature'\?\); known: batch, "):
        context.digits(0, "features")
