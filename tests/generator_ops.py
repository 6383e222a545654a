"""What generated models are made of: operators that take a tensor of any shape and a number that varies them.

An entry of `OPERATORS` is called with the shape that comes in and a number from 0 to 7, and gives a module or a
function, or None where it has nothing for that shape. Whatever fails on a tensor of that shape is left out when the
model is built, so that any list of operators is a model. Operators on floats do nothing at which a rounding decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]
Make = Callable[[tuple[int, ...], int], Any]


def choice(*functions: Function) -> Make:
    """One of several functions of a tensor."""
    return lambda shape, k: functions[k % len(functions)]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function, name: str = "") -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Learned(nn.Module):
    """A function of a tensor and of parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s) / math.sqrt(max(1, s[-1]))) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def written(write: Callable[[Tensor, Tensor], Any]) -> Function:
    """A copy of what comes in, after it was written into."""

    def apply(x: Tensor) -> Tensor:
        y = x.clone()
        write(y, x)
        return y

    return apply


def _assign(y: Tensor, x: Tensor) -> None:
    y[:, -1] = x[:, 0] * 2


def _shifted(y: Tensor, x: Tensor) -> None:
    y[..., 1:] += x[..., :-1]


def _stepped(y: Tensor, x: Tensor) -> None:
    y[:, ::2].mul_(0.5)


def _twice(y: Tensor, x: Tensor) -> None:
    view = y.transpose(0, 1)
    view[0].add_(1.0)
    view.mul_(x.transpose(0, 1).sigmoid())


def _scattered(y: Tensor, x: Tensor) -> None:
    index = torch.arange(x.shape[-1]).flip(0)
    y.index_add_(x.dim() - 1, index, x, alpha=0.5)


def _parts(x: Tensor, k: int) -> Tensor:
    sizes = [1, x.shape[-1] - 1] if x.shape[-1] > 1 else [1]
    return torch.cat(x.split(sizes, -1)[::-1], -1)


def dims(shape: tuple[int, ...], k: int) -> int:
    return k % len(shape)


def on_dim(function: Callable[[Tensor, int], Tensor]) -> Make:
    """A function of a tensor and of one of its dims."""
    return lambda shape, k: lambda x: function(x, dims(shape, k))


def _gather(x: Tensor, dim: int) -> Tensor:
    index = (torch.arange(x.shape[dim]) * 2 + 1) % x.shape[dim]
    return x.index_select(dim, index) + x.gather(dim, x.detach().argsort(dim))


def _one_hot(x: Tensor, dim: int) -> Tensor:
    best = x.detach().argmax(dim, keepdim=True)
    return x * torch.zeros_like(x).scatter(dim, best, 1.0) + x


def linear(shape: tuple[int, ...], k: int) -> nn.Module:
    return nn.Linear(shape[-1], (shape[-1], 4, 6, 5, 8, 3, 2 * shape[-1], shape[-1])[k], bias=k % 3 != 0)


def mlp(shape: tuple[int, ...], k: int) -> nn.Module:
    width, inner = shape[-1], (8, 12, 5, 6, 7, 4, 16, 3)[k]
    return nn.Sequential(
        nn.Linear(width, inner), (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)[k % 4](), nn.Linear(inner, width)
    )


def matmul(shape: tuple[int, ...], k: int) -> nn.Module:
    width, before = shape[-1], shape[-2]
    functions: tuple[tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]], ...] = (
        (lambda x, w: x @ w, ((width, width),)),
        (lambda x, w: w @ x, ((before, before),)),
        (lambda x, w: torch.einsum("...i,ij,kj->...k", x, w, w), ((width, width),)),
        (lambda x, w: F.linear(x, w) @ w, ((5, width),)),
        (lambda x, w: torch.einsum("...ij,ik->...kj", x, w), ((before, before),)),
        (lambda x, a, b: (x @ a.t()) @ b.t() + x, ((2, width), (width, 2))),
        (lambda x, w: F.linear(x, w.t().contiguous()), ((width, width),)),
        (lambda x, w: torch.softmax(x @ x.mT, -1) @ (x * w), ((width,),)),
    )
    function, weights = functions[k]
    return Learned(function, *weights)


