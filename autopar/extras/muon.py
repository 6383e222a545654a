"""Muon on split matrices: each matrix is orthogonalised by one rank, which gets its update and gives the result back.

The iteration needs all of a matrix. Owners are spread by the work that their matrices are, and everything travels in
two exchanges a step, in bfloat16, in which the iteration computes anyway. Momentum stays where parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.compat.distributed import StageMesh, local_tensor
from autopar.compat.optimizing import muon_rate, orthogonalized
from autopar.extensions import Plug
from autopar.ir.layout import Layout, Shape
from autopar.runtime.boxes import boxes
from autopar.runtime.pieces import MeshRanks, Piece, pieces
from autopar.runtime.sharded_optimizers import OPTIMIZERS, like, local_gradient, loss_of


def owners_of(shapes: Sequence[Shape], ranks: int) -> list[int]:
    """The heaviest matrix first, each to the rank with the least work, which is that of a product of the matrix with
    itself, and with that."""
    work = [2 * min(s) ** 2 * max(s) + min(s) ** 3 for s in shapes]
    loads, owners = [0] * ranks, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda n: -work[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += work[number]
    return owners


class Muon(torch.optim.Muon):
    """torch's, with the same options, on parameters of a parallel module. `layouts` are those of the parameters."""

    def __init__(self, params: Any, *, layouts: Mapping[DTensor, Layout], mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(params, **options)
        self._layouts, self._ranks = layouts, MeshRanks(mesh)
        self._moves: dict[tuple[int, ...], tuple[list[Piece], list[Piece]]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        asked = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        key = tuple(id(p) for p, _ in asked)
        if key not in self._moves:
            self._moves[key] = self._moves_of([p for p, _ in asked])
        for (p, group), update in zip(asked, self._orthogonal(*self._moves[key], asked), strict=True):
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

    def _moves_of(self, matrices: Sequence[DTensor]) -> tuple[list[Piece], list[Piece]]:
        """Of matrices, by number, to their owners, and back."""
        ranks, there, back = self._ranks, [], []
        held, owned = dict[int, Any](), dict[int, Any]()
        shapes, sizes = [tuple(p.shape) for p in matrices], tuple(ranks.mesh.shape)
        owners = owners_of(shapes, len(ranks.everyone))
        for number, (p, shape, owner) in enumerate(zip(matrices, shapes, owners, strict=True)):
            mesh = p.device_mesh
            stages = (mesh.number,) if isinstance(mesh, StageMesh) else range(sizes[0])
            held[number] = [
                boxes(shape, self._layouts[p], sizes, at) if at[0] in stages else () for at in ranks.coordinates
            ]
            whole = boxes(shape, (), (), ())
            owned[number] = [whole if rank == owner else () for rank, _ in enumerate(held[number])]
            there += [(owner, number, number, box) for box in whole]
            back += [(rank, number, number, box) for rank, parts in enumerate(held[number]) for box in parts]
        return pieces(there, held), pieces(back, owned)

    def _orthogonal(
        self, there: Sequence[Piece], back: Sequence[Piece], asked: Sequence[tuple[DTensor, Mapping[str, Any]]]
    ) -> list[torch.Tensor]:
        """This rank's part of each orthogonalised matrix."""
        updates = [self._update(p, group) for p, group in asked]
        own = {piece.target for piece in there if piece.home == self._ranks.own}
        whole = {n: updates[n].new_empty(asked[n][0].shape) for n in own}
        self._ranks.move(there, dict(enumerate(updates)), whole, torch.bfloat16)
        for number, matrix in whole.items():
            whole[number] = orthogonalized(matrix, asked[number][1])
        parts = [torch.empty_like(update) for update in updates]
        self._ranks.move(back, whole, dict(enumerate(parts)), torch.bfloat16)
        return parts


OPTIMIZERS.know(Plug("Muon", Muon))
