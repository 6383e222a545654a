"""Windows that slide along a split dim: the exchange of edges.

A window of stride s reads a *fine* tensor and produces a *coarse* one. Where the fine dim is s times as long as the
coarse one, coarse row i belongs to the fine rows [s i, s (i + 1)). It touches, with padding p, dilation d and a kernel
of k, the rows [s i - p, s i - p + d (k - 1)], so that a shard of the coarse rows needs p fine rows before its own and
d (k - 1) - p - s + 1 after them: its halo, which the neighbours have.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref

from .expansions import LocalCall
from .rule import Call


@dataclass(frozen=True, slots=True)
class HaloWindow:
    """A window along one spatial dim. `before` and `after` are the rows of the halo."""

    stride: int
    padding: int
    reach: int
    """dilation * (kernel - 1): rows between the first and the last one that a coarse row touches."""

    @property
    def before(self) -> int:
        return self.padding

    @property
    def after(self) -> int:
        return max(0, self.excess)

    @property
    def excess(self) -> int:
        """Rows touched beyond the shard's own; negative if the last of its own are not touched."""
        return self.reach - self.padding - self.stride + 1

    @property
    def coarse_rows(self) -> int:
        """Coarse rows that a shard must have for the neighbours to hold its halo."""
        return max(1, -(-max(self.before, self.after) // self.stride))


Halos = Mapping[int, tuple[HaloWindow, tuple[int, ...]]]
"""Spatial dim -> its windows, and the mesh axes that split it."""


def each(call: Call, name: str, spatial: int) -> tuple[int, ...]:
    """An argument, one number a spatial dim."""
    values = call.argument(name)
    values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    return values * spatial if len(values) == 1 else values


def halos_of(local: LocalCall, windows: Iterable[HaloWindow]) -> Halos:
    """The halos of the spatial dims that are split and have any."""
    split = {i: window for i, window in enumerate(windows) if f"s{i}" in local.splits}
    return {i: (w, local.splits[f"s{i}"]) for i, w in split.items() if w.before or w.after}


def neighbour(emitter: Emitter, value: Ref, axes: tuple[int, ...], step: int) -> Ref:
    """The value of the shard before this one (`step` 1) or after it (-1), of a dim split by `axes` (outermost first);
    zeros at the ends."""
    *outer, inner = axes
    received = emitter.shift(value, step, inner)
    if outer:
        # at the end of an inner run the neighbour is at the other end of the next one
        wrapped = emitter.shift(value, -step * (emitter.ranks(inner) - 1), inner)
        received = emitter.op("aten.add.Tensor", received, neighbour(emitter, wrapped, tuple(outer), step))
    return received


def slice_of(emitter: Emitter, value: Ref, dim: int, start: int, end: int) -> Ref:
    """Rows [start, end)."""
    if (start, end) == (0, emitter.meta(value).shape[dim]):
        return value
    return emitter.op("aten.slice.Tensor", value, dim, start, end)


def _sent(emitter: Emitter, value: Ref, dim: int, start: int, end: int) -> Ref:
    """Rows to send."""
    return emitter.op("aten.contiguous.default", slice_of(emitter, value, dim, start, end))


def at_end(emitter: Emitter, rows: int, axes: tuple[int, ...], step: int) -> Ref:
    """bool [1]: whether there is no shard before this one of `rows` (`step` 1), or none after it (-1)."""
    last = (math.prod(map(emitter.ranks, axes)) - 1) * rows
    first_row = emitter.op("aten.add.Tensor", emitter.op("aten.arange.default", 1), emitter.offset(axes, rows))
    return emitter.op("aten.eq.Scalar", first_row, 0 if step == 1 else last)


def with_halo(
    emitter: Emitter, value: Ref, dim: int, window: HaloWindow, axes: tuple[int, ...], beyond: float | None = 0.0
) -> Ref:
    """A shard of fine rows with the neighbours' rows around it. Beyond the ends stands `beyond`, or, if that is None,
    the outermost row repeated."""
    rows, parts = emitter.meta(value).shape[dim], [value]

    def ended(halo: Ref, step: int) -> Ref:
        if beyond == 0:
            return halo
        end = at_end(emitter, rows, axes, step)
        if beyond is not None:
            return emitter.op("aten.masked_fill.Scalar", halo, end, beyond)
        outermost = slice_of(emitter, value, dim, 0, 1) if step == 1 else slice_of(emitter, value, dim, rows - 1, rows)
        return emitter.op("aten.where.self", end, outermost, halo)

    if window.before:
        edge = _sent(emitter, value, dim, rows - window.before, rows)
        parts.insert(0, ended(neighbour(emitter, edge, axes, 1), 1))
    if window.after:
        edge = _sent(emitter, value, dim, 0, window.after)
        parts.append(ended(neighbour(emitter, edge, axes, -1), -1))
    return emitter.op("aten.cat.default", tuple(parts), dim)


def halo_added(emitter: Emitter, value: Ref, dim: int, window: HaloWindow, axes: tuple[int, ...]) -> Ref:
    """The transpose of `with_halo`: a shard's rows plus those of the neighbours' halos."""
    before, after = window.before, window.after
    end = emitter.meta(value).shape[dim] - after
    rows = end - before
    from_after = from_before = None
    if before:
        from_after = neighbour(emitter, _sent(emitter, value, dim, 0, before), axes, -1)
    if after:
        from_before = neighbour(emitter, _sent(emitter, value, dim, end, end + after), axes, 1)
    parts = []
    for start, stop in itertools.pairwise(sorted({0, after, rows - before, rows})):
        part = slice_of(emitter, value, dim, before + start, before + stop)
        if from_before is not None and stop <= after:
            part = emitter.op("aten.add.Tensor", part, slice_of(emitter, from_before, dim, start, stop))
        if from_after is not None and start >= rows - before:
            first = rows - before
            part = emitter.op("aten.add.Tensor", part, slice_of(emitter, from_after, dim, start - first, stop - first))
        parts.append(part)
    return emitter.op("aten.cat.default", tuple(parts), dim)


def with_halos(emitter: Emitter, value: Ref, spatial: int, halos: Halos, beyond: float = 0.0) -> Ref:
    """A shard with its halos along some of its last `spatial` dims, and `beyond` beyond the ends."""
    first = len(emitter.meta(value).shape) - spatial
    for i, (window, axes) in halos.items():
        value = with_halo(emitter, value, first + i, window, axes, beyond)
    return value


def halos_added(emitter: Emitter, value: Ref, spatial: int, halos: Halos) -> Ref:
    """The transpose of `with_halos`."""
    first = len(emitter.meta(value).shape) - spatial
    for i, (window, axes) in halos.items():
        value = halo_added(emitter, value, first + i, window, axes)
    return value
