"""How far a tensor is from what it should be, relative to its largest element."""

import math

import torch

TINY = 1e-30
"""As what the largest element of a tensor counts at least, so that zeros can be divided by."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest element of what is expected, which counts as `floor` at least.
    Infinite where shapes, dtypes or elements that are not finite differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.detach().to(wide), expected.detach().to(wide)
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()) or not _equal(actual[~finite], expected[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    return float((actual - expected)[finite].abs().max()) / max(largest_element(expected), floor, TINY)


def difference(actual: torch.Tensor, expected: torch.Tensor | None, floor: float) -> float:
    """The relative error; of integers the part of elements that differ. Infinite where nothing is expected."""
    if expected is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if not actual.numel():
        return 0.0
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    if not actual.dtype.is_floating_point:
        return float((actual != expected).double().mean())
    return relative_error(actual, expected, floor)


def largest_element(tensor: torch.Tensor) -> float:
    """The largest finite element; 0 of what is no floating number."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether elements are equal; NaN is NaN."""
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in (actual, expected)]
    return torch.equal(*(x.nan_to_num(0.5) for x in parts))
