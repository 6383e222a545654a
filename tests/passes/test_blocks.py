"""ParallelBlocks: what Algorithm 1 gives on real layers, and that blocks are free of communication."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from autopar.ir.graph import JointGraph, Ref, map_references, overload
from autopar.ops.sdpa import ATTENTION
from autopar.passes.blocks.block import BlockDim, Blocks, ParallelBlock
from autopar.passes.blocks.partition import blocks
from autopar.passes.capture.trace import capture


def check(graph: JointGraph, found: Blocks) -> None:
    """Every node is in one group, and every block's forward part is connected to its contractions."""
    groups = [*found.blocks, *found.free, *found.shared]
    assert sorted(i for group in groups for i in group.nodes) == list(range(len(graph.nodes)))
    assert all(found.home[i] is group for group in groups for i in group.nodes)
    names = [group.name for group in (*found.blocks, *found.free)]
    assert len(set(names)) == len(names)
    for block in found.blocks:
        assert set(block.merged) <= set(block.contractions) <= set(block.nodes)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 64


@cache
def llama(batch: int = 4, layers: int = 2) -> JointGraph:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=32, use_cache=False)  # fmt: skip
    inputs = {"input_ids": tokens(batch, 8), "labels": tokens(batch, 8)}
    return capture(transformers.LlamaForCausalLM(config), (), inputs).graph


@cache
def gpt2() -> JointGraph:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    inputs = {"input_ids": tokens(4, 8), "labels": tokens(4, 8)}
    return capture(transformers.GPT2LMHeadModel(config), (), inputs).graph


def of_layer(found: Blocks, layer: str) -> list[str]:
    return [block.name.removeprefix(layer + ".") for block in found.blocks if block.name.startswith(layer + ".")]


def test_llama_has_four_blocks_a_layer() -> None:
    graph = llama()
    found = blocks(graph, 2)
    check(graph, found)
    assert of_layer(found, "model.layers.1") == [
        "self_attn.{q_proj,k_proj,v_proj}", "self_attn.o_proj", "mlp.{gate_proj,up_proj}", "mlp.down_proj",
    ]  # fmt: skip
    assert [len(block.merged) for block in found.blocks] == [3, 1, 2, 1] * 2 + [1]
    assert "merged" in str(found) and "self_attn.o_proj" in str(found)


