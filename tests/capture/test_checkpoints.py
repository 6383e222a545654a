"""Regions that a model marks with `torch.utils.checkpoint`: made again in backward where that is asked for, with the
numbers of one process, and with no more kept than eager PyTorch keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.passes.capture.errors import CaptureError
from autopar.passes.capture.trace import capture
from autopar.passes.checkpoints import checkpoints
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.testing import check

GRID = {"dp": 2, "tp": 2}
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Layer(nn.Module):
    """A layer with a checkpoint in it, called in another one or not."""

    def __init__(self, width: int, reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.3)
        self.checkpoint = functools.partial(checkpoint, use_reentrant=reentrant)
        self.nested = nested

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.up(x).tanh()).sin()

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        y = self.checkpoint(self.inner, x.cos()) if self.nested else self.inner(x.cos())
        return x + self.down(y).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.checkpoint(self.outer, x)
        return result


class Layers(nn.Module):
    """`calls` of each of so many layers."""

    def __init__(self, count: int, *, reentrant: bool, nested: bool = False, calls: int = 1, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, reentrant, nested) for _ in range(count))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            for _ in range(self.calls):
                x = layer(x)
        return x.square().mean()


def llama(reentrant: bool, layers: int = 5) -> models.Case:
    return enabled(models.Case(model=models.llama(layers, attention_dropout=0.2), batch=models.tokens), reentrant)


def bert(reentrant: bool) -> models.Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=48, max_position_embeddings=models.SEQUENCE)  # fmt: skip
    return enabled(models.Case(model=BertForMaskedLM(config), batch=models.tokens), reentrant)


def enabled(case: models.Case, reentrant: bool) -> models.Case:
    model: Any = case.model
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return case


CASES: dict[str, Callable[[bool], models.Case]] = {
    "one region": lambda reentrant: of(Layers(1, reentrant=reentrant)),
    "layers": lambda reentrant: of(Layers(5, reentrant=reentrant)),
    "nested": lambda reentrant: of(Layers(5, reentrant=reentrant, nested=True)),
    "called twice": lambda reentrant: of(Layers(2, reentrant=reentrant, calls=2)),
    "llama": llama,
    "bert": bert,
}
MODELS = ("llama", "bert")


def of(model: nn.Module) -> models.Case:
    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(64, 16, generator=torch.Generator().manual_seed(step)),), {}

    return models.Case(model=model, batch=batch)


@functools.cache
def case(name: str, reentrant: bool) -> models.Case:
    torch.manual_seed(0)
    return models.perturbed(CASES[name](reentrant))


@functools.cache
def planner(name: str, reentrant: bool, recompute: Any) -> Planner:
    made = case(name, reentrant)
    return Planner(made.model, GRID, made.args, made.kwargs, recompute=recompute)


@pytest.mark.parametrize(
    ("name", "reentrant"), [*((name, False) for name in CASES), *((name, True) for name in CASES if name not in MODELS)]
)
def test_the_numbers_are_those_of_one_process_that_checkpoints(name: str, reentrant: bool) -> None:
    """Dropout inside of regions included; a preset's plan, and random ones. Models mark in one of two ways: what
    is made again in either, the next test shows."""
    made, plans = case(name, reentrant), 1 if name in MODELS else 2
    result = check(made.model, GRID, made.args, made.kwargs, solver="fsdp", plans=plans, steps=2, recompute="asked")
    assert result.equal, result


@KINDS
@pytest.mark.parametrize("name", CASES)
def test_exactly_what_lies_in_regions_is_made_again(name: str, reentrant: bool) -> None:
    made = case(name, reentrant)
    graph = capture(made.model, made.args, made.kwargs).graph
    forward = {node.name: node for node in graph.nodes if not node.backward}
    again = [node for node in checkpoints(graph).nodes if node.serves]
    assert again and all(node.backward and forward[node.serves].region for node in again)
    # and nothing of a region is kept but what it gives to the rest
    outside = {name for node in forward.values() if not node.region for name in node.inputs}
    outside |= {o.name for o in graph.outputs if o.name}
    makers = {output: node for node in forward.values() for output in node.outputs}
    for node in checkpoints(graph).nodes:
        for name in node.inputs if node.backward else ():
            if name in makers and makers[name].region:
                readers = [n.region for n in forward.values() if name in n.inputs]
                assert name in outside or any(region[:1] != makers[name].region[:1] for region in readers)


def test_a_region_within_a_region_is_made_again_twice() -> None:
    graph = checkpoints(capture(Layers(1, reentrant=False, nested=True), of(nn.Identity()).args).graph)
    again = [node.op for node in graph.nodes if node.serves]
    assert [again.count(op) for op in ("aten.cos.default", "aten.sin.default", "aten.native_dropout.default")] == [
        1,
        1,
        2,
    ]


@KINDS
def test_layers_stay_copies_of_each_other(reentrant: bool) -> None:
    """So that planning costs per unique layer."""
    (repeat,) = planner("llama", reentrant, "asked").space.repeats
    assert repeat.count == 5


def kept_by_eager(made: models.Case) -> int:
    """The bytes that are there after forward and were not there before."""
    args, kwargs = made.batch(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = models.loss_of(made.model(*args, **kwargs))
    del loss
    return sum(event.self_cpu_memory_usage for event in profiled.key_averages())


def kept_by_program(name: str, recompute: str) -> tuple[int, int]:
    """The bytes on one rank of what backward reads of forward, and of the peak."""
    one = planner(name, False, recompute).on({"a": 1}, None)
    plan = one.plan(solver="ddp")
    program = one.program(plan)
    given = {i.name for i in program.inputs}
    return sum(program.metas[kept].bytes for kept in program.saved if kept not in given), plan.bytes


@pytest.mark.parametrize("name", ["layers", "nested", "llama", "bert"])
def test_what_is_kept_falls_as_eagers_does(name: str) -> None:
    """On one rank, at most what eager keeps with checkpoints is kept between forward and backward."""
    (kept, peak), (kept_before, peak_before) = (kept_by_program(name, recompute) for recompute in ("asked", "none"))
    assert kept <= kept_by_eager(case(name, False))
    assert kept < 0.3 * kept_before and peak < peak_before


def test_the_planner_may_ignore_what_the_model_marks_and_says_so() -> None:
    """By default plans are those of the same model without checkpoints, but for the line that says so."""
    plain = models.Case(model=models.llama(5, attention_dropout=0.2), batch=models.tokens)
    plain.model.train()
    with_marks = planner("llama", True, "auto").plan(solver="fsdp")
    without = Planner(plain.model, GRID, (), plain.kwargs).plan(solver="fsdp")
    assert with_marks.digest == without.digest and with_marks.peak == without.peak
    assert "5 regions that torch.utils.checkpoint marks" in with_marks.text(width=1000)
    assert "torch.utils.checkpoint" not in without.text(full=True) and "checkpoints" not in without.to_json()
    assert "training" not in with_marks.to_json()


def test_nothing_is_made_again_where_that_is_asked() -> None:
    """Under a limit that recomputation alone can keep, there is no plan."""
    free = planner("llama", True, "none").on({"a": 2}, None)
    automatic = planner("llama", True, "auto").on({"a": 2}, None)
    plan = free.plan(solver="ddp")
    assert plan.digest != automatic.plan(solver="ddp").digest  # it is for training in another way
    with pytest.raises(ValueError) as caught:
        automatic.plan(solver="ddp", memory_limit_bytes=1)
    smallest = caught.value.smallest_bytes  # type: ignore[attr-defined]
    again = automatic.plan(solver="ddp", memory_limit_bytes=smallest)
    assert any(run.recompute for segment in again.segments for run in segment.runs)
    with pytest.raises(ValueError, match="memory"):
        free.plan(solver="ddp", memory_limit_bytes=smallest)


def test_what_is_asked_is_all_that_is_made_again_under_a_limit() -> None:
    made = planner("llama", True, "asked").on({"a": 2}, None)
    free = made.plan(solver="ddp")
    tight = made.plan(solver="ddp", memory_limit_bytes=free.bytes)
    assert not any(run.recompute for segment in tight.segments for run in segment.runs)


def test_a_plan_says_what_is_made_again_and_reads_back(tmp_path: Path) -> None:
    made = planner("llama", True, "asked")
    plan = made.plan(solver="fsdp")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.training.recompute == "asked"
    assert "as asked: 5 regions that torch.utils.checkpoint marks, and nothing else" in loaded.text(width=1000)
    again = autopar.read_plan(loaded, case("llama", True).model, (), case("llama", True).kwargs)
    assert again.peak == plan.peak and again.seconds == pytest.approx(plan.seconds)
    assert str(made.program(loaded)) == str(made.program(plan))
    with pytest.raises(ValueError, match=r"training with \{'recompute': 'asked'\}, and this is the default"):
        planner("llama", True, "auto").check(loaded)


def test_utilization_counts_no_arithmetic_twice() -> None:
    plans = [planner("llama", True, recompute).plan(solver="fsdp") for recompute in ("auto", "asked")]
    auto, asked = (plan.provenance for plan in plans)
    assert auto is not None and asked is not None and auto.flops == asked.flops


@pytest.mark.parametrize("wrong", ["ask", None, True, 1])
def test_a_wrong_value_is_one_clear_error(wrong: Any) -> None:
    made = case("one region", True)
    with pytest.raises(ValueError, match=r"recompute is .*'auto'.*'asked'.*'none'"):
        autopar.plan(made.model, GRID, made.args, recompute=wrong)


def test_a_model_that_marks_nothing_is_planned_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plan = autopar.plan(models.mlp(), {"a": 2}, models.vectors(0)[0], loss_fn=models.mean_square, recompute="asked")
    assert "calls torch.utils.checkpoint nowhere" in caplog.text and "marks nothing" in plan.text(width=1000)


def test_a_buffer_that_forward_writes_is_not_read_again() -> None:
    """Its old value is gone in backward: what reads it is kept."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("scale", torch.ones(16))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.scale.sqrt()).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
            with torch.no_grad():
                self.scale.add_(1.0)
            return result.square().mean()

    graph = checkpoints(capture(Counted(), of(nn.Identity()).args).graph)
    again = [node.op for node in graph.nodes if node.serves]
    assert "aten.addmm.default" in again and "aten.sqrt.default" not in again


