"""Segments: every claim of a `Repeated` is checked from scratch, on real models and on odd ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.ir.graph import GraphInput, GraphOutput, JointGraph, Node, Ref, TensorMeta, map_references
from autopar.passes.capture.trace import capture
from autopar.passes.segments.facts import fingerprint
from autopar.passes.segments.search import segments
from autopar.passes.segments.segment import Repeated, Segments
from autopar.planning.planner import Planner


def check(graph: JointGraph, found: Segments) -> None:
    """All invariants of the class docstrings, with nothing taken from the pass."""
    inside = [i for repeated in found.repeats for copy in repeated.copies for i in copy]
    assert len(set(inside)) == len(inside)
    assert sorted([*inside, *found.rest]) == list(range(len(graph.nodes)))
    for repeated in found.repeats:
        check_repeated(graph, repeated)


def check_repeated(graph: JointGraph, repeated: Repeated) -> None:
    count = len(repeated.copies)
    assert count >= 2 and len({len(copy) for copy in repeated.copies}) == 1
    assert len(repeated.own) == len(repeated.varied) == len(repeated.results) == count
    copy_of = {i: k for k, copy in enumerate(repeated.copies) for i in copy}
    made = {o: (copy_of[i], repeated.copies[copy_of[i]].index(i), slot)
            for i in copy_of for slot, o in enumerate(graph.nodes[i].outputs) if o}  # fmt: skip
    # what each copy may read, and under which aligned role
    roles: list[dict[str, object]] = [{} for _ in range(count)]
    for name, (k, position, slot) in made.items():
        roles[k][name] = ("made", position, slot)
    for b, border in enumerate(repeated.borders):
        assert len(border.values) == count + 1
        for k in range(count):
            read = border.values[k + 1] if border.backward else border.values[k]
            assert read not in roles[k], "a copy reads its own value as a border"
            roles[k][read] = ("border", b)
        makers = [made.get(value) for value in border.values]
        inner = makers[:-1] if border.backward else makers[1:]
        assert [m[0] for m in inner if m] == list(range(count)) and len({m[1:] for m in inner if m}) == 1
        assert (makers[-1] if border.backward else makers[0]) is None, "the run's entry is made outside"
        assert len({graph.metas[value] for value in border.values}) == 1
    inputs = {i.name: i.role for i in graph.inputs}
    for peers in zip(*repeated.own, strict=True):
        assert len({inputs[name] for name in peers}) == 1
    for k in range(count):
        for s, name in enumerate(repeated.shared):
            assert name not in made and name not in roles[k]
            roles[k][name] = ("shared", s)
        for s, name in enumerate(repeated.varied[k]):
            assert name not in made and name not in roles[k]
            roles[k][name] = ("varied", s)
            assert name not in depend_on_parameters(graph)
        for s, name in enumerate(repeated.own[k]):
            assert name in inputs and name not in roles[k]
            roles[k][name] = ("own", s)
            assert {copy_of.get(i) for i in graph.consumers[name]} == {k}
    for copy_nodes in zip(*repeated.copies, strict=True):
        described = [describe(graph, graph.nodes[i], roles[k]) for k, i in enumerate(copy_nodes)]
        assert all(d == described[0] for d in described)
    allowed = {b.values[0] if b.backward else b.values[-1] for b in repeated.borders}
    for name, (k, _, _) in made.items():
        for reader in graph.consumers.get(name, ()):
            if copy_of.get(reader) is None:
                assert name in allowed, f"{name} of copy {k} escapes"
    results = {o.name: o.role for o in graph.outputs if o.name in made}
    for aligned in zip(*repeated.results, strict=True):
        assert len({results[name] for name in aligned}) == 1
        assert [made[name][0] for name in aligned] == list(range(count))
        assert len({made[name][1:] for name in aligned}) == 1
    listed = {name for names in repeated.results for name in names}
    assert set(results) <= listed | allowed


def depend_on_parameters(graph: JointGraph) -> set[str]:
    values = {i.name for i in graph.inputs if i.role not in ("buffer", "input")}
    for node in graph.nodes:
        values.update(o for o in node.outputs if values.intersection(node.inputs))
    return values


def describe(graph: JointGraph, node: Node, roles: dict[str, object]) -> object:
    """Everything about a node but its names: equal for the nodes of one position."""
    args = map_references((node.args, node.kwargs), lambda name: ("operand", roles[name], graph.metas[name]))
    return node.op, node.backward, repr(args), tuple(graph.metas[o] if o else None for o in node.outputs)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 64


@cache
def llama(layers: int) -> JointGraph:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False)  # fmt: skip
    batch = {"input_ids": tokens(2, 8), "labels": tokens(2, 8)}
    return capture(transformers.LlamaForCausalLM(config), (), batch).graph


@cache
def gpt2() -> JointGraph:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    batch = {"input_ids": tokens(2, 8), "labels": tokens(2, 8)}
    return capture(transformers.GPT2LMHeadModel(config), (), batch).graph


def bert() -> JointGraph:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    batch = {"input_ids": tokens(2, 8), "labels": tokens(2, 8)}
    return capture(transformers.BertForMaskedLM(config), (), batch).graph


def t5() -> JointGraph:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    batch = {"input_ids": tokens(2, 8), "labels": tokens(2, 6)}
    return capture(transformers.T5ForConditionalGeneration(config), (), batch).graph


def vit() -> JointGraph:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=8,
        num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    batch = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}
    return capture(transformers.ViTForImageClassification(config), (), batch).graph


class Chain(nn.Module):
    """A residual stream through modules, one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def block(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), nn.LayerNorm(width))


