"""Tiny models, their batches, and what one process computes of them: the reference of the parity tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.cluster.library import CLUSTERS
from autopar.cluster.machine import Cluster
from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured
from autopar.planning.planner import Planner
from autopar.runtime.simulate import RanksRunner, simulate_step
from autopar.testing.steps import NEGLIGIBLE, relative_error

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


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The same case with every floating tensor in this dtype; the model is copied."""

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        floating = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
        args, kwargs = pytree.tree_map_only(torch.Tensor, floating, case.batch(step))
        return args, kwargs

    return Case(model=copy.deepcopy(case.model).to(dtype), batch=batch, loss_fn=case.loss_fn)


def gpt2(layers: int = 2, **overrides: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {
        "vocab_size": VOCABULARY,
        "n_positions": SEQUENCE,
        "n_embd": 32,
        "n_layer": layers,
        "n_head": 8,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        **overrides,
    }
    return GPT2LMHeadModel(GPT2Config(**config))


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


def tokens(
    step: int, batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Labels are not the inputs, and some are ignored: unevenly over the batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocabulary, (batch, sequence), generator=generator)
    labels = torch.randint(vocabulary, (batch, sequence), generator=generator)
    labels[: batch // 2, sequence // 2 :] = -100
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
    "gpt2 of odd sizes": lambda: Case(
        model=gpt2(vocab_size=61, n_embd=18, n_head=3), batch=partial(tokens, batch=7, sequence=5, vocabulary=61)
    ),
    "mlp with loss_fn": lambda: Case(model=mlp(), batch=vectors, loss_fn=mean_square),
    "mlp with outputs": lambda: Case(model=mlp(), batch=vectors),
}


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, output.detach().cos())


def case(name: str) -> Case:
    """The case with the same weights in every process."""
    torch.manual_seed(0)
    return perturbed(CASES[name]())


@cache
def planners(make: Callable[[str], Case]) -> Callable[[str, dict[str, int]], Planner]:
    """A function from a case's name and a mesh to a planner: in a process, whatever files of tests ask, each case is
    captured once and each mesh prepared once."""

    @cache
    def on(name: str, axes: tuple[tuple[str, int], ...]) -> Planner:
        return captured(make, name).on(dict(axes), None)

    return lambda name, mesh: on(name, tuple(mesh.items()))


@cache
def captured(make: Callable[[str], Case], name: str) -> Planner:
    """A planner of the case on one device, which others share their capture with."""
    made = make(name)
    return Planner(made.model, {"a": 1}, made.args, made.kwargs, loss_fn=made.loss_fn)


@contextmanager
def as_captured(step: Captured) -> Iterator[None]:
    """Inside, `autopar.parallelize` captures no model, and takes this step as that of the model that it is given. So a
    model is captured once, by the process that ranks are forked from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.api.Planner", partial(Planner, captured=step))
        yield


def perturbed(made: Case) -> Case:
    """The case with noise on its weights: norms of ones and biases of zeros would hide what is lost of them."""
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step makes: outputs by path, gradients by name, and what buffers and parameters are then (None: not
    looked at)."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] | None = None
    parameters: dict[str, torch.Tensor] | None = None


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
        buffers=dict(model.named_buffers()),
        parameters=dict(model.named_parameters()),
    )


def flat(output: Any) -> dict[str, torch.Tensor]:
    """Tensors of an output by their place in it."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def simulated(
    program: Program, captured: Captured, case: Case, step: int = 0, seed: int = 0, run: RanksRunner | None = None
) -> Step:
    """One step of the program on all its ranks, in this process, as `simulate_step` has them `run`. `seed` is that of
    its random numbers."""
    args, kwargs = case.batch(step)
    model = case.model
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    given = {
        i.target: tangents(torch.empty(i.meta.shape, dtype=i.meta.dtype))
        for i in program.inputs
        if i.role == "tangent" and i.meta.shape
    }
    made = simulate_step(program, held, captured.bind(args, kwargs), given, seed=seed, tolerance=1e-5, run=run)
    return Step(
        outputs=flat(captured.unflatten({leaf.path: made.outputs.get(leaf.path) for leaf in captured.output_leaves})),
        gradients=made.gradients,
        buffers={name: made.mutations.get(name, buffer) for name, buffer in model.named_buffers()},
        parameters={name: made.mutations.get(name, parameter) for name, parameter in model.named_parameters()},
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a rank, put together from all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_ranks(module: nn.Module, case: Case, step: int = 0) -> Step:
    """One step of a parallel module, on every rank at once."""
    args, kwargs = case.batch(step)
    output = module(*args, **kwargs)
    loss_of(output).backward()
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    return Step(
        outputs={path: whole(value).detach() for path, value in flat(output).items()},
        gradients=gradients,
        buffers={name: whole(b) for name, b in module.named_buffers()},
    )


def differences(found: Step, expected: Step) -> dict[str, float]:
    """The largest difference in every output, gradient and buffer, relative to the largest element of the
    expected one. AssertionError where one is missing, of another shape or dtype."""
    largest = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0)
    parts = [
        ("output", found.outputs, expected.outputs, 0.0),
        ("gradient", found.gradients, expected.gradients, NEGLIGIBLE * largest),
    ]
    if found.buffers is not None and expected.buffers is not None:
        parts.append(("buffer", found.buffers, expected.buffers, 0.0))
    if found.parameters is not None and expected.parameters is not None:
        parts.append(("parameter", found.parameters, expected.parameters, 0.0))
    relative: dict[str, float] = {}
    for what, ours, theirs, floor in parts:
        assert ours.keys() == theirs.keys(), f"{what}s of one only: {sorted(ours.keys() ^ theirs.keys())}"
        for name in theirs:
            relative[f"{what} {name}"] = difference(ours[name], theirs[name], f"{what} {name}", floor)
    return relative


def difference(found: torch.Tensor, expected: torch.Tensor, what: str, floor: float = 0.0) -> float:
    """The largest difference relative to the largest element, which counts as `floor` at least. It is infinite where
    infinite elements are not the same."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (
        f"{what}: {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
    )
    return relative_error(found, expected, floor)


def assert_same(found: Step, expected: Step, tolerance: float = 1e-5) -> None:
    """Every output, gradient and buffer is the same, up to `differences` of `tolerance`."""
    worst = sorted(((error, what) for what, error in differences(found, expected).items()), reverse=True)
    wrong = [f"{what}: {error:.3g}" for error, what in worst if not error <= tolerance]
    assert not wrong, f"{len(wrong)} of {len(worst)} differ by more than {tolerance:g}: {', '.join(wrong[:5])}"


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    error = difference(found, expected, what)
    assert error <= tolerance, f"{what}: differs by {error:.3g} of the largest element"


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


def without_latency() -> Cluster:
    """Ranks for which collectives and operators cost by their bytes alone: they split what is small, too."""
    local = CLUSTERS["local"]
    levels = tuple(replace(level, latency_seconds=0.0, launch_seconds=0.0) for level in local.levels)
    return replace(local, levels=levels, device=replace(local.device, seconds_per_op=0.0))
