"""A pipeline on the ranks of a mesh: the module trains as the model does, in stages."""

from __future__ import annotations

import copy
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fusing import quick_compiler, traced
from models import in_dtype
from staging import in_time
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.compat.redistributing import full_tensor
from autopar.ir.schedule import EARLY_RECEIVES
from autopar.planning.at_rest import Decided
from autopar.planning.reports import Once
from autopar.planning.request import Request
from autopar.runtime import module as runtime_module
from autopar.runtime.compiling import Inductor
from autopar.runtime.modes import Modes, Planning
from autopar.runtime.module import CallOptions, ParallelModule
from autopar.runtime.pipeline import StageRun
from autopar.runtime.pipelined import Pipelined, StageLine
from autopar.solve.schedules import SCHEDULES, scheduled

zoo = pytest.importorskip("zoo")

STEPS = 3


def module(name: str, mesh: DeviceMesh, micro_batches: int, schedule: str, seed: int) -> tuple[Any, ParallelModule]:
    """The case, and its module, cut anywhere."""
    case = in_dtype(zoo.case(name, 3), torch.float64)
    devices, *others = mesh.shape
    names = mesh.mesh_dim_names
    assert names is not None
    made = in_time(case, devices, dict(zip(names, (micro_batches, *others), strict=True)))
    units = scheduled(schedule, devices, micro_batches, chunks=SCHEDULES[schedule].chunks or 2)
    pipelined = Pipelined.of(made.cut(len(units.devices), seed), units)
    outside = pipelined.outside
    at_rest = {i.target: i.layout for i in outside.inputs if i.role == "parameter"}
    decided = Decided.of(made.planner.space, made.assignment)
    planning = Planning(request=Request(cluster="dgx-h100"), decided=decided, once=Once(), pipelined=pipelined)
    again = Modes(case.model, made.planner.captured, mesh, at_rest, case.loss_fn, planning)
    options = CallOptions(pipelined=pipelined, again=again)
    return case, ParallelModule(case.model, made.planner.captured, outside, None, mesh, options)


def _difference(parallel: torch.nn.Module, plain: torch.nn.Module) -> float:
    pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
    whole = ((full_tensor(p.detach()) if isinstance(p, DTensor) else p, q) for p, q in pairs)
    return max(float((p - q).abs().max()) for p, q in whole)


def _squares(model: torch.nn.Module) -> torch.Tensor:
    """A penalty outside of the model."""
    numbers = [parameter.square().sum() for parameter in model.parameters()]
    return torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in numbers]).sum()


def _trains(
    name: str, sizes: dict[str, int], micro_batches: int, schedule: str, seed: int, folder: str
) -> dict[str, float]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    case, parallel = module(name, mesh, micro_batches, schedule, seed)
    plain = copy.deepcopy(case.model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, plain)]
    found = {"loss": 0.0, "norm": 0.0}

    def loss_of(model: torch.nn.Module, rows: int, step: int) -> torch.Tensor:
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t[:rows], case.batch(step))
        output = model(*args, **kwargs)
        loss: torch.Tensor = output.loss if case.loss_fn is None else case.loss_fn(output)
        return loss

    for step in range(STEPS):
        rows = 5 if step == 1 else 8  # a smaller batch, which the micro-batches do not divide
        losses = [loss_of(model, rows, step) * 2 for model in (parallel, plain)]
        for loss, model in zip(losses, (parallel, plain), strict=True):
            (loss + 1e-3 * _squares(model)).backward()
        norms = [
            autopar.clip_grad_norm_(parallel.parameters(), 1.0),
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0),
        ]
        for what, (one, other) in (("loss", losses), ("norm", norms)):
            found[what] = max(found[what], abs(float(one) - float(other)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["parameters"] = _difference(parallel, plain)
    parallel.eval()
    plain.eval()
    args, kwargs = case.batch(7)
    with torch.no_grad():
        one, other = (model(*args, **kwargs) for model in (parallel, plain))
    found["logits"] = float((one.logits - other.logits).abs().max())
    state = parallel.state_dict()
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    parallel.save_pretrained(f"{folder}/files")
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")
    parallel.load_state_dict(state)
    found["loaded"] = _difference(parallel, plain)
    again = type(plain).from_pretrained(f"{folder}/files", dtype=torch.float64)
    found["files"] = _difference(again, plain)
    held = sum(p.to_local().numel() for p in parallel.parameters())
    found["part"] = held / sum(p.numel() for p in plain.parameters())
    return found


def _compiled_error(schedule: str) -> tuple[float, int]:
    """Of the gradients of a module in stages that is compiled, the largest error; and how many stretches that took."""
    compilers = []

    def quick(mode: str, mesh: Any) -> Inductor:
        compilers.append(quick_compiler(traced))
        return compilers[-1]

    runtime_module.Inductor = quick  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())]
    model = nn.Sequential(*layers).double()
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x = torch.randn(6, 8, dtype=torch.float64)
    options = {"loss_fn": lambda y: y.square().mean(), "micro_batches": 3, "schedule": schedule, "compile": True}
    parallel = autopar.parallelize(model, mesh, (x,), **options)
    for _ in range(2):
        parallel(x).backward()
        plain(x).square().mean().backward()
    errors = [
        float((p.grad.full_tensor() - q.grad).abs().max())
        for p, q in zip(parallel.parameters(), plain.parameters(), strict=True)
    ]
    assert parallel.plan.training.compile and not compilers[-1].failed
    return max(errors), len(compilers[-1].compiled)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_units_of_stages_are_compiled(schedule: str) -> None:
    for error, stretches in ranks.run(2, _compiled_error, schedule):
        assert error < 1e-12 and stretches > 2


