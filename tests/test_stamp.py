"""A stamped capture is the full capture, node for node, and what cannot be stamped is captured in full."""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.graph import JointGraph, Node, Ref, map_references, overload
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.trace import capture
from autopar.passes.segments.search import segments
from autopar.passes.segments.segment import Repeated

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(16).reshape(2, 8) * 7 % 50
BATCH = {"input_ids": TOKENS, "labels": TOKENS.flip(0)}
SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    def full(self) -> Captured:
        return capture(self.model, self.args, dict(self.kwargs), loss_fn=self.loss_fn, stamp=False)

    def stamped(self) -> Captured:
        return capture(self.model, self.args, dict(self.kwargs), loss_fn=self.loss_fn)


# ---- models that repeat ----------------------------------------------------------------------------


def llama(layers: int = 5, **overrides: Any) -> Case:
    config = {"num_hidden_layers": layers, "num_key_value_heads": 2, "use_cache": False, **SMALL, **overrides}
    return Case(model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)), kwargs=BATCH)


def gpt2(**overrides: Any) -> Case:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=5, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **overrides},
    )  # fmt: skip
    return Case(model=transformers.GPT2LMHeadModel(config), kwargs=BATCH)


def bert(**overrides: Any) -> Case:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**{"num_hidden_layers": 5, **dropout, **SMALL, **overrides})
    mask = torch.ones_like(TOKENS)
    return Case(model=transformers.BertForMaskedLM(config), kwargs={**BATCH, "attention_mask": mask})


def vit() -> Case:
    small = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = transformers.ViTConfig(
        num_hidden_layers=5, image_size=8, patch_size=4, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small,
    )  # fmt: skip
    kwargs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8), "labels": torch.tensor([1, 4])}
    return Case(model=transformers.ViTForImageClassification(config), kwargs=kwargs)


def qwen3(**overrides: Any) -> Case:
    config = {"num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 4, "use_cache": False, **SMALL, **overrides}
    return Case(model=transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)), kwargs=BATCH)


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        num_hidden_layers=5, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        experts_implementation="batched_mm", **SMALL,
    )  # fmt: skip
    return Case(model=transformers.MixtralForCausalLM(config), kwargs=BATCH)


class Layer(nn.Module):
    def __init__(self, number: int, width: int = 6) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Layers between a projection in and a projection out."""

    def __init__(self, count: int = 6, make: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.project = nn.Linear(4, 6)
        self.layers = nn.ModuleList(make(i) for i in range(count))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.project(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return (output * output).mean()


def stack(model: nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None = mean_square) -> Case:
    return Case(model=model, kwargs={"x": torch.linspace(-1, 1, 20).reshape(5, 4)}, loss_fn=loss_fn)


def alternating() -> Case:
    class Other(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(self.down(torch.tanh(self.up(self.norm(x)))))

    return stack(Stack(10, lambda i: Other(i) if i % 2 else Layer(i)))


def bare() -> Case:
    """Nothing before the layers and nothing after them."""
    model = nn.Sequential(*(Layer(i, 4) for i in range(7)))
    return Case(model=model, args=(torch.linspace(-1, 1, 20).reshape(5, 4),), kwargs={})


def with_buffers() -> Case:
    """BatchNorm's running statistics are buffers that the step replaces."""

    class Norms(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(self.norm(x)))

    return stack(Stack(6, Norms))


def two_stacks() -> Case:
    model = nn.Sequential(Stack(6), nn.Linear(3, 4), Stack(5))
    return Case(model=model, args=(torch.linspace(-1, 1, 20).reshape(5, 4),), kwargs={}, loss_fn=mean_square)


def frozen() -> Case:
    case = stack(Stack(7))
    for layer in case.model.get_submodule("layers").children():
        layer.get_parameter("up.bias").requires_grad_(False)
    return case


