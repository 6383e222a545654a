"""A plan's page fits into 80 columns and a screen, says in words what the plan is, and has the plan's figures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import models
import pytest
import torch
from torch import nn

from autopar.planning.plan import ParameterPlan, Plan
from autopar.planning.planner import Planner
from autopar.report.difference import difference
from autopar.report.placements import joined
from autopar.report.words import input_words, parameter_words

MESH = {"dp": 2, "tp": 2}
SCREEN_LINES = 45


class Deep(nn.Module):
    """So many layers of two products, behind an embedding."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.ModuleDict(
            {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width, bias=False)}
        ) for _ in range(layers))  # fmt: skip
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return self.head(x)


@cache
def planner() -> Planner:
    with torch.device("meta"):
        model = Deep(3)
    ids = torch.zeros(8, 16, dtype=torch.long)
    return Planner(model, MESH, kwargs={"input_ids": ids}, loss_fn=models.mean_square, cluster="dgx-h100")


@cache
def plan(solver: str) -> Plan:
    return planner().plan(solver=solver)


def with_layers(made: Plan, count: int) -> Plan:
    """The plan as if it had so many layers: pages take as long as parameters are many."""
    layer = {name: p for name, p in made.parameters.items() if name.startswith("layers.0.")}
    more = {name.replace("0", str(k), 1): p for k in range(count) for name, p in layer.items()}
    rest = {name: p for name, p in made.parameters.items() if not name.startswith("layers.")}
    return replace(made, parameters={**rest, **more})


