"""Results of steps, by eager and by programs on simulated ranks, and how far apart they are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.neutral import causal_biases, without_autocast
from autopar.ir.program import Program
from autopar.ir.randomness import keys
from autopar.ir.tree import flatten
from autopar.passes.capture.captured import Captured
from autopar.runtime import differences
from autopar.runtime.differences import largest_element
from autopar.runtime.simulate import simulate_step

from .draws import Draws, Readers

LEARNING_RATE = 0.01

NEGLIGIBLE = 1e-2
"""Share of the largest gradient of all below which a gradient may be zero by arithmetic, as that of attention's key
bias is: it then is nothing but the rounding of the others."""

LEAST = 1e-6
"""What the largest element of a tensor counts as at least."""

DRAWS = "the number of random operators that run"
"""A path of outputs that no model has."""

KINDS = ("loss", "outputs", "gradients", "buffers", "parameters")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step makes: outputs by path (constants of the output too), gradients by name, and what buffers and
    parameters are afterwards (None: not looked at). `loss` is the path of what is differentiated, if that is one
    number."""

    outputs: Mapping[str, Any]
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] | None = None
    parameters: Mapping[str, torch.Tensor] | None = None
    loss: str | None = None


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest element of what is expected, which counts as `floor` at least.
    Infinite where shapes, dtypes or elements that are not finite differ."""
    return differences.relative_error(actual.cpu(), expected.cpu(), max(floor, LEAST))


def errors(actual: StepResult, expected: StepResult) -> dict[tuple[str, str], float]:
    """(kind, name) -> relative error, of everything that a step makes."""
    largest = max((largest_element(g) for g in expected.gradients.values()), default=0.0)
    parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any], float]] = [
        ("outputs", actual.outputs, expected.outputs, 0.0),
        ("gradients", actual.gradients, expected.gradients, NEGLIGIBLE * largest),
    ]
    if actual.buffers is not None and expected.buffers is not None:
        parts.append(("buffers", actual.buffers, expected.buffers, 0.0))
    if actual.parameters is not None and expected.parameters is not None:
        parts.append(("parameters", actual.parameters, expected.parameters, 0.0))
    relative: dict[tuple[str, str], float] = {}
    for kind, ours, theirs, floor in parts:
        for name in (*theirs, *(name for name in ours if name not in theirs)):
            key = ("loss" if kind == "outputs" and name == expected.loss else kind, name)
            relative[key] = _error(ours.get(name), theirs.get(name), floor)
    return relative


def _error(actual: Any, expected: Any, floor: float) -> float:
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        return relative_error(actual, expected, floor)
    same = not isinstance(actual, torch.Tensor) and type(actual) is type(expected) and actual == expected
    return 0.0 if same else math.inf


def tangent(meta: torch.Tensor, number: int) -> torch.Tensor:
    """The gradient that is put into an output that is not a loss."""
    generator = torch.Generator().manual_seed(number)
    wide = torch.complex128 if meta.is_complex() else torch.float64
    return torch.randn(meta.shape, dtype=wide, generator=generator).to(meta.dtype)


def eager_steps(
    model: nn.Module,
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    captured: Captured,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    steps: int,
    seed: int,
    read: Sequence[int] | None = None,
) -> list[StepResult]:
    """Steps of SGD as PyTorch runs them, of a model that is changed by it. Each runs the model's own Python on inputs
    of its own, and takes its random numbers with the keys of a program of the captured graph. `read` are the numbers of
    the random operators that the graph has, where a step runs others too (see `read_draws`)."""
    results: list[StepResult] = []
    count = sum(i.role == "seed" for i in captured.graph.inputs)
    for number in range(steps):
        args, kwargs = inputs()
        leaves = [(path, leaf) for path, leaf in flatten("", (args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        drawn = Draws(captured.graph, keys(torch.tensor(seed + number), count), read)
        _, loss, snapshot = _forward_and_backward(model, args, kwargs, loss_fn, drawn)
        runs = drawn.most if read is None else len(read)
        if runs != count:
            snapshot[DRAWS] = runs
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients |= {path: leaf.grad for path, leaf in leaves if leaf.grad is not None}
        gradients = {name: (g.to_dense() if g.is_sparse else g).detach().clone() for name, g in gradients.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(gradients_of(parameter), alpha=LEARNING_RATE)
                parameter.grad = None
        results.append(
            StepResult(
                outputs=snapshot,
                gradients=gradients,
                buffers={name: b.detach().clone() for name, b in model.named_buffers()},
                parameters={name: p.detach().clone() for name, p in model.named_parameters()},
                loss=loss,
            )
        )
    return results


def read_draws(
    model: nn.Module,
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    captured: Captured,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> list[int]:
    """The numbers of the random operators of a step that what it makes depends on, in order."""
    args, kwargs = inputs()
    readers = Readers(captured.graph)
    pairs, _, _ = _forward_and_backward(model, args, kwargs, loss_fn, readers)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    lasting = [*model.parameters(), *model.buffers(), *leaves]
    results = [leaf for _, leaf in pairs], lasting, [leaf.grad for leaf in lasting if leaf.is_leaf]
    return sorted(readers.of(results))


def _forward_and_backward(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss_fn: Any, drawn: Draws
) -> tuple[Sequence[tuple[str, Any]], str | None, dict[str, Any]]:
    """What a step returns, by path, the path of the loss, and what was returned before the backward pass."""
    torch.clear_autocast_cache()  # within a context around all steps, it holds the parameters of the first
    with causal_biases(), drawn:
        output = model(*args, **kwargs)
        if loss_fn is not None:
            output = loss_fn(output)
        pairs = flatten("output", output)[0]
        loss = _loss(output, pairs, loss_fn is not None)
    snapshot = {path: v.detach().clone() if isinstance(v, torch.Tensor) else v for path, v in pairs}
    differentiated, tangents = _differentiated(pairs, loss)
    if differentiated:
        # a checkpoint draws again; a backward pass belongs outside of autocast
        with causal_biases(), drawn, without_autocast("cpu"):
            torch.autograd.backward(differentiated, tangents)
    return pairs, loss, snapshot


def gradients_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _loss(output: Any, pairs: Sequence[tuple[str, Any]], given: bool) -> str | None:
    """The path of what is differentiated, as `capture` says it."""
    own = None if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    value = own
    if given or (isinstance(output, torch.Tensor) and not output.ndim and output.is_floating_point()):
        value = output
    return None if value is None else next((path for path, leaf in pairs if leaf is value), None)


def _differentiated(
    pairs: Sequence[tuple[str, Any]], loss: str | None
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The outputs into which gradients flow, and those gradients."""
    floating = [
        (path, leaf)
        for path, leaf in pairs
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and loss in (None, path)
    ]
    given = [None if path == loss else tangent(leaf, place_of(path)) for path, leaf in floating]
    return [leaf for _, leaf in floating], given


