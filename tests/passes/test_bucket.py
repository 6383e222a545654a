"""Bucketing changes how many collectives there are, and nothing else."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from programs import BYTES, LAB
from ranks import run
from torch import nn

from autopar import api
from autopar.cluster.library import named_cluster
from autopar.ir.graph import WAIT, Node, Ref, TensorMeta
from autopar.ir.program import Program
from autopar.ir.text import parsed_program
from autopar.passes.codegen.program import codegen
from autopar.passes.flow import LOWERINGS, Flow
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.bucketing.reductions import IN_FLIGHT
from autopar.passes.lower.lowering import Target
from autopar.planning.planner import Planner
from autopar.runtime.simulate import Simulated, simulate_step

PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp")


def ops(instructions: tuple[Node, ...]) -> list[str]:
    return [i.op.removeprefix("collective.").split(".")[-2 if i.op.startswith("aten") else -1] for i in instructions]


def reductions() -> Program:
    return parsed_program(
        """
        mesh dp=2
        x = input x: float32[4] R

        forward
        y = aten.neg.default(x)

        backward
        a = aten.mul.Tensor(x, x)
        a1 = collective.all_reduce(a, 'sum', dp)
        a2 = collective.wait(a1)
        b = aten.add.Tensor(a, x)
        b1 = collective.all_reduce(b, 'sum', dp)
        b2 = collective.wait(b1)
        c = aten.neg.default(b)
        c1 = collective.all_reduce(c, 'sum', dp)
        c2 = collective.wait(c1)

        output y = y: float32[4] R
        gradient a2 = a2: float32[4] R
        gradient b2 = b2: float32[4] R
        gradient c2 = c2: float32[4] R
        """
    )


def gathers() -> Program:
    return parsed_program(
        """
        mesh dp=2
        p = parameter p: float32[4] S(0%4)
        q = parameter q: float32[4] S(0%4)
        r = parameter r: float32[4] S(0%4)
        x = input x: float32[4] R

        forward
        y = aten.neg.default(x)
        p1 = collective.all_gather(p, dp)
        p2 = collective.wait(p1)
        z = aten.mul.Tensor(y, p2)
        q1 = collective.all_gather(q, dp)
        q2 = collective.wait(q1)
        w = aten.mul.Tensor(z, q2)
        r1 = collective.all_gather(r, dp)
        r2 = collective.wait(r1)
        o = aten.mul.Tensor(w, r2)

        output o = o: float32[4] R
        """
    )


def test_reductions_of_gradients_are_one_started_after_the_last_producer() -> None:
    found = ops(bucket(reductions()).backward)
    assert found[:3] == ["mul", "add", "neg"]
    assert found[3:] == ["reshape"] * 3 + ["cat", "all_reduce", "wait", "split_with_sizes"] + ["reshape"] * 3


def test_a_full_bucket_is_started_at_once_and_waited_for_at_the_end() -> None:
    found = ops(bucket(reductions(), limit_bytes=2 * 4 * BYTES).backward)
    assert found.index("all_reduce") > found.index("neg") > found.index("add")
    assert found.count("all_reduce") == 2
    assert found == ops(bucket(reductions(), (2 * 4 * BYTES,)).backward)
    alone = ops(bucket(reductions(), alone_bytes=1).backward)
    assert alone == ["mul", "all_reduce", "add", "all_reduce", "neg", "all_reduce", "wait", "wait", "wait"]


def test_a_reduction_that_more_than_gradients_need_stays_and_is_waited_for_late() -> None:
    given = reductions()
    extra = Node(op="aten.add.Tensor", args=(Ref("c"), Ref("a2")), outputs=("d",))
    given = replace(
        given,
        backward=(*given.backward, extra),
        metas={**given.metas, "d": given.metas["a"]},
        outputs=(*given.outputs, replace(given.outputs[-1], name="d", target="d")),
    )
    found = ops(bucket(given).backward)
    assert found[:5] == ["mul", "all_reduce", "add", "neg", "wait"]
    assert found.count("all_reduce") == 2


def test_gathers_start_ahead_of_first_use_but_not_all_at_once() -> None:
    assert ops(bucket(gathers(), alone_bytes=1).forward)[:4] == ["all_gather"] * 3 + ["neg"]
    tight = ops(bucket(gathers(), limit_bytes=2 * 4 * BYTES, alone_bytes=1).forward)
    assert tight == ["all_gather", "all_gather", "neg", "all_gather", "wait", "mul", "wait", "mul", "wait", "mul"]
    joined = ops(bucket(gathers()).forward)
    assert joined.count("all_gather") == joined.count("wait") == 1


@pytest.mark.parametrize("make", [reductions, gathers])
@pytest.mark.parametrize("limit_bytes", [1, 32, 2**20])
@pytest.mark.parametrize("alone_bytes", [1, 2**20])
def test_small_programs_compute_the_same(make: Any, limit_bytes: int, alone_bytes: int) -> None:
    given = make()
    wholes = {i.target: torch.randn(i.meta.shape) for i in given.inputs}
    bucketed = bucket(given, limit_bytes=limit_bytes, alone_bytes=alone_bytes)
    assert_same(simulate_step(given, wholes, wholes), simulate_step(bucketed, wholes, wholes))


def test_it_says_what_it_changed(caplog: pytest.LogCaptureFixture) -> None:
    flow, row, given = Flow(), LOWERINGS["bucket"], reductions()
    target = Target(cluster=named_cluster("dgx-h100"))
    with caplog.at_level(logging.INFO, "autopar"):
        adopted = flow.adopt(row, given, target)
        assert adopted is not None
        flow.lower(row, adopted, given)
    assert caplog.messages[0].startswith("bucket: gathers 25 MiB ahead, 0.")
    assert re.fullmatch(r"bucket: \+\d+ instructions, -2 all_reduce, 0\.\d\d s", caplog.messages[1])
    assert flow["bucket"] > 0


def test_bucketing_twice_changes_nothing_more() -> None:
    once = bucket(reductions())
    assert bucket(once).collectives() == once.collectives()


# --- real models


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(  # type: ignore[no-any-return]
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@cache
def captured() -> Planner:
    return Planner(llama(), {"dp": 1}, kwargs=batch())


def bytes_by_kind(program: Program) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for kind, axis, size in program.collectives():
        found[kind, axis] += size
    return found


def assert_same(one: Simulated, other: Simulated) -> None:
    for field in ("outputs", "mutations", "gradients"):
        first, second = getattr(one, field), getattr(other, field)
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=["4", "2x2"])
def test_models_compute_the_same_bit_for_bit_with_the_same_bytes(mesh: dict[str, int]) -> None:
    model, inputs = llama(), batch()
    planner = captured().on(mesh, None)
    given = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    given.update(planner.captured.constants)
    for preset in PRESETS:
        plain = codegen(planner.space, planner.assignment(planner.plan(solver=preset)))
        values = {f"kwargs.{key}": value for key, value in inputs.items()}
        expected = simulate_step(plain, given, values)
        for limits in ({}, {"limit_bytes": 20_000}, {"limit_bytes": 20_000, "alone_bytes": 6_000}, {"alone_bytes": 1}):
            bucketed = bucket(plain, **limits)
            assert bytes_by_kind(bucketed) == bytes_by_kind(plain), (preset, limits)
            assert_same(simulate_step(bucketed, given, values), expected)


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
@pytest.mark.parametrize("limit_bytes", [64, 4096, 2**20])
def test_what_reductions_under_way_hold_is_bounded(preset: str, limit_bytes: int) -> None:
    """A collective holds what it reads until it is waited for: with all waits at the end, all gradients would lie there
    whole, however they are sharded."""
    planner = captured().on({"dp": 4}, None)
    plain = planner.writer.plain(planner.assignment(planner.plan(solver=preset)), 0)
    found = bucket(plain, limit_bytes=limit_bytes)
    under_way: dict[str, int] = {}
    for instruction in found.backward:
        if instruction.op == WAIT:
            under_way.pop(instruction.inputs[0], None)
        elif instruction.collective in ("all_reduce", "reduce_scatter"):
            assert len(under_way) <= 2 or sum(under_way.values()) <= IN_FLIGHT * limit_bytes
            under_way[instruction.outputs[0]] = found.metas[instruction.inputs[0]].bytes
    assert not under_way


def test_where_nothing_hides_gradients_travel_in_few_buckets() -> None:
    """Ranks of one machine copy and add with the processors that compute: each bucket more costs a start more."""
    wide = Target(cluster=named_cluster("local"), axis_bytes=(3 * 4 * BYTES // 2,))
    lower = LOWERINGS["bucket"]
    many, few = (ops(lower.on(reductions(), replace(wide, unhidden=axes)).backward) for axes in ((), (0,)))
    assert (many.count("all_reduce"), few.count("all_reduce")) == (3, 1)
    large = replace(reductions(), metas=dict.fromkeys(reductions().metas, TensorMeta((2**18,), torch.float32)))
    assert ops(bucket(large).backward).count("all_reduce") == 1
    assert ops(bucket(large, unhidden=(0,)).backward).count("all_reduce") == 3, "each alone, without a copy"
    for cluster, axes in (("local", (0,)), ("dgx-h100", ())):
        assert captured().on({"dp": 4}, cluster).writer._target(2**20).unhidden == axes


def test_reductions_over_two_axes_travel_in_buckets_one_stage_behind_the_other() -> None:
    """Shards of bucket n cross the nodes while bucket n + 1 is scattered within; what is gathered comes last."""
    planner = captured().on({"dp": 2, "tp": 2}, LAB)
    plan = planner.plan(solver="ddp")
    plain = codegen(planner.space, planner.assignment(plan))
    found = bucket(plain, limit_bytes=8_000, alone_bytes=6_000)
    kinds = [(i.collective, i.args[-1]) for i in found.backward if i.collective]
    scattered, reduced, gathered = (("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1))
    assert set(kinds) == {scattered, reduced, gathered}
    assert kinds.count(scattered) < sum(i.collective == "reduce_scatter" for i in plain.backward)
    assert kinds.index(scattered) < kinds.index(reduced) < kinds.index(gathered)
    assert kinds.index(reduced) < len(kinds) - 1 - kinds[::-1].index(scattered), "before the last is scattered"


def test_gathers_over_two_axes_do_not_wait_for_all_of_the_first() -> None:
    """A bucket of the second axis holds what comes of one of the first, and starts among the layers before its own."""
    planner = captured().on({"dp": 2, "tp": 2}, LAB)
    plan = planner.plan(solver="fsdp")
    found = bucket(codegen(planner.space, planner.assignment(plan)), (8_000, 2**20)).forward
    first, second = (
        [k for k, i in enumerate(found) if i.collective == "all_gather" and i.args[-1] == a] for a in (0, 1)
    )
    assert len(first) > 2 and abs(len(first) - len(second)) <= 1, "the second axis alone would have one bucket"
    products = [k for k, i in enumerate(found) if i.op == "aten.mm.default"]
    assert 2 * sum(k > products[0] for k in second) > len(second), "a few are ahead of the first that is computed with"
    assert all(k < products[0] for k in first), "all that fits is under way"


def gradients_on_a_rank(preset: str) -> dict[str, float]:
    """Differences from plain eager, relative: of gradients after one backward and after two, and of the norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, inputs = llama(), batch()
    parallel = api.parallelize(model, mesh, kwargs=inputs, solver=preset)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def difference() -> float:
        pairs = zip(model.parameters(), parallel.parameters(), strict=True)
        return max(float((whole(q.grad) - p.grad).norm() / p.grad.norm()) for p, q in pairs)

    def step(set_to_none: bool) -> None:
        for module in (model, parallel):
            module.zero_grad(set_to_none=set_to_none)
            module(**inputs).loss.backward()

    found = {}
    step(True)
    found["once"] = difference()
    for module in (model, parallel):
        module(**inputs).loss.backward()
    found["twice"] = difference()
    step(False)
    step(False)
    found["zeroed"] = difference()
    norms = [whole(nn.utils.clip_grad_norm_(module.parameters(), 0.1)) for module in (model, parallel)]
    found["norm"] = float(abs(norms[1] - norms[0]) / norms[0])
    found["clipped"] = difference()
    return found


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_gradients_that_share_a_bucket_add_up_zero_and_clip_on_their_own(preset: str) -> None:
    for found in run(2, gradients_on_a_rank, preset):
        assert found == {key: pytest.approx(0.0, abs=1e-5) for key in found}


def kept_gradients(set_to_none: bool) -> None:
    """Gradients are views of a bucket, which is no other step's: what is kept of one step stays, and what is written
    into one gradient stays in it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    inputs = batch()
    parallel = api.parallelize(llama(), mesh, kwargs=inputs, solver="ddp")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, fused=True)
    parallel(**inputs).loss.backward()
    first, *others = (p.grad.to_local() for p in parallel.parameters())
    assert first.untyped_storage().nbytes() > first.nbytes, "a view of a bucket"
    before = [g.clone() for g in others]
    next(parallel.parameters()).grad.mul_(3)
    assert all(map(torch.equal, others, before))
    kept = [g.clone() for g in (first, *others)]
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    if not set_to_none:  # zeroed and added to in place, as on one device
        assert not any(g.any() for g in (first, *others))
        parallel(**inputs).loss.backward()
        for g, p in zip((first, *others), parallel.parameters(), strict=True):
            assert g.any() and torch.equal(g, p.grad.to_local())
        return
    parallel(**inputs).loss.backward()
    optimizer.step()
    assert all(map(torch.equal, (first, *others), kept))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_somebody_keeps_are_those_of_their_step(set_to_none: bool) -> None:
    run(2, kept_gradients, set_to_none)
