"""Programs as they run: of what runs in parts the quickest is taken, the same in all programs of a plan."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from autopar.cost.bucketed import bucket_bytes
from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.lowering import Target
from autopar.planning import writer
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner

LAYERS = 9

NEAR = 2.5e-3
"""Parts are chosen on a few copies, where what is in no layer weighs more (`writer.LOOKED_AT`)."""


@cache
def planner() -> Planner:
    """Of a GPT-2 of wide layers, from a model on meta."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(
            vocab_size=32000,
            n_positions=1024,
            n_embd=8192,
            n_layer=LAYERS,
            n_head=64,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        ids = torch.zeros(8, 1024, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        return Planner(GPT2LMHeadModel(config).to(torch.bfloat16), {"tp": 4}, (), batch, cluster="a100-pcie")


@cache
def planned(preset: str) -> Plan:
    return planner().plan(solver=preset)


def parts(program: Program) -> Counter[str]:
    """How many collectives run in parts, by the number of the layer that they stand in."""
    named = [i for i in (*program.forward, *program.backward) if i.collective]
    return Counter(
        i.module.split(".h.")[1].partition(".")[0]
        for i in named
        if ".h." in i.module and any(label in i.outputs[0] for label in ("_slice", "_chunk"))
    )


@pytest.mark.parametrize("preset", ["megatron", "megatron_sp"])
def test_what_is_found_on_few_copies_is_written_in_all(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = planner(), planned(preset)
    assignment = made.assignment(plan)
    program = made.writer.written(assignment)
    in_layer = parts(program)
    assert len(in_layer) == LAYERS
    assert len({in_layer[str(number)] for number in range(1, LAYERS - 1)}) == 1, in_layer

    segment = made.writer.segment_program(assignment, plan.bucket_bytes)
    assert set(parts(segment).values()) <= set(in_layer.values()), "what is measured runs in the same parts"
    assert parts(segment).total() > 0

    other = made.on(made.mesh, made.cluster)
    monkeypatch.setattr(writer, "LOOKED_AT", LAYERS)
    whole = other.writer.written(assignment)
    few, all_ = (timeline(p, made.cluster).seconds for p in (program, whole))
    assert few == pytest.approx(all_, rel=NEAR)


@pytest.mark.parametrize("preset", ["megatron", "megatron_sp"])
def test_the_quickest_of_slices_and_chunks_is_taken(preset: str) -> None:
    made = planner()
    assignment = made.assignment(planned(preset))
    cluster = made.cluster
    target = Target(cluster=cluster, axis_bytes=tuple(map(bucket_bytes, made.space.redistributor.links)))
    joined = LOWERINGS["bucket"].on(codegen(made.space, assignment), target)
    sliced, chunked = (LOWERINGS[name].on(joined, target) for name in ("slice", "chunk"))
    both = LOWERINGS["chunk"].on(sliced, target)
    seconds = [timeline(p, cluster).seconds for p in (joined, sliced, chunked, both)]
    taken = timeline(made.writer.written(assignment), cluster).seconds
    assert taken == pytest.approx(min(seconds), rel=NEAR)
    assert taken < 0.99 * seconds[0]


@pytest.mark.parametrize("preset", ["megatron", "megatron_sp"])
def test_a_plan_says_what_was_rewritten_in_its_program(preset: str) -> None:
    made, plan = planner(), planned(preset)
    assert "{at=" in plan.rewrites, "some collectives run in parts"
    assert made.program(plan, plan.rewrites) == made.program(plan)
    assert made.program(plan, "") == made.writer.plain(made.assignment(plan))


def test_smaller_buckets_have_nothing_in_parts() -> None:
    made = planner()
    assignment = made.assignment(planned("megatron_sp"))
    assert not parts(made.writer.written(assignment, 2**20))
