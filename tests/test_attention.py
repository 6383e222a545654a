"""Attention under every split: heads, grouped heads, batch, queries, keys; causal, masked and free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ops import rule_of, sdpa
from autopar.ops.oracle import Report, check_rule, make_call


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


def test_a_causal_mask_beside_another_keeps_queries_and_keys_whole() -> None:
    mask = torch.randn(6, 6, dtype=torch.float64)
    for report in check(*tensors(4, 4, 6, 6), True, attn_mask=mask):
        assert set(report.factors) == {"b", "h"}


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


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads_are_split_with_the_heads_of_their_keys(key_heads: int) -> None:
    """One head of keys for all is whole, and its gradient a sum."""
    for causal in (False, True):
        for report in check(*tensors(8, key_heads, 6, 6), causal):
            assert set(report.factors) == {"b", "h", "q", "k"}
    check(*tensors(8, key_heads, 4, 6), False, attn_mask=torch.randn(2, 8, 4, 6, dtype=torch.float64))
