"""The mesh as a picture: ranks in rows and columns, the groups of rank 0 on each axis, and the links of each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from autopar.planning.plan import Plan

CELL, MOST = 26, 16
"""Pixels of a rank, and how many ranks are drawn along a side."""

AXIS_COLOURS = ("#3b7dd8", "#e0912f", "#3c9d6d", "#8e63b8", "#d1495b")


def mesh_svg(plan: Plan, reach: Mapping[str, tuple[tuple[str, int], ...]]) -> str:
    """Columns are the ranks of the last axis, rows those of all others. Inline SVG, and a table of the axes."""
    axes = list(plan.mesh.items())
    columns = axes[-1][1]
    rows = plan.ranks // columns
    drawn_rows, drawn_columns = min(rows, MOST), min(columns, MOST)
    shapes = []
    for row in range(drawn_rows):
        for column in range(drawn_columns):
            rank = row * columns + column
            own = [k for k, _ in enumerate(axes) if _is_with_first(rank, k, [size for _, size in axes])]
            fill = "#8885" if rank == 0 else AXIS_COLOURS[own[0] % 5] if own else "none"
            x, y = column * CELL + 1, row * CELL + 1
            shapes.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 4}" height="{CELL - 4}" rx="4" fill="{fill}" '
                f'fill-opacity=".55" stroke="#888"/><text x="{x + CELL / 2 - 2}" y="{y + CELL / 2 + 2}">{rank}</text>'
            )
    more = []
    if rows > drawn_rows or columns > drawn_columns:
        more.append(f"{plan.ranks:,} ranks; the first {drawn_rows * drawn_columns:,} are drawn")
    width, height = drawn_columns * CELL + 2, drawn_rows * CELL + 2
    picture = (
        f'<svg class="ranks" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"><title>ranks; '
        f"coloured: those that rank 0 talks to on one axis</title>{''.join(shapes)}</svg>"
    )
    body = "".join(
        f'<tr><td><i class="key" style="background:{AXIS_COLOURS[k % 5]}"></i><b>{escape(axis)}</b></td>'
        f'<td class="n">{size}</td><td>{_apart(k, [n for _, n in axes])}</td>'
        f"<td>{escape(_levels(reach.get(axis, ())))}</td></tr>"
        for k, (axis, size) in enumerate(axes)
    )
    table = (
        f"<table><tr><th>axis</th><th>ranks</th><th>groups</th><th>over</th></tr>{body}"
        f'</table><div class="dim">{"".join(map(escape, more))}</div>'
    )
    return f'<div class="mesh">{picture}<div>{table}</div></div>'


def _is_with_first(rank: int, axis: int, sizes: list[int]) -> bool:
    """Whether a rank is in rank 0's group along an axis."""
    stride = math.prod(sizes[axis + 1 :])
    return 0 < rank < stride * sizes[axis] and rank % stride == 0


def _apart(axis: int, sizes: list[int]) -> str:
    stride = math.prod(sizes[axis + 1 :])
    return "neighbours" if stride == 1 else f"every {stride}th rank"


def _levels(reach: tuple[tuple[str, int], ...]) -> str:
    """ "nvlink, 8 wide"."""
    return ", ".join(f"{name} ({width} wide)" for name, width in reach) or "one device"
