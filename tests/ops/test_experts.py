"""Mixtures of experts: rows in the order of tokens, experts split, and the models of `transformers` that have them.

Routing is not continuous: where two experts are about equally good for a token, rounding decides, and a
parallel run may send the token elsewhere. The models here compute in float64, and no token of these batches
is that near to a tie.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import models
import plans
import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_close, assert_same, simulated
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.program import Program
from autopar.ops.experts import FROM, MM, MM_WEIGHT, TO, expert_mm, expert_mm_weight
from autopar.ops.oracle import check_rule
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.space.choices import REPLICATED, AxisChoice, SiteChoice
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import Site
from autopar.planning.planner import Planner

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


def gpt_oss(layers: int, **more: Any) -> nn.Module:
    """Its experts have biases."""
    own = {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 4, "sliding_window": 8}
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**{**own, "num_hidden_layers": layers, **SMALL, **more})
    )


@functools.cache
def case(name: str, implementation: str, layers: int = 1) -> Case:
    torch.manual_seed(0)
    # the balancing loss reads all layers at once, so that they are no repeat
    model = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}[name](
        layers, output_router_logits=layers == 1
    )
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


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=list(ROUTINGS))
def test_the_grouped_kernel_of_bfloat16(routing: list[int]) -> None:
    torch.manual_seed(0)
    x, weight, gradient = (torch.randn(*s).bfloat16() for s in ((12, 16), (4, 24, 16), (12, 24)))
    ids, turned = torch.tensor(routing), weight.transpose(1, 2)
    for first in (0, 2):
        found = expert_mm(x, turned[first:], ids, first=first)
        assert_close(found.float(), expert_mm(x.float(), turned[first:].float(), ids, first=first), "rows", 0.02)
        found = expert_mm_weight(x, gradient, ids, 4 - first, first=first)
        exact = expert_mm_weight(x.float(), gradient.float(), ids, 4 - first, first=first)
        assert_close(found.float(), exact, "weights", 0.02)


# ---- the graph


@of_runs
def test_rows_stand_in_the_order_of_tokens(name: str, implementation: str, mesh: dict[str, int]) -> None:
    """No sort is left, no lookup of weights, and nothing that has no rule."""
    made = planner(name, implementation, mesh)
    ops = [node.op for node in made.captured.graph.nodes]
    assert ops.count(MM) == 4 and ops.count(MM_WEIGHT) == 2
    assert ops.count(TO) == 2 and ops.count(FROM) == 2
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
    check(made, made.program(made.plan(solver=solver, cost="serial")), name, implementation)


@pytest.mark.parametrize(("name", "implementation"), [("mixtral", "grouped_mm"), ("qwen3_moe", "batched_mm")])
def test_the_solvers_plan(name: str, implementation: str) -> None:
    made = planner(name, implementation, LINE)
    check(made, made.program(made.plan(solver="dp", cost="serial")), name, implementation)


@pytest.mark.parametrize("seed", range(2))
@of_runs
def test_random_plans(name: str, implementation: str, mesh: dict[str, int], seed: int) -> None:
    made = planner(name, implementation, mesh)
    program = codegen(made.space, plans.random_assignment(made.space, seed))
    check(made, program, name, implementation)
    check(made, bucket(program), name, implementation)


def travels(site: Site) -> bool:
    """Whether rows of this site may be with their experts."""
    return any(choice.routes for choices in site.choices.values() for choice in choices)


def by_expert(made: Planner, axes: Sequence[int]) -> Assignment:
    """A random plan whose products all split their experts on these axes."""
    width = len(made.space.mesh)

    def wanted(site: Site) -> list[SiteChoice] | None:
        if site.node is None or site.node.op not in (MM, MM_WEIGHT):
            choices = [SiteChoice(option) for option in product(*(site.choices[n] for n in made.space.mesh))]
            return [c for c in choices if not any(on_axis.routes for on_axis in c.axes)] if travels(site) else None
        assert site.rule is not None
        number, experts = next((i, f.size) for i, f in enumerate(site.rule.factors) if f.name == "e")
        by_expert = AxisChoice("S", number, experts)
        return [SiteChoice(tuple(by_expert if axis in axes else REPLICATED for axis in range(width)))]

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


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_with_biases(implementation: str) -> None:
    made = planner("gpt_oss", implementation, GRID)
    ops = [node.op for node in made.space.graph.nodes]
    assert ops.count(MM) == 4 and ops.count(MM_WEIGHT) == 2 and not any(".sort" in op or "grouped" in op for op in ops)
    for assignment in (
        *(made.assignment(made.plan(solver=solver, cost="serial")) for solver in ("fsdp", "megatron")),
        *(by_expert(made, axes) for axes in ((1,), (0, 1))),
        *(plans.random_assignment(made.space, seed) for seed in range(3)),
    ):
        check(made, codegen(made.space, assignment), "gpt_oss", implementation)


def routed(made: Planner, axis: int, seed: int = 0) -> Assignment:
    """A random plan in which rows travel to their experts along an axis, wherever they may. Along other axes
    all ranks have the same rows, or, for odd seeds, each its own."""
    mesh, generator = made.space.mesh, random.Random(seed)

    def fits(choice: SiteChoice) -> bool:
        rows = choice.axes[axis].factor
        others = [part for a, part in enumerate(choice.axes) if a != axis]
        return all(part.splits and part.factor == rows if seed % 2 else part == REPLICATED for part in others)

    def wanted(site: Site) -> list[SiteChoice] | None:
        travelling = [choice for choice in site.choices.get(mesh[axis], ()) if choice.routes]
        if not travelling:
            return None
        per_axis = [travelling if a == axis else site.choices[n] for a, n in enumerate(mesh)]
        choices = [choice for choice in map(SiteChoice, product(*per_axis)) if fits(choice)]
        return generator.sample(choices, len(choices))

    return plans.random_assignment(made.space, seed, wanted=wanted)


@pytest.mark.parametrize("seed", range(2))
@of_runs
def test_rows_travel_to_experts(name: str, implementation: str, mesh: dict[str, int], seed: int) -> None:
    made = planner(name, implementation, mesh)
    program = codegen(made.space, routed(made, axis=seed % len(mesh), seed=seed))
    kinds = [kind for kind, _, _ in program.collectives()]
    assert kinds.count("exchange") == 4  # there and back, in forward and in backward
    check(made, program, name, implementation)
    check(made, bucket(program), name, implementation)


def test_layers_that_repeat() -> None:
    made = planner("mixtral", "grouped_mm", LINE, layers=6)
    assert made.space.repeats
    check(made, made.program(made.plan(solver="ddp")), "mixtral", "grouped_mm", layers=6)


# ---- however the rows fall


class Mixture(nn.Module):
    """Experts with the routing as an input: [tokens, width], [tokens, experts a token] -> [tokens, width]."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)
        self.first = nn.Sequential(nn.Linear(width, 2 * inner), nn.GELU(), nn.Linear(2 * inner, width))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        target = x.sin()
        x = self.first(x)
        rows, wanted = x.repeat_interleave(ids.shape[1], 0), ids.reshape(-1)
        inner = F.gelu(torch.bmm(self.up[wanted], rows[..., None]))
        made = torch.bmm(self.down[wanted], inner)
        return F.mse_loss(x + made.reshape(*ids.shape, -1).sum(1), target)


