"""The joint graph computes what the model and autograd compute, and is written in the few ways that the IR has."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.quick_fakes import quick_fakes
from autopar.compat.tensors import is_fake
from autopar.ir.graph import JointGraph, TensorMeta, map_references, overload
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.trace import capture

transformers = pytest.importorskip("transformers")


def interpret(graph: JointGraph, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the graph, node by node, on the values of its inputs."""
    for node in graph.nodes:
        args = map_references(node.args, values.__getitem__)
        kwargs = {key: map_references(value, values.__getitem__) for key, value in node.kwargs}
        result = overload(node.op)(*args, **kwargs)
        results = (result,) if isinstance(result, torch.Tensor) else result
        assert len(results) == len(node.outputs)
        for name, tensor in zip(node.outputs, results, strict=True):
            if name:
                values[name] = tensor
                assert TensorMeta(tuple(tensor.shape), tensor.dtype) == graph.metas[name], str(node)
    return values


def run(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """(role, target) -> what the graph gives for it; tangents are ones."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    tensors = {**tensors, **captured.bind(args, kwargs)}
    values = {}
    for i in captured.graph.inputs:
        meta = captured.graph.metas[i.name]
        value = torch.ones(meta.shape, dtype=meta.dtype) if i.role == "tangent" else tensors[i.target].detach().clone()
        values[i.name] = value
    interpret(captured.graph, values)
    return {(o.role, o.target): values[o.name] for o in captured.graph.outputs if o.name is not None}


def close(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    scale = max(expected.abs().max().item(), 1e-6)
    assert (found - expected).abs().max().item() <= 1e-5 * scale, what


@dataclass(frozen=True, kw_only=True)
class Case:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    def capture(self) -> Captured:
        return capture(self.model, self.args, dict(self.kwargs), loss_fn=self.loss_fn)


TOKENS = torch.arange(16).reshape(2, 8) * 7 % 50
BATCH = {"input_ids": TOKENS, "labels": TOKENS.flip(0)}


def llama(**overrides: Any) -> nn.Module:
    config = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
        **overrides,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.BertForMaskedLM(config)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


X = torch.linspace(-1, 1, 30).reshape(5, 6).sin()
IMAGES = torch.linspace(-1, 1, 100).reshape(2, 2, 5, 5).cos()
CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: Case(model=llama(), kwargs=BATCH),
    "llama, tied": lambda: Case(model=llama(tie_word_embeddings=True), kwargs=BATCH),
    "llama, cached": lambda: Case(model=llama(use_cache=True), kwargs=BATCH),
    "gpt2": lambda: Case(model=gpt2(), kwargs=BATCH),
    "bert": lambda: Case(model=bert(), kwargs=BATCH),
    "mlp, loss_fn": lambda: Case(
        model=mlp(), args=(X,), kwargs={}, loss_fn=lambda y: F.cross_entropy(y, torch.arange(5) % 4)
    ),
    "mlp, output": lambda: Case(model=mlp(), args=(X,), kwargs={}),
    "mlp, output and input gradient": lambda: Case(model=mlp(), args=(X.clone().requires_grad_(),), kwargs={}),
    "batch norm": lambda: Case(model=batch_norm(), args=(IMAGES,), kwargs={}, loss_fn=torch.sum),
}


@pytest.fixture(params=CASES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def facts(model: nn.Module) -> dict[str, tuple[int, int, torch.Tensor]]:
    """Identity, version and values of each tensor of a model."""
    return {key: (id(t), t._version, t.detach().clone()) for key, t in model.state_dict(keep_vars=True).items()}


@pytest.fixture(scope="module")
def before(case: Case) -> tuple[dict[str, tuple[int, int, torch.Tensor]], torch.Tensor]:
    """Of the model and of torch's generator, before the capture."""
    return facts(case.model), torch.get_rng_state()


@pytest.fixture(scope="module")
def captured(case: Case, before: tuple[Any, torch.Tensor]) -> Captured:
    made = case.capture()
    assert torch.equal(torch.get_rng_state(), before[1])
    return made


def test_equals_eager(case: Case, captured: Captured) -> None:
    model = copy.deepcopy(case.model)
    found = run(captured, model, case.args, dict(case.kwargs))

    output = model(*case.args, **case.kwargs)
    output = case.loss_fn(output) if case.loss_fn else output
    leaves = dict(zip([leaf.path for leaf in captured.output_leaves], pytree.tree_leaves(output), strict=True))
    loss = leaves[captured.loss] if captured.loss else output.sum()
    loss.backward()

    for leaf in captured.output_leaves:
        if leaf.meta is not None:
            close(found["output", leaf.path], leaves[leaf.path].detach(), leaf.path)
    for name, parameter in model.named_parameters():
        close(found["gradient", name], parameter.grad, name)
    for path, tensor in captured.bind(case.args, case.kwargs).items():
        if tensor.requires_grad:
            close(found["gradient", path], tensor.grad, path)
    buffers = dict(model.named_buffers())
    for role, target in found:
        if role == "mutation":
            close(found[role, target], buffers[target], target)


def test_is_well_formed(captured: Captured) -> None:
    graph = captured.graph
    known = {i.name for i in graph.inputs}
    assert len(known) == len(graph.inputs)
    for node in graph.nodes:
        assert set(node.inputs) <= known, str(node)
        assert not known & set(node.outputs)
        known.update(name for name in node.outputs if name)
        hash(node)
    assert all(name.isidentifier() for name in known)
    assert set(graph.metas) == known
    halves = [node.backward for node in graph.nodes]
    assert halves == sorted(halves)
    made_in_forward = {name for node in graph.nodes if not node.backward for name in node.outputs}
    made_in_forward |= {i.name for i in graph.inputs if i.role != "tangent"}
    assert all(o.name in made_in_forward for o in graph.outputs if o.role != "gradient")


def test_has_no_dead_node_and_two_kinds_of_views(captured: Captured) -> None:
    graph = captured.graph
    wanted = {name for node in graph.nodes for name in node.inputs} | {o.name for o in graph.outputs}
    for node in graph.nodes:
        assert wanted & set(node.outputs), str(node)
        kind = node.op.split(".")[1]
        assert kind not in {"view", "_unsafe_view", "t", "transpose", "unsqueeze", "squeeze", "detach", "alias", "lift"}
        assert "assert" not in kind
        if kind in ("reshape", "permute"):
            (source,) = node.inputs
            shape = graph.metas[source].shape
            if kind == "reshape":
                assert node.args[1] == graph.metas[node.name].shape != shape
            else:
                assert sorted(node.args[1]) == list(range(len(shape))) != list(node.args[1])
            producer = graph.producer.get(source)
            assert producer is None or graph.nodes[producer].op != node.op


def test_is_the_same_each_time_and_on_meta(name: str, case: Case, captured: Captured) -> None:
    with torch.device("meta"):
        model = CASES[name]().model
    assert all(p.is_meta for p in model.parameters())
    again = capture(model, case.args, dict(case.kwargs), loss_fn=case.loss_fn)
    assert str(again.graph) == str(captured.graph)
    assert again.graph.nodes == captured.graph.nodes  # which compares what is not printed, too


def test_leaves_the_model_alone(case: Case, before: tuple[Any, torch.Tensor], captured: Captured) -> None:
    for key, tensor in case.model.state_dict(keep_vars=True).items():
        identity, version, values = before[0][key]
        assert id(tensor) == identity and tensor._version == version and torch.equal(tensor, values)
        assert tensor.grad is None
        assert not is_fake(tensor)
    assert case.model.training


def test_leaves_the_model_alone_when_it_fails() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.inner(x).sum() > 0:
                return x
            return -x

    model = Broken()
    before = dict(vars(model.inner))
    where = r"\(.*test_capture\.py:\d+ in forward\)"
    with pytest.raises(CaptureError, match=f"(?s)^Broken cannot be captured as a graph of static shapes: .* {where}"):
        capture(model, (X,))
    assert vars(model.inner) == before
    assert int(model.inner.num_batches_tracked) == 0


def test_a_fake_model_is_captured_too() -> None:
    real = capture(mlp(), (X,)).graph
    with quick_fakes():
        model, x = mlp(), torch.empty(5, 6)
    assert str(capture(model, (x,)).graph) == str(real)


def test_tied_weights_are_one_input() -> None:
    captured = capture(llama(tie_word_embeddings=True), (), BATCH)
    assert captured.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in captured.graph.parameters
    gradients = [o.target for o in captured.graph.outputs if o.role == "gradient"]
    assert gradients.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in gradients


def test_names_and_modules_are_the_models_own() -> None:
    graph = capture(llama(), (), BATCH).graph
    model = llama()
    assert graph.parameters["model.layers.0.self_attn.q_proj.weight"] == "model_layers_0_self_attn_q_proj_weight"
    assert {i.name: i.target for i in graph.inputs if i.role == "input"} == {
        "input_ids": "kwargs.input_ids",
        "labels": "kwargs.labels",
    }
    modules = {name for name, _ in model.named_modules()}
    assert {node.module for node in graph.nodes} <= modules
    # a projection multiplies once forward and twice backward, and its module says so
    for name in ("model.layers.1.mlp.up_proj", "lm_head"):
        multiplies = [node.backward for node in graph.nodes if node.module == name and node.op == "aten.mm.default"]
        assert multiplies == [False, True, True]
    # what autograd adds up belongs to nobody
    sums = [n for n in graph.nodes if n.backward and n.op == "aten.add.Tensor"]
    assert sums and all(n.module == "" and n.sequence == -1 for n in sums)


def test_frozen_parameters_get_no_gradient() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    graph = capture(model, (X,)).graph
    assert set(graph.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [o.target for o in graph.outputs if o.role == "gradient"] == ["2.weight", "2.bias"]


def test_mutated_buffers_are_outputs() -> None:
    graph = capture(batch_norm(), (IMAGES,)).graph
    assert [o.target for o in graph.outputs if o.role == "mutation"] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert {i.target for i in graph.inputs if i.role == "buffer"} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    evaluated = capture(batch_norm().eval(), (IMAGES,))
    assert not evaluated.training
    assert not [o for o in evaluated.graph.outputs if o.role == "mutation"]


def test_only_the_loss_is_differentiated() -> None:
    captured = capture(llama(), (), BATCH)
    assert captured.loss == "output.loss"
    assert [i.target for i in captured.graph.inputs if i.role == "tangent"] == ["output.loss"]
    assert [o.target for o in captured.graph.outputs if o.role == "output"] == ["output.loss", "output.logits"]


def test_without_a_loss_every_floating_output_is_differentiated() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.a(x)
            # views of one another, an input, a number, and an output that is none of autograd's
            return {"y": y, "more": (y.T, self.b(x), x, 3), "best": y.argmax(1)}

    captured = capture(Two(), (X,))
    assert captured.loss is None
    tangents = [i.target for i in captured.graph.inputs if i.role == "tangent"]
    assert tangents == ["output.y", "output.more.0", "output.more.1"]
    outputs = {o.target: o.name for o in captured.graph.outputs if o.role == "output"}
    assert list(outputs) == ["output.y", "output.more.0", "output.more.1", "output.more.2", "output.best"]
    assert outputs["output.more.2"] == "x"
    rebuilt = captured.unflatten({path: path for path in outputs})
    assert rebuilt["more"] == ("output.more.0", "output.more.1", "output.more.2", 3)


def test_nothing_to_differentiate() -> None:
    frozen = mlp().requires_grad_(False)
    with torch.no_grad():
        disabled = capture(mlp(), (X,))
    with torch.inference_mode():
        inferred = capture(mlp(), (torch.randn(5, 6),))
    for captured in (capture(frozen, (X,)), disabled, inferred):
        assert captured.loss is None
        assert {o.role for o in captured.graph.outputs} == {"output"}
        assert not any(node.backward for node in captured.graph.nodes)


def test_inputs_in_containers_with_constants() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, *, extra: dict[str, Any], double: bool) -> torch.Tensor:
            y = self.linear(x) + extra["bias"][0]
            return y * extra["scale"] * (2 if double else 1)

    kwargs = {"extra": {"bias": [torch.ones(6)], "scale": 3}, "double": True}
    model = Picky()
    captured = capture(model, (X,), kwargs)
    assert {i.name: i.target for i in captured.graph.inputs if i.role == "input"} == {
        "x": "args.0",
        "extra_bias_0": "kwargs.extra.bias.0",
    }
    close(run(captured, model, (X,), kwargs)["output", "output"], model(X, **kwargs).detach())
    assert list(captured.bind((X,), dict(reversed(kwargs.items())))) == ["args.0", "kwargs.extra.bias.0"]
    with pytest.raises(ValueError, match=r"kwargs\.double is False.*constant True"):
        captured.bind((X,), {**kwargs, "double": False})
    with pytest.raises(ValueError, match=r"args\.0 is float32\[4, 6\].*float32\[5, 6\]"):
        captured.bind((X[:4],), kwargs)
    with pytest.raises(ValueError, match=r"missing \['args\.0'\], unexpected \['kwargs\.x'\]"):
        captured.bind((), {**kwargs, "x": X})


def test_tensors_that_the_model_closes_over_are_constants() -> None:
    model, weight = mlp(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    captured = capture(model, (X,), loss_fn=lambda y: (y * weight).sum())
    ((name, constant),) = captured.constants.items()
    assert torch.equal(constant, weight)
    assert [i.role for i in captured.graph.inputs if i.target == name] == ["buffer"]


def test_a_copy_into_an_empty_tensor_is_a_clone() -> None:
    class Copied(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_empty_strided(x.shape, (1, x.shape[0])).copy_(x).sum()

    graph = capture(Copied(), (X.clone().requires_grad_(),)).graph
    assert [node.op for node in graph.nodes if not node.backward] == ["aten.clone.default", "aten.sum.default"]


def test_checks_of_a_value_that_no_result_needs_are_left_out() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x[x > 0].numel() == 7)
            return (x * x).sum()

    graph = capture(Checked(), (X.to("meta").requires_grad_(),)).graph
    assert [node.op for node in graph.nodes if not node.backward] == ["aten.mul.Tensor", "aten.sum.default"]


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)


def test_parameters_without_a_gradient() -> None:
    """Some may be without, as in eager, and are named; not all of them."""

    class Unused(HalfUsed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x).sum() + self.unused(x).detach().sum()

    for model in (Unused(), Unused().to("meta")):
        assert capture(model, (X,)).without_gradient == ("unused.weight", "unused.bias")
        model.unused.requires_grad_(False)
        assert capture(model, (X,)).without_gradient == ()
    with pytest.raises(
        ValueError, match=r"no trainable parameter \(.*\) gets a gradient from output: .*requires_grad_"
    ):
        capture(mlp(), (X,), loss_fn=lambda y: y.detach().sum())


def test_buffers_that_cannot_be_replaced() -> None:
    class Replaces(nn.Module):
        def __init__(self, new: Any) -> None:
            super().__init__()
            self.linear, self.new = nn.Linear(6, 2), new
            self.register_buffer("b", torch.zeros(3))
            self.register_buffer("c", None)
            self.inner = nn.Module()
            self.inner.register_buffer("b", self.b)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.new(self)
            return self.linear(x).sum()

    for new, message in (
        (lambda self: setattr(self, "b", self.b[:2]), r"buffer b, which is float32\[3\], by float32\[2\]: keep"),
        (lambda self: setattr(self, "b", None), r"buffer b, which is float32\[3\], by None"),
        (lambda self: setattr(self, "c", self.b + 1), r"forward registers c"),
        (lambda self: setattr(self, "b", self.b + 1), "buffer b, which has another name too"),
    ):
        with pytest.raises(ValueError, match=message):
            capture(Replaces(new), (X,))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"loss_fn\(output\) is float32\[5, 4\]: the loss must be"):
        capture(mlp(), (X,), loss_fn=lambda y: y)
    with pytest.raises(ValueError, match=r"input args\.1 is a object"):
        capture(mlp(), (X, object()))
    with pytest.raises(ValueError, match="has no shape yet"):
        capture(nn.LazyLinear(3), (X,))
    overlapping = nn.Module()
    overlapping.a = nn.Parameter(torch.zeros(4))
    overlapping.b = nn.Parameter(overlapping.a.detach()[1:])
    with pytest.raises(ValueError, match="a and b are two tensors on the same memory"):
        capture(overlapping)

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    with pytest.raises(ValueError, match="in place"):
        capture(Writes(), (X,))

    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return object()

    with pytest.raises(ValueError, match="register its class"):
        capture(Opaque(), (X,))

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[self.layer(x).sum(1) > 0].sum()

    with pytest.raises(ValueError, match="makes a tensor whose shape depends on the data"):
        capture(Selects(), (X,))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