# --- its size


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("layers", [3, 100])
@pytest.mark.parametrize("solver", ["dp", "megatron", "fsdp"])
def test_a_page_fits_the_width_and_a_screen(solver: str, layers: int, width: int) -> None:
    lines = with_layers(plan(solver), layers).text(width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= SCREEN_LINES


def test_all_that_a_plan_says_is_behind_full() -> None:
    full = plan("megatron").text(full=True)
    assert "without overlap" in full and "predicted peak memory of a rank" in full
    assert "without overlap" not in str(plan("megatron"))


def test_repr_is_one_line_and_notebooks_get_the_page() -> None:
    made = plan("megatron")
    assert "\n" not in repr(made) and "Deep" in repr(made) and "megatron" in repr(made)
    html = made._repr_html_()
    assert html.startswith('<div class="autopar">') and "where the step goes" in html


# --- its figures


def test_the_parts_of_the_step_add_up() -> None:
    for solver in ("dp", "megatron"):
        made = plan(solver)
        assert made.timing is not None
        timing = made.timing
        busy = timing.products_seconds + timing.attention_seconds + timing.others_seconds + timing.optimizer_seconds
        assert busy + sum(timing.exposed_on().values()) == pytest.approx(made.seconds, rel=1e-6)
        assert sum(timing.exposed_on().values()) == pytest.approx(made.exposed_seconds, abs=1e-9)


def test_arithmetic_is_the_graphs() -> None:
    """Forward 2 flops a weight and token, backward twice that; the embedding computes nothing."""
    made = plan("dp")
    assert made.provenance is not None and made.utilization is not None
    weights, tokens = 3 * 2 * 32 * 128 + 32 * 64, 8 * 16
    assert made.provenance.flops == 6 * weights * tokens
    assert made.provenance.items == tokens and made.provenance.unit == "tokens"
    peak = planner().cluster.device.peak_flops(torch.float32)
    assert made.utilization == pytest.approx(made.provenance.flops / peak / 4 / made.seconds)
    assert f"MFU {made.utilization:.1%}" in " ".join(str(made).split())


def test_no_mfu_is_told_of_a_peak_that_nobody_publishes() -> None:
    made = planner().on(MESH, "local").plan(solver="megatron")
    assert made.utilization is None and "MFU" not in str(made) and "tokens/s a device" in str(made)
    micros = made.provenance.times(4) if made.provenance is not None else None
    assert micros is not None and micros.ideal_seconds is None and micros.items == 4 * 8 * 16


def test_the_verdict_says_whether_it_fits() -> None:
    made = plan("megatron")
    assert re.search(r"^  fits .* of 68\.9 GiB a rank at the peak, 68\.9 GiB to spare", str(made), flags=re.MULTILINE)
    tight = replace(made, memory_limit_bytes=made.bytes * 1.01, memory_limit_from="given")
    assert "only 1.0% of the memory limit is left" in tight.text(width=120)
    over = replace(made, memory_limit_bytes=made.bytes / 2, memory_limit_from="given")
    assert "NO FIT" in str(over) and "exceeds the memory limit" in str(over)


# --- where it comes from


def test_a_plan_says_which_candidate_won() -> None:
    made = plan("dp")
    assert made.provenance is not None
    winner, candidates = made.provenance.winner, made.provenance.candidates
    assert candidates and winner not in [candidate.name for candidate in candidates]
    assert [c.seconds for c in candidates] == sorted(c.seconds for c in candidates)
    for candidate in candidates:
        if candidate.precision == "simulated":
            assert candidate.seconds >= made.seconds * 0.99
    best = min((c for c in candidates if c.name not in ("search", "search again")), key=lambda c: c.seconds)
    own = planner().plan(solver=best.name)
    if best.precision == "at least":
        assert own.seconds >= best.seconds
    else:
        assert own.seconds == pytest.approx(best.seconds, rel=0.05)
    assert best.name in str(made)
    assert "megatron, as asked" in str(plan("megatron"))
    # a bound below the plan's own step compares nothing
    below = replace(best, seconds=made.seconds / 2, precision="at least")
    other = replace(made, provenance=replace(made.provenance, winner="search", candidates=(below,)))
    assert f"the best preset, {best.name}, takes at least" in " ".join(other.text(width=200).split())
    assert "as fast as" not in str(other)


def test_a_plan_carries_its_inputs_its_cluster_and_versions() -> None:
    origin = plan("megatron").provenance
    assert origin is not None
    assert origin.inputs == {"input_ids": "int64[8, 16]"} and origin.dtype == "float32"
    assert 'name = "dgx-h100"' in origin.cluster
    assert origin.versions["torch"] == torch.__version__.partition("+")[0]
    assert origin.parameter_count == sum(p.numel() for p in Deep(3).parameters())


def test_an_edited_plan_says_that_its_figures_are_old() -> None:
    made = plan("megatron")
    assert not made.is_edited
    name, choice = next((n, c) for n, c in made.decisions.items() if c.endswith("keep"))
    edited = replace(made, decisions={**made.decisions, name: "R R keep" if choice != "R R keep" else "S0%1 R keep"})
    assert edited.is_edited and "were edited since" in edited.text(width=120)


# --- its words


@pytest.mark.parametrize(
    ("kind", "at_rest", "in_use", "gather", "words"),
    [
        ("linear", "R S(0)", ["R S(0)"], "keep", "column on tp"),
        ("linear", "S(0) S(0)", ["R S(0)"], "keep", "column on tp, sharded at rest on dp, gathered once"),
        ("linear", "S(0) S(1)", ["R R"], "regather", "sharded at rest on dp and tp, gathered twice"),
        ("transposed", "R S(0)", ["R S(0)"], "keep", "row on tp"),
        ("embedding", "R S(0)", ["R S(0)"], "keep", "vocabulary on tp"),
        ("embedding", "R S(1)", ["R S(1)", "R R"], "keep", "features on tp, gathered once where it is read whole"),
        ("experts", "S(0) R", ["S(0) R"], "keep", "experts on dp"),
        ("", "R S(1)", ["R S(1)"], "keep", "dim 1 on tp"),
        ("linear", "R S(0%64)", ["R S(0%64)"], "keep", "column in periods of 64 on tp"),
        ("linear", "R R", ["R S(1)"], "keep", "row on tp in use (each rank stores all)"),
        ("linear", "R S(0)", ["R S(1)"], "keep", "row on tp in use (column at rest)"),
        ("linear", "R R", ["R R"], "keep", "replicated"),
        ("linear", "R R", [], "keep", "replicated"),
        ("linear", "{x} R", ["{x} R"], "keep", "{x} on dp"),
    ],
)
def test_placements_in_words(kind: str, at_rest: str, in_use: list[str], gather: str, words: str) -> None:
    placed = ParameterPlan(
        at_rest=tuple(at_rest.split()),
        in_use=tuple(tuple(use.split()) for use in in_use),
        gather=gather,
        shape=(128, 128),
        kind=kind,
    )
    assert parameter_words(placed, ["dp", "tp"]) == words


def test_inputs_in_words() -> None:
    assert input_words(["S(0)", "S(1)"], ["dp", "tp"], "int64[8, 16]") == "batch on dp, sequence on tp"
    assert input_words(["S(0)", "S(0)"], ["dp", "tp"], "float32[8, 16]") == "batch on dp and tp"
    assert input_words(["R", "S(1)"], ["dp", "tp"], "float32[8, 16]") == "dim 1 on tp"


def test_what_a_name_shares_with_the_one_before_is_left_out() -> None:
    assert joined(("attn.q", "attn.k", "mlp.up", "mlp.down", "norm")) == "attn.q, k, mlp.up, down, norm"


def test_equal_layers_stand_on_one_row_with_their_count() -> None:
    page = with_layers(plan("megatron"), 100).text(width=120)
    assert re.search(r"layers\.\* \(100 alike\)\n +up +column on tp\n +down +row on tp\n", page)


def test_layers_that_differ_are_counted_apart() -> None:
    made = with_layers(plan("megatron"), 10)
    name = "layers.7.down.weight"
    other = replace(made.parameters[name], at_rest=("S(0)", "S(1)"))
    page = replace(made, parameters={**made.parameters, name: other}).text(width=120)
    assert re.search(r"down \(9 of them\) +row on tp\n", page)
    assert re.search(r"down \(1 of them\) +row on tp, sharded at rest on dp", page)


class Unnamed(nn.Sequential):
    """Layers within layers, without names, and parameters that only have numbers."""

    def __init__(self) -> None:
        layers = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3))
        super().__init__(*layers, nn.Linear(32, 64))
        self.scales = nn.ParameterList(torch.ones(64, device="meta") for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:4]:  # type: ignore[call-overload]
            x = layer(x)
        return x * self.scales[0] * self.scales[1]