def test_llama_has_seven_blocks_a_layer_in_the_form_of_the_paper() -> None:
    graph = llama()
    found = blocks(graph, 2, merge=False)
    check(graph, found)
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    assert of_layer(found, "model.layers.1") == [*names, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("merge", [True, False])
def test_gpt2_projects_q_k_and_v_at_once(merge: bool) -> None:
    graph = gpt2()
    found = blocks(graph, 2, merge=merge)
    check(graph, found)
    assert of_layer(found, "transformer.h.1") == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


@cache
def bert() -> JointGraph:
    """Attention written with separate contractions: q @ k, and @ v."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager")  # fmt: skip
    inputs = {"input_ids": tokens(4, 8), "labels": tokens(4, 8)}
    return capture(transformers.BertForMaskedLM(config), (), inputs).graph


def test_eager_attention_is_in_the_block_of_its_projections() -> None:
    graph = bert()
    found = blocks(graph, 2)
    check(graph, found)
    attention = next(block for block in found.blocks if "layer.1.attention" in block.name and len(block.merged) == 3)
    assert len(attention.contractions) == 5, "three projections, scores and their product with the values"
    assert [len(b.merged) for b in found.blocks if "encoder.layer.1." in b.name] == [3, 1, 1, 1]


def test_attention_splits_by_batch_and_by_key_value_head() -> None:
    attention, *_ = blocks(llama(), 2).blocks
    dims = {dim.factor: (dim.block, dim.count) for dim in attention.dims if dim.dim is not None}
    assert dims == {"m": (8, 4), "n": (8, 4)}, "sequences of 8; 8 heads of 4, two to a key-value head"


def test_attention_is_left_free_where_neither_batch_nor_sequence_of_keys_divides() -> None:
    graph = llama(batch=2, layers=1)
    found = blocks(graph, 4)
    check(graph, found)
    attention = next(i for i, node in enumerate(graph.nodes) if node.op == ATTENTION)
    assert isinstance(found.blocks[0], ParallelBlock) and attention not in found.blocks[0].nodes
    assert "Equation 2" in next(group.reason for group in found.free if attention in group.nodes)


def test_norms_residual_adds_embeddings_and_losses_are_free() -> None:
    graph = llama()
    found = blocks(graph, 2)
    names = {group.name for group in found.free}
    assert {"model.embed_tokens", "model.norm", "model.layers.1.input_layernorm", "model.layers.1"} <= names
    (add,) = (group for group in found.free if group.name == "model.layers.1")
    assert "too, after model.layers.1.self_attn.o_proj" in add.reason
    loss = next(i for i, node in enumerate(graph.nodes) if "nll_loss_forward" in node.op)
    assert found.home[loss] in found.free


def test_backward_operators_are_with_their_forward() -> None:
    graph = llama(layers=1)
    found = blocks(graph, 2)
    for block in found.blocks:
        contractions = sum(1 for i in block.nodes if graph.nodes[i].backward and graph.nodes[i].op == "aten.mm.default")
        assert contractions == 2 * len(block.merged), "a gradient of the input and one of the weight"
    parameters = graph.parameters
    outputs = {output.target: output.name for output in graph.outputs if output.role == "gradient"}
    for block in found.blocks:
        own = {name for i in block.nodes for name in graph.nodes[i].inputs}
        for target, value in parameters.items():
            if value in own and graph.producer.get(outputs[target] or "") is not None:
                assert graph.producer[outputs[target] or ""] in block.nodes


def test_branches_and_shared_operators() -> None:
    graph = llama()
    found = blocks(graph, 2)
    attention = found.blocks[0]
    read = {name for i in attention.nodes if not graph.nodes[i].backward for name in graph.nodes[i].inputs}
    assert len(read.intersection(graph.parameters.values())) == 3
    rotary = {i for i, node in enumerate(graph.nodes) if node.op in ("aten.cos.default", "aten.sin.default")}
    (group,) = (shared for shared in found.shared if rotary & set(shared.nodes))
    assert rotary <= set(group.nodes) and group.kind == "constant"
    assert group.readers == tuple(block.name for block in found.blocks if "q_proj" in block.name)


class Siblings(nn.Module):
    """Two users of one contraction: line 22 of Algorithm 1 would visit the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x)
        return torch.relu(y), torch.tanh(y)


def test_all_users_are_visited() -> None:
    graph = capture(Siblings(), (torch.randn(4, 8),), {}).graph
    (block,) = blocks(graph, 2).blocks
    assert {"aten.relu.default", "aten.tanh.default"} <= {graph.nodes[i].op for i in block.nodes}


