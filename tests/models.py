"""Tiny models, their batches, and what one process computes of them: the reference of the parity tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from autopar.passes.capture import Captured
from autopar.program import Program
from autopar.runtime.simulate import simulate_step

BATCH, SEQUENCE, VOCABULARY = 8, 8, 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with a way to draw batches. `batch(step)` gives (args, kwargs), other ones every step."""

    model: nn.Module
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        return self.batch(0)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.batch(0)[1]


def gpt2(layers: int = 2, **overrides: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=32,
        n_layer=layers,
        n_head=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **{**dropout, **overrides},
    )
    return GPT2LMHeadModel(config)


def llama(layers: int = 2, **overrides: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "use_cache": False,
        **overrides,
    }
    return LlamaForCausalLM(LlamaConfig(**config))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))


def tokens(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Labels are not the inputs, and some are ignored: unevenly over the batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels[: BATCH // 2, SEQUENCE // 2 :] = -100
    labels[0] = -100
    return (), {"input_ids": ids, "labels": labels}


def vectors(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step)),), {}


CASES: Mapping[str, Callable[[], Case]] = {
    "gpt2": lambda: Case(model=gpt2(), batch=tokens),
    "gpt2 untied": lambda: Case(model=gpt2(tie_word_embeddings=False), batch=tokens),
    "llama": lambda: Case(model=llama(), batch=tokens),
    "llama tied": lambda: Case(model=llama(tie_word_embeddings=True), batch=tokens),
    "llama of 4 layers": lambda: Case(model=llama(4), batch=tokens),
    "mlp with loss_fn": lambda: Case(model=mlp(), batch=vectors, loss_fn=mean_square),
    "mlp with outputs": lambda: Case(model=mlp(), batch=vectors),
}


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, output.detach().cos())


def case(name: str) -> Case:
    """The case with the same weights in every process."""
    torch.manual_seed(0)
    made = CASES[name]()
    with torch.no_grad():
        for parameter in made.model.parameters():
            # norms of ones and biases of zeros would hide what is lost of them
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step makes: outputs by path, gradients by name."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def tangents(output: torch.Tensor) -> torch.Tensor:
    """The gradient that a test puts into a plain output."""
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)


def eager(case: Case, step: int = 0) -> Step:
    """One step of the model as PyTorch runs it; the case's own model keeps no gradients."""
    model = copy.deepcopy(case.model)
    args, kwargs = case.batch(step)
    output = model(*args, **kwargs)
    if case.loss_fn is not None:
        output = case.loss_fn(output)
    found = flat(output)
    if len(found) == 1 and next(iter(found.values())).dim() > 0:
        (value,) = found.values()
        value.backward(tangents(value))
    else:
        next(v for path, v in found.items() if v.dim() == 0).backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return Step(
        outputs={path: value.detach() for path, value in found.items()},
        gradients={name: g for name, g in named.items() if g is not None},
    )


def flat(output: Any) -> dict[str, torch.Tensor]:
    """Tensors of an output by their place in it."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def simulated(program: Program, captured: Captured, case: Case, step: int = 0) -> Step:
    """One step of the program on all its ranks, in this process."""
    args, kwargs = case.batch(step)
    model = case.model
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    given = {
        i.target: tangents(torch.empty(i.meta.shape, dtype=i.meta.dtype))
        for i in program.inputs
        if i.role == "tangent" and i.meta.shape
    }
    made = simulate_step(program, held, captured.bind(args, kwargs), given, tolerance=1e-5)
    return Step(
        outputs=flat(captured.unflatten({leaf.path: made.outputs.get(leaf.path) for leaf in captured.output_leaves})),
        gradients=made.gradients,
    )


def assert_same(found: Step, expected: Step, tolerance: float = 1e-5) -> None:
    """Every output and every gradient, relative to the largest element of the expected one."""
    assert found.outputs.keys() == expected.outputs.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    for what, ours, theirs in (
        ("output", found.outputs, expected.outputs),
        ("gradient", found.gradients, expected.gradients),
    ):
        for name in theirs:
            assert_close(ours[name], theirs[name], f"{what} {name}", tolerance)


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    scale = max(expected.abs().max().item(), 1e-6)
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance * scale, f"{what}: differs by {difference:.3g}, largest {scale:.3g}"


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


class Eager(nn.Module):
    """The model on one process, with the loss as its output, under the model's own parameter names."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        model = copy.deepcopy(case.model)
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.__dict__["model"], self.__dict__["loss_fn"] = model, case.loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        return output if self.loss_fn is None else self.loss_fn(output)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon above the rounding of gradients that are zero by arithmetic, such as that of
    attention's key bias: AdamW would scale that up to steps of full size."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-5)


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    steps: Sequence[int],
    *,
    clip: float | None = None,
) -> list[float]:
    """Steps on the batches of these numbers; the losses."""
    losses = []
    for step in steps:
        args, kwargs = case.batch(step)
        loss = loss_of(module(*args, **kwargs))
        losses.append(loss.item())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses
