"""Muon on split matrices: each matrix is orthogonalised by one rank, which gets its update and gives the result back.

The iteration needs all of a matrix. Owners are spread by the work that their matrices are, and everything travels in
two exchanges a step, in bfloat16, in which the iteration computes anyway. Momentum stays where parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.compat.distributed import StageMesh, local_tensor
from autopar.compat.optimizing import muon_rate, orthogonalized
from autopar.extensions import Plug
from autopar.ir.layout import Layout, Shape, Split, valid_shape
from autopar.runtime.boxes import boxes
from autopar.runtime.messages import MeshRanks
from autopar.runtime.sharded_optimizers import OPTIMIZERS, like, local_gradient, loss_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """One matrix in a step."""

    shape: Shape
    layout: Layout
    owner: int
    stage: int | None = None
    """That of a pipeline whose ranks hold the matrix, as a coordinate on the first axis; None: all ranks hold it."""

    def held(self, ranks: MeshRanks, rank: int) -> Shape:
        if self.stage not in (None, ranks.coordinates[rank][0]):
            return (0,)
        return valid_shape(self.shape, self.layout, tuple(ranks.mesh.shape), ranks.coordinates[rank])

    def gives(self, ranks: MeshRanks, rank: int) -> bool:
        """Whether the owner gets its part from this rank: those that hold what it holds along axes that do not split
        the matrix."""
        own, other = ranks.coordinates[self.owner], ranks.coordinates[rank]
        if self.stage is not None:
            own = (self.stage, *own[1:])
        pairs = zip(self.layout, own, other, strict=True)
        return all(isinstance(placement, Split) or a == b for placement, a, b in pairs)

    def joined(self, ranks: MeshRanks, part: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """The matrix, from `part(rank, elements)` of each rank that gives one."""
        whole = torch.empty(self.shape, dtype=torch.bfloat16, device=ranks.mesh.device_type)
        for rank, coordinate in enumerate(ranks.coordinates):
            if self.gives(ranks, rank):
                held = self.held(ranks, rank)
                local = part(rank, torch.Size(held).numel()).view(held)
                for box in boxes(self.shape, self.layout, tuple(ranks.mesh.shape), coordinate):
                    box.within(whole).copy_(box.of(local))
        return whole

    def part(self, whole: torch.Tensor, ranks: MeshRanks, rank: int) -> torch.Tensor:
        """What a rank holds of the matrix."""
        local = torch.empty(self.held(ranks, rank), dtype=whole.dtype, device=whole.device)
        if self.stage not in (None, ranks.coordinates[rank][0]):
            return local
        for box in boxes(self.shape, self.layout, tuple(ranks.mesh.shape), ranks.coordinates[rank]):
            box.of(local).copy_(box.within(whole))
        return local


def jobs_of(
    shapes: Sequence[Shape], layouts: Sequence[Layout], ranks: int, stages: Sequence[int | None] | None = None
) -> tuple[Job, ...]:
    """Owners of matrices: the heaviest first, each to the rank with the least work, which is that of a product of the
    matrix with itself, and with that."""
    work = [2 * min(s) ** 2 * max(s) + min(s) ** 3 for s in shapes]
    loads, owners = [0] * ranks, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda n: -work[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += work[number]
    each = zip(shapes, layouts, owners, stages or [None] * len(shapes), strict=True)
    return tuple(Job(shape=s, layout=at, owner=o, stage=stage) for s, at, o, stage in each)


class Muon(torch.optim.Muon):
    """torch's, with the same options, on parameters of a parallel module. `layouts` are those of the parameters."""

    def __init__(self, params: Any, *, layouts: Mapping[DTensor, Layout], mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(params, **options)
        self._layouts, self._ranks = layouts, MeshRanks(mesh)
        self._jobs: dict[tuple[int, ...], tuple[Job, ...]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        asked = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        key = tuple(id(p) for p, _ in asked)
        if key not in self._jobs:
            layouts = [self._layouts[p] for p, _ in asked]
            meshes = [p.device_mesh for p, _ in asked]
            stages = [mesh.number if isinstance(mesh, StageMesh) else None for mesh in meshes]
            shapes, ranks = [tuple(p.shape) for p, _ in asked], len(self._ranks.coordinates)
            self._jobs[key] = jobs_of(shapes, layouts, ranks, stages)
        updates = [self._update(p, group) for p, group in asked]
        groups = [group for _, group in asked]
        for (p, group), update in zip(asked, self._orthogonal(self._jobs[key], updates, groups), strict=True):
            local, rate = local_tensor(p), float(group["lr"])
            local.mul_(1 - rate * group["weight_decay"])
            local.add_(update, alpha=-muon_rate(rate, group["adjust_lr_fn"], p.shape))
        torch.autograd.graph.increment_version([p for p, _ in asked])  # of which DTensors do not learn
        return loss

    def _update(self, parameter: DTensor, group: Mapping[str, Any]) -> torch.Tensor:
        """This rank's part of the momentum, element by element."""
        gradient, state = local_gradient(parameter, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = like(parameter, torch.zeros_like(gradient))
        buffer = local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer).bfloat16()

    def _orthogonal(
        self, jobs: Sequence[Job], updates: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> list[torch.Tensor]:
        """This rank's part of each orthogonalised matrix."""
        ranks, own = self._ranks, self._ranks.own
        everyone = range(len(ranks.coordinates))
        mine = [number for number, job in enumerate(jobs) if job.owner == own]
        given: list[list[torch.Tensor]] = [[] for _ in everyone]
        for job, update in zip(jobs, updates, strict=True):
            if job.gives(ranks, own):
                given[job.owner].append(update)
        sizes = [sum(_size(jobs[n].held(ranks, r)) for n in mine if jobs[n].gives(ranks, r)) for r in everyone]
        take = _taking(_exchanged(ranks, given, sizes))
        back: list[list[torch.Tensor]] = [[] for _ in everyone]
        for number in mine:
            whole = orthogonalized(jobs[number].joined(ranks, take), groups[number])
            for rank in everyone:
                back[rank].append(jobs[number].part(whole, ranks, rank))
        sizes = [sum(_size(job.held(ranks, own)) for job in jobs if job.owner == r) for r in everyone]
        take = _taking(_exchanged(ranks, back, sizes))
        return [take(job.owner, _size(job.held(ranks, own))).view(job.held(ranks, own)) for job in jobs]


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _exchanged(
    ranks: MeshRanks, given: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]
) -> Sequence[torch.Tensor]:
    """Give each rank its tensors of bfloat16, and get one of as many elements from each."""
    flat = [tensor.reshape(-1) for tensors in given for tensor in tensors]
    sent = torch.cat([*flat, torch.empty(0, dtype=torch.bfloat16, device=ranks.mesh.device_type)])
    put = [sum(map(torch.Tensor.numel, tensors)) for tensors in given]
    return torch.split(ranks.exchange(sent, put, sizes, "the exchange of Muon's matrices,"), list(sizes))


def _taking(got: Sequence[torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
    """What takes the next elements of what came from a rank."""
    at = [0] * len(got)

    def take(rank: int, elements: int) -> torch.Tensor:
        at[rank] += elements
        return got[rank][at[rank] - elements : at[rank]]

    return take


OPTIMIZERS.know(Plug("Muon", Muon))
