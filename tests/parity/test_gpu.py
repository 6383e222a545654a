"""Parity on CUDA: one rank with NCCL, and four gloo ranks that share one GPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import Case, assert_same, case
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.compat.redistributing import full_tensor
from autopar.ops import sdpa
from autopar.ops.host import from_host, to_host
from autopar.passes.capture.trace import capture
from autopar.planning.plan import graph_digest
from autopar.runtime import messages as messages
from autopar.runtime.collectives import COLLECTIVES, wait

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]

STEPS = range(20)


def on_cuda(made: Case) -> Case:
    """The same weights and batches, on the GPU, multiplied in full precision."""
    torch.backends.cuda.matmul.allow_tf32 = False

    def batch(step: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), made.batch(step))

    return Case(model=copy.deepcopy(made.model).cuda(), batch=batch, loss_fn=made.loss_fn)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (full_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach().cpu()


def step_and_train(name: str, mesh: dict[str, int], solver: str, plan: autopar.Plan | None = None) -> dict[str, Any]:
    """One step, its gradients, and the parameters of `STEPS` AdamW steps, of the parallel module."""
    made = on_cuda(case(name))
    device_mesh = init_device_mesh("cuda", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = autopar.parallelize(
        made.model, device_mesh, made.args, made.kwargs, loss_fn=made.loss_fn, solver=solver, plan=plan
    )
    args, kwargs = made.batch(0)
    output = module(*args, **kwargs)
    models.loss_of(output).backward()
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    outputs = {path: whole(value) for path, value in models.flat(output).items()}
    module.zero_grad()
    losses = models.train(module, models.adamw(module), made, STEPS)
    parameters = {name: whole(p) for name, p in module.named_parameters()}
    return {"outputs": outputs, "gradients": gradients, "losses": losses, "parameters": parameters}


def step_with_nccl(folder: str, name: str) -> dict[str, Any]:
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=0, world_size=1)
    return step_and_train(name, {"dp": 1, "tp": 1}, "ilp")


def check(found: dict[str, Any], name: str) -> None:
    made = on_cuda(case(name))
    expected = models.eager(made)
    assert_same(models.Step(outputs=found["outputs"], gradients=found["gradients"]), expected, 1e-4)
    module = models.Eager(made)
    losses = models.train(module, models.adamw(module), made, STEPS)
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    for key, parameter in module.named_parameters():
        models.assert_close(found["parameters"][key], parameter, key, 1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama tied", "mlp with loss_fn"])
def test_one_rank_with_nccl(name: str, tmp_path: Path) -> None:
    (found,) = run(1, step_with_nccl, str(tmp_path), name)
    check(found, name)


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron", "megatron_sp", "dp"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_four_gloo_ranks_that_share_a_gpu(name: str, solver: str) -> None:
    for found in run(4, step_and_train, name, {"dp": 2, "tp": 2}, solver):
        check(found, name)


def carry(kind: str, *said: Any) -> list[torch.Tensor]:
    """A collective's result on this rank, of tensors on the host and on the GPU."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(24.0).reshape(8, 3) * (dist.get_rank() + 1)
    return [wait(COLLECTIVES[kind](x.to(device), *said, group)).cpu() for device in ("cpu", "cuda")]


@pytest.mark.parametrize(
    "call",
    [
        *[("all_reduce", "sum"), ("all_reduce", "max"), ("all_gather",), ("reduce_scatter", "sum"), ("all_to_all",)],
        *[("reduce_scatter", "min"), ("broadcast", 1), ("reduce", "sum", 1), ("shift", 1), ("rotate", -1)],
        ("exchange", torch.tensor([[2] * 4] * 2), 8),
    ],
    ids=lambda call: call[0],
)
def test_gloo_carries_what_is_on_a_gpu(call: tuple[Any, ...]) -> None:
    for host, gpu in run(4, carry, *call):
        assert torch.equal(host, gpu)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "composed"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("masked", ["", "causal", "mask", "both"])
def test_kernels_of_attention(kind: str, grouped: bool, masked: str) -> None:
    """Each against products and a softmax in float64, forward and backward, in sizes that no kernel likes."""
    if (kind == "flash" and masked in ("mask", "both")) or (kind == "cudnn" and masked == "both"):
        pytest.skip("it takes no mask, or none beside a causal one")
    torch.manual_seed(0)
    queries = keys = 50
    dtype = torch.float32 if kind == "composed" else torch.bfloat16
    shapes = (4, 8, queries, 64), *[(4, 2 if grouped else 8, keys, 64)] * 2
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    mask = torch.randn(4, 1, queries, keys, device="cuda", dtype=dtype) if masked in ("mask", "both") else None
    if mask is not None:
        mask[0, :, 3] = -torch.inf  # a query that sees no key
    call = sdpa.Attending(mask=mask, causal=masked in ("causal", "both"), scale=0.125)
    gradient = torch.randn_like(query)
    wide = [x.double() for x in (query, key, value)]
    exact = replace(call, mask=None if mask is None else mask.double())
    kernel = sdpa.KERNELS[kind]
    results = kernel.forward(query, key, value, call)
    gradients = kernel.backward(gradient, query, key, value, *results, call)
    reference = sdpa.COMPOSED.forward(*wide, exact)
    expected = sdpa.COMPOSED.backward(gradient.double(), *wide, *reference, exact)
    tolerance = 1e-4 if kind == "composed" else 3e-2
    for found, wanted in zip((results[0], *gradients), (reference[0], *expected), strict=True):
        models.assert_close(found.double(), wanted, kind, tolerance)


