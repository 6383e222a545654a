"""Models whose code looks at data: at what only raises, at masks, at lengths, and at whether a factorisation worked.

PYTEST_DONT_REWRITE: an assert of a model is one here, as it is in a model's own file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, simulated
from plans import random_assignment
from torch import nn

from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.planning.planner import Planner


def assert_parity(case: Case) -> None:
    """A preset's plan, the solver's and random ones compute what the model does."""
    planner = Planner(case.model, {"dp": 2, "tp": 2}, case.args)
    plans = [planner.assignment(planner.plan(solver=solver)) for solver in ("ddp", "dp")]
    for assignment in (*plans, *(random_assignment(planner.space, seed) for seed in range(3))):
        assert_same(simulated(codegen(planner.space, assignment), planner.captured, case), eager(case))


class Applied(nn.Module):
    """A layer, and a function of what it makes and of the other inputs."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), *others)


def applied(function: Callable[..., torch.Tensor], *others: torch.Tensor) -> Case:
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    return Case(model=Applied(function), batch=lambda step: ((x, *others), {}))


def raises_if(x: torch.Tensor) -> torch.Tensor:
    if (x > 1e3).any():
        raise ValueError(f"{'large' if x.ndim else 'a number'}")
    return x.sum()


def raises_else(x: torch.Tensor) -> torch.Tensor:
    if (x < 1e3).all():
        x = x * 2
    else:
        raise ValueError("large")
    return x.sum()


def asserts_both(x: torch.Tensor) -> torch.Tensor:
    assert (x < 1e3).all() and (x > -1e3).all(), "large"
    return x.sum()


def branches(x: torch.Tensor) -> torch.Tensor:
    if (x > 0).any():
        return x.sum() * 2
    return x.sum()


def catches(x: torch.Tensor) -> torch.Tensor:
    try:
        if (x > 0).any():
            raise ValueError
    except ValueError:
        x = x * 2
    return x.sum()


@pytest.mark.parametrize("function", [raises_if, raises_else, asserts_both])
def test_a_check_that_raises_passes(function: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autopar.passes.capture"):
        assert_parity(applied(function))
    line = function.__code__.co_firstlineno + 1
    assert f"where eager would raise, it goes on ({__file__}:{line}" in caplog.text


@pytest.mark.parametrize("function", [branches, catches])
def test_a_branch_on_data_is_refused(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="that depends on parameters, buffers or random numbers"):
        capture(Applied(function), (torch.randn(8, 8),))
    assert bool(torch.ones(())) and not torch.zeros(1)


def test_a_loss_that_checks_its_variance() -> None:
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert_parity(applied(lambda x, t: F.gaussian_nll_loss(x, t, x.exp()), target))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, **masks: Any) -> torch.Tensor:
        return self.encoder(x, **masks).square().mean()


CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
PADDED = torch.arange(6)[None] >= torch.tensor([[6], [4], [5], [6]])


@pytest.mark.parametrize("given", [{"mask": CAUSAL}, {"mask": CAUSAL, "src_key_padding_mask": PADDED.float() * -1e4}])
def test_an_encoder_with_masks(given: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16)
    made = Case(model=Encoder(), batch=lambda step: ((x,), given))
    planner = Planner(made.model, {"dp": 2, "tp": 2}, made.args, made.kwargs)
    for solver in ("ddp", "megatron", "dp"):
        program = codegen(planner.space, planner.assignment(planner.plan(solver=solver)))
        assert_same(simulated(program, planner.captured, made), eager(made))


def positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T + 10 * torch.eye(8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.inv(positive(x)).sum(),
        lambda x: torch.linalg.solve(positive(x), x).square().sum(),
        lambda x: torch.linalg.cholesky(positive(x)).sum(),
    ],
    ids=["inv", "solve", "cholesky"],
)
def test_factorisations_are_replicated(function: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autopar"):
        assert_parity(applied(function))
    assert "replicated, since the op has no rule" in caplog.text and "linalg_" in caplog.text


TARGETS = torch.tensor([[1, 2, 2], [3, 4, 5], [6, 6, 6], [7, 1, 0]])
LENGTHS = torch.tensor([8, 6, 4, 7]), torch.tensor([3, 3, 3, 2])
"""Of times, and of targets; the third sequence of targets does not fit into its times."""


@pytest.mark.parametrize("in_a_row", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_sequences_of_several_lengths(reduction: str, in_a_row: bool) -> None:
    targets = TARGETS[torch.arange(3) < LENGTHS[1][:, None]] if in_a_row else TARGETS

    def loss(x: torch.Tensor, targets: torch.Tensor, times: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scores = (x[:, None] * torch.linspace(1, 2, 4)[:, None]).log_softmax(-1)
        found = F.ctc_loss(scores, targets, times, lengths, reduction=reduction, zero_infinity=True)
        return found if found.ndim == 0 else found.square().sum()

    assert_parity(applied(loss, targets, *LENGTHS))


def test_a_loss_of_one_sequence() -> None:
    assert_parity(applied(lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([1, 2]), (8,), (2,))))


class Halved(torch.autograd.Function):
    """Makes tensors of numbers, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 1, torch.tensor(0.5)) + torch.tensor([float(i) for i in range(8)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.tensor(0.5) * torch.tensor([float(i) for i in range(8)])


class Halves(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Halved.apply(layer(x)).tanh()
        return x.square().sum()


@pytest.mark.parametrize("layers", [1, 6])
def test_a_function_of_autograd_makes_tensors_of_numbers(layers: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 8)
    case = Case(model=Halves(layers), batch=lambda step: ((x,), {}))
    assert sorted(capture(case.model, case.args).constants) == ["constant", "constant_1"]
    assert_parity(case)


def raises_by_a_number(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    lengths = (lengths != 2).sum().long()
    assert lengths.max().item() <= x.size(1)
    if lengths.item() > 100:
        raise ValueError("too long")
    return x.sum()


def test_a_check_of_a_number_that_is_read_off_an_input_passes() -> None:
    assert_parity(applied(raises_by_a_number, torch.tensor([1, 2, 3])))