def _on_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    made = enabled(models.Case(model=models.llama(2), batch=models.tokens), False)
    expected = models.eager(made)
    module = autopar.parallelize(made.model, mesh, kwargs=made.kwargs, solver="fsdp", recompute="asked")
    assert module.plan.training.recompute == "asked"
    models.assert_same(models.on_ranks(module, made), models.Step(
        outputs=expected.outputs, gradients=expected.gradients, buffers=expected.buffers), tolerance=1e-5)  # fmt: skip
    again = autopar.parallelize(made.model, mesh, kwargs=made.kwargs, plan=module.plan)
    assert str(again.program) == str(module.program)
    module.eval()
    with torch.no_grad():
        module(**made.kwargs)


def test_a_parallel_module_trains_so_and_a_plan_brings_it_along() -> None:
    run(2, _on_ranks)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_trained_tensor_that_is_no_parameter_read_in_a_checkpoint_alone(reentrant: bool) -> None:
    """A reentrant one reads it without gradients first, and with them in backward."""

    class Scaled(nn.Module):
        def __init__(self, trained: bool) -> None:
            super().__init__()
            self.layer, self.scales = nn.Linear(4, 4), [torch.ones(4, requires_grad=trained)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def scaled(y: torch.Tensor) -> torch.Tensor:
                return self.layer(y) * self.scales[0]

            return checkpoint(scaled, self.layer(x), use_reentrant=reentrant).square().mean()

    capture(Scaled(trained=False), (torch.randn(2, 4),))
    model = Scaled(trained=True)
    with pytest.raises(CaptureError, match=r"scales\[0\] requires a gradient and is no parameter"):
        capture(model, (torch.randn(2, 4),))
    assert model.scales[0].grad is None
