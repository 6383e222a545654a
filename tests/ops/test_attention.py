"""Attention under every split: heads, grouped heads, batch, queries, keys; causal, masked and free."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left

from autopar import testing
from autopar.compat.kernels import attention_kernel
from autopar.ir.graph import meta_of
from autopar.ops import sdpa
from autopar.ops.oracle import Report, check_rule, make_call
from autopar.ops.rules import rule_of
from autopar.ops.sdpa.bands import seen
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
        assert set(report.factors) == {
            "b",
            "h",
            *(["q"] if queries > 1 else []),
            "k",
            *(["s"] if queries == keys else []),
        }


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
        assert set(report.factors) == {"b", "h", "q", "k", "s"}


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_blocks_that_go_around(size: int, causal: bool) -> None:
    """Weights that dropout keeps, and masks: of all keys, of padding on the left, of one column."""
    torch.manual_seed(size)
    kept = torch.rand(2, 4, size, size) > 0.25
    for report in check(*tensors(4, 2, size, size), causal, dropout_mask=kept):
        assert "s" in report.factors
    for shape in [(size, size), (2, 1, 1, size), (2, 4, size, 1)]:
        mask = torch.randn(shape, dtype=torch.float64)
        mask[..., : 3 if shape[-1] > 1 else 0] = -torch.inf
        check(*tensors(4, 2, size, size), causal, mask, kept if shape[0] == size else None)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-10, 10), st.sampled_from(["none", "mask", "dropout"]))
@settings(max_examples=150, deadline=None)
def test_causal_queries_that_begin_at_another_place(queries: int, keys: int, offset: int, also: str) -> None:
    query, key, value = tensors(2, 1, queries, keys)
    hidden = torch.arange(keys) > torch.arange(queries).unsqueeze(1) + offset
    about: dict[str, Any] = {"scale": 0.5}
    mask = torch.randn(2, 1, queries, keys, dtype=torch.float64) if also == "mask" else None
    kept = torch.rand(2, 2, queries, keys) > 0.3 if also == "dropout" else None
    if kept is not None:
        about["dropout_p"] = 0.3
    added = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    expected = sdpa.attention(query, key, value, added if mask is None else mask + added, kept, **about)
    made = sdpa.attention(query, key, value, mask, kept, **about, is_causal=True, offset=offset)
    torch.testing.assert_close(made[0], expected[0])
    sees = ~hidden.all(-1)
    torch.testing.assert_close(made[1][..., sees], expected[1][..., sees])
    assert (made[1][..., ~sees] == -torch.inf).all()
    gradient = torch.randn_like(query)
    of = sdpa.attention_backward(
        gradient, query, key, value, *expected, added if mask is None else mask + added, kept, **about
    )
    ours = sdpa.attention_backward(
        gradient, query, key, value, *expected, mask, kept, **about, is_causal=True, offset=offset
    )
    for one, other in zip(ours, of, strict=True):
        torch.testing.assert_close(one, other)
    assert seen(queries, keys, offset) == pytest.approx(1 - hidden.double().mean().item())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_weights_that_dropout_keeps_are_split_with_the_scores(key_heads: int, causal: bool) -> None:
    kept = torch.rand(2, 4, 6, 7) > 0.25
    for report in check(*tensors(4, key_heads, 6, 7), causal, dropout_mask=kept):
        assert set(report.factors) == {"b", "h", "q", "k"}
    mask = torch.randn(2, 1, 6, 7, dtype=torch.float64)
    mask[..., -1, :] = -torch.inf
    check(*tensors(4, key_heads, 6, 7), False, mask, kept)


MASKED = {"efficient": sdpa.KERNELS["efficient"], "cudnn": sdpa.KERNELS["cudnn"]}


class BlindKernels:
    """CUDA's kernels with a mask, by the equations of attention alone: of a query that sees no key they make NaN."""

    def __getattr__(self, name: str) -> Any:
        return self._backward if name.endswith("backward") else self._forward

    @staticmethod
    def _scores(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, causal: bool, scale: float) -> Any:
        scores = query @ key.transpose(-1, -2) * scale + bias
        return scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf) if causal else scores

    def _forward(self, query: Any, key: Any, value: Any, bias: Any, *given: Any, scale: float) -> Any:
        scores = self._scores(query, key, bias, given[2], scale)
        sums = scores.logsumexp(-1)
        return scores.softmax(-1) @ value, sums.masked_fill(sums == -torch.inf, torch.nan), None

    def _backward(self, gradient: Any, query: Any, key: Any, value: Any, *given: Any, scale: float) -> Any:
        efficient = given[0].shape[-1] == key.shape[2]  # its bias comes first
        bias, out, sums = given[:3] if efficient else (given[4], *given[:2])
        sums = sums[..., : query.shape[2]].reshape(*query.shape[:3], 1)
        scores = self._scores(query, key, bias, given[-1], scale)
        weights = (scores - sums).exp()
        of_scores = weights * (gradient @ value.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True))
        of_query = (of_scores @ key * scale).masked_fill((scores == -torch.inf).all(-1, keepdim=True), torch.nan)
        gradients = of_query, of_scores.transpose(-1, -2) @ query * scale, weights.transpose(-1, -2) @ gradient
        return (*gradients, None) if efficient else gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_what_a_kernel_makes_of_queries_that_see_no_key_reaches_nothing(
    name: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where all keys are hidden, nor where one rank's are, whose logsumexp is that of all ranks."""
    monkeypatch.setattr("autopar.ops.sdpa.fused.aten", BlindKernels())
    query, key, value = tensors(4, 4, 6, 8)
    mask = torch.randn(6, 8, dtype=torch.float64)
    mask[2] = mask[0, :1] = -torch.inf
    call = sdpa.Attending(mask=mask, causal=causal, scale=0.5)
    composed, masked = sdpa.KERNELS["composed"], MASKED[name]
    expected = composed.forward(query, key, value, call)
    actual = masked.forward(query, key, value, call)
    torch.testing.assert_close(actual, expected)
    gradient, (out, sums) = torch.randn_like(query), expected
    back = gradient, query, key, value, out, sums, call
    torch.testing.assert_close(masked.backward(*back), composed.backward(*back))
    first = sdpa.Attending(mask=mask[:, :3], causal=causal, scale=0.5)
    part = gradient, query, key[:, :, :3], value[:, :, :3], out, sums, first
    torch.testing.assert_close(masked.backward(*part), composed.backward(*part))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [-1, -100, 100, 255, 300])
