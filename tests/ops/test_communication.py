"""What whole programs communicate: for each hard case a small model, a plan that is forced upon it, and
every collective of its program with its bytes, forward and backward. No rule costs more than it must.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, case, eager, planners, simulated
from torch import nn

from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.space.choices import KEEP, AxisChoice, SiteChoice
from autopar.passes.space.problem import Assignment, ProblemBuilder
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space
from autopar.planning.account import account
from autopar.planning.costs import volumes
from autopar.planning.options import unique_sites
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.search import Search

TOKENS, WIDTH, CLASSES = 24, 8, 48
FLOAT = 4

PLANNERS = planners(case)

Force = Callable[[Site, Sequence[AxisChoice]], Sequence[AxisChoice]]
"""From a site and its choices on an axis, those that it may take."""


def forced(space: Space, *axes: Force) -> Assignment:
    """The cheapest plan in which every site takes a choice that its axis's function leaves to it."""
    allowed = {}
    for name, site in unique_sites(space).items():
        per_axis = [force(site, site.choices[n]) for force, n in zip(axes, space.mesh, strict=True)]
        policy = KEEP if site.kind == "parameter" else ""
        allowed[name] = [SiteChoice(axes, policy) for axes in product(*per_axis)]
    return Search(ProblemBuilder(space), "dp").run(allowed).assignment


def splitting(*periods: int, avoid: str = "$^") -> Force:
    """Whatever can split one of these periods does: in these models a period says which dim is meant. All
    else is whole, or passes partial sums on. `avoid` matches "op factor" of what is not to be split."""

    def force(site: Site, choices: Sequence[AxisChoice]) -> Sequence[AxisChoice]:
        stored = site.kind in ("buffer", "output")
        split = [c for c in choices if c.splits and c.period in periods and not stored]
        found = [c for c in split if not re.search(avoid, _name(site, c))]
        return found or [c for c in choices if not c.splits]

    return force


def _name(site: Site, choice: AxisChoice) -> str:
    return f"{site.node.op} {site.rule.factors[choice.factor].name}" if site.node and site.rule else site.name


def collectives(
    case: Case, mesh: dict[str, int], *axes: Force, bucketed: bool = False
) -> Counter[tuple[str, str, int]]:
    """(kind, axis, bytes of the larger side) -> how many of them one step issues. The program is also run, on
    simulated ranks, and must compute what the model does."""
    planner = Planner(case.model, mesh, case.args, case.kwargs, loss_fn=case.loss_fn)
    program = codegen(planner.space, forced(planner.space, *axes))
    program = bucket(program) if bucketed else program
    assert_same(simulated(program, planner.captured, case), eager(case))
    return Counter(program.collectives())


# ----------------------------------------------------------------------------- the vocabulary split


