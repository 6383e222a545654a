"""Every random operator: the same numbers on every plan, of the distribution that torch draws from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from models import Case, assert_same, simulated
from test_random import LIMIT, deviations, unevenness
from torch import distributions, nn

from autopar.ir import variates
from autopar.ir.randomness import keys
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner
from autopar.runtime.simulate import simulate_step

NOISE = torch.Generator().manual_seed(7)

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multinomial of one": lambda h: h.gather(1, torch.multinomial(h.softmax(-1), 1)),
    "multinomial with replacement": lambda h: h.gather(1, torch.multinomial(h.softmax(-1), 20, replacement=True)),
    "multinomial without replacement": lambda h: h.gather(1, torch.multinomial(h.softmax(-1), 5)),
    "multinomial of a vector": lambda h: h.mean(0)[torch.multinomial(h.mean(0).softmax(-1), 30, replacement=True)],
    "Categorical": lambda h: (lambda d: d.log_prob(d.sample((3,))))(distributions.Categorical(logits=h)),
    "OneHotCategorical": lambda h: distributions.OneHotCategorical(logits=h).sample() * h,
    "poisson": lambda h: torch.poisson(h.exp() * 5) * h,
    "Gamma": lambda h: distributions.Gamma(h.exp(), 1.5).rsample() * h,
    "Beta": lambda h: distributions.Beta(h.exp(), h.sigmoid()).rsample() * h,
    "Dirichlet": lambda h: distributions.Dirichlet(h.exp()).rsample() * h,
    "StudentT": lambda h: distributions.StudentT(h.exp() + 3).rsample().tanh() * h,
    "geometric_": lambda h: torch.empty_like(h).geometric_(0.3) * h,
    "cauchy_": lambda h: torch.empty_like(h).cauchy_(1.0, 2.0).atan() * h,
    "log_normal_": lambda h: torch.empty_like(h).log_normal_(0.0, 0.5) * h,
    "random_": lambda h: torch.empty_like(h, dtype=torch.long).random_(2, 9) * h,
    "random_ of the dtype": lambda h: torch.empty_like(h, dtype=torch.uint8).random_() * h,
    "randint_like": lambda h: torch.randint_like(h, 5) * h,
    "normal of tensors": lambda h: torch.normal(h.detach(), h.detach().exp()) * h,
    "hard gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True) * h,
    "a generator for randn": lambda h: torch.randn(h.shape, generator=NOISE) * h,
    "a generator for multinomial": lambda h: h.gather(1, torch.multinomial(h.softmax(-1), 2, generator=NOISE)),
    "a generator for randperm": lambda h: h[torch.randperm(len(h), generator=NOISE)][:5],
    "a generator for uniform_": lambda h: torch.empty_like(h).uniform_(-1, 1, generator=NOISE) * h,
}


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.into, self.draw = nn.Linear(16, 12, dtype=torch.float64), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.into(x)).sum()


def drawing(name: str) -> Case:
    torch.manual_seed(0)
    batch = torch.randn(12, 16, dtype=torch.float64)
    return Case(model=Drawing(DRAWS[name]), batch=lambda _: ((batch,), {}))


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_the_same_on_every_plan(name: str) -> None:
    made = drawing(name)
    state = NOISE.get_state()
    one = Planner(made.model, {"a": 1}, made.args, made.kwargs)
    assert torch.equal(NOISE.get_state(), state), "capture draws from no generator"
    expected = simulated(one.program(one.plan(solver="dp", cost="serial")), one.captured, made)
    for mesh in ({"a": 2, "b": 2}, {"a": 3}):
        several = one.on(mesh, None)
        assert not several.space.without_rule
        programs = [several.program(several.plan(solver="dp", cost="serial"))]
        programs.append(bucket(codegen(several.space, plans.random_assignment(several.space, seed=1))))
        for program in programs:
            assert_same(simulated(program, several.captured, made), expected, 1e-10)


# ------------------------------------------------------------------------------------- distributions


class Sample(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


def sample(draw: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """What a forward that draws gives, on two ranks."""
    planned = Planner(Sample(draw), {"a": 2}, (x,))
    program = planned.program(planned.plan(solver="dp", cost="serial"))
    (output,) = simulate_step(program, planned.captured.constants, {"args.0": x}, {}, seed=seed).outputs.values()
    return output


def test_multinomial_draws_in_proportion() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 1e-3, 0.0])
    chances = weights / weights.sum()
    for draw, count in (
        (lambda w: torch.multinomial(w, 40_000, replacement=True), 40_000),
        (lambda w: torch.multinomial(w.expand(40_000, 7), 1).flatten(), 40_000),
        (lambda w: torch.multinomial(w.expand(40_000, 7), 3)[:, 0], 40_000),
    ):
        drawn = sample(draw, weights)
        assert drawn.dtype == torch.int64 and drawn.shape == (count,)
        for category, chance in enumerate(chances.tolist()):
            hits = drawn == category
            assert not hits.any() if chance == 0 else deviations(hits, chance) < LIMIT


def test_multinomial_without_replacement_draws_one_after_the_other() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    drawn = sample(lambda w: torch.multinomial(w.expand(40_000, 4), 4), weights)
    assert bool((drawn.sort(-1).values == torch.arange(4)).all())
    for first, second in ((3, 0), (0, 3), (1, 2)):
        both = (drawn[:, 0] == first) & (drawn[:, 1] == second)
        chance = float(weights[first] / 10 * weights[second] / (10 - weights[first]))
        assert deviations(both, chance) < LIMIT


@pytest.mark.parametrize("rate", [0.01, 0.7, 4.0, 30.0, 2.5e4])
def test_poisson(rate: float) -> None:
    drawn = variates.poisson(keys(torch.tensor(3), 1)[0], torch.full((40_000,), rate)).double()
    most = int(rate + 12 * math.sqrt(rate) + 10)
    logs = torch.arange(most, dtype=torch.float64)
    chances = (logs * math.log(rate) - rate - torch.lgamma(logs + 1)).exp()
    for bound in (0, int(rate), int(rate + math.sqrt(rate)), int(rate - math.sqrt(rate)), int(rate + 1)):
        below = float(chances[: max(bound, 0) + 1].sum())
        if 1e-4 < below < 1 - 1e-4:
            assert deviations(drawn <= bound, below) < LIMIT
    assert abs(float(drawn.mean()) - rate) < LIMIT * math.sqrt(rate / 40_000)
    assert torch.equal(drawn, drawn.round())


def test_poisson_of_no_rate() -> None:
    drawn = variates.poisson(keys(torch.tensor(3), 1)[0], torch.tensor([0.0, -1.0, math.nan, math.inf]))
    assert drawn[0] == 0 and bool(drawn[1:].isnan().all())


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 3.0, 200.0])
def test_standard_gamma(shape: float) -> None:
    """By its distribution function, which makes the numbers even in [0, 1)."""
    parameter = torch.full((40_000,), shape, dtype=torch.float64)
    drawn = variates.standard_gamma(keys(torch.tensor(4), 1)[0], parameter)
    even = torch.special.gammainc(parameter, drawn)
    assert unevenness((even * 64).long().clamp_max(63), 64) < LIMIT


def kolmogorov(drawn: torch.Tensor, distribution: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The largest distance of the distribution functions, times the root of the count; above 2.2 once in 10^4."""
    even = distribution(drawn.double()).sort().values
    steps = torch.arange(1, len(even) + 1) / len(even)
    return float((even - steps).abs().max()) * math.sqrt(len(even))


