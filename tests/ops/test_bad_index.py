"""Indices of nobody: what is an IndexError on one device is one where the indexed dim is split, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.ops.bounds import in_range
from autopar.ops.oracle import Cut, RuleError, check_cuts, make_call
from autopar.ops.rules import rule_of

SIZE = 12
X, ONES = torch.arange(float(SIZE)), torch.ones(2)
ROWS = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0))
SCORES = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0)).log_softmax(-1)

Arguments = Callable[[torch.Tensor], tuple[Any, ...]]
OPS: dict[str, Arguments] = {
    "aten.embedding.default": lambda i: (ROWS, i),
    "aten.nll_loss_forward.default": lambda i: (SCORES, i, None, 1, -100),
    "aten.index_select.default": lambda i: (X, 0, i),
    "aten.gather.default": lambda i: (X, 0, i),
    "aten.scatter.value": lambda i: (X, 0, i, 1.0),
    "aten.scatter.src": lambda i: (X, 0, i, ONES),
    "aten.scatter_add.default": lambda i: (X, 0, i, ONES),
    "aten.scatter_reduce.two": lambda i: (X, 0, i, ONES, "sum"),
    "aten.index_add.default": lambda i: (X, 0, i, ONES),
    "aten.index_copy.default": lambda i: (X, 0, i, ONES),
    "aten.index_fill.int_Scalar": lambda i: (X, 0, i, 1.0),
    "aten.index.Tensor": lambda i: (X, (i,)),
    "aten.index_put.default": lambda i: (X, (i,), ONES),
}
FROM_END = ("aten.index.Tensor", "aten.index_put.default", "aten.index_fill.int_Scalar")
"""In these, -1 is the last."""


def on_shards(op: str, index: int, mesh: tuple[int, ...], periods: tuple[int, ...]) -> None:
    """The op with its indexed dim split, looking for [3, index]; its result is compared where one device takes it."""
    bad = torch.tensor([3, index])
    call, tensors = make_call(op, OPS[op](torch.tensor([3, 5])), {})
    (indices,) = (name for name, value in tensors.items() if value.dtype == torch.int64)
    rule = rule_of(call)
    assert rule is not None
    (factor,) = (i for i, f in enumerate(rule.factors) if f.size == SIZE)
    allowed = 0 <= index < SIZE or (op in FROM_END and -SIZE <= index < 0)
    namespace, name, overload = op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    whole = function(*OPS[op](bad)) if allowed else None
    wholes = whole if isinstance(whole, tuple) or whole is None else (whole,)
    check_cuts(call, rule, {**tensors, indices: bad}, mesh, tuple(Cut(factor, p) for p in periods), wholes)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("mesh", "periods"), [((2,), (12,)), ((5,), (15,)), ((2, 3), (12, 6))])
def test_an_index_of_nobody(op: str, mesh: tuple[int, ...], periods: tuple[int, ...]) -> None:
    on_shards(op, 11, mesh, periods)
    low = -13 if op in FROM_END else -1
    for index in (12, 14, low):  # 14: in the padding of 5 ranks
        with pytest.raises(RuleError, match=f"index {index} is out of range for a dim of size 12") as caught:
            on_shards(op, index, mesh, periods)
        assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("op", FROM_END)
def test_an_index_from_the_end(op: str) -> None:
    for index in (-1, -12):
        on_shards(op, index, (2, 3), (12, 6))


def test_an_ignored_label_is_no_index() -> None:
    labels = torch.tensor([3, -100])
    assert in_range(labels, 0, 12, -100) is labels
    with pytest.raises(IndexError, match="index -100 is out of range for a dim of size 12"):
        in_range(labels, 0, 12, -1)
    assert in_range(labels[:0], 0, 12).numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_not_waited_for() -> None:
    """The assertion is made on the device: nothing is read from it."""
    indices = torch.arange(SIZE, device="cuda")
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert in_range(indices, 0, SIZE) is indices
        finally:
            torch.cuda.set_sync_debug_mode("default")
