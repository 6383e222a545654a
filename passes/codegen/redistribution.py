"""Redistribution: one step of a route as local reshapes, permutes and one collective along dim 0."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost.redistribute import RouteStep
from autopar.ir.graph import CONTIGUOUS, PERMUTE, RESHAPE, WAIT, Ref, TensorMeta
from autopar.ir.layout import Shape, Split, local_shape, local_stride
from autopar.ir.program import RankIndex
from autopar.ops.aten import PAD, SELECT, SLICE


@dataclass(frozen=True, kw_only=True)
class Redistribution:
    """Writes routes of one root, whose global shape is `whole`, in one half of the program. `emit` appends an
    instruction, by its op and arguments, and says what its result is called; `metas` are those of local values."""

    emit: Callable[..., str]
    metas: Mapping[str, TensorMeta]
    mesh: Shape
    whole: Shape

    def write(self, local: str, step: RouteStep) -> str:
        """One step of a route: the local value after it."""
        after, axis = step.after[step.axis], step.axis
        if isinstance(after, Split):
            before = step.before[axis]
            ways = 1 if isinstance(before, Split) and before.dim == after.dim else self.mesh[axis]
            local = self._resize(local, after.dim, ways * self._taken(step)[after.dim])
        return _STEPS[step.kind](self, local, step)

    def _taken(self, step: RouteStep) -> Shape:
        return local_shape(self.whole, step.after, self.mesh)

    def all_reduce(self, local: str, step: RouteStep) -> str:
        reduction = step.before[step.axis].reduction  # type: ignore[union-attr]
        return self._communicate("all_reduce", local, reduction, step.axis)

    def slice(self, local: str, step: RouteStep) -> str:
        after, n, shape = step.after[step.axis], self.mesh[step.axis], self._shape(local)
        assert isinstance(after, Split)
        stride = local_stride(step.after, self.mesh, step.axis)
        above = shape[after.dim] // (n * stride)
        cut = self._reshape(local, (*shape[: after.dim], above, n, stride, *shape[after.dim + 1 :]))
        part = self.emit(SELECT, Ref(cut), after.dim + 1, RankIndex(((step.axis, 1),)))
        if math.prod(self._shape(part)[: after.dim + 1]) > 1:
            part = self._compact(part)
        return self._reshape(part, (*shape[: after.dim], above * stride, *shape[after.dim + 1 :]))

    def all_gather(self, local: str, step: RouteStep) -> str:
        before, n, shape = step.before[step.axis], self.mesh[step.axis], self._shape(local)
        assert isinstance(before, Split)
        gathered = self._communicate("all_gather", local, step.axis)
        stacked = self._reshape(gathered, (n, *shape))
        together = self._insert(stacked, before.dim, local_stride(step.before, self.mesh, step.axis))
        return self._resize(together, before.dim, self._taken(step)[before.dim])

    def reduce_scatter(self, local: str, step: RouteStep) -> str:
        before, after, axis = step.before[step.axis], step.after[step.axis], step.axis
        assert isinstance(after, Split)
        front = self._expose(local, after.dim, local_stride(step.after, self.mesh, axis), self.mesh[axis])
        reduction = before.reduction  # type: ignore[union-attr]
        return self._communicate("reduce_scatter", self._flat(front), reduction, axis)

    def all_to_all(self, local: str, step: RouteStep) -> str:
        before, after, n = step.before[step.axis], step.after[step.axis], self.mesh[step.axis]
        assert isinstance(before, Split) and isinstance(after, Split)
        stride = local_stride(step.after, self.mesh, step.axis)
        if after.dim == before.dim and before.period <= after.period // n:
            stride //= n  # the digit that is given up still lies below
        front = self._expose(local, after.dim, stride, n)
        exchanged = self._communicate("all_to_all", self._flat(front), step.axis)
        stacked = self._reshape(exchanged, self._shape(front))
        given = local_stride(step.before, self.mesh, step.axis)
        if after.dim == before.dim and after.period <= before.period // n:
            given //= n  # the digit that was taken has left from below
        return self._resize(self._insert(stacked, before.dim, given), before.dim, self._taken(step)[before.dim])

    # --- the parts of steps

    def _shape(self, value: str) -> Shape:
        return self.metas[value].shape

    def _flat(self, front: str) -> str:
        """The leading dim, which the ranks share, joined with the next."""
        shape = self._shape(front)
        return self._reshape(front, (shape[0] * shape[1], *shape[2:]))

    def _reshape(self, value: str, shape: Shape) -> str:
        return value if self._shape(value) == shape else self.emit(RESHAPE, Ref(value), shape)

    def _compact(self, value: str) -> str:
        """Collectives, and kernels such as CPU layer norm's backward, read operands as if they were contiguous."""
        return self.emit(CONTIGUOUS, Ref(value))

    def _move(self, value: str, source: int, target: int) -> str:
        """Move one dim to another place."""
        order = [d for d in range(len(self._shape(value))) if d != source]
        order.insert(target, source)
        return value if source == target else self.emit(PERMUTE, Ref(value), tuple(order))

    def _communicate(self, kind: str, value: str, *args: Any) -> str:
        return self.emit(WAIT, Ref(self.emit(f"collective.{kind}", Ref(self._compact(value)), *args)))

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
        if old[dim] < size:
            behind = (0, 0) * (len(old) - 1 - dim) + (0, size - old[dim])
            return self.emit(PAD, Ref(value), behind, 0)
        if old[dim] == size:
            return value
        part = self.emit(SLICE, Ref(value), dim, 0, size)
        return part if math.prod(old[:dim]) == 1 else self._compact(part)


_STEPS = {
    "all_reduce": Redistribution.all_reduce,
    "slice": Redistribution.slice,
    "all_gather": Redistribution.all_gather,
    "reduce_scatter": Redistribution.reduce_scatter,
    "all_to_all": Redistribution.all_to_all,
}
"""Kind of a step -> what writes it."""
