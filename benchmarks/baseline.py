"""What planning costs and predicts, to hold a change against: CPU seconds, steps and peaks of five sets of plans.

    python benchmarks/baseline.py --out before.json                       # of this checkout
    python benchmarks/baseline.py --out after.json --against before.json  # and beside an earlier one
    python benchmarks/baseline.py --out after.json --against benchmarks/baseline.json  # of a9d65ef, on two busy cores

The sets: the golden plans (`tests/golden.py`); six models on two clusters, without a limit and within one that binds;
Llama-3-8B with 32 layers on 8 x 8 and 4 x 4 x 4 by default, within 60 and within 30 GB (`planning.py`); the models of
`today.py`; and 60 architectures of `transformers` at tiny sizes (`architectures.py`). CPU seconds are those of a
processor, forked processes included; those of a golden plan and of a model on a cluster are without its capture, which
plans of one model share. The table has a line for each set: the sum of CPU seconds, and beside an earlier file the
ratio of the sums, the largest ratio of one case, and which steps and peaks are others.
`--out` is read where it exists, and only what it lacks is measured: so two checkouts may take turns on one machine.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planning import cpu_seconds
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
TINY = 60
ALIKE = 5e-4
"""Up to which part a step or peak is the same: files hold four digits."""

CELL_MESH = {"dp": 8, "tp": 8}
CELL_CLUSTERS = ("dgx-h100", "perlmutter")
CELL_MODELS: Mapping[str, tuple[str, Mapping[str, Any], int]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 8}, 4096),
    "gpt2": ("GPT2Config", {"n_layer": 12}, 1024),
    "bert": ("BertConfig", {}, 512),
    "t5": ("T5Config", {}, 512),
    "mixtral": ("MixtralConfig", {"num_hidden_layers": 4}, 2048),
    "gemma2": ("Gemma2Config", {"num_hidden_layers": 8}, 2048),
}
"""Name -> configuration of `transformers`, what is changed of it, and the sequence length."""

CELL_LIMITS = {"llama": 6e9, "gpt2": 1.1e9, "bert": 0.42e9, "t5": 0.9e9, "mixtral": 4.5e9, "gemma2": 10e9}
"""Bytes: about two thirds of the peak without a limit."""

Row = dict[str, Any]


def golden() -> Iterator[Row]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from golden import GOLDENS, captured, planner

    for name, plan in GOLDENS.items():
        captured(plan.model)
        began = cpu_seconds()
        try:
            found = planner(plan.model, plan.mesh).plan(solver=plan.solver, memory_limit_bytes=plan.limit)
        except ValueError as error:
            yield {"case": name, "error": str(error), "cpu_seconds": cpu_seconds() - began}
        else:
            took = cpu_seconds() - began
            yield {"case": name, "cpu_seconds": took, "step_seconds": found.seconds, "peak_bytes": found.bytes}


def large() -> Iterator[Row]:
    for row in _ran("planning.py", "--layers", "32", "--limits", "default", "60", "30")["rows"]:
        mesh = "x".join(map(str, row["mesh"].values()))
        yield {
            "case": f"{mesh}, {row['limit']}",
            "cpu_seconds": row["cpu_seconds"],
            **_predicted(row, "predicted_step_seconds", "predicted_peak_bytes"),
        }


def today() -> Iterator[Row]:
    for row in _ran("today.py")["rows"]:
        cpu = row.get("capture_seconds", 0.0) + row.get("plan_seconds", 0.0)
        yield {"case": row["model"], "cpu_seconds": cpu, **_predicted(row, "step_seconds", "step_bytes")}


def tiny() -> Iterator[Row]:
    for row in _ran("architectures.py", "--sample", str(TINY), "--until", "plan", "--jobs", "1", option="--rows"):
        cpu = row.get("capture_seconds", 0.0) + row.get("planning_seconds", 0.0)
        yield {"case": row["model"], "cpu_seconds": cpu, "outcome": row["outcome"]}


def cells() -> Iterator[Row]:
    """Six models on two clusters, without a limit and within limits that bind (`docs/decisions/starts.md`)."""
    from autopar.cli.loading import load
    from autopar.planning.planner import Planner

    for name, (config, settings, sequence) in CELL_MODELS.items():
        loaded = load(f"hf:{config}", dict(settings), batch=64, sequence=sequence, dtype="bfloat16")
        made = Planner(loaded.model, CELL_MESH, loaded.args, loaded.kwargs, cluster="dgx-h100")
        for cluster in CELL_CLUSTERS:
            for limit in (math.inf, CELL_LIMITS[name]):
                began = cpu_seconds()
                row: Row = {"case": f"{name}, {cluster}, {limit / 1e9:g} GB"}
                try:
                    plan = made.on(CELL_MESH, cluster).plan(memory_limit_bytes=limit)
                except ValueError as error:
                    row["error"] = str(error)
                else:
                    row |= {"step_seconds": plan.seconds, "peak_bytes": plan.bytes}
                yield {**row, "cpu_seconds": cpu_seconds() - began}


SETS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "golden": golden,
    "large": large,
    "today": today,
    "tiny": tiny,
    "cells": cells,
}


def _predicted(row: Row, step: str, peak: str) -> Row:
    if step not in row:
        return {"error": row.get("error", "no plan")}
    return {"step_seconds": row[step], "peak_bytes": row.get(peak)}


def _ran(script: str, *arguments: str, option: str = "--json") -> Any:
    """What a benchmark writes into its file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        subprocess.run([sys.executable, HERE / script, *arguments, option, file], check=True, stdout=sys.stderr)
        text = file.read_text()
    return [*map(json.loads, text.splitlines())] if option == "--rows" else json.loads(text)


