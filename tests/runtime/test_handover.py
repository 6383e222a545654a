"""Weights for an inference engine: each of its ranks gets what it would cut from the whole state dict, and no rank of
the run holds more than its shard, what it keeps and a bucket."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tokens
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.layout import Layout, Replicate, Shape, Split
from autopar.runtime.boxes import Box, IndexRange, boxes
from autopar.runtime.engines import VLLM, VLLM_EXPERTS, engine_tensors
from autopar.runtime.handover import buckets
from autopar.runtime.memory import Alive
from autopar.runtime.module import ParallelModule
from autopar.runtime.pieces import pieces
from autopar.runtime.placements import local_slice, unpadded
from autopar.runtime.places import local_part

WIDTHS = (1, 2, 4, 8)
HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, EXPERTS = 8, 2, 4, 48, 4
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
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
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:  # type: ignore[union-attr]
        del state["lm_head.weight"]
    made = parallel(model, mesh, solver=solver)
    own = torch.distributed.get_rank()
    held: Counter[str] = Counter()
    for name, box, tensor in made.shards():
        assert torch.equal(tensor, box.within(state[name])) and tensor.data_ptr()
        held[name] += tensor.numel()
    assert held.total() == sum(local_part(value).numel() for value in made.parameters())
    for width in WIDTHS:
        for bucket_bytes in (5_000, 1 << 20):
            got: dict[tuple[int, str], torch.Tensor] = {}
            made.hand_over(layout, taker(got), width=width, bucket_bytes=bucket_bytes)
            same(got, {(r, n): x for r in range(own, width, 4) for n, x in reference(state, width, r).items()})
    got = {}
    made.hand_over(layout, taker(got), width=2, on=[3, 0, 0, 1], dtype=torch.bfloat16)
    ranks = {0: (0, 1), 1: (1,), 2: (), 3: (0,)}[own]
    same(got, {(r, n): x.bfloat16() for r in ranks for n, x in reference(state, 2, r).items()})


def taker(got: dict[tuple[int, str], torch.Tensor]) -> Callable[[int, str, torch.Tensor], None]:
    def take(rank: int, name: str, tensor: torch.Tensor) -> None:
        assert (rank, name) not in got
        got[rank, name] = tensor

    return take


def same(got: dict[tuple[int, str], torch.Tensor], wanted: dict[tuple[int, str], torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key, tensor in got.items():
        assert tensor.dtype == wanted[key].dtype and torch.equal(tensor, wanted[key]), key


@pytest.mark.parametrize(
    ("kind", "mesh", "solver"),
    [("llama with biases", (2, 2), "atp"), ("llama tied", (4,), "fsdp"), ("qwen3-moe", (2, 2), "fsdp")],
)
def test_engine_ranks_hold_what_they_would_cut_from_the_whole(kind: str, mesh: tuple[int, ...], solver: str) -> None:
    run(4, handed_over, kind, mesh, solver)


def in_stages() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6, bias=False))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    constraints: dict[str, dict[str, Any]] = {"0": {"pp": 0}, "2": {"pp": 1}}
    constraints |= {"0.weight": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}}
    x = (torch.ones(4, 8),)
    made = autopar.parallelize(model, mesh, x, micro_batches=2, constraints=constraints, loss_fn=torch.sum)
    got: dict[tuple[int, str], torch.Tensor] = {}
    copy.deepcopy(made).hand_over("a 1 0.weight\n b 0 0.bias/1+\n c 0 2.weight%8", taker(got), width=4)
    rank = torch.distributed.get_rank()
    third = torch.cat([state["2.weight"], torch.zeros(2, 8)])
    parts = {"a": state["0.weight"].chunk(4, 1)[rank], "b": state["0.bias"], "c": third.chunk(4)[rank]}
    same(got, {(rank, name): part for name, part in parts.items()})


def test_values_of_all_stages_are_handed_over() -> None:
    """Also those that no rank of the receiver's stage holds, and a share that is all padding."""
    run(4, in_stages)


