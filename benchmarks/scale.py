"""Planning at scale: `python benchmarks/scale.py [--restarts N] [--layers N] [--limit GB] [--only CASE ...]`.

Llama-3-70B's shape (bf16, sequence 8192, batch 64) from a model on meta, for 1024 devices of cluster dgx-h100: on the
mesh {"dp": 16, "x": 4, "y": 4, "z": 4}, without ("free") and with ("limited") a memory limit, each beside the best of
random restarts, which are given ten times as long; and with the mesh chosen too ("auto"). Seconds are after capture.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.passes.space.choices import KEEP, REGATHER, REPLICATED, SiteChoice
from autopar.passes.space.problem import Assignment
from autopar.passes.space.sites import Region
from autopar.passes.space.space import Space
from autopar.planning.meshes import meshes
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import Request
from autopar.solve.problem import Infeasible

MESH = {"dp": 16, "x": 4, "y": 4, "z": 4}
TIMES_AS_LONG = 10
CASES = ("free", "limited", "auto")
TRIES = 20


def captured(layers: int) -> Planner:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, rope_theta=500000.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(64, 8192, dtype=torch.long)
    return Planner(model, MESH, kwargs={"input_ids": tokens, "labels": tokens}, cluster="dgx-h100")


def scattered(space: Space, rng: random.Random) -> Assignment:
    """Every site whole or split at random on each axis, all copies alike."""
    borders: dict[str, SiteChoice] = {}
    for repeat in space.repeats:
        for border in repeat.borders:
            site = next(s for s in space.rest.sites.values() if s.name == f"{border.values[0]}|border")
            choice = _random(space, space.rest, site.name, rng)
            borders.update({f"{value}|border": choice for value in border.values})

    def decisions(region: Region) -> dict[str, SiteChoice]:
        return {name: borders.get(name) or _random(space, region, name, rng) for name in region.sites}

    bodies = [(decisions(region), repeat.count) for region, repeat in zip(space.bodies, space.repeats, strict=True)]
    return Assignment(rest=decisions(space.rest), copies=tuple((body,) * count for body, count in bodies))


def _random(space: Space, region: Region, name: str, rng: random.Random) -> SiteChoice:
    site = region.sites[name]
    policy = rng.choice((KEEP, REGATHER)) if site.kind == "parameter" else ""
    for _ in range(TRIES):
        parts = [[c for c in site.choices[n] if c == REPLICATED or c.splits] for n in space.mesh]
        choice = SiteChoice(tuple(map(rng.choice, parts)), policy)
        if space.option(site, choice) is not None:
            return choice
    return space.replicated(site)


def restarts(planner: Planner, limit: float | None, count: int, seconds: float) -> dict[str, Any]:
    """The best of descents from random starts, as seconds of the objective."""
    best, restarted, started = math.inf, 0, time.perf_counter()
    while restarted < count and time.perf_counter() - started < seconds:
        search = planner.search(Request(memory_limit_bytes=limit))
        start = scattered(planner.space, random.Random(restarted))
        restarted += 1
        try:
            best = min(best, search.run(start=start, bounded=False, thorough=False).score.objective)
        except Infeasible:
            continue
    return {"restarts": restarted, "best_seconds": best, "restarts_took_seconds": time.perf_counter() - started}


def planned(planner: Planner, limit: float | None) -> tuple[Plan, dict[str, Any]]:
    """The plan of the objective, in which nothing overlaps, then the one with overlaps in it, as people get it."""
    before, cpu, started = dict(planner.seconds), time.process_time(), time.perf_counter()
    plan = planner.plan(memory_limit_bytes=math.inf if limit is None else limit)
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    phases = {k: v - before.get(k, 0.0) for k, v in planner.seconds.items() if v > before.get(k, 0.0)}
    serial = planner.plan(cost="serial", memory_limit_bytes=math.inf if limit is None else limit)
    return plan, {
        "seconds": took,
        "cpu_seconds": cpu,
        "phases": phases,
        "step_seconds": plan.seconds,
        "objective_seconds": serial.objective_seconds,
        "lower_bound_seconds": serial.lower_bound_seconds,
        "gap": serial.gap,
        "peak_bytes": plan.bytes,
    }


def on_the_mesh(case: str, layers: int, limit: float | None, count: int) -> dict[str, Any]:
    planner = captured(layers)
    _, row = planned(planner, limit)
    reached = restarts(planner, limit, count, TIMES_AS_LONG * row["seconds"]) if count else {"restarts": 0}
    return {"case": case, "mesh": MESH, "limit_bytes": limit, **row, **reached}


def on_any_mesh(layers: int) -> dict[str, Any]:
    planner = captured(layers)
    candidates = meshes(math.prod(MESH.values()))
    cpu, started = time.process_time(), time.perf_counter()
    plan = planner.over(candidates, Request(memory_limit_bytes=math.inf))
    return {
        "case": "auto",
        "mesh": dict(plan.mesh),
        "meshes": len(candidates),
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "step_seconds": plan.seconds,
        "objective_seconds": plan.objective_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "peak_bytes": plan.bytes,
        "restarts": 0,
    }


def line(row: dict[str, Any]) -> str:
    mesh = "x".join(map(str, row["mesh"].values()))
    best = f"{row['best_seconds'] * 1e3:.1f} ({row['restarts']})" if row["restarts"] else "-"
    seconds = f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}"
    objective = f"{row['objective_seconds'] * 1e3:.1f}", f"{row['gap']:.1%}"
    cells = (row["case"], mesh, *seconds, *objective, best, f"{row['step_seconds'] * 1e3:.1f}")
    cells = (*cells, f"{row['peak_bytes'] / 1e9:.1f}")
    return "  ".join(f"{cell:>13}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=30)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--limit", type=float, default=40.0, help="GB a device")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path, default=Path("scale.json"))
    options = parser.parse_args()
    header = ("case", "mesh", "seconds", "cpu seconds", "objective ms", "gap", "restarts ms", "step ms", "peak GB")
    print("  ".join(f"{cell:>13}" for cell in header), flush=True)
    rows = []
    for case in options.only:
        limit = options.limit * 1e9 if case == "limited" else None
        if case == "auto":
            row = on_any_mesh(options.layers)
        else:
            row = on_the_mesh(case, options.layers, limit, options.restarts)
        rows.append(row)
        print(line(row), flush=True)
        if "phases" in row:
            print(
                "    " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in row["phases"].items()), flush=True
            )
        data = {"processor": platform.processor(), "layers": options.layers, "rows": rows}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
