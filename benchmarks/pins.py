"""No better plan by pinning: `python benchmarks/pins.py [--model hf:GPT2Config --set n_layer=12] [--changes N] ...`.

The plan of README's 7B Llama, or of another model, is compared with those that a person might try instead: for each
parameter of a layer and outside of layers, and each placement on the mesh that it can take at rest, the plan with that
pin. Then, at random (fixed seed), one to eight sites of the free plan are changed to other options, and the steps of
what comes out are predicted by the timeline of the program of few copies. A table says the step of the free plan, and
what was shorter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planning import cpu_seconds

MESH = {"dp": 8, "tp": 8}
GAIN = 1e-3
"""A step is shorter if it is by this part."""


def planner_of(options: argparse.Namespace) -> Any:
    from autopar.cli.loading import load
    from autopar.planning.planner import Planner

    settings = {name: json.loads(value) for name, value in (one.split("=", 1) for one in options.set)}
    model = load(options.model, settings, batch=options.batch, sequence=options.seq, dtype="bfloat16")
    return Planner(model.model, MESH, kwargs=model.kwargs, cluster=options.cluster)


def pins(planner: Any) -> list[dict[str, dict[str, str]]]:
    """A pin of each placement on all axes for each parameter, those of all copies of a layer at once."""
    graph, every = planner.captured.graph, []
    names = {re.sub(r"\.\d+(?=\.)", ".*", name): value for name, value in graph.parameters.items()}
    for name, value in sorted(names.items()):
        texts = ("R", *(f"S({dim})" for dim in range(len(graph.metas[value].shape))))
        for placements in itertools.product(texts, repeat=len(MESH)):
            every.append({name: dict(zip(MESH, placements, strict=True))})
    return every


def pinned(planner: Any, free: Any, only: Sequence[str] | None) -> list[dict[str, Any]]:
    rows = []
    for pin in pins(planner):
        ((name, placements),) = pin.items()
        if only is not None and name not in only:
            continue
        row: dict[str, Any] = {"pin": f"{name}: {', '.join(f'{a}={p}' for a, p in placements.items())}"}
        began = cpu_seconds()
        try:
            plan = planner.plan(constraints=pin)
            row |= {"step_ms": plan.seconds * 1e3, "ratio": plan.seconds / free.seconds}
        except ValueError as error:
            row["error"] = str(error)[:200]
        rows.append(row | {"cpu_seconds": cpu_seconds() - began})
        if row.get("ratio", 1.0) < 1 - GAIN:
            print(f"{row['pin']}: {row['step_ms']:.3f} ms, {row['ratio']:.4f} of the free plan", flush=True)
    return rows


def changed(planner: Any, free: Any, number: int) -> list[dict[str, Any]]:
    """Random changes of one to eight sites, in all copies of a layer at once, that contradict nothing."""
    from autopar.planning.options import Options, joint

    space, draw = planner.space, random.Random(0)
    best, everything = planner.assignment(free), Options(space, {}, None).everything()
    before, _ = planner.steps.estimated_seconds(best, None)
    sites = [(None, site) for site in space.rest.sites.values()]
    sites += [(at, site) for at, body in enumerate(space.bodies) for site in body.sites.values()]
    rows: list[dict[str, Any]] = []
    while len(rows) < number:
        rest, copies, names = dict(best.rest), [[dict(one) for one in of] for of in best.copies], []
        for where, site in draw.sample(sites, draw.randint(1, 8)):
            options = [c for c in joint(site, everything[site.name], None) if space.option(site, c) is not None]
            option = draw.choice(options)
            names.append(f"{site.name}: {option}")
            for decisions in [rest] if where is None else copies[where]:
                decisions[site.name] = option
        try:
            seconds, _ = planner.steps.estimated_seconds(
                replace(best, rest=rest, copies=tuple(tuple(of) for of in copies)), None
            )
        except ValueError as error:
            rows.append({"changes": names, "error": str(error)[:200]})
            continue
        rows.append({"changes": names, "ratio": seconds / before})
        if seconds < before * (1 - GAIN):
            print(f"{'; '.join(names)}: {seconds / before:.4f} of the free plan", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:LlamaConfig")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the model's configuration")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--changes", type=int, default=200, help="how many random changes are tried")
    parser.add_argument("--only", nargs="*", help="parameters that are pinned, such as lm_head.weight (none: all)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    planner = planner_of(options)
    free = planner.plan()
    print(f"free plan: {free.seconds * 1e3:.3f} ms, {free.bytes / 1e9:.2f} GB", flush=True)
    by_pin = pinned(planner, free, options.only)
    by_change = changed(planner, free, options.changes)
    for what, rows in (("pins", by_pin), ("random changes", by_change)):
        ratios = [row["ratio"] for row in rows if "ratio" in row]
        shorter = sum(ratio < 1 - GAIN for ratio in ratios)
        least = f"{min(ratios):.4f}" if ratios else "-"
        print(f"{what}: {len(ratios)} plans, {len(rows) - len(ratios)} refused, {shorter} shorter; shortest {least}")
    if options.json:
        options.json.write_text(
            json.dumps({"step_ms": free.seconds * 1e3, "pins": by_pin, "changes": by_change}, indent=1)
        )


if __name__ == "__main__":
    main()