def measured() -> list[tuple[int, int, int, int]]:
    made = parallel(llama(hidden_size=128, intermediate_size=256), (4,), solver="fsdp")
    found = []
    for width in (1, 4, 8):
        for keep in (True, False):
            kept: list[torch.Tensor] | None = [] if keep else None
            most = Counter[str]()

            def take(rank: int, name: str, tensor: torch.Tensor, most: Any = most, kept: Any = kept) -> None:
                most[name] += tensor.nbytes
                if kept is not None:
                    kept.append(tensor)

            alive = Alive(made.parameters())
            share = alive.bytes
            with alive:
                made.hand_over(VLLM, take, width=width, bucket_bytes=BUCKET)
            engine = most.total() if keep else max(most.values(), default=0)
            found.append((alive.peak_bytes, share, engine, sum(p.nbytes for p in made.parameters())))
    return found


BUCKET = 1 << 15


def test_a_rank_holds_its_share_what_it_keeps_and_a_bucket() -> None:
    for rank, rows in enumerate(run(4, measured)):
        for peak, share, engine, model in rows:
            assert peak <= share + engine + BUCKET, (rank, rows)
            assert share < 0.3 * model
        assert rows[2][0] < 0.75 * rows[2][3]  # width 4: two shares and a bucket


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"layout": VLLM.replace("k_proj.*/", "k_prj.*/")}, "qkv_proj.weight .* made of .*k_prj.weight, which"),
    "row": ({"layout": VLLM.replace("mlp.down_proj", "mlp.down")}, "no row for model.layers.0.mlp.down_proj.weight"),
    "text": ({"layout": VLLM + "model.norm.weight"}, "'model.norm.weight' is no row of a layout"),
    "dim": ({"layout": VLLM.replace("0  lm_head", "3  lm_head")}, r"dim 3 of lm_head.weight \[99, 32\]"),
    "join": ({"layout": VLLM.replace("0  model.layers.*.self_attn.q", "1  model.layers.*.self_attn.q")}, "and joined"),
    "width": ({"width": 3}, "128 elements, cannot be split evenly over 3 engine ranks"),
    "heads": ({"width": 16}, "8 num_attention_heads, cannot be split evenly over 16 engine ranks"),
    "none": ({"width": 0}, "give a width and bytes of at least 1"),
    "on": ({"on": [0, 7]}, "one of the ranks"),
    "copies": ({"on": [0, 1, 2]}, "one of the ranks"),
    "bytes": ({"bucket_bytes": 0}, "give a width and bytes of at least 1"),
}


def refused() -> dict[str, str]:
    made = parallel(llama(), solver="fsdp")
    rank = torch.distributed.get_rank()
    found = {}

    def take(engine_rank: int, name: str, tensor: torch.Tensor) -> None:
        if engine_rank == 1 and "lm_head" in name:
            raise ValueError("the engine is full")

    cases = {key: given for key, (given, _) in BAD.items()}
    cases |= {"differ": {"width": 2 + 2 * (rank == 2)}, "full": {}}
    for key, options in cases.items():
        with pytest.raises(ValueError) as raised:
            made.hand_over(**{"layout": VLLM, "receive": take, "width": 2} | options)
        found[key] = str(raised.value)
    with torch.device("meta"):
        away = llama()
    with pytest.raises(ValueError, match="has no value"):
        parallel(away, solver="fsdp").hand_over(VLLM, take, width=2)
    return found


def test_what_is_given_wrong_is_one_error_on_every_rank() -> None:
    first, *others = run(4, refused)
    assert all(other == first for other in others)
    for key, (_, message) in BAD.items():
        assert re.search(message, first[key]), first[key]
    assert "hand over in different ways" in first["differ"]
    assert "the engine is full (on rank 1 of 4)" in first["full"]


