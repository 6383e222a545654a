"""Draws the pictures of the README: `python docs/images/draw.py`. Needs matplotlib (`pip install 'autopar[figure]'`).

`flow` shows how a model becomes a program; the code in its boxes is what `examples/walkthrough.py` prints. `lab` shows
the table of docs/lab.md, which `sudo python benchmarks/lab.py` measures: the step of autopar's plan beside that of the
best hand-written combination of DDP, FSDP2 and `parallelize_module`. Each comes for light and for dark pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent / "lab.md"


@dataclass(frozen=True, kw_only=True)
class Theme:
    page: str
    box: str
    edge: str
    text: str
    faint: str
    ours: str
    theirs: str


THEMES = {
    "light": Theme(
        page="#ffffff", box="#f4f6f9", edge="#c3ccd6", text="#1f2328", faint="#59636e", ours="#0b69a3", theirs="#b9c2cc"
    ),
    "dark": Theme(
        page="#0d1117", box="#161d27", edge="#3d4855", text="#e6edf3", faint="#9aa6b2", ours="#58b0ee", theirs="#515c68"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of docs/lab.md: median steps in milliseconds, and the median of their ratio, round by round."""

    name: str
    links: str
    ours: float
    by_hand: float
    baseline: str
    ratio: float


LINKS = {
    "wider, slower": "2 nodes x 2 ranks, 200 Mbit/s",
    "8 ranks": "2 nodes x 4 ranks, 400 Mbit/s",
    "pairs": "2 nodes x 2 ranks, 1 Gbit/s",
    "flat": "4 ranks, 400 Mbit/s",
}
"""Of the cells (`CELLS` of benchmarks/lab.py) whose links are not the usual ones."""

USUAL = "2 nodes x 2 ranks, 400 Mbit/s"


def cells(text: str) -> list[Cell]:
    """The eight cells of the first table under "Plans, measured", without repeated runs."""
    rows = re.findall(
        r"^\| ([\w ,]+?)(?::.*?)? [*‡†\\]+ \| (\d+) \| \d+ \| (\d+) \((.*?)\) \| (\d\.\d+) \|", text, flags=re.MULTILINE
    )
    return [
        Cell(
            name=name,
            links=LINKS.get(name, USUAL),
            ours=float(ours),
            by_hand=float(by_hand),
            baseline=baseline,
            ratio=float(ratio),
        )
        for name, ours, by_hand, baseline, ratio in rows
    ]


STEPS = (
    ("Model, mesh, cluster", "Your PyTorch model, a batch,\nand axes such as dp=2, tp=4", "parallelize(model, mesh)"),
    ("One graph", "Forward and backward as\none list of operators", "mm_1 = aten.mm(relu, t_1)"),
    (
        "Blocks and segments",
        "What splits together; repeated\nlayers are analysed once",
        "layers.*: 3 copies of 14 nodes",
    ),
    ("Solver", "Ways to split every operator,\npriced in seconds and bytes", "mm  S1: 272 us  R: 539 us"),
    ("Plan", "Where every tensor lies: print,\nedit, save and compare it", "up.weight S(0), down.weight S(1)"),
    ("Program on every rank", "Local operators and\nexplicit collectives", "all_reduce(mm_1, 'sum', tp)"),
)
"""Title, what it is, and a line of the walkthrough."""


def draw_flow(theme: Theme, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    width, height, gap, between = 2.75, 1.3, 0.4, 0.5
    whole = 3 * width + 2 * gap, 2 * height + between
    figure = Figure(figsize=(whole[0] + 0.3, whole[1] + 0.3), facecolor=theme.page)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.15, whole[0] + 0.15)
    axes.set_ylim(-0.15, whole[1] + 0.15)
    axes.axis("off")
    arrow = {"arrowstyle": "-|>", "mutation_scale": 13, "color": theme.faint, "linewidth": 1.3}
    for number, (title, text, line) in enumerate(STEPS):
        row, column = divmod(number, 3)
        x, y = column * (width + gap), (1 - row) * (height + between)
        ours = title in ("Solver", "Plan")
        axes.add_patch(
            FancyBboxPatch(
                (x + 0.06, y + 0.06),
                width - 0.12,
                height - 0.12,
                boxstyle="round,pad=0.06",
                facecolor=theme.box,
                edgecolor=theme.ours if ours else theme.edge,
                linewidth=1.6 if ours else 1.1,
            )
        )
        axes.text(x + 0.17, y + height - 0.17, title, color=theme.text, fontsize=11.5, weight="bold", va="top")
        axes.text(x + 0.17, y + height - 0.47, text, color=theme.faint, fontsize=9, va="top", linespacing=1.35)
        axes.text(x + 0.17, y + 0.16, line, color=theme.ours, fontsize=8.2, family="monospace", va="bottom")
        if column < 2:
            middle = y + height / 2
            axes.add_patch(
                FancyArrowPatch((x + width, middle), (x + width + gap, middle), shrinkA=2, shrinkB=2, **arrow)
            )
    turn = height + between / 2
    axes.plot(
        [whole[0] - width / 2] * 2 + [width / 2] * 2,
        [height + between - 0.02, turn, turn, turn - 0.1],
        color=theme.faint,
        linewidth=1.3,
        solid_joinstyle="round",
    )
    axes.add_patch(FancyArrowPatch((width / 2, turn), (width / 2, height), shrinkA=0, shrinkB=2, **arrow))
    figure.savefig(path, facecolor=theme.page, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_lab(theme: Theme, path: Path) -> None:
    from matplotlib.figure import Figure

    found = sorted(cells(TABLE.read_text()), key=lambda cell: cell.ratio)
    figure = Figure(figsize=(9.4, 4.5), facecolor=theme.page, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(theme.page)
    for row, cell in enumerate(found):
        axes.barh(row, 1.0, height=0.66, color=theme.theirs, zorder=1)
        axes.barh(row, cell.ratio, height=0.66, color=theme.ours, zorder=2)
        axes.text(
            cell.ratio - 0.012,
            row,
            f"{cell.ratio:.2f}",
            color=theme.page,
            fontsize=10,
            weight="bold",
            ha="right",
            va="center",
        )
        axes.text(
            1.012, row, f"{cell.ours:.0f} ms against {cell.by_hand:.0f} ms, {cell.baseline}", color=theme.faint,
            fontsize=9, va="center",
        )  # fmt: skip
        axes.text(-0.012, row - 0.17, cell.name, color=theme.text, fontsize=10, ha="right", va="center")
        axes.text(-0.012, row + 0.2, cell.links, color=theme.faint, fontsize=7.8, ha="right", va="center")
    axes.axvline(1.0, color=theme.text, linewidth=1.1, zorder=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4)
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "0.25", "0.5", "0.75", "best by hand = 1"])
    axes.tick_params(colors=theme.faint, length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(
        "Step of autopar's plan, relative to the best hand-written combination of DDP, FSDP2 and TP (less is better)",
        color=theme.text, fontsize=10.5, x=0.44, pad=10,
    )  # fmt: skip
    figure.savefig(path, facecolor=theme.page, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "autopar"  # the same file each time
    for name, theme in THEMES.items():
        draw_flow(theme, FOLDER / f"flow-{name}.svg")
        draw_lab(theme, FOLDER / f"lab-{name}.svg")


if __name__ == "__main__":
    main()
