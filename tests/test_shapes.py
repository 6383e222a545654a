"""One parallel module, called with other shapes, with more and fewer inputs, and without labels: each form of inputs
has a program, the parameters stay where they are, and all is as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_close, whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.module import ParallelModule

WORDS, HIDDEN = 12, 8


class Reader(nn.Module):
    """Tokens, an optional mask and optional labels; a loss only with labels; batch norm, which counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN, affine=False)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, labels: torch.Tensor | None = None, both: bool = True
    ) -> dict[str, Any]:
        x = self.embed(ids)
        if mask is not None:
            x = x * mask[..., None]
        x = torch.tanh(self.mix(x))
        x = x + self.norm(x.transpose(1, 2)).transpose(1, 2).cumsum(1)
        logits = self.head(x)
        out = {"logits": logits, "hidden": x} if both else {"logits": logits}
        if labels is not None:
            out["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


def batch(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def masked(rows: int, length: int) -> dict[str, torch.Tensor]:
    given = batch(rows, length)
    return {**given, "mask": (given["ids"] % 3 > 0).float()}


CALLS: tuple[dict[str, Any], ...] = (
    batch(8, 4),
    batch(3, 4),  # the last batch
    batch(8, 7),
    batch(1, 5),
    masked(8, 4),
    {**batch(8, 4), "both": False},
    {**batch(8, 4, seed=1)},
)


def compared(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert list(found) == list(expected), what
    for name, tensor in expected.items():
        assert_close(whole(found[name]), tensor.detach(), f"{name} of {what}")


def any_form(shape: tuple[int, ...], solver: str) -> None:
    """Training steps of every form, twice, with an evaluation without labels after each."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    beside, module = Reader(), autopar.parallelize(Reader(), mesh, kwargs=CALLS[0], solver=solver)
    assert isinstance(module, ParallelModule)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, beside)]
    places = {name: p.placements for name, p in module.named_parameters()}
    for number, given in enumerate(CALLS * 2):
        found, expected = module(**given), beside(**given)
        compared(found, expected, f"call {number}")
        found["loss"].backward(), expected["loss"].backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        for name, parameter in beside.named_parameters():
            assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name} in call {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        module.eval(), beside.eval()
        with torch.no_grad():
            unlabelled = {name: x for name, x in given.items() if name != "labels"}
            compared(module(**unlabelled), beside(**unlabelled), f"evaluation after call {number}")
        module.train(), beside.train()
    assert {name: p.placements for name, p in module.named_parameters()} == places
    for (name, p), q in zip(module.named_parameters(), beside.parameters(), strict=True):
        assert_close(whole(p), q.detach(), name)
    for (name, p), q in zip(module.named_buffers(), beside.buffers(), strict=True):
        assert_close(whole(p), q, name)
    forms = len(CALLS) - 1
    assert len(vars(module)["_modes"].versions) == 2 * forms, "one for each form in each mode"


@pytest.mark.parametrize(("shape", "solver"), [((2, 2), "fsdp"), ((2,), "megatron"), ((2,), "dp")], ids=str)
def test_any_form_of_inputs_is_as_on_one_device(shape: tuple[int, ...], solver: str) -> None:
    run(4 if len(shape) == 2 else 2, any_form, shape, solver)
