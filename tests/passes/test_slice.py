"""Products in slices: equal to the product of whole matrices in every dataflow, quicker where they are taken."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import torch
from dataflows import DATAFLOWS, Dataflow, equal, operands, product
from pairwise import pairwise

from autopar.cluster.library import named_cluster
from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.lowering import Target
from autopar.passes.lower.slice import SLICING

MESHES = ((2, 2), (4, 2), (1, 4))
SLICES = (2, 3, 4, 8)


def shards(program: Program) -> int:
    return sum(i.collective in ("all_gather", "reduce_scatter") for i in (*program.forward, *program.backward))


@pytest.mark.parametrize(("flow", "mesh", "slices"), pairwise(DATAFLOWS, MESHES, SLICES), ids=str)
def test_slices_add_up_to_the_product_forward_and_backward(flow: Dataflow, mesh: tuple[int, int], slices: int) -> None:
    given = product(flow, mesh, 96)
    made = SLICING.everywhere(given, slices)
    assert shards(made) == slices * shards(given), "every collective runs in slices"
    equal(flow, made, *operands(96))


@pytest.mark.parametrize("flow", DATAFLOWS)
def test_one_slice_is_the_program_itself(flow: Dataflow) -> None:
    given = product(flow, (2, 2), 16)
    assert SLICING.everywhere(given, 1) is given
    equal(flow, given, *operands(16))


def test_where_shares_differ_both_operands_are_cut_into_the_same_blocks() -> None:
    """On 4 x 2 ranks a share of K is a half of one operand and a quarter of the other (MeshSlice, Algorithm 2)."""
    made = SLICING.everywhere(product("output", (4, 2), 32), 2)
    blocks = [i.args[1] for i in made.forward if i.op == "aten.reshape.default" and "blocks" in i.outputs[0]]
    assert blocks == [(8, 2, 2, 4)] * 2, "16 columns in 2 periods of 2 slices of 4; the 8 rows are one period"
    equal("output", made, *operands(32))


def test_the_gather_of_a_slice_is_under_way_while_the_one_before_is_multiplied() -> None:
    made = SLICING.everywhere(product("left", (2, 2), 16), 4)
    order = [i.op.split(".")[-2 if i.op.startswith("aten") else -1] for i in made.forward]
    heavy = [op for op in order if op in ("all_gather", "mm", "reduce_scatter")]
    assert heavy == ["all_gather"] + ["all_gather", "mm", "reduce_scatter"] * 3 + ["mm", "reduce_scatter"]
    names = [i.outputs[0] for i in made.forward if i.collective]
    assert all("_slice" in name for name in names), "the print says which lowering made them"


def test_uneven_extents_are_left_alone_by_name() -> None:
    given = product("left", (2, 2), 28)
    assert SLICING.everywhere(given, 8) == given
    reasons = SLICING.why_whole(given, 8)
    assert len(reasons) == 4 and all("is not to be cut in 8 equal parts" in reason for reason in reasons.values())
    assert not SLICING.why_whole(given, 7)


def test_slices_are_taken_where_the_step_gets_shorter_and_only_there() -> None:
    cluster = named_cluster("dgx-a100")
    small, large = (product("output", (2, 2), size, torch.bfloat16) for size in (64, 16384))
    assert LOWERINGS["slice"].on(small, Target(cluster=cluster)) is small
    taken = LOWERINGS["slice"].on(large, Target(cluster=cluster))
    assert timeline(taken, cluster).exposed_seconds < 0.5 * timeline(large, cluster).exposed_seconds
    assert shards(taken) > shards(large)
    assert replace(taken, forward=(), backward=(), metas={}) == replace(large, forward=(), backward=(), metas={})


@pytest.mark.parametrize(
    ("name", "mesh", "solver", "slices"),
    [("gpt2", {"a": 4, "b": 2}, "meshslice", 2)],
)
def test_models_compute_the_same(name: str, mesh: dict[str, int], solver: str, slices: int) -> None:
    planner = models.planners(models.case)(name, mesh)
    given = codegen(planner.space, planner.assignment(planner.plan(solver=solver, cost="serial")))
    made = SLICING.everywhere(given, slices)
    assert len(made.collectives()) > len(given.collectives()) + 20
    step, expected = (models.simulated(p, planner.captured, models.case(name)) for p in (made, given))
    models.assert_same(step, expected)
