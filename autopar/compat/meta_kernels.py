"""Operators that torch computes on real devices alone, on `meta` too."""

from typing import Any

import torch

_ATEN = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
"""Kernels last as long as what registers them."""


def meta_kernels() -> None:
    """Shapes of gradients of random numbers, which torch has for real devices alone."""
    for op in ("_standard_gamma_grad", "_dirichlet_grad"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "Meta"):
            _ATEN.impl(op, lambda first, *_: torch.empty_like(first), "Meta")  # type: ignore[no-untyped-call]
    norm: Any = torch.ops.aten.linalg_vector_norm.default
    if norm(torch.empty(2, 1, device="meta"), 2, (-1,)).dim() > 1:  # PyTorch 2.11 keeps such dims of size 1

        def kept_or_not(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
            return torch.amax(x.abs(), [*range(x.dim())] if dim is None else dim, keepdim).to(dtype or x.abs().dtype)

        _ATEN.impl("linalg_vector_norm", kept_or_not, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