@pytest.mark.parametrize(
    ("name", "sizes", "micro_batches", "schedule"),
    [
        ("GPT-2", {"pp": 2, "dp": 2}, 4, "1f1b"),
        ("T5", {"pp": 4}, 4, "zb-h1"),
        ("Llama, tied", {"pp": 2, "tp": 2}, 3, "zb-v"),
    ],
)
def test_a_module_in_stages_trains_as_the_model(
    name: str, sizes: dict[str, int], micro_batches: int, schedule: str, tmp_path: Path
) -> None:
    """Three steps with a stock optimizer, a penalty and clipping, a smaller batch among them; then evaluation, a
    distributed checkpoint and files of weights."""
    for found in ranks.run(4, _trains, name, sizes, micro_batches, schedule, 5, str(tmp_path)):
        part = found.pop("part")
        assert all(value < 1e-9 for value in found.values()), found
        assert part < 0.95


def _as_people_do(folder: str) -> dict[str, float]:
    """Plans, saves the plan, and trains by it; then again by the file."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    case = in_dtype(zoo.case("Llama", 3), torch.float64)
    args, kwargs = case.batch(0)
    found = {}
    plan = None
    for way in ("planned", "by the file"):
        plain = copy.deepcopy(case.model)
        parallel = autopar.parallelize(copy.deepcopy(case.model), mesh, args, kwargs, plan=plan, verify=1)
        assert parallel.plan.pipeline is not None and parallel.plan.mesh == {"pp": 2, "dp": 2}
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, plain)]
        for rows in (8, 3, 1):
            for model, optimizer in zip((parallel, plain), optimizers, strict=True):
                some = {name: value[:rows] for name, value in case.batch(rows)[1].items()}
                model(**some).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found[way] = _difference(parallel, plain)
        if dist.get_rank() == 0:
            parallel.plan.save(f"{folder}/plan.json")
        dist.barrier()
        plan = autopar.Plan.load(f"{folder}/plan.json")
    return found


def test_people_name_an_axis_and_train(tmp_path: Path) -> None:
    """`parallelize` on a mesh with an axis "pp", by its own plan and by one that was saved; batches down to one."""
    for found in ranks.run(4, _as_people_do, str(tmp_path)):
        assert all(value < 1e-9 for value in found.values()), found


class Heads(nn.Module):
    """Layers that lay out samples and heads as one dim, under a mask that is an input as long as two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).transpose(0, 1)
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=mask, need_weights=True)[0].tanh()
        return x.square().mean()