class Attention(nn.Module):
    """Heads over the dim before the last, with key heads of their own number."""

    def __init__(self, width: int, heads: int, key_heads: int, mask: str, fused: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.mask, self.fused = heads, key_heads, mask, fused
        size = width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, key_heads * size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril() if self.mask == "tensor" else None
        if self.fused:
            causal = self.mask == "causal"
            mixed = F.scaled_dot_product_attention(
                q, k, v, allowed, is_causal=causal, enable_gqa=self.heads != self.key_heads
            )
        else:
            k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def attention(shape: tuple[int, ...], k: int) -> nn.Module | None:
    heads = next(h for h in ((4, 2, 3, 1), (2, 1), (3, 1), (1,))[k % 4] if shape[-1] % h == 0)
    key_heads = 1 if k >= 6 else heads
    mask = ("", "causal", "tensor", "tensor")[k // 2]
    return Attention(shape[-1], heads, key_heads, mask, k % 2 == 0) if len(shape) == 3 else None


class Swapped(nn.Module):
    """A module that works on the dim before the last as its channels."""

    def __init__(self, inner: nn.Module, contiguous: bool = False) -> None:
        super().__init__()
        self.inner, self.contiguous = inner, contiguous

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, -1)
        return self.inner(x.contiguous() if self.contiguous else x).transpose(1, -1)


def norm(shape: tuple[int, ...], k: int) -> nn.Module:
    width = shape[-1]
    groups = next(g for g in (3, 2, 1) if width % g == 0)
    batch: Any = nn.BatchNorm1d if len(shape) == 3 else nn.BatchNorm2d
    return (
        lambda: nn.LayerNorm(width),
        lambda: nn.RMSNorm(width),
        lambda: Swapped(nn.GroupNorm(groups, width)),
        lambda: Swapped(batch(width)),
        lambda: nn.LayerNorm(shape[-2:]),
        lambda: Swapped(nn.InstanceNorm1d(width, affine=True), contiguous=True),
        lambda: Swapped(nn.LayerNorm(shape[1])),
        lambda: Swapped(batch(width, momentum=0.3, affine=False), contiguous=True),
    )[k]()


def conv(shape: tuple[int, ...], k: int) -> nn.Module | None:
    """Over the dims between the first and the last, the channels: of sequences or of images."""
    if len(shape) not in (3, 4):
        return None
    c, flat = shape[-1], len(shape) == 3
    layer: Any = nn.Conv1d if flat else nn.Conv2d
    up: Any = nn.ConvTranspose1d if flat else nn.ConvTranspose2d
    pool: Any = nn.AvgPool1d if flat else nn.MaxPool2d
    made: nn.Module = (
        lambda: layer(c, 4, 3, padding=1),
        lambda: layer(c, c, 3, padding=1, groups=c),
        lambda: layer(c, c, 3, padding=2, dilation=2, bias=False),
        lambda: nn.Sequential(layer(c, c, 2, stride=2), nn.Upsample(scale_factor=2)),
        lambda: up(c, 5, 2, stride=2),
        lambda: pool(3, stride=1, padding=1),
        lambda: layer(c, 6, 1),
        lambda: layer(c, c, 5, padding=6, dilation=3),
    )[k]()
    if flat:
        return Swapped(made)
    last = torch.channels_last if k % 2 else torch.contiguous_format
    return nn.Sequential(
        Apply(lambda x: x.movedim(-1, 1).contiguous(memory_format=last)), made, Apply(lambda x: x.movedim(1, -1))
    )


def lookup(shape: tuple[int, ...], k: int) -> nn.Module:
    """Rows of a table by constant numbers, some of them twice."""
    rows = (7, 4, 11, 5)[k % 4]
    index = (torch.arange(shape[1]) * 3 + k) % rows
    if k < 4:
        return Learned(
            lambda x, table: x + F.embedding(index, table, padding_idx=0 if k % 2 else None), (rows, shape[-1])
        )
    if k < 6:
        return Learned(lambda x, table: x * table[index], (rows, shape[-1]))
    return Learned(lambda x, table: x + table.index_select(0, index), (rows, shape[-1]))


def dropout(shape: tuple[int, ...], k: int) -> Any:
    return (
        nn.Dropout(0.3),
        nn.Dropout(0.0),
        nn.AlphaDropout(0.2),
        Apply(lambda x: x + torch.rand_like(x)),
        Apply(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
        Apply(lambda x: F.dropout(x, 0.5, training=True)),
        nn.Dropout1d(0.4),
        Apply(lambda x: x * torch.randn(x.shape[-1], dtype=x.dtype)),
    )[k]


POINTWISE = choice(
    *(torch.tanh, F.gelu, torch.sin, F.silu, F.softplus, torch.sigmoid),
    lambda x: (-x * x).exp(),
    lambda x: x * x.detach().cos(),
)

MORE_POINTWISE = choice(
    lambda x: torch.where(x > 0.1, x, 0.3 * x - 0.01),
    lambda x: x.abs().add(1).log() * x.sign(),
    lambda x: torch.maximum(x, x.roll(1, 0)),
    lambda x: torch.addcmul(x, x, x.roll(1, -1), value=0.5),
    lambda x: torch.lerp(x, x.flip(-1), 0.3),
    lambda x: x.clamp(-0.7, 0.9) + F.leaky_relu(x),
    lambda x: torch.logaddexp(x, torch.zeros_like(x)) / (1 + x * x),
    lambda x: F.glu(torch.cat([x, x.cos()], -1), -1),
)

VIEWS = choice(
    lambda x: x.transpose(0, 1),
    lambda x: x.flatten(0, 1).flip(0).unflatten(0, x.shape[:2]),
    lambda x: x.movedim(0, -1).reshape(x.shape),
    lambda x: x.transpose(1, -1).transpose(1, -1)[:, :],
    lambda x: x.unsqueeze(1).expand(-1, 3, *x.shape[1:]).sum(1),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x.mT.contiguous().mT,
    lambda x: x[:, None].squeeze(1).permute(*reversed(range(x.dim()))).permute(*reversed(range(x.dim()))),
)

PIECES = choice(
    lambda x: _parts(x, 0),
    lambda x: torch.stack(x.unbind(1)[::-1], 1),
    lambda x: torch.cat([x[:, 1:], x[:, :1].sin()], 1),
    lambda x: torch.cat([x, x[..., :1]], -1),
    lambda x: torch.stack([x, x.cos()], 1).flatten(0, 1),
    lambda x: F.pad(x[..., 1:], (0, 1), value=0.5),
    lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
    lambda x: x.tile(1, 2, *([1] * (x.dim() - 2))),
)

REDUCTIONS = choice(
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x / (1 + x.norm(dim=-1, keepdim=True)),
    lambda x: x - x.logsumexp(1, keepdim=True),
    lambda x: x * x.amax(-1, keepdim=True),
    lambda x: (x - x.mean()) / (x.var() + 1).sqrt() if x.numel() > 1 else x,
    lambda x: x + x.sum((0, -1), keepdim=True).tanh(),
    lambda x: x.mean(1, keepdim=True) + x.std(0, unbiased=False, keepdim=True) * 0.1,
    lambda x: x * torch.prod(x.sigmoid() + 0.5, 1, keepdim=True),
)

WRITES = choice(
    *map(written, (_assign, _shifted, _stepped, _twice, _scattered)),
    written(lambda y, x: y.masked_fill_(x.detach() > 0.5, 0.1).mul_(x)),
    written(lambda y, x: y.select(1, 0).copy_(x[:, -1]).add_(1)),
    written(lambda y, x: y.view(-1)[: x.numel() // 2].zero_()),
)

ALONG = {
    "softmax": on_dim(lambda x, dim: x.softmax(dim) * x),
    "log_softmax": on_dim(lambda x, dim: x.log_softmax(dim)),
    "cumsum": on_dim(lambda x, dim: x.cumsum(dim).tanh()),
    "sort": on_dim(lambda x, dim: x.sort(dim).values),
    "gather": on_dim(_gather),
    "one_hot": on_dim(_one_hot),
    "roll": on_dim(lambda x, dim: x.roll(1, dim) - x),
    "halves": on_dim(lambda x, dim: torch.cat(x.chunk(2, dim)[::-1], dim)),
}

OPERATORS: dict[str, Make] = {
    "pointwise": POINTWISE,
    "more_pointwise": MORE_POINTWISE,
    "views": VIEWS,
    "pieces": PIECES,
    "reductions": REDUCTIONS,
    "writes": WRITES,
    **ALONG,
    "linear": linear,
    "mlp": mlp,
    "matmul": matmul,
    "attention": attention,
    "norm": norm,
    "conv": conv,
    "lookup": lookup,
    "dropout": dropout,
}
