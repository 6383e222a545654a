"""What ParallelBlocks give the search over several axes: `python benchmarks/blocks.py [--only NAME ...] [--json FILE]`.

A search descends from several starts (`autopar/planning/descent.py`). For the models of the golden plans, on several
meshes and clusters, in one process and in turn: where descents end that begin with everything whole and free the slow
axes first or the fast ones, that begin with the batch on every axis, or with what ParallelBlocks split; and what each
takes (the first one fills caches that the others read). Printed are each end over the best of all four, and for one,
two and three starts together how often they have the best of all, and what they lose on average and at worst.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT / "tests")

import golden  # noqa: E402
import torch  # noqa: E402

from autopar.passes.blocks.partition import blocks  # noqa: E402
from autopar.planning.planner import Planner  # noqa: E402
from autopar.planning.request import Request  # noqa: E402
from autopar.planning.solving import Solved  # noqa: E402
from autopar.planning.starts import by_blocks  # noqa: E402

MESHES: tuple[dict[str, int], ...] = (
    {"dp": 2, "tp": 2},
    {"dp": 8, "tp": 8},
    {"a": 16, "b": 4},
    {"a": 4, "b": 2, "c": 4},
)
CLUSTERS = ("dgx-h100", "perlmutter", "v100-nvlink")
STARTS = ("whole, slow first", "whole, fast first", "batch", "blocks")
Row = dict[str, Any]


def measure(planner: Planner) -> Row:
    """Objective and processor seconds of a descent from each start."""
    search = planner.search(Request(), planner.space)
    descent, options = search.descent, search.options
    axes = descent.axes()
    begun = time.process_time()
    grouped = blocks(planner.space.graph, max(planner.space.mesh))
    finding = time.process_time() - begun

    def descend(start: Mapping[str, Any], order: list[Any]) -> Solved:
        return descent.descend(start, order, purse=descent.purse(descent.effort.descents / 2))

    starts: dict[str, Callable[[], Solved]] = {
        "whole, slow first": lambda: descend(options.replicated(), axes),
        "whole, fast first": lambda: descend(options.replicated(), axes[::-1]),
        "batch": lambda: descend(options.batch(without=-1), axes),
        "blocks": lambda: descend(by_blocks(options, grouped, axes[-1][0]), axes[::-1]),
    }
    row: Row = {"blocks_seconds": finding, "objective": {}, "seconds": {}}
    for name in STARTS:
        begun = time.process_time()
        row["objective"][name] = starts[name]().score.objective
        row["seconds"][name] = time.process_time() - begun
    return row


def printed(rows: list[Row]) -> None:
    print(f"{'case':<48}" + "".join(f"{name:>20}" for name in STARTS))
    for row in rows:
        best = min(row["objective"].values())
        ends = "".join(f"{row['objective'][n] / best - 1:>11.2%} {row['seconds'][n]:>6.1f} s" for n in STARTS)
        print(f"{row['case']:<48}{ends}")
    print(f"\n{'starts':<60}{'cases best':>12}{'mean loss':>12}{'worst loss':>12}{'seconds':>10}")
    for names in chain.from_iterable(combinations(STARTS, count) for count in (1, 2, 3)):
        losses = [min(row["objective"][n] for n in names) / min(row["objective"].values()) - 1 for row in rows]
        seconds = sum(row["seconds"][n] for row in rows for n in names)
        best = sum(loss < 1e-6 for loss in losses)
        print(
            f"{' + '.join(names):<60}{best:>8}/{len(rows)}{statistics.mean(losses):>12.3%}{max(losses):>12.2%}"
            f"{seconds:>10.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What ParallelBlocks give the search over several axes.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="models: " + ", ".join(golden.MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for model in options.only or golden.MODELS:
        for mesh, cluster in product(MESHES, CLUSTERS):
            axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            planner = golden.captured(model).on(mesh, cluster)
            rows.append({"case": f"{model} {axes} {cluster}", **measure(planner)})
            print(f"{rows[-1]['case']}: {rows[-1]['objective']}", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    printed(rows)


if __name__ == "__main__":
    main()