def _of_heads() -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    plain, mask = Heads(), torch.zeros(8, 8, dtype=torch.float64).masked_fill(torch.ones(8, 8).triu(1) > 0, -1e9)
    tokens = torch.randint(16, (4, 8))
    given = {"tokens": tokens, "mask": mask}
    parallel = autopar.parallelize(copy.deepcopy(plain), mesh, kwargs=given, micro_batches=2)
    found = []
    for rows in (4, 3, 1):
        losses = [model(tokens[:rows], mask) for model in (parallel, plain)]
        for model, loss in zip((parallel, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        found += [float((losses[0] - losses[1]).abs()), _difference_of_gradients(parallel, plain)]
        with torch.no_grad():
            one, other = (model(mask=mask, tokens=tokens[:rows]) for model in (parallel, plain))
        found.append(float((one - other).abs()))
    return found


def _difference_of_gradients(parallel: nn.Module, plain: nn.Module) -> float:
    pairs = [[p.grad for p in model.parameters()] for model in (parallel, plain)]
    whole = ((full_tensor(a) if isinstance(a, DTensor) else a, b) for a, b in zip(*pairs, strict=True))
    return max(float((a - b).abs().max()) for a, b in whole)


def test_a_batch_that_cannot_be_cut_into_as_many_is_cut_into_more() -> None:
    """A last batch of three where layers join samples with heads; and calls that train nothing, in which an input as
    long as something else is no batch."""
    for found in ranks.run(2, _of_heads):
        assert max(found) < 1e-12, found


def _asks(what: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    case, parallel = module("GPT-2", mesh, 2, "gpipe", 1)
    args, kwargs = case.batch(0)
    output = parallel(*args, **kwargs)
    output.loss.backward()
    try:
        if what == "logits":
            output.logits.sum()
        else:
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("logits", "output.logits is not kept in a training step of a pipeline"),
        ("norm", "call autopar.clip_grad_norm_"),
    ],
)
def test_what_a_rank_has_not_is_no_number(what: str, words: str) -> None:
    """Outputs that nobody keeps, and torch's own norm, which would be that of one stage."""
    assert all(words in found for found in ranks.run(2, _asks, what))


class Small(torch.nn.Module):
    """A model with a loss of so small a size."""

    def __init__(self, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, dtype=dtype) for _ in range(3)))
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.layers(x).float() if x.dtype == torch.float16 else self.layers(x)
        return torch.nn.functional.cross_entropy(scores, y, reduction="sum") * self.scale


def _backwards() -> list[tuple[float, float]]:
    """Of backwards that scale their loss by so much, one after the other: errors of gradients, and their size; where
    gradients would be lost in float16, and where one call has two backwards."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = []
    for dtype, scale, losses in ((torch.float16, 1e-7, (65536.0, 65536.0, 1024.0)), (torch.float64, 1.0, (1.0, 3.0))):
        torch.manual_seed(0)
        plain = Small(scale, dtype)
        x, y = torch.randn(8, 8).to(dtype), torch.arange(8)
        y[5] = -100
        pins = {"layers.2": {"pp": 1}}
        parallel = autopar.parallelize(copy.deepcopy(plain), mesh, (x, y), micro_batches=4, constraints=pins)
        for model in (parallel, plain):
            if dtype == torch.float64:
                loss = model(x, y)
                for factor in losses:
                    (factor * loss).backward(retain_graph=True)
            else:
                for factor in losses:
                    model.zero_grad()
                    (factor * model(x, y)).backward()
        gradients = [[full_tensor(p.grad) if isinstance(p.grad, DTensor) else p.grad for p in m.parameters()]
                     for m in (parallel, plain)]  # fmt: skip
        error = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
        found.append((error, max(float(g.abs().max()) for g in gradients[1])))
    return found


def test_backward_keeps_small_gradients_of_float16_and_may_come_twice() -> None:
    """Losses that are sums, of which a label is ignored; the scale of a loss is that of the step before, or another."""
    for narrow, wide in ranks.run(2, _backwards):
        assert narrow[1] > 1e-6 and narrow[0] < 2e-3 * narrow[1], narrow
        assert wide[0] < 1e-12 * wide[1], wide


def _ends(when: int) -> str:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    case, parallel = module("GPT-2", mesh, 4, "1f1b", 3)
    args, kwargs = case.batch(0)
    parallel(*args, **kwargs).loss.backward()
    if dist.get_rank() == 2:
        _end_in(when)
    try:
        parallel(*args, **kwargs).loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _end_in(when: int) -> None:
    """Ends this process as the unit of this number begins."""
    run, count = StageRun.run, itertools.count()

    def ending(self: StageRun[Any], action: Any, received: Any) -> Any:
        if next(count) == when:
            time.sleep(0.5)
            os._exit(1)
        return run(self, action, received)

    StageRun.run = ending  # type: ignore[method-assign]


@pytest.mark.parametrize("when", [0, 3, 6])
def test_a_rank_that_ends_ends_the_step(when: int) -> None:
    """In a forward, in the steady state, in the last backwards: the others say what they waited for, and none hangs."""
    found = ranks.outcomes(4, _ends, when, timeout_seconds=120.0)
    said = [str(outcome.value) for rank, outcome in enumerate(found) if rank != 2]
    assert all("mesh axis 'pp'" in text or "came to call 2" in text for text in said), found
    assert any("micro-batch" in text and "stage" in text for text in said), found


def _raises(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    case, parallel = module(name, mesh, 4, "1f1b", 0)
    args, kwargs = case.batch(0)
    kwargs = {key: value.clone() for key, value in kwargs.items()}
    kwargs["input_ids"][5, 1] = 10**6  # the third micro-batch, on every rank: only the first stage looks it up
    parallel(*args, **kwargs)


def test_a_stage_that_raises_says_which_and_the_others_end() -> None:
    """The ranks that read the index say where and when; those that wait for them say for what."""
    found = ranks.outcomes(4, _raises, "GPT-2", timeout_seconds=120.0)
    errors = [outcome.error for outcome in found]
    raised = [error for error in errors if isinstance(error, IndexError)]
    assert raised, found
    for error in raised:
        assert "in the forward of stage 0, micro-batch 2" in error.__notes__, error.__notes__
    waited = [str(error) for error in errors if not isinstance(error, IndexError)]
    assert len(waited) == 2
    assert all("of micro-batch 2, from stage 0 to stage 1" in text for text in waited), waited
    assert all("IndexError" in text for text in waited), waited


def _begins() -> list[str]:
    """What this rank begins in a step."""
    began: list[str] = []
    receive, run = StageLine.receive, StageRun.run

    def receiving(self: StageLine, what: str, *args: Any) -> Any:
        began.extend(["receive"] * ("micro-batch" in what))
        return receive(self, what, *args)

    def running(self: StageRun[Any], *args: Any) -> Any:
        began.append("run")
        return run(self, *args)

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    case, parallel = module("GPT-2", mesh, 8, "gpipe", 1)
    args, kwargs = case.batch(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLine, "receive", receiving)
        patch.setattr(StageRun, "run", running)
        parallel(*args, **kwargs)
    return began


def test_receives_begin_early_on_gloo() -> None:
    """There a message travels from when its receive has begun; no more wait than a device has room for."""
    for number, began in enumerate(ranks.run(2, _begins)):
        values, runs = began.count("receive") // 8, began.count("run")
        assert values and runs == 16
        early = EARLY_RECEIVES + number  # the last stage begins with a forward that needs the first of them
        assert began.index("run") == early * values, began
        # the first forwards of the last stage, and the first backwards of the first one, begin one more each
        units = [k for k, each in enumerate(began) if each == "run"][8 * (1 - number) :]
        assert [began[:at].count("receive") // values for at in units[:4]] == [EARLY_RECEIVES + k for k in (1, 2, 3, 4)]


class Layers(torch.nn.Module):
    """With its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in "abcd")
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(x), target)


