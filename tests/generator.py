"""A generator of models: what a `Spec` says is built, and hypothesis draws specs.

    Spec(family="layers", shape=(3, 4, 6), parts=(...), ...)  ->  build(spec)  ->  a model, its inputs, its loss

A spec is plain data that prints as the code that makes it, so that a failure is a line that can be run again
(`benchmarks/generated.py --spec`). Families: "chain" (operators one after the other), "layers" (six to nine copies that
look alike, of which some are not), "runs" (copies of one layer, then of another), "state" (what a model keeps from step
to step), "image" (four dims), "tokens" (integers come in, and rows of tables are looked up).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from generator_ops import OPERATORS, Apply
from hypothesis import strategies as st
from torch import nn

Tensor = torch.Tensor
Part = tuple[str, int]
"""An operator and the number that varies it."""

LARGEST = 1200
"""Elements of a value; an operator that makes more is left out."""

ODDITIES = (
    "no_grad", "detach", "constant", "list", "dict", "attribute", "shared", "frozen", "skip", "deep", "every_other",
    "autocast", "eval", "wider", "gate", "unread", "no_grad_in_autocast",
    "grad_in_autocast", "none",
)  # fmt: skip
"""What sets one layer of a run apart."""

STATES = (
    "counter", "average", "replaced", "clone_returned", "written_after_read", "cumulative_norm", "clipped",
    "python_counter", "python_random", "memory", "tensor_hook", "forward_hook", "plain_tensor", "weight_norm",
    "spectral_norm", "history", "checkpoint", "constant_in_training",
)  # fmt: skip
"""What a model keeps from step to step, and what Python does besides."""

TABLES = ("plain", "padding", "tied", "positions", "two", "bag", "one_hot", "shifted", "mask", "sparse")
"""What is looked up by the integers of a model that takes some."""

FAMILIES = ("chain", "layers", "runs", "state", "image", "tokens")
LOSSES = ("scalar", "loss_fn", "field", "tensor", "pair", "dict", "classes", "penalty")
MODES = ("train", "eval", "partly", "frozen", "input")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model. `parts` are its operators, or those of a layer (of the second run: `others`); `odd` is what sets the
    layers with the numbers `at` apart; `state` is one of `STATES`, or of `TABLES`; `shape` is that of the input, or of
    the rows that integers look up."""

    family: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    others: tuple[Part, ...] = ()
    copies: tuple[int, ...] = ()
    odd: str = "none"
    at: tuple[int, ...] = ()
    state: str = ""
    loss: str = "scalar"
    mode: str = "train"
    steps: int = 1


@dataclass
class Output:
    """An output with a loss of its own."""

    loss: Tensor
    logits: Tensor


def chain(
    parts: Sequence[Part], shape: tuple[int, ...], *, keep: bool = False
) -> tuple[nn.Sequential, tuple[int, ...]]:
    """The operators that take what comes, and the shape that they end with. `keep`: with that of the input, or not at
    all."""
    layers: list[nn.Module] = []
    first = shape
    for name, k in parts:
        try:
            made = OPERATORS[name](shape, k)
            if made is None:
                continue
            layer = made if isinstance(made, nn.Module) else Apply(made, f"{name} {k}")
            with torch.no_grad():
                found = layer.double()(torch.randn(shape, dtype=torch.float64))
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # nothing for this shape
        if not 0 < found.numel() <= LARGEST or found.dim() < 2 or (keep and tuple(found.shape) != first):
            continue
        layers.append(layer)
        shape = tuple(found.shape)
    return nn.Sequential(*layers), shape


