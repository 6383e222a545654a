"""What the programs of the papers' presets send: each paper's layer issues the collectives that the paper counts.

Bytes are those of bfloat16; "u" is an activation [batch, sequence, hidden]. Norms whose hidden dim is split send sums
of 2 numbers a token on the way, which the papers leave out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import papers
import pytest
import torch
from papers import Collectives
from torch import nn

from autopar.passes.codegen.program import codegen

BATCH, LENGTH, HIDDEN, HEADS = 16, 512, 2048, 16
U = BATCH * LENGTH * HIDDEN * 2
"""Bytes of an activation."""

HH = HIDDEN * HIDDEN * 2
"""Bytes of a weight [hidden, hidden]."""


def layer(mesh: dict[str, int], preset: str, **options: dict[str, dict[str, str]]) -> Collectives:
    return papers.of_one_layer(
        mesh, preset, batch=BATCH, length=LENGTH, hidden=HIDDEN, heads=HEADS, constraints=options or None
    )


def statistics(axis: str, tokens: int, norms: int = 2) -> Collectives:
    """Of norms whose hidden dim is split: two numbers a token, in float64 forward and in float32 backward."""
    return Counter(
        {("forward", "all_reduce", axis, 16 * tokens): norms, ("backward", "all_reduce", axis, 8 * tokens): norms}
    )


def over(axis: str, found: Collectives, ranks: int) -> float:
    """Bytes that a rank sends and receives along an axis, by rings: an all-reduce counts twice."""
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return sum(
        passes[kind] * (ranks - 1) / ranks * size * count for (_, kind, a, size), count in found.items() if a == axis
    )


# ------------------------------------------------------------------------------------------------- ATP

COLUMN_FIRST, ROW_FIRST = {"d1": "S(0)", "d2": "S(1)"}, {"d1": "S(1)", "d2": "S(0)"}
"""Of torch's weights [out, in]: ATP's [Shard(1), Shard(0)] and [Shard(0), Shard(1)] of [in, out]."""

ATP = {"*.qkv.weight": COLUMN_FIRST, "*.projection.weight": ROW_FIRST, "*.fc1.weight": COLUMN_FIRST,
       "*.fc2.weight": ROW_FIRST}  # fmt: skip


@pytest.mark.parametrize(("d1", "d2"), [(4, 2), (2, 4), (2, 2)])
def test_atp(d1: int, d2: int) -> None:
    """3.2.1, Fig. 6: f1 and f3 reduce over the second axis forward and over the first backward, f2 and f4 the other way
    round, as Eq. 2 has it (the text names the axes of f1 and f3 the wrong way round). Attention is scattered before
    and gathered after."""
    found = layer({"d1": d1, "d2": d2}, "atp", **ATP)
    expected: Collectives = Counter(
        {
            (
                "forward",
                "reduce_scatter",
                "d2",
                3 * U // d1,
            ): 1,  # f1: attention wants a part, so nothing is reduced whole
            ("forward", "all_gather", "d2", U // d1): 1,  # attention's output
            ("forward", "all_reduce", "d2", 4 * U // d1): 1,  # f3
            ("forward", "all_reduce", "d1", U // d2): 2,  # f2, f4
            ("backward", "all_reduce", "d1", U // d2): 2,  # f1, f3
            ("backward", "all_reduce", "d2", 4 * U // d1): 1,  # f4
            ("backward", "reduce_scatter", "d2", U // d1): 1,  # f2
            ("backward", "all_gather", "d2", 3 * U // d1): 1,  # the gradients of q, k and v
        }
    )
    assert found == expected + statistics("d2", BATCH * LENGTH)


def atp_equation_2(d1: int, d2: int, h: int) -> tuple[float, float]:
    """Eq. 2 as bytes over each axis, with its 2/B = 2 (d - 1) / d of a ring, for `h` hidden sizes over the second."""
    first, second = 2 * (d1 - 1) / d1, 2 * (d2 - 1) / d2
    return 2 * U * 2 / d2 * first, 2 * U * h / d1 * second


@pytest.mark.parametrize(("d1", "d2"), [(4, 2), (2, 4)])
def test_atp_sends_what_equation_2_says_with_6h(d1: int, d2: int) -> None:
    """Eq. 2 has 7h over the second axis: an all-reduce of 3h before attention takes its part, and a gather of h after
    it (forward 3 + 1/2 + 4, backward 1 + 3/2 + 4). The program scatters instead of reducing whole: 6h."""
    found = layer({"d1": d1, "d2": d2}, "atp", **ATP) - statistics("d2", BATCH * LENGTH)
    first, second = atp_equation_2(d1, d2, 6)
    assert over("d1", found, d1) == pytest.approx(first, rel=1e-12)
    assert over("d2", found, d2) == pytest.approx(second, rel=1e-12)
    assert sum((3, 1 / 2, 4)) + sum((1, 3 / 2, 4)) == 2 * 7
    assert sum((3 / 2, 1 / 2, 4)) + sum((1 / 2, 3 / 2, 4)) == 2 * 6


def test_atp_on_one_axis_is_megatron() -> None:
    """3.2.1: DeviceMesh(N, 1) is Megatron-LM, two all-reduces of the activation forward and two backward."""
    found = layer({"d1": 8, "d2": 1}, "atp")
    assert found == {("forward", "all_reduce", "d1", U): 2, ("backward", "all_reduce", "d1", U): 2}
    assert found == layer({"d1": 8, "d2": 1}, "megatron")


# ---------------------------------------------------------------------------------------------- Par4D

PLAIN, TRANSPOSED = {"x": "S(0)", "y": "S(1)"}, {"x": "S(1)", "y": "S(0)"}
"""Of torch's weights [n, k]: k over y and n over x; every other layer the other way round (III.B)."""

