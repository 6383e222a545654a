"""One parallel module in training, in evaluation, partly frozen: each mode has a program, and the parameters stay."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from generator_programs import one_rank
from models import assert_close
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ir.layout import Layout, Replicate, Split
from autopar.planning.at_rest import Decided
from autopar.planning.options import taken, unique_sites
from autopar.planning.planner import Planner
from autopar.runtime.module import ParallelModule
from autopar.runtime.simulate import simulate_step

HIDDEN, BATCH, LAYERS = 16, 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Moody(nn.Module):
    """Batch norm, an output and a loss of training only, and a run of layers that is captured once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm, self.head, self.extra = nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(torch.tanh(x))  # or a bias before it would have no gradient but rounding
        logits = self.head(x)
        if self.training:
            return {"logits": logits, "extra": self.extra(x)}
        return {"logits": logits}


def loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((F.mse_loss(v, v.detach().cos()) for v in output.values()), torch.zeros(()))


def model() -> nn.Module:
    torch.manual_seed(0)
    made = Moody()
    with torch.no_grad():
        made.norm.running_mean.normal_()
        made.norm.running_var.uniform_(0.5, 2)
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(step))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


# ------------------------------------------------------------------------------------- simulated ranks


@functools.cache
def captured(training: bool, gradients: bool) -> Planner:
    with torch.set_grad_enabled(gradients):
        return Planner(model().train(training), {"a": 1}, (batch(0),), loss_fn=loss_of)


@functools.cache
def trained(axes: tuple[tuple[str, int], ...]) -> Planner:
    return captured(True, True).on(dict(axes), None)


@functools.cache
def evaluated(axes: tuple[tuple[str, int], ...], gradients: bool) -> Planner:
    return captured(False, gradients).on(dict(axes), None)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron"])
