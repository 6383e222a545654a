"""Weights for an inference engine: each of its ranks gets what it would cut from the whole state dict, and no rank of
the run holds more than its shard, what it keeps and a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tokens
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.layout import Layout, Replicate, Shape, Split
from autopar.runtime.boxes import Box, boxes
from autopar.runtime.engines import VLLM, VLLM_EXPERTS, engine_tensors
from autopar.runtime.handover import buckets
from autopar.runtime.memory import Alive
from autopar.runtime.module import ParallelModule
from autopar.runtime.places import local_part

WIDTHS = (1, 2, 4, 8)
HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, EXPERTS = 8, 2, 4, 48, 4
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "use_cache": False,
}


def llama(**overrides: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | overrides))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"head_dim": HEAD_SIZE, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, VLLM),
    "llama with biases": (lambda: llama(attention_bias=True, mlp_bias=True), VLLM),
    "llama tied": (lambda: llama(tie_word_embeddings=True), VLLM),
    "qwen3-moe": (qwen3_moe, VLLM + VLLM_EXPERTS),
}


def parallel(model: nn.Module, mesh: tuple[int, ...] = (2, 2), **options: Any) -> ParallelModule:
    axes = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    return autopar.parallelize(model, axes, kwargs=tokens(0)[1], **options)


def reference(state: dict[str, torch.Tensor], width: int, rank: int) -> dict[str, torch.Tensor]:
    """What vLLM's rank holds, cut from the whole state dict."""

    def cut(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(width, dim)[rank]

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(-len(x) % 64, *x.shape[1:])])

    def of_head(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(KV_HEADS)[rank * KV_HEADS // width] if width > KV_HEADS else cut(x, 0)

    made = {}
    for name, x in state.items():
        layer, _, last = name.rpartition("self_attn." if "self_attn" in name else "mlp.")
        if "embed_tokens" in name or "lm_head" in name:
            made[name] = cut(padded(x), 0)
        elif "q_proj" in name:
            k, v = (of_head(state[name.replace("q_proj", other)]) for other in ("k_proj", "v_proj"))
            made[name.replace("q_proj", "qkv_proj")] = torch.cat([cut(x, 0), k, v])
        elif "mlp.gate_proj" in name:
            up = cut(state[name.replace("gate_proj", "up_proj")], 0)
            made[name.replace("gate_proj", "gate_up_proj")] = torch.cat([cut(x, 0), up])
        elif "experts.gate_up_proj" in name:
            gate, up = x.chunk(2, 1)
            made[name.replace("gate_up_proj", "w13_weight")] = torch.cat([cut(gate, 1), cut(up, 1)], 1)
        elif "experts.down_proj" in name:
            made[name.replace("down_proj", "w2_weight")] = cut(x, 2)
        elif "o_proj.weight" in name or "down_proj.weight" in name:
            made[name] = cut(x, 1)
        elif not any(joined in name for joined in ("k_proj", "v_proj", "up_proj")):
            made[name] = x
    return made


def handed_over(kind: str, mesh: tuple[int, ...], solver: str) -> None:
    build, layout = MODELS[kind]
    model = build()
    state = {n: p.detach().clone() for n, p in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    made = parallel(model, mesh, solver=solver)
    ranks, own = math.prod(mesh), torch.distributed.get_rank()
    for name, box, tensor in made.shards():
        assert torch.equal(tensor, box.within(state[name]))
    for width in WIDTHS:
        for size in (20_000, 1 << 20):
            got: dict[tuple[int, str], torch.Tensor] = {}
            made.hand_over(layout, lambda r, n, x: got.update({(r, n): x}), width=width, bucket_bytes=size)
            mine = range(own, width, ranks)
            wanted = {(r, n): x for r in mine for n, x in reference(state, width, r).items()}
            assert got.keys() == wanted.keys()
            for key, tensor in got.items():
                assert tensor.dtype == wanted[key].dtype and torch.equal(tensor, wanted[key]), key


@pytest.mark.parametrize(
    ("kind", "mesh", "solver"),
    [
        ("llama", (2, 2), "atp"),
        ("llama with biases", (4,), "fsdp"),
        ("llama tied", (2, 2), "fsdp"),
        ("qwen3-moe", (2, 2), "dp"),
    ],
)
def test_engine_ranks_hold_what_they_would_cut_from_the_whole(kind: str, mesh: tuple[int, ...], solver: str) -> None:
    run(4, handed_over, kind, mesh, solver)
