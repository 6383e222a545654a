"""Mixtures of experts: rows in the order of tokens, experts split, and the models of `transformers` that have them.

Routing is not continuous: where two experts are about equally good for a token, rounding decides, and a
parallel run may send the token elsewhere. The models here compute in float64, and no token of these batches
is that near to a tie.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import models
import plans
import pytest
import torch
from models import Case, assert_close, assert_same, simulated
from torch import nn

from autopar.api import Planner
from autopar.ops.experts import MM, MM_WEIGHT, expert_mm, expert_mm_weight
from autopar.ops.oracle import check_rule
from autopar.passes.bucket import bucket
from autopar.passes.codegen import codegen
from autopar.passes.problem import Assignment
from autopar.passes.strategies import Site, SiteChoice
from autopar.program import Program

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "output_router_logits": True,
}
LINE, GRID = {"a": 4}, {"dp": 2, "tp": 2}
RUNS = [
    ("mixtral", "grouped_mm", LINE),
    ("mixtral", "batched_mm", GRID),
    ("qwen3_moe", "grouped_mm", GRID),
    ("qwen3_moe", "batched_mm", LINE),
]
"""The two implementations that `transformers` can export; grouped_mm is its default."""


def mixtral(layers: int, **more: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        **{"intermediate_size": 24, "num_local_experts": 4, "num_hidden_layers": layers, **SMALL, **more}
    )
    return transformers.MixtralForCausalLM(config)


def qwen3_moe(layers: int, **more: Any) -> nn.Module:
    own = {
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "norm_topk_prob": True,
        "head_dim": 4,
        "intermediate_size": 24,
    }
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**{**own, "num_hidden_layers": layers, **SMALL, **more})
    )


@functools.cache
def case(name: str, implementation: str, layers: int = 1) -> Case:
    torch.manual_seed(0)
    # the balancing loss reads all layers at once, so that they are no repeat
    model = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}[name](layers, output_router_logits=layers == 1)
    model.config._experts_implementation = implementation
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Case(model=model.double(), batch=models.tokens)


def reference(made: Case) -> models.Step:
    """One step with the experts as plain loops: no kernel that is also under test."""
    model = copy.deepcopy(made.model)
    model.config._experts_implementation = "eager"
    return models.eager(dataclasses.replace(made, model=model))


@functools.cache
def expected(name: str, layers: int = 1) -> models.Step:
    return reference(case(name, "grouped_mm", layers))


@functools.cache
def _planner(name: str, implementation: str, layers: int, axes: tuple[tuple[str, int], ...]) -> Planner:
    made = case(name, implementation, layers)
    return Planner(made.model, dict(axes), made.args, made.kwargs)


def planner(name: str, implementation: str, mesh: dict[str, int], layers: int = 1) -> Planner:
    return _planner(name, implementation, layers, tuple(mesh.items()))


def mesh_id(mesh: dict[str, int]) -> str:
    return "x".join(map(str, mesh.values()))


of_runs = pytest.mark.parametrize(
    ("name", "implementation", "mesh"), RUNS, ids=lambda value: mesh_id(value) if isinstance(value, dict) else value
)


# ---- the operators


ROUTINGS = {
    "even": [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
    "all to one": [2] * 12,
    "none for half of them": [0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1],
    "uneven": [3, 3, 3, 3, 3, 3, 3, 3, 3, 0, 1, 3],
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=list(ROUTINGS))
def test_rules_hold_however_rows_are_routed(routing: list[int]) -> None:
    torch.manual_seed(0)
    x, weight, gradient = (torch.randn(*s, dtype=torch.float64) for s in ((12, 6), (4, 6, 8), (12, 8)))
    ids = torch.tensor(routing)
    report = check_rule(MM, x, weight, ids)
    assert set(report.factors) == {"s", "e", "k", "n"} and report.linear
    assert set(check_rule(MM_WEIGHT, x, gradient, ids, 4).factors) == {"s", "e", "k", "n"}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=list(ROUTINGS))
def test_a_product_by_expert_is_the_product_with_each_rows_weight(routing: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(12, 6, requires_grad=True), torch.randn(4, 6, 8, requires_grad=True)
    ids, gradient = torch.tensor(routing), torch.randn(12, 8)
    product = torch.einsum("sk,skn->sn", x, weight[ids])
    product.backward(gradient)
    assert_close(expert_mm(x.detach(), weight.detach(), ids), product, "rows")
    assert_close(expert_mm_weight(x.detach(), gradient, ids, 4), weight.grad, "weights")
    assert_close(expert_mm(gradient, weight.detach().transpose(1, 2), ids), x.grad, "gradient of rows")
    of_two = expert_mm(x.detach(), weight.detach()[2:], ids, first=2)
    assert_close(of_two, product * (ids >= 2)[:, None], "rows of the last two experts")


# ---- the graph


@of_runs
def test_rows_stand_in_the_order_of_tokens(name: str, implementation: str, mesh: dict[str, int]) -> None:
    """No sort is left, no lookup of weights, and nothing that has no rule."""
    made = planner(name, implementation, mesh)
    ops = [node.op for node in made.captured.graph.nodes]
    assert ops.count(MM) == 4 and ops.count(MM_WEIGHT) == 2
    assert not [op for op in ops if "sort" in op or "grouped_mm" in op or ("cumsum" in op and "experts" in op)]
    experts = [n for n in made.captured.graph.nodes if n.module.endswith("experts")]
    assert not [n for n in experts if n.op in ("aten.index.Tensor", "aten.index_put.default", "aten.bmm.default")]
    assert not made.space.without_rule


class Ordered(nn.Module):
    """Sorts rows by an index, and gives away the order: the sort is needed."""

    def __init__(self, away: bool) -> None:
        super().__init__()
        self.linear, self.away = nn.Linear(6, 6), away

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        _, order = torch.sort(ids)
        rows = self.linear(x[order]).tanh()
        if self.away:
            return rows.cumsum(0)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back]


@pytest.mark.parametrize("away", [True, False])
def test_a_sort_stays_where_its_order_matters(away: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(4, (8,))

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(8, 6, generator=torch.Generator().manual_seed(step)), ids), {}

    made = Case(model=Ordered(away), batch=batch)
    planner = Planner(made.model, {"a": 2}, made.args)
    sorts = [node for node in planner.captured.graph.nodes if "sort" in node.op]
    assert len(sorts) == away
    program = planner.program(planner.plan(solver="ddp"))
    assert_same(simulated(program, planner.captured, made), models.eager(made))


# ---- parity on simulated ranks


def check(made: Planner, program: Program, name: str, implementation: str, layers: int = 1) -> None:
    assert_same(simulated(program, made.captured, case(name, implementation, layers)), expected(name, layers))


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron", "megatron_sp"])
@of_runs
def test_presets(name: str, implementation: str, mesh: dict[str, int], solver: str) -> None:
    made = planner(name, implementation, mesh)
    check(made, made.program(made.plan(solver=solver)), name, implementation)


@pytest.mark.parametrize(("name", "implementation"), [("mixtral", "grouped_mm"), ("qwen3_moe", "batched_mm")])
def test_the_solvers_plan(name: str, implementation: str) -> None:
    made = planner(name, implementation, LINE)
    check(made, made.program(made.plan(solver="dp")), name, implementation)


@pytest.mark.parametrize("seed", range(2))
@of_runs
def test_random_plans(name: str, implementation: str, mesh: dict[str, int], seed: int) -> None:
    made = planner(name, implementation, mesh)
    program = codegen(made.space, plans.random_assignment(made.space, seed))
    check(made, program, name, implementation)
    check(made, bucket(program), name, implementation)


def by_expert(made: Planner, axes: Sequence[int]) -> Assignment:
    """A random plan whose products all split their experts on these axes."""
    width = len(made.space.mesh)

    def wanted(site: Site) -> list[SiteChoice] | None:
        if site.node is None or site.node.op not in (MM, MM_WEIGHT):
            return None
        assert site.rule is not None
        number, experts = next((i, f.size) for i, f in enumerate(site.rule.factors) if f.name == "e")
        return [tuple(("S", number, experts) if axis in axes else ("R",) for axis in range(width))]

    return plans.random_assignment(made.space, 0, wanted=wanted)


@pytest.mark.parametrize(
    ("name", "implementation", "mesh", "axes"),
    [
        ("mixtral", "grouped_mm", LINE, (0,)),
        ("mixtral", "batched_mm", GRID, (1,)),
        ("qwen3_moe", "grouped_mm", GRID, (0, 1)),
        ("qwen3_moe", "batched_mm", LINE, (0,)),
    ],
    ids=str,
)
def test_experts_split(name: str, implementation: str, mesh: dict[str, int], axes: tuple[int, ...]) -> None:
    made = planner(name, implementation, mesh)
    check(made, codegen(made.space, by_expert(made, axes)), name, implementation)


def test_layers_that_repeat() -> None:
    made = planner("mixtral", "grouped_mm", LINE, layers=6)
    assert made.space.repeats
    check(made, made.program(made.plan(solver="ddp")), "mixtral", "grouped_mm", layers=6)