class Head(nn.Module):
    """Tokens' hidden states to the loss of their classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.options = options

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), target, **self.options)


def labels() -> torch.Tensor:
    """Of the first half of the tokens all are ignored: two of four ranks see nothing else."""
    target = torch.randint(CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(1))
    target[: TOKENS // 2] = -100
    return target


def head(target: torch.Tensor, **options: Any) -> Case:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH)
    return Case(model=Head(**options), batch=lambda step: ((hidden, target), {}))


PER_TOKEN = TOKENS * FLOAT


def vocabulary_parallel(case: Case) -> Counter[tuple[str, str, int]]:
    return collectives(case, {"tp": 4}, splitting(CLASSES, avoid="gather"))


@pytest.mark.parametrize(
    ("options", "bytes_"),
    [
        ({}, [FLOAT]),
        ({"reduction": "sum"}, [FLOAT]),
        ({"label_smoothing": 0.1}, [FLOAT]),
        ({"weight": torch.linspace(0.5, 1.5, CLASSES)}, [2 * FLOAT]),
        ({"weight": torch.linspace(0.5, 1.5, CLASSES), "label_smoothing": 0.1}, [2 * FLOAT, FLOAT]),
        ({"reduction": "none"}, [PER_TOKEN]),
    ],
    ids=["mean", "sum", "smoothed", "weighted", "weighted and smoothed", "none"],
)
def test_cross_entropy_with_the_vocabulary_split(options: dict[str, Any], bytes_: list[int]) -> None:
    """Two all-reduces of [tokens] forward (maximum, sum of exponentials) and one backward; what is picked is
    summed over the tokens before it is reduced, under class weights with the total weight beside it. Nothing has
    the size of the logits."""
    expected = Counter(("all_reduce", "tp", size) for size in (PER_TOKEN,) * 3 + tuple(bytes_))
    assert vocabulary_parallel(head(labels(), **options)) == expected


def test_cross_entropy_with_probabilities_and_the_vocabulary_split() -> None:
    found = vocabulary_parallel(head(torch.rand(TOKENS, CLASSES).softmax(-1)))
    assert found == {("all_reduce", "tp", PER_TOKEN): 3, ("all_reduce", "tp", FLOAT): 1}


def test_cross_entropy_with_the_tokens_split() -> None:
    """The sum and the number of labels that count travel together; the gradient of the weights follows."""
    found = collectives(head(labels()), {"dp": 4}, splitting(TOKENS))
    assert found == {("all_reduce", "dp", 2 * FLOAT): 1, ("all_reduce", "dp", CLASSES * WIDTH * FLOAT): 1}


@pytest.mark.parametrize(
    ("weight", "bytes_"),
    [(None, [3 * FLOAT, 8]), (torch.linspace(0.5, 1.5, CLASSES), [4 * FLOAT])],
    ids=["even", "weighted"],
)
def test_parts_of_a_loss_travel_together(weight: torch.Tensor | None, bytes_: list[int]) -> None:
    """What is picked, its weight and the sum of all classes, in one all-reduce; without weights the labels are counted
    in integers, and these travel alone."""
    case = head(labels(), label_smoothing=0.1, weight=weight)
    found = collectives(case, {"dp": 4}, splitting(TOKENS), bucketed=True)
    assert found == Counter(("all_reduce", "dp", size) for size in (*bytes_, CLASSES * WIDTH * FLOAT))


class Chained(nn.Module):
    """Three numbers of the batch, of which the second needs the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        even = x / x.abs().mean().exp()
        return even.abs().mean().exp() + x.square().mean().exp() * even.sum().sin()


def test_numbers_that_need_each_other_travel_apart() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    case = Case(model=Chained(), batch=lambda step: ((x,), {}))
    apart, together = (collectives(case, {"dp": 4}, splitting(TOKENS), bucketed=b) for b in (False, True))
    assert apart["all_reduce", "dp", FLOAT] - together["all_reduce", "dp", FLOAT] == 3
    assert together["all_reduce", "dp", 3 * FLOAT] == 1 and together["all_reduce", "dp", FLOAT] >= 1