class Layer(nn.Module):
    """A pre-norm gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return (x + self.down(F.silu(self.gate(y)) * self.up(y))).square().mean()


def shape_of(found: Blocks, graph: JointGraph) -> object:
    """Blocks without the views, which the flattened and the 3-D graph have in different places."""

    def ops(nodes: Sequence[int]) -> list[tuple[str, bool]]:
        views = ("aten.reshape.default", "aten.permute.default")
        return sorted((graph.nodes[i].op, graph.nodes[i].backward) for i in nodes if graph.nodes[i].op not in views)

    return [(block.name, ops(block.nodes), block.dims) for block in found.blocks]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_flattened_and_3d_graphs_have_the_same_blocks(merge: bool, ranks: int) -> None:
    torch.manual_seed(0)
    layer = Layer()
    flat = capture(layer, (torch.randn(32, 16, requires_grad=True),), {}).graph
    deep = capture(layer, (torch.randn(4, 8, 16, requires_grad=True),), {}).graph
    first, second = blocks(flat, ranks, merge=merge), blocks(deep, ranks, merge=merge)
    assert shape_of(first, flat) == shape_of(second, deep)
    assert len(first.blocks) == (2 if merge else 3)


def run(graph: JointGraph, values: dict[str, object], nodes: Sequence[int]) -> dict[str, object]:
    """Run some nodes of the graph from given values."""
    values = dict(values)
    for i in nodes:
        node = graph.nodes[i]
        args = map_references(node.args, lambda name: values[name])
        kwargs = {key: map_references(value, lambda name: values[name]) for key, value in node.kwargs}
        result = overload(node.op)(*args, **kwargs)
        for output, value in zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=False):
            if output:
                values[output] = value
    return values


def differs(left: object, right: object) -> torch.Tensor:
    assert isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return left != right


def perturbed(
    graph: JointGraph, values: dict[str, object], block: ParallelBlock, dim: BlockDim, rank: int
) -> dict[str, object]:
    """The results of the block's merged contractions, changed in what one of two ranks owns. Those of
    another width (keys beside queries) are cut in proportion."""
    assert dim.dim is not None
    found: dict[str, object] = {}
    size = graph.metas[graph.nodes[block.merged[0]].name].shape[dim.dim]
    for i in block.merged:
        name = graph.nodes[i].name
        whole = values[name]
        assert isinstance(whole, torch.Tensor)
        period = dim.block * dim.count * whole.shape[dim.dim] // size
        half = (torch.arange(whole.shape[dim.dim]) % period) // (period // 2)
        mask = (half == rank).reshape([-1 if d == dim.dim else 1 for d in range(whole.ndim)])
        found[name] = torch.where(mask, whole + torch.randn_like(whole), whole)
    return found


def test_blocks_are_free_of_communication() -> None:
    """What a block says it can be split by, it can: results that depend on one half of its
    contractions' results do not depend on the other half (all forward operators run for real)."""
    torch.manual_seed(0)
    graph = llama()
    forward = [i for i, node in enumerate(graph.nodes) if not node.backward]
    values: dict[str, object] = {}
    for given in graph.inputs:
        meta = graph.metas[given.name]
        random = torch.randn(meta.shape) if meta.dtype.is_floating_point else torch.randint(0, 8, meta.shape)
        values[given.name] = random.to(meta.dtype)
    values = run(graph, values, forward)
    checked = 0
    for block in blocks(graph, 2).blocks:
        inside = [i for i in block.nodes if not graph.nodes[i].backward and i > block.merged[0]]
        later = [i for i in inside if i not in block.merged]
        for dim in block.dims:
            if dim.dim is None:
                continue
            changed = []
            for rank in range(2):
                moved = run(graph, values | perturbed(graph, values, block, dim, rank), later)
                changed.append({o: differs(moved[o], values[o]) for i in later for o in graph.nodes[i].outputs if o})
            for name in changed[0]:
                assert not torch.any(changed[0][name] & changed[1][name]), name
                checked += bool(changed[0][name].any())
    assert checked > 20


def test_a_graph_without_contractions_is_free() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    graph = capture(Scale(), (torch.randn(4, 8),), {}).graph
    found = blocks(graph, 2)
    check(graph, found)
    assert found.blocks == () and found.free


def test_a_layer_of_one_feature() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    graph = capture(model, (torch.randn(6, 1),)).graph
    found = blocks(graph, 2)
    check(graph, found)
    assert {i for block in found.blocks for i in block.contractions} >= {
        i for i, node in enumerate(graph.nodes) if node.op == "aten.addmm.default"
    }


def test_names_of_values_do_not_matter() -> None:
    graph = llama(layers=1)
    rename = {name: f"v{i}" for i, name in enumerate(graph.metas)}
    nodes = tuple(
        type(node)(
            op=node.op, args=map_references(node.args, lambda n: Ref(rename[n])),
            kwargs=map_references(node.kwargs, lambda n: Ref(rename[n])),
            outputs=tuple(rename.get(o, "") for o in node.outputs),
            module=node.module, backward=node.backward, sequence=node.sequence,
        )
        for node in graph.nodes
    )  # fmt: skip
    renamed = JointGraph(
        inputs=tuple(type(i)(name=rename[i.name], role=i.role, target=i.target) for i in graph.inputs),
        nodes=nodes, outputs=(), metas={rename[name]: meta for name, meta in graph.metas.items()},
    )  # fmt: skip
    assert [b.nodes for b in blocks(renamed, 2).blocks] == [b.nodes for b in blocks(graph, 2).blocks]