def test_a_laptops_plan_runs_here(tmp_path: Path) -> None:
    """A plan made for the CPU's trace is accepted, and its step is eager's."""
    (found,) = run(1, step_of_a_laptops_plan, str(tmp_path))
    check(found, "gpt2")


def step_of_a_laptops_plan(folder: str) -> dict[str, Any]:
    made = case("gpt2")
    plan = autopar.plan(made.model, {"dp": 1, "tp": 1}, made.args, made.kwargs, cluster="dgx-h100")
    return step_and_train("gpt2", {"dp": 1, "tp": 1}, "dp", plan)


class Makes(torch.nn.Module):
    """Names no device, holds a tensor of its own there, and moves what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held = torch.nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.arange(4, device=x.device) + torch.ones(4).to(x.device)
        return (self.layer(x) + made + self.held + SCALES.to(x.device)).square().sum()


SCALES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_what_is_captured_here_is_what_a_laptop_captures() -> None:
    """Where the model is on the GPU, with the tensors that it holds, and where that is the default device."""
    expected = graph_digest(capture(Makes(), (torch.randn(2, 4),)).graph)
    with torch.device("cuda"):
        model, x = Makes(), torch.randn(2, 4)
        assert graph_digest(capture(model, (x,)).graph) == expected
    assert graph_digest(capture(model, (x,), device_type="cuda").graph) == expected
    assert model.held.is_cuda


def compiled_losses(folder: str) -> tuple[list[float], list[float]]:
    """Losses of a model in eager and compiled, on one rank."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("a",))
    made, found = on_cuda(case("llama")), []
    for compiles in (False, True):
        module: Any = copy.deepcopy(made.model)
        if compiles:
            module = autopar.parallelize(module, mesh, made.args, made.kwargs, compile=True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        found.append([])
        for step in range(6):
            args, kwargs = made.batch(step)
            loss = module(*args, **kwargs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(loss.item())
    return found[0], found[1]


def test_compiled(tmp_path: Path) -> None:
    ((eager, compiled),) = run(1, compiled_losses, str(tmp_path))
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_copies_to_the_host_pass_on_a_stream_of_their_own() -> None:
    x = torch.randn(1 << 24, device="cuda").view(4096, 4096).t()
    expected = x.clone()
    kept, sent = to_host(x)
    assert kept.is_pinned() and kept.stride() == x.stride()
    for _ in range(20):  # which the copies do not wait for
        expected @ expected
    sent.wait()
    del x, sent
    torch.zeros(1 << 24, device="cuda")  # in the memory that was let go
    back, returned = from_host(kept)
    returned.wait()
    assert torch.equal(back, expected) and back.stride() == kept.stride()


def peaks_and_gradients() -> list[tuple[int, list[torch.Tensor]]]:
    """Of a step with what is kept for backward on the device, and on the host."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)))
    model, x = model.cuda(), torch.randn(8192, 1024, device="cuda")
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    found = []
    for size in (0, 1 << 40):
        plan = autopar.plan(model, {"dp": 1}, (x,), loss_fn=models.mean_square, cluster="dgx-h100")
        module = autopar.parallelize(
            copy.deepcopy(model), mesh, (x,), loss_fn=models.mean_square, plan=replace(plan, offload_bytes=size)
        )
        for _ in range(2):
            module.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            models.mean_square(module(x)).backward()
        peak = torch.cuda.max_memory_allocated()
        found.append((peak, [whole(p.grad) for p in module.parameters() if p.grad is not None]))
    return found


def test_memory_falls_by_what_the_host_holds() -> None:
    (((before, expected), (after, gradients)),) = run(1, peaks_and_gradients)
    assert after < 0.6 * before
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def steps_with_states(on_host: bool) -> tuple[list[torch.Tensor], int, list[bool]]:
    """What weights are after three steps, what is allocated between them, and which states are pinned."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    model, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda(), torch.randn(8, 1024, device="cuda")
    module = autopar.parallelize(model, mesh, (x,), loss_fn=models.mean_square)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if on_host:
        optimizer = autopar.states_on_host(optimizer)
    for _ in range(3):
        module(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    pinned = [moment.is_pinned() for moment in moments]
    return [whole(p).cpu() for p in module.parameters()], torch.cuda.memory_allocated(), pinned


def test_states_of_an_optimizer_wait_on_the_host() -> None:
    ((weights, size, pinned),) = run(1, steps_with_states, False)
    ((others, less, away),) = run(1, steps_with_states, True)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert not any(pinned) and all(away) and size - less > 0.9 * 2 * sum(w.numel() * 4 for w in weights)