TOKENS, EXPERTS = 512, 32
FALLS = ("evenly", "all to one", "to the first half", "to the last rank's, and one token to the first's")


def mixture() -> Case:
    """Batch `step` is routed as FALLS[step] says. Weights are most of what there is, so that experts pay."""
    torch.manual_seed(0)

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(EXPERTS, (TOKENS, 2), generator=generator)
        match FALLS[step]:
            case "all to one":
                ids = torch.full_like(ids, 5)
            case "to the first half":
                ids //= 2
            case "to the last rank's, and one token to the first's":
                ids = EXPERTS - 1 - ids // 4
                ids[17] = 0
        return (torch.randn(TOKENS, 64, generator=generator), ids), {}

    return Case(model=Mixture(EXPERTS, 64, 128), batch=batch)


@pytest.mark.parametrize(("mesh", "axis"), [(LINE, 0), (GRID, 0), (GRID, 1)], ids=str)
def test_rows_travel_however_they_fall(mesh: dict[str, int], axis: int) -> None:
    made = mixture()
    planner = Planner(made.model, mesh, made.args)
    program = codegen(planner.space, routed(planner, axis, axis))
    assert "exchange" in [kind for kind, _, _ in program.collectives()]
    for step in range(len(FALLS)):
        assert_same(simulated(program, planner.captured, made, step), models.eager(made, step))


