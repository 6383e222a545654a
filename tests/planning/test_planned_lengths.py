"""Lengths that are planned together: one placement of parameters at rest, which is the best for their mixture."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import models
import pytest
import torch

import autopar
from autopar.ir.layout import Layout
from autopar.planning.lengths import planned_at, planned_together, planners_of, resized
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.reading import options_of
from autopar.planning.request import Request, lengths_of

MESH, LONG, SHORT = {"dp": 4}, 2048, 16
BATCH = models.tokens(0, batch=8, sequence=128, vocabulary=512)[1]


@cache
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.llama(2, hidden_size=128, intermediate_size=344, vocab_size=512)


@cache
def planners(**options: Any) -> dict[int, Planner]:
    """Of the two lengths."""
    request = Request(lengths=(SHORT, LONG), **options)

    def of(length: int) -> Planner:
        args, kwargs = resized(((), BATCH), length)
        return Planner(model(), MESH, args, kwargs, request=request)

    return planners_of(request.shares, of)


def placed(by: dict[int, Planner], plans: dict[int, Plan]) -> dict[str, Layout]:
    """Where all plans have parameters at rest, which is the same."""
    first, *others = [by[n].layouts(plan) for n, plan in plans.items()]
    assert all(other == first for other in others)
    return first


def test_the_placement_is_that_of_the_mixture() -> None:
    """Of what either length wants, the one whose mean step is shorter, whatever the shares."""
    by, chosen = planners(), []
    wanted = [planner.layouts(planner.plan()) for planner in by.values()]
    steps = [{n: planned_at(p, n, rest).seconds for n, p in by.items()} for rest in wanted]
    for long in (1.0, 0.0, 0.002):
        shares = {LONG: long, SHORT: 1 - long}
        plans = planned_together(by, Request(lengths=shares))
        chosen.append(placed(by, plans))
        mean = sum(shares[n] * plan.seconds for n, plan in plans.items())
        assert mean <= 1.005 * min(sum(shares[n] * seconds for n, seconds in of.items()) for of in steps)
        said = plans[LONG].lengths
        assert [(one.length, one.share) for one in said] == [(n, shares[n]) for n in (LONG, SHORT)]
        assert [one.seconds for one in said] == [plans[n].seconds for n in (LONG, SHORT)]
    assert chosen[:2] == wanted and wanted[0] != wanted[1], "what long batches want is not what short ones do"


def test_every_length_keeps_the_limit() -> None:
    free = planners()[LONG].plan(memory_limit_bytes=math.inf)
    by = planners(memory_limit_bytes=0.9 * free.bytes)
    plans = planned_together(by, by[LONG].asked)
    placed(by, plans)
    assert all(plan.bytes <= 0.9 * free.bytes for plan in plans.values())


def test_a_plan_says_its_lengths_and_is_read_again(tmp_path: Any) -> None:
    plan = autopar.plan(model(), MESH, kwargs=BATCH, lengths={64: 3, 256: 1}, solver="ddp")
    assert plan.provenance is not None and "[8, 256]" in str(plan.provenance.inputs), "the longest is the plan's own"
    assert [(one.length, one.share) for one in plan.lengths] == [(256, 0.25), (64, 0.75)]
    said = " ".join(str(plan).split())
    assert "(75% of batches): " in said and "in the mean" in said
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read.lengths == plan.lengths and options_of(read)["lengths"] == {256: 0.25, 64: 0.75}
    again = autopar.read_plan(read, model(), kwargs=BATCH)
    assert again.seconds == plan.seconds and again.lengths == plan.lengths, "for batches of the longest length"
    assert autopar.simulate(model(), MESH, kwargs=BATCH, plan=plan).seconds == pytest.approx(plan.seconds)
    assert "lengths" not in autopar.plan(model(), MESH, kwargs=BATCH, solver="ddp").to_json()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((), r"lengths is \(\) \(tuple\): give the lengths"),
        ((8, -1), "give the lengths"),
        (8, "give the lengths"),
        ({8: -0.5}, "each with the share of batches"),
        ({8: 0}, "each with the share of batches"),
        ("512", "give the lengths"),
    ],
)
def test_what_are_no_lengths(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(lengths=lengths)


def test_lengths_are_typed_as_text() -> None:
    assert lengths_of("512,1024") == {512: 1, 1024: 1} and lengths_of("8=0.75,16=0.25") == {8: 0.75, 16: 0.25}
    for text in ("8;9", "8=", "8=1=2", ""):
        with pytest.raises(ValueError, match=r"--lengths is .*: write lengths"):
            lengths_of(text)


def test_an_input_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths has 4, and no input has a dim 1"):
        resized((torch.ones(3),), 4)
    one = torch.arange(6).reshape(2, 3)
    (longer, same, other), _ = resized(((one, one, torch.ones(2, 5)), None), 4)
    assert longer.tolist() == [[0, 1, 2, 0], [3, 4, 5, 3]] and same is longer and other.shape == (2, 5)
