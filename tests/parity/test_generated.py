"""Generated programs: each is equal to eager under every plan that is tried, or refused with a reason.

`benchmarks/generated.py` runs thousands. A program that failed there is kept below, with its plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from generator import (
    END,
    KINDS,
    OPERATORS,
    ROUNDING,
    START,
    STRIDES,
    Program,
    built,
    drawn,
    draws,
    eager,
    shrunk,
    why_invalid,
    without,
)
from generator_kinds import filled, sections
from generator_programs import FAILURES, MODULE, Hang, Programmed, again, one_rank, outcomes, row, within


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    """A process group of one rank for all programs, which may warn of what they do."""
    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def failures(program: Program, seed: int) -> str:
    """What failed, and the program."""
    failed = [outcome for outcome in outcomes(program, seed, effort=0) if outcome.kind in FAILURES]
    return "\n".join([*map(str, failed), program.source]) if failed else ""


@pytest.mark.parametrize("kind", [*KINDS, *START, *END])
def test_a_program_of_each_kind(kind: str) -> None:
    """Among operators alone, so that nothing else is refused."""
    assert not failures(drawn(1, must=kind, only=OPERATORS, most=2), len(kind))


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_a_program_of_any_kinds(seed: int) -> None:
    assert not failures(drawn(seed, most=4), seed)


# ----------------------------------------------------------------------------------------------------- what failed once

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""

TAIL = """

def make():
    torch.manual_seed(0)
    return Model().double()


def batch(step):
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn({shape}, dtype=torch.float64, generator=g){suffix})
"""


@dataclass(frozen=True)
class Found:
    """A program: the lines of its model, what it is called with, and the plans under which it failed."""

    name: str
    model: str
    shape: tuple[int, ...]
    plans: tuple[tuple[Mapping[str, int], str], ...]
    more: str = ""
    suffix: str = ""

    @property
    def program(self) -> Program:
        tail = TAIL.format(shape=self.shape, suffix=self.suffix)
        return Program(HEAD + self.model.strip("\n") + "\n" + self.more + tail)


FOUND = (
    Found(
        "no operator at all",
        """
    def forward(self, x):
        return x
""",
        (4, 3, 4),
        (({"a": 2, "b": 2}, "dp"), ({"a": 3}, "random 0")),
        suffix=".requires_grad_()",
    ),
    Found(
        "a parameter that forward writes and that the optimizer then steps",
        """
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return (x * self.weight).square().mean()
""",
        (1, 1, 4),
        (({"a": 2, "b": 2}, "dp"), ({"a": 3}, "random 0"), ({"a": 1}, MODULE)),
    ),
    Found(
        "a random operator whose numbers nobody reads, before dropouts",
        """
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            made = F.dropout(layer(x), 0.3)
            if number == 2:
                torch.rand_like(made)
            x = x + made
        return x.square().mean()
""",
        (4, 3, 6),
        (({"a": 2, "b": 2}, "dp"), ({"a": 4}, "random 0")),
    ),
    Found(  # a tangent that is zero has no memory, and what reads draws looked at its address
        "a random operator whose numbers nobody reads, beside a derivative forward",
        """
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        y = self.layer(x)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(y, torch.ones_like(y))
            slope = torch.autograd.forward_ad.unpack_dual(self.layer(dual).tanh()).tangent
        torch.rand_like(y)
        return (y + slope).square().mean()
""",
        (4, 3, 6),
        (({"a": 2, "b": 2}, "dp"),),
    ),
    Found(  # their gradients are additions that belong to no layer, and a step is estimated from few layers
        "layers that repeat in forward alone",
        """
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for number in range(6):
            with torch.set_grad_enabled(number > 0):
                made = x + torch.rand_like(x)
            x = x + made
        return (x * x.detach().cos()).mean()
""",
        (1, 1, 4),
        (({"a": 2, "b": 3}, "dp"),),
    ),
    Found(  # their parameters could be gathered again, which is no choice of a copy then
        "a limit on layers of which nothing can be computed again",
        """
        self.layers = nn.ModuleList(Layer(number not in (1, 5, 7), number in range(2, 5)) for number in range(9))
        for module in list(self.modules())[::2]:
            module.training = False

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.tanh().sum() / 10
""",
        (3, 1, 2),
        (({"a": 2, "b": 3}, "within 0.85"),),
        """

