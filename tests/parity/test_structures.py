"""Models of every structure: tied, frozen and unused parameters, buffers of all kinds, inputs and outputs of any shape.

Each runs on simulated ranks under the solver's plan, the presets and random plans, and must give what eager gives:
outputs in the model's own structure, the gradient of every parameter and input, and every buffer.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import models
import plans
import pytest
import torch
import torch.nn.functional as F
from models import assert_close
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.segments.search import segments
from autopar.planning.planner import Planner
from autopar.runtime.module import ParallelModule
from autopar.runtime.simulate import simulate_step

pytest.importorskip("transformers")

MESHES: tuple[dict[str, int], ...] = ({"a": 4}, {"dp": 2, "tp": 2})
PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp")
LINE = (("a", 4),)
HIDDEN, BATCH = 16, 8


# ------------------------------------------------------------------------------------------- parameters


class TiedEmbedding(nn.Module):
    """The embedding is the head, and one norm's weight is another's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, HIDDEN)
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.second.weight = self.first.weight
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.body(self.first(self.embedding(ids)))))


class Frozen(nn.Module):
    """A frozen layer, a frozen weight beside a trained bias, and an adapter beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.mixed = nn.Linear(HIDDEN, 32).requires_grad_(False), nn.Linear(32, HIDDEN)
        self.mixed.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(torch.tanh(self.base(x) + self.up(self.down(x))))


class Unused(nn.Module):
    """Trainable parameters that nothing reads, or that only what is detached reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.teacher = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.used(x), self.teacher(x).detach())


class Shared(nn.Module):
    """A submodule called twice, a module under two names, and a parameter used in several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = self.first
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x) * self.scale
        x = self.block(x) + self.scale
        return self.second(self.first(x) * self.scale)


class Deep(nn.Module):
    """Layers that are captured once, with parameters that nothing reads, and a head of the kind."""

    def __init__(self, averages: bool = False) -> None:
        super().__init__()

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.idle = nn.Linear(HIDDEN, HIDDEN), nn.Linear(4, 4)
                if averages:
                    self.register_buffer("mean", torch.zeros(HIDDEN))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x + torch.tanh(self.linear(x))
                if averages:
                    self.mean = 0.5 * self.mean + x.detach().mean(0)
                    x = x / (1 + self.mean.square())
                return x

        self.layers = nn.ModuleList([Layer() for _ in range(7)])
        self.pooler = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Lists(nn.Module):
    """Parameters in a list and in a dictionary, one of which is None, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4) for _ in range(3)])
        self.biases = nn.ParameterDict({"in": nn.Parameter(torch.randn(HIDDEN)), "out": nn.Parameter(torch.randn(()))})
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.biases["in"])
        return x * self.biases["out"]


# ---------------------------------------------------------------------------------------------- buffers


class Buffers(nn.Module):
    """Buffers read, counted up, averaged over the batch, shared, not persistent, and absent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 32)
        self.register_buffer("scale", torch.rand(32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.rand(32), persistent=False)
        self.register_buffer("mask", torch.arange(32) % 3 > 0, persistent=False)
        self.register_buffer("absent", None)
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(self.mask, self.linear(x), self.inner.scale) * self.scale
        self.steps += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        return (x - self.average) / self.steps


class Codebook(nn.Module):
    """A buffer that is read, replaced by an attribute, read again; and one written by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("codes", torch.randn(4, HIDDEN))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("gain", torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        with torch.no_grad():
            self.seen.index_add_(0, nearest, torch.ones_like(x[:, 0]))
            self.codes = 0.9 * self.codes + 0.1 * x.mean(0)
        x = x * self.gain + self.codes[nearest]
        self.gain = self.gain + 0.1 * x.detach().mean(0)
        return x


# ---------------------------------------------------------------------------------- inputs and outputs


@dataclass
class Plain:
    """A dataclass that nobody registered."""

    logits: torch.Tensor
    parts: list[torch.Tensor]
    name: str = "plain"
    absent: torch.Tensor | None = None
    inner: Plain | None = None


@dataclass(frozen=True)
class Registered:
    logits: torch.Tensor
    name: str


pytree.register_dataclass(Registered)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, 4)


class Tuples(Trunk):
    """A nested tuple with None and a number in it, and one tensor twice."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up(x))
        return self.down(hidden), (hidden, None, [3, hidden]), Pair(hidden.mean(), hidden.sum(0))


class Dicts(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up(x))
        return {"logits": self.down(hidden), "states": {"up": hidden, "absent": None}, "rows": x.shape[0]}


class Losses(Trunk):
    """Several scalars, each to be differentiated by whoever calls."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up(x))
        return self.down(hidden).square().mean(), {"penalty": hidden.abs().mean(), "spread": self.up.weight.var()}