PAR4D = {"*.qkv.weight": PLAIN, "*.projection.weight": TRANSPOSED, "*.fc1.weight": PLAIN, "*.fc2.weight": TRANSPOSED}

PRODUCTS = ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
"""(k, n) in hidden sizes of the layer's products with weights, and whether x and y change roles."""


def par4d(grid: dict[str, int]) -> Collectives:
    """Algorithm 1 and the data-parallel all-reduce: what Eq. 4 to 8 are the times of."""
    x, y, z, data = (grid.get(name, 1) for name in ("x", "y", "z", "data"))
    u = U // (z * data)
    found: Collectives = Counter()
    for k, n, transposed in PRODUCTS:
        along, across = ("y", "x") if not transposed else ("x", "y")
        found["forward", "all_gather", "z", k * n * HH // (x * y)] += 1  # line 2, Eq. 4
        found["forward", "all_reduce", along, n * u // grid[across]] += 1  # line 4, Eq. 6
        found["backward", "all_reduce", across, k * u // grid[along]] += 1  # line 11, Eq. 7
        found["backward", "reduce_scatter", "z", k * n * HH // (x * y)] += 1  # line 12, Eq. 5
        found["backward", "all_reduce", "data", k * n * HH // (x * y * z)] += 1  # Eq. 8
    return Counter({key: count for key, count in found.items() if grid.get(key[2], 1) > 1})


@pytest.mark.parametrize(
    "grid",
    [{"y": 2, "x": 4}, {"z": 2, "y": 2, "x": 4}, {"data": 2, "z": 2, "y": 4, "x": 2}, {"data": 2, "y": 2, "x": 2}],
    ids=lambda grid: " ".join(f"{axis}{ranks}" for axis, ranks in grid.items()),
)
def test_par4d(grid: dict[str, int]) -> None:
    tokens = BATCH * LENGTH // (grid.get("z", 1) * grid.get("data", 1))
    assert layer(grid, "par4d", **PAR4D) == par4d(grid) + statistics("y", tokens)


def test_par4d_sends_what_equations_4_to_8_say() -> None:
    """In bytes: beta is 1 in Eq. 4 to 8, and m, k and n are what one of the data-parallel groups has."""
    grid = {"data": 2, "z": 4, "y": 2, "x": 2}
    found = layer(grid, "par4d", **PAR4D)
    found -= statistics("y", BATCH * LENGTH // (grid["z"] * grid["data"]))
    x, y, z, data = grid["x"], grid["y"], grid["z"], grid["data"]
    u = U / data
    sent = {"x": 0.0, "y": 0.0, "z": 0.0, "data": 0.0}
    for k, n, transposed in PRODUCTS:
        kn, mk, mn = k * n * HH, k * u, n * u
        along, across = ("y", "x") if not transposed else ("x", "y")
        g, h = grid[along], grid[across]
        sent["z"] += (z - 1) * kn / (x * y * z) + (z - 1) / z * kn / (x * y)
        sent[along] += 2 * (g - 1) / g * mn / (z * h)
        sent[across] += 2 * (h - 1) / h * mk / (z * g)
        sent["data"] += 2 * (data - 1) / data * kn / (x * y * z)
    for axis, size in sent.items():
        assert over(axis, found, grid[axis]) == pytest.approx(size, rel=1e-12), axis


def test_par4d_gathers_weights_twice_where_it_does_not_keep_them() -> None:
    """Eq. 9 has one all-gather of weights a layer: that of Algorithm 1, which caches them (line 5). Without a cache,
    backward gathers again."""
    mesh = {"z": 2, "y": 2, "x": 2}
    with torch.device("meta"):
        model = nn.Sequential(*(papers.Layer(HIDDEN, HEADS) for _ in range(3))).to(torch.bfloat16)
        x = torch.zeros(BATCH, LENGTH, HIDDEN, dtype=torch.bfloat16)
    planner, program = papers.planned(model, x, mesh, "par4d", "dgx-a100")
    plan = planner.plan(solver="par4d")

    def again(decision: str) -> str:
        return decision.replace("keep", "regather")

    forgetful = dataclasses.replace(
        plan,
        decisions={name: again(d) for name, d in plan.decisions.items()},
        segments=tuple(
            dataclasses.replace(
                segment,
                runs=tuple(
                    dataclasses.replace(run, decisions={name: again(d) for name, d in run.decisions.items()})
                    for run in segment.runs
                ),
            )
            for segment in plan.segments
        ),
    )
    twice = papers.collectives(codegen(planner.space, planner.assignment(forgetful)))

    def gathered(found: Collectives, phase: str) -> dict[int, int]:
        return {size: n for (p, kind, axis, size), n in found.items() if (p, kind, axis) == (phase, "all_gather", "z")}

    once = papers.collectives(program)
    assert gathered(once, "forward") and not gathered(once, "backward")
    # backward does not want the first weight of all: nobody asks for the gradient of the input
    first = 3 * HH // 4
    assert gathered(twice, "backward") == Counter(gathered(once, "forward")) - Counter({first: 1})
    assert gathered(twice, "forward") == gathered(once, "forward")


# ------------------------------------------------------------------------------------------- MeshSlice


def product_of(m: int, k: int, n: int, mesh: dict[str, int]) -> Collectives:
    """The collectives of Y = X W, X [m, k], W [k, n], between two activation functions."""
    with torch.device("meta"):
        model = nn.Sequential(nn.GELU(), nn.Linear(k, n, bias=False), nn.GELU()).to(torch.bfloat16)
        x = torch.zeros(m, k, dtype=torch.bfloat16, requires_grad=True)
    return papers.collectives(papers.planned(model, x, mesh, "meshslice", "tpu-v4")[1])


@pytest.mark.parametrize(
    ("m", "k", "n", "stays"), [(8192, 512, 4096, "y"), (8192, 4096, 512, "x"), (512, 8192, 4096, "w")]
)
def test_meshslice_dataflows(m: int, k: int, n: int, stays: str) -> None:
    """2.3.1 and Table 1: the largest matrix stays in all three products, operands are gathered and results scattered,
    one matrix along rows and the other along columns. The paper has six flows; where two products
    gather one matrix the same way, ours gathers it once and keeps it (X for W', Y' for X' and W')."""
    rows, cols = 4, 4
    found = product_of(m, k, n, {"rows": rows, "cols": cols})
    x, w, y = (2 * size // 4 for size in (m * k, k * n, m * n))
    flows = {
        "y": [("forward", "all_gather", x), ("forward", "all_gather", w),  # Y = OS(X, W)
              ("backward", "all_gather", w), ("backward", "reduce_scatter", x),  # X' = LS(Y', W)
              ("backward", "reduce_scatter", w)],  # W' = RS(X, Y')
        "x": [("forward", "all_gather", w), ("forward", "reduce_scatter", y),  # Y = LS(X, W^T)
              ("backward", "all_gather", y), ("backward", "all_gather", w),  # X' = OS(Y', W^T)
              ("backward", "reduce_scatter", w)],  # W'^T = RS(Y', X)
        "w": [("forward", "all_gather", x), ("forward", "reduce_scatter", y),  # Y = RS(X^T, W)
              ("backward", "all_gather", y), ("backward", "reduce_scatter", x)],  # X'^T = LS(W, Y'), W' = OS(X^T, Y')
    }[stays]  # fmt: skip
    assert Counter({(p, kind, size): 0 for p, kind, _, size in found}) == Counter(dict.fromkeys(flows, 0))
    assert Counter((p, kind, size) for (p, kind, _, size), n in found.items() for _ in range(n)) == Counter(flows)
    # a matrix and its gradient flow along one axis, the other one along the other
    moved = {size: {axis for _, _, axis, s in found if s == size} for size in {flow[2] for flow in flows}}
    assert sorted(map(sorted, moved.values())) == [["cols"], ["rows"]]


def test_meshslice_section_7() -> None:
    """An FC layer of GPT-3, (M, N, K) = (1024K, 12K, 48K), four replicas of 32 x 8: the input stays, the weight is
    gathered along 32 rows, the output scattered along 8 columns. A chip receives 307.5 MiB; the paper counts P shards
    for P - 1: 336."""
    k, n, m = 48 * 1024, 12 * 1024, 1024 * 1024
    found = product_of(m, k, n, {"data": 4, "rows": 32, "cols": 8})
    forward = {key: count for key, count in found.items() if key[0] == "forward"}
    weight, output = 2 * k * n // 8, 2 * (m // 4) * n // 32
    assert forward == {("forward", "all_gather", "rows", weight): 1, ("forward", "reduce_scatter", "cols", output): 1}
    received = 31 / 32 * weight + 7 / 8 * output
    assert received / 2**20 == pytest.approx(307.5, rel=1e-12)
    assert (weight + output) / 2**20 == pytest.approx(336, rel=1e-12)


def test_meshslice_layer() -> None:
    """All four products of a layer: of qkv and fc1 the output is the largest and stays, of fc2 the input, of the
    projection both are alike. Each weight is gathered along rows, for forward and again for backward, and its gradient
    scattered; activations go along columns. What backward gathers for X' it has for W' too."""
    rows, cols, length = 8, 2, 4 * LENGTH
    found = papers.of_one_layer(
        {"rows": rows, "cols": cols}, "meshslice", batch=BATCH, length=length, hidden=HIDDEN, heads=HEADS
    )
    one = 4 * U // rows  # an activation [batch, sequence, hidden] of these sequences, gathered along columns
    expected: Collectives = Counter(
        {
            ("forward", "all_gather", "cols", one): 2,  # X of qkv and fc1
            ("forward", "reduce_scatter", "cols", one): 2,  # Y of the projection and fc2
            ("backward", "all_gather", "cols", one): 2,  # Y' of these
            ("backward", "reduce_scatter", "cols", one): 2,  # X' of those
        }
    )
    for n, count in ((3, 1), (1, 1), (4, 2)):
        for phase, kind in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
            expected[phase, kind, "rows", n * HH // cols] += count
    assert found == expected + statistics("cols", BATCH * length // rows)