def test_modules_without_names_are_called_by_their_first_and_last() -> None:
    with torch.device("meta"):
        made = Planner(Unnamed(), MESH, (torch.zeros(8, 32),), loss_fn=models.mean_square, cluster="dgx-h100")
    page, full = (made.plan(solver="megatron").text(width=120, full=full) for full in (False, True))
    assert re.search(r"0\.0 to 2\.0 \(3 alike\): weight +column on tp\n", page)
    assert re.search(r"0\.2 to 2\.2 \(3 alike\)\n +weight +row on tp\n", page), page
    assert re.search(r"\n0\.0\.weight to 2\.0\.weight \(3\) +R +S\(0\)", full)
    assert "*.*" not in page + full and "scales.*" in page
    moved = difference(made.plan(solver="ddp"), made.plan(solver="megatron")).text(120)
    assert "0.0 to 2.0 (3 layers): weight, bias" in moved and "\n  3: weight, bias" in moved, moved


# --- attention without a fused kernel


class Attends(nn.Module):
    """Attention over its input, whose weights are dropped with probability `drops`."""

    def __init__(self, drops: float) -> None:
        super().__init__()
        self.drops, self.project = drops, nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.drops, is_causal=True)


def test_dropout_of_attention_weights_is_priced_and_said_where_it_is() -> None:
    """Its seconds are those by which attention is faster without it."""
    x = torch.zeros(8, 1024, 64, device="meta")
    dropping, plain = (
        Planner(Attends(drops).to("meta"), {"dp": 2}, (x,), loss_fn=models.mean_square, cluster="dgx-a100").plan(
            solver="ddp"
        )
        for drops in (0.1, 0.0)
    )
    assert dropping.timing is not None and plain.timing is not None
    told = "dropout of attention weights keeps attention from the fused kernels"
    for full in (False, True):
        assert told in " ".join(dropping.text(full=full).split()) and told not in " ".join(
            plain.text(full=full).split()
        )
    assert plain.timing.unfused_seconds == 0.0
    masks = 2 * 8 // 2 * 4 * 1024 * 1024 / 1.6312e12  # which attention reads too, in forward and in backward
    saved = dropping.timing.attention_seconds - plain.timing.attention_seconds
    assert dropping.timing.unfused_seconds == pytest.approx(saved - masks, rel=0.15)
