"""Attention under every split: heads, grouped heads, batch, queries, keys; causal, masked and free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar import testing
from autopar.ir.graph import meta_of
from autopar.ops import rule_of, sdpa
from autopar.ops.oracle import Report, check_rule, make_call
from autopar.ops.sdpa.workspace import workspace_bytes
from autopar.passes.capture.attention import attended
from autopar.planning.planner import Planner
from autopar.runtime.memory import peak_bytes


def tensors(heads: int, key_heads: int, queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(heads + queries)
    sizes = [(heads, queries, 4), (key_heads, keys, 4), (key_heads, keys, 4)]
    return [torch.randn(2, *size, dtype=dtype) for size in sizes]


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    attn_mask: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    scale: float = 0.5,
) -> list[Report]:
    """Both ops, on what the forward op makes."""
    masks, named = (attn_mask, dropout_mask), {"scale": scale, "is_causal": causal}
    named |= {} if dropout_mask is None else {"dropout_p": 0.25}
    results = sdpa.attention(query, key, value, *masks, **named)
    back = (torch.randn_like(results[0]), query, key, value, *results)
    return [
        check_rule(sdpa.ATTENTION, query, key, value, *masks, **named),
        check_rule(sdpa.ATTENTION_BACKWARD, *back, *masks, **named),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (6, 12), (12, 6), (1, 12), (7, 7), (6, 5), (5, 11)])
def test_queries_and_keys_are_split(queries: int, keys: int, causal: bool) -> None:
    for report in check(*tensors(2, 2, queries, keys), causal):
        assert set(report.factors) == {"b", "h", "q", "k"} - ({"q"} if queries == 1 else set())


def test_a_scale_is_kept() -> None:
    check(*tensors(2, 2, 6, 6), True, scale=0.1)


@pytest.mark.parametrize("shape", [(6, 12), (2, 1, 6, 12), (1, 4, 1, 12), (2, 4, 6, 12)])
def test_masks_with_queries_that_see_no_key(shape: tuple[int, ...]) -> None:
    """Neither on one rank, nor on any."""
    torch.manual_seed(0)
    mask = torch.randn(shape, dtype=torch.float64)
    mask[..., :6] = -torch.inf
    mask[..., -1, :] = -torch.inf
    for report in check(*tensors(4, 4, 6, 12), False, attn_mask=mask):
        assert set(report.factors) == {"b", "h", "q", "k"}


@pytest.mark.parametrize("shape", [(6, 7), (2, 1, 6, 7), (1, 4, 1, 7), (2, 4, 6, 1), (6, 1)])
def test_keys_that_are_padding_are_not_seen(shape: tuple[int, ...]) -> None:
    """Whether the mask has a column for every key, or one for all; and by queries that see no other key."""
    torch.manual_seed(0)
    mask = torch.randn(shape, dtype=torch.float64)
    mask[..., -1, :] = -torch.inf
    for report in check(*tensors(4, 2, 6, 7), False, attn_mask=mask):
        assert set(report.factors) == {"b", "h", "q", "k"}
    # probabilities far from those of zeros: padding would take over
    query, key, value = tensors(2, 2, 4, 7)
    check(query.abs() * 100, -key.abs() * 100, value, False)


@pytest.mark.parametrize("shape", [(6, 6), (2, 1, 1, 6), (2, 4, 6, 6), (7, 7), (2, 1, 1, 7), (1, 1, 7, 1)])
def test_queries_and_keys_are_split_under_a_causal_mask_beside_another(shape: tuple[int, ...]) -> None:
    """One that is padding on the left hides all keys of the first queries."""
    mask = torch.randn(shape, dtype=torch.float64)
    mask[..., : 2 if shape[-1] > 1 else 0] = -torch.inf
    size = max(shape[-2:])
    for report in check(*tensors(4, 2, size, size), True, attn_mask=mask):
        assert set(report.factors) == {"b", "h", "q", "k"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_weights_that_dropout_keeps_are_split_with_the_scores(key_heads: int, causal: bool) -> None:
    kept = torch.rand(2, 4, 6, 7) > 0.25
    for report in check(*tensors(4, key_heads, 6, 7), causal, dropout_mask=kept):
        assert set(report.factors) == {"b", "h", "q", "k"}
    mask = torch.randn(2, 1, 6, 7, dtype=torch.float64)
    mask[..., -1, :] = -torch.inf
    check(*tensors(4, key_heads, 6, 7), False, mask, kept)


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(causal: bool) -> None:
    check(*tensors(2, 2, 6, 6, torch.bfloat16), causal)


def test_the_products_of_attention_are_counted() -> None:
    call, _ = make_call(sdpa.ATTENTION, tuple(tensors(4, 4, 6, 12)), {"scale": 0.5})
    rule = rule_of(call)
    assert rule is not None and rule.flops == 2 * 2 * 2 * 4 * 6 * 12 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [2, 8])
def test_the_memory_of_a_call_with_dropout_is_what_is_predicted(key_heads: int, dtype: torch.dtype) -> None:
    """Of several parts, forward and backward."""
    query = torch.randn(4, 8, 256, 64, dtype=dtype)
    key, value = (torch.randn(4, key_heads, 256, 64, dtype=dtype) for _ in range(2))
    kept, named = torch.rand(4, 8, 256, 256) > 0.1, {"scale": 0.1, "dropout_p": 0.1}
    results = sdpa.attention(query, key, value, None, kept, **named)
    forward = [query, key, value, kept]
    backward = [torch.randn_like(query), query, key, value, *results, kept]
    calls: list[tuple[list[torch.Tensor], Any, int]] = [
        (forward, lambda: sdpa.attention(*forward[:3], None, kept, **named), sum(x.nbytes for x in results)),
        (backward, lambda: sdpa.attention_backward(*backward[:6], None, kept, **named),
         sum(x.nbytes for x in forward[:3])),
    ]  # fmt: skip
    for held, call, made in calls:
        measured = peak_bytes(call, held, query.device) - sum(x.untyped_storage().nbytes() for x in held) - made
        predicted = workspace_bytes(list(map(meta_of, held)), "cpu", backward=held is backward)
        assert 0.95 * measured <= predicted <= 1.1 * measured


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads_are_split_with_the_heads_of_their_keys(key_heads: int) -> None:
    """One head of keys for all is whole, and its gradient a sum."""
    for causal in (False, True):
        for report in check(*tensors(8, key_heads, 6, 6), causal):
            assert set(report.factors) == {"b", "h", "q", "k"}
    check(*tensors(8, key_heads, 4, 6), False, attn_mask=torch.randn(2, 8, 4, 6, dtype=torch.float64))


# ---- as models call it ---------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Arguments of `scaled_dot_product_attention`: heads shared or broadcast, dims before them, masks of every form."""
    torch.manual_seed(draw(st.integers(0, 99)))
    batch = draw(st.sampled_from([(2,), (1,), (2, 3), ()]))
    heads, queries, keys = draw(st.sampled_from([1, 4])), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    width, value_width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    grouped = draw(st.booleans()) and heads == 4
    key_heads = draw(st.sampled_from([1, 2, 4])) if grouped else draw(st.sampled_from([1, heads]))
    key_batch = draw(st.sampled_from([batch, tuple(1 for _ in batch)]))
    leads = ((*batch, heads), (*key_batch, key_heads), (*key_batch, key_heads))
    sizes = ((queries, width), (keys, width), (keys, value_width))
    tensors = tuple(torch.randn(*lead, *size, dtype=torch.float64) for lead, size in zip(leads, sizes, strict=True))
    named: dict[str, Any] = {"enable_gqa": grouped, "is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        named["scale"] = 0.3
    if not named["is_causal"] and draw(st.booleans()):
        shape = (*batch, heads, queries, keys)
        shape = tuple(size if draw(st.booleans()) else 1 for size in shape)[draw(st.integers(0, len(shape) - 2)) :]
        mask = torch.randn(shape, dtype=torch.float64)
        named["attn_mask"] = mask > -0.5 if draw(st.booleans()) else mask
    return tensors, named


@given(calls())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_the_operator_is_torchs_function(call: tuple[tuple[torch.Tensor, ...], dict[str, Any]]) -> None:
    """Output and gradients, in float64."""
    tensors, named = call

    def step(function: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves, **named)
        return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]

    for found, expected in zip(step(attended), step(F.scaled_dot_product_attention), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("what", ["shapes", "heads", "width", "dtypes", "mask", "causal and mask", "probability"])
def test_what_does_not_fit_raises_what_torch_raises(what: str) -> None:
    q, k, v, mask = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), None
    named: dict[str, Any] = {}
    if what == "shapes":
        q = torch.randn(3, 4, 6, 8)
    elif what == "heads":
        k = v = torch.randn(2, 2, 5, 8)
    elif what == "width":
        k = torch.randn(2, 4, 5, 7)
    elif what == "dtypes":
        k = k.double()
    elif what == "mask":
        mask = torch.randn(6, 4)
    elif what == "causal and mask":
        mask, named = torch.randn(7, 5), {"is_causal": True}
    else:
        named = {"dropout_p": 1.5}
    for function in (attended, F.scaled_dot_product_attention):
        with pytest.raises(RuntimeError):
            function(q, k, v, mask, **named)