def chain(*modules: nn.Module) -> JointGraph:
    return capture(Chain(*modules), (torch.randn(4, 8, requires_grad=True),), {}).graph


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_llama_layers_repeat_with_the_residual_and_its_gradient_between_them(layers: int) -> None:
    graph = llama(layers)
    found = segments(graph)
    check(graph, found)
    (repeated,) = found.repeats
    assert repeated.name == "model.layers.*"
    assert repeated.count == layers
    assert [border.backward for border in repeated.borders] == [False, True]
    assert all(graph.metas[border.values[0]].shape == (2, 8, 32) for border in repeated.borders)
    assert len(repeated.own[0]) == len(repeated.results[0]) == 9


@pytest.mark.parametrize(("build", "counts"), [(gpt2, [4]), (bert, [3]), (vit, [3]), (t5, [2, 2])])
def test_models_of_other_families(build: Callable[[], JointGraph], counts: list[int]) -> None:
    graph = build()
    found = segments(graph)
    check(graph, found)
    assert [repeated.count for repeated in found.repeats] == counts


def test_same_graph_same_segments() -> None:
    graph = gpt2()
    assert segments(graph) == segments(graph)
    assert str(segments(graph)) == str(segments(graph))
    assert "4 copies" in str(segments(graph))


def test_equal_blocks_of_an_mlp() -> None:
    graph = chain(*(block(8, 16) for _ in range(6)))
    found = segments(graph)
    check(graph, found)
    (repeated,) = found.repeats
    assert repeated.count >= 5 and len(repeated.borders) == 2


def test_a_period_of_two_modules() -> None:
    graph = chain(*(module for _ in range(5) for module in (block(8, 16), nn.Linear(8, 8), nn.Tanh())))
    found = segments(graph)
    check(graph, found)
    (repeated,) = found.repeats
    assert repeated.count >= 4 and len(repeated.own[0]) == 8


def test_two_different_runs() -> None:
    graph = chain(*(block(8, 16) for _ in range(3)), nn.Linear(8, 12), *(block(12, 20) for _ in range(4)))
    found = segments(graph)
    check(graph, found)
    assert [repeated.count >= 2 for repeated in found.repeats] == [True, True]
    assert {graph.metas[r.borders[0].values[1]].shape for r in found.repeats} == {(4, 8), (4, 12)}


def test_nothing_repeats() -> None:
    graph = chain(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 4))
    found = segments(graph)
    assert found.repeats == ()
    assert found.rest == tuple(range(len(graph.nodes)))


def hand(nodes: list[Node], inputs: list[str], outputs: list[str]) -> JointGraph:
    meta = TensorMeta((4, 4), torch.float32)
    names = [*inputs, *(o for node in nodes for o in node.outputs)]
    return JointGraph(
        inputs=tuple(GraphInput(name=n, role="parameter" if n[0] == "w" else "input", target=n) for n in inputs),
        nodes=tuple(nodes),
        outputs=tuple(GraphOutput(name=n, role="output", target=n) for n in outputs),
        metas=dict.fromkeys(names, meta),
    )