def masked(kinds: str, of: Callable[[Any, int], torch.Tensor] | None = None) -> Callable[[], Case]:
    """Layers each of which reads one of two masks: that of its letter."""

    class Masked(Layer):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x + mask * self.down(torch.relu(self.up(self.norm(x)))) * mask.cos()

    def window(_: Any, width: int) -> torch.Tensor:
        return (torch.arange(6) < width).float()

    class Outer(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            masks = {"w": (of or window)(self, 3), "f": (of or window)(self, 5)}
            x = self.project(x)
            for layer, kind in zip(self.layers, kinds, strict=True):
                x = layer(x, masks[kind])
            return self.head(x)

    return lambda: stack(Outer(len(kinds), Masked))


def _trained_mask(model: Any, width: int) -> torch.Tensor:
    return torch.sigmoid(model.project.weight[0].mean() + torch.arange(6) / width)


def evaluated() -> Case:
    case = stack(Stack())
    return replace(case, model=case.model.eval())


STAMPED: Mapping[str, Callable[[], Case]] = {
    "masks in turn": masked("wfwfwfwf"),
    "a mask every third time": masked("wwfwwfwwfwwf"),
    "a mask of two layers": masked("wwwwfwwwfwww"),
    "a mask of the last layers": masked("wwwwwwfff"),
    "mlp, evaluated": evaluated,
    "llama, tied and with a cache": lambda: llama(tie_word_embeddings=True, use_cache=True),
    "gpt2": gpt2,
    "gpt2 with dropout": lambda: gpt2(resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1),
    "bert": bert,
    "vit": vit,
    "qwen3, sliding and full": lambda: qwen3(
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "mixtral": mixtral,
    "mlp": lambda: stack(Stack()),
    "mlp with gradients into its output": lambda: stack(Stack(), None),
    "mlp of two kinds of layers": alternating,
    "mlp without ends": bare,
    "mlp with buffers": with_buffers,
    "mlp with frozen biases": frozen,
    "mlp of two stacks": two_stacks,
}


# ---- models that do not ----------------------------------------------------------------------------


def altered(change: Callable[[nn.ModuleList], None], count: int = 6) -> Callable[[], Case]:
    def make() -> Case:
        case = stack(Stack(count))
        layers = case.model.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        change(layers)
        return case

    return make


def _dropout(layers: nn.ModuleList) -> None:
    layers[3].dropout.p = 0.5


def _eps(layers: nn.ModuleList) -> None:
    layers[2].norm.eps = 0.1


def _freeze(layers: nn.ModuleList) -> None:
    layers[3].up.weight.requires_grad_(False)


def _tie(layers: nn.ModuleList) -> None:
    layers[1].up.weight = layers[4].up.weight


def _hook(layers: nn.ModuleList) -> None:
    layers[3].register_forward_hook(lambda module, args, output: 2 * output)


def _patch(layers: nn.ModuleList) -> None:
    layers[3].forward = types.MethodType(lambda self, x: 2 * Layer.forward(self, x), layers[3])


def numbered(scale: Callable[[Layer], float]) -> Callable[[], Case]:
    """Layers that compute with their own number."""

    class Numbered(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale(self)

    return lambda: stack(Stack(9, Numbered))


def outside(forward: Callable[[Any, torch.Tensor], Any]) -> Callable[[], Case]:
    """Layers that are alike in a model whose own code treats them one by one."""

    class Outside(Stack):
        pass

    Outside.forward = forward  # type: ignore[method-assign,assignment]
    return lambda: stack(Outside(8), None)


def _every_other(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    for i, layer in enumerate(self.layers):
        x = layer(2 * x if i == 4 else x)
    return self.head(x)


def _skipped(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    for i, layer in enumerate(self.layers):
        x = x if i == 4 else layer(x)
    return self.head(x) + 0 * sum(p.sum() for p in self.layers[4].parameters())


def _between(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    total = x.sum()
    for layer in self.layers:
        x = layer(x)
        total = total + x.square().mean()
    return self.head(x) + total


def _residual_outside(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    for layer in self.layers:
        x = x + layer(x)
    return self.head(x)


def _skips(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    down = []
    for layer in self.layers[:4]:
        x = layer(x)
        down.append(x)
    for layer in self.layers[4:]:
        x = layer(x + down.pop())
    return self.head(x)


def _all_states(self: Any, x: torch.Tensor) -> Any:
    states = [self.project(x)]
    for layer in self.layers:
        states.append(layer(states[-1]))
    return (self.head(states[-1]), *states)


def _stacked(self: Any, x: torch.Tensor) -> torch.Tensor:
    states = [self.project(x)]
    for layer in self.layers:
        states.append(layer(states[-1]))
    return self.head(torch.stack(states).mean(0))


def _twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    for layer in [*self.layers, *self.layers]:
        x = layer(x)
    return self.head(x)


def _backwards(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x)
    for layer in reversed(self.layers):
        x = layer(x)
    return self.head(x)


def hidden_states() -> Case:
    case = llama()
    return replace(case, kwargs={**case.kwargs, "output_hidden_states": True})


def albert() -> Case:
    config = transformers.AlbertConfig(
        num_hidden_layers=5, embedding_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL
    )
    return Case(model=transformers.AlbertForMaskedLM(config), kwargs=BATCH)


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=5, num_decoder_layers=1, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Case(model=transformers.T5ForConditionalGeneration(config), kwargs=BATCH)


UNLIKE: Mapping[str, Callable[[], Case]] = {
    "dropout of one layer": altered(_dropout),
    "eps of one layer": altered(_eps),
    "one layer in part frozen": altered(_freeze),
    "a parameter of two layers": altered(_tie),
    "a hook on one layer": altered(_hook),
    "another forward of one layer": altered(_patch),
    "four layers": lambda: stack(Stack(4)),
    "a factor by number": numbered(lambda layer: 1 / (layer.number + 1)),
    "every fourth layer by number": numbered(lambda layer: 2.0 if layer.number % 4 == 3 else 1.0),
    "a layer by number": numbered(lambda layer: 2.0 if layer.number in (4,) else 1.0),
    "the first layer by number": numbered(lambda layer: 1.0 if layer.number else 2.0),
    "gpt2 scaled by number": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "one argument differs": outside(_every_other),
    "a mask of one layer in the middle": masked("wwwwwfwwwww"),
    "masks of parameters": masked("wfwfwfwf", _trained_mask),
    "one layer is skipped": outside(_skipped),
    "operators between layers": outside(_between),
    "a residual outside of layers": outside(_residual_outside),
    "skip connections": outside(_skips),
    "all states are outputs": outside(_all_states),
    "all states are read": outside(_stacked),
    "layers are called twice": outside(_twice),
    "layers are called backwards": outside(_backwards),
    "llama with hidden states": hidden_states,
    "albert": albert,
    "t5": t5,
}


# ---- layers that look alike: what Python does with one of them ---------------------------------------


def layered(
    forward: Callable[[Any, torch.Tensor, Any], torch.Tensor], count: int = 9, **attributes: Any
) -> Callable[[], Case]:
    """Layers whose forward is given the stack that they are in."""

    class Inner(Layer):
        def forward(self, x: torch.Tensor, stack: Any) -> torch.Tensor:  # type: ignore[override]
            return forward(self, x, stack)

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return Layer.forward(self, x)

    class Outer(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.project(x)
            self.calls, self.losses, self.states = [0], [], [x]
            for layer in self.layers:
                x = layer(x, self)
                self.states.append(x)
            extra = sum(self.losses) if self.losses else 0.0
            return self.head(x) + extra

    def make() -> Case:
        model = Outer(count, Inner)
        for name, value in attributes.items():
            setattr(model, name, value)
        return stack(model)

    return make


def _no_grad_in_the_middle(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    with torch.set_grad_enabled(layer.number != 4):
        return x + layer.block(x)


def _part_without_gradient(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(layer.up(x)).mean()
    return layer.block(x) * (scale if layer.number != 5 else scale + 1)


def _no_grad_under_autocast(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(layer.number != 4):
        return x + layer.block(x).float()


def _autocast(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=layer.number != 4):
        return x + layer.block(x).float()


def _all_under_autocast(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + layer.block(x).float()


def _counted(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    stack.calls[0] += 1
    return layer.block(x) * (2.0 if stack.calls[0] == 5 else 1.0)


def _looked_up(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x) * stack.scales[layer.number]


def _aux_loss(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    x = layer.block(x)
    if layer.number % 2:
        stack.losses.append(x.square().mean())
    return x


def _one_aux_loss(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    x = layer.block(x)
    if layer.number == 4:
        stack.losses.append(x.square().mean())
    return x


def _detached_once(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x.detach() if layer.number == 4 else x)


def _detached_always(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x.detach()) + 0.5 * x


def _long_skip(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x) + stack.states[max(layer.number - 2, 0)]


def _first_state(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x) + stack.states[0]


def _parameters_of_all(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x) / (1 + sum(1 for _ in stack.parameters()) + (layer.number == 4))


def _neighbour(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    other = stack.layers[(layer.number + 1) % len(stack.layers)]
    return layer.block(x) + other.norm(x)


def _features(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x) * stack.features[layer.number]


def _constant(layer: Any, x: torch.Tensor, stack: Any) -> torch.Tensor:
    return layer.block(x) + torch.tensor([float(layer.number)] * 6)


ALIKE: Mapping[str, Callable[[], Case]] = {
    "no gradients in a layer": layered(_no_grad_in_the_middle),
    "a part of each without gradients": layered(_part_without_gradient),
    "no gradients in a layer under autocast": layered(_no_grad_under_autocast),
    "autocast off in a layer": layered(_autocast),
    "all under autocast": layered(_all_under_autocast),
    "a counter that all share": layered(_counted),
    "a list that is longer than the run": layered(_looked_up, scales=[1.0, 1.0, 1.0, 1.0, 2.0, *([1.0] * 20)]),
    "a dict by number": layered(_looked_up, scales={i: 3.0 if i == 5 else 1.0 for i in range(30)}),
    "a feature by number": layered(_features, features=[torch.full((6,), 1.0 + i) for i in range(9)]),
    "auxiliary losses": layered(_aux_loss),
    "one auxiliary loss": layered(_one_aux_loss),
    "one input detached": layered(_detached_once),
    "inputs detached": layered(_detached_always),
    "skips of two layers": layered(_long_skip),
    "the first state": layered(_first_state),
    "the number of parameters": layered(_parameters_of_all),
    "the next layer's norm": layered(_neighbour),
    "a constant by number": layered(_constant),
}
UNLIKE = {**UNLIKE, **ALIKE}


# ---- the checks ------------------------------------------------------------------------------------


def prepared(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    case = make()
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return case


def was_stamped(log: pytest.LogCaptureFixture) -> bool:
    messages = [record.getMessage() for record in log.records if record.name.startswith("autopar.passes.c")]
    assert messages
    return not any("in full" in message for message in messages)


def renaming(a: JointGraph, b: JointGraph) -> dict[str, str]:
    """Names of a -> names of b, under which the two are one graph, in one order. Asserts that they are."""
    names: dict[str, str] = {}

    def pair(x: str, y: str) -> None:
        assert names.setdefault(x, y) == y, (x, y, names[x])
        assert a.metas[x] == b.metas[y], (x, y)

    assert [(i.role, i.target) for i in a.inputs] == [(i.role, i.target) for i in b.inputs]
    for x, y in zip(a.inputs, b.inputs, strict=True):
        pair(x.name, y.name)
    assert len(a.nodes) == len(b.nodes)
    for m, n in zip(a.nodes, b.nodes, strict=True):
        assert [bool(o) for o in m.outputs] == [bool(o) for o in n.outputs], (m, n)
        for x, y in zip(m.outputs, n.outputs, strict=True):
            if x:
                pair(x, y)
        assert renamed(m, names) == replace(n, sequence=0), (m, n)
    assert [(o.role, o.target) for o in a.outputs] == [(o.role, o.target) for o in b.outputs]
    assert [o.name and names[o.name] for o in a.outputs] == [o.name for o in b.outputs]
    assert len(set(names.values())) == len(names) == len(a.metas) == len(b.metas)
    assert [names[name] for name in a.metas] == list(b.metas)
    # sequence numbers are the same up to gaps
    numbers = sorted({(m.sequence, n.sequence) for m, n in zip(a.nodes, b.nodes, strict=True)})
    assert len({x for x, _ in numbers}) == len({y for _, y in numbers}) == len(numbers)
    assert [y for _, y in numbers] == sorted(y for _, y in numbers)
    return names


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    def rename(name: str) -> Ref:
        return Ref(names[name])

    return replace(
        node,
        args=map_references(node.args, rename),
        kwargs=tuple((key, map_references(value, rename)) for key, value in node.kwargs),
        outputs=tuple(names[o] if o else "" for o in node.outputs),
        sequence=0,
    )


def form(repeat: Repeated) -> tuple[Any, ...]:
    return (
        repeat.name,
        repeat.copies,
        len(repeat.shared),
        [len(o) for o in repeat.own],
        [len(r) for r in repeat.results],
    )


def same(stamped: Captured, full: Captured) -> None:
    """The stamped capture is the full one."""
    names = renaming(full.graph, stamped.graph)
    for field in ("input_spec", "input_leaves", "output_spec", "output_leaves", "loss", "tied", "training"):
        assert getattr(stamped, field) == getattr(full, field), field
    assert stamped.constants.keys() == full.constants.keys()
    a, b = segments(full.graph), segments(stamped.graph)
    assert a.rest == b.rest and [form(r) for r in a.repeats] == [form(r) for r in b.repeats]
    for r, s in zip(a.repeats, b.repeats, strict=True):
        borders = [(tuple(names[v] for v in border.values), border.backward) for border in r.borders]
        assert borders == [(border.values, border.backward) for border in s.borders]


def interpret(captured: Captured, case: Case) -> dict[tuple[str, str], torch.Tensor]:
    """(role, target) -> what the graph gives for it; tangents are ones."""
    graph = captured.graph
    tensors = {**dict(case.model.named_parameters()), **dict(case.model.named_buffers()), **captured.constants}
    tensors = {**tensors, **captured.bind(case.args, case.kwargs)}
    values = {}
    for i in graph.inputs:
        values[i.name] = torch.ones(graph.metas[i.name].shape) if i.role == "tangent" else tensors[i.target].detach()
    for node in graph.nodes:
        kwargs = {key: map_references(value, values.__getitem__) for key, value in node.kwargs}
        result = overload(node.op)(*map_references(node.args, values.__getitem__), **kwargs)
        for name, value in zip(node.outputs, (result,) if isinstance(result, torch.Tensor) else result, strict=True):
            values[name] = value
    return {(o.role, o.target): values[o.name] for o in graph.outputs if o.name is not None}


def right(captured: Captured, case: Case) -> None:
    """The graph on real weights gives eager's loss, gradients and buffers."""
    found = interpret(captured, case)
    model = copy.deepcopy(case.model)
    output = model(*case.args, **case.kwargs)
    loss = (
        case.loss_fn(output)
        if case.loss_fn is not None
        else output
        if isinstance(output, torch.Tensor)
        else output.loss
    )
    close(found["output", captured.loss or "output"], loss.detach())
    loss.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(found["gradient", name], parameter.grad)
        else:
            assert ("gradient", name) not in found, name
    for name, buffer in model.named_buffers():
        if ("mutation", name) in found:
            close(found["mutation", name], buffer)


def close(found: torch.Tensor, expected: torch.Tensor | None) -> None:
    assert expected is not None and found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * max(expected.abs().max().item(), 1e-3)


def state(model: nn.Module) -> list[Any]:
    """Everything of a model that a capture could change."""
    found: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        attributes = {name: value for name, value in vars(module).items() if not isinstance(value, dict)}
        hooks = [len(value) for name, value in vars(module).items() if "hooks" in name]
        tensors = [(id(t), t._version) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
        found.append((path, id(module), type(module), list(map(id, module.children())), hooks, tensors, attributes))
    return found


@pytest.mark.parametrize("name", STAMPED)
def test_a_stamped_capture_is_the_full_capture(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    case = prepared(STAMPED[name])
    before = state(case.model)
    stamped = case.stamped()
    assert was_stamped(caplog), caplog.text
    assert state(case.model) == before
    same(stamped, case.full())
    if "dropout" not in name:
        right(stamped, case)


@pytest.mark.parametrize("name", UNLIKE)
def test_whatever_it_does_is_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where no layers are alike, nothing was tried, and what was captured is the full capture by the same lines."""
    caplog.set_level(logging.INFO)
    case = prepared(UNLIKE[name])
    before = state(case.model)
    captured = case.stamped()
    assert state(case.model) == before
    against_eager = "dropout" not in name and name != "all states are outputs"
    if "no layers of the record are alike" not in caplog.text or not against_eager:
        same(captured, case.full())
    if against_eager:
        right(captured, case)


def test_layers_beside_the_run_are_captured_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    case = prepared(altered(_dropout, count=12))
    captured = case.stamped()
    assert was_stamped(caplog) and "layers.3 to layers.11" in caplog.text
    same(captured, case.full())


@functools.cache
def stamped_llama() -> JointGraph:
    return prepared(llama).stamped().graph


def test_two_captures_print_the_same() -> None:
    assert str(prepared(llama).stamped().graph) == str(stamped_llama())


def test_a_model_on_meta_is_stamped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with torch.device("meta"):
        case = stack(Stack())
    captured = case.stamped()
    assert was_stamped(caplog)
    same(captured, case.full())


def test_names_tell_the_layer() -> None:
    graph = stamped_llama()
    (node,) = (n for n in graph.nodes if n.module == "model.layers.3.self_attn.o_proj" and n.op == "aten.mm.default"
               and not n.backward)  # fmt: skip
    assert node.name.endswith("_layer_3")
    weight = graph.parameters["model.layers.3.mlp.up_proj.weight"]
    assert weight == "model_layers_3_mlp_up_proj_weight"


def test_a_parameter_without_a_gradient_has_none_as_in_capture() -> None:
    case = stack(Stack())
    case.model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    captured = case.stamped()
    same(captured, case.full())
    assert captured.without_gradient == ("unused",)