class Auxiliary(Trunk):
    """`.loss` beside other outputs, which do not carry a gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        hidden = torch.relu(self.up(x))
        logits = self.down(hidden)
        return SequenceClassifierOutput(loss=logits.square().mean(), logits=logits, hidden_states=(hidden, x))


class Dataclasses(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up(x))
        logits = self.down(hidden)
        return Plain(logits, [hidden], inner=Plain(logits.mean(1), [])), Registered(hidden.sum(1), "registered")


class PlainLoss(Trunk):
    """A dataclass of one's own with a loss in it."""

    def forward(self, x: torch.Tensor) -> Any:
        @dataclass
        class Output:
            loss: torch.Tensor
            logits: torch.Tensor

        logits = self.down(torch.relu(self.up(x)))
        return Output(loss=logits.square().mean(), logits=logits)


class Inputs(nn.Module):
    """Keyword-only, integer, boolean and absent inputs, constants, containers, and inputs that want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, ids: torch.Tensor, *extra: torch.Tensor, keep: torch.Tensor, scale: float, mode: str = "sum",
        weights: Mapping[str, Any] | None = None, absent: torch.Tensor | None = None, plain: Plain | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert absent is None and weights is not None and plain is not None and mode == "mean"
        x = self.linear(self.embedding(ids)) * keep.unsqueeze(-1) * scale
        for more in extra:
            x = x + more
        x = x * weights["row"].unsqueeze(-1) + weights["nested"][0] - plain.logits
        return x.mean(0)


# ------------------------------------------------------------------------------------------------ cases


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def rows(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(BATCH, HIDDEN, generator=generator(step)),), {}


def rows_with_gradient(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (rows(step)[0][0].requires_grad_(),), {}


def ids(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(32, (BATCH, 4), generator=generator(step)),), {}


def many(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    g = generator(step)
    extra = torch.randn(BATCH, 4, HIDDEN, generator=g).requires_grad_()
    keep = torch.rand(BATCH, 4, generator=g) > 0.3
    weights = {"row": torch.rand(BATCH, 4, generator=g).requires_grad_(), "nested": [torch.rand(HIDDEN, generator=g)]}
    plain = Plain(torch.randn(HIDDEN, generator=g).requires_grad_(), [])
    kwargs = {"keep": keep, "scale": 0.5, "mode": "mean", "weights": weights, "absent": None, "plain": plain}
    return (*ids(step)[0], extra), kwargs


def sum_of_losses(output: Any) -> torch.Tensor:
    first, others = output
    return first + 0.1 * sum(others.values())


@dataclass(frozen=True, kw_only=True)
class Structure:
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]] = rows
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    training: bool = True


STRUCTURES: Mapping[str, Structure] = {
    "tied": Structure(model=TiedEmbedding, batch=ids),
    "frozen": Structure(model=Frozen),
    "frozen, input gradient": Structure(model=lambda: Frozen().requires_grad_(False), batch=rows_with_gradient),
    "unused": Structure(model=Unused),
    "shared": Structure(model=Shared),
    "deep": Structure(model=Deep),
    "deep with averages": Structure(model=lambda: Deep(averages=True)),
    "lists": Structure(model=Lists),
    "buffers": Structure(model=Buffers),
    "codebook": Structure(model=Codebook),
    "tuples": Structure(model=Tuples),
    "dicts": Structure(model=Dicts),
    "losses": Structure(model=Losses),
    "sum of losses": Structure(model=Losses, loss_fn=sum_of_losses),
    "auxiliary": Structure(model=Auxiliary),
    "dataclasses": Structure(model=Dataclasses),
    "plain loss": Structure(model=PlainLoss),
    "inputs": Structure(model=Inputs, batch=many),
    "evaluation": Structure(
        model=lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5)), training=False
    ),
}


@functools.cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = STRUCTURES[name].model().train(STRUCTURES[name].training)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True, kw_only=True)
class Step:
    """Outputs by place (constants too), gradients of parameters by name and of inputs by place, buffers by name."""

    kind: type
    outputs: dict[str, Any]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def leaves(value: Any, place: str = "") -> dict[str, Any]:
    """Every leaf by its place, without pytree, which is what is tested."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    elif hasattr(value, "__dataclass_fields__"):
        items = list(vars(value).items())
    else:
        return {place: value}
    return {k: v for key, inner in items for k, v in leaves(inner, f"{place}.{key}").items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def kind_of(output: Any) -> type:
    return torch.Tensor if isinstance(output, torch.Tensor) else type(output)


def step_of(
    model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], loss_fn: Callable[[Any], torch.Tensor] | None
) -> Step:
    """One call, with `tangents` flowing back into every output, or ones into the loss if there is one."""
    args, kwargs = batch
    output = model(*args, **kwargs)
    output = output if loss_fn is None else loss_fn(output)
    found = {place: whole(v) if isinstance(v, torch.Tensor) else v for place, v in leaves(output).items()}
    losses = [v for place, v in found.items() if place == ".loss"]
    roots = losses or [v for v in found.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    if roots and torch.is_grad_enabled():
        sum((v * (1 if v.dim() == 0 else models.tangents(v))).sum() for v in roots).backward()
    gradients = {k: whole(p.grad) for k, p in model.named_parameters() if p.grad is not None}
    for place, value in leaves({"args": args, "kwargs": kwargs}).items():
        if isinstance(value, torch.Tensor) and value.grad is not None:
            gradients[place.removeprefix(".")] = whole(value.grad)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Step(kind=kind_of(output), outputs=found, gradients=gradients, buffers=buffers)


def eager(name: str) -> Step:
    structure = STRUCTURES[name]
    return step_of(copy.deepcopy(model_of(name)), structure.batch(0), structure.loss_fn)


def assert_equal(found: Step, expected: Step) -> None:
    """A class that is made anew for each call is the same by its name."""
    assert found.kind.__name__ == expected.kind.__name__
    assert found.outputs.keys() == expected.outputs.keys()
    for place, value in expected.outputs.items():
        if isinstance(value, torch.Tensor):
            assert_close(found.outputs[place], value, f"output {place}")
        else:
            assert found.outputs[place] == value, place
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.buffers.keys() == expected.buffers.keys()
    for target, gradient in expected.gradients.items():
        assert_close(found.gradients[target], gradient, f"gradient {target}")
    for target, buffer in expected.buffers.items():
        assert_close(found.buffers[target], buffer, f"buffer {target}")


def simulated(name: str, planner: Planner, program: Program) -> Step:
    """The step on all ranks of the program, in this process."""
    captured, model = planner.captured, model_of(name)
    args, kwargs = STRUCTURES[name].batch(0)
    buffers = dict(model.named_buffers())
    held = {**dict(model.named_parameters()), **buffers, **captured.constants}
    given = {
        i.target: models.tangents(torch.empty(i.meta.shape))
        for i in program.inputs
        if i.role == "tangent" and i.meta.shape
    }
    made = simulate_step(program, held, captured.bind(args, kwargs), given, tolerance=1e-5)
    output = captured.unflatten({leaf.path: made.outputs.get(leaf.path) for leaf in captured.output_leaves})
    return Step(
        kind=kind_of(output), outputs=leaves(output), gradients=made.gradients, buffers={**buffers, **made.mutations}
    )


@functools.cache
def planner_of(name: str, axes: tuple[tuple[str, int], ...]) -> Planner:
    if axes != LINE:
        return planner_of(name, LINE).on(dict(axes), None)
    structure = STRUCTURES[name]
    args, kwargs = structure.batch(0)
    return Planner(model_of(name), dict(LINE), args, kwargs, loss_fn=structure.loss_fn)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.values())))
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_plan_equals_eager(name: str, mesh: dict[str, int]) -> None:
    planner, expected = planner_of(name, tuple(mesh.items())), eager(name)
    for solver in ("dp", *PRESETS):
        assert_equal(simulated(name, planner, planner.program(planner.plan(solver=solver, cost="serial"))), expected)
    program = codegen(planner.space, plans.random_assignment(planner.space, seed=0))
    assert_equal(simulated(name, planner, bucket(program)), expected)