def op(name: str, output: str, *operands: Any) -> Node:
    return Node(op=name, args=tuple(Ref(o) if isinstance(o, str) else o for o in operands), outputs=(output,))


def test_forward_only() -> None:
    nodes = []
    for k in range(3):
        nodes += [op("aten.mm.default", f"m{k}", f"x{k}", f"w{k}"), op("aten.relu.default", f"x{k + 1}", f"m{k}")]
    graph = hand(nodes, ["x0", "w0", "w1", "w2"], ["x3"])
    found = segments(graph)
    check(graph, found)
    (repeated,) = found.repeats
    assert repeated.count == 3 and repeated.own == (("w0",), ("w1",), ("w2",))
    assert [border.values for border in repeated.borders] == [("x0", "x1", "x2", "x3")]


def test_a_value_read_two_copies_later_is_no_border() -> None:
    nodes = []
    for k in range(4):
        earlier = f"x{max(k - 1, 0)}"
        nodes += [
            op("aten.mm.default", f"m{k}", f"x{k}", f"w{k}"),
            op("aten.add.Tensor", f"x{k + 1}", f"m{k}", earlier),
        ]
    graph = hand(nodes, ["x0", "w0", "w1", "w2", "w3"], ["x4"])
    check(graph, segments(graph))
    skipping = [border for repeated in segments(graph).repeats for border in repeated.borders]
    assert all(repeated.count == 2 for repeated in segments(graph).repeats), skipping


def test_another_constant_ends_a_run() -> None:
    nodes = []
    for k in range(6):
        nodes += [op("aten.mm.default", f"m{k}", f"x{k}", f"w{k}"),
                  op("aten.mul.Scalar", f"x{k + 1}", f"m{k}", 1.0 if k < 4 else 1)]  # fmt: skip
    graph = hand(nodes, ["x0", *(f"w{k}" for k in range(6))], ["x6"])
    found = segments(graph)
    check(graph, found)
    assert [repeated.count for repeated in found.repeats] == [4, 2]


def test_a_weight_that_a_later_node_reads_keeps_its_copy_out() -> None:
    nodes = [op("aten.mm.default", f"x{k + 1}", f"x{k}", f"w{k}") for k in range(4)]
    nodes.append(op("aten.add.Tensor", "y", "x4", "w3"))
    graph = hand(nodes, ["x0", "w0", "w1", "w2", "w3"], ["y"])
    found = segments(graph)
    check(graph, found)
    assert [repeated.count for repeated in found.repeats] == [3]


