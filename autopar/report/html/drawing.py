"""Drawings of tensors, with the cuts of their placements and the part of rank 0, and of the mesh, with its groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product

from autopar.planning.plan import Plan

from ..hypertext import table
from ..words import split_of

SIDE, LEAST_SIDE = 54.0, 12.0
"""Pixels of the longest side, and of the shortest."""

MOST_CUTS = 16
"""Lines that are drawn along one dim; more are told by the title."""

MOST_PERIODS = 8


def tensor_svg(shape: Sequence[int], placements: Sequence[str], mesh: Mapping[str, int]) -> str:
    """Rows go down and columns across; of more than two dims, those that are split, and then the first. Inline SVG."""
    parts = [split_of(text) for text in placements]
    split = [part[0] for part in parts if part]
    dims = list(dict.fromkeys((*sorted(set(split)), *range(len(shape)))))[:2]
    dims = sorted(dims) or [0]
    sizes = [shape[dim] if dim < len(shape) else 1 for dim in dims]
    height, width = _sides(sizes[0], sizes[1] if len(sizes) > 1 else 1) if len(sizes) > 1 else (LEAST_SIDE, SIDE)
    axis_of = dict(zip(dims, ("rows", "columns") if len(dims) > 1 else ("columns",), strict=True))
    spans = {"rows": _Span(height), "columns": _Span(width)}
    told = []
    for (axis, ranks), part in zip(mesh.items(), parts, strict=True):
        if part is not None and (side := axis_of.get(part[0])) is not None and ranks > 1:
            dim, period = part
            size = shape[dim] if dim < len(shape) else 1
            spans[side].cut(ranks, max(1, size // period) if period else 1)
            told.append(f"dim {dim} in {ranks} on {axis}")
    title = f"{'x'.join(map(str, shape)) or 'a number'}: {', '.join(told) or 'whole on every rank'}; coloured: rank 0"
    boxes = [
        f'<rect class="own" x="{x:.1f}" y="{y:.1f}" width="{max(w, 1.5):.1f}" height="{max(h, 1.5):.1f}"/>'
        for y, h in spans["rows"].own()
        for x, w in spans["columns"].own()
    ]
    lines = [f'<path d="M{x:.1f} 0V{height:.1f}"/>' for x in spans["columns"].cuts()]
    lines += [f'<path d="M0 {y:.1f}H{width:.1f}"/>' for y in spans["rows"].cuts()]
    return (
        f'<svg class="tensor" width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}" role="img"><title>{escape(title)}</title>'
        f'{"".join(boxes)}{"".join(lines)}<rect class="edge" width="{width:.1f}" height="{height:.1f}"/></svg>'
    )


def _sides(rows: int, columns: int) -> tuple[float, float]:
    """Height and width, in the ratio of the square roots of the sizes: a matrix of 32000 x 4096 stays readable."""
    ratio = math.sqrt(max(rows, 1) / max(columns, 1))
    height, width = (SIDE, SIDE / ratio) if ratio >= 1 else (SIDE * ratio, SIDE)
    return max(height, LEAST_SIDE), max(width, LEAST_SIDE)


class _Span:
    """One side of a tensor: in how many periods it comes, and in how many shards each."""

    def __init__(self, length: float) -> None:
        self.length, self.ranks, self.periods = length, 1, 1

    def cut(self, ranks: int, periods: int) -> None:
        self.ranks *= ranks
        self.periods = max(self.periods, periods)

    def own(self) -> list[tuple[float, float]]:
        """(start, length) of what rank 0 has."""
        periods = min(self.periods, MOST_PERIODS)
        each = self.length / periods
        return [(k * each, each / self.ranks) for k in range(periods)] if self.ranks > 1 else [(0.0, self.length)]

    def cuts(self) -> list[float]:
        pieces = self.ranks * min(self.periods, MOST_PERIODS)
        return [self.length * k / pieces for k in range(1, pieces)] if 1 < pieces <= MOST_CUTS else []


CELL, MOST = 26, 16
"""Pixels of a rank, and how many ranks are drawn along a side."""

AXIS_COLOURS = ("#3b7dd8", "#e0912f", "#3c9d6d", "#8e63b8", "#d1495b")


def mesh_svg(plan: Plan, reach: Mapping[str, tuple[tuple[str, int], ...]]) -> str:
    """Columns are the ranks of the last axis, rows those of all others. Inline SVG, and a table of the axes."""
    sizes, shapes = list(plan.mesh.values()), []
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    drawn_rows, drawn_columns = min(plan.ranks // sizes[-1], MOST), min(sizes[-1], MOST)
    for row, column in product(range(drawn_rows), range(drawn_columns)):
        rank = row * sizes[-1] + column
        own = (k for k, (n, far) in enumerate(zip(sizes, strides, strict=True)) if rank < far * n and rank % far == 0)
        fill = "#8885" if rank == 0 else next((AXIS_COLOURS[k % 5] for k in own), "none")
        x, y = column * CELL + 1, row * CELL + 1
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 4}" height="{CELL - 4}" rx="4" fill="{fill}" '
            f'fill-opacity=".55" stroke="#888"/><text x="{x + CELL / 2 - 2}" y="{y + CELL / 2 + 2}">{rank}</text>'
        )
    drawn = drawn_rows * drawn_columns
    more = f"{plan.ranks:,} ranks; the first {drawn:,} are drawn" if plan.ranks > drawn else ""
    width, height = drawn_columns * CELL + 2, drawn_rows * CELL + 2
    picture = (
        f'<svg class="ranks" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"><title>ranks; '
        f"coloured: those that rank 0 talks to on one axis</title>{''.join(shapes)}</svg>"
    )
    axes = (
        (
            f'<i class="key" style="background:{AXIS_COLOURS[k % 5]}"></i><b>{escape(axis)}</b>',
            str(sizes[k]),
            "neighbours" if strides[k] == 1 else f"every {strides[k]}th rank",
            escape(", ".join(f"{name} ({wide} wide)" for name, wide in reach.get(axis, ())) or "one device"),
        )
        for k, axis in enumerate(plan.mesh)
    )
    rows = table(axes, ("axis", "ranks", "groups", "over"), ("", "n", "", ""))
    return f'<div class="mesh">{picture}<div>{rows}<div class="dim">{more}</div></div></div>'
