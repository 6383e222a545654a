"""Masks that keep documents apart: which are read as numbers of documents, and which stay masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, simulated
from torch import Tensor, nn

from autopar.ops.rule import call_of
from autopar.ops.sdpa import ATTENTION, DOCUMENTS
from autopar.passes.codegen.program import codegen
from autopar.planning.planner import Planner
from autopar.testing.plans import random_assignment

BATCH, LENGTH, HEADS = 2, 8, 2
Mask = Callable[[Tensor, Tensor], Tensor]


class Attends(nn.Module):
    """Attention under a mask [batch or 1, 1 or heads, queries, keys] made of positions, and of other integers."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.project, self.mask = nn.ModuleList(nn.Linear(8, 24) for _ in range(2)), mask

    def forward(self, x: Tensor, positions: Tensor, other: Tensor) -> Tensor:
        mask = self.mask(positions, other)
        for layer in self.project:
            q, k, v = (part.unflatten(-1, (HEADS, 4)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)
        return x.square().mean()


def anew(positions: Tensor, step: int = 1) -> Tensor:
    """Numbers of documents: a new one where positions do not go on by a step."""
    return (positions.diff(dim=-1, prepend=positions[:, :1] - step) != step).cumsum(-1)


def places() -> Tensor:
    return torch.arange(LENGTH)


def causal() -> Tensor:
    return (places() <= places()[:, None])[None, None]


def by_query(x: Tensor) -> Tensor:
    return x[torch.arange(BATCH)[:, None, None, None], places()[:, None]]


def by_key(x: Tensor) -> Tensor:
    return x[torch.arange(BATCH)[:, None, None, None], places()]


def apart(x: Tensor) -> Tensor:
    return by_query(x) == by_key(x)


def as_transformers_does(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) & (by_key(p) <= by_query(p))


def turned(p: Tensor, other: Tensor) -> Tensor:
    return (by_query(p) >= by_key(p)) & apart(anew(p))


def viewed(p: Tensor, other: Tensor) -> Tensor:
    number = anew(p)
    return (number[:, :, None] == number[:, None, :])[:, None] & (p[:, None, None, :] <= p[:, None, :, None])


def by_places(p: Tensor, other: Tensor) -> Tensor:
    return apart(other) & causal()


def both_ways(p: Tensor, other: Tensor) -> Tensor:
    return apart(other)


def of_one_row(p: Tensor, other: Tensor) -> Tensor:
    return (other[0, :, None] == other[0, None, :])[None, None].expand(BATCH, 1, -1, -1) & causal()


def of_two(p: Tensor, other: Tensor) -> Tensor:
    return by_query(other) == by_key(anew(p))


def shuffled(p: Tensor, other: Tensor) -> Tensor:
    return apart(other[:, places().flip(0)]) & causal()


def short(p: Tensor, other: Tensor) -> Tensor:
    return apart(other.int()) & causal()


def and_padding(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) & causal() & (other > 0)[:, None, None, :]


def and_window(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) & causal() & (places() > places()[:, None] - 3)


def if_at_all(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) & causal() & (other.max() > 0)


def earlier(p: Tensor, other: Tensor) -> Tensor:
    """Not the query's own place. The first query of a document sees nothing."""
    return apart(anew(p)) & (by_key(p) < by_query(p))


def later(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) & (by_query(p) <= by_key(p))


def in_twos(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p, 2)) & (by_key(p) <= by_query(p))


def in_the_order_of_another(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) & (by_key(other) <= by_query(other))


def of_another(p: Tensor, other: Tensor) -> Tensor:
    return apart(other) & (by_key(p) <= by_query(p))


def of_floats(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p).double()) & causal()


def of_truth(p: Tensor, other: Tensor) -> Tensor:
    return apart(other > 1) & causal()


def of_heads(p: Tensor, other: Tensor) -> Tensor:
    return (other[None, :HEADS, :, None] == other[None, :HEADS, None, :]) & causal()


def either(p: Tensor, other: Tensor) -> Tensor:
    return apart(anew(p)) | causal()


def unequal(p: Tensor, other: Tensor) -> Tensor:
    return (by_query(other) != by_key(other)) | (places() == places()[:, None])


OWN, ALL = (BATCH, 1, LENGTH, LENGTH), (LENGTH, LENGTH)
READ: dict[Mask, tuple[int, bool, tuple[int, ...] | None]] = {
    as_transformers_does: (BATCH, True, None),
    turned: (BATCH, True, None),
    viewed: (BATCH, True, None),
    by_places: (BATCH, True, None),
    both_ways: (BATCH, False, None),
    of_one_row: (1, True, None),
    of_two: (BATCH, False, None),
    shuffled: (BATCH, True, None),
    short: (BATCH, True, None),
    and_padding: (BATCH, True, (BATCH, 1, 1, LENGTH)),
    and_window: (BATCH, True, ALL),
    if_at_all: (BATCH, True, (1, 1, 1, 1)),
    earlier: (0, False, OWN),
    later: (0, False, OWN),
    in_twos: (0, False, OWN),
    in_the_order_of_another: (0, False, OWN),
    of_another: (0, False, OWN),
    of_floats: (0, True, OWN),
    of_truth: (0, True, OWN),
    of_heads: (0, True, (1, HEADS, LENGTH, LENGTH)),
    either: (0, False, OWN),
    unequal: (0, False, OWN),
}
"""Mask -> rows of numbers that calls have, whether they are causal, and the shape of the mask that is left."""


def example(step: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Borders that differ by step and by sample. Of other integers, some lie in pieces."""
    torch.manual_seed(step)
    x = torch.randn(BATCH, LENGTH, 8, dtype=torch.float64)
    starts = (torch.rand(BATCH, LENGTH) > 0.6).long()
    starts[:, 0] = 1
    first = torch.cummax(places() * starts, -1)[0]
    return (x, places() - first, torch.randint(4, (BATCH, LENGTH))), {}


@pytest.mark.parametrize("mask", READ, ids=lambda mask: mask.__name__)
def test_what_keeps_documents_apart_is_an_argument_if_it_surely_does(mask: Mask) -> None:
    """And the step is what the model's is, for borders that the example has not."""
    case = Case(model=Attends(mask).double(), batch=example)
    planner = Planner(case.model, {"a": 2, "b": 2}, *case.batch(0))
    graph, (rows, is_causal, left) = planner.captured.graph, READ[mask]
    calls = [call_of(node, graph.metas) for node in graph.nodes if node.op == ATTENTION]
    for call in calls:
        given = [call.argument(name) for name in ("attn_mask", *DOCUMENTS)]
        shapes = [None if value is None else graph.metas[value.name].shape for value in given]
        assert shapes == [left, *[(rows, LENGTH) if rows else None] * 2]
        assert call.argument("is_causal") == is_causal
    assert len(calls) == 2
    line = planner.on({"a": 4}, None)
    programs = [line.program(line.plan(solver="dp", cost="serial"))]
    for seed in range(3):
        assignment = random_assignment(planner.space, seed)
        programs += [] if assignment is None else [codegen(planner.space, assignment)]
    assert len(programs) > 2
    for number, program in enumerate(programs):
        assert_same(simulated(program, planner.captured, case, number), eager(case, number), 1e-9)
