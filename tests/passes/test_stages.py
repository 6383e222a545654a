"""Programs cut into stages: a step in stages is the step."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Case, eager, in_dtype
from staging import InTime, difference, in_time
from torch import nn

from autopar.ir.schedule import Action, Schedule
from autopar.passes.lower.stages import TIME, cuts_by, staged, units
from autopar.solve import schedules

zoo = pytest.importorskip("zoo")

MODELS = (
    *("GPT-2", "Llama, tied", "BERT", "T5", "ViT", "Qwen3-MoE", "Mamba", "Whisper", "Swin", "DeBERTa", "BART"),
    *("XLNet", "ALBERT", "Gemma-2"),
)
MESHES = ({"pp": 4, "dp": 1, "tp": 1}, {"pp": 2, "dp": 2, "tp": 2}, {"pp": 3, "dp": 2}, {"pp": 5, "tp": 2})


@functools.cache
def planned(name: str, mesh: int, dropout: float = 0.0) -> InTime:
    case = zoo.case(name, 3)
    return in_time(zoo.dropping(case, dropout) if dropout else case, 4, MESHES[mesh])


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_stages_is_the_step(name: str) -> None:
    """Cut anywhere, in any of the schedules, on some mesh."""
    number = MODELS.index(name)
    made = planned(name, number % len(MESHES) if name != "XLNet" else 0)
    wanted = made.whole()
    devices, micro_batches = 2 + number % 3, made.program.mesh[TIME]
    for seed, schedule in enumerate(
        (
            schedules.gpipe(devices, micro_batches),
            schedules.one_f_one_b(devices, micro_batches),
            schedules.zb_h1(devices, micro_batches),
            schedules.zb_v(devices, micro_batches),
        )
    ):
        cut = made.cut(len(schedule.devices), 10 * number + seed)
        assert difference(made.piped(cut, schedule), wanted) < 1e-12, schedule.name


class Layers(nn.Module):
    """Layers whose weight's gradient reads what the next operators read as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def test_a_gradient_is_added_up_where_its_parameter_is() -> None:
    """Wherever the model is cut: then no sum of gradients goes to another stage."""
    made = in_time(Case(model=Layers(), batch=lambda step: ((torch.randn(8, 4),), {})), 2, {"pp": 4, "dp": 2})
    places = list(dict.fromkeys(node.serves for node in made.program.forward if node.serves))[1:]
    assert any(name.startswith("tanh") for name in places)
    wanted = made.whole()
    for name in places:
        cut = staged(made.program, (name,))
        assert cut.sums == (), name
        assert difference(made.piped(cut, schedules.one_f_one_b(2, 4)), wanted) < 1e-12, name


@pytest.mark.parametrize("name", ["GPT-2", "BART"])
def test_it_is_that_of_one_device(name: str) -> None:
    case = in_dtype(zoo.case(name, 3), torch.float64)
    made = planned(name, 1)
    found = made.piped(made.cut(3, 1), schedules.one_f_one_b(3, 2))
    result = eager(case)
    for target, gradient in result.gradients.items():
        torch.testing.assert_close(found.gradients[target], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5"])
def test_dropout_is_that_of_the_whole_batch(name: str) -> None:
    made = planned(name, 1, 0.3)
    cut = made.cut(4, 2)
    assert any(program.inputs for program in (cut.stages[0].step,))
    assert difference(made.piped(cut, schedules.zb_h2(4, 2)), made.whole()) < 1e-12


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["GPT-2", "T5", "BART"]), st.integers(0, 3), st.integers(2, 6), st.integers(0, 10**6))
def test_any_cut_will_do(name: str, mesh: int, stages: int, seed: int) -> None:
    made = planned(name, mesh)
    schedule = schedules.zb_h1(stages, made.program.mesh[TIME])
    assert difference(made.piped(made.cut(stages, seed), schedule), made.whole()) < 1e-12


def test_gradients_of_a_tied_weight_meet_once() -> None:
    """A weight that two stages use goes to the second before a step, and one sum of gradients back behind it."""
    made = planned("GPT-2", 0)
    cut = cut_by_layer(made)
    (handed,) = cut.parameters
    assert (handed.name, handed.source, handed.target) == ("transformer_wte_weight", 0, 2)
    metas = cut.program.metas
    sizes = [metas[m.name].shape for m in cut.messages]
    assert metas["transformer_wte_weight"].shape not in sizes
    assert [(s.source, s.target) for s in cut.sums] == [(2, 0)]
    # one activation between neighbours, and its gradient
    assert sorted((m.source, m.target) for m in cut.messages) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def cut_by_layer(made: InTime) -> staged:  # type: ignore[valid-type]
    firsts: dict[str, str] = {}
    for node in made.program.forward:
        for layer in (1, 2):
            if f".h.{layer}." in f"{node.module}.":
                firsts.setdefault(str(layer), node.serves)
    return staged(made.program, tuple(firsts.values()))


