"""Overlap changes the order of a program, never to a longer step, and nothing else."""

from __future__ import annotations

import models
import pytest
import torch
from pairwise import pairwise

from autopar.cost.streams import timeline
from autopar.ir.program import Program
from autopar.ir.text import parsed_program
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.overlap import overlap
from autopar.runtime.simulate import Simulated, simulate_step

CASES = ("gpt2 untied", "llama of 4 layers", "gpt2 of odd sizes", "mlp with loss_fn")
MESHES = ({"a": 4}, {"dp": 2, "tp": 2}, {"a": 2, "b": 2, "c": 2})
SOLVERS = ("ddp", "fsdp", "megatron", "megatron_sp", "atp")

planner = models.planners(models.case)


def lines(made: Program) -> list[str]:
    return [i.outputs[0] for i in made.forward]


def values(made: Program) -> Simulated:
    return simulate_step(made, {}, {"x": torch.arange(4.0)}, {})


def test_what_a_collective_does_not_need_runs_under_it() -> None:
    made = parsed_program(
        """
        mesh dp=2
        x = input x: float32[4] R

        forward
        w = aten.mul.Tensor(x, x)
        v = aten.mul.Tensor(w, w)
        g = aten.neg.default(x)
        r = collective.all_reduce(g, 'sum', dp)
        d = collective.wait(r)
        y = aten.mul.Tensor(d, v)

        output y = y: float32[4] R
        """
    )
    moved = overlap(made)
    assert lines(moved) == ["g", "r", "w", "v", "d", "y"]
    assert torch.equal(values(moved).outputs["y"], values(made).outputs["y"])


def test_no_more_runs_under_a_collective_than_it_takes() -> None:
    """Gradients made long before stay where they are: reductions wait for them, too."""
    made = parsed_program(
        """
        mesh dp=2
        x = input x: float32[4] R

        forward
        u = aten.mul.Tensor(x, x)
        s = collective.all_reduce(u, 'sum', dp)
        v = aten.mul.Tensor(x, x)
        w = aten.mul.Tensor(v, v)
        g = aten.neg.default(x)
        r = collective.all_reduce(g, 'sum', dp)
        d = collective.wait(r)
        e = collective.wait(s)
        t = aten.mul.Tensor(d, w)
        y = aten.mul.Tensor(t, e)

        output y = y: float32[4] R
        """
    )
    seconds = {"u": 1.0, "v": 1.0, "w": 1.0, "g": 1.0, "s": 5.0, "r": 0.5}
    assert lines(overlap(made, seconds)) == ["u", "s", "v", "g", "r", "w", "d", "e", "t", "y"]
    assert lines(overlap(made, seconds | {"r": 1.5})) == ["u", "s", "g", "r", "v", "w", "d", "e", "t", "y"]
    assert lines(overlap(made)) == ["g", "r", "u", "s", "v", "w", "d", "e", "t", "y"]


def test_nothing_is_waited_for_sooner_and_collectives_keep_their_order() -> None:
    made = parsed_program(
        """
        mesh dp=2
        x = input x: float32[4] R

        forward
        r = collective.all_reduce(x, 'sum', dp)
        w = aten.mul.Tensor(x, x)
        d = collective.wait(r)
        s = collective.all_reduce(d, 'sum', dp)
        u = aten.mul.Tensor(x, w)
        e = collective.wait(s)
        t = collective.all_reduce(e, 'sum', dp)
        f = collective.wait(t)
        y = aten.mul.Tensor(f, u)

        output y = y: float32[4] R
        """
    )
    assert lines(overlap(made)) == lines(made)


def test_what_starts_ahead_of_its_reader_starts_no_further_ahead() -> None:
    made = parsed_program(
        """
        mesh dp=2
        x = input x: float32[4] R

        forward
        w = aten.mul.Tensor(x, x)
        r = collective.all_reduce(x, 'sum', dp)
        g = aten.neg.default(x)
        s = collective.all_reduce(g, 'sum', dp)
        e = collective.wait(s)
        d = collective.wait(r)
        y = aten.mul.Tensor(d, e)

        output y = y: float32[4] R
        """
    )
    assert lines(overlap(made)) == ["g", "s", "w", "r", "e", "d", "y"]


def test_what_is_long_under_way_moves_nothing() -> None:
    made = parsed_program(
        """
        mesh dp=2
        x = input x: float32[4] R

        forward
        w = aten.mul.Tensor(x, x)
        r = collective.all_reduce(x, 'sum', dp)
        s = collective.all_reduce(w, 'sum', dp)
        d = collective.wait(r)
        e = collective.wait(s)
        y = aten.mul.Tensor(d, e)

        output y = y: float32[4] R
        """
    )
    assert lines(overlap(made)) == lines(made)


@pytest.mark.parametrize(("name", "mesh", "solver"), pairwise(CASES, MESHES, SOLVERS), ids=str)
def test_steps_are_the_same_bit_for_bit_and_no_longer(name: str, mesh: dict[str, int], solver: str) -> None:
    made = planner(name, mesh)
    before = bucket(codegen(made.space, made.assignment(made.plan(solver=solver, cost="serial"))))
    after = overlap(before)
    assert sorted(after.collectives()) == sorted(before.collectives())
    assert {id(i) for i in after.backward} == {id(i) for i in before.backward}
    step, expected = (models.simulated(p, made.captured, models.case(name)) for p in (after, before))
    for found, wanted in ((step.outputs, expected.outputs), (step.gradients, expected.gradients)):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted) and found.keys() == wanted.keys()
    seconds, longest = (timeline(p, made.cluster).seconds for p in (after, before))
    assert seconds <= longest * (1 + 1e-9)
