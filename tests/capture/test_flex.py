"""`flex_attention` and `varlen_attn`: what they hide is a mask, of which what is known is an argument."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, simulated
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from autopar.ops.rule import call_of
from autopar.ops.sdpa import ATTENTION, DOCUMENTS
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.planning.planner import Planner
from autopar.testing.plans import random_assignment

BATCH, LENGTH, HEADS = 2, 12, 4
COMPILED = torch.compile(flex.flex_attention)
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Maker = Callable[[Tensor], Function | None]


def causal(document: Tensor) -> Function:
    return lambda b, h, q, k: q >= k


def packed(document: Tensor) -> Function:
    return lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k)


def joined(document: Tensor) -> Function:
    return flex.and_masks(lambda b, h, q, k: document[b, q] == document[b, k], causal(document))


def of_one_row(document: Tensor) -> Function:
    row = document[0]
    return lambda b, h, q, k: (row[q] == row[k]) & (q >= k)


def both_ways(document: Tensor) -> Function:
    return lambda b, h, q, k: document[b, q] == document[b, k]


def windows(document: Tensor) -> Function:
    return lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k) & (q - k < 4)


def padded(document: Tensor) -> Function:
    return lambda b, h, q, k: (document[b, k] > 0) & (q >= k)


def by_head(document: Tensor) -> Function:
    return lambda b, h, q, k: (q - k).abs() <= h + document[b, q]


def nothing(document: Tensor) -> None:
    return None


class Attends(nn.Module):
    """With `flex_attention`, or with the mask that its function makes."""

    def __init__(self, make: Maker, plain: bool, heads: int | None = None) -> None:
        super().__init__()
        self.make, self.plain, self.heads = make, plain, heads
        self.qkv, self.out = nn.Linear(8, 4 * (HEADS + 4)), nn.Linear(4 * HEADS, 8)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2).split((HEADS, 2, 2), 1)
        function = self.make(document)
        made = (function, len(x), self.heads, x.shape[1], x.shape[1], x.device)
        if self.plain:
            mask = None if function is None else flex.create_mask(*made)
            attended = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        else:
            blocks = None if function is None else flex.create_block_mask(*made)
            attended = COMPILED(q, k, v, block_mask=blocks, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


def example(step: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(step)
    return (torch.randn(BATCH, LENGTH, 8, dtype=torch.float64), torch.randint(3, (BATCH, LENGTH)).sort(-1)[0]), {}


READ: dict[Maker, tuple[int, bool, tuple[int, ...] | None]] = {
    nothing: (0, False, None),
    causal: (0, True, None),
    packed: (BATCH, True, None),
    joined: (BATCH, True, None),
    of_one_row: (1, True, None),
    both_ways: (BATCH, False, None),
    windows: (BATCH, True, (1, 1, LENGTH, LENGTH)),
    padded: (0, True, (BATCH, 1, 1, LENGTH)),
    by_head: (0, False, (BATCH, HEADS, LENGTH, LENGTH)),
}
"""Mask -> rows of numbers that the call has, whether it is causal, and the shape of the mask that is left."""


@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize("make", READ, ids=lambda make: make.__name__)
def test_a_mask_function_is_a_mask_or_an_argument(make: Maker, heads: int | None) -> None:
    """And the step is that of the mask, for documents that are not the example's."""
    if make is by_head and heads is None:
        pytest.skip("made for one head")
    torch.manual_seed(0)
    model = Attends(make, False, heads).double()
    twin = Attends(make, True, heads).double()
    twin.load_state_dict(model.state_dict())
    case, plain = Case(model=model, batch=example), Case(model=twin, batch=example)
    planner = Planner(model, {"a": 2, "b": 2}, *example())
    graph, (rows, is_causal, left) = planner.captured.graph, READ[make]
    (call,) = (call_of(node, graph.metas) for node in graph.nodes if node.op == ATTENTION)
    given = [call.argument(name) for name in ("attn_mask", *DOCUMENTS)]
    shapes = [None if value is None else graph.metas[value.name].shape for value in given]
    assert shapes == [left, *[(rows, LENGTH) if rows else None] * 2]
    assert call.argument("is_causal") == is_causal
    for seed in range(4):
        assignment = random_assignment(planner.space, seed)
        if assignment is not None:
            program = codegen(planner.space, assignment)
            assert_same(simulated(program, planner.captured, case, seed), eager(plain, seed), 1e-9)