class Layer(nn.Module):
    """A residual layer, with what may set it apart."""

    def __init__(self, body: nn.Module, number: int, odd: str) -> None:
        super().__init__()
        self.body, self.number, self.odd = body, number, odd
        self.factor = 0.5 if odd == "constant" else 1.0
        if odd == "gate":
            self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, factors: Any, features: list[Tensor]) -> Tensor:
        context: Any = contextlib.nullcontext()
        if self.odd == "no_grad":
            context = torch.no_grad()
        elif self.odd == "autocast":
            context = torch.autocast("cpu", torch.bfloat16, enabled=False)
        elif self.odd == "no_grad_in_autocast":  # which leaves float64 as it is
            context = contextlib.ExitStack()
            context.enter_context(torch.autocast("cpu", torch.bfloat16))
            context.enter_context(torch.no_grad())
        elif self.odd == "grad_in_autocast":
            context = contextlib.ExitStack()
            for inner in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()):
                context.enter_context(inner)
        with context:
            made = self.body(x) * self.factor
        if self.odd == "gate":
            made = made * self.gate
        if self.odd in ("list", "dict"):
            made = made * factors[self.number]
        if self.odd == "skip" and features:
            made = made + features[len(features) // 2]
        if self.odd == "detach":
            made = made.detach()
        if self.odd == "unread":
            torch.rand_like(made)  # the draws after it are others
        return x + made


class Stack(nn.Module):
    """Runs of layers that look alike."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.odd = spec.odd
        layers: list[Layer] = []
        for number in range(sum(spec.copies)):
            second = number >= spec.copies[0] and (number < sum(spec.copies[:2]))
            parts = spec.others if second else spec.parts
            odd = spec.odd if number in spec.at else "none"
            if odd == "wider":
                parts = (*parts, ("mlp", 6))
            layers.append(Layer(chain(parts, spec.shape, keep=True)[0], number, odd))
        self.layers = nn.ModuleList(layers)
        for number in spec.at:
            if number < len(layers):
                self._set_apart(layers, number)

    def _set_apart(self, layers: list[Layer], number: int) -> None:
        if self.odd == "shared":
            layers[number].body = layers[0].body
        elif self.odd == "frozen":
            layers[number].requires_grad_(False)
        elif self.odd == "eval":
            layers[number].eval()

    def forward(self, x: Tensor) -> Tensor:
        features: list[Tensor] = []
        scales = [1.0 + 0.25 * number for number in range(2 * len(self.layers))]
        factors: Any = scales if self.odd == "list" else {number: scale for number, scale in enumerate(scales)}
        extra: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if self.odd == "attribute":
                layer.factor = scales[number]
            if self.odd == "every_other" and number % 2:
                x = x.flip(0)
            x = layer(x, factors, features)
            features.append(x)
            if self.odd == "deep" and layer.odd == "deep":
                extra.append(x.pow(2).mean())
        return x + sum(extra) if extra else x


class Stateful(nn.Module):
    """A model that keeps something from step to step, or that does something besides."""

    def __init__(self, body: nn.Module, width: int, state: str) -> None:
        super().__init__()
        self.body, self.state = body, state
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(width))
        self.weight = nn.Parameter(torch.randn(width))
        self.norm = nn.BatchNorm1d(width, momentum=None if state == "cumulative_norm" else 0.2)
        self.inner: nn.Module = nn.Linear(width, width)
        if state == "weight_norm":
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        if state == "spectral_norm":
            self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        if state == "forward_hook":
            self.inner.register_forward_hook(lambda module, given, made: made * 2)
        self.calls, self.hidden, self.history = 0, torch.zeros(width, dtype=torch.float64), [0.5]

    def forward(self, x: Tensor) -> Tensor:
        state = self.state
        if state == "clipped":  # before autograd keeps it
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        x = self.inner(self.body(x)) * self.weight
        if state == "counter":
            self.count += 1
            x = x * self.count
        elif state == "average":
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.flatten(0, -2).mean(0), alpha=0.1)
            x = x - self.average
        elif state == "replaced":
            self.average = self.average * 0.5 + x.detach().flatten(0, -2).mean(0)
        elif state == "clone_returned":
            before = self.average.clone()
            self.average.add_(1)
            x = x + before
        elif state == "written_after_read":
            x = x * self.average.cos()
            self.average.fill_(2.0)
        elif state == "cumulative_norm":
            x = self.norm(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        elif state == "python_counter":
            self.calls += 1
            x = x * self.calls
        elif state == "python_random":
            x = x * random.random()
        elif state == "memory":
            x = x + self.hidden
            self.hidden = x.detach().flatten(0, -2).mean(0)
        elif state == "tensor_hook":
            x = x * 1.0
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 3)
        elif state == "plain_tensor":
            self.hidden.add_(1)
            x = x + self.hidden
        elif state == "history":
            self.history.append(self.history[-1] * 0.5)
            x = x * self.history[-1]
        elif state == "checkpoint":
            x = torch.utils.checkpoint.checkpoint(lambda y: F.dropout(y, 0.2).tanh(), x, use_reentrant=False)
        elif state == "constant_in_training":
            x = x * torch.tensor([0.5, 2.0] if self.training else [3.0, 4.0], dtype=x.dtype).prod()
        return x


VOCABULARY = 10


class Tokens(nn.Module):
    """Integers to rows, with a body over them."""

    def __init__(self, body: nn.Module, width: int, length: int, made: int, table: str) -> None:
        super().__init__()
        self.body, self.table = body, table
        padding = 3 if table == "padding" else None
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=padding, sparse=table == "sparse")
        self.positions = nn.Embedding(length + 2, width) if table == "positions" else None
        self.bag = nn.EmbeddingBag(VOCABULARY, width, mode="mean") if table == "bag" else None
        self.head = nn.Linear(made, VOCABULARY, bias=False) if table == "tied" and made == width else None
        if self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]) + 2)
        if self.table == "two":
            x = x * self.embed((ids * 3 + 1) % VOCABULARY)
        elif self.bag is not None:
            x = x + self.bag(ids)[:, None]
        elif self.table == "one_hot":
            x = F.one_hot(ids, VOCABULARY).to(x.dtype) @ self.embed.weight
        elif self.table == "shifted":
            x = x + self.embed(F.pad(ids[:, :-1], (1, 0), value=1))
        elif self.table == "mask":
            x = x.masked_fill((ids == 2)[..., None], 0.5)
        x = self.body(x)
        return x if self.head is None else self.head(x)


class Model(nn.Module):
    """A body, and the output or the loss that a spec asks for."""

    def __init__(self, spec: Spec, body: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.loss = body, spec.loss
        self.head = nn.Linear(shape[-1], 5) if spec.loss == "classes" else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        x = self.head(self.body(x))
        if self.loss == "classes":
            labels = torch.arange(x[..., 0].numel()) % 5
            labels[::3] = -100
            return F.cross_entropy(x.flatten(0, -2), labels, label_smoothing=0.1)
        if self.loss == "scalar":
            return (x * x.detach().cos()).mean()
        if self.loss == "penalty":
            return x.sin().mean() + 0.01 * sum(p.pow(2).sum() for p in self.parameters())
        if self.loss == "field":
            return Output(loss=x.tanh().sum() / 10, logits=x)
        if self.loss == "pair":
            return x, x.mean(0)
        return {"made": x, "size": x.shape[0]} if self.loss == "dict" else x


def mean_square(output: Tensor) -> Tensor:
    return F.mse_loss(output, output.detach().cos())


@dataclass(frozen=True, kw_only=True)
class Built:
    model: nn.Module
    args: tuple[Any, ...]
    loss_fn: Callable[[Any], Tensor] | None


def build(spec: Spec) -> Built:
    """The model of a spec in float64, with weights and inputs that are the spec's own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if spec.family in ("layers", "runs"):
            body: nn.Module = Stack(spec)
            shape = spec.shape
        else:
            body, shape = chain(spec.parts, spec.shape)
            if spec.family == "state":
                body = Stateful(body, shape[-1], spec.state)
            elif spec.family == "tokens":
                body = Tokens(body, spec.shape[-1], spec.shape[1], shape[-1], spec.state)
                shape = (*shape[:-1], VOCABULARY if body.head is not None else shape[-1])
        model = Model(spec, body, shape).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        x = torch.randn(spec.shape, dtype=torch.float64)
        if spec.family == "tokens":
            x = torch.randint(0, VOCABULARY, spec.shape[:2])
    parameters = list(model.parameters())
    if spec.mode == "eval":
        model.eval()
    elif spec.mode == "partly":
        for module in list(model.modules())[::2]:
            module.training = False
    elif spec.mode == "frozen" and len(parameters) > 1:
        for parameter in parameters[::2] if x.is_floating_point() else parameters[1::2]:
            parameter.requires_grad_(False)
    if x.is_floating_point() and (spec.mode == "input" or not any(p.requires_grad for p in parameters)):
        x.requires_grad_()
    return Built(model=model, args=(x,), loss_fn=mean_square if spec.loss == "loss_fn" else None)


# ------------------------------------------------------------------------------------------------- drawing

SIZES = (1, 2, 3, 4, 5, 7, 8)
WIDTHS = (4, 6, 8, 3, 5, 7, 12, 2)


def a_part(names: Sequence[str] = tuple(OPERATORS)) -> st.SearchStrategy[Part]:
    return st.tuples(st.sampled_from(names), st.integers(0, 7))


def parts(least: int, most: int, names: Sequence[str] = tuple(OPERATORS)) -> st.SearchStrategy[tuple[Part, ...]]:
    return st.lists(a_part(names), min_size=least, max_size=most).map(tuple)


KEEPING = (
    "mlp",
    "norm",
    "attention",
    "pointwise",
    "conv",
    "lookup",
    "dropout",
    "matmul",
    "linear",
    "writes",
    "softmax",
)
"""Operators of layers, most of which keep a shape."""


@st.composite
def specs(draw: Any, families: Sequence[str] = FAMILIES) -> Spec:
    """Any model."""
    family = draw(st.sampled_from(families))
    size, width = st.sampled_from(SIZES), st.sampled_from(WIDTHS)
    shape = (draw(size), draw(size), draw(width))
    common = {
        "family": family,
        "loss": draw(st.sampled_from(LOSSES)),
        "mode": draw(st.sampled_from((*MODES, "train", "train"))),
    }
    if family == "image":
        shape = (min(shape[0], 5), draw(st.sampled_from((4, 5, 6))), min(shape[1] + 2, 6), min(shape[2], 6))
        names = ("conv", "conv", "norm", "pointwise", "views", "pieces", "reductions", "linear")
        return Spec(**common, shape=shape, parts=draw(parts(1, 5, names)))
    if family == "chain":
        return Spec(**common, shape=shape, parts=draw(parts(1, 7)))
    if family == "state":
        state = draw(st.sampled_from(STATES))
        return Spec(**common, shape=shape, parts=draw(parts(0, 3)), state=state, steps=3)
    if family == "tokens":
        return Spec(**common, shape=shape, parts=draw(parts(0, 4)), state=draw(st.sampled_from(TABLES)))
    layer = draw(parts(1, 3, KEEPING))
    odd = draw(st.sampled_from(ODDITIES))
    if family == "layers":
        copies = (draw(st.integers(6, 9)),)
        others: tuple[Part, ...] = ()
    else:
        copies = tuple(draw(st.lists(st.integers(2, 5), min_size=2, max_size=3)))
        others = draw(parts(1, 3, KEEPING))
    at = tuple(sorted(draw(st.sets(st.integers(0, sum(copies) - 1), min_size=1, max_size=3))))
    return Spec(**common, shape=shape, parts=layer, others=others, copies=copies, odd=odd, at=at)
