"""Published training throughput beside what plans predict: `python benchmarks/published.py [--rows TEXT] [--write]`.

Each row of `published.toml` is planned with the same model, batch, sequence, mesh, strategy and recomputation, and
without a memory limit. The ratio is that of our tokens a second to theirs: above 1, the plan promises more than was
measured. A row takes 10 to 60 s of one processor; `--json FILE` keeps rows that are done and goes on from there.
`--write` writes the table into docs/published.md, and the errors of the ratios, from which printed steps have their
range, into the package.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from published_model import RECOMPUTE, Decoder
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.planning.planner import Planner
from autopar.planning.training import Training

HERE = Path(__file__).parent
DATA = HERE / "published.toml"

Row = dict[str, Any]


def data() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text())


def name(row: Row) -> str:
    return f"{row['of']}: {row['entry']}"


def devices(row: Row) -> int:
    return math.prod(row["mesh"].values())


def published(row: Row) -> float:
    """Tokens a second and device."""
    if "tokens_per_second" in row:
        return float(row["tokens_per_second"])
    return float(row["rows"] * row["sequence"] / row["step_seconds"] / devices(row))


FUSED_PART = 0.0
"""What kernels that are fused save (`Device.fused_part`)."""

REACHED = 0.9
"""The part of the rate of links between nodes that collectives reach, as in the files of DGX machines."""

CAPTURED = ("model", "rows", "sequence", "recompute", "micro_batches", "reduce")
"""What a captured step depends on."""


class Planners:
    """Plans rows; rows of the same step are captured once."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self.models = models
        self.latest: tuple[list[Any], Planner] | None = None

    def planned(self, row: Row) -> autopar.Plan:
        """The plan of a row: nothing but its strategy is open, and no collectives wait for memory."""
        key = [row[k] for k in CAPTURED]
        if self.latest is None or self.latest[0] != key:
            self.latest = key, self._captured(row)
        on = self.latest[1].on(row["mesh"], cluster(row))
        return on.plan(solver=row["solver"], memory_limit_bytes=math.inf)

    def _captured(self, row: Row) -> Planner:
        with torch.device("meta"):
            model = Decoder(self.models[row["model"]], row["sequence"], row["recompute"])
            tokens = torch.zeros(row["rows"] // row["micro_batches"], row["sequence"], dtype=torch.long)
        training = Training(
            recompute="none" if row["recompute"] == RECOMPUTE[0] else "asked",
            micro_batches=row["micro_batches"],
            precision=autopar.Precision(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, row["reduce"])),
        )
        batch = {"tokens": tokens, "labels": tokens}
        return Planner(model, row["mesh"], kwargs=batch, cluster=cluster(row), training=training)


def cluster(row: Row) -> Cluster:
    """The cluster of a row, with the links between nodes that its table names, and its kernels."""
    machine = named_cluster(row["cluster"])
    nodes = machine.levels[0]
    if rate := row.get("node_bytes_per_second"):
        nodes = replace(nodes, bytes_per_second=rate * REACHED, group_bytes_per_second=rate * REACHED)
    fused = FUSED_PART if row["kernels"] == "compiled" else 0.0
    device = replace(machine.device, fused_part=fused)
    return replace(machine, device=device, levels=(nodes, *machine.levels[1:]))


def result(row: Row, planners: Planners) -> Row:
    begun = time.process_time()
    plan = planners.planned(row)
    timing = plan.timing
    assert timing is not None
    predicted = row["rows"] * row["sequence"] / plan.seconds / devices(row)
    return {
        "name": name(row),
        "published": published(row),
        "predicted": predicted,
        "ratio": predicted / published(row),
        "step_seconds": plan.seconds,
        "products_seconds": timing.products_seconds,
        "attention_seconds": timing.attention_seconds,
        "others_seconds": timing.others_seconds,
        "optimizer_seconds": timing.optimizer_seconds,
        "exposed_seconds": plan.exposed_seconds,
        "planning_seconds": time.process_time() - begun,
    }


def summary(results: list[Row]) -> str:
    ratios = sorted(r["ratio"] for r in results)
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    median = statistics.median(ratios)
    return f"{len(ratios)} rows: median {median:.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}, worst {worst:.3f}"


def shown(results: list[Row]) -> Table:
    table = Table("row", "published", "predicted", "ratio")
    for r in results:
        table.add_row(r["name"], f"{r['published']:,.0f}", f"{r['predicted']:,.0f}", f"{r['ratio']:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose names contain it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; rows that it holds are not planned again")
    options = parser.parse_args()
    told = data()
    done: dict[str, Row] = {}
    if options.json is not None and options.json.exists():
        done = {r["name"]: r for r in json.loads(options.json.read_text())}
    planners = Planners(told["models"])
    wanted = [row for row in told["row"] if options.rows in name(row)]
    for row in wanted:
        if name(row) not in done:
            done[name(row)] = result(row, planners)
            print(f"{name(row)}: {done[name(row)]['ratio']:.3f}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(list(done.values()), indent=1) + "\n")
    results = [done[name(row)] for row in wanted]
    Console(width=120).print(shown(results))
    print(summary(results))


if __name__ == "__main__":
    main()