def test_what_is_captured_once_and_what_has_no_gradient() -> None:
    captured = planner_of("deep", LINE).captured
    idle = {f"layers.{i}.idle.{kind}" for i in range(7) for kind in ("weight", "bias")}
    assert set(captured.without_gradient) == idle | {"pooler.weight", "pooler.bias"}
    assert len(segments(captured.graph).repeats[0].copies) >= 5


# ------------------------------------------------------------------------------------------- real ranks


def beside_the_model(names: Sequence[str]) -> None:
    """Two steps of the parallel module on every rank, a call without gradients, and the model's own beside them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    for number, name in enumerate(names):
        structure, model = STRUCTURES[name], copy.deepcopy(model_of(name))
        planner = planner_of(name, (("a", 2),))
        program = bucket(codegen(planner.space, plans.random_assignment(planner.space, number)))
        module = ParallelModule(model, planner.captured, program, None, mesh)
        for step in (0, 1):
            assert_equal(
                step_of(module, structure.batch(step), None), step_of(model, structure.batch(step), structure.loss_fn)
            )
            module.zero_grad()
            model.zero_grad()
        for quiet in (torch.no_grad, torch.inference_mode):
            with quiet():
                assert_equal(
                    step_of(module, structure.batch(2), None), step_of(model, structure.batch(2), structure.loss_fn)
                )


def test_modules_on_two_ranks() -> None:
    run(2, beside_the_model, list(STRUCTURES))