def test_the_memory_of_a_causal_call_that_begins_elsewhere_is_no_more_than_predicted(
    offset: int, dtype: torch.dtype
) -> None:
    """Of one band and of two, forward and backward."""
    query = torch.randn(2, 8, 256, 64, dtype=dtype)
    key, value = (torch.randn(2, 4, 256, 64, dtype=dtype) for _ in range(2))
    named: dict[str, Any] = {"scale": 0.1, "is_causal": True, "offset": offset}
    results = sdpa.attention(query, key, value, **named)
    forward = [query, key, value]
    backward = [torch.randn_like(query), query, key, value, *results]
    calls: list[tuple[list[torch.Tensor], Any, int]] = [
        (forward, lambda: sdpa.attention(*forward, **named), sum(x.nbytes for x in results)),
        (backward, lambda: sdpa.attention_backward(*backward, **named), sum(x.nbytes for x in forward)),
    ]
    for held, call, made in calls:
        measured = peak_bytes(call, held, query.device) - sum(x.untyped_storage().nbytes() for x in held) - made
        predicted = workspace_bytes(
            list(map(meta_of, held)), "cpu", backward=held is backward, causal=True, offset=offset
        )
        assert measured <= 1.1 * predicted and predicted <= 2.5 * measured


class Allocating:
    """CUDA's kernels that make results, of the shapes of torch's, and what their backward accumulates."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._backward if name.endswith("backward") else self._forward, "efficient" in name)

    def _forward(self, efficient: bool, query: Any, key: Any, value: Any, *_: Any, scale: float) -> Any:
        *rows, queries, _ = query.shape
        sums = query.new_empty(*rows, -(-queries // 32) * 32 if efficient else queries, dtype=torch.float32)
        return query.new_empty(*query.shape[:-1], value.shape[-1]), sums, None

    def _backward(self, efficient: bool, _: Any, query: Any, key: Any, value: Any, *given: Any, scale: float) -> Any:
        *rows, queries, width = query.shape
        columns = -(-width // 32) * 32 + 1
        accumulated = query.new_empty(*rows, -(-queries // 128) * 128, columns, dtype=torch.float32)
        of_keys = query.shape[1] if efficient else key.shape[1]
        expanded = [] if efficient or of_keys == query.shape[1] else [
            query.new_empty(*rows, *x.shape[-2:]) for x in (key, value)
        ]  # fmt: skip
        made = tuple(torch.empty_like(x) for x in (query, key, value))
        del accumulated, expanded
        return (*made, None) if efficient else made


@pytest.mark.parametrize("keys", [128, 120])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize(("width", "mask_dtype"), [(64, None), (60, None), (64, torch.bfloat16), (64, torch.float32)])
def test_the_memory_of_a_fused_call_is_what_is_predicted(
    width: int, mask_dtype: torch.dtype | None, key_heads: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that are widened for the kernel, expanded heads, and the bias that is read in a mask's place."""
    monkeypatch.setattr("autopar.ops.sdpa.fused.aten", Allocating())
    query = torch.randn(2, 8, 100, width, dtype=torch.bfloat16)
    key, value = (torch.randn(2, key_heads, keys, width, dtype=torch.bfloat16) for _ in range(2))
    mask = None if mask_dtype is None else torch.randn(2, 1, 100, keys, dtype=mask_dtype)
    masks = [] if mask is None else [mask]
    kernel, call = sdpa.KERNELS["flash" if mask is None else "efficient"], sdpa.Attending(mask=mask, scale=0.1)
    out, sums = torch.randn_like(query), torch.randn(2, 8, 100)
    forward, backward = [query, key, value, *masks], [torch.randn_like(query), query, key, value, out, sums, *masks]
    calls: list[tuple[list[torch.Tensor], Any, int]] = [
        (forward, lambda: kernel.forward(query, key, value, call), out.nbytes + sums.nbytes),
        (backward, lambda: kernel.backward(*backward[:6], call), query.nbytes + key.nbytes + value.nbytes),
    ]
    for held, run, made in calls:
        measured = peak_bytes(run, held, query.device) - sum(x.untyped_storage().nbytes() for x in held) - made
        predicted = workspace_bytes(list(map(meta_of, held)), "cuda", backward=held is backward)
        assert 0.95 * measured - 1024 <= predicted <= 1.1 * measured


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads_are_split_with_the_heads_of_their_keys(key_heads: int) -> None:
    """One head of keys for all is whole, and its gradient a sum."""
    for causal in (False, True):
        for report in check(*tensors(8, key_heads, 6, 6), causal):
            assert set(report.factors) == {"b", "h", "q", "k", "s"}
    check(*tensors(8, key_heads, 4, 6), False, attn_mask=torch.randn(2, 8, 4, 6, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_with_a_mask_are_the_efficient_kernels_on_cuda(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes no grouped heads, and is given keys expanded to all heads; as is predicted."""

    def choice(query: Any, key: Any, value: Any, *_: Any, enable_gqa: bool, **named: Any) -> int:
        return 2 * (query.shape[1] == key.shape[1] and not enable_gqa)

    def takes(given: Any) -> bool:
        heads = given.query.shape[1]
        return bool(heads == given.key.shape[1] == given.value.shape[1]) and not given.enable_gqa

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", takes)
    for key_heads in (8, 2, 1):
        query, key, value = tensors(8, key_heads, 8, 8, dtype)
        query, key, value = (x.repeat(1, 1, 1, 2) for x in (query, key, value))
        mask = torch.randn(8, 8, dtype=dtype)
        predicted = sdpa.expected_kernel("cuda", dtype, (8, 8), (8, 8), False, True, False)
        assert attention_kernel(query, key, value, mask, False, 0.5) == predicted == "efficient"


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


@pytest.mark.parametrize(
    "what",
    ["shapes", "heads", "width", "dtypes", "mask", "mask's rank", "mask's dtype", "integers", "causal and mask",
     "probability", "a mask of one dim"],
)  # fmt: skip
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
    elif what == "mask's rank":
        mask = torch.randn(1, 1, 1, 6, 5)
    elif what == "mask's dtype":
        mask = torch.randn(6, 5, dtype=torch.float64)
    elif what == "integers":
        mask = torch.ones(6, 5, dtype=torch.int64)
    elif what == "causal and mask":
        mask, named = torch.randn(7, 5), {"is_causal": True}
    elif what == "a mask of one dim":
        mask = torch.randn(5)
    else:
        named = {"dropout_p": 1.5}
    for function in (attended, F.scaled_dot_product_attention):
        with pytest.raises(IndexError if what == "a mask of one dim" else RuntimeError):
            function(q, k, v, mask, **named)


def test_a_mask_of_one_dim_is_one_where_torch_does_not_fuse() -> None:
    """Of queries without a batch, beside dropout, and where it is learned."""
    q, mask = torch.randn(2, 4, 6, 8), torch.randn(6)
    for three, of in (((q[0],) * 3, mask), ((q,) * 3, mask.clone().requires_grad_())):
        torch.testing.assert_close(attended(*three, of), F.scaled_dot_product_attention(*three, of))


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


@pytest.mark.parametrize("name", ["packet", "overload"])
def test_attention_called_as_an_operator_of_aten_is_ours_too(name: str) -> None:
    packet = torch.ops.aten.scaled_dot_product_attention
    function = packet if name == "packet" else packet.default

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.layer(x)
            attended: torch.Tensor = function(q, q, q, is_causal=True)
            return attended.square().sum()

    graph = Planner(Calls(), {"dp": 2}, (torch.randn(2, 2, 6, 4),)).captured.graph
    found = {node.op for node in graph.nodes if "attention" in node.op}
    assert found == {sdpa.ATTENTION, sdpa.ATTENTION_BACKWARD}


class Of(nn.Module):
    """Attention as `call` makes it."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call, self.qkv = call, nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(3, 1)
        attended: torch.Tensor = self.call(q, k, v)
        return attended.square().sum() + q.sum()


@pytest.mark.parametrize("bias", [causal_lower_right(3, 6), causal_upper_left(3, 6), causal_lower_right(3, 3)])
def test_a_causal_bias_of_torch_is_the_mask_that_it_stands_for(bias: Any) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = bias.seq_len_kv
        return F.scaled_dot_product_attention(q[:, :, :3], k[:, :, :keys], v[:, :, :keys], attn_mask=bias)

    q, k, v = (torch.randn(2, 2, 6, 4) for _ in range(3))
    keys = bias.seq_len_kv
    mask = torch.ones(3, keys, dtype=torch.bool).tril(keys - 3 if bias.variant == CausalVariant.LOWER_RIGHT else 0)
    given = q[:, :, :3], k[:, :, :keys], v[:, :, :keys]
    torch.testing.assert_close(attended(*given, bias), F.scaled_dot_product_attention(*given, mask))


class Biased(nn.Module):
    """Attention with a causal bias of torch that it holds, or makes in forward."""

    def __init__(self, held: bool, variant: Any) -> None:
        super().__init__()
        self.qkv, self.variant = nn.Linear(8, 24), variant
        self.bias = variant(3, 6) if held else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(3, 1)
        q = q[:, :, :3]
        bias = self.variant(q.shape[-2], k.shape[-2]) if self.bias is None else self.bias
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.5).square().sum()


@pytest.mark.parametrize("variant", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("held", [False, True])
def test_a_model_holds_a_causal_bias_or_makes_it_in_forward(held: bool, variant: Any) -> None:
    x = torch.randn(4, 6, 8)
    assert testing.check(Biased(held, variant), {"dp": 2, "tp": 2}, (x,), plans=2).equal
    assert isinstance(variant(3, 6), CausalBias)  # afterwards too


@pytest.mark.parametrize("empty", ["queries", "keys", "width"])
def test_attention_of_nothing_is_torchs(empty: str) -> None:
    if empty == "width" and torch.__version__.startswith("2.12."):
        pytest.skip("torch 2.12 says 0 of queries without width; 2.11 and 2.13 say the mean of the values, as we do")
    calls = {
        "queries": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :0], k, v),
        "keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0]),
        "width": lambda q, k, v: F.scaled_dot_product_attention(q[..., :0], k[..., :0], v),
    }
    assert testing.check(Of(calls[empty]), {"dp": 2, "tp": 2}, (torch.randn(4, 6, 8),), plans=2).equal


@pytest.mark.parametrize("learned", [False, True])
def test_dropout_of_every_weight_draws_nothing(learned: bool) -> None:
    """As in torch, so that what is drawn after it is the same."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = q @ k.transpose(-1, -2) if learned else None
        return F.dropout(F.scaled_dot_product_attention(q, k, v, mask, dropout_p=1.0) + q, 0.5)

    assert testing.check(Of(call), {"dp": 2, "tp": 2}, (torch.randn(4, 6, 8),), plans=2).equal


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("shared", ["nothing", "queries", "keys"])
def test_mapped_attention_drops_the_weights_that_eager_drops(shared: str, randomness: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

        given = [x[0] if name == shared else x for name, x in (("queries", q), ("keys", k), ("values", v))]
        dims = tuple(None if x.dim() == 3 else 0 for x in given)
        mapped: torch.Tensor = torch.vmap(dropped, in_dims=dims, randomness=randomness)(*given)
        return mapped

    assert testing.check(Of(call), {"dp": 2}, (torch.randn(2, 6, 8),), plans=1).equal


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_torchs_layers_attend_by_the_operator(batch_first: bool, trains: bool) -> None:
    """Of `nn.MultiheadAttention` without its weights, and of a layer of an encoder and of a decoder."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=batch_first)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
            self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=batch_first)
            padding = torch.zeros(4, 6, dtype=torch.bool)
            padding[1, 4:] = True
            self.padding, self.causal = nn.Buffer(padding), nn.Buffer(torch.ones(6, 6, dtype=torch.bool).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, padding = self.causal, self.padding
            x = x + self.heads(x, x, x, need_weights=False, key_padding_mask=padding, attn_mask=hidden)[0]
            x = self.encoder(x, src_mask=hidden, src_key_padding_mask=padding)
            x = self.decoder(x, x, tgt_mask=hidden, tgt_is_causal=True, memory_key_padding_mask=padding)
            return x.square().mean()

    model, x = Layers().train(trains), torch.randn(4, 6, 8) if batch_first else torch.randn(6, 4, 8)
    graph = Planner(model, {"dp": 2}, (x,)).captured.graph
    assert [node.op for node in graph.nodes if "attention" in node.op] == [
        *[sdpa.ATTENTION] * 4, *[sdpa.ATTENTION_BACKWARD] * 4,
    ]  # fmt: skip
    with torch.set_grad_enabled(trains):  # without gradients eager takes its fast path
        assert testing.check(model, {"dp": 2, "tp": 2}, (x,), solver="fsdp", plans=1).equal
