"""Reductions along split dims, and sums that run along one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ops.oracle import check_rule

SIZES = (4, 6, 12)
GENERATOR = torch.Generator().manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def check(op: str, *args: Any, **kwargs: Any) -> set[str]:
    """Names of the factors that were split."""
    return set(check_rule(f"aten.{op}" if "." in op else f"aten.{op}.default", *args, **kwargs).factors)


ALL = {"d0", "d1", "d2"}


@pytest.mark.parametrize("dims", [[1], [0, 2], [-1]])
@pytest.mark.parametrize("keep", [False, True])
def test_reductions_of_several_dims(dims: list[int], keep: bool) -> None:
    whole = floats(*SIZES)
    assert check("logsumexp", whole, dims, keep) == ALL
    for op in ("var.correction", "std.correction", "var_mean.correction"):
        assert check(op, whole + 1e3, dims, keepdim=keep) == ALL
        assert check(op, whole, dims, correction=0, keepdim=keep) == ALL
    for order in (2, 1, 3.5, float("inf"), float("-inf")):
        assert check("linalg_vector_norm", whole, order, dims, keep) == ALL
    assert check("any.dims", whole > 1.5, dims, keep) == ALL
    assert check("all.dims", whole > -1.5, dims, keep) == ALL


def test_reductions_of_all_dims() -> None:
    whole = floats(*SIZES)
    for op in ("any", "all", "linalg_vector_norm"):
        assert check(op, whole) == ALL
    assert check("any", whole > 9) == ALL
    assert check("var.correction", whole) == ALL
    assert check("count_nonzero.dim_IntList", whole > 0, [0, 2]) == ALL


def test_norms_that_are_no_sums_of_powers_are_whole() -> None:
    assert check("linalg_vector_norm", floats(*SIZES), 0, [1]) == {"d0", "d2"}


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keep", [False, True])
def test_extremes_and_their_places(dim: int, keep: bool) -> None:
    """Of several equal numbers the first is meant."""
    ties = torch.randint(0, 3, SIZES, generator=GENERATOR)
    for whole in (floats(*SIZES), ties, ties.double(), torch.where(ties == 0, torch.nan, floats(*SIZES))):
        for op in ("max.dim", "min.dim", "argmax", "argmin"):
            assert check(op, whole, dim, keep) == ALL


def test_the_place_in_a_flattened_tensor_wants_it_whole() -> None:
    assert check("argmax", floats(*SIZES)) == set()


def test_infinities() -> None:
    whole = floats(4, 12)
    whole[0], whole[1, :6], whole[2, 3] = -torch.inf, -torch.inf, torch.inf
    assert check("logsumexp", whole, [1]) == {"d0", "d1"}
    assert check("_safe_softmax", whole[:2], 1) == {"d0", "c"}
    assert check("argmax", whole, 1) == {"d0", "d1"}


def test_half_precision() -> None:
    whole = floats(4, 12).bfloat16()
    for op in ("logsumexp", "var.correction"):
        assert check(op, whole, [1]) == {"d0", "d1"}
    assert check("linalg_vector_norm", whole, 2, [1]) == {"d0", "d1"}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sums_that_run(dim: int) -> None:
    assert "step" in check("cumsum", floats(*SIZES), dim)
    assert "step" in check("cumsum", floats(*SIZES) > 0, dim)
    assert "step" in check("cumsum", floats(*SIZES).int(), dim, dtype=torch.float64)


@pytest.mark.parametrize("diagonal", [-2, 0, 1])
@pytest.mark.parametrize("op", ["tril", "triu"])
def test_triangles(op: str, diagonal: int) -> None:
    assert check(op, floats(*SIZES), diagonal) == {"d0", "row", "column"}
    assert check(op, floats(6, 6) > 0, diagonal) == {"row", "column"}


def test_padding_is_no_part_of_a_softmax_or_of_a_variance() -> None:
    """No number of ranks divides 7 or 5, and some of 4 ranks have nothing of 5."""
    whole = floats(7, 5) + 1e3
    assert check("_softmax", whole, 1, False) == check("_log_softmax", whole, 1, False) == {"d0", "c"}
    for op in ("var.correction", "std.correction", "var_mean.correction"):
        assert check(op, whole, [0]) == check(op, whole, [0, 1], correction=0) == {"d0", "d1"}
