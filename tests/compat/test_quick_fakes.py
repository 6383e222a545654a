"""What is known of operators without asking torch is what torch says: shapes, strides, dtypes and devices of fakes, and
metas of programs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from autopar.compat.fakes import fake_mode
from autopar.compat.quick_fakes import quick_fakes
from autopar.ir.emitter import infer, on_meta
from autopar.ir.graph import TensorMeta, overload

LAYOUTS = (
    ((4, 5), (5, 1)),
    ((4, 5), (1, 4)),
    ((4, 1), (1, 1)),
    ((0, 5), (5, 1)),
    ((2, 3, 4), (12, 4, 1)),
    ((), ()),
)
"""Contiguous, transposed, with a stride that says nothing, empty, of three dims, and a scalar."""

DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.int64, torch.bfloat16),
    (torch.bool, torch.int64),
)

POINTWISE = (
    *("mul.Tensor", "div.Tensor", "sub.Tensor", "pow.Tensor_Tensor", "eq.Tensor", "maximum.default"),
    *("bitwise_and.Tensor", "tanh_backward.default"),
)
"""Of two tensors."""

VIEWS: Sequence[tuple[str, tuple[Any, ...]]] = (
    ("view.default", ([2, 2, 5],)),
    ("permute.default", ([1, 0],)),
    ("t.default", ()),
    ("transpose.int", (0, 1)),
    ("expand.default", ([3, 4, 5],)),
    ("unsqueeze.default", (1,)),
    ("slice.Tensor", (0, 1, 3)),
    ("select.int", (0, 2)),
    ("detach.default", ()),
    ("as_strided.default", ([2, 2], [1, 2], 1)),
    ("diagonal.default", ()),
)


def said(
    mode: AbstractContextManager[Any], op: str, device: str, dtypes: Sequence[torch.dtype], layouts: Any, rest: Any = ()
) -> Any:
    """Of the result, how it lies; or that there is none."""
    with mode, torch.no_grad():
        tensors = (
            torch.empty_strided(*layout, dtype=dtype, device=device)
            for layout, dtype in zip(layouts, dtypes, strict=True)
        )
        try:
            made: Any = overload(f"aten.{op}")(*tensors, *rest)
        except (RuntimeError, ValueError, IndexError):
            return "refused"
        return made.shape, made.stride(), made.storage_offset(), made.dtype, made.device, made.requires_grad


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("op", POINTWISE)
def test_pointwise_operators_make_what_torchs_fakes_make(op: str, device: str) -> None:
    """Asked twice, in two modes: what the first call teaches the second one uses, and so does another shape."""
    for dtypes, first, second in itertools.product(DTYPES, LAYOUTS, (LAYOUTS[0], LAYOUTS[-1])):
        expected = said(fake_mode(), op, device, dtypes, (first, second))
        for _ in range(2):
            assert said(quick_fakes(), op, device, dtypes, (first, second)) == expected, (dtypes, first, second)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(("op", "rest"), VIEWS, ids=[op for op, _ in VIEWS])
def test_views_lie_as_torchs_fakes_do(op: str, rest: tuple[Any, ...], device: str) -> None:
    for layout in LAYOUTS:
        expected = said(fake_mode(), op, device, [torch.float32], [layout], rest)
        in_eager = said(nullcontext(), op, "cpu", [torch.float32], [layout], rest)
        for _ in range(2):
            made = said(quick_fakes(), op, device, [torch.float32], [layout], rest)
            # fakes of PyTorch 2.11 select from what is empty, and eager does not
            assert made == expected or made == in_eager == "refused", layout


def test_what_one_mode_made_is_no_operand_of_another() -> None:
    """Remembered is how results lie, and no fake."""
    for _ in range(2):
        with quick_fakes() as mode:
            x = torch.ones(3, 4)
            y = (x + x).t()
            assert isinstance(mode, FakeTensorMode) and getattr(y, "fake_mode") is mode  # noqa: B009
            assert y.untyped_storage()._cdata != x.untyped_storage()._cdata


@pytest.mark.parametrize("op", POINTWISE)
def test_metas_of_pointwise_operators_are_those_of_torch(op: str) -> None:
    function = overload(f"aten.{op}")
    for dtypes, second in itertools.product(DTYPES, ((4, 5), ())):
        metas = tuple(map(TensorMeta, ((4, 5), second), dtypes))
        tensors = (torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in metas)
        try:
            expected = function(*tensors)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                on_meta(f"aten.{op}", metas, ())
        else:
            (made,) = on_meta(f"aten.{op}", metas, ())
            assert made is not None
            assert (made.shape, made.dtype, made.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.parametrize("op", ["aten.mul.Tensor", "aten.pow.Tensor_Scalar", "aten.full.default"])
def test_metas_follow_the_default_dtype(op: str) -> None:
    """Which may change in a process, after the same was asked."""
    args = ((4, 5), 1.5) if op == "aten.full.default" else (TensorMeta((4, 5), torch.int64), 1.5)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            (meta,) = infer(op, args, ())
            assert meta is not None and meta.dtype == dtype
    finally:
        torch.set_default_dtype(before)
