"""The papers' figures on overlap, simulated: orders of methods and gains, and where ours differ from the text."""

from __future__ import annotations

import itertools

import pytest
from paper_figures import CHIPS, MESHSLICE_MODELS, MESHSLICE_TEXT, TOKENS, atp_calibrated_saving, meshes_of
from paper_gemms import (
    ALGORITHMS,
    best_slices,
    closed_form,
    collective,
    flops_of,
    meshslice,
    products,
    reached,
    seconds_of,
    seconds_of_program,
    slices_of,
)
from paper_layers import (
    ATP_MODELS,
    ATP_TABLE_3,
    PAR4D_FIGURE_3,
    PAR4D_TABLE_3,
    atp_chunks,
    atp_gain,
    atp_layer,
    par4d_best,
    par4d_times,
    pipelined,
    slowness,
    teraflops,
    zero3,
)

# ------------------------------------------------------------------------------------------- MeshSlice


@pytest.mark.parametrize("hidden", MESHSLICE_MODELS.values(), ids=MESHSLICE_MODELS)
def test_meshslice_simulated_is_its_closed_form(hidden: int) -> None:
    """3.2.2: prologue + (S - 1) x steady state + epilogue is what the events give, for every product, mesh and S."""
    for mesh in meshes_of(CHIPS):
        for product in list(products(hidden, TOKENS))[::2]:
            for slices in slices_of(product, *mesh)[::5]:
                simulated = meshslice(product, *mesh, slices).seconds
                assert simulated == pytest.approx(closed_form(product, *mesh, slices), rel=1e-9)


def test_meshslice_of_one_slice_is_collective() -> None:
    for product in products(12288, TOKENS):
        assert meshslice(product, 32, 8, 1).tasks == collective(product, 32, 8, 7).tasks


@pytest.mark.parametrize(("name", "hidden"), MESHSLICE_MODELS.items())
def test_meshslice_figure_9(name: str, hidden: int) -> None:
    """Utilization and what is lost from 16 chips to 256, within a point and three of the text; the order of methods.
    Wang: 13.8% and 26.0% in the text, 19.8% and 22.1% here."""
    text = MESHSLICE_TEXT[name]
    found = {algorithm: reached(algorithm, hidden, CHIPS) for algorithm in (*ALGORITHMS, "1D TP", "FSDP")}
    assert found["MeshSlice"][1] == (32, 8)
    assert found["MeshSlice"][0] == pytest.approx(text["MeshSlice"], abs=0.011)
    few = reached("MeshSlice", hidden, 16)[0]
    assert 1 - found["MeshSlice"][0] / few == pytest.approx(text["lost"], abs=0.03)
    ranked = sorted(found, key=lambda algorithm: -found[algorithm][0])
    assert ranked[:3] == ["MeshSlice", "Wang", "Collective"]
    gain = found["MeshSlice"][0] / found["Wang"][0] - 1
    assert gain == pytest.approx({"GPT-3": 0.198, "Megatron-NLG": 0.221}[name], abs=0.002)
    # 5.1.1: the fastest in all cases, on few chips too
    others = [reached(algorithm, hidden, 16)[0] for algorithm in (*ALGORITHMS, "1D TP", "FSDP")]
    assert max(others) == few


@pytest.mark.parametrize("name", ["MeshSlice", "Collective"])
def test_meshslice_schedules_are_those_of_the_programs(name: str) -> None:
    """What the lowering makes of a product takes what the paper's schedule of it takes; where a result is scattered, up
    to the launches, of which a program's cluster has one for all collectives."""
    for product in list(products(12288, TOKENS))[:6]:
        told = seconds_of_program(name, product, 32, 8)
        within = 1e-6 if product[0] == "os" else 0.03
        assert told == pytest.approx(seconds_of(name, product, 32, 8), rel=within)


def test_meshslice_figure_14() -> None:
    """In a 32 x 8 mesh the autotuner's S are those that are best in simulation, too."""
    for hidden in MESHSLICE_MODELS.values():
        for product in products(hidden, TOKENS):
            times = {s: meshslice(product, 32, 8, s).seconds for s in slices_of(product, 32, 8)}
            assert times[best_slices(product, 32, 8)] == pytest.approx(min(times.values()), rel=1e-9)
            assert seconds_of("MeshSlice", product, 32, 8) >= flops_of(product) / CHIPS / 272e12


# ---------------------------------------------------------------------------------------------- Par4D


def test_par4d_figure_3() -> None:
    """GPT-20B on 16 GPUs: 5%, 8%, 19% and 9%, 34% together; each within 1.5 points, and in the same order."""
    times = par4d_times()
    gains = [1 - after / before for before, after in itertools.pairwise(times)]
    assert gains == pytest.approx(PAR4D_FIGURE_3, abs=0.015)
    assert 1 - times[-1] / times[0] == pytest.approx(0.34, abs=0.035)


@pytest.mark.parametrize("gpus", [64, 1024])
def test_par4d_table_3(gpus: int) -> None:
    """Par4D before ZeRO-3 before the two with pipelines, and all above what was measured. By bubble and bytes
    Megatron-LM and DeepSpeed-3D are the same; on 1024 GPUs ZeRO-3 stays hidden here, and did not there."""
    ours = {
        "Par4D": par4d_best(gpus)[1],
        "ZeRO-3": zero3(gpus),
        "Megatron-LM": pipelined(gpus, sharded=False),
        "DeepSpeed-3D": pipelined(gpus, sharded=True),
    }
    assert all(PAR4D_TABLE_3[gpus][name] < part < 0.87 for name, part in ours.items())
    assert ours["Megatron-LM"] == pytest.approx(ours["DeepSpeed-3D"], abs=1e-3)
    assert min(ours["Par4D"], ours["ZeRO-3"]) > ours["Megatron-LM"]
    assert (ours["Par4D"] > ours["ZeRO-3"]) == (gpus < 1024)


# ------------------------------------------------------------------------------------------------- ATP


def test_atp_figure_10() -> None:
    """IC1 with the rates of 5.3: 83%, as 46% less communication makes nearly 1 / 0.545 (the paper: 37% to 64%); IC3:
    some percent for all models."""
    for name in ATP_MODELS:
        assert atp_gain(name, "IC1") == pytest.approx(1 / (1 - atp_calibrated_saving()) - 1, abs=0.01)
        assert 0 < atp_gain(name, "IC3") < 0.1


def test_atp_table_3() -> None:
    """What chunks gain on IC1 and IC3 within 6 points of the table. On IC4 the table has more than operators of
    forward take, on IC2 less than ours."""
    for interconnect, rows in ATP_TABLE_3.items():
        for name, stated in rows.items():
            ours = atp_chunks(name, interconnect)
            assert ours[0] == pytest.approx(stated[0], rel=1e-6)
            gains = [chunked / ours[0] - 1 for chunked in ours[1:]]
            told = [chunked / stated[0] - 1 for chunked in stated[1:]]
            assert all(gain > 0 for gain in gains)
            if interconnect in ("IC1", "IC3"):
                assert gains == pytest.approx(told, abs=0.06)
            elif interconnect == "IC4":
                alone = teraflops(ATP_MODELS[name], atp_layer(ATP_MODELS[name], (0.0, 0.0), slowness(name)))
                forward = stated[0] / alone / 3
                assert max(gains) < forward / (1 - forward) < max(told)
            else:
                assert min(gains) > max(told)
