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
from autopar.ir.layout import Layout, Shape
from autopar.runtime.boxes import Box, boxes
from autopar.runtime.pieces import MeshRanks, Piece, pieces
from autopar.runtime.sharded_optimizers import OPTIMIZERS, like, local_gradient, loss_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """One matrix in a step."""

    shape: Shape
    layout: Layout
    owner: int
    stage: int | None = None
    """That of a pipeline whose ranks hold the matrix, as a coordinate on the first axis; None: all ranks hold it."""

    @property
    def whole(self) -> Box:
        origin = (0,) * len(self.shape)
        return Box(offsets=origin, sizes=self.shape, local=origin)

    def boxes(self, ranks: MeshRanks) -> list[tuple[Box, ...]]:
        """What each rank holds."""
        mesh = tuple(ranks.mesh.shape)
        return [
            () if self.stage not in (None, at[0]) else boxes(self.shape, self.layout, mesh, at)
            for at in ranks.coordinates
        ]


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
        self._jobs: dict[tuple[int, ...], tuple[tuple[Job, ...], list[Piece], list[Piece]]] = {}

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
            jobs = jobs_of(shapes, layouts, ranks, stages)
            self._jobs[key] = (jobs, *self._moves(jobs))
        updates = [self._update(p, group) for p, group in asked]
        groups = [group for _, group in asked]
        for (p, group), update in zip(asked, self._orthogonal(*self._jobs[key], updates, groups), strict=True):
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

    def _moves(self, jobs: Sequence[Job]) -> tuple[list[Piece], list[Piece]]:
        """Of matrices to their owners, and back."""
        held = {number: job.boxes(self._ranks) for number, job in enumerate(jobs)}
        everyone = range(len(self._ranks.everyone))
        owned = {n: [(job.whole,) if rank == job.owner else () for rank in everyone] for n, job in enumerate(jobs)}
        there = [(job.owner, number, number, job.whole) for number, job in enumerate(jobs)]
        back = [(rank, n, n, box) for n, of_ranks in held.items() for rank in everyone for box in of_ranks[rank]]
        return pieces(there, held), pieces(back, owned)

    def _orthogonal(
        self,
        jobs: Sequence[Job],
        there: Sequence[Piece],
        back: Sequence[Piece],
        updates: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
    ) -> list[torch.Tensor]:
        """This rank's part of each orthogonalised matrix."""
        ranks, dtype, what = self._ranks, torch.bfloat16, "the exchange of Muon's matrices,"
        device = ranks.mesh.device_type
        whole = {
            n: torch.empty(job.shape, dtype=dtype, device=device)
            for n, job in enumerate(jobs)
            if job.owner == ranks.own
        }
        ranks.move(there, dict(enumerate(updates)), whole, dtype, what)
        for number, matrix in whole.items():
            whole[number] = orthogonalized(matrix, groups[number])
        parts = [torch.empty_like(update) for update in updates]
        ranks.move(back, whole, dict(enumerate(parts)), dtype, what)
        return parts


OPTIMIZERS.know(Plug("Muon", Muon))
