"""What the examples share: training a model on a 2 x 2 mesh of gloo ranks, and again on one process, to compare.

Started by torchrun on 4 ranks. The last line that is printed says how far the two are apart.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

Batch = dict[str, torch.Tensor]
MESH = {"dp": 2, "tp": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step."""
    state: dict[str, torch.Tensor]
    """Parameters and buffers after the last step."""
    steps_per_second: float


def compare(model: nn.Module, batches: list[Batch], solver: str) -> None:
    """Train a model whose output is the loss on 4 ranks, and the same model on one process with plain PyTorch."""
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit(
            f"this example runs on 4 ranks: start it with\n    torchrun --standalone --nproc-per-node 4 {sys.argv[0]}"
        )
    if len(batches) < 2:
        sys.exit(f"--steps {len(batches)}: give at least 2")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    first = dist.get_rank() == 0
    started = time.perf_counter()
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, kwargs=batches[0], solver=solver)
    if first:
        print(parallel.plan)
        print(f"captured, planned and compiled in {time.perf_counter() - started:.1f} s")
    trained = train(parallel, batches)
    if first:
        # the other ranks wait below, without work
        print(comparison(trained, train(model, batches)))
    dist.barrier()
    dist.destroy_process_group()


def train(model: nn.Module, batches: list[Batch]) -> Trained:
    """Plain PyTorch: it does not know whether the model is parallel."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    started = time.perf_counter()
    for number, batch in enumerate(batches):
        loss = model(**batch)
        loss.backward()
        if not number:
            gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            started = time.perf_counter()  # the first step warms up
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    state = {name: whole(value) for name, value in model.state_dict().items()}
    return Trained(
        losses=losses, gradients=gradients, state=state, steps_per_second=(len(batches) - 1) / seconds
    )  # fmt: skip


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest element."""
    assert found.keys() == expected.keys()
    scales = {name: max(float(value.abs().max()), 1e-3) for name, value in expected.items()}
    return max(float((found[name] - value).abs().max()) / scales[name] for name, value in expected.items())


def comparison(parallel: Trained, alone: Trained) -> str:
    """One line: how far the parallel run is from the same run on one process, and how fast both were."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(parallel.losses, alone.losses, strict=True))
    gradients, state = difference(parallel.gradients, alone.gradients), difference(parallel.state, alone.state)
    return (
        f"final loss {parallel.losses[-1]:.4f} on 4 ranks, {alone.losses[-1]:.4f} on 1 process; largest relative "
        f"difference: loss {loss:.1e}, gradients of the first step {gradients:.1e}, parameters and buffers after the "
        f"last {state:.1e}; steps per second: {parallel.steps_per_second:.2f} on 4 ranks, "
        f"{alone.steps_per_second:.2f} on 1 process"
    )
