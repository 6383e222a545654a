"""Compilers of stretches that are quick: they run what Inductor would get, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import lowering as lowering  # of which decompositions ask
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.compat.inductor import Fused, fakes
from autopar.runtime.compiling import Inductor


def plain(function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: str) -> Fused:
    """The function itself, for operands of these strides."""
    strides = [x.stride() for x in operands]

    def run(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for x, wanted in zip(given, strides, strict=True):
            assert all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), wanted, strict=True))
        results = function(*given)
        given.clear()
        return results

    return run


def traced(function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: str) -> Fused:
    """The operators that Inductor gets, after its decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    with operands[0].fake_mode if operands else fakes():  # type: ignore[attr-defined]
        graph: Any = make_fx(function, decomposition_table=select_decomp_table())(*operands)
    return plain(graph, operands, mode)


def quick_compiler(fuse: Callable[..., Fused] = plain) -> Inductor:
    return Inductor(fuse=fuse, processes=0)