def place_of(path: str) -> int:
    """A number that is the path's own."""
    return int.from_bytes(path.encode()) % (2**31)


def simulated_steps(
    program: Program,
    captured: Captured,
    held: Mapping[str, torch.Tensor],
    names: tuple[Sequence[str], Sequence[str]],
    inputs: Mapping[str, torch.Tensor],
    *,
    steps: int,
    seed: int,
    tolerance: float,
) -> list[tuple[Mapping[str, torch.Tensor], StepResult]]:
    """Steps of SGD of a program on all its ranks, in this process: what parameters and buffers, by `names`, are before
    each, and what it makes."""
    results = []
    tangents = tangents_of(program, captured)
    constants = {leaf.path: leaf.constant for leaf in captured.output_leaves if leaf.meta is None}
    parameters, buffers = names
    for number in range(steps):
        step = simulate_step(program, held, inputs, tangents, seed=seed + number, tolerance=tolerance, least=LEAST)
        after = {**held, **step.mutations}  # the optimizer updates what forward wrote into a parameter
        after |= {name: after[name] - LEARNING_RATE * g for name, g in step.gradients.items() if name in held}
        result = StepResult(
            outputs={**step.outputs, **constants},
            gradients=step.gradients,
            buffers={name: after[name] for name in buffers},
            parameters={name: after[name] for name in parameters},
            loss=captured.loss,
        )
        results.append((held, result))
        held = after
    return results


def tangents_of(program: Program, captured: Captured) -> dict[str, torch.Tensor]:
    return {
        i.target: tangent(torch.empty(i.meta.shape, dtype=i.meta.dtype), place_of(i.target))
        for i in program.tangents
        if i.target != captured.loss
    }