@pytest.mark.parametrize(
    ("draw", "distribution"),
    [
        (lambda x: torch.empty_like(x).cauchy_(1.0, 2.0), distributions.Cauchy(1.0, 2.0).cdf),
        (lambda x: torch.empty_like(x).log_normal_(0.5, 0.7), distributions.LogNormal(0.5, 0.7).cdf),
        (lambda x: torch.empty_like(x).exponential_(3.0), distributions.Exponential(3.0).cdf),
    ],
    ids=["cauchy_", "log_normal_", "exponential_"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continuous_numbers(
    draw: Callable[[torch.Tensor], torch.Tensor], distribution: Callable[[torch.Tensor], torch.Tensor], dtype: Any
) -> None:
    assert kolmogorov(sample(draw, torch.zeros(40_000, dtype=dtype)), distribution) < 2.2


def test_geometric_counts_tries() -> None:
    drawn = sample(lambda x: torch.empty_like(x).geometric_(0.3), torch.zeros(40_000))
    assert drawn.min() == 1
    for tries in (1, 2, 5):
        assert deviations(drawn == tries, 0.3 * 0.7 ** (tries - 1)) < LIMIT


def test_random_covers_its_range() -> None:
    drawn = sample(lambda x: torch.empty_like(x, dtype=torch.int64).random_(2, 9), torch.zeros(40_000))
    assert unevenness(drawn - 2, 7) < LIMIT
    every = sample(lambda x: torch.empty_like(x, dtype=torch.uint8).random_(), torch.zeros(40_000))
    assert unevenness(every.long(), 256) < LIMIT


# ----------------------------------------------------------------------------------------- generators


class Seeding(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.noise = inside, torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            self.noise.manual_seed(3)
        assert isinstance(self.noise, torch.Generator)
        return x * torch.rand(x.shape, generator=self.noise)


def test_a_generator_of_the_module_is_left_as_it_was() -> None:
    model = Seeding(inside=False)
    capture(model, (torch.ones(4),))
    assert torch.equal(model.noise.get_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Seeding(inside=True), "seeds a torch.Generator"),
        (Sample(lambda x: x * torch.rand(4, generator=torch.Generator().manual_seed(3))), "makes a torch.Generator"),
    ],
    ids=["seeded", "made"],
)
def test_numbers_that_are_the_same_in_every_step_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=f"forward {message}.*draw them once"):
        capture(model, (torch.ones(4),))


@pytest.mark.parametrize(
    ("draw", "op"),
    [
        (lambda x: torch.binomial(x + 10, x.sigmoid()), "aten.binomial.default"),
        (lambda x: x * torch.randint(-(2**62), 2**62, x.shape), "aten.randint.low"),
    ],
    ids=["binomial", "a range beyond 2^62"],
)
def test_what_cannot_be_drawn_by_index_is_refused_by_name(draw: Any, op: str) -> None:
    with pytest.raises(ValueError, match=f"random operators that cannot be made parallel are in .*{op}"):
        Planner(Sample(draw), {"a": 2}, (torch.ones(4),))
