"""Copies: the local operators around a collective that read and write memory.

A collective works along the first dim of what a rank holds. So `codegen.redistribution` cuts dims, brings parts to the
front, and pads or drops padding. Where dims of size 1 alone lie before the part, that is a view, and costs nothing. But
a slice is priced as a copy in any case: its view keeps the whole tensor alive.
"""

import math
from typing import NamedTuple

from autopar.ir.layout import Layout, Placement, Shape, Split, local_shape, local_stride


class CopyWork(NamedTuple):
    """So many operators, which read and write so many bytes; those that only view take a launch, too."""

    bytes: int
    operators: int

    def and_more(self, elements: int, operators: int = 1) -> "CopyWork":
        """With operators that read and write so many elements."""
        return CopyWork(self.bytes + elements, self.operators + operators)


NONE = CopyWork(0, 0)


def copies(kind: str, axis: int, shape: Shape, itemsize: int, before: Layout, after: Layout, mesh: Shape) -> CopyWork:
    """Of a step of that kind on a mesh axis between two layouts of a tensor of `shape`: what a rank copies beside the
    collective."""
    n, here, there = mesh[axis], before[axis], after[axis]
    local, taken = local_shape(shape, before, mesh), local_shape(shape, after, mesh)
    copied = NONE
    if isinstance(there, Split):  # cut into parts for all ranks
        ways = 1 if isinstance(here, Split) and here.dim == there.dim else n
        local, resized = _resized(local, there.dim, ways * taken[there.dim])
        copied = copied.and_more(*resized)
        stride = _stride(after, mesh, axis, here)
        above = local[there.dim] // (n * stride)
        if kind == "slice":  # only the part that is kept is read
            lies_apart = _lies_apart(local, there.dim, above)
            copied = copied.and_more(2 * math.prod(local) // n, operators=2 if lies_apart else 1)
        elif _lies_apart(local, there.dim, above):
            copied = copied.and_more(2 * math.prod(local))
        local = (*local[: there.dim], above * stride, *local[there.dim + 1 :])
    if isinstance(here, Split):  # put together from parts of all ranks
        above = local[here.dim] // _stride(before, mesh, axis, there)
        together = (*local[: here.dim], n * local[here.dim], *local[here.dim + 1 :])
        if _lies_apart(local, here.dim, above):
            copied = copied.and_more(2 * math.prod(together))
        copied = copied.and_more(*_resized(together, here.dim, taken[here.dim])[1])
    return copied._replace(bytes=copied.bytes * itemsize)


def _stride(layout: Layout, mesh: Shape, axis: int, other: Placement) -> int:
    """Consecutive indices of a part: without the digit of the `other` placement of the axis, if it lies below."""
    split, ranks, stride = layout[axis], mesh[axis], local_stride(layout, mesh, axis)
    assert isinstance(split, Split)
    is_below = isinstance(other, Split) and other.dim == split.dim and other.period <= split.period // ranks
    return stride // ranks if is_below else stride


def _lies_apart(shape: Shape, dim: int, above: int) -> bool:
    """Whether a rank's part of a dim, of which `above` are before each other, is not in one piece."""
    return math.prod(shape[:dim]) * above > 1


def _resized(shape: Shape, dim: int, size: int) -> tuple[Shape, CopyWork]:
    """The shape with another size of a dim, and the elements that padding, or dropping it, reads and writes."""
    after = (*shape[:dim], size, *shape[dim + 1 :])
    if shape[dim] == size:
        return after, NONE
    if shape[dim] < size:
        return after, CopyWork(math.prod(shape) + math.prod(after), 1)
    is_view = math.prod(after[:dim]) == 1
    return after, CopyWork(0, 1) if is_view else CopyWork(2 * math.prod(after), 2)