class Branches(Scaled):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if (mask[0] & (self.scale > 0)).any().item():
            x = x + 1
        return x.square().sum()


class Clamps(Scaled):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x * self.scale).all():
            return x.clamp(-1, 1).square().sum()
        return x.square().sum()


class Cuts(Scaled):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[: int(self.scale.sum())].sum()


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branches(), "(self.scale > 0)).any()"), (Clamps(), "torch.isfinite(x * self.scale)"), (Cuts(), "x[: int(self")],
)
def test_a_decision_by_data_is_refused_with_its_line(model: nn.Module, line: str) -> None:
    with pytest.raises(ValueError, match="that depends on parameters, buffers or random numbers") as refusal:
        capture(model, (X, torch.ones(2, dtype=torch.bool)))
    (number,) = re.findall(rf"{Path(__file__).name}:(\d+) in forward", str(refusal.value))
    assert line in Path(__file__).read_text().splitlines()[int(number) - 1]


class Reversed(torch.autograd.Function):
    """Of a factor that is no tensor, with a gradient that no op of the forward has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * gradient, None


class Ordered(torch.autograd.Function):
    """Of two tensors, with two results, one of them without a gradient."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = (x * weight).sort(-1)
        return values, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, places = ctx.saved_tensors
        back = torch.zeros_like(gradient).scatter(-1, places, gradient)
        return 2 * back * weight, 3 * (back * x).sum(0)


def test_functions_with_a_backward_of_their_own() -> None:
    """Export by itself would differentiate what their forward does."""

    class Owns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(4, 5), nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, places = Ordered.apply(Reversed.apply(self.layer(x), 0.3), self.weight)
            return Reversed.apply(values * (places + 1), 0.5).square().mean()

    model = Owns()
    x = torch.randn(3, 4)
    captured = capture(model, (x,))
    model(x).backward()
    found = run(captured, model, (x,), {})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradient", name], parameter.grad)