class Scaled(nn.Module):
    """What it multiplies with has these roles."""

    def __init__(self, *roles: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        for k, role in enumerate(roles):
            value = torch.ones(4) if role == "buffer" else nn.Parameter(torch.ones(4))
            setattr(self, f"scale{k}", nn.Buffer(value) if role == "buffer" else value)
        self.count = len(roles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        x = first.detach()
        for k in range(self.count):
            x = (x * getattr(self, f"scale{k}")).sin().detach()
        return (x + first).square().mean()


@pytest.mark.parametrize("roles", ["pb", "pppb", "bbpp", "pbpbpb", "ppbb"])
def test_a_weight_without_a_gradient_and_a_buffer_are_no_copies_of_one_another(roles: str) -> None:
    model, x = Scaled(*({"p": "parameter", "b": "buffer"}[role] for role in roles)), torch.randn(2, 4)
    planner = Planner(model, {"a": 2}, (x,))
    check(planner.captured.graph, segments(planner.captured.graph))
    assert planner.plan().mesh == {"a": 2}


def test_projections_side_by_side_are_not_layers() -> None:
    nodes = [op("aten.mm.default", f"p{k}", "x", f"w{k}") for k in range(3)]
    nodes += [op("aten.add.Tensor", "s", "p0", "p1"), op("aten.mul.Tensor", "y", "s", "p2")]
    assert segments(hand(nodes, ["x", "w0", "w1", "w2"], ["y"])).repeats == ()


def test_fingerprints_tell_segments_apart_by_how_their_contractions_depend() -> None:
    def layer(reshaped: tuple[int, ...]) -> JointGraph:
        meta = TensorMeta((4, 4), torch.float32)
        nodes = [op("aten.mm.default", "m", "x", "w0"), op("aten.reshape.default", "r", "m", reshaped),
                 op("aten.reshape.default", "f", "r", (4, 4)), op("aten.mm.default", "y", "f", "w1")]  # fmt: skip
        if reshaped == (4, 4):
            nodes[2] = op("aten.permute.default", "f", "r", (1, 0))
        graph = hand(nodes, ["x", "w0", "w1"], ["y"])
        metas = dict(graph.metas, r=TensorMeta(reshaped, meta.dtype))
        return JointGraph(inputs=graph.inputs, nodes=graph.nodes, outputs=graph.outputs, metas=metas)

    def of(graph: JointGraph) -> str:
        return fingerprint(graph, range(len(graph.nodes)))

    assert of(layer((2, 2, 4))) == of(layer((16,))), "there and back, by different ways"
    assert of(layer((2, 2, 4))) != of(layer((4, 4))), "the same contractions, one dependency transposed"


def test_copies_of_a_layer_have_one_fingerprint() -> None:
    graph = gpt2()
    (repeated,) = segments(graph).repeats
    assert len({fingerprint(graph, copy) for copy in repeated.copies}) == 1


class TakesItsGradient(nn.Module):
    """Forward takes the gradient of a convolution's weight, and not that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(2, 2, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), self.conv.weight, create_graph=True)
        return self.last(y).square().mean() + gradient.square().mean()


def test_a_contraction_whose_first_result_nobody_needs_has_a_fingerprint() -> None:
    graph = capture(TakesItsGradient(), (torch.randn(3, 2, 6),)).graph
    assert any(node.outputs[0] == "" and not node.backward for node in graph.nodes)
    assert len(fingerprint(graph, range(len(graph.nodes)))) == 8


def gemma2(layers: int) -> JointGraph:
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, sliding_window=4, use_cache=False)  # fmt: skip
    batch = {"input_ids": tokens(2, 8), "labels": tokens(2, 8)}
    return capture(transformers.Gemma2ForCausalLM(config), (), batch).graph


@pytest.mark.parametrize("layers", [2, 4, 7])
def test_layers_that_alternate_in_their_masks_are_copies_of_one(layers: int) -> None:
    graph = gemma2(layers)
    found = segments(graph)
    check(graph, found)
    (repeated,) = found.repeats
    assert repeated.count == layers and len(repeated.borders) == 2
    assert len(repeated.shared) == 2, "cos and sin"
    masks = [names for (names,) in repeated.varied]
    assert masks == [masks[k % 2] for k in range(layers)] and masks[0] != masks[1], "of sliding and of full attention"
    assert "varied" in str(repeated)


def test_copies_that_may_not_vary_repeat_in_pairs() -> None:
    graph = gemma2(4)
    found = segments(graph, may_vary=False)
    check(graph, found)
    (repeated,) = found.repeats
    assert repeated.count == 2 and len(repeated.shared) == 4


def test_a_skip_is_read_where_it_is_made() -> None:
    """What a layer computes from parameters is no value that copies may vary in: all of it would be replicated."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skips = []
            for layer in self.down:
                x = torch.relu(layer(x))
                skips.append(x)
            for layer in self.up:
                x = torch.relu(layer(x) + skips.pop())
            return x.square().mean()

    graph = capture(Skips(), (torch.randn(4, 8),), {}).graph
    found = segments(graph)
    check(graph, found)
    assert not any(names for repeated in found.repeats for names in repeated.varied)


def test_a_long_model_without_repeats() -> None:
    """Digits travel along 300 operators and their backward, none like another: no recursion is that deep."""
    layers = [part for i in range(150) for part in (nn.Linear(8 + 2 * i, 10 + 2 * i, bias=False), nn.GELU())]
    with torch.device("meta"):
        model, x = nn.Sequential(*layers), torch.zeros(4, 8)
    space = Planner(model, {"a": 2}, (x,), loss_fn=torch.sum).space
    assert not space.repeats
    first = next(site for site in space.rest.sites.values() if site.kind == "op")
    assert len(first.choices[2]) > 1
