"""Inductor, torch's compiler: from a function of tensors to kernels, without Dynamo and without autograd."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from .neutral import without_autocast

Fused = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Of a list of operands, which it empties, to results."""


def fakes() -> FakeTensorMode:
    """A mode under which tensors have shapes and strides, and no data. Inductor's folder is read in one that could have
    symbolic sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def options_of(mode: str) -> dict[str, Any]:
    """Inductor's options in a mode of `torch.compile`."""
    from torch import _inductor

    return dict(_inductor.list_mode_options(mode))


def fused(function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: str) -> Fused:
    """Kernels of a function, for operands of these shapes and strides (fake ones of one mode). What was compiled before
    comes from Inductor's folder on disk. What torch warns itself of is not said, and what the caller casts is not cast.

    Raises whatever Inductor raises where it cannot compile.
    """
    kind = operands[0].device.type if operands else "cpu"
    with warnings.catch_warnings(), without_autocast(kind), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        return _fused(function, operands, mode)


def _fused(function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: str) -> Fused:
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fake_mode = operands[0].fake_mode if operands else fakes()  # type: ignore[attr-defined]
    with torch.no_grad(), fake_mode:
        traced = make_fx(function, decomposition_table=select_decomp_table())(*operands)
    with torch.no_grad(), config.patch(options_of(mode)), _traced_by(fake_mode):
        (output,) = traced.graph.find_nodes(op="output")
        # results lie as in eager: neither padded nor with channels last
        output.meta["user_visible_output_idxs"] = [*range(len(output.args[0]))]
        traced = _recursive_joint_graph_passes(traced) or traced
        compiled: Any = compile_fx_inner(traced, list(operands), is_inference=True, cudagraphs=None)
    return compiled.current_callable  # type: ignore[no-any-return]


@contextlib.contextmanager
def _traced_by(fake_mode: FakeTensorMode) -> Iterator[None]:
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        yield


def folder() -> Path:
    """Where Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