def test_cuts_are_found_again_by_where_parameters_are() -> None:
    made = planned("T5", 0)
    cut = made.cut(4, 7)
    homes = {i.target: cut.homes[i.name] for i in made.program.inputs if i.name in cut.homes}
    again = staged(made.program, cuts_by(made.program, homes, 4))
    assert {name: stage for name, stage in again.homes.items()} == dict(cut.homes)
    assert difference(made.piped(again, schedules.gpipe(4, 4)), made.whole()) < 1e-12


def test_a_stage_may_be_empty() -> None:
    made = planned("GPT-2", 0)
    cut = staged(made.program, ("", ""))
    assert difference(made.piped(cut, schedules.gpipe(3, 4)), made.whole()) < 1e-12


def test_gradients_of_inputs_wait_for_no_weights() -> None:
    """What leads to what is sent stands apart from the gradients of weights."""
    made = planned("Llama, tied", 0)
    cut = made.cut(3, 5)
    for stage in cut.stages[1:]:
        sent = {m.name for m in cut.messages if m.source == stage.number}
        parts = units(stage, sent)
        assert parts.weights.forward and parts.inputs.forward
        made_there = {name for node in parts.weights.forward for name in node.outputs}
        assert made_there.isdisjoint({i.name for i in parts.inputs.inputs})
        assert sent <= {o.name for p in (parts.forward, parts.inputs) for o in p.outputs}


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(x)).relu())


def _vectors(step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return (torch.randn(8, 16, generator=torch.Generator().manual_seed(step)),), {}


def test_what_needs_the_whole_batch_is_refused_by_name() -> None:
    made = in_time(Case(model=_Normed(), batch=_vectors, loss_fn=lambda y: y.square().mean()), 2, {"pp": 2, "dp": 1})
    with pytest.raises(ValueError, match=r"norm needs all micro-batches of a step at once .* GroupNorm"):
        made.cut(2, 0)


class _Weighted(nn.Module):
    """A loss whose mean is over weights of classes, and a penalty that depends on no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 8)
        self.loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, 8), ignore_index=3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.two(self.one(x).relu()), labels)
        return loss + 0.1 * self.one.weight.square().sum()


def test_a_loss_is_that_of_the_whole_batch() -> None:
    """Labels fall unevenly on micro-batches, some of which count for nothing."""

    def batch(step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        labels = torch.tensor([0, 1, 3, 3, 3, 3, 7, 2])
        return (*_vectors(step)[0], labels), {}

    case = Case(model=_Weighted(), batch=batch)
    made = in_time(case, 2, {"pp": 4, "dp": 1})
    found = made.piped(made.cut(2, 0), schedules.one_f_one_b(2, 4))
    result = eager(in_dtype(case, torch.float64))
    for target, gradient in result.gradients.items():
        torch.testing.assert_close(found.gradients[target], gradient, rtol=1e-9, atol=1e-12)


def test_experts_without_a_loss_that_balances_them() -> None:
    """As `transformers` has them by default; the balancing loss needs the means over all micro-batches first."""
    case = zoo.case("Mixtral", 3)
    with pytest.raises(ValueError, match="needs all micro-batches of a step at once"):
        in_time(case, 4, MESHES[1]).cut(4, 0)
    case.model.config.output_router_logits = False
    made = in_time(case, 4, MESHES[1])
    assert difference(made.piped(made.cut(4, 5), schedules.zb_v(2, 2)), made.whole()) < 1e-12


def test_skips_of_a_u_net_pass_over_stages() -> None:
    import unet

    batch = unet.batches(1, 6, 16)[0]
    case = Case(model=unet.UNet((8, 16, 24), "group"), batch=lambda step: ((), batch))
    made = in_time(case, 4, {"pp": 3, "dp": 2})
    cut = made.cut(4, 3)
    assert any(m.target > m.source + 1 for m in cut.messages)
    found = made.piped(cut, schedules.one_f_one_b(4, 3))
    result = eager(in_dtype(case, torch.float64))
    for target, gradient in result.gradients.items():
        torch.testing.assert_close(found.gradients[target], gradient, rtol=1e-9, atol=1e-12)


def test_a_cut_that_is_no_place_of_forward() -> None:
    made = planned("GPT-2", 0)
    places = [node.serves for node in made.program.forward if node.serves]
    with pytest.raises(ValueError, match="forward has no operator that is called so"):
        staged(made.program, ("nothing",))
    with pytest.raises(ValueError, match="in the order of forward"):
        staged(made.program, (places[-1], places[1]))


def test_devices_that_all_wait_are_an_error_and_no_hang() -> None:
    made = planned("GPT-2", 0)
    first = tuple(Action(0, kind, k) for k in range(4) for kind in "BF")
    second = tuple(Action(1, kind, k) for k in range(4) for kind in "FB")
    with pytest.raises(AssertionError, match="all devices wait"):
        made.piped(made.cut(2, 0), Schedule(name="stuck", micro_batches=4, devices=(0, 1), orders=(first, second)))
