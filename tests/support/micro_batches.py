"""A small model that is trained in micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import whole
from plans import count_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.program import Program
from autopar.passes.lower.accumulate import Part
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space
from autopar.planning.account import account
from autopar.planning.micro import parts_of
from autopar.planning.request import Gathers
from autopar.runtime.module import ParallelModule

COUNT = 4
"""Micro-batches of a step."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.25), nn.Linear(64, 32))
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return F.cross_entropy(self.head(self.norm(h + self.body(h))).flatten(0, 1), ids.roll(1, 1).flatten())


def issued_by(parts: Sequence[Part]) -> Counter[tuple[str, str, int]]:
    """(kind, axis, bytes) of what a step issues -> how often."""
    issued: Counter[tuple[str, str, int]] = Counter()
    for part in parts:
        for one, count in Counter(part.program.collectives()).items():
            issued[one] += part.times * count
    return issued


def assert_promised(
    space: Space, assignment: Assignment, program: Program, micro_batches: int, gathers: Gathers
) -> None:
    """The account of an assignment has the collectives that its program issues in a step: kinds, axes, counts and
    bytes."""
    promised = {(c.kind, c.axis): (c.count, c.bytes) for c in account(space, assignment).collectives}
    issued = issued_by(parts_of(program, micro_batches, holds=gathers == "once"))
    assert promised == count_collectives([*issued.elements()])


def ids(step: int) -> torch.Tensor:
    return torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(step))


def parallel(solver: str = "ddp", **options: Any) -> ParallelModule:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    return autopar.parallelize(Net(), mesh, (ids(0),), solver=solver, **options)


def trained(module: nn.Module, wait: Callable[[], Any], steps: int = 2) -> list[torch.Tensor]:
    """Clipped norms and losses of some steps, and the parameters after them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    seen = []
    torch.manual_seed(7)
    for step in range(steps):
        for micro in range(COUNT):
            with wait() if micro < COUNT - 1 else nullcontext():
                loss = module(ids(COUNT * step + micro)) / COUNT
                loss.backward()
            seen.append(whole(loss).detach())
        seen.append(whole(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(whole(p).detach() for p in module.parameters())]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that this rank gives to collectives, by kind."""
    sent = Counter[str]()
    kinds = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
    kinds += tuple(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name))
    before = {name: getattr(dist, name) for name in kinds}

    def counting(name: str) -> Callable[..., Any]:
        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[name] += x.nbytes
            return before[name](x, *args, **kwargs)

        return call

    for name in kinds:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
