"""Stretches in chunks of the batch: equal in value, and shorter where they are taken."""

from __future__ import annotations

import models
import pytest
import torch
from programs import LAB
from ranks import run

from autopar.cluster.library import named_cluster
from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.ir.text import parsed_program
from autopar.passes.codegen.program import codegen
from autopar.passes.flow import LOWERINGS
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.chunk import CHUNKING
from autopar.passes.lower.lowering import Target
from autopar.passes.lower.overlap import overlap
from autopar.runtime.agreement import coordinate_of
from autopar.runtime.compiled import compile
from autopar.runtime.execute import process_groups
from autopar.runtime.placements import local_slice
from autopar.runtime.simulate import simulate_step


def block(rows: int, width: int = 4) -> Program:
    """relu(relu(sum of x) w), summed over ranks, each with its own w: a stretch between two all-reduces."""
    meta = f"float32[{rows}, {width}]"
    return parsed_program(
        f"""
        mesh dp=2
        w = parameter w: float32[{2 * width}, {width}] S(0%{2 * width})
        x = input x: {meta} R

        forward
        a = collective.all_reduce(x, 'sum', dp)
        b = collective.wait(a)
        c = aten.relu.default(b)
        d = aten.mm.default(c, w)
        e = collective.all_reduce(d, 'sum', dp)
        f = collective.wait(e)
        g = aten.relu.default(f)

        output g = g: {meta} R
        """
    )


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_of_a_stretch_make_the_same(chunks: int) -> None:
    given = block(8)
    made = CHUNKING.everywhere(given, chunks)
    assert [i.op for i in made.forward].count("collective.all_reduce") == 2 * chunks
    x, w = torch.randn(8, 4), torch.randn(8, 4)
    step, expected = (simulate_step(p, {"w": w}, {"x": x}) for p in (made, given))
    torch.testing.assert_close(step.outputs["g"], expected.outputs["g"])
    assert all("_chunk" in i.outputs[0] for i in made.forward if i.collective)


def outputs_on_a_rank(programs: list[Program], w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Of each program, on two of gloo's ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    found = []
    for given in programs:
        part = local_slice(w, given.inputs[0].layout, given.mesh, coordinate_of(mesh))
        (made,), _ = compile(given, process_groups(mesh)).forward([part, x])
        assert made is not None
        found.append(made)
    return found


def test_chunks_make_the_same_on_gloo() -> None:
    programs = [block(8), CHUNKING.everywhere(block(8), 2), CHUNKING.everywhere(block(8), 4)]
    w, x = torch.randn(8, 4), torch.randn(8, 4)
    expected = simulate_step(programs[0], {"w": w}, {"x": x}).outputs["g"]
    for found in run(2, outputs_on_a_rank, programs, w, x):
        for made in found:
            torch.testing.assert_close(made, expected)


def test_a_collective_of_one_chunk_is_under_the_product_of_another() -> None:
    order = [
        i.outputs[0] for i in CHUNKING.everywhere(block(8), 2).forward if i.collective or "mm" in i.op or "wait" in i.op
    ]
    early = ["a_chunk0", "b_chunk0", "a_chunk1", "d_chunk0", "e_chunk0"]
    assert order == [*early, "b_chunk1", "d_chunk1", "e_chunk1", "f_chunk0", "f_chunk1"]


def test_uneven_batches_are_left_alone_by_name() -> None:
    given = block(7, 3)
    assert CHUNKING.everywhere(given, 2) == given
    assert "dim 0 of x, 7 long, is not to be cut in 2 equal parts" in CHUNKING.why_whole(given, 2)["a"]


def test_chunks_are_taken_where_the_step_gets_shorter_and_only_there() -> None:
    cluster = named_cluster("a100-pcie")
    small, large = block(8), block(32768, 8192)
    assert LOWERINGS["chunk"].on(small, Target(cluster=cluster)) is small
    taken = LOWERINGS["chunk"].on(large, Target(cluster=cluster))
    assert timeline(taken, cluster).seconds < 0.9 * timeline(large, cluster).seconds


def test_like_stretches_on_other_axes_are_looked_at_apart() -> None:
    """On a slow axis a chunk's transfer hides; on a fast one, where it takes processors, it does not pay."""
    stretch = """
        x{0} = aten.neg.default({2})
        a{0} = collective.all_reduce(x{0}, 'sum', {1})
        b{0} = collective.wait(a{0})
        c{0} = aten.relu.default(b{0})
        d{0} = aten.mm.default(c{0}, w)
        e{0} = collective.all_reduce(d{0}, 'sum', {1})
        f{0} = collective.wait(e{0})
        g{0} = aten.relu.default(f{0})
        """
    given = parsed_program(
        f"""
        mesh a=2, b=2
        x = input x: float32[1024, 512] R R
        w = parameter w: float32[512, 512] R R

        forward
        {stretch.format(0, "a", "x")}
        {stretch.format(1, "b", "g0")}
        output g1 = g1: float32[1024, 512] R R
        """
    )
    made = LOWERINGS["chunk"].on(given, Target(cluster=named_cluster(LAB)))
    in_chunks = {i.args[-1]: "_chunk" in i.outputs[0] for i in made.forward if i.collective}
    assert in_chunks == {0: True, 1: False}


@pytest.mark.parametrize(("name", "solver"), [("llama", "megatron")])
def test_models_compute_the_same(name: str, solver: str) -> None:
    planner = models.planners(models.case)(name, {"a": 4})
    plain = codegen(planner.space, planner.assignment(planner.plan(solver=solver, cost="serial")))
    given = overlap(bucket(plain))
    made = CHUNKING.everywhere(given, 2)
    assert len(made.collectives()) > len(given.collectives())
    step, expected = (models.simulated(p, planner.captured, models.case(name)) for p in (made, given))
    models.assert_same(step, expected)
