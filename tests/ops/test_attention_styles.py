"""Attention as models write it: rotations, biases, masks, grouped heads. Random plans of small models compute
what the models do."""

from __future__ import annotations

import functools
from collections.abc import Callable

import plans
import pytest
import torch
import torch.nn.functional as F
from models import Case, Step, assert_same, eager, simulated
from torch import nn

from autopar.passes.codegen.program import codegen
from autopar.planning.planner import Planner

BATCH, SEQUENCE, STATE, HEADS, KEY_HEADS, HEAD = 4, 12, 24, 4, 2, 8

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries, keys and values [batch, heads, sequence, head], keys and values in fewer heads."""


def angles() -> torch.Tensor:
    """[sequence, head / 2]"""
    return torch.arange(SEQUENCE)[:, None] / 10 ** (torch.arange(HEAD // 2) / 2)


def rotated_by_halves(x: torch.Tensor) -> torch.Tensor:
    """Llama, Qwen."""
    both = torch.cat((angles(), angles()), -1)
    one, other = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * both.cos() + torch.cat((-other, one), -1) * both.sin()


def rotated_by_chunks(x: torch.Tensor) -> torch.Tensor:
    """GPT-NeoX with a part of the head that is not rotated."""
    kept, turned = x[..., :4], x[..., 4:]
    one, other = turned.chunk(2, -1)
    cos, sin = angles()[:, :2].cos(), angles()[:, :2].sin()
    return torch.cat((kept, one * cos - other * sin, other * cos + one * sin), -1)


def rotated_in_pairs(x: torch.Tensor) -> torch.Tensor:
    """GPT-J."""
    cos, sin = angles().cos().repeat_interleave(2, -1), angles().sin().repeat_interleave(2, -1)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def rotated_as_complex(x: torch.Tensor) -> torch.Tensor:
    """Llama 4, DeepSeek."""
    turn = torch.polar(torch.ones(SEQUENCE, HEAD // 2), angles())
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def rotating(rotate: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)

    return attend


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Keys and values for all heads, as transformers writes it."""
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, HEADS // KEY_HEADS, s, d).reshape(b, HEADS, s, d)


def by_hand(bias: Callable[[], torch.Tensor]) -> Attend:
    """Scores, bias, softmax in float32, values."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ repeated(k).transpose(-1, -2) / HEAD**0.5 + bias()
        return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ repeated(v)

    return attend


def distances() -> torch.Tensor:
    """[queries, keys]: how far back a key lies."""
    places = torch.arange(SEQUENCE)
    return places[:, None] - places[None, :]


def causal() -> torch.Tensor:
    return torch.zeros(SEQUENCE, SEQUENCE).masked_fill(distances() < 0, torch.finfo(torch.float32).min)


def sliding() -> torch.Tensor:
    """Of the four last keys. As booleans."""
    return (distances() >= 0) & (distances() < 4)


def alibi() -> torch.Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    return causal() - slopes[:, None, None] * distances()


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=sliding())


def blind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Some queries see no key."""
    mask = sliding() & (torch.arange(SEQUENCE) > 3)[:, None]
    scores = (q @ repeated(k).transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return torch._safe_softmax(scores, -1) @ repeated(v)


def einsummed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q = q.unflatten(1, (KEY_HEADS, -1))
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k) + causal()
    return torch.einsum("bhgqk,bhkd->bhgqd", scores.softmax(-1), v).flatten(1, 2)


STYLES: dict[str, Attend] = {
    "rotated by halves": rotating(rotated_by_halves),
    "rotated by chunks": rotating(rotated_by_chunks),
    "rotated in pairs": rotating(rotated_in_pairs),
    "rotated as complex numbers": rotating(rotated_as_complex),
    "by hand, causal": by_hand(causal),
    "ALiBi": by_hand(alibi),
    "sliding window": windowed,
    "queries that see nothing": blind,
    "einsum": einsummed,
}


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(STATE, heads * HEAD, bias=False) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        self.output, self.style = nn.Linear(HEADS * HEAD, STATE), attend

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.style(q, k, v)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(states).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in self.qkv)
        return self.output(self.attend(q, k, v).transpose(1, 2).flatten(2)).square().mean()


class Relative(Attention):
    """T5: a learned bias for each head and bucket of distances, looked up; and DeBERTa's: scores of queries with
    distances, gathered along the keys."""

    def __init__(self, gathered: bool) -> None:
        super().__init__(by_hand(causal))
        self.is_gathered = gathered
        self.table = nn.Embedding(8, HEADS)
        self.places = nn.Parameter(torch.randn(HEADS, SEQUENCE, 2 * SEQUENCE))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return by_hand(self.gathered if self.is_gathered else self.bias)(q, k, v)

    def bias(self) -> torch.Tensor:
        return self.table(distances().abs().clamp(max=7)).permute(2, 0, 1)[None] + causal()

    def gathered(self) -> torch.Tensor:
        return self.places.gather(-1, (distances() + SEQUENCE).expand(HEADS, -1, -1)) + causal()


@functools.cache
def made(name: str) -> tuple[Case, Step]:
    torch.manual_seed(0)
    states = torch.randn(BATCH, SEQUENCE, STATE)
    model = Attention(STYLES[name]) if name in STYLES else Relative("gathered" in name)
    case = Case(model=model, batch=lambda step: ((states,), {}))
    return case, eager(case)


@functools.cache
def captured(name: str) -> Planner:
    case, _ = made(name)
    return Planner(case.model, {"a": 1}, case.args, case.kwargs)


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 2, "b": 3}], ids=["4", "2x3"])
@pytest.mark.parametrize("name", [*STYLES, "relative bias", "relative bias, gathered"])
def test_random_plans(name: str, mesh: dict[str, int]) -> None:
    case, expected = made(name)
    planner = captured(name).on(mesh, None)
    assert not planner.space.without_rule
    for seed in range(3):
        program = codegen(planner.space, plans.random_assignment(planner.space, seed))
        assert_same(simulated(program, planner.captured, case), expected)
