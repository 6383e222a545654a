"""Published training throughput beside what plans predict: `python benchmarks/published.py [--rows TEXT] [--write]`.

Each row of `published.toml` is planned with the same model, batch, sequence, mesh, strategy and recomputation, and
without a memory limit. The ratio is that of our tokens a second to theirs: above 1, the plan promises more than was
measured. "without" is the ratio that the row has if it does not count: the part of the peak that products reach in
training, of which each cluster has one, is fitted to the other rows of the cluster alone.

A row takes 5 to 60 s of one processor, all of them a quarter of an hour; `--json FILE` keeps rows that are done and
goes on from there. `--write` writes the table into docs/published.md, and the 10th and 90th percentile of the ratios as
`step_range` into the files of the clusters that have rows.
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
from autopar.planning.request import Request

HERE = Path(__file__).parent
DATA = HERE / "published.toml"
PAGE = HERE.parent / "docs" / "published.md"
LIBRARY = HERE.parent / "autopar" / "cluster" / "library"
BEGIN, END = "<!-- begin, 900 s: python benchmarks/published.py --write -->", "<!-- end -->"

Row = dict[str, Any]


def name(row: Row) -> str:
    return f"{row['of']}: {row['entry']}"


def devices(row: Row) -> int:
    return math.prod(row["mesh"].values())


def published(row: Row) -> float:
    """Tokens a second and device."""
    if "tokens_per_second" in row:
        return float(row["tokens_per_second"])
    return float(row["rows"] * row["sequence"] / row["step_seconds"] / devices(row))


def data() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text())


FUSED_PART = data()["compiled"]["fused_part"]
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
        asked = Request(
            cluster=cluster(row),
            recompute="none" if row["recompute"] == RECOMPUTE[0] else "asked",
            micro_batches=row["micro_batches"],
            precision=autopar.Precision(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, row["reduce"])),
        )
        batch = {"tokens": tokens, "labels": tokens}
        return Planner(model, row["mesh"], kwargs=batch, request=asked)


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
        "cluster": row["cluster"],
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


def without(row: Row, results: list[Row]) -> float:
    """The ratio of a row with the rate of products and attention fitted to the other rows of its cluster."""
    others = [r for r in results if r["cluster"] == row["cluster"] and r is not row]
    if not others:
        return float(row["ratio"])

    def ratio(r: Row, times: float) -> float:
        computing = r["products_seconds"] + r["attention_seconds"]
        return float(r["ratio"] * r["step_seconds"] / (r["step_seconds"] + (times - 1.0) * computing))

    low, high = 0.25, 4.0
    for _ in range(40):
        times = math.sqrt(low * high)
        low, high = (times, high) if statistics.median(ratio(r, times) for r in others) > 1.0 else (low, times)
    return ratio(row, times)


def summary(ratios: list[float]) -> str:
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    low, high = step_range(ratios)
    return (
        f"{len(ratios)} rows: median {statistics.median(ratios):.3f}, 10th to 90th percentile {low:.2f} to {high:.2f}, "
        f"worst {worst:.3f}"
    )


def step_range(ratios: list[float]) -> tuple[float, float]:
    """Of ten rows, eight took from so many to so many times the seconds that were predicted."""
    tenths = statistics.quantiles([*ratios, ratios[0]] if len(ratios) == 1 else ratios, n=10, method="inclusive")
    return round(tenths[0], 2), round(tenths[-1], 2)


def shown(results: list[Row], rows: Mapping[str, Row]) -> Table:
    table = Table("row", "model", "mesh", "rows x sequence", "again", "kernels", "theirs", "ours", "ratio", "without")
    for r in results:
        table.add_row(*cells(r, rows[r["name"]], results))
    return table


def cells(r: Row, row: Row, results: list[Row]) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
    micro = f" in {row['micro_batches']}" if row["micro_batches"] > 1 else ""
    return [
        r["name"],
        row["model"],
        f"{mesh}, {row['solver']}",
        f"{row['rows']:,}{micro} x {row['sequence']:,}",
        row["recompute"],
        row["kernels"],
        f"{r['published']:,.0f}",
        f"{r['predicted']:,.0f}",
        f"{r['ratio']:.3f}",
        f"{without(r, results):.3f}",
    ]


def page(results: list[Row], told: Mapping[str, Any]) -> str:
    """What docs/published.md says between its marks."""
    rows = {name(row): row for row in told["row"]}
    heads = [
        "row",
        "model",
        "mesh, strategy",
        "sequences",
        "made again",
        "kernels",
        "theirs",
        "ours",
        "ratio",
        "without",
    ]
    lines = [summary([r["ratio"] for r in results]) + ".", ""]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(cells(r, rows[r['name']], results))} |" for r in results]
    lines += ["", "Without their own row: " + summary([without(r, results) for r in results]) + ".", ""]
    lines += ["| table | where | date | hardware |", "|---|---|---|---|"]
    lines += [f"| {key} | {s['where']} | {s['date']} | {s['hardware']} |" for key, s in told["sources"].items()]
    notes = {name(row): row["note"] for row in told["row"] if "note" in row}
    lines += ["", "| row | note |", "|---|---|", *(f"| {key} | {note} |" for key, note in notes.items())]
    lines += ["", "| left out | why |", "|---|---|", *(f"| {key} | {why} |" for key, why in told["left_out"].items())]
    return "\n".join(lines)


def write(results: list[Row], told: Mapping[str, Any]) -> None:
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0] + BEGIN, END + text.partition(END)[2]
    PAGE.write_text(f"{head}\n\n{page(results, told)}\n\n{tail}")
    low, high = step_range([r["ratio"] for r in results])
    for machine in {r["cluster"] for r in results}:
        path = LIBRARY / f"{machine}.toml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith("step_range")]
        at = lines.index("[device]") - 1
        lines.insert(at, f"step_range = [{low}, {high}]  # docs/published.md: 10th to 90th percentile")
        path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose names contain it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; rows that it holds are not planned again")
    parser.add_argument("--write", action="store_true", help="write docs/published.md, and step_range of clusters")
    options = parser.parse_args()
    if options.write and options.rows:
        parser.error("--write is of all rows: leave --rows out")
    told = data()
    done: dict[str, Row] = {}
    if options.json is not None and options.json.exists():
        done = {r["name"]: r for r in json.loads(options.json.read_text())}
    planners = Planners(told["models"])
    wanted = {name(row): row for row in told["row"] if options.rows in name(row)}
    for key, row in wanted.items():
        if key not in done:
            done[key] = result(row, planners)
            print(f"{key}: {done[key]['ratio']:.3f}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(list(done.values()), indent=1) + "\n")
    results = [done[key] for key in wanted]
    Console(width=200).print(shown(results, wanted))
    print(summary([r["ratio"] for r in results]))
    print("without their own row:", summary([without(r, results) for r in results]))
    if options.write:
        write(results, told)


if __name__ == "__main__":
    main()
