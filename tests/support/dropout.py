"""Models that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import Case
from torch import nn


def bert(**overrides: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16, **overrides,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


class Noisy(nn.Module):
    """Every way to draw numbers that a graph may have, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 24), nn.Linear(24, 8)
        self.slope = nn.RReLU()
        self.drop = nn.Dropout1d(0.25)
        self.alpha = nn.AlphaDropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.slope(self.into(x))
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand_like(x)
        x = x * torch.bernoulli(x.detach().sigmoid())
        x = self.alpha(self.drop(x.unsqueeze(-1)).squeeze(-1))
        x = x + F.gumbel_softmax(x, dim=-1)
        x = x + torch.empty_like(x).uniform_(-1, 1) + torch.empty_like(x).normal_(1, 0.1)
        x = x + torch.normal(0.0, 0.1, x.shape) + torch.normal(x.detach(), 0.1)
        x = x * torch.randint(1, 3, x.shape) * torch.randint(2, x.shape).add(1)
        x = x[torch.randperm(x.shape[0])]
        # a whole path of a sample, as in stochastic depth
        kept = torch.rand((x.shape[0], 1)).add(0.8).floor()
        x = F.dropout(x + x.tanh() / 0.8 * kept, 0.1, training=True, inplace=True)
        return self.out(x)


def dropping(made: nn.Module) -> Case:
    return Case(model=made, batch=models.tokens)


def dropping_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: dropping(models.gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)),
    "gpt2 of 6 layers": lambda: dropping(models.gpt2(6, resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)),
    "bert": lambda: dropping(bert(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)),
    "llama": lambda: dropping(models.llama(attention_dropout=0.3)),
    "mlp": lambda: Case(model=dropping_mlp(), batch=models.vectors, loss_fn=models.mean_square),
    "noisy": lambda: Case(model=Noisy(), batch=models.vectors, loss_fn=models.mean_square),
}


def case(name: str) -> Case:
    if name not in ("mlp", "noisy"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    return CASES[name]()


def mesh_id(mesh: dict[str, int]) -> str:
    return "x".join(map(str, mesh.values()))
