"""Plans of other libraries: what is read of them, and what they leave of the space."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama, tokens

import autopar
from autopar.planning.foreign import COLUMN, EXPERTS, GATHERED, PLAIN, ROW, SEQUENCE, Style, dims_of, entries, renamed
from autopar.planning.planner import Planner

TITAN = """
layer_plan = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}
parallelize_module(model, tp_mesh, {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
})
"""
"""What torchtitan 0.2.2 said of a Llama 3."""

MIXTRAL = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "lm_head": "colwise_gather_output",
}
MEGATRON = {
    "embedding.word_embeddings": "VocabParallelEmbedding",
    "self_attention.linear_qkv": "ColumnParallelLinear",
    "self_attention.linear_proj": "RowParallelLinear",
    "mlp.linear_fc1": "ColumnParallelLinear",
    "mlp.linear_fc2": "RowParallelLinear",
    "output_layer": "ColumnParallelLinear",
}
FSDP2 = {"model.layers.*": {"reshard_after_forward": True}, "": {"reshard_after_forward": False}}
AUTOTP = {
    "layer_specs": [
        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.mlp\.down_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.mlp\.(up|gate)_proj\.weight$"], "partition_type": "column"},
    ]
}


def test_what_is_read() -> None:
    titan = entries(TITAN)
    assert (titan["attention.wq"], titan["attention.wo"], titan["norm"], titan["attention"]) == (
        COLUMN, ROW, SEQUENCE, PLAIN,
    )  # fmt: skip
    assert entries('{"lm_head": ColwiseParallel(output_layouts=Replicate())}')["lm_head"] == GATHERED
    assert entries(json.dumps({"x": {"tp_plan": MIXTRAL}}))["lm_head"] == GATHERED
    assert entries(json.dumps(FSDP2)) == {"model.layers.*": Style(reshards=True), "": Style(reshards=False)}
    assert list(entries(json.dumps(AUTOTP)).values()) == [ROW, COLUMN, ROW, COLUMN]
    assert entries('{"experts.w": "grouped_gemm"}')["experts.w"] == EXPERTS
    assert set(entries('{"dim": column, "lm_head": style.ColwiseParallel(), "row": row.size}')) == {"lm_head"}


@pytest.mark.parametrize(
    "text", ['{"patterns": ["x"], "partition_type": "diagonal"}', "{", "{}", '{"lm_head": "sideways"}', "x = 3"]
)
def test_what_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json is no plan.*give a file of names and styles"):
        planned(path)


@pytest.mark.parametrize(
    ("style", "kind", "shape", "dim"),
    [
        (COLUMN, "linear", (48, 32), 0), (ROW, "linear", (48, 32), 1), (ROW, "linear", (48,), None),
        (COLUMN, "linear", (48,), 0), (ROW, "embedding", (96, 32), 0), (COLUMN, "embedding", (96, 32), 1),
        (COLUMN, "transposed", (32, 96), 1), (COLUMN, "experts", (4, 64, 32), 1), (ROW, "experts", (4, 32, 32), 2),
        (EXPERTS, "experts", (4, 32, 32), 0), (SEQUENCE, "", (32,), None), (COLUMN, "", (), None),
    ],
)  # fmt: skip
def test_dims(style: Style, kind: str, shape: tuple[int, ...], dim: int | None) -> None:
    assert dims_of(style, kind, shape) == dim


def test_names_of_other_libraries() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.10.self_attn.k_proj.weight", "lm_head.weight"]
    assert renamed("layers.*.self_attn.q_proj", names) == ["layers.*.self_attn.q_proj"]
    assert renamed("layers.*.q_proj", names) == []  # a star stands for one part
    assert renamed("attention.wq", names) == ["self_attn.q_proj"]
    assert renamed("decoder.layers.*.self_attention.linear_qkv", names) == []
    assert renamed("self_attention.linear_qkv", names) == ["self_attn.q_proj", "self_attn.k_proj"]
    assert renamed("proj", names) == []


@cache
def planner() -> Planner:
    with torch.device("meta"):
        return Planner(llama(layers=2), {"dp": 2, "tp": 2}, kwargs=tokens(0)[1], cluster="dgx-a100")


def planned(within: Any, **options: Any) -> autopar.Plan:
    return planner().plan(within=within, **options)


@cache
def free() -> autopar.Plan:
    return planner().plan()


@pytest.mark.parametrize("public", [MIXTRAL, MEGATRON, AUTOTP, TITAN, FSDP2])
def test_public_plans(public: Any, tmp_path: Path) -> None:
    """Each is priced with parameters where it puts them, and costs what the free plan undercuts."""
    path = tmp_path / "public"
    path.write_text(public if isinstance(public, str) else json.dumps(public))
    plan = planned(path)
    placed = {name: p.at_rest[1] for name, p in plan.parameters.items()}
    layer = "model.layers.1.self_attn"
    split = ("R", "R") if public is FSDP2 else ("S(0)", "S(1)")
    if public is FSDP2:
        assert all("S(0)" in p.at_rest[1] for p in plan.parameters.values())
        assert {p.gather for n, p in plan.parameters.items() if "layers" in n} <= {"keep", "regather"}
    else:
        assert (placed[f"{layer}.q_proj.weight"], placed[f"{layer}.o_proj.weight"]) == split
        assert placed["model.norm.weight"] == "R"
    assert free().objective_seconds <= plan.objective_seconds
    assert plan.within == str(path)
    again = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.within == plan.within
    planner().program(again)


def test_what_is_not_named() -> None:
    with pytest.raises(ValueError, match="names nothing in the model \\(did you mean 'lm_head'"):
        planned({"lm_hed": "colwise"})
    with pytest.raises(ValueError, match="within is 3"):
        planned(3)
    with pytest.raises(ValueError, match="which does not go with fsdp"):
        planned("fsdp2", solver="fsdp")


def test_a_mesh_for_data_alone() -> None:
    model = llama(layers=1)
    with pytest.raises(ValueError, match="the mesh has dp, for data: call an axis tp"):
        autopar.plan(model, {"dp": 2}, kwargs=tokens(0)[1], within={"lm_head": "colwise"})
    plan = autopar.plan(model, {"dp": 2}, kwargs=tokens(0)[1], within="parallelize_module")
    assert all(p.at_rest[0].startswith("S(0)") for p in plan.parameters.values())