def test_a_split_of_experts_beats_replicas_and_moves_no_more_than_rows() -> None:
    """Where weights are most of what there is, the solver splits the experts and sends the rows: in exchanges
    of two rows a token, each rank's share of them, and no gradient of an expert's weights is reduced."""
    made = mixture()
    planner = Planner(made.model, LINE, made.args)
    best = planner.plan(solver="dp", cost="serial")
    assert best.parameters["up"].in_use == (("S(0)",),) and best.parameters["down"].in_use == (("S(0)",),)
    for preset in ("ddp", "fsdp"):
        assert best.objective_seconds < 0.6 * planner.plan(solver=preset).objective_seconds
    found = planner.program(best).collectives()
    share = 2 * TOKENS // 4 * 64 * 4
    assert [size for kind, _, size in found if kind == "exchange"] == [share] * 4
    others = [size for kind, _, size in found if kind != "exchange"]
    dense = sum(p.numel() * 4 for p in made.model.first.parameters())
    experts = made.model.up.numel() * 4
    assert all(size <= dense for size in others) and dense < experts / 4


def test_a_mixtral_with_experts_split_beats_its_replicas() -> None:
    torch.manual_seed(0)
    model = mixtral(1, hidden_size=128, intermediate_size=256, num_local_experts=16).double()

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(models.VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(step))
        return (), {"input_ids": ids, "labels": ids}

    made = Case(model=model, batch=batch)
    planner = Planner(made.model, LINE, made.args, made.kwargs)
    best = planner.plan(solver="dp", cost="serial")
    for name in ("gate_up_proj", "down_proj"):
        assert best.parameters[f"model.layers.0.mlp.experts.{name}"].in_use == (("S(0)",),)
    for preset in ("ddp", "fsdp"):
        assert best.objective_seconds < 0.6 * planner.plan(solver=preset).objective_seconds
    program = planner.program(best)
    assert [kind for kind, _, _ in program.collectives()].count("exchange") == 4
    assert_same(simulated(program, planner.captured, made), reference(made))


# ---- rows that fall unevenly, as a person expects them to


def counted(step: int) -> list[int]:
    """The rows of each expert."""
    (_, ids), _ = mixture().batch(step)
    return torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()


def rows_of_fullest(step: int, ranks: int) -> int:
    each = EXPERTS // ranks
    return max(sum(counted(step)[first : first + each]) for first in range(0, EXPERTS, each))


@pytest.mark.parametrize("step", range(len(FALLS)), ids=lambda step: FALLS[step])
@pytest.mark.parametrize(("mesh", "axis"), [(LINE, 0), (GRID, 1)], ids=str)
def test_shapes_are_those_of_the_fullest_rank(mesh: dict[str, int], axis: int, step: int) -> None:
    """By the counts of a run, or by one number of them; and a plan that expects rows to fall so runs however they
    fall."""
    made, ranks = mixture(), [*mesh.values()][axis]
    most = rows_of_fullest(step, ranks)
    for imbalance in (counted(step), most * ranks / (2 * TOKENS)):
        planner = Planner(made.model, mesh, made.args, imbalance=imbalance)
        program = codegen(planner.space, routed(planner, axis))
        there = next(n for n in program.forward if n.collective == "exchange")
        assert program.metas[there.name].shape[0] == most
        products = [n for n in program.nodes if n.op in (MM, MM_WEIGHT)]
        flops = sum(rule_of(call_of(n, program.metas)).flops for n in products)
        assert flops == pytest.approx(len(products) * 2.0 * most * 64 * 128)
    for other in range(len(FALLS)):
        assert_same(simulated(program, planner.captured, made, other), models.eager(made, other))


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 9.0])
@of_runs
def test_timelines_and_accounts_count_the_work_of_ones_own_experts(
    name: str, implementation: str, mesh: dict[str, int], imbalance: float
) -> None:
    """Experts are split, and rows stay where they are: a rank multiplies those that want its experts."""
    made = case(name, implementation)
    planner = Planner(made.model, mesh, made.args, made.kwargs, imbalance=imbalance)
    split = codegen(planner.space, by_expert(planner, (len(mesh) - 1,)))
    ranks = [*mesh.values()][-1]
    of_whole, of_split = (
        sum(rule_of(call_of(n, steps.metas)).flops for n in steps.nodes if n.op in (MM, MM_WEIGHT))
        for steps in (planner.captured.graph, split)
    )
    assert of_split == pytest.approx(of_whole * min(imbalance, ranks) / ranks)
    check(planner, split, name, implementation)


