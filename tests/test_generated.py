"""A fixed sample of generated models: every program is equal to eager, or refused with a reason.

`benchmarks/generated.py` runs thousands. What failed there stands below with its number of programs that are tried.
"""

from __future__ import annotations

import pytest
from generator import ODDITIES, OPERATORS, STATES, TABLES, Spec, build, chain, specs
from generator_programs import FAILURES, Hang, Outcome, limited, named, outcomes, within
from hypothesis import HealthCheck, Phase, given, seed, settings

from autopar.testing.trial import Trial

FOUND: tuple[Spec, ...] = (
    Spec(family="chain", shape=(4, 3, 4), parts=(), loss="tensor", mode="input"),  # no operator at all
    # a parameter that forward writes and that the optimizer then steps
    Spec(family="state", shape=(1, 1, 4), parts=(), state="clipped", steps=3),
    # a random operator whose numbers nobody reads, before dropouts
    Spec(family="layers", shape=(4, 3, 6), parts=(("mlp", 1), ("dropout", 0)), copies=(7,), odd="unread", at=(2,)),
)
"""Specs that failed, and hold now."""


def failures(spec: Spec, number: int, meshes: int) -> list[Outcome]:
    return [o for o in outcomes(spec, number, meshes=meshes) if o.kind in (*FAILURES, "invalid")]


@pytest.mark.parametrize("family", ["chain", "layers", "runs", "state", "image", "tokens"])
def test_a_sample_of_each_family(family: str) -> None:
    @seed(17)
    @settings(
        max_examples=3,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(specs(families=(family,)))
    def sample(spec: Spec) -> None:
        assert not failures(spec, 1, meshes=1), spec

    sample()


@pytest.mark.parametrize("spec", FOUND, ids=str)
def test_what_failed_once(spec: Spec) -> None:
    assert not failures(spec, 0, meshes=1)


def test_layers_that_repeat_in_forward_alone() -> None:
    """Their gradients are additions that belong to no layer, and a step is estimated from few layers."""
    spec = Spec(family="layers", shape=(1, 1, 4), parts=(("dropout", 3),), copies=(6,), odd="no_grad", at=(0,))
    built = build(spec)
    trial = Trial(built.model, built.args, loss_fn=built.loss_fn, steps=spec.steps)
    row = named(trial, {"a": 2, "b": 3}, "dp")
    assert row is not None and row.equal


def test_a_limit_on_layers_of_which_nothing_can_be_computed_again() -> None:
    """Their parameters could be gathered again, which is no choice of a copy then."""
    parts = (("linear", 2), ("mlp", 7), ("writes", 5))
    spec = Spec(
        family="runs", shape=(3, 1, 2), parts=parts, others=(("lookup", 6),), copies=(2, 3, 4), odd="frozen",
        at=(1, 5, 7), loss="field", mode="partly",
    )  # fmt: skip
    built = build(spec)
    trial = Trial(built.model, built.args, loss_fn=built.loss_fn, steps=spec.steps)
    assert limited(trial, {"a": 2, "b": 3}, 0.85).equal


def test_a_preset_where_one_run_ends_and_the_next_begins() -> None:
    """The border is one decision, and legal in both."""
    parts, others = (("writes", 7), ("norm", 0), ("linear", 2)), (("softmax", 1),)
    spec = Spec(
        family="runs", shape=(8, 4, 3), parts=parts, others=others, copies=(4, 4, 4), odd="constant", at=(4,),
        loss="classes", mode="eval",
    )  # fmt: skip
    built = build(spec)
    trial = Trial(built.model, built.args, loss_fn=built.loss_fn, steps=spec.steps)
    row = named(trial, {"a": 3}, "megatron_sp")
    assert row is not None and row.equal


def test_every_operator_has_a_shape_that_it_takes() -> None:
    """An operator that nothing is made of would be left out of all models without a word."""
    for name in OPERATORS:
        for k in range(8):
            assert any(len(chain(((name, k),), shape)[0]) for shape in ((3, 4, 6), (2, 3, 4, 6))), f"{name} {k}"


def trains(spec: Spec) -> None:
    built = build(spec)
    loss = built.model(*built.args)
    loss.backward()
    assert loss.isfinite(), spec


def test_every_model_trains_in_eager() -> None:
    for odd in ODDITIES:
        spec = Spec(family="layers", shape=(2, 3, 4), parts=(("mlp", 1),), copies=(6,), odd=odd, at=(2,))
        trains(spec)
    for state in STATES:
        trains(Spec(family="state", shape=(2, 3, 4), parts=(), state=state))
    for table in TABLES:
        trains(Spec(family="tokens", shape=(2, 3, 4), parts=(("mlp", 1),), state=table))


def test_the_same_spec_makes_the_same_model() -> None:
    spec = Spec(family="chain", shape=(2, 3, 4), parts=(("mlp", 1), ("dropout", 0)), mode="eval")
    one, other = build(spec), build(spec)
    assert one.model(*one.args).equal(other.model(*other.args))


def test_a_program_that_does_not_end_is_stopped() -> None:
    with pytest.raises(Hang), within(0.05):
        while True:
            pass
