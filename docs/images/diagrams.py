"""Draws the pictures of docs/choosing.md: `python docs/images/diagrams.py`. Needs matplotlib.

`splits` is one matrix product on two ranks, split in three ways; `mesh` is a mesh on a cluster; `search` is how a plan
is found; `overlap` is what a step gains by hiding communication. Each comes for light and for dark pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draw import THEMES, Theme

FOLDER = Path(__file__).parent


class Sheet:
    """A picture in units of an inch, from the bottom left, without axes."""

    def __init__(self, theme: Theme, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.theme = theme
        self.figure = Figure(figsize=(width, height), facecolor=theme.page)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, size: float = 9, *, strong: bool = False, **how: Any) -> None:
        how = {"color": self.theme.text if strong else self.theme.faint, "ha": "center", "va": "center"} | how
        self.axes.text(x, y, text, fontsize=size, weight="bold" if strong else "normal", linespacing=1.4, **how)

    def box(self, x: float, y: float, width: float, height: float, **how: Any) -> None:
        from matplotlib.patches import Rectangle

        how = {"facecolor": self.theme.box, "edgecolor": self.theme.edge, "linewidth": 1.1} | how
        self.axes.add_patch(Rectangle((x, y), width, height, **how))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], **how: Any) -> None:
        from matplotlib.patches import FancyArrowPatch

        how = {"arrowstyle": "-|>", "mutation_scale": 11, "color": self.theme.faint, "linewidth": 1.2} | how
        self.axes.add_patch(FancyArrowPatch(start, end, shrinkA=2, shrinkB=2, **how))

    def save(self, name: str, theme: str) -> None:
        path = FOLDER / f"{name}-{theme}.svg"
        self.figure.savefig(path, facecolor=self.theme.page, metadata={"Date": None})


def halves(sheet: Sheet, x: float, y: float, width: float, height: float, cut: str) -> None:
    """A matrix whose rows or columns lie on two ranks; with "", each has all of it; with "sum", a part of the sum."""
    ours, theirs = sheet.theme.ours, sheet.theme.theirs
    if cut == "rows":
        sheet.box(x, y + height / 2, width, height / 2, facecolor=ours)
        sheet.box(x, y, width, height / 2, facecolor=theirs)
    elif cut == "columns":
        sheet.box(x, y, width / 2, height, facecolor=ours)
        sheet.box(x + width / 2, y, width / 2, height, facecolor=theirs)
    else:
        sheet.box(x + 0.07, y - 0.07, width, height, facecolor=theirs)
        sheet.box(x, y, width, height, facecolor=ours)
        if cut == "sum":
            sheet.text(x + width / 2, y + height / 2, "+", 13, strong=True, color=sheet.theme.page)


SPLITS = (
    ("Split the rows", "S0: factor m", "rows", "", "rows", "the weight is replicated:\nno communication forward"),
    ("Split the columns", "S1: factor n", "", "columns", "columns", "each rank has half of\nthe weight"),
    ("Split the sum", "S2: factor k", "columns", "rows", "sum", "each rank has a partial\nsum: an all-reduce follows"),
)
"""Title, choice, how X, W and Y are cut, and what follows."""


def draw_splits(theme: Theme, name: str) -> None:
    sheet = Sheet(theme, 9.4, 2.55)
    for number, (title, choice, *cuts, what) in enumerate(SPLITS):
        x = 0.25 + 3.1 * number
        sheet.text(x + 1.3, 2.35, title, 11, strong=True)
        sheet.text(x + 1.3, 2.1, choice, 8.5, family="monospace", color=theme.ours)
        for k, (letter, dims, cut) in enumerate(zip("XWY", ("m x k", "k x n", "m x n"), cuts, strict=True)):
            halves(sheet, x + 0.95 * k, 1.08, 0.6, 0.75, cut)
            sheet.text(x + 0.95 * k + 0.3, 0.86, f"{letter}: {dims}", 8)
        sheet.text(x + 0.775, 1.45, "x", 11)
        sheet.text(x + 1.725, 1.45, "=", 11)
        sheet.text(x + 1.3, 0.4, what, 8.8)
    sheet.save("splits", name)


def draw_mesh(theme: Theme, name: str) -> None:
    sheet = Sheet(theme, 9.4, 2.35)
    for node in range(2):
        x = 0.5 + 4.6 * node
        sheet.box(x, 0.75, 3.8, 0.95)
        sheet.text(x + 1.9, 1.52, f"machine {node}", 9, strong=True)
        for k in range(4):
            sheet.box(x + 0.2 + 0.92 * k, 0.88, 0.66, 0.42, facecolor=theme.ours if k == 0 else theme.theirs)
            sheet.text(x + 0.53 + 0.92 * k, 1.09, f"{4 * node + k}", 9, strong=True, color=theme.page)
        sheet.arrow((x + 0.15, 0.62), (x + 3.65, 0.62), arrowstyle="<|-|>", color=theme.ours)
        sheet.text(x + 1.9, 0.44, "tp: 4 ranks on the fast links of a machine", 8.5)
    sheet.arrow((1.0, 1.85), (5.6, 1.85), arrowstyle="<|-|>")
    sheet.text(4.7, 2.08, "dp: ranks 0 and 4, 1 and 5, 2 and 6, 3 and 7 share the links between machines", 8.5)
    sheet.text(4.7, 0.15, "mesh dp=2, tp=4 on two machines of four devices: the last axis is the innermost", 9)
    sheet.save("mesh", name)


SEARCH = (
    ("Start", "all replicated,\nnothing hidden"),
    ("Free one axis", "the others stay;\nsolved exactly"),
    ("Next axis", "round and round,\nuntil nothing improves"),
    ("Again", "with as much hidden as\nthe shortest hides, until\nno step gets shorter"),
)
RIVALS = ("the search's plan", "every preset's plan", "what descents at the\nprices of a timeline found")


def draw_search(theme: Theme, name: str) -> None:
    sheet = Sheet(theme, 9.4, 3.3)
    for number, (title, what) in enumerate(SEARCH):
        x = 0.15 + 2.36 * number
        sheet.box(x, 2.15, 1.96, 0.95)
        sheet.text(x + 0.98, 2.9, title, 10, strong=True)
        sheet.text(x + 0.98, 2.49, what, 8.5)
        if number < 2:
            sheet.arrow((x + 1.96, 2.62), (x + 2.36, 2.62))
    for number, who in enumerate(RIVALS):
        x = 0.15 + 2.36 * number
        sheet.box(x, 0.95, 1.96, 0.62, edgecolor=theme.ours)
        sheet.text(x + 0.98, 1.26, who, 8.3)
        sheet.arrow((x + 0.98, 0.95), (x + 0.98, 0.62))
    sheet.arrow((5.6, 2.15), (1.13, 1.57), connectionstyle="arc3,rad=-0.04")
    sheet.arrow((8.0, 2.15), (6.83, 1.4))
    sheet.arrow((6.6, 0.62), (8.5, 2.15), connectionstyle="arc3,rad=0.12", color=theme.ours)
    sheet.text(8.75, 1.1, "what hides", 8.5)
    sheet.box(0.15, 0.2, 6.68, 0.42)
    sheet.text(3.49, 0.41, "programs, simulated with overlap: peak within the limit?  shortest step?", 9)
    sheet.arrow((6.83, 0.41), (7.3, 0.41))
    sheet.box(7.3, 0.2, 1.9, 0.42, facecolor=theme.ours)
    sheet.text(8.25, 0.41, "the plan", 10, strong=True, color=theme.page)
    sheet.save("search", name)


def draw_overlap(theme: Theme, name: str) -> None:
    sheet = Sheet(theme, 9.4, 2.5)
    rows = (
        (1.62, "as written", ((0.0, 1.2), (2.0, 1.2), (4.0, 1.2)), ((1.2, 0.8), (3.2, 0.8), (5.2, 0.8)), 6.0),
        (0.5, "as it runs", ((0.0, 1.2), (1.2, 1.2), (2.4, 1.2)), ((1.2, 0.8), (2.4, 0.8), (3.6, 0.8)), 4.4),
    )
    for y, title, computing, sending, end in rows:
        sheet.text(0.1, y + 0.29, title, 10, strong=True, ha="left")
        sheet.text(2.0, y + 0.44, "operators", 8.5, ha="right")
        sheet.text(2.0, y + 0.13, "an axis's links", 8.5, ha="right")
        for number, (start, seconds) in enumerate(computing):
            sheet.box(2.1 + start, y + 0.32, seconds, 0.24, facecolor=theme.theirs)
            sheet.text(2.1 + start + seconds / 2, y + 0.44, f"layer {3 - number}", 8, color=theme.text)
        for number, (start, seconds) in enumerate(sending):
            sheet.box(2.1 + start, y, seconds, 0.24, facecolor=theme.ours)
            sheet.text(2.1 + start + seconds / 2, y + 0.12, f"grad {3 - number}", 8, color=theme.page)
        sheet.axes.plot([2.1 + end] * 2, [y - 0.08, y + 0.66], color=theme.text, linewidth=1.2)
        sheet.text(2.1 + end + 0.08, y + 0.28, "step ends", 8.5, ha="left")
    sheet.text(5.7, 0.2, "exposed", 8.5, color=theme.text, va="center")
    sheet.arrow((5.7, 0.3), (6.05, 0.5))
    sheet.save("overlap", name)


def main() -> None:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "autopar"  # the same file each time
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["font.family"] = "sans-serif"
    for name, theme in THEMES.items():
        for draw in (draw_splits, draw_mesh, draw_search, draw_overlap):
            draw(theme, name)


if __name__ == "__main__":
    main()
