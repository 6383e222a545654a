"""`autopar.testing`: what it calls equal, what it finds, and that it leaves everything as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.testing import Check, EagerTrial, check
from autopar.testing.trial import layouts

MESH = {"a": 2, "b": 2}


class Block(nn.Module):
    """Random numbers of every kind, a BatchNorm, and a counter in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.norm(F.dropout(self.layer(x), 0.3)) + torch.randn_like(x) * torch.rand(6, dtype=x.dtype)
        h = F.rrelu(F.alpha_dropout(F.dropout1d(h[None], 0.5)[0], 0.2), training=True)
        h = h * torch.bernoulli(h.sigmoid().detach()) + torch.empty_like(h).exponential_()
        h = checkpoint(lambda y: F.dropout(self.layer(y), 0.4), h, use_reentrant=False)
        q = h[None, None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).pow(2).mean() * self.calls


class Counting(nn.Module):
    """State that only Python keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.layer(x) * self.calls[0]


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.layer(x))


def test_gradients_go_into_complex_outputs() -> None:
    found = check(Spectrum(), {"a": 2}, (torch.randn(4, 6),))
    assert found.equal, str(found)


def test_two_steps_with_random_numbers_buffers_and_a_checkpoint_are_equal() -> None:
    model = Block()
    found = check(model, MESH, (torch.randn(5, 6),), plans=2, steps=2)
    assert found.equal, str(found)
    assert found.rows[0].plan == "auto" and len(found.rows) == 3
    assert {"loss", "gradients", "buffers", "parameters"} <= found.rows[0].errors.keys()
    assert all(row.errors["buffers"] <= 1e-12 for row in found.rows)


def test_the_model_and_the_generators_are_as_before() -> None:
    model, x = Block(), torch.randn(4, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = (torch.rand(2), random.random(), np.random.rand())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    check(model, {"a": 2}, (x,), steps=2)
    torch.testing.assert_close(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_a_loss_with_state_is_copied_too() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: torch.Tensor) -> torch.Tensor:
            return output.pow(2).mean()

    loss = Loss()
    model = nn.Linear(6, 4)
    assert check(model, {"a": 2}, (torch.randn(4, 6),), loss_fn=loss).equal
    assert loss.seen.dtype == torch.float32


def outcome(model: nn.Module, x: torch.Tensor) -> Check | str:
    try:
        return check(model, {"a": 2}, (x,), steps=2)
    except ValueError as error:
        return str(error)


def test_state_that_python_keeps_is_seen_or_refused() -> None:
    """Never equal: a second step of eager runs the model's own Python again."""
    found = outcome(Counting(), torch.randn(4, 6))
    assert isinstance(found, str) or (not found.equal and found.rows[0].step == 1)


def tampered() -> Iterator[tuple[EagerTrial, Any, str]]:
    """A trial, and programs of it in which one operator does something else; the module of that."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Sequential(nn.Linear(8, 6), nn.Tanh()))
    trial = EagerTrial(model, (torch.randn(4, 6),))
    planner = trial.on(MESH)
    plan = planner.plan(solver="ddp")
    program, made = planner.program(plan), layouts(planner.space, planner.assignment(plan))
    for op, module in (("aten.sigmoid.default", "1"), ("aten.tanh.default", "2.1")):
        wrong = [replace(i, op="aten.cos.default") if i.op == op else i for i in program.forward]
        yield trial, (replace(program, forward=tuple(wrong)), made), module


def test_the_first_operator_that_differs_is_named_with_its_module() -> None:
    for trial, (program, made), module in tampered():
        row = trial.row("tampered", program, made)
        assert not row.equal and row.first is not None
        assert row.first.module == module and row.first.operator.startswith("aten."), str(row.first)


def test_a_program_that_stops_is_a_row_and_no_exception() -> None:
    trial, (program, made), _ = next(tampered())
    stopping = replace(program.forward[-1], op="aten.mm.default")
    row = trial.row("stops", replace(program, forward=(*program.forward[:-1], stopping)), made)
    assert "aten.mm.default" in row.failure and not row.equal
    assert "failed" in str(Check(mesh=MESH, steps=1, tolerance=1e-8, rows=(row,)))


def test_presets_dtypes_and_bad_input() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 6)
    wide, narrow = (check(model, MESH, (x,), solver="fsdp", dtype=d) for d in (torch.float64, torch.bfloat16))
    assert wide.equal and narrow.equal and wide.tolerance < narrow.tolerance
    assert wide.to_json()["equal"] is True
    for given, message in (
        ({"plans": -1}, "plans is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"seed": True}, "seed is True"),
        ({"dtype": torch.int64}, "dtype is torch.int64"),
        ({"solver": "best"}, "unknown solver 'best'"),
    ):
        with pytest.raises(ValueError, match=message):
            check(model, MESH, (x,), **given)
    with torch.device("meta"), pytest.raises(ValueError, match="is on meta: a model that is run must have values"):
        check(nn.Linear(6, 4), MESH, (x,))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied"):
        check(model, MESH, (torch.randn(4, 5),))


class UnreadDraws(nn.Module):
    """Draws numbers that reach nothing, that are written over, and that only a second name reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        x = self.dropout(self.inner(x))
        (torch.randn_like(x) * 2).tanh()
        noise = torch.zeros_like(x)
        noise[:, 1:].copy_(torch.rand_like(x)[:, 1:])
        torch.rand(3)
        return self.dropout(x + noise)


def test_draws_that_nobody_reads_do_not_shift_those_after_them() -> None:
    found = check(UnreadDraws(), {"a": 2, "b": 2}, (torch.randn(4, 6),), plans=2, steps=2)
    assert found.equal, found


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_with_an_attribute_that_cannot_be_copied_is_as_before() -> None:
    """The weight of `torch.nn.utils.weight_norm` is no leaf, which `deepcopy` refuses."""
    model = torch.nn.utils.weight_norm(nn.Linear(4, 4, dtype=torch.float64))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = check(model, {"a": 2}, (torch.ones(6, 4),), loss_fn=lambda h: h.square().sum(), steps=2)
    assert found.equal, str(found)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("rows", [None, 6])
def test_labels_of_a_multilabel_margin_end_at_the_first_that_is_none(reduction: str, rows: int | None) -> None:
    given = [[0, 1, -1, 0], [3, -1, 3, 2], [-1, 0, 1, 2], [0, 1, 2, 3], [2, 2, -1, -1], [1, 0, 2, -1]]
    labels = torch.tensor(given if rows else given[0])
    model = nn.Linear(4, 4)

    def loss(h: torch.Tensor) -> torch.Tensor:
        return nn.functional.multilabel_margin_loss(h, labels, reduction=reduction).square().sum()

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found = check(model, {"a": 3}, (x if rows else x[0],), loss_fn=loss, plans=1)
    assert found.equal, str(found)


def test_an_operator_that_makes_a_shape_of_data_is_refused_even_if_nobody_reads_it() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y[torch.unique(y.detach()[:, 0].round(), return_inverse=True)[1]].square().sum()

    with pytest.raises(ValueError, match=r"_unique2.* makes a tensor whose shape depends on the data.*test_testing"):
        check(Picks(), {"a": 2}, (torch.ones(6, 4),))


def test_steps_within_one_context_of_autocast_read_their_own_parameters() -> None:
    """Torch keeps the casts of parameters as long as a context lasts."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # for steps that matter

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.float().square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = check(model, {"dp": 2}, (x,), loss_fn=loss, dtype=None, steps=3)
    assert result.equal, result
