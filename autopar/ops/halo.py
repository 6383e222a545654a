"""Windows that slide along a split dim: the exchange of edges.

A window of stride s reads a *fine* tensor and produces a *coarse* one. Where the fine dim is s times as long as the
coarse one, coarse row i belongs to the fine rows [s i, s (i + 1)). It touches, with padding p, dilation d and a kernel
of k, the rows [s i - p, s i - p + d (k - 1)], so that a shard of the coarse rows needs p fine rows before its own and
d (k - 1) - p - s + 1 after them: its halo, which the neighbours have.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .expansions import LocalCall
from .parts import slice_of
from .rule import Call
from .template import Dim, Name
from .traced import collective


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


def in_step(fine_rows: Iterable[int]) -> tuple[list[Name], list[Name]]:
    """Names of the spatial dims of a coarse and of a fine tensor, "s0" and so on, with so many fine rows for each
    coarse one; 0 where rows keep no step: the dim is unsplit."""
    rows = list(fine_rows)
    return [f"s{i}" if n else None for i, n in enumerate(rows)], [
        (f"s{i}", n) if n else None for i, n in enumerate(rows)
    ]


def halo_dims(windows: Iterable[HaloWindow], operands: Iterable[int], beyond: float = 0.0) -> dict[str, Dim]:
    """The spatial dims of which shards have a halo; beyond their ends these operands hold `beyond`."""
    filled = dict.fromkeys(operands, beyond)
    return {
        f"s{i}": Dim(expands=True, contiguous=True, even=False, least=window.coarse_rows, padding=filled)
        for i, window in enumerate(windows)
        if window.before or window.after
    }


def each(call: Call, name: str, spatial: int) -> tuple[int, ...]:
    """An argument, one number a spatial dim."""
    values = call.argument(name)
    values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    return values * spatial if len(values) == 1 else values


def halos_of(local: LocalCall, windows: Iterable[HaloWindow]) -> Halos:
    """The halos of the spatial dims that are split and have any."""
    split = {i: window for i, window in enumerate(windows) if f"s{i}" in local.splits}
    return {i: (w, local.splits[f"s{i}"]) for i, w in split.items() if w.before or w.after}


def neighbour(local: LocalCall, value: Tensor, axes: tuple[int, ...], step: int) -> Tensor:
    """The value of the shard before this one (`step` 1) or after it (-1), of a dim split by `axes` (outermost first);
    zeros at the ends."""
    *outer, inner = axes
    received = shift(value, step, inner)
    if outer:
        # at the end of an inner run the neighbour is at the other end of the next one
        wrapped = shift(value, -step * (local.ranks([inner]) - 1), inner)
        received = received + neighbour(local, wrapped, tuple(outer), step)
    return received


def at_end(local: LocalCall, rows: int, axes: tuple[int, ...], step: int) -> Tensor:
    """bool [1]: whether there is no shard before this one of `rows` (`step` 1), or none after it (-1)."""
    last = (local.ranks(axes) - 1) * rows
    return local.arange(1) + local.offset(axes, rows) == (0 if step == 1 else last)


def with_halo(
    local: LocalCall, value: Tensor, dim: int, window: HaloWindow, axes: tuple[int, ...], beyond: float | None = 0.0
) -> Tensor:
    """A shard of fine rows with the neighbours' rows around it. Beyond the ends stands `beyond`, or, if that is None,
    the outermost row repeated."""
    rows, parts = value.shape[dim], [value]

    def rows_of(start: int, end: int, step: int) -> Tensor:
        received = neighbour(local, slice_of(value, dim, start, end).contiguous(), axes, step)
        if beyond == 0:
            return received
        end_of_dim = at_end(local, rows, axes, step)
        if beyond is not None:
            return received.masked_fill(end_of_dim, beyond)
        outermost = slice_of(value, dim, 0, 1) if step == 1 else slice_of(value, dim, rows - 1, rows)
        return torch.where(end_of_dim, outermost, received)

    if window.before:
        parts.insert(0, rows_of(rows - window.before, rows, 1))
    if window.after:
        parts.append(rows_of(0, window.after, -1))
    return torch.cat(parts, dim)


def halo_added(local: LocalCall, value: Tensor, dim: int, window: HaloWindow, axes: tuple[int, ...]) -> Tensor:
    """The transpose of `with_halo`: a shard's rows plus those of the neighbours' halos."""
    before, after = window.before, window.after
    end = value.shape[dim] - after
    rows = end - before
    from_after = from_before = None
    if before:
        from_after = neighbour(local, slice_of(value, dim, 0, before).contiguous(), axes, -1)
    if after:
        from_before = neighbour(local, slice_of(value, dim, end, end + after).contiguous(), axes, 1)
    parts = []
    for start, stop in itertools.pairwise(sorted({0, after, rows - before, rows})):
        part = slice_of(value, dim, before + start, before + stop)
        if from_before is not None and stop <= after:
            part = part + slice_of(from_before, dim, start, stop)
        if from_after is not None and start >= rows - before:
            first = rows - before
            part = part + slice_of(from_after, dim, start - first, stop - first)
        parts.append(part)
    return torch.cat(parts, dim)


def with_halos(local: LocalCall, value: Tensor, spatial: int, halos: Halos, beyond: float = 0.0) -> Tensor:
    """A shard with its halos along some of its last `spatial` dims, and `beyond` beyond the ends."""
    first = value.ndim - spatial
    for i, (window, axes) in halos.items():
        value = with_halo(local, value, first + i, window, axes, beyond)
    return value


def halos_added(local: LocalCall, value: Tensor, spatial: int, halos: Halos) -> Tensor:
    """The transpose of `with_halos`."""
    first = value.ndim - spatial
    for i, (window, axes) in halos.items():
        value = halo_added(local, value, first + i, window, axes)
    return value


def surrounded(value: Tensor, spatial: int, halos: Halos) -> Tensor:
    """A tensor of the shape with halos, for a backward op that reads no more than its shape."""
    shape = list(value.shape)
    for i, (window, _) in halos.items():
        shape[i - spatial] += window.before + window.after
    return value.new_empty(shape) if halos else value


def shift(value: Tensor, offset: int, axis: int) -> Tensor:
    """The value of the rank `offset` places before this one along a mesh axis (negative: behind), zeros where there is
    no such rank."""
    shifted: Tensor = collective("shift", value, offset, axis)
    return shifted