def _beside_pytorchs(schedule: str, micro_batches: int, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Gradients of each step, ours and those of `torch.distributed.pipelining`, of this rank's stage: which differ in a
    bit, and which there are."""
    from torch.distributed import pipelining

    model, group = Layers().to(dtype), dist.group.WORLD
    mine = ("layers.0", "layers.1") if dist.get_rank() == 0 else ("layers.2", "layers.3")
    part = torch.nn.Sequential(*(copy.deepcopy(model.get_submodule(name)) for name in mine))
    stage = pipelining.PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"), group=group)
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    theirs = kind(stage, micro_batches, loss_fn=torch.nn.functional.mse_loss)
    batches = [tuple(torch.randn(2, 16, 3, 16).to(dtype)) for _ in range(STEPS)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pins = {name: {"pp": int(name >= "layers.2")} for name, _ in model.named_modules() if name.count(".") == 1}
    options = {"schedule": schedule, "micro_batches": micro_batches, "constraints": pins}
    parallel = autopar.parallelize(model, mesh, batches[0], cluster="dgx-h100", **options)
    assert parallel.plan.pipeline is not None and len(parallel.plan.pipeline.cuts) == 1
    own = dict(parallel.named_parameters())
    names = [f"{name}.{k}" for name, layer in zip(mine, part, strict=True) for k, _ in layer.named_parameters()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (parallel, part)]
    differing = []
    for x, target in batches:
        parallel(x, target).backward()
        theirs.step(*([x] if dist.get_rank() == 0 else []), **({"target": target} if dist.get_rank() else {}))
        pairs = zip(names, part.parameters(), strict=True)
        differing += [name for name, p in pairs if not torch.equal(own[name].grad.to_local(), p.grad)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differing, names


@pytest.mark.parametrize(("schedule", "micro_batches"), [("gpipe", 4), ("1f1b", 8)])
def test_gradients_are_those_of_pytorchs_own_runtime_to_the_last_bit(schedule: str, micro_batches: int) -> None:
    """Powers of two, so that dividing by the batch at once or by micro-batches rounds alike."""
    for differing, names in ranks.run(
        2, _beside_pytorchs, schedule, micro_batches, torch.float32, timeout_seconds=120.0
    ):
        assert len(names) == 4
        assert not differing
