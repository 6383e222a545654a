"""Random numbers: a function of the seed of the step, the operator and the global index, whatever the plan."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import models
import plans
import pytest
import torch
import torch.nn.functional as F
from dropout import CASES, case, dropping, mesh_id
from models import Case, assert_same, simulated
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import testing
from autopar.compat.neutral import plain_attention
from autopar.ir import randomness
from autopar.ir.graph import TensorMeta
from autopar.ir.randomness import keys
from autopar.ops.sdpa import ATTENTION
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.seeds import seeds
from autopar.planning.planner import Planner

# ---------------------------------------------------------------------------------- what a number is

WORD = 0xFFFFFFFF


def hashed(key: torch.Tensor, index: int, word: int) -> int:
    """The 32 bits of one element, in Python's integers."""
    first, second = (int(k) & WORD for k in key)
    x = (index * 0x9E3779B9 + first + word * 0x3C6EF372) & WORD
    x ^= x >> 16
    x = (x * 0x7FEB352D + second + word * 0x1B873593 + (index >> 32) * 0xC13FA9A9) & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def splitmix(seed: int, count: int) -> list[int]:
    found, mask = [], 2**64 - 1
    for i in range(1, count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -(2**63)])
def test_keys_are_those_of_splitmix(seed: int) -> None:
    found = [(int(low) & WORD) | (int(high) & WORD) << 32 for low, high in keys(torch.tensor(seed), 5)]
    assert found == splitmix(seed, 5)


PARTS = [
    ((1000,), (1,), 5),
    ((100,), (3,), 2**32 - 50),
    ((7, 5, 3), (100, 10, 1), 3),
    ((3, 200), (1000, 2), 7),
    ((90, 2), (2**31, 1), 1),
]