class CompilesItsMask(Attends):
    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        blocks = flex.create_block_mask(packed(document), len(x), None, x.shape[1], x.shape[1], x.device, _compile=True)
        return self.out(COMPILED(*[q[:, :4]] * 3, block_mask=blocks).transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.filterwarnings("ignore:_compile flag")
def test_a_mask_that_dynamo_would_compile_is_one_as_well() -> None:
    """Dynamo asks torch's generator for its methods, to know them by name, the first time in a process."""
    trace_rules.get_torch_obj_rule_map.cache_clear()
    graph = Planner(CompilesItsMask(packed, False).double(), {"a": 2}, *example()).captured.graph
    (call,) = (call_of(node, graph.metas) for node in graph.nodes if node.op == ATTENTION)
    assert call.argument("is_causal") and call.argument("attn_mask") is None


class Refused(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)
        self.blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu")

    def forward(self, x: Tensor) -> Any:
        q, named = self.layer(x), dict[str, Any]()
        if self.how == "score_mod":
            named["score_mod"] = lambda score, b, h, q, k: score + q - k
        elif self.how == "held":
            named["block_mask"] = self.blocks
        elif self.how == "of blocks":
            made = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu")
            number, indices = torch.zeros_like(made.kv_num_blocks), made.kv_indices
            named["block_mask"] = flex.BlockMask.from_kv_blocks(
                number, indices, mask_mod=made.mask_mod, seq_lengths=(LENGTH, LENGTH)
            )
        elif self.how == "return_lse":
            named["return_lse"] = True
        else:
            named["return_aux"] = flex.AuxRequest(max_scores=True)
        out = flex.flex_attention(q, q, q, **named)
        return out.sum() if isinstance(out, Tensor) else out[0].sum()


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("score_mod", "has a score_mod"), ("held", "does not make by create_block_mask"),
        ("of blocks", "does not make by create_block_mask"), ("return_lse", "returns statistics"),
        ("return_aux", "returns statistics"),
    ],
)  # fmt: skip
def test_what_would_be_frozen_or_is_not_computed_is_refused(how: str, message: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s){message}.*test_flex.py:\d+|test_flex.py:\d+.*{message}"):
        capture(Refused(how), (torch.randn(2, 1, LENGTH, 4),))


# --- varlen_attn, for which a CPU has no kernel


class Rows(nn.Module):
    """Documents one after the other: with `varlen_attn`, or one by one."""

    def __init__(self, alone: bool, window: tuple[int, int], crosses: bool = False, **more: Any) -> None:
        super().__init__()
        self.alone, self.window, self.crosses, self.more = alone, window, crosses, more
        self.qkv, self.out = nn.Linear(8, 4 * (HEADS + 4)), nn.Linear(4 * HEADS, 8)

    def forward(self, x: Tensor, begins: Tensor, others: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 4)).split((HEADS, 2, 2), 1)
        of_keys = others if self.crosses else begins
        if not self.alone:
            out = varlen_attn(
                q, k, v, begins, of_keys, LENGTH, LENGTH, window_size=self.window, enable_gqa=True, **self.more
            )
            return self.out((out if isinstance(out, Tensor) else out[0]).flatten(1)).square().mean()
        made = []
        for (a, b), (c, d) in zip(pairwise(begins.tolist()), pairwise(of_keys.tolist()), strict=True):
            mask = torch.ones(b - a, d - c, dtype=torch.bool)
            left, right = (b - a if size < 0 else size for size in self.window)
            mask = mask.triu(-left).tril(right) if not self.crosses else mask
            parts = q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1)
            made.append(F.scaled_dot_product_attention(*parts, mask, enable_gqa=True).transpose(0, 1))
        return self.out(torch.cat(made).flatten(1)).square().mean()


NUMBERS = [None, (1, LENGTH), (1, LENGTH)]
MASK = [(1, 1, LENGTH, LENGTH), None, None]
"""Where a window is left of the mask, numbers beside it would make it no smaller."""


def rows(step: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(step)
    borders = [(torch.randperm(LENGTH - 1)[:2] + 1).sort()[0] for _ in range(2)]
    ends = torch.tensor([0]), torch.tensor([LENGTH])
    begins, others = (torch.cat([ends[0], inside, ends[1]]).int() for inside in borders)
    return (torch.randn(LENGTH, 8, dtype=torch.float64), begins, others), {}


@pytest.mark.parametrize(
    ("window", "crosses", "shapes"),
    [
        ((-1, -1), False, NUMBERS), ((-1, 0), False, NUMBERS), ((-1, -1), True, NUMBERS),
        ((3, 0), False, MASK), ((2, 2), False, MASK),
    ],
)  # fmt: skip
def test_documents_in_a_row_are_numbers(window: tuple[int, int], crosses: bool, shapes: Any) -> None:
    """And the step is that of one document after the other, wherever they begin."""
    torch.manual_seed(0)
    model, twin = (Rows(alone, window, crosses).double() for alone in (False, True))
    twin.load_state_dict(model.state_dict())
    planner = Planner(model, {"a": 2, "b": 2}, *rows())
    graph = planner.captured.graph
    (call,) = (call_of(node, graph.metas) for node in graph.nodes if node.op == ATTENTION)
    given = [call.argument(name) for name in ("attn_mask", *DOCUMENTS)]
    assert [None if value is None else graph.metas[value.name].shape for value in given] == shapes
    assert call.argument("is_causal") == (window[1] == 0)
    for seed in range(4):
        assignment = random_assignment(planner.space, seed)
        if assignment is not None:
            program = codegen(planner.space, assignment)
            found = simulated(program, planner.captured, Case(model=model, batch=rows), seed)
            assert_same(found, eager(Case(model=twin, batch=rows), seed), 1e-9)


@pytest.mark.parametrize(
    ("crosses", "window", "more", "message"),
    [
        (True, (-1, 0), {}, "whose borders are another tensor"),
        (False, (-1, -1), {"seqused_k": torch.ones(3, dtype=torch.int32)}, "for inference alone"),
        (False, (-1, -1), {"return_aux": AuxRequest(lse=True)}, "returns statistics"),
    ],
)
def test_what_documents_in_a_row_have_not_is_refused(
    crosses: bool, window: tuple[int, int], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Rows(False, window, crosses, **more).double(), rows()[0])