def test_a_plan_says_how_rows_fall_and_chooses_by_it(tmp_path: Path) -> None:
    """Where one rank gets most rows, they no longer travel; the file, and what is asked of it, keep that."""
    made = mixture()
    serial = partial(autopar.plan, made.model, LINE, made.args, solver="dp", cost="serial")
    found = {imbalance: serial(imbalance=imbalance) for imbalance in (1.0, 4.0)}
    assert "rows are taken to fall evenly on them (imbalance=1.0)" in " ".join(str(found[1.0]).split())
    assert "the fullest rank is taken to have 4 times the mean" in " ".join(str(found[4.0]).split())
    assert "imbalance" not in json.dumps(found[1.0].to_json())
    assert found[1.0].objective_seconds < found[4.0].objective_seconds
    assert "X" in str(found[1.0].decisions) and "X" not in str(found[4.0].decisions)
    found[4.0].save(tmp_path / "plan.json")
    again = autopar.read_plan(tmp_path / "plan.json", made.model, made.args)
    assert again.training.imbalance == (4.0,) and again.objective_seconds == found[4.0].objective_seconds
    counts = serial(imbalance=counted(2))
    assert "rows fall on them as counted (imbalance=[...])" in " ".join(str(counts).split())
    dense = autopar.plan(made.model.first, LINE, made.args[:1], loss_fn=torch.Tensor.sum)
    assert "imbalance" not in str(dense)


@pytest.mark.parametrize("wrong", [0.9, -1.0, True, "1.5", None, float("inf"), float("nan"), [], [1], [0, 0], [1, -1]])
def test_an_imbalance_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"imbalance is .*: give the rows of the fullest rank over the mean"):
        autopar.plan(nn.Linear(8, 8), LINE, (torch.zeros(8, 8),), loss_fn=torch.Tensor.sum, imbalance=wrong)


def test_an_imbalance_of_other_experts_or_of_none_is_refused() -> None:
    made = mixture()
    with pytest.raises(ValueError, match="imbalance gives the rows of 3 experts, and the model has 32"):
        autopar.plan(made.model, LINE, made.args, imbalance=[1, 2, 3])
    with pytest.raises(ValueError, match="imbalance is given, and the model has no experts"):
        autopar.plan(made.model.first, LINE, made.args[:1], loss_fn=torch.Tensor.sum, imbalance=2.0)


# ---- real ranks


def train_mixture(mesh: dict[str, int]) -> dict[str, Any]:
    """Gradients of a step for each way that rows may fall, and the kinds of collectives that ran."""
    made = mixture()
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = autopar.parallelize(made.model, axes, made.args, solver="dp", cluster=models.without_latency())
    steps = []
    for step in range(len(FALLS)):
        module.zero_grad()
        loss = module(*made.batch(step)[0])
        loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters() if isinstance(p.grad, DTensor)}
        steps.append((loss.detach(), gradients))
    return {"steps": steps, "kinds": [kind for kind, _, _ in module.program.collectives()]}


def test_real_ranks() -> None:
    made = mixture()
    references = [models.eager(made, step) for step in range(len(FALLS))]
    for found in run(4, train_mixture, LINE):
        assert found["kinds"].count("exchange") == 4
        for (loss, gradients), reference in zip(found["steps"], references, strict=True):
            assert_close(loss, next(iter(reference.outputs.values())), "loss")
            assert gradients.keys() == reference.gradients.keys()
            for name, gradient in gradients.items():
                assert_close(gradient, reference.gradients[name], name)
