"""Presets: the plans that people write by hand, as restrictions of the search space.

A preset says, for every site, which of its options it may take; the solver picks among what is left,
so a preset is never a second implementation of anything. Axes named like "tp", "tensor" or "model"
carry tensor parallelism; on other axes a tensor-parallel preset is data parallel. On a mesh without
such a name the last axis carries it.

- `dp`: every operator that can split the batch does; parameters are replicated.
- `fsdp`: the same, with parameters sharded at rest, gathered before use, and again in backward.
- `megatron`: every contraction with a weight splits a dim of it, attention its heads, embedding and
  head the vocabulary; the residual stream is replicated.
- `megatron_sp`: the same, with norms and residual stream split by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

from .layout import Partial, Split
from .passes.problem import Allowed
from .passes.strategies import KEEP, REGATHER, WHOLE, AxisChoice, Site, SiteChoice, Space

TENSOR_AXIS_NAMES = ("tp", "tensor", "model", "mp")

AxisRule = Callable[[Space, "Digits", Site, int], tuple[AxisChoice, ...]]
"""Which choices a site may take on one axis."""