@pytest.mark.parametrize("mesh", [{"a": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_an_evaluation_with_parameters_where_they_are(mesh: dict[str, int], solver: str, gradients: bool) -> None:
    planner = trained(tuple(mesh.items()))
    program = planner.program(planner.plan(solver=solver))
    at_rest: dict[str, Layout] = {i.target: i.layout for i in program.inputs if i.role == "parameter"}
    if solver != "ddp":
        assert any(not isinstance(p, Replicate) for layout in at_rest.values() for p in layout)
    other = evaluated(tuple(mesh.items()), gradients)
    made = other.writer.written(other.assignment_at(at_rest))
    assert bool(made.backward) == gradients
    for i in made.inputs:
        assert i.role != "parameter" or i.layout == at_rest[i.target]
    eager = model().eval()
    held = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    found = simulate_step(made, held, {"args.0": batch(1)})
    loss = loss_of(eager(batch(1)))
    assert_close(found.outputs["output"], loss, "loss")
    assert not found.mutations and len(found.gradients) == (len(at_rest) - 2 if gradients else 0)
    if gradients:
        loss.backward()
        for name, parameter in eager.named_parameters():
            if parameter.grad is not None:
                assert_close(found.gradients[name], parameter.grad, name)


def test_copies_of_a_layer_in_different_places() -> None:
    """Under a memory limit, copies of one layer differ: each stays where it is."""
    planner = trained((("a", 4),))
    at_rest: dict[str, Layout] = {}
    for solver, chosen in (("ddp", lambda k: k % 2 == 0), ("fsdp", lambda k: k % 2 == 1)):
        for i in planner.program(planner.plan(solver=solver)).inputs:
            number = int(i.target.split(".")[1]) if i.target.startswith("layers") else 0
            if i.role == "parameter" and chosen(number):
                at_rest[i.target] = i.layout
    other = evaluated((("a", 4),), False)
    assert other.space.repeats
    made = other.writer.written(other.assignment_at(at_rest))
    assert {i.target: i.layout for i in made.inputs if i.role == "parameter"}.items() <= at_rest.items()
    eager = model().eval()
    held = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    found = simulate_step(made, held, {"args.0": batch(1)})
    assert_close(found.outputs["output"], loss_of(eager(batch(1))), "loss")


def test_a_layout_that_a_parameter_cannot_have() -> None:
    planner = trained((("a", 4),))
    with pytest.raises(ValueError, match=r"parameter head\.bias cannot be .*S\(0%2\) at rest"):
        evaluated((("a", 4),), True).assignment_at(
            {**{name: (Replicate(),) for name in planner.captured.graph.parameters}, "head.bias": (Split(0, 2),)}
        )


# ------------------------------------------------------------------------------------------- real ranks


def compared(module: nn.Module, beside: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of both, which are equal."""
    expected, found = loss_of(beside(batch(step))), module(batch(step))
    assert_close(whole(found), expected.detach(), f"loss of batch {step}")
    return found, expected


def epochs(solver: str) -> None:
    """Train, evaluate, train, evaluate; then with a frozen norm, and with layers frozen and thawed again."""
    beside = model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(model(), mesh, (batch(0),), loss_fn=loss_of, solver=solver)
    assert isinstance(module, ParallelModule)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, beside)]
    places = {name: p.placements for name, p in module.named_parameters()}

    def train(step: int) -> None:
        for loss in compared(module, beside, step):
            loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        for name, parameter in beside.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        buffers = dict(module.named_buffers())
        for name, buffer in beside.named_buffers():
            assert_close(buffers[name], buffer, name)

    for epoch in range(2):
        for m in (module, beside):
            m.train()
        train(2 * epoch)
        for m in (module, beside):
            m.eval()
        for quiet in (torch.no_grad, torch.inference_mode):
            with quiet():
                found, _ = compared(module, beside, 2 * epoch + 1)
                assert not found.requires_grad
        for m in (module, beside):
            m.train()
        train(2 * epoch + 10)
    modes = vars(module)["_versions"]
    assert len({id(state.program) for state in (v.state for v in modes.versions)}) == 2, "evaluation was captured once"
    for m in (module, beside):
        m.norm.eval()
    train(20)
    for m in (module, beside):
        m.train()
        m.layers.requires_grad_(False)
    train(21)
    for m in (module, beside):
        m.layers.requires_grad_(True)
        m.eval()
    train(22)
    assert {name: p.placements for name, p in module.named_parameters()} == places
    programs = {id(state.program) for state in (v.state for v in modes.versions)}
    assert len(programs) == 5, "one for each mode, and none for a mode that was met before"
    assert {id(program) for _, program in module.programs} == programs
    texts = [text.partition(", of")[0] for text, _ in module.programs]
    assert texts[0] == "evaluation with gradients" and {"training with gradients", "evaluation without gradients"} < {
        *texts
    }


@pytest.mark.parametrize("solver", ["fsdp", "megatron"])
def test_epochs_on_two_ranks(solver: str) -> None:
    run(2, epochs, solver)


def thawed() -> None:
    """Planned with frozen layers and in evaluation; trained whole later."""
    beside, made = model().eval(), model().eval()
    made.layers.requires_grad_(False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(made, mesh, (batch(0),), loss_fn=loss_of, solver="fsdp")
    compared(module, beside, 0)[0].backward()
    assert {n for n, p in module.named_parameters() if p.grad is not None} == {
        *("norm.weight", "norm.bias", "head.weight", "head.bias")
    }
    module.zero_grad()
    module.layers.requires_grad_(True)
    for m in (module, beside):
        m.train()
    for loss in compared(module, beside, 1):
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for name, parameter in beside.named_parameters():
        assert_close(whole(gradients[name]), parameter.grad, f"gradient of {name}")


def test_layers_thawed_on_two_ranks() -> None:
    run(2, thawed)


def another_mode(what: str) -> Any:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    made = nn.Sequential(nn.Linear(HIDDEN, 4), nn.Dropout(0.5)).eval() if what == "random" else model()
    module = autopar.parallelize(made, mesh, (batch(0),), loss_fn=None if what == "random" else loss_of, solver="ddp")
    if what == "different":
        module.eval()
        module.norm.train(rank == 0)
    elif what == "fixed":
        module.eval()
        module.layers.requires_grad_(False)
        module(batch(0).requires_grad_())
    return module(batch(0))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("different", "the ranks call the module in different modes"),
        ("fixed", "input args.0 requires a gradient, and the model was captured without"),
    ],
)
def test_modes_that_are_refused(what: str, message: str) -> None:
    for outcome in outcomes(2, another_mode, what):
        assert isinstance(outcome.error, ValueError), outcome.traceback
        assert message in str(outcome.error)


class Perturbed(nn.Module):
    """Asks whether its input requires a gradient, as checkpoints of the reentrant kind do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.head(checkpoint(self.layer, x, use_reentrant=True))
        return (h * (2 if x.requires_grad else 1)).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_inputs_that_require_a_gradient_in_some_calls() -> None:
    """And whose model is captured with one that does."""
    with one_rank():
        mesh, model = init_device_mesh("cpu", (1,), mesh_dim_names=("a",)), Perturbed()
        module = autopar.parallelize(copy.deepcopy(model), mesh, (torch.randn(3, HIDDEN, requires_grad=True),))
        for requires in (True, False, True, False):
            x = torch.randn(3, HIDDEN)
            found = []
            for each in (module, model):
                each.zero_grad()
                given = x.clone().requires_grad_(requires)
                each(given).backward()
                found.append([given.grad, *(None if p.grad is None else whole(p.grad) for p in each.parameters())])
            for one, other in zip(*found, strict=True):
                assert one is other is None or torch.allclose(one, other, atol=1e-6)
        assert len(module.programs) == 2


class Frozen(nn.Module):
    """Its batch norm stays in evaluation, as its class says."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb, self.layer, self.norm = verb, nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.train(mode and self.verb != "train")
        return self

    def eval(self) -> Frozen:
        super().eval()
        self.norm.train(self.verb == "eval")
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).square().mean()


def frozen() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    for verb in ("train", "eval"):
        torch.manual_seed(0)
        made, beside = Frozen(verb), Frozen(verb)
        beside.load_state_dict(made.state_dict())
        parallel = autopar.parallelize(made, mesh, (batch(0),))
        for training in (True, False, True):
            for module in (parallel, beside):
                assert (module.train() if training else module.eval()) is module
            assert [m.training for m in parallel.modules()] == [m.training for m in beside.modules()]
            torch.testing.assert_close(parallel(batch(0)), beside(batch(0)))
            torch.testing.assert_close(parallel.norm.running_mean, beside.norm.running_mean)


def test_a_model_with_its_own_train_and_eval() -> None:
    (outcome,) = outcomes(1, frozen)
    assert outcome.error is None, outcome.traceback


class Fickle(nn.Module):
    """What it computes, returns and closes over depends on the mode, in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.weight = way, nn.Parameter(torch.randn(HIDDEN, 4))
        self.offset = torch.tensor([5.0, 6.0, 7.0, 8.0])

    def forward(self, x: torch.Tensor) -> Any:
        y, training, gradients = x @ self.weight, self.training, torch.is_grad_enabled()
        return {
            "constant": lambda: y * (torch.tensor([1, 2, 3, 4]) if training else torch.tensor([30, 40, 50, 60])),
            "attribute": lambda: y * (self.offset if training else self.offset + 1),
            "number": lambda: {"y": y, "n": 1 if training else 2, "nan": float("nan") if training else -0.0},
            "container": lambda: (y, y) if training else [y, y],
            "order": lambda: {"a": y, "b": 2 * y} if training else {"b": y, "a": 2 * y},
            "output": lambda: {"y": y, "c": torch.tensor([1, 2]) if training else torch.tensor([30, 40])},
            "grad mode": lambda: y * (2.0 if gradients else 3.0),
            "output by grad mode": lambda: (y, torch.tensor([1, 2] if gradients else [30, 40])),
            "number of outputs": lambda: (y, x.sum()) if gradients else y,
            "requires grad": lambda: y * (2.0 if y.requires_grad else 3.0),
            "frozen": lambda: y * (2.0 if not gradients or self.weight.requires_grad else 3.0),
            "autocast": lambda: y * (2.0 if torch.is_autocast_enabled("cpu") else 3.0),
        }[self.way]()


WAYS = (
    *("constant", "attribute", "number", "container", "order", "output", "grad mode", "output by grad mode"),
    *("number of outputs", "requires grad", "frozen", "autocast"),
)


def fickle(meta: bool) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("a",))
    for way in WAYS:
        made, beside = Fickle(way), Fickle(way)
        module = autopar.parallelize(made.to("meta") if meta else made, mesh, (batch(0),), solver="fsdp")
        if meta:
            module.materialize(beside.state_dict())
        for mode in (
            "train",
            "eval",
            "train quiet",
            "eval quiet",
            "train cast",
            "train frozen",
            "eval frozen",
            "train",
        ):
            results = []
            for each in (beside, module):
                each.train("train" in mode)
                each.weight.requires_grad_("frozen" not in mode)
                cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled="cast" in mode)
                with torch.set_grad_enabled("quiet" not in mode), cast:
                    results.append(each(batch(1)))
            (expected, spec), (found, found_spec) = (pytree.tree_flatten(result) for result in results)
            assert found_spec == spec, f"{way}, {mode}"
            for a, b in zip(expected, found, strict=True):
                what = f"{way}, {mode}"
                if isinstance(a, torch.Tensor):
                    assert a.requires_grad == b.requires_grad, what
                    assert_close(whole(b), a.detach(), what, 1e-2 if "cast" in mode else 1e-5)
                else:
                    assert repr(a) == repr(b), what


@pytest.mark.parametrize("meta", [True, False])
def test_a_model_that_asks_for_its_mode(meta: bool) -> None:
    run(1, fickle, meta)


def test_what_is_best_at_rest_leaves_the_planner_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    planner = Planner(model, {"a": 2, "b": 2}, (torch.randn(32, 64),), loss_fn=torch.sum)
    before = planner.plan(cost="serial")
    planner.assignment_at({})
    assert planner.plan(cost="serial").digest == before.digest


@pytest.mark.parametrize("solver", ["dp", "fsdp", "megatron"])
def test_decisions_begin_from_those_of_other_sizes(solver: str) -> None:
    """Another batch is planned from the plan that there is: with parameters where they are, and as on one device."""
    planner = trained((("dp", 2), ("tp", 2)))
    plan = planner.plan(solver=solver)
    at_rest: dict[str, Layout] = {i.target: i.layout for i in planner.program(plan).inputs if i.role == "parameter"}
    decided, x = Decided.of(planner.space, planner.assignment(plan)), batch(1)[:3]
    chosen = taken(planner.space, planner.assignment(plan))
    for name, site in unique_sites(planner.space).items():
        if site.kind == "op":
            assert decided.choices(planner.space, site) == chosen[name], "the same for the same sizes"
    other = Planner(model(), {"dp": 2, "tp": 2}, (x,), loss_fn=loss_of)
    made = other.writer.written(other.assignment_at(at_rest, decided))
    assert {i.target: i.layout for i in made.inputs if i.role == "parameter"} == at_rest
    eager = model()
    held = {name: t.clone() for name, t in (*eager.named_parameters(), *eager.named_buffers())}
    found = simulate_step(made, held, {"args.0": x})
    loss = loss_of(eager(x))
    assert_close(found.outputs["output"], loss.detach(), "loss")
    loss.backward()
    for name, parameter in eager.named_parameters():
        assert_close(found.gradients[name], parameter.grad, name)


class Adapting(nn.Module):
    """Takes a step of its own on a weight before it predicts, in evaluation too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        if self.way == "requires_grad":
            return F.linear(x, weight * 2 if weight.requires_grad else weight).square().mean()
        if self.way == "function":
            torch.set_grad_enabled(True)
        with torch.enable_grad():
            loss = F.linear(x, weight).square().mean()
            if self.way == "backward":
                loss.backward()
                return loss.detach()
            (step,) = torch.autograd.grad(loss, weight, create_graph=True)
        return F.linear(x, weight - 0.1 * step).square().mean()


def adapted() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    for way in ("context", "function", "requires_grad"):
        made, beside = Adapting(way), Adapting(way)
        beside.load_state_dict(made.state_dict())
        parallel = autopar.parallelize(made, mesh, (batch(0),))
        for training in (True, False, True, False):
            for module in (parallel, beside):
                module.train(training)
            with torch.set_grad_enabled(training):
                torch.testing.assert_close(parallel(batch(0)), beside(batch(0)))
    parallel = autopar.parallelize(Adapting("context"), mesh, (batch(0),)).eval()
    parallel.way = "backward"
    with pytest.raises(ValueError, match="though gradients are disabled where it is called"), torch.no_grad():
        parallel(batch(0))


def test_gradients_that_forward_takes_while_they_are_disabled() -> None:
    (outcome,) = outcomes(1, adapted)
    assert outcome.error is None, outcome.traceback


class Doubling(nn.Module):
    """Asks in evaluation alone for what it does not ask for in training, where one program serves both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(HIDDEN, HIDDEN), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).square().mean()
        return y * 2 if not self.training and self.twice else y


def copied() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    parallel = autopar.parallelize(Doubling(), mesh, (batch(0),))
    trained = parallel(batch(0))
    torch.testing.assert_close(parallel.eval()(batch(0)), trained)
    twin = copy.deepcopy(parallel)
    twin.twice = True
    torch.testing.assert_close(twin(batch(0)), 2 * trained)
    torch.testing.assert_close(parallel(batch(0)), trained)


def test_a_copy_knows_what_each_mode_asked_for() -> None:
    (outcome,) = outcomes(1, copied)
    assert outcome.error is None, outcome.traceback
