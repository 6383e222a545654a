"""Redistribution: one step of a route as local reshapes, permutes and one collective along dim 0."""

import math
from dataclasses import dataclass
from typing import Any

from autopar.cost.redistribute import RouteStep
from autopar.ir.graph import CONTIGUOUS, PERMUTE, RESHAPE, WAIT, Ref, TensorMeta
from autopar.ir.layout import Shape, Split, local_shape, local_stride
from autopar.ir.program import RankIndex

from .emitter import Emitter


@dataclass(frozen=True, kw_only=True)
class Redistribution:
    """Writes routes of one root in one half of the program. `meta` is that of the global root."""

    emitter: Emitter
    mesh: Shape
    root: str
    meta: TensorMeta
    phase: int

    def write(self, local: str, step: RouteStep) -> str:
        """One step of a route: the local value after it."""
        after, axis = step.after[step.axis], step.axis
        if isinstance(after, Split):
            before = step.before[axis]
            ways = 1 if isinstance(before, Split) and before.dim == after.dim else self.mesh[axis]
            local = self._resize(local, after.dim, ways * self._taken(step)[after.dim])
        return _STEPS[step.kind](self, local, step)

    def _taken(self, step: RouteStep) -> Shape:
        return local_shape(self.meta.shape, step.after, self.mesh)

    def all_reduce(self, local: str, step: RouteStep) -> str:
        reduction = step.before[step.axis].reduction  # type: ignore[union-attr]
        return self._communicate("all_reduce", local, reduction, axis=step.axis, shape=self._shape(local))

    def slice(self, local: str, step: RouteStep) -> str:
        after, n, shape = step.after[step.axis], self.mesh[step.axis], self._shape(local)
        assert isinstance(after, Split)
        stride = local_stride(step.after, self.mesh, step.axis)
        above = shape[after.dim] // (n * stride)
        cut = self._reshape(local, (*shape[: after.dim], above, n, stride, *shape[after.dim + 1 :]))
        part_shape = (*shape[: after.dim], above, stride, *shape[after.dim + 1 :])
        part = self._emit("aten.select.int", (Ref(cut), after.dim + 1, RankIndex(((step.axis, 1),))), part_shape)
        if math.prod(part_shape[: after.dim + 1]) > 1:
            part = self._compact(part)
        return self._reshape(part, (*shape[: after.dim], above * stride, *shape[after.dim + 1 :]))

    def all_gather(self, local: str, step: RouteStep) -> str:
        before, n, shape = step.before[step.axis], self.mesh[step.axis], self._shape(local)
        assert isinstance(before, Split)
        gathered = self._communicate("all_gather", local, axis=step.axis, shape=(n * shape[0], *shape[1:]))
        stacked = self._reshape(gathered, (n, *shape))
        together = self._insert(stacked, before.dim, local_stride(step.before, self.mesh, step.axis))
        return self._resize(together, before.dim, self._taken(step)[before.dim])

    def reduce_scatter(self, local: str, step: RouteStep) -> str:
        before, after, axis = step.before[step.axis], step.after[step.axis], step.axis
        assert isinstance(after, Split)
        front = self._expose(local, after.dim, local_stride(step.after, self.mesh, axis), self.mesh[axis])
        result = self._shape(front)[1:]
        reduction = before.reduction  # type: ignore[union-attr]
        return self._communicate("reduce_scatter", self._flat(front), reduction, axis=axis, shape=result)

    def all_to_all(self, local: str, step: RouteStep) -> str:
        before, after, n = step.before[step.axis], step.after[step.axis], self.mesh[step.axis]
        assert isinstance(before, Split) and isinstance(after, Split)
        stride = local_stride(step.after, self.mesh, step.axis)
        if after.dim == before.dim and before.period <= after.period // n:
            stride //= n  # the digit that is given up still lies below
        front = self._expose(local, after.dim, stride, n)
        flat = self._flat(front)
        exchanged = self._communicate("all_to_all", flat, axis=step.axis, shape=self._shape(flat))
        stacked = self._reshape(exchanged, self._shape(front))
        given = local_stride(step.before, self.mesh, step.axis)
        if after.dim == before.dim and after.period <= before.period // n:
            given //= n  # the digit that was taken has left from below
        return self._resize(self._insert(stacked, before.dim, given), before.dim, self._taken(step)[before.dim])

    # --- the parts of steps

    def _shape(self, value: str) -> Shape:
        return self.emitter.metas[value].shape

    def _flat(self, front: str) -> str:
        """The leading dim, which the ranks share, joined with the next."""
        shape = self._shape(front)
        return self._reshape(front, (shape[0] * shape[1], *shape[2:]))

    def _emit(self, op: str, args: tuple[Any, ...], shape: Shape) -> str:
        return self.emitter.emit(
            self.phase, op, args, self.emitter.fresh(self.root), TensorMeta(shape, self.meta.dtype)
        )

    def _reshape(self, value: str, shape: Shape) -> str:
        return value if self._shape(value) == shape else self._emit(RESHAPE, (Ref(value), shape), shape)

    def _compact(self, value: str) -> str:
        """Collectives, and kernels such as CPU layer norm's backward, read operands as if they were contiguous."""
        return self._emit(CONTIGUOUS, (Ref(value),), self._shape(value))

    def _move(self, value: str, source: int, target: int) -> str:
        """Move one dim to another place."""
        old = self._shape(value)
        order = [d for d in range(len(old)) if d != source]
        order.insert(target, source)
        if order == list(range(len(old))):
            return value
        return self._emit(PERMUTE, (Ref(value), tuple(order)), tuple(old[d] for d in order))

    def _communicate(self, kind: str, value: str, *args: Any, axis: int, shape: Shape) -> str:
        flat = self._compact(value)
        started = self._emit(f"collective.{kind}", (Ref(flat), *args, axis), shape)
        return self._emit(WAIT, (Ref(started),), shape)

    def _expose(self, value: str, dim: int, stride: int, ways: int) -> str:
        """Cut a dim as [above, ways, stride] and bring `ways` to the front."""
        old = self._shape(value)
        above = old[dim] // (ways * stride)
        if dim == 0 and above == 1:
            return self._reshape(value, (ways, stride, *old[1:]))
        cut = self._reshape(value, (*old[:dim], above, ways, stride, *old[dim + 1 :]))
        front = self._move(cut, dim + 1, 0)
        return self._reshape(front, (ways, *old[:dim], above * stride, *old[dim + 1 :]))

    def _insert(self, value: str, dim: int, stride: int) -> str:
        """The inverse: the leading dim goes between [above] and [stride] of a dim."""
        ways, *old = self._shape(value)
        above = old[dim] // stride
        if dim == 0 and above == 1:
            return self._reshape(value, (ways * stride, *old[1:]))
        cut = self._reshape(value, (ways, *old[:dim], above, stride, *old[dim + 1 :]))
        back = self._move(cut, 0, dim + 1)
        return self._compact(self._reshape(back, (*old[:dim], above * ways * stride, *old[dim + 1 :])))

    def _resize(self, value: str, dim: int, size: int) -> str:
        """Add padding behind a dim, or drop it."""
        old = self._shape(value)
        new = (*old[:dim], size, *old[dim + 1 :])
        if old[dim] < size:
            behind = (0, 0) * (len(old) - 1 - dim) + (0, size - old[dim])
            return self._emit("aten.constant_pad_nd.default", (Ref(value), behind, 0), new)
        if old[dim] == size:
            return value
        part = self._emit("aten.slice.Tensor", (Ref(value), dim, 0, size), new)
        return part if math.prod(new[:dim]) == 1 else self._compact(part)


_STEPS = {
    "all_reduce": Redistribution.all_reduce,
    "slice": Redistribution.slice,
    "all_gather": Redistribution.all_gather,
    "reduce_scatter": Redistribution.reduce_scatter,
    "all_to_all": Redistribution.all_to_all,
}
"""Kind of a step -> what writes it."""