def beside(rows: Mapping[str, Row], earlier: Mapping[str, Row]) -> list[str]:
    """Cells of the table: the ratio of all CPU seconds, the largest of one case, and what is predicted otherwise."""
    both = [name for name in rows if name in earlier]
    if not both:
        return ["-", "-", "nothing in common"]
    sums = [sum(found[name]["cpu_seconds"] for name in both) for found in (rows, earlier)]
    ratios = {name: rows[name]["cpu_seconds"] / max(earlier[name]["cpu_seconds"], 0.1) for name in both}
    worst = max(both, key=lambda name: ratios[name])
    others = [f"{name}: {what}" for name in both for what in _differences(rows[name], earlier[name])]
    return [f"{sums[0] / max(sums[1], 0.1):.2f}", f"{ratios[worst]:.2f} ({worst})", "; ".join(others) or "nothing"]


def _differences(now: Row, then: Row) -> Iterator[str]:
    for key, word in (("step_seconds", "step"), ("peak_bytes", "peak")):
        one, other = now.get(key), then.get(key)
        if one is not None and other is not None and abs(one - other) > ALIKE * other:
            yield f"{word} x {one / other:.3f}"
    for key in ("error", "outcome"):
        if now.get(key) != then.get(key):
            yield f"{then.get(key) or 'a plan'} -> {now.get(key) or 'a plan'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what planning costs and predicts.")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, and to go on with")
    parser.add_argument("--against", type=Path, help="an earlier file")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), help="these sets alone")
    options = parser.parse_args()
    found: dict[str, dict[str, Row]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only:
        if name not in found:
            found[name] = {row.pop("case"): row for row in SETS[name]()}
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    earlier = json.loads(options.against.read_text()) if options.against else {}
    heads = ("ratio", "largest ratio", "predicted otherwise") if earlier else ()
    table = Table("set", "cases", "CPU s", *heads)
    for name in options.only:
        rows = found[name]
        seconds = sum(row["cpu_seconds"] for row in rows.values())
        cells = beside(rows, earlier.get(name, {})) if earlier else []
        table.add_row(name, str(len(rows)), f"{seconds:.0f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
