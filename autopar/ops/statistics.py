"""Covariances and counts as operators of static shapes: torch's own look at data on the way, to warn or to size the
result. `passes.capture` traces these in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`torch.cov`, without its check that weights are not negative and its warning of too few observations."""
    if input.dim() > 2:
        raise ValueError(f"cov of {input.dim()} dims: give variables in rows and observations in columns")
    observations = input.reshape(1, -1) if input.dim() < 2 else input
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    if weights is None:
        total: Tensor | int = observations.shape[1]
        weighted, normal = observations, max(total - correction, 0)
    else:
        total = weights.sum()
        weighted = observations * weights
        lost = correction if aweights is None else correction * (weights * aweights).sum() / total
        normal = (total - lost).clamp_min(0)
    centred = observations - (weighted.sum(1) / total).unsqueeze(1)
    other = centred if weights is None else centred * weights
    return (torch.mm(centred, other.t().conj()) / normal).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """`torch.corrcoef`, of the covariance above."""
    covariance = cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    variance = covariance.diagonal()
    deviation = (variance.real if variance.is_complex() else variance).sqrt()
    found = covariance / deviation[:, None] / deviation
    if not found.is_complex():
        return found.clip(-1, 1)
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` of numbers below `minlength`, which others make an index error."""
    if not minlength:
        raise ValueError(
            "torch.bincount without minlength is as long as the largest number says: pass minlength=n, for numbers "
            "of 0 to n - 1"
        )
    if weights is None:
        ones = torch.ones_like(input, dtype=torch.int64)
    else:
        ones = weights.detach() if weights.dtype is torch.float32 else weights.detach().double()
    return ones.new_zeros(minlength).scatter_add(0, input.long(), ones)


TRACED: Mapping[Any, Callable[..., Tensor]] = {
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
    torch.bincount: bincount,
    torch.Tensor.bincount: bincount,
}
"""Functions of torch -> what is traced in their place."""
