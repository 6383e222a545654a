"""Models in bfloat16 and float16, and under autocast: as exact as eager is, in the dtypes that eager makes.

Eager itself is compared with the same weights in float64. A parallel run adds in another order and rounds partial
sums once more, so its error is not eager's but of that size: at most twice, and a few roundings of the largest element.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import models
import plans
import pytest
import torch
from models import Case
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner

pytest.importorskip("transformers")

MESHES: tuple[dict[str, int], ...] = ({"a": 4}, {"dp": 2, "tp": 2})


class Picture(nn.Module):
    """Convolutions, norms with statistics, and a part that its author keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.group, self.layer = nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.conv(x)))  # a norm right after it would leave its bias no gradient but rounding
        x = self.layer(self.group(x).mean((2, 3)))
        x = torch.tanh(self.hidden(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(x.to(self.head.weight.dtype))


class Unweighted(nn.Module):
    """Norms that learn nothing, one of them with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.group, self.layer = nn.GroupNorm(2, 8, affine=False), nn.LayerNorm(8, elementwise_affine=False)
        self.rms, self.head = nn.RMSNorm(8, elementwise_affine=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.group(self.norm(torch.relu(self.conv(x)))).relu()
        return self.head(self.rms(self.layer(x.mean((2, 3))).tanh()))


class Masked(nn.Module):
    """Attention with masks of truth values, of numbers and of parameters, and a query that sees no key."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head, self.bias = nn.Linear(8, 24), nn.Linear(8, 4), nn.Parameter(torch.zeros(2, 6, 6))
        seen = torch.ones(6, 6, dtype=torch.bool).tril()
        seen[2] = False
        self.seen = nn.Buffer(seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        far = torch.where(self.seen, 0.0, -3e4).to(q.dtype)
        for mask in (self.seen, far, self.bias.to(q.dtype)):
            v = v + torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.head(v.transpose(1, 2).flatten(2))


def sequences(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(step)),), {}


def pictures(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(step)),), {}


def spread(output: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output.float(), torch.linspace(-1, 1, output.numel()).view_as(output))


MODELS: Mapping[str, Callable[[], Case]] = {
    "mlp": lambda: Case(model=models.mlp(), batch=models.vectors, loss_fn=spread),
    "picture": lambda: Case(model=Picture(), batch=pictures, loss_fn=spread),
    "unweighted": lambda: Case(model=Unweighted(), batch=pictures, loss_fn=spread),
    "masked": lambda: Case(model=Masked(), batch=sequences, loss_fn=spread),
    "gpt2": lambda: Case(model=models.gpt2(1), batch=models.tokens),
    "llama": lambda: Case(model=models.llama(1), batch=models.tokens),
}
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Result:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def cast(dtype: torch.dtype, how: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=dtype, enabled=how == "autocast")


def made(name: str, dtype: torch.dtype, how: str) -> Case:
    """The case with weights that `dtype` can hold; in that dtype unless it is autocast that casts."""
    torch.manual_seed(0)
    case = MODELS[name]()
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    case.model.to(dtype)
    return in_dtype(case, dtype if how == "model" else torch.float32)


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = case.batch(step)
        return tuple(a.to(dtype) if a.is_floating_point() else a for a in args), kwargs

    return Case(model=copy.deepcopy(case.model).to(dtype), batch=batch, loss_fn=case.loss_fn)


def eager(case: Case, context: contextlib.AbstractContextManager[Any]) -> Result:
    model = copy.deepcopy(case.model)
    args, kwargs = case.batch(0)
    with context:
        loss = models.loss_of(model(*args, **kwargs)) if case.loss_fn is None else case.loss_fn(model(*args, **kwargs))
    loss.backward()
    return Result(loss=loss.detach(), gradients={n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def exact(case: Case) -> Result:
    return eager(in_dtype(case, torch.float64), contextlib.nullcontext())


def assert_as_exact(found: Result, theirs: Result, right: Result, dtype: torch.dtype) -> None:
    """In every gradient, in the norm: an error of at most twice eager's, and eight roundings of the largest element."""
    assert found.loss.dtype == theirs.loss.dtype
    pairs = [("loss", found.loss, theirs.loss, right.loss)]
    assert found.gradients.keys() == theirs.gradients.keys()
    pairs += [(n, g, theirs.gradients[n], right.gradients[n]) for n, g in found.gradients.items()]
    for what, ours, eagers, truth in pairs:
        assert ours.dtype == eagers.dtype, what
        error, allowed = (ours.double() - truth).norm(), 2 * (eagers.double() - truth).norm()
        rounding = 8 * torch.finfo(dtype).eps * truth.abs().max() * truth.numel() ** 0.5
        assert error <= allowed + rounding, f"{what}: {error:.3g}, eager {allowed / 2:.3g}, rounding {rounding:.3g}"


@functools.cache
def planner_of(name: str, half: str, how: str, axes: tuple[tuple[str, int], ...]) -> tuple[Planner, Case]:
    case = made(name, HALVES[half], how)
    with cast(HALVES[half], how):
        return Planner(case.model, dict(axes), case.args, case.kwargs, loss_fn=case.loss_fn), case


@pytest.mark.parametrize(
    ("name", "half", "how", "mesh"),
    pairwise(tuple(MODELS), tuple(HALVES), ("model", "autocast"), MESHES),
    ids=lambda value: "x".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_every_plan_is_as_exact_as_eager(name: str, half: str, how: str, mesh: dict[str, int]) -> None:
    dtype = HALVES[half]
    planner, case = planner_of(name, half, how, tuple(mesh.items()))
    theirs, right = eager(case, cast(dtype, how)), exact(case)
    programs = [planner.program(planner.plan(solver=s)) for s in ("dp", "ddp", "fsdp", "megatron", "megatron_sp")]
    programs += [bucket(codegen(planner.space, plans.random_assignment(planner.space, seed))) for seed in range(2)]
    for program in programs:
        step = models.simulated(program, planner.captured, case)
        loss = next(value for value in step.outputs.values() if value.dim() == 0)
        assert_as_exact(Result(loss=loss, gradients=step.gradients), theirs, right, dtype)


def test_what_autocast_casts_is_in_the_graph() -> None:
    """Products in bfloat16, norms' weights, the part that is kept and all gradients in float32."""
    planner, _ = planner_of("picture", "bfloat16", "autocast", (("a", 4),))
    graph = planner.captured.graph
    dtypes = [(node.op, node.module, graph.metas[node.name].dtype, node.backward) for node in graph.nodes]
    forward = {dtype for op, module, dtype, back in dtypes if op == "aten.addmm.default" and not back}
    assert forward == {torch.bfloat16, torch.float32}
    backward = [dtype for op, module, dtype, back in dtypes if op == "aten.mm.default" and back]
    assert sorted(map(str, backward)) == ["torch.bfloat16"] * 2 + ["torch.float32"] * 2
    assert all(graph.metas[o.name].dtype == torch.float32 for o in graph.outputs if o.role == "gradient" and o.name)


# ------------------------------------------------------------------------------------------- real ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def autocast_steps() -> None:
    """Planned outside of autocast, as a trainer does, and called inside; and without it again."""
    case = made("mlp", torch.bfloat16, "autocast")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(case.model, mesh, case.args, loss_fn=case.loss_fn, solver="fsdp")
    for how in ("autocast", "model", "autocast"):
        with cast(torch.bfloat16, how):
            loss = module(*case.args)
        loss.backward()
        found = Result(loss=whole(loss), gradients={n: whole(p.grad) for n, p in module.named_parameters()})
        theirs = eager(case, cast(torch.bfloat16, how))
        assert_as_exact(found, theirs, exact(case), torch.bfloat16 if how == "autocast" else torch.float32)
        module.zero_grad()
    assert len(vars(module)["_modes"].versions) == 2
    with cast(torch.bfloat16, "autocast"):
        inside = autopar.parallelize(case.model, mesh, case.args, loss_fn=case.loss_fn, solver="fsdp")
        assert "bfloat16" in str(inside.program) or any(
            meta.dtype == torch.bfloat16 for meta in inside.program.metas.values()
        )
        loss = inside(*case.args)
        loss.backward()  # here, too, backward is in float32 where eager's is
    assert len(vars(inside)["_modes"].versions) == 1


def test_autocast_on_two_ranks() -> None:
    run(2, autocast_steps)


def scaled_steps(solver: str) -> None:
    """Float16 under a GradScaler: one good step, one that overflows on the rank that holds the row, one good step."""
    case = made("mlp", torch.float16, "autocast")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    beside = copy.deepcopy(case.model)
    module = autopar.parallelize(case.model, mesh, case.args, loss_fn=case.loss_fn, solver=solver)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, beside)]
    assert case.loss_fn is not None
    for step in range(3):
        (x,), _ = case.batch(step)
        with cast(torch.float16, "autocast"):
            losses = [module(x), case.loss_fn(beside(x))]
        for scaler, optimizer, loss in zip(scalers, optimizers, losses, strict=True):
            scaler.scale(loss).backward()
            if step == 1:
                first = optimizer.param_groups[0]["params"][0]
                local = first.grad.to_local() if isinstance(first.grad, DTensor) else first.grad
                # replicas are equal, and shards are not
                if solver == "ddp" or not isinstance(first.grad, DTensor) or torch.distributed.get_rank() == 0:
                    local[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (2.0**8 if step == 0 else 2.0**7)
        for ours, theirs in zip(module.parameters(), beside.parameters(), strict=True):
            torch.testing.assert_close(whole(ours), theirs.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron"])
def test_a_gradient_scaler_on_two_ranks(solver: str) -> None:
    run(2, scaled_steps, solver)
