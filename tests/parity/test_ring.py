"""Ring attention is what the model computes: loss, gradients and parameters, in every form of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_parallel import register
from models import Case, Step, assert_same, eager, llama, on_ranks, tokens
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_context_parallel import METHODS, loss_and_backward, with_cpu_kernel

import autopar
from autopar.ops.attention import RING
from autopar.passes.space.choices import AxisChoice, SiteChoice
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.testing import EagerTrial
from autopar.testing.plans import random_assignment
from autopar.testing.trial import layouts

SEQUENCE, HEADS, WIDTH = 48, 2, 4
"""Long for its features, so that a ring is considered."""


LOWEST = torch.finfo(torch.float32).min


class Block(nn.Module):
    """Attention within a residual stream, to the loss of tokens."""

    def __init__(self, form: str, key_heads: int = HEADS) -> None:
        super().__init__()
        self.form, self.key_heads, features = form, key_heads, HEADS * WIDTH
        self.embedding = nn.Embedding(16, features)
        self.qkv = nn.ModuleList(nn.Linear(features, heads * WIDTH) for heads in (HEADS, key_heads, key_heads))
        self.output, self.head = nn.Linear(features, features), nn.Linear(features, 16)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(
            q, k, v, self._mask(tokens), 0.25 if self.form == "dropout" else 0.0,
            is_causal=self.form in ("causal", "dropout"), enable_gqa=self.key_heads != HEADS,
        )  # fmt: skip
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def _mask(self, tokens: torch.Tensor) -> torch.Tensor | None:
        length = tokens.shape[1]
        rows, columns = torch.arange(length).unsqueeze(1), torch.arange(length)
        if self.form == "window":
            return (columns <= rows) & (columns > rows - 5)
        if self.form == "padding":
            return (tokens != 0)[:, None, None, :]
        if self.form == "lowest":
            seen = (columns <= rows) & (tokens % 2 != 0).unsqueeze(1)
            return torch.where(seen, 0.0, LOWEST).unsqueeze(1)
        if self.form == "lowest beside none":
            later, empty = columns > rows, (tokens % 2 == 0)[:, None, None, :]
            return torch.zeros(length, length).masked_fill(later, -math.inf) + torch.where(empty, LOWEST, 0.0)
        if self.form == "documents":
            starts = (tokens == 1).cumsum(1)
            return (starts.unsqueeze(1) == starts.unsqueeze(2)).unsqueeze(1) & (columns <= rows)
        return None


def rings(space: Space, *periods: int) -> Any:
    """Leaves attention nothing but a ring on some axis, of one of these periods."""

    def wanted(site: Site) -> Sequence[SiteChoice] | None:
        names = [factor.name for factor in site.rule.factors] if site.rule is not None else []
        if RING not in names:
            return None
        ring = names.index(RING)
        every = [SiteChoice(axes) for axes in product(*(site.choices[n] for n in space.mesh))]
        chosen = [c for c in every if any(on.splits and on.factor == ring and on.period in periods for on in c.axes)]
        return [c for c in chosen if space.option(site, c) is not None]

    return wanted


def compared(trial: EagerTrial, mesh: dict[str, int], seed: int, *periods: int) -> None:
    planner = trial.on(mesh)
    assignment = random_assignment(planner.space, seed, rings(planner.space, *periods))
    program = planner.writer.written(assignment)
    assert any(kind == "rotate" for kind, *_ in program.collectives())
    row = trial.row(f"ring {periods}", program, layouts(planner.space, assignment))
    assert not row.failure and row.equal, row


def batch(rows: int = 2, length: int = SEQUENCE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {name: torch.randint(16, (rows, length), generator=generator) for name in ("tokens", "labels")}


FORMS = ("full", "causal", "window", "padding", "documents", "dropout")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_on_every_mesh(form: str) -> None:
    torch.manual_seed(0)
    trial = EagerTrial(Block(form), (), batch(), seed=1)
    for mesh in ({"cp": 2}, {"cp": 3}, {"cp": 4}, {"cp": 8}, {"a": 2, "b": 2}, {"dp": 2, "cp": 4}):
        compared(trial, mesh, 0, SEQUENCE)
        if form == "causal":
            compared(trial, mesh, 1, *mesh.values())


@pytest.mark.parametrize("form", ["full", "causal", "padding"])
@pytest.mark.parametrize("length", [45, 50])
def test_lengths_that_do_not_divide(form: str, length: int) -> None:
    torch.manual_seed(0)
    trial = EagerTrial(Block(form, key_heads=1), (), batch(1, length), seed=1)
    for mesh in ({"cp": 4}, {"a": 2, "b": 2}):
        compared(trial, mesh, 2, *range(length, length + 8))


@pytest.mark.parametrize("alone", ["q", "k"])
def test_what_goes_around_is_split_by_no_other_axis_alone(alone: str) -> None:
    """A mask that has columns of all keys would have others than those of a part of each block."""
    torch.manual_seed(0)
    space = EagerTrial(Block("documents"), (), batch(), seed=1).on({"a": 2, "b": 2}).space
    for site in (site for region in space.regions() for site in region.sites.values()):
        names = [factor.name for factor in site.rule.factors] if site.rule is not None else []
        if RING in names:
            of = [AxisChoice("S", names.index(name), SEQUENCE) for name in (RING, alone)]
            assert space.option(site, SiteChoice((of[0], of[0]))) is not None
            assert space.option(site, SiteChoice((of[0], of[1]))) is None
            assert space.option(site, SiteChoice((of[1], of[0]))) is None


@pytest.mark.parametrize("form", ["lowest", "lowest beside none"])
@pytest.mark.parametrize(("rows", "length"), [(2, SEQUENCE), (1, SEQUENCE + 3)])
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 4}, {"a": 2, "b": 2}])
def test_rows_hidden_by_a_large_number(mesh: dict[str, int], rows: int, length: int, form: str) -> None:
    """A query all of whose scores are the lowest number attends to all keys alike, wherever most of them lie."""
    torch.manual_seed(0)
    given = batch(rows, length)
    given["tokens"][:, : length - 3] &= ~1
    compared(EagerTrial(Block(form), (), given, dtype=torch.float32), mesh, 2, *range(length, length + 8))


def test_narrow_numbers() -> None:
    """In bfloat16 the parts are joined in float32: as near to float64 as eager is."""
    torch.manual_seed(0)
    trial = EagerTrial(Block("causal"), (), batch(), dtype=torch.bfloat16)
    compared(trial, {"cp": 4}, 0, SEQUENCE)
    compared(trial, {"cp": 4}, 0, 4)


LONG_LLAMA = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def long_llama() -> Case:
    torch.manual_seed(0)
    return Case(model=llama(**LONG_LLAMA), batch=lambda step: tokens(step, 2, 64))


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 8}, {"a": 2, "b": 2}])
def test_llama(mesh: dict[str, int]) -> None:
    made = long_llama()
    trial = EagerTrial(made.model, made.args, made.kwargs, steps=2)
    compared(trial, mesh, 0, 64)
    compared(trial, mesh, 1, *mesh.values())


def trained(mesh: dict[str, int], form: str) -> dict[str, torch.Tensor]:
    register()
    made = long_llama()
    on = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = autopar.parallelize(made.model, on, made.args, made.kwargs, solver=form)
    assert_same(on_ranks(module, made), eager(long_llama()))
    kinds = [kind for kind, *_ in module.program.collectives()]
    return {"rotates": torch.tensor(kinds.count("rotate"))}


@pytest.mark.parametrize(("mesh", "form"), [({"cp": 2}, "striped"), ({"dp": 2, "cp": 2}, "ring")])
def test_real_ranks(mesh: dict[str, int], form: str) -> None:
    """Two layers: keys and values go to one other rank, and in backward besides their gradients there and back."""
    for found in run(math.prod(mesh.values()), trained, mesh, form):
        assert found["rotates"] == 2 * (2 + 2 + 4)


def beside_torch() -> None:
    """By PyTorch's context parallel, and by plans."""
    register()
    with_cpu_kernel()
    on = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))

    def case() -> Case:
        torch.manual_seed(0)
        return Case(model=Block("causal", key_heads=1), batch=lambda step: ((), batch()))

    expected = eager(case())
    for form in ("ring", "striped"):
        assert_same(on_ranks(autopar.parallelize(case().model, on, kwargs=batch(), solver=form), case()), expected)
    for method in METHODS:
        model = case().model
        loss = loss_and_backward(model, batch(), on, method)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= on.size()
        assert_same(Step(outputs={"": torch.tensor(loss)}, gradients=gradients), expected)


@pytest.mark.timeout(60)
def test_the_same_as_by_torch() -> None:
    run(2, beside_torch)