def test_cross_entropy_with_tokens_and_vocabulary_split() -> None:
    found = collectives(head(labels()), {"dp": 2, "tp": 2}, splitting(TOKENS), splitting(CLASSES))
    assert found == {
        ("all_reduce", "tp", PER_TOKEN // 2): 3,
        ("all_reduce", "dp", 2 * FLOAT): 1,
        ("all_reduce", "tp", FLOAT): 1,
        ("all_reduce", "dp", CLASSES // 2 * WIDTH * FLOAT): 1,
    }


class Language(nn.Module):
    """Embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)), target)


def test_embedding_with_the_vocabulary_split() -> None:
    """One all-reduce of the tokens' states (forward, of what each rank looks up) and one of their gradients
    (backward, by the head); tables are never gathered, nor their gradients reduced."""
    torch.manual_seed(0)
    tokens = torch.randint(CLASSES, (TOKENS,))
    found = vocabulary_parallel(Case(model=Language(), batch=lambda step: ((tokens, labels()), {})))
    assert found == {
        ("all_reduce", "tp", PER_TOKEN * WIDTH): 2,
        ("all_reduce", "tp", PER_TOKEN): 3,
        ("all_reduce", "tp", FLOAT): 1,
    }


# ------------------------------------------------------------------------------------- the sequence split


BATCH, SEQUENCE, STATE, HEADS, KEY_HEADS, HEAD = 5, 20, 24, 4, 2, 8


class Attention(nn.Module):
    def __init__(self, key_heads: int, causal: bool) -> None:
        super().__init__()
        self.key_heads, self.causal = key_heads, causal
        self.qkv = nn.ModuleList(nn.Linear(STATE, heads * HEAD, bias=False) for heads in (HEADS, key_heads, key_heads))
        self.output = nn.Linear(HEADS * HEAD, STATE)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(states).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in self.qkv)
        grouped = self.key_heads != HEADS
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))


def attention(key_heads: int, causal: bool) -> Case:
    torch.manual_seed(0)
    states = torch.randn(BATCH, SEQUENCE, STATE)
    loss = lambda output: output.square().mean()  # noqa: E731
    return Case(model=Attention(key_heads, causal), batch=lambda step: ((states,), {}), loss_fn=loss)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, KEY_HEADS])
def test_attention_with_the_sequence_split(key_heads: int, causal: bool) -> None:
    """Keys and values are gathered and their gradients reduced and scattered; queries stay. Besides, each
    parameter's gradient is summed and so is the loss."""
    made = attention(key_heads, causal)
    found = collectives(made, {"sp": 4}, splitting(SEQUENCE, avoid="attention.* k"))
    keys = BATCH * SEQUENCE * key_heads * HEAD * FLOAT
    expected = Counter({("all_gather", "sp", keys): 2, ("reduce_scatter", "sp", keys): 2})
    expected.update(("all_reduce", "sp", p.numel() * FLOAT) for p in made.model.parameters())
    expected["all_reduce", "sp", FLOAT] += 1
    assert found == expected


@pytest.mark.parametrize("key_heads", [HEADS, KEY_HEADS])
def test_attention_with_the_heads_split(key_heads: int) -> None:
    """One all-reduce, of what the heads add to the output; grouped heads go with the heads of their keys."""
    periods = splitting(HEADS * HEAD, HEADS, key_heads * HEAD, key_heads)
    found = collectives(attention(key_heads, True), {"tp": 2}, periods)
    assert found == {("all_reduce", "tp", BATCH * SEQUENCE * STATE * FLOAT): 1}


# ---------------------------------------------------------------------------------- places along a split dim


class Pooled(nn.Module):
    """States to a few of their places: a function of the states and of tokens [batch, sequence]."""

    def __init__(self, pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.pick = nn.Parameter(torch.randn(STATE)), pick

    def forward(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.pick(states * self.scale, tokens).square().mean()


PICKS: dict[str, tuple[list[int], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "the first token": ([], lambda states, tokens: states[:, 0]),
    "the last token": ([], lambda states, tokens: states[:, -1:]),
    "the largest": ([40, 40], lambda states, tokens: states[torch.arange(BATCH), tokens.argmax(-1)]),
    "by gather": ([40, 40], lambda states, tokens: states.take_along_dim(tokens.argmax(-1)[:, None, None], 1)),
    "by index_select": ([8, 8], lambda states, tokens: states.index_select(1, tokens[0].argmax(0)[None])),
}
"""What is picked, and the bytes of the two all-reduces that find its place."""


@pytest.mark.parametrize("name", PICKS)
def test_places_along_a_split_sequence(name: str) -> None:
    """What is picked is reduced, [batch, state]; the sequence is not gathered, and neither is its gradient."""
    torch.manual_seed(0)
    found_by, pick = PICKS[name]
    states, tokens = torch.randn(BATCH, SEQUENCE, STATE), torch.randint(90, (BATCH, SEQUENCE))
    found = collectives(
        Case(model=Pooled(pick), batch=lambda step: ((states, tokens), {})), {"sp": 4}, splitting(SEQUENCE)
    )
    sizes = [BATCH * STATE * FLOAT, STATE * FLOAT, *found_by]
    assert found == Counter(("all_reduce", "sp", size) for size in sizes)


class Lookup(nn.Module):
    """A table that is read by indexing, not as an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens].square().mean()


@pytest.mark.parametrize("period", [TOKENS, CLASSES])
def test_a_table_that_is_indexed(period: int) -> None:
    """By tokens: each rank adds up the gradient of the table for its tokens, and the whole is reduced. By rows: what
    each token finds is reduced, and the gradient is left where it is. Zeros to add to are made, not gathered."""
    torch.manual_seed(0)
    tokens = torch.randint(CLASSES, (TOKENS,))
    found = collectives(Case(model=Lookup(), batch=lambda step: ((tokens,), {})), {"a": 4}, splitting(period))
    size = CLASSES if period == TOKENS else TOKENS
    expected = Counter({("all_reduce", "a", size * WIDTH * FLOAT): 1})
    assert found == expected + Counter({("all_reduce", "a", FLOAT): int(period == TOKENS)})


# ----------------------------------------------------------------------------------- experts split by inner dim


ROWS, EXPERTS, INNER, AT_ONCE = 1024, 4, 44, 3


class Experts(nn.Module):
    """The weighted sum of what a few experts make of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate = nn.Linear(STATE, STATE, bias=False), nn.Linear(STATE, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, STATE) / STATE)
        self.down = nn.Parameter(torch.randn(EXPERTS, STATE, INNER) / INNER)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        weights, wanted = self.gate(x).softmax(-1).gather(1, ids), ids.reshape(-1)
        inner = F.gelu(torch.bmm(self.up[wanted], x.repeat_interleave(AT_ONCE, 0)[..., None]))
        made = torch.bmm(self.down[wanted], inner)[..., 0] * weights.reshape(-1, 1)
        return made.reshape(-1, AT_ONCE, STATE).sum(1).square().mean()


def test_experts_with_their_inner_dim_split() -> None:
    """What a token's rows add up to is reduced, and what the gradients of its rows do, [tokens, state]; of the rows
    themselves nothing but the gradients of their weights, [rows]."""
    torch.manual_seed(0)
    x, ids = torch.randn(ROWS, STATE), torch.randint(EXPERTS, (ROWS, AT_ONCE))
    found = collectives(Case(model=Experts(), batch=lambda step: ((x, ids), {})), {"tp": 2}, splitting(INNER))
    tokens = ROWS * STATE * FLOAT
    assert found == {("all_reduce", "tp", tokens): 2, ("all_reduce", "tp", ROWS * AT_ONCE * FLOAT): 1}


def test_the_plan_by_volume_moves_the_fewest_bytes_and_repeats_no_arithmetic() -> None:
    made = PLANNERS("gpt2", {"tp": 4})
    space = volumes(made.space)
    plans = {cluster: made.on({"tp": 4}, cluster).plan(cost="volume") for cluster in ("dgx-h100", "local")}
    fewest, same = plans.values()
    assert fewest.decisions == same.decisions and fewest.segments == same.segments, "no cluster matters"

    def moved(plan: Plan) -> float:
        return account(space, made.assignment(plan)).communication_seconds

    others = [made.plan(solver=solver) for solver in ("ddp", "fsdp", "megatron")] + [made.plan(cost="serial")]
    assert all(moved(fewest) <= moved(plan) * (1 + 1e-9) for plan in others)
    assert fewest.objective_seconds > plans["dgx-h100"].account.communication_seconds > 0, "described on its cluster"
    taken = made.assignment(fewest)
    for region, decisions in zip(space.regions(), (taken.rest, *(copies[0] for copies in taken.copies)), strict=True):
        arithmetic = [name for name, site in region.sites.items() if site.rule is not None and site.rule.flops]
        assert arithmetic and all(decisions[name].axes[0].splits for name in arithmetic)
    assert_same(simulated(made.program(fewest), made.captured, case("gpt2")), eager(case("gpt2")))
