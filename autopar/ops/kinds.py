"""Kinds of operators that rewrites of programs and graphs know, and the ones that they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopar.ir.graph import CAST, WAIT
from autopar.ir.program import LAYOUT

from .aten import SLICE

ADD, CAT, CLONE, EXPAND = "aten.add.Tensor", "aten.cat.default", "aten.clone.default", "aten.expand.default"
ADD_TO = "aten.add_.Tensor"
"""Writes its first operand, which nothing else may read."""

SPLIT = "aten.split_with_sizes.default"
SELECT, STACK = "aten.select.int", "aten.stack.default"
_SCATTERS = "embedding_dense_backward.default index_add.default index_put.default scatter.src scatter.value"
_SCATTERS += " scatter_add.default scatter_reduce.two"
_SORTS = "kthvalue.default sort.default sort.stable topk.default"
BY_INDEX = frozenset(f"aten.{op}" for op in f"{_SCATTERS} {_SORTS}".split())
"""Operators that write where data says: no kernel computes their results while it reads them."""

SUM, LOWER_TRIANGLE = "aten.sum.dim_IntList", "aten.tril.default"

AND = ("aten.bitwise_and.Tensor", "aten.logical_and.default")
ONES = ("aten.new_ones.default", "aten.ones.default", "aten.ones_like.default")

ADDING = {"aten.mm.default": "aten.addmm.default", "aten.bmm.default": "aten.baddbmm.default"}
"""A product, and the op that adds it to its first operand: a sum of products needs no pass over memory of its own."""

SUMMABLE = LAYOUT | {WAIT, ADD, CAST, CAT, SPLIT, SLICE}
"""Local operators of which a sum of results is the result of a sum."""

MOVING = (
    "collective.", "aten.cat", "aten.view", "aten.clone", "aten.slice", "aten.t.", "aten.transpose", "aten._to_copy",
)  # fmt: skip
"""How ops begin that stand between the product that is a parameter's gradient and the gradient that a step returns."""

FUNCTIONAL: Mapping[str, str] = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.rrelu_with_noise.default": "aten.rrelu_with_noise_functional.default",
}
"""Operators that write numbers where they stand -> those that return them, where the name does not say it."""

MOVERS: Mapping[str, tuple[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    ADD: (2, torch.add),
    "aten.mul.Tensor": (2, torch.mul),
    CLONE: (1, lambda x, y: x.clone()),
    "aten.silu.default": (1, lambda x, y: torch.nn.functional.silu(x)),
    "aten.gelu.default": (1, lambda x, y: torch.nn.functional.gelu(x)),
    "aten._softmax.default": (1, lambda x, y: x.softmax(-1)),
    SUM: (1, lambda x, y: x.sum(0)),
    "aten.mean.dim": (1, lambda x, y: x.mean(-1)),
}
"""What a model does besides arithmetic, and how many operands each of it reads."""
