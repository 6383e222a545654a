"""Documents: attention within them under every split, and the memory of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.graph import meta_of
from autopar.ops import sdpa
from autopar.ops.oracle import Report, check_rule
from autopar.ops.sdpa import composed, documents
from autopar.ops.sdpa.workspace import workspace_bytes
from autopar.runtime.memory import peak_bytes


def tensors(heads: int, key_heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    torch.manual_seed(heads + queries)
    sizes = [(heads, queries, 4), (key_heads, keys, 4), (key_heads, keys, 4)]
    return [torch.randn(2, *size, dtype=torch.float64) for size in sizes]


def numbers(rows: int, length: int, count: int = 3, seed: int = 0) -> torch.Tensor:
    """Documents in a row, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(count, (rows, length), generator=generator).sort(-1)[0]


def masked(of_queries: torch.Tensor, of_keys: torch.Tensor, causal: bool, offset: int = 0) -> torch.Tensor:
    """The mask that the numbers stand for, [batch, 1, queries, keys]."""
    hidden = of_queries[:, :, None] != of_keys[:, None, :]
    if causal:
        rows, columns = torch.arange(hidden.shape[1]), torch.arange(hidden.shape[2])
        hidden = hidden | (columns > rows[:, None] + offset)
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf).unsqueeze(1)


def check(
    operands: list[torch.Tensor],
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    causal: bool,
    attn_mask: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
) -> list[Report]:
    """Both ops, on what the forward op makes."""
    masks: tuple[Any, ...] = attn_mask, dropout_mask, of_queries, of_keys
    named = {"scale": 0.5, "is_causal": causal} | ({} if dropout_mask is None else {"dropout_p": 0.25})
    results = sdpa.attention(*operands, *masks, **named)
    back = torch.randn_like(results[0]), *operands, *results
    return [
        check_rule(sdpa.ATTENTION, *operands, *masks, **named),
        check_rule(sdpa.ATTENTION_BACKWARD, *back, *masks, **named),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (6, 12), (12, 6), (1, 12), (7, 7), (6, 5), (5, 11)])
def test_queries_and_keys_are_split_with_their_numbers(queries: int, keys: int, causal: bool) -> None:
    """Of numbers by sample, and of one row of them for all. A query may see no key."""
    for rows in (1, 2):
        for report in check(tensors(4, 2, queries, keys), numbers(rows, queries), numbers(rows, keys), causal):
            assert set(report.factors) == {
                "b", "h", *(["q"] if queries > 1 else []), "k", *(["s"] if queries == keys else []),
            }  # fmt: skip


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_numbers_beside_masks_and_dropout(size: int, causal: bool) -> None:
    torch.manual_seed(size)
    kept = torch.rand(2, 4, size, size) > 0.25
    of = numbers(2, size)
    assert "s" in check(tensors(4, 2, size, size), of, of, causal, dropout_mask=kept)[0].factors
    for shape in [(size, size), (2, 1, 1, size), (2, 4, size, 1)]:
        mask = torch.randn(shape, dtype=torch.float64)
        mask[..., : 3 if shape[-1] > 1 else 0] = -torch.inf
        check(tensors(4, 1, size, size), of, of, causal, mask, kept if shape[0] == size else None)


def test_numbers_in_any_order() -> None:
    """Documents that lie in pieces, and numbers that are any integers."""
    for dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        some = torch.tensor([limits.min, -1, 0, limits.max], dtype=dtype)
        of = some[torch.randint(4, (2, 8), generator=torch.Generator().manual_seed(1))]
        check(tensors(2, 2, 8, 8), of, of, True)
        check(tensors(2, 2, 6, 7), of[:, :6], of[:, 1:], False)


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(-10, 10), st.booleans(), st.integers(1, 3),
    st.sampled_from(["none", "mask", "dropout"]), st.sampled_from([1, 64, 1 << 20]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_numbers_are_the_mask_that_they_stand_for(
    queries: int, keys: int, offset: int, causal: bool, rows: int, also: str, most: int
) -> None:
    """However many scores are computed at a time."""
    query, key, value = (x[:1].expand(rows, -1, -1, -1).clone() for x in tensors(2, 1, queries, keys))
    of = numbers(rows, queries, seed=offset), numbers(1 if also == "none" else rows, keys, seed=rows)
    about: dict[str, Any] = {"scale": 0.5} | ({"dropout_p": 0.3} if also == "dropout" else {})
    mask = torch.randn(rows, 1, queries, keys, dtype=torch.float64) if also == "mask" else None
    kept = torch.rand(rows, 2, queries, keys) > 0.3 if also == "dropout" else None
    hiding = masked(*of, causal, offset)
    plain = hiding if mask is None else mask + hiding, kept
    named = {**about, "is_causal": causal, "offset": offset}
    expected = sdpa.attention(query, key, value, *plain, **about)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed, "_SCORES", {"cpu": most})
        patch.setattr(documents, "LEAST", 2)
        made = sdpa.attention(query, key, value, mask, kept, *of, **named)
        torch.testing.assert_close(made[0], expected[0])
        sees = (hiding.amax(-1) == 0).expand_as(made[1])
        torch.testing.assert_close(made[1][sees], expected[1][sees])
        assert (made[1][~sees] == -torch.inf).all()
        back = torch.randn_like(query), query, key, value
        ours = sdpa.attention_backward(*back, *made, mask, kept, *of, **named)
    for one, other in zip(ours, sdpa.attention_backward(*back, *expected, *plain, **about), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("also", ["none", "mask", "dropout"])
@pytest.mark.parametrize("most", [1 << 12, 1 << 15, 1 << 18])
def test_the_memory_of_a_call_is_no_more_than_predicted(
    dtype: torch.dtype, also: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many parts, and in one."""
    monkeypatch.setattr(composed, "_SCORES", {"cpu": most})
    query = torch.randn(2, 8, 256, 64, dtype=dtype)
    key, value = (torch.randn(2, 4, 256, 64, dtype=dtype) for _ in range(2))
    mask = torch.randn(256, 256, dtype=dtype) if also == "mask" else None
    kept = torch.rand(2, 8, 256, 256) > 0.1 if also == "dropout" else None
    named: dict[str, Any] = {"scale": 0.1, "is_causal": False} | ({"dropout_p": 0.1} if also == "dropout" else {})
    of = (torch.zeros(2, 256, dtype=torch.int64),) * 2
    masks = [x for x in (mask, kept) if x is not None]
    results = sdpa.attention(query, key, value, mask, kept, *of, **named)
    forward = [query, key, value, *masks, *of]
    backward = [torch.randn_like(query), query, key, value, *results, *masks, *of]
    calls: list[tuple[list[torch.Tensor], Any, int]] = [
        (forward, lambda: sdpa.attention(*forward[:3], mask, kept, *of, **named), sum(x.nbytes for x in results)),
        (backward, lambda: sdpa.attention_backward(*backward[:6], mask, kept, *of, **named),
         sum(x.nbytes for x in forward[:3])),
    ]  # fmt: skip
    for held, call, made in calls:
        there = {x.data_ptr(): x.untyped_storage().nbytes() for x in held}
        measured = peak_bytes(call, held, query.device) - sum(there.values()) - made
        predicted = workspace_bytes(list(map(meta_of, held)), "cpu", backward=held is backward)
        assert measured <= 1.1 * predicted and (also == "dropout" or predicted <= 3 * measured + made)
