"""Ops that address elements by their place, with every dim split: also the one in which they are addressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ops.oracle import Report, check_rule
from autopar.planning.planner import Planner

SIZES = (4, 12, 6)
GENERATOR = torch.Generator().manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def places(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=GENERATOR)


def distinct(size: int, count: int) -> torch.Tensor:
    return torch.randperm(size, generator=GENERATOR)[:count]


def check(op: str, *args: Any, **kwargs: Any) -> set[str]:
    """Names of the factors that were split."""
    report: Report = check_rule(f"aten.{op}" if "." in op else f"aten.{op}.default", *args, **kwargs)
    return set(report.factors)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("place", [0, 2, -1])
def test_one_place(dim: int, place: int) -> None:
    whole = floats(*SIZES)
    part = whole.select(dim, place)
    assert "place" in check("select.int", whole, dim, place)
    assert "place" in check("select_backward", part, list(SIZES), dim, place)
    assert "place" in check("select_scatter", whole, torch.randn_like(part), dim, place)
    assert "place" in check("select.int", places(9, *SIZES), dim, place)
    assert "place" not in check("select.int", whole > 0, dim, place)


@pytest.mark.parametrize(
    ("window", "read"),
    [((0, 1, 1), True), ((-1, 2**63 - 1, 1), True), ((5, 8, 1), True), ((1, 12, 3), True), ((1, 12, 1), False)],
)
def test_windows(window: tuple[int, int, int], read: bool) -> None:
    """A slice of a few places is looked up; of many it wants its source whole."""
    whole = floats(*SIZES)
    part = whole[:, slice(*window)]
    assert ("place" in check("slice.Tensor", whole, 1, *window)) == read
    assert "place" in check("slice_backward", part, list(SIZES), 1, *window)
    assert "place" in check("slice_scatter", whole, torch.randn_like(part), 1, *window)


def test_windows_at_multiples_are_split_with_the_whole() -> None:
    whole = floats(*SIZES)
    assert "d1" in check("slice.Tensor", whole, 1, 4, 8)
    assert "d1" in check("slice_backward", whole[:, 4:8], list(SIZES), 1, 4, 8, 1)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_vector_of_places(dim: int) -> None:
    whole = floats(*SIZES)
    size = whole.shape[dim]
    assert {"place", "i"} <= check("index_select", whole, dim, places(size, 12))
    few = distinct(size, 3 if size > 4 else 4)
    part = whole.index_select(dim, few)
    assert {"place", "i"} <= check("index_add", whole, dim, few, torch.randn_like(part), alpha=2)
    assert "place" in check("index_copy", whole, dim, few, torch.randn_like(part))
    assert "place" in check("index_fill.int_Scalar", whole, dim, few, 1.5)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_places_of_every_element(dim: int) -> None:
    whole = floats(*SIZES)
    shape = list(SIZES)
    shape[dim] = 8
    index, source = places(whole.shape[dim], *shape), floats(*shape)
    assert {"place", "i"} <= check("gather", whole, dim, index)
    assert {"place", "i"} <= check("scatter_add", whole, dim, index, source)
    assert {"place", "i"} <= check("scatter_reduce.two", whole, dim, index, source, "sum")
    assert "i" not in check("scatter_reduce.two", whole, dim, index, source, "amax", include_self=False)
    shape[dim] = min(4, whole.shape[dim])
    order = floats(*SIZES).argsort(dim).narrow(dim, 0, shape[dim])
    assert "place" in check("scatter.src", whole, dim, order, floats(*shape))
    assert "place" in check("scatter.value", whole, dim, order, 1.5)


def test_indices_of_other_sizes_than_the_source() -> None:
    """A dim along which the index is shorter than what is written to or from is whole."""
    whole = floats(4, 12, 6)
    assert check("gather", whole, 1, places(12, 4, 8, 3)) == {"d0", "place", "i"}
    assert check("scatter_add", whole, 1, places(12, 4, 8, 3), floats(4, 10, 3)) == {"d0", "place"}


INDICES: dict[str, tuple[torch.Tensor | None, ...]] = {
    "one": (None, places(12, 8)),
    "of two dims": (None, places(12, 4, 2)),
    "two beside each other": (places(4, 8), places(12, 8)),
    "two that are broadcast": (places(4, 4, 1), places(12, 2)),
    "two apart": (places(4, 8), None, places(6, 8)),
    "from the end": (None, places(12, 8) - 12),
    "all": (places(4, 8), places(12, 8), places(6, 8)),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str) -> None:
    indices, whole = INDICES[name], floats(*SIZES)
    expected = {f"place{d}" for d, index in enumerate(indices) if index is not None}
    assert expected | {"i0"} <= check("index.Tensor", whole, list(indices))
    values = floats(*torch.ops.aten.index(whole, list(indices)).shape)
    assert expected | {"i0"} <= check("index_put", whole, list(indices), values, True)
    assert expected <= check("index_put", whole, list(indices), torch.tensor(2.0, dtype=torch.float64))
    assert not expected & check("index.Tensor", whole > 0, list(indices))


def test_values_that_are_put_in_order() -> None:
    """Without accumulation, for a place that comes twice, the order decides: the indices are whole."""
    found = check("index_put", floats(*SIZES), [None, distinct(12, 8)], floats(4, 8, 6))
    assert found == {"d0", "place1", "d2"}


class Positioned(nn.Module):
    """Tokens whose positions are counted, as OPT and RoBERTa do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(16, 8), nn.Embedding(12, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states = self.tokens(tokens) + self.positions((tokens > 0).cumsum(-1) - 1)
        return F.cross_entropy(self.head(states[:, 0]), labels)


def test_a_preset_takes_only_what_tokens_point_into_for_classes() -> None:
    """A dim along which sums run, or from which one place is taken, is no vocabulary."""
    batch = torch.ones(4, 12, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    planner = Planner(Positioned(), {"tp": 2}, batch)
    plan = planner.plan(solver="megatron")
    split = {name for name, choice in planner.assignment(plan).rest.items() if choice.axes[0].splits}
    assert "_log_softmax" in split and not split & {"cumsum", "select"}