@pytest.mark.parametrize("chunk", [7, 64, 1 << 16])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]} from {part[2]}")
def test_bits_are_a_function_of_key_and_index(
    part: tuple[tuple[int, ...], tuple[int, ...], int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of any size, and past 2^32 elements."""
    monkeypatch.setitem(randomness._CHUNK, "cpu", chunk)
    box, strides, base = part
    key = keys(torch.tensor(3), 2)[1]
    steps = itertools.product(*map(range, box))
    indices = [base + sum(i * s for i, s in zip(step, strides, strict=True)) for step in steps]
    for word in (0, 2):
        found: list[int] = []
        for start, stop, bits in randomness._chunks(key, randomness._Part(*part), word):
            assert start == len(found) and stop == start + bits.numel()
            found += [b & WORD for b in bits.tolist()]
        assert found == [hashed(key, index, word) for index in indices]


def bits_of(key: torch.Tensor, count: int) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int32)
    for start, stop, bits in randomness._chunks(key, randomness._Part((count,), (1,), 0), 0):
        made[start:stop] = bits
    return made


def deviations(hits: torch.Tensor, chance: float = 0.5) -> float:
    """How many standard deviations the number of hits is off."""
    count = hits.numel()
    return abs(float(hits.sum()) - count * chance) / math.sqrt(count * chance * (1 - chance))


def unevenness(values: torch.Tensor, classes: int) -> float:
    """Chi square of values that should be even over the classes, in standard deviations."""
    expected = values.numel() / classes
    chi = float(((values.bincount(minlength=classes) - expected) ** 2 / expected).sum())
    return abs(chi - (classes - 1)) / math.sqrt(2 * (classes - 1))


COUNT = 1 << 18
LIMIT = 5.0


def test_bits_are_even_and_independent() -> None:
    """Along a tensor, between operators, and between steps; none of 700 statistics is off by 5 deviations."""
    streams = [bits_of(key, COUNT) for seed in (0, 1) for key in keys(torch.tensor(seed), 3)]
    for stream in streams:
        for place in range(32):
            assert deviations((stream >> place) & 1) < LIMIT
        for shift in (20, 10, 0):
            assert unevenness((stream >> shift) & 0xFFF, 4096) < LIMIT
        for lag in (1, 2, 3, 64, 768, 4096):
            high = (stream >> 26) & 63
            assert unevenness(high[:-lag] * 64 + high[lag:], 4096) < LIMIT
            for place in (31, 16, 0):
                assert deviations(((stream[:-lag] ^ stream[lag:]) >> place) & 1) < LIMIT
    for one, other in itertools.combinations(streams, 2):
        for place in (31, 30, 16, 0):
            assert deviations(((one ^ other) >> place) & 1) < LIMIT


def test_seeds_that_follow_each_other_are_unrelated() -> None:
    first = torch.stack([key for seed in range(4000) for key in keys(torch.tensor(seed), 1)])
    for half in first.unbind(1):
        for place in (31, 16, 0):
            assert deviations((half >> place) & 1) < LIMIT
            assert deviations(((half[1:] ^ half[:-1]) >> place) & 1) < LIMIT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_distributions(dtype: torch.dtype) -> None:
    key = keys(torch.tensor(1), 1)[0]
    uniform = randomness.uniform(key, (COUNT,), dtype)
    normal = randomness.normal(key, (COUNT,), dtype)
    assert uniform.dtype == normal.dtype == dtype
    assert uniform.min() >= 0 and uniform.max() < 1
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 20)
    assert unevenness((uniform.double() * 2 ** min(digits, 10)).long(), 2 ** min(digits, 10)) < LIMIT
    assert normal.isfinite().all()
    moments = [(normal.double() ** k).mean().item() for k in (1, 2, 3, 4)]
    errors = [math.sqrt(v / COUNT) for v in (1, 2, 15, 96)]
    rounding = 0.02 if dtype == torch.bfloat16 else 0.0
    for found, expected, error in zip(moments, (0, 1, 0, 3), errors, strict=True):
        assert abs(found - expected) < LIMIT * error + rounding


def test_integers() -> None:
    key = keys(torch.tensor(1), 1)[0]
    small = randomness.integers(key, (COUNT,), -3, 7, torch.int64)
    assert unevenness(small + 3, 10) < LIMIT and small.min() == -3 and small.max() == 6
    large = randomness.integers(key, (COUNT,), 0, 1 << 40, torch.int64)
    assert unevenness(large >> 30, 1024) < LIMIT


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_at_its_rate_and_scales(p: float) -> None:
    x = torch.linspace(1, 2, COUNT)
    y, kept = randomness.dropout(keys(torch.tensor(1), 1)[0], x, p)
    assert deviations(kept, 1 - p) < LIMIT
    groups = kept.view(-1, 16).sum(1)
    chances = torch.tensor([math.comb(16, i) * (1 - p) ** i * p ** (16 - i) for i in range(17)], dtype=torch.float64)
    expected = chances * groups.numel()
    common = expected > 10
    chi = ((groups.bincount(minlength=17) - expected) ** 2 / expected)[common].sum()
    assert chi < common.sum() + LIMIT * math.sqrt(2 * common.sum())
    assert torch.equal(y, torch.where(kept, x * (1 / (1 - p)), 0.0))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p: float) -> None:
    x = torch.randn(100)
    y, kept = randomness.dropout(keys(torch.tensor(1), 1)[0], x, p)
    assert torch.equal(y, x * (1 - p)) and bool((kept == (p == 0.0)).all())


# ------------------------------------------------------------------------------ the same on every plan


class DropsAll(nn.Module):
    """Dropout of everything, and then of a half."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.rnn = nn.Dropout(1.0), nn.LSTM(8, 8, num_layers=2, dropout=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice, _ = torch.native_dropout(x, 1.0, True)
        x = x + self.dropout(self.rnn(x)[0]) + twice
        return F.dropout(x, 0.5).square().sum()


def test_dropout_of_everything_draws_no_number_as_in_torch() -> None:
    x = torch.randn(3, 4, 8)
    assert testing.check(DropsAll(), {"a": 2, "b": 2}, (x,), plans=2, solver="ddp").equal
    graph = Planner(DropsAll(), {"a": 2}, (x,)).captured.graph
    assert [i.target for i in graph.inputs if i.role == "seed"] == ["0"]


planner = models.planners(case)


@functools.cache
def alone(name: str, seed: int = 0) -> models.Step:
    """One step on one rank."""
    made = planner(name, {"a": 1})
    return simulated(made.program(made.plan(solver="dp", cost="serial")), made.captured, case(name), seed=seed)


MESHES: list[dict[str, int]] = [{"a": 4}, {"a": 2, "b": 2}]


PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp")


@pytest.mark.parametrize(
    ("name", "mesh", "solver"),
    pairwise(tuple(CASES), MESHES, ("dp", *PRESETS), where=lambda _, mesh, solver: solver != "dp" or len(mesh) == 1),
    ids=lambda value: mesh_id(value) if isinstance(value, dict) else value,
)
def test_numbers_are_the_same_on_every_plan(name: str, mesh: dict[str, int], solver: str) -> None:
    made = planner(name, mesh)
    assert not made.space.without_rule
    found = simulated(made.program(made.plan(solver=solver, cost="serial")), made.captured, case(name))
    assert_same(found, alone(name))


@pytest.mark.parametrize("mesh", [*MESHES, {"a": 2, "b": 3}], ids=mesh_id)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_same_on_random_plans(name: str, mesh: dict[str, int]) -> None:
    made = planner(name, mesh)
    program = bucket(codegen(made.space, plans.random_assignment(made.space, seed=0)))
    assert_same(simulated(program, made.captured, case(name), seed=1), alone(name, 1))


@pytest.mark.parametrize("name", CASES)
def test_another_step_draws_other_numbers(name: str) -> None:
    one, other = (next(iter(alone(name, seed).outputs.values())) for seed in (0, 1))
    assert not torch.allclose(one, other)


@functools.cache
def gpt2_with_dropout(rate: float) -> Planner:
    made = dropping(models.gpt2(resid_pdrop=rate, embd_pdrop=rate))
    return Planner(made.model, {"dp": 2, "tp": 2}, made.args, made.kwargs)


@pytest.mark.parametrize("solver", PRESETS)
def test_drawing_needs_no_communication(solver: str) -> None:
    """As many bytes as without dropout: masks are made in parts, where they are needed."""
    pytest.importorskip("transformers")
    sent, drawn = [], 0
    for rate in (0.0, 0.1):
        planned = gpt2_with_dropout(rate)
        program = planned.program(planned.plan(solver=solver, cost="serial"))
        sent.append(sum(size for _, _, size in program.collectives()))
        drawn = sum("box" in dict(i.kwargs) for i in program.forward if i.op == "autopar.dropout.default")
    assert sent[1] <= sent[0]
    assert drawn == 5


def test_the_same_capture_gives_the_same_plan_and_program() -> None:
    texts = []
    for _ in range(2):
        made = case("noisy")
        planned = Planner(made.model, {"a": 4}, made.args, made.kwargs, loss_fn=made.loss_fn)
        plan = planned.plan(solver="dp")
        plan = type(plan)(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "solve_seconds": 0.0})
        texts.append((str(plan), str(planned.program(plan))))
    assert texts[0] == texts[1]


def test_each_operator_has_a_key_of_its_own() -> None:
    """Also the copies of a repeated layer."""
    pytest.importorskip("transformers")
    made = case("gpt2 of 6 layers")
    planned = planner("gpt2 of 6 layers", {"a": 4})
    graphs = [seeds(capture(made.model, made.args, made.kwargs).graph), planned.captured.graph]
    drawing = ("autopar.dropout.default", "autopar.bernoulli.default")
    read = [[node.inputs[0] for node in g.nodes if node.op in drawing] for g in graphs]
    assert read[0] == read[1] == [f"seed_{i}" for i in range(19)]
    assert [i.target for i in graphs[0].inputs if i.role == "seed"] == [str(i) for i in range(19)]
    assert planned.space.repeats
    program = planned.program(planned.plan(solver="dp", cost="serial"))
    assert [i.inputs[0] for i in program.forward if i.op in drawing] == read[0]


class Attention(nn.Module):
    """Two attentions, with and without dropout of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 3 * 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        dropped = F.scaled_dot_product_attention(q, k, v, None, 0.1)
        return F.scaled_dot_product_attention(q, k, dropped).sum()


def test_attention_reads_the_weights_that_it_keeps() -> None:
    graph = seeds(capture(Attention(), (torch.randn(2, 8, 16),)).graph)
    (kept,) = (node for node in graph.nodes if node.op == "autopar.bernoulli.default")
    reads = [kept.name in node.inputs for node in graph.nodes if node.op == ATTENTION]
    assert reads == [True, False]
    assert graph.metas[kept.name] == TensorMeta((2, 2, 8, 8), torch.bool)


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
MASK[3] = False  # a query that sees nothing


@pytest.mark.parametrize(
    ("heads", "given"),
    [
        (4, {}),
        (4, {"attn_mask": MASK}),
        (4, {"attn_mask": torch.linspace(-1, 1, 64).view(8, 8)}),
        (4, {"is_causal": True, "scale": 0.3}),
        (2, {"enable_gqa": True, "attn_mask": MASK}),
    ],
    ids=["plain", "bool mask", "float mask", "causal", "grouped heads"],
)
def test_attention_in_parts_is_attention(heads: int, given: dict[str, Any]) -> None:
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, heads, 8, 16), torch.randn(2, heads, 8, 16)
    torch.testing.assert_close(plain_attention(q, k, v, **given), F.scaled_dot_product_attention(q, k, v, **given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_the_same_bits() -> None:
    here, there = (keys(torch.tensor([5], device=device), 2)[1] for device in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())
    x = torch.ones(3, 1000)
    for part in ((None, None, 0), ((30, 100), (70, 1), 11), ((3000,), (1 << 21,), 5)):
        assert torch.equal(
            randomness.dropout(here, x, 0.3, *part)[1], randomness.dropout(there, x.cuda(), 0.3, *part)[1].cpu()
        )
        for function, dtype in itertools.product(
            (randomness.uniform, randomness.normal), (torch.float32, torch.float64)
        ):
            one, other = function(here, (3000,), dtype, *part), function(there, (3000,), dtype, *part).cpu()
            torch.testing.assert_close(one, other)


class Sum(nn.Module):
    """One dropout, whose mask its output and its gradient both show."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(64, 96)), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.weight * x)


def test_forward_and_backward_have_one_mask_as_in_eager() -> None:
    """Expectation, rate and scale are those of torch's dropout; the gradient is zero where the output is."""
    p, model = 0.25, Sum(0.25)
    made = Case(model=model, batch=lambda _: ((torch.ones(64, 96),), {}), loss_fn=None)
    planned = Planner(model, {"a": 4}, made.args, made.kwargs)
    program = planned.program(planned.plan(solver="fsdp"))
    theirs = model(*made.args).detach()
    masks = []
    for seed in range(20):
        found = simulated(program, planned.captured, made, seed=seed)
        (output,), gradient = found.outputs.values(), found.gradients["weight"]
        tangent = models.tangents(output)
        assert set(output.unique().tolist()) == set(theirs.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
        torch.testing.assert_close(gradient, tangent * output)
        masks.append(output != 0)
    every = torch.stack(masks)
    assert deviations(every, 1 - p) < LIMIT
    for count in (every.sum(0), every.sum((0, 1)), every.sum((0, 2)), every.sum((1, 2))):
        drawn = every.numel() / count.numel()
        variance = (count - drawn * (1 - p)).double().square().mean() / (drawn * p * (1 - p))
        assert abs(variance - 1) < LIMIT * math.sqrt(2 / count.numel())


# ------------------------------------------------------------------------------------------ real ranks


def steps_of(module: nn.Module, made: Case, count: int) -> list[float]:
    return models.train(module, torch.optim.SGD(module.parameters(), lr=0.1), made, range(count))


def trained(name: str, mesh: dict[str, int], seeded: str) -> dict[str, Any]:
    """Losses of a few steps; `seeded` says which ranks are seeded alike."""
    made = case(name)
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = autopar.parallelize(made.model, device_mesh, made.args, made.kwargs, loss_fn=made.loss_fn, solver="ddp")
    rank = torch.distributed.get_rank()
    torch.manual_seed(5 if seeded == "alike" or rank == 0 else 100 + rank)
    before = steps_of(module, made, 3)
    weights = {name: p.detach().full_tensor().clone() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    state = torch.get_rng_state()
    after = steps_of(module, made, 2)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.copy_(
                DTensor.from_local(weights[name], device_mesh).redistribute(placements=parameter.placements)
            )
    torch.set_rng_state(state)
    resumed = steps_of(module, made, 2)
    next_number = float(torch.rand(()))
    torch.manual_seed(5)
    with torch.no_grad():
        outputs = [models.loss_of(module(*made.args, **made.kwargs)).item() for _ in range(2)]
        torch.manual_seed(5)
        again = models.loss_of(module(*made.args, **made.kwargs)).item()
    return {
        "before": before, "after": after, "resumed": resumed, "next": next_number, "outputs": outputs, "again": again,
    }  # fmt: skip


@functools.cache
def trained_alone(name: str) -> dict[str, Any]:
    (found,) = run(1, trained, name, {"a": 1}, "alike")
    return found


@pytest.mark.parametrize("seeded", ["alike", "differently"])
@pytest.mark.parametrize("mesh", [{"a": 2}, {"a": 2, "b": 2}], ids=mesh_id)
def test_ranks_draw_what_one_rank_draws(mesh: dict[str, int], seeded: str) -> None:
    expected = trained_alone("mlp")
    ranks = run(math.prod(mesh.values()), trained, "mlp", mesh, seeded)
    for found in ranks:
        for key in ("before", "after", "outputs"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    assert ranks[0]["next"] == expected["next"]
    if seeded == "alike":  # every rank drew, so that their generators still agree
        assert all(found["next"] == expected["next"] for found in ranks)


def test_seed_and_state_of_the_generator_keep_their_meaning() -> None:
    for found in [trained_alone("mlp"), *run(2, trained, "mlp", {"a": 2}, "alike")]:
        assert found["resumed"] == pytest.approx(found["after"], rel=1e-6), "a state that was restored"
        assert found["outputs"][0] == pytest.approx(found["again"], rel=1e-6), "a seed that was set again"
        assert abs(found["outputs"][0] - found["outputs"][1]) > 1e-4, "two steps"


def evaluated() -> tuple[float, float]:
    made = case("gpt2")
    made.model.eval()
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(made.model, device_mesh, made.args, made.kwargs, solver="ddp")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    losses = [module(*made.args, **made.kwargs).loss.item() for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn"
    return losses[0], losses[1]


def test_evaluation_draws_nothing() -> None:
    pytest.importorskip("transformers")
    made = case("gpt2")
    made.model.eval()
    expected = made.model(*made.args, **made.kwargs).loss.item()
    for losses in run(2, evaluated):
        assert losses == pytest.approx((expected, expected), rel=1e-5)


def test_slopes_that_a_checkpoint_draws_again_without_their_result() -> None:
    """Within a checkpoint another one runs again: of a random slope backward wants the slopes alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def within(a: torch.Tensor) -> torch.Tensor:
                h = F.rrelu(a, training=True)
                u = h.detach().requires_grad_(True)
                with torch.enable_grad():
                    (v,) = torch.autograd.grad(self.inner(u).sum(), u)
                return h - 0.1 * v

            def around(a: torch.Tensor) -> torch.Tensor:
                h = checkpoint(within, a, use_reentrant=True, preserve_rng_state=False)
                return h + self.inner(h)

            return checkpoint(around, self.first(x), use_reentrant=False).square().mean()

    torch.manual_seed(0)
    assert testing.check(Model(), {"a": 2, "b": 2}, (torch.randn(4, 6),), plans=1).equal