class Layer(nn.Module):
    def __init__(self, trains, second):
        super().__init__()
        self.linear, self.inner, self.outer = nn.Linear(2, 6), nn.Linear(6, 2), nn.Linear(2, 2)
        self.table = nn.Embedding(5, 2)
        self.requires_grad_(trains)
        self.second = second

    def forward(self, x):
        if self.second:
            return x + self.table.weight.index_select(0, torch.arange(x.shape[1]) * 3 % 5)
        y = self.outer(self.inner(self.linear(x).tanh())).clone()
        y.index_add_(2, torch.arange(2).flip(0), x, alpha=0.5)
        return y
""",
    ),
    Found(
        "a preset where one run ends and the next begins",  # the border is one decision, and legal in both
        """
        self.layers = nn.ModuleList(Layer(number in range(4, 8), 0.5 if number == 4 else 1.0) for number in range(12))
        self.head = nn.Linear(3, 5)
        self.eval()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        labels = torch.arange(x[..., 0].numel()) % 5
        labels[::3] = -100
        return F.cross_entropy(self.head(x).flatten(0, -2), labels, label_smoothing=0.1)
""",
        (8, 4, 3),
        (({"a": 3}, "megatron_sp"),),
        """

class Layer(nn.Module):
    def __init__(self, second, factor):
        super().__init__()
        self.second, self.factor = second, factor
        if not second:
            self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        if self.second:
            return x.softmax(1) * x * self.factor
        y = x.clone()
        y.view(-1)[: x.numel() // 2].zero_()
        return self.linear(self.norm(y)) * self.factor
""",
    ),
    Found(  # padding is no divisor, and whole numbers have no shares of a bias
        "whole numbers",
        """
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        n = 9 * (torch.arange(7) % 4 + 1)
        by, table = torch.arange(7) % 3 + 1, torch.arange(56).reshape(7, 8) % 4 + 1
        parts = n // by + n % by + torch.fmod(n, by) + torch.div(n, by, rounding_mode="trunc")
        product = torch.addmm(torch.ones(5, dtype=torch.int64), n[:, None] + table, table.T @ table[:, :5])
        return (self.layer(x) * (parts[:, None] + product) * 1e-4).pow(2).mean()
""",
        (7, 6),
        tuple((mesh, f"random {k}") for mesh in ({"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}) for k in range(3)),
    ),
    Found(
        "an equilibrium: what crosses to the next step in forward crosses back in backward",
        """
        self.first, self.step = nn.Linear(8, 2), nn.Linear(2, 2)
        self.last = nn.Sequential(nn.RMSNorm(2), nn.Linear(2, 2))

    def forward(self, x):
        h = torch.cat(self.first(x).split([1, 1], -1)[::-1], -1)
        gated = F.silu(h)
        gate = gated.grad_fn.next_functions[0][0]
        gate.register_hook(lambda gs, _: tuple(None if g is None else 0.5 * g for g in gs))
        h = h + gated
        with torch.no_grad():
            u = torch.zeros_like(h)
            for _ in range(5):
                u = (0.3 * self.step(u) + h).tanh()
        u = (0.3 * self.step(u) + h).tanh()
        v = u.detach().requires_grad_()
        w = (0.3 * self.step(v) + h.detach()).tanh()

        def solved(g):
            out = g
            for _ in range(3):
                out = torch.autograd.grad(w, v, out, retain_graph=True)[0] + g
            return out

        u.register_hook(solved)
        with torch.enable_grad():
            at = u.detach().requires_grad_(True)
            (toward,) = torch.autograd.grad(self.last(at), at, grad_outputs=torch.ones_like(u))
        return u - 0.1 * toward
""",
        (3, 8),
        tuple(({"a": 2, "b": 3}, f"within {part}") for part in (0.9, 0.7)),
        more="""

def loss_fn(output):
    return F.mse_loss(output, output.detach().cos())
""",
    ),
)


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.name)
def test_what_failed_once(found: Found) -> None:
    told = [again(found.program, mesh, plan) for mesh, plan in found.plans]
    assert [outcome.kind for outcome in told] == ["right"] * len(told), told


# ------------------------------------------------------------------------------------------------------- the generator


def test_a_seed_is_a_program() -> None:
    assert drawn(7).source == drawn(7).source != drawn(8).source


def test_fields_of_a_text() -> None:
    from random import Random

    fields = {"x": "h1", "y": "h2", "w": "6"}
    assert filled("{y} = {x}.view({w})", fields, Random(0)) == "h2 = h1.view(6)"
    assert filled("{y} = {k:=sin|sin}({x}) + {k}", fields, Random(0)) == "h2 = sin(h1) + sin"
    assert filled('{y} = {"a": {{x}.sin()|{x}.sin()}}', fields, Random(0)) == 'h2 = {"a": h1.sin()}'
    assert filled("{body:x}", fields, Random(0)) == "{body:h1}"
    assert sections("--init\nself.a = 1\n--forward\n{y} = {x}")["init"] == ["self.a = 1"]


def test_a_program_without_some_kinds_is_one_too() -> None:
    program = drawn(3)
    assert program.tree is not None
    rest = built(without(program.tree, frozenset(KINDS)))
    assert not why_invalid(rest) and not rest.kinds & KINDS.keys()


MISREAD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(self.first(x)).LAYOUT.sin()


def loss_of(output):
    return output.square().mean()


def make():
    torch.manual_seed(0)
    return Model().double()


def batch(step):
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(5, 6, 4, 1, dtype=torch.float64, generator=g))
"""


@pytest.mark.parametrize("layout, reason", [("clone()", ""), ("transpose(1, 3).contiguous()", STRIDES)])
def test_a_program_says_nothing_where_a_kernel_misreads_strides(layout: str, reason: str) -> None:
    """The backward of a batch norm takes such a gradient for another on the CPU."""
    assert why_invalid(Program(MISREAD.replace("LAYOUT", layout))) == reason


CHOOSING = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        x = x - x.mean(0)
        return torch.cond(CHOICE, lambda a: a.sin(), lambda a: a.cos(), (x,)).square().mean()


def make():
    torch.manual_seed(14)
    return Model().double()


def batch(step):
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(5, 4, dtype=torch.float64, generator=g))
"""


@pytest.mark.parametrize("choice, reason", [("x[0, 0] > 0", ""), ("x.sum() > 0", ROUNDING)])
def test_a_program_says_nothing_where_rounding_chooses(choice: str, reason: str) -> None:
    """The sum of what the mean was taken from is zero but for rounding."""
    assert why_invalid(Program(CHOOSING.replace("CHOICE", choice))) == reason


def test_eager_trains_after_a_program_was_looked_at() -> None:
    """Dynamo runs the branches of torch.cond, and never again those that it once skipped under a mode."""
    program = Program(CHOOSING.replace("CHOICE", "x[0, 0] > 0"))
    assert not draws(program) and not why_invalid(program)
    assert eager(program)[-1].gradients
    assert again(program, {"a": 2}, MODULE).kind == "right"


def test_what_fails_is_shrunk_to_the_statement_that_does() -> None:
    program = drawn(2, must="a gradient penalty")
    small = shrunk(program, lambda smaller: "create_graph=True" in smaller.source)
    assert small.kinds == {"rows", "square", "a gradient penalty"} and not why_invalid(small)


def test_every_program_trains_in_eager() -> None:
    for seed in range(10):
        for step in eager(drawn(seed)):
            assert step.loss.isfinite() and step.gradients


def test_a_difference_is_seen() -> None:
    """Of a number, and of a gradient that eager has not."""
    for number, other in (("* 2", "* 2.001"), (".detach() + self.layer(x)", " + self.layer(x).detach()")):
        ours, theirs = (
            Found(
                "",
                f"""
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return (self.first(x){text}).square().mean()
""",
                (4, 4),
                (),
            ).program
            for text in (number, other)
        )
        trial = Programmed(ours)
        found = row(trial, {"a": 2}, "random 0")
        assert found is not None and found.equal
        vars(trial)["expected"] = Programmed(theirs).expected
        found = row(trial, {"a": 2}, "random 0")
        assert found is not None and not found.equal


def test_a_program_that_does_not_end_is_stopped() -> None:
    with pytest.raises(Hang), within(0.05):
        while True:
            pass


def test_a_program_shares_no_state_with_another() -> None:
    program = drawn(0, must="a function with state")
    one, other = (eager(program)[-1].loss for _ in range(2))
    assert torch.equal(one, other)
    before = {**vars(torch.nn.Module)}
    assert "type(self).k" in drawn(600856).source
    assert vars(torch.nn.Module) == before
