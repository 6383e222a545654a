"""Wang, SUMMA and Cannon: the product of whole matrices, by other collectives than slices use."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from dataflows import (
    DATAFLOWS,
    Dataflow,
    Writer,
    differences_on_a_rank,
    equal,
    forward_product,
    operands,
    product,
)
from ranks import run

from autopar.cluster.library import named_cluster
from autopar.cost.streams import timeline
from autopar.extensions import scoped
from autopar.ir.graph import TensorMeta
from autopar.ir.program import Program
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.lowering import Target
from autopar.passes.lower.slice import SLICING
from benchmarks.rivals import RIVALS, cannon, register, summa, wang


def kinds(program: Program) -> Counter[str]:
    """Of forward."""
    return Counter(i.collective for i in program.forward if i.collective)


@pytest.mark.parametrize("flow", DATAFLOWS)
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (1, 4)], ids=str)
def test_wang_takes_one_direction_apart(flow: Dataflow, mesh: tuple[int, int]) -> None:
    given = product(flow, mesh, 16)
    made = wang(given)
    equal(flow, made, *operands(16))
    found = kinds(made)
    assert found["rotate"] in {size - 1 for size in mesh if size > 1}
    assert sum(found.values()) - found["rotate"] == sum(kinds(given).values()) - 1


@pytest.mark.parametrize("flow", DATAFLOWS)
@pytest.mark.parametrize("mesh", [(2, 2), (4, 4), (4, 2), (1, 4)], ids=str)
def test_summa_broadcasts_and_reduces_shard_by_shard(flow: Dataflow, mesh: tuple[int, int]) -> None:
    given = product(flow, mesh, 16)
    made = summa(given)
    equal(flow, made, *operands(16))
    found = kinds(made)
    assert found["broadcast"] + found["reduce"] >= min(size for size in mesh if size > 1)
    if mesh[0] == mesh[1]:
        assert set(found) <= {"broadcast", "reduce"} and sum(found.values()) == 2 * mesh[0]


@pytest.mark.parametrize("size", [2, 4])
def test_cannon_shifts_both_operands_on_square_meshes(size: int) -> None:
    made = cannon(product("output", (size, size), 16))
    equal("output", made, *operands(16))
    assert kinds(made) == {"rotate": 2 * size}, "a skew of each, and a step for every shard but the first"


@pytest.mark.parametrize("mesh", [(4, 2), (1, 4)], ids=str)
def test_cannon_leaves_other_meshes_alone(mesh: tuple[int, int]) -> None:
    given = product("output", mesh, 16)
    assert cannon(given) == given


def test_cannon_leaves_operands_alone_that_come_along_one_axis() -> None:
    """As where the third of three axes splits both: there is nothing to skew the one by."""
    writer = Writer((2, 2), torch.float32)
    writer.metas.update(a=TensorMeta((4, 4), torch.float32), b=TensorMeta((4, 4), torch.float32))
    writer.mm(writer.gathered("a", 0, 0), writer.gathered("b", 0, 0))
    given = replace(product("output", (2, 2), 8), forward=tuple(writer.written), backward=(), metas=writer.metas)
    assert cannon(given) == given


def test_a_plan_takes_what_was_registered_where_it_is_quicker() -> None:
    cluster = named_cluster("tpu-v4")
    small, large = (forward_product("output", (4, 4), n, n, n) for n in (64, 16384))
    with scoped():
        for name in RIVALS:
            register(name)
        for name in RIVALS:
            assert LOWERINGS[name].on(small, Target(cluster=cluster)) is small
        made = LOWERINGS["wang"].on(large, Target(cluster=cluster))
        assert kinds(made)["rotate"] and timeline(made, cluster).seconds < timeline(large, cluster).seconds
    assert not set(RIVALS) & set(LOWERINGS)


def test_the_print_says_who_made_it() -> None:
    for name, lowering in RIVALS.items():
        assert f"_{name}1 = " in str(lowering(product("output", (2, 2), 16)))


def test_slices_and_rivals_are_the_product_on_gloo() -> None:
    lowerings = {f"in {n} slices": partial(SLICING.everywhere, parts=n) for n in (1, 2, 3, 4, 8)} | dict(RIVALS)
    cases = {
        f"{flow} on {mesh}, {name}": (flow, lowering(product(flow, mesh, 96)))
        for flow in DATAFLOWS
        for mesh in ((2, 2), (1, 4))
        for name, lowering in lowerings.items()
        if mesh == (2, 2) or name in ("in 4 slices", "wang")
    }
    for found in run(4, differences_on_a_rank, cases, 96):
        assert found == {name: pytest.approx(0.0, abs=1e-3) for name in cases}