@st.composite
def layouts(draw: st.DrawFn, shape: Shape, mesh: Shape) -> Layout:
    """An axis may take runs of a dim, the last of them short, or scattered pieces; both axes may split one dim."""
    layout: list[Replicate | Split] = []
    for ranks in mesh:
        dim = draw(st.integers(0, len(shape)))
        size = shape[dim] if dim < len(shape) else 1
        others = [p.period for p in layout if isinstance(p, Split) and p.dim == dim]
        periods = [p for p in range(ranks, 2 * size + ranks, ranks) if size % p == 0 or (p >= size and not others)]
        periods = [p for p in periods if all(size % o == 0 and o % (p * mesh[0]) == 0 for o in others)]
        layout.append(Split(dim, draw(st.sampled_from(periods))) if dim < len(shape) and periods else Replicate())
    return tuple(layout)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_put_together_what_ranks_want(data: st.DataObject) -> None:
    """Any layouts of two tensors, joined for any number of engine ranks on any ranks, in one process."""
    mesh = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    coordinates = [(a, b) for a in range(mesh[0]) for b in range(mesh[1])]
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))
    dim, width = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 5))
    whole = {name: torch.randn(shape) for name in ("x", "y")}
    held: dict[str, list[tuple[Box, ...]]] = {}
    local: dict[str, list[torch.Tensor]] = {}
    for name, value in whole.items():
        layout = data.draw(layouts(shape, mesh))
        held[name] = [boxes(shape, layout, mesh, at) for at in coordinates]
        slices = [(local_slice(value, layout, mesh, at), at) for at in coordinates]
        local[name] = [unpadded(part, shape, layout, mesh, at) for part, at in slices]
    homes = data.draw(st.lists(st.integers(0, len(coordinates) - 1), min_size=width, max_size=width))
    [tensor] = engine_tensors(f"joined {dim} x%{width} y%{width}", whole, width, None)
    wanted = [(home, slot, *each) for slot, home in enumerate(homes) for each in tensor.ranks[slot]]
    program = pieces(wanted, held)
    made = [torch.zeros(tensor.shape) for _ in homes]
    limit = data.draw(st.integers(8, 200))
    parts_of = [*buckets(program, limit)]
    rows = Counter[int]()  # an index of the longest dim of each piece
    for p in program:
        rows.update({rank: p.put.elements // max(p.put.sizes) for rank in (p.sender, p.home)})
    for bucket in parts_of:
        loads = Counter[int]()
        for p in bucket:
            p.put.of(made[p.target]).add_(p.sent.of(local[p.source][p.sender]))
            for rank in {p.sender, p.home} if p.sender != p.home else ():
                loads[rank] += p.put.elements
        cuts_all = all(max(p.put.sizes) >= len(parts_of) for p in program)
        assert all(load <= limit if cuts_all else load <= limit / 2 + rows[rank] for rank, load in loads.items())
    zeros = torch.zeros(*shape[:dim], -shape[dim] % width, *shape[dim + 1 :])
    parts = [torch.cat([value, zeros], dim).chunk(width, dim) for value in whole.values()]
    for slot, found in enumerate(made):
        assert torch.equal(found, torch.cat([each[slot] for each in parts], dim))
    for p in program:
        holders = {rank for rank, some in enumerate(held[p.source]) if any(p.put.overlap(b).elements for b in some)}
        assert p.sender in holders and (p.sender == p.home) == (p.home in holders)


def test_copies_are_sent_by_turns() -> None:
    """Four ranks hold halves of a tensor, two ranks each; each wants the other half."""
    whole = Box((IndexRange(0, 8, 0),))
    halves = [[whole.part(rank % 2, 2)] for rank in range(4)]
    program = pieces([(rank, rank, "x", whole) for rank in range(4)], {"x": halves})
    assert Counter(p.sender for p in program if p.sender != p.home) == Counter(range(4))
