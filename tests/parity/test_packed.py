"""Packed documents: what a packing's borders are is read of each batch, and no plan mixes documents."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, eager, simulated
from torch import nn

from autopar import testing
from autopar.ir.program import Program
from autopar.ops.attention import RING
from autopar.ops.rule import call_of
from autopar.ops.sdpa import ATTENTION, ATTENTION_BACKWARD
from autopar.passes.space.choices import SiteChoice
from autopar.planning.planner import Planner
from autopar.testing.plans import random_assignment

transformers = pytest.importorskip("transformers")

TOKENS, DOCUMENTS, VOCABULARY = 64, 4, 32
MODELS = ("Llama", "Qwen3")


def borders(seed: int) -> list[int]:
    return [0, *sorted(random.Random(seed).sample(range(2, TOKENS - 2), DOCUMENTS - 1)), TOKENS]


def packing(seed: int) -> dict[str, torch.Tensor]:
    """One row of documents: positions begin anew with each, and its first token is no label."""
    starts = borders(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, starts[:-1]] = -100
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(starts)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions.unsqueeze(0)}


@functools.cache
def packed(name: str) -> Case:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return Case(model=model, batch=lambda step: ((), packing(step)))


def rings(planner: Planner, site: Any) -> Any:
    """A ring, where attention may have one."""
    names = [factor.name for factor in site.rule.factors] if site.rule is not None else []
    if RING not in names:
        return None
    (ranks,) = planner.space.mesh
    chosen = [SiteChoice((c,)) for c in site.choices[ranks] if c.splits and c.factor == names.index(RING)]
    return [c for c in chosen if planner.space.option(site, c) is not None]


@functools.cache
def program(name: str, plan: str) -> tuple[Planner, Program]:
    made = packed(name)
    planner = Planner(made.model, {"cp": 4} if plan == "ring" else {"a": 2, "b": 2}, made.args, made.kwargs)
    if plan == "dp":
        return planner, planner.program(planner.plan())
    if plan == "ring":
        assignment = random_assignment(planner.space, 0, functools.partial(rings, planner))
    else:
        assignment = random_assignment(planner.space, int(plan))
    return planner, planner.writer.written(assignment)


def one_by_one(model: nn.Module, seed: int) -> torch.Tensor:
    """The mean loss of a packing's documents, each run alone."""
    ids, starts = packing(seed)["input_ids"], borders(seed)
    parts = [ids[:, start:end] for start, end in itertools.pairwise(starts)]
    total = sum(F.cross_entropy(model(input_ids=part).logits[0, :-1], part[0, 1:], reduction="sum") for part in parts)
    return torch.as_tensor(total / (TOKENS - DOCUMENTS))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", ["dp", "ring", "1", "2", "3"])
def test_documents_are_what_they_are_alone(name: str, plan: str) -> None:
    """Loss and gradients, of packings that the example was none of."""
    made = packed(name)
    planner, written = program(name, plan)
    for seed in range(1, 6):
        expected = eager(made, seed)
        assert_same(simulated(written, planner.captured, made, seed), expected, 1e-4)
        alone = one_by_one(made.model, seed)
        torch.testing.assert_close(expected.outputs["['loss']"], alone.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_document_that_changes_changes_no_other(name: str) -> None:
    made = packed(name)
    planner, written = program(name, "ring")
    start, end = borders(7)[1:3]

    def logits(changed: bool) -> torch.Tensor:
        batch = packing(7)
        if changed:
            batch["input_ids"][0, start:end] = (batch["input_ids"][0, start:end] + 1) % VOCABULARY
        other = Case(model=made.model, batch=lambda step: ((), batch))
        return simulated(written, planner.captured, other).outputs["['logits']"]

    before, after = logits(False), logits(True)
    kept = torch.ones(TOKENS, dtype=torch.bool)
    kept[start:end] = False
    torch.testing.assert_close(before[:, kept], after[:, kept], rtol=0, atol=0)
    assert not torch.allclose(before[:, ~kept], after[:, ~kept])


@pytest.mark.parametrize("name", MODELS)
def test_a_packing_needs_no_mask_of_scores(name: str) -> None:
    """Documents are operands of every call, and nothing in the graph, or in a program, is queries by keys."""
    planner, written = program(name, "ring")
    graph = planner.captured.graph
    calls = [call_of(node, graph.metas) for node in graph.nodes if node.op in (ATTENTION, ATTENTION_BACKWARD)]
    assert len(calls) == 4 and all(call.argument("is_causal") for call in calls)
    assert all(call.argument("attn_mask") is None and call.argument("query_documents") is not None for call in calls)
    values = *graph.metas.values(), *written.metas.values()
    squares = (TOKENS, TOKENS), (TOKENS // 4, TOKENS)
    assert not [meta for meta in values if len(meta.shape) == 4 and meta.shape[-2:] in squares]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}], ids=str)
def test_random_plans_on_two_to_four_ranks(name: str, mesh: dict[str, int]) -> None:
    """Of a row that three ranks do not divide too."""
    made = packed(name)
    planner = Planner(made.model, mesh, made.args, made.kwargs)
    programs = [planner.program(planner.plan(solver="megatron"))] if mesh == {"tp": 2} else []
    for seed in range(3):
        assignment = random_assignment(planner.space, seed)
        programs += [] if assignment is None else [planner.writer.written(assignment)]
    for seed, each in enumerate(programs, 1):
        assert_same(simulated(each, planner.captured, made, seed), eager(made, seed), 1e-4)


def test_eager_is_equal_on_the_ranks_of_check() -> None:
    made = packed("Llama")
    assert testing.check(made.model, {"dp": 2, "tp": 2}, kwargs=packing(3), plans=3).equal


def test_memory_grows_as_tokens_do_and_not_as_scores() -> None:
    def peak(tokens: int) -> int:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        positions = (torch.arange(tokens) % (tokens // 4)).unsqueeze(0)
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
        return Planner(packed("Llama").model, {"cp": 2}, kwargs=batch).plan(solver="dp").bytes

    assert peak(8192) < 2.1 * peak(4096)
