"""The models of the published rows: decoders of equal blocks, as `published.toml` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

RECOMPUTE = ("nothing", "products", "alternate layers", "layers")
"""What backward makes again: nothing; the cheap operators and every second product of a layer (torchtitan's "selective
op"); every second layer ("selective layer"); every layer ("full")."""

Region = Callable[..., Any]

again: Region = partial(checkpoint, use_reentrant=False)


def kept(function: Callable[..., Any], *inputs: Tensor) -> Any:
    return function(*inputs)


class Block(nn.Module):
    """Attention and an MLP: "swiglu" and "relu2" with rotary positions, "gelu" without (MPT's positions are in its
    attention kernel)."""

    def __init__(self, model: Mapping[str, Any], *, by_products: bool) -> None:
        super().__init__()
        hidden, wide, self.heads, self.kv_heads = (model[k] for k in ("hidden", "intermediate", "heads", "kv_heads"))
        self.width, self.mlp, self.region = hidden // self.heads, model["mlp"], again if by_products else kept
        norm = nn.RMSNorm if self.mlp == "swiglu" else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(hidden), norm(hidden)
        linear = partial(nn.Linear, bias=False)
        self.q, self.o = linear(hidden, hidden), linear(hidden, hidden)
        self.k, self.v = (linear(hidden, self.kv_heads * self.width) for _ in range(2))
        self.up, self.down = linear(hidden, wide), linear(wide, hidden)
        self.gate = linear(hidden, wide) if self.mlp == "swiglu" else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y, k = self.region(lambda x: (y := self.norm_1(x), self.k(y)), x)
        q, k, v = (self.split(t) for t in (self.q(y), k, self.v(y)))
        if self.mlp != "gelu":
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (repeated(t, self.heads // self.kv_heads) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x, y = self.region(lambda x, attended: (x := x + self.o(attended), self.norm_2(x)), x, attended)
        if self.gate is not None:
            return x + self.down(self.region(lambda y, gate: F.silu(gate) * self.up(y), y, self.gate(y)))
        activated = F.gelu if self.mlp == "gelu" else lambda up: F.relu(up).square()
        return x + self.down(self.region(activated, self.up(y)))

    def split(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, self.width)).transpose(1, 2)


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float32, as Llama's."""
    a, b = t.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(t.dtype)


def repeated(t: Tensor, times: int) -> Tensor:
    return t if times == 1 else t.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


class Decoder(nn.Module):
    def __init__(self, model: Mapping[str, Any], sequence: int, recompute: str) -> None:
        super().__init__()
        width, hidden = model["hidden"] // model["heads"], model["hidden"]
        self.recompute = recompute
        self.embedding = nn.Embedding(model["vocabulary"], hidden)
        self.blocks = nn.ModuleList(Block(model, by_products=recompute == "products") for _ in range(model["layers"]))
        self.norm = (nn.RMSNorm if model["mlp"] == "swiglu" else nn.LayerNorm)(hidden)
        self.head = nn.Linear(hidden, model["vocabulary"], bias=False)
        if model["mlp"] == "gelu":
            self.head.weight = self.embedding.weight
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(sequence, width // 2), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            is_again = self.recompute == "layers" or (self.recompute == "alternate layers" and number % 2 == 1)
            x = (again if is_again else kept)(block, x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