LONG = 64


class Attends(nn.Module):
    """One attention, with a mask of some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.qkv, self.out = form, nn.Linear(8, 16), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(1, 1, LONG, LONG))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2).split((2, 1, 1), 1)
        places = torch.arange(LONG)
        masks: dict[str, dict[str, Any]] = {
            "free": {},
            "causal": {"is_causal": True},
            "window": {"attn_mask": (places[:, None] - places).abs() < 4},
            "padding": {"attn_mask": (places < 50)[None, None, None]},
            "bias": {"attn_mask": self.bias.detach()},
            "dropout": {"dropout_p": 0.25},
        }
        attended = F.scaled_dot_product_attention(q, k, v, **masks[self.form], enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("form", ["free", "causal", "window", "padding", "bias", "dropout"])
def test_a_step_with_every_form_of_mask_holds_no_scores(form: str) -> None:
    """Equal to eager, and nothing in the graph is of the size of the scores, but the weights that dropout keeps."""
    torch.manual_seed(0)
    model, x = Attends(form), torch.randn(2, LONG, 8)
    planner = Planner(model, {"dp": 2, "tp": 2}, (x,))
    scores = 2 * 2 * LONG * LONG
    large = [name for name, meta in planner.captured.graph.metas.items() if meta.numel >= scores]
    assert [planner.captured.graph.metas[name].dtype for name in large] == [torch.bool] * (form == "dropout")
    assert testing.check(model, {"dp": 2, "tp": 2}, (x,), plans=3).equal
