"""What else people do with a module: copy it, pickle it, compile it, average it, call parts of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_close, whole
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import autopar
from autopar.runtime.failures import explanation
from autopar.runtime.module import ParallelModule

IDS = torch.arange(6).repeat(2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))  # a norm follows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(self.body(self.embed(ids))))
        return made


def parallel(**options: Any) -> ParallelModule:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("a",))
    return autopar.parallelize(Words(), mesh, (IDS,), solver="fsdp", **options)


def step(module: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    loss = whole(module(IDS)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def copied() -> None:
    module, beside = parallel(), Words()
    step(module), step(beside)
    other, twin = copy.deepcopy(module), copy.deepcopy(beside)
    assert other.mesh is module.mesh and other.program is module.program
    for _ in range(2):
        assert_close(step(other), step(twin), "loss of the copy", 1e-4)
    assert other.embed.weight.grad is None and module.norm.num_batches_tracked == 1
    for each, same in ((other, twin), (module, beside)):
        assert_close(step(each), step(same), "loss afterwards", 1e-4)
        each.eval(), same.eval()
        assert_close(whole(each(IDS)).detach(), same(IDS).detach(), "evaluation", 1e-4)
    averaged = AveragedModel(module)
    averaged.update_parameters(module)
    module.train(), averaged.train()
    assert_close(whole(averaged(IDS)).detach(), whole(module(IDS)).detach(), "an average of one")


def test_a_deep_copy_is_a_module_of_its_own() -> None:
    run(2, copied)


AVERAGED: dict[str, dict[str, Any]] = {
    "parameters": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "buffers too": {"avg_fn": get_ema_avg_fn(0.8), "use_buffers": True},
}


def averaged_over_steps(averaged: str) -> None:
    module, beside = parallel(), Words()
    ema = [AveragedModel(each, device="cpu", **AVERAGED[averaged]) for each in (module, beside)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, beside)]
    for _ in range(4):
        for each, optimizer, average in zip((module, beside), optimizers, ema, strict=True):
            whole(each(IDS)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
    assert ema[0].module.mesh is module.mesh and ema[0].module.executable is module.executable
    plain = dict(ema[1].module.state_dict())
    for name, value in ema[0].module.state_dict().items():
        assert_close(whole(value), plain[name], name, 1e-4)
        live = whole(module.state_dict()[name])
        assert name.startswith("norm.") or not torch.equal(live, whole(value))
    for average in ema:
        average.eval()
    assert_close(whole(ema[0](IDS)).detach(), ema[1](IDS).detach(), "evaluation of the average", 1e-4)


@pytest.mark.parametrize("averaged", AVERAGED)
def test_an_exponential_average_is_that_of_one_process(averaged: str) -> None:
    run(2, averaged_over_steps, averaged)


def stays() -> None:
    module, held = parallel(), Words()
    before = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    for same in (
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.device("cpu"), non_blocking=True),
        lambda m: m.to(torch.float32),
        lambda m: m.cpu(),
        lambda m: m.float(),
        lambda m: m.to(torch.zeros(1)),
        lambda m: m.train(),
        lambda m: m.to(),
    ):
        assert same(module) is module
        assert same(module.body) is module.body
    assert nn.ModuleList([module, nn.Linear(2, 2)]).to("cpu")[0] is module
    assert before == {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    assert_close(step(module), step(held), "loss", 1e-4)
    for change in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.cuda(),
        lambda m: m.body.to_empty(device="cpu"),
        lambda m: m.share_memory(),
        lambda m: m.body.bfloat16(),
    ):
        with pytest.raises(ValueError, match=r"keeps its device and dtype \(.*: torch.* on cpu\), which are part"):
            change(module)
    assert_close(step(module), step(held), "loss afterwards", 1e-4)


def test_a_module_that_is_moved_to_where_it_is_stays_and_is_moved_nowhere_else() -> None:
    run(2, stays)


def refused() -> None:
    module = parallel()
    with pytest.raises(ValueError, match=r"cannot be pickled, .* state_dict\(\) with torch\.distributed\.checkpoint"):
        pickle.dumps(module)
    with pytest.raises(ValueError, match=r"no shallow copy: use copy\.deepcopy"):
        copy.copy(module)


def test_a_pickle_is_refused() -> None:
    run(2, refused)


def compiled() -> None:
    module, beside = parallel(), Words()
    assert_close(step(torch.compile(module, backend="eager")), step(beside), "loss")  # type: ignore[arg-type]
    assert_close(step(module), step(beside), "loss of the second step")


def test_torch_compile_leaves_the_program_as_it_is() -> None:
    run(2, compiled)


def parts_called() -> None:
    module, beside = parallel(), Words()
    assert isinstance(module.head, nn.Linear) and type(module.head).__name__ == "Linear"
    for each in (module, beside):
        h = each.norm(each.body(each.embed(IDS)))
        assert not isinstance(h, DTensor)
        F.cross_entropy(each.head(h), IDS).backward()
    for name, parameter in beside.named_parameters():
        gradient = module.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        assert_close(gradient.full_tensor(), parameter.grad, name, 1e-4)
    assert_close(module.norm.running_var, beside.norm.running_var, "a buffer")
    assert_close(module.head(module.norm(module.body(module.embed(IDS)))), beside(IDS), "the parts")


def test_a_part_called_by_itself_is_whole_on_every_rank() -> None:
    run(2, parts_called)


def whole_outputs() -> None:
    module, beside = parallel(whole_outputs=True), Words()
    for each in (module, beside):
        logits = each(IDS)
        assert not isinstance(logits, DTensor)
        F.cross_entropy(logits, IDS).backward()
    for name, parameter in beside.named_parameters():
        assert_close(whole(module.get_parameter(name).grad), parameter.grad, name, 1e-4)
    assert isinstance(parallel()(IDS), DTensor)


def test_outputs_that_are_whole_on_request() -> None:
    run(2, whole_outputs)


def other_constants() -> None:
    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.scale = nn.Parameter(torch.ones(4)), torch.full((4,), float(torch.distributed.get_rank()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w * self.scale).sum()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    with pytest.raises(ValueError, match="the ranks closed over different tensors"):
        autopar.parallelize(Closed(), mesh, (torch.ones(4),), solver="ddp")


def test_constants_that_differ_between_ranks() -> None:
    run(2, other_constants)


def explained() -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    late = str(explanation("all_reduce", "a", group, RuntimeError("Timed out waiting 1800000ms for recv operation")))
    assert "did not end within the timeout" in late and "died" not in late and "may be slow" in late
    gone = str(explanation("all_reduce", "a", group, RuntimeError("Connection closed by peer")))
    assert "has probably died" in gone and "look at the log of rank" in gone


def test_a_timeout_is_not_a_death() -> None:
    run(2, explained)
