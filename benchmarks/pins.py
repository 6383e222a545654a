"""No better plan by pinning: `python benchmarks/pins.py [--model hf:GPT2Config --set n_layer=12] [--changes N] ...`.

The plan of README's 7B Llama, of another model, or of each of the golden plans' models on three clusters (`--golden`),
is compared with those that a person might try instead. For each parameter of a layer and outside of layers, and each
placement on the mesh that it can take at rest: the plan with that pin. Then, at random (fixed seed): where descents end
that start from random decisions, and what comes of the plan if one to eight of its sites take other options, in all
copies of a layer at once. Steps of these are predicted by the timeline. A table says the step of the plan, how many
others were tried, and how long the shortest of them is beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from planning import cpu_seconds

ROOT = Path(__file__).parent.parent
MESH = {"dp": 8, "tp": 8}
CLUSTERS = ("dgx-h100", "perlmutter", "v100-nvlink")
GAIN = 1e-3
"""A step is shorter if it is by this part."""
KINDS = ("pins", "restarts", "changes")

Row = dict[str, Any]


def planner_of(options: argparse.Namespace) -> Any:
    from autopar.cli.loading import load
    from autopar.planning.planner import Planner

    settings = {name: json.loads(value) for name, value in (one.split("=", 1) for one in options.set)}
    model = load(options.model, settings, batch=options.batch, sequence=options.seq, dtype="bfloat16")
    return Planner(model.model, MESH, kwargs=model.kwargs, cluster=options.cluster)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of a model and a cluster, and what makes the planner."""
    if options.golden is None:
        yield f"{options.model} {options.cluster}", partial(planner_of, options)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    import golden

    if unknown := set(options.golden) - golden.MODELS.keys():
        raise SystemExit(f"--golden: no model is called {', '.join(sorted(unknown))}: {', '.join(golden.MODELS)}")
    for model, cluster in itertools.product(options.golden or golden.MODELS, CLUSTERS):
        yield f"{model} {cluster}", lambda m=model, c=cluster: golden.captured(m).on(MESH, c)


def pins(planner: Any) -> list[dict[str, dict[str, str]]]:
    """A pin of each placement on all axes for each parameter, those of all copies of a layer at once."""
    graph, every = planner.captured.graph, []
    names = {re.sub(r"\.\d+(?=\.)", ".*", name): value for name, value in graph.parameters.items()}
    for name, value in sorted(names.items()):
        texts = ("R", *(f"S({dim})" for dim in range(len(graph.metas[value].shape))))
        for placements in itertools.product(texts, repeat=len(MESH)):
            every.append({name: dict(zip(MESH, placements, strict=True))})
    return every


def pinned(planner: Any, free: Any, only: Sequence[str] | None) -> Iterator[Row]:
    for pin in pins(planner):
        ((name, placements),) = pin.items()
        if only is not None and name not in only:
            continue
        row: Row = {"what": f"{name}: {', '.join(f'{a}={p}' for a, p in placements.items())}"}
        began = cpu_seconds()
        try:
            row["ratio"] = planner.plan(constraints=pin).seconds / free.seconds
        except ValueError as error:
            row["error"] = str(error)[:200]
        yield row | {"cpu_seconds": cpu_seconds() - began}


class Timed:
    """Steps of assignments beside the plan's, and what the search's objective says of both."""

    def __init__(self, planner: Any, free: Any) -> None:
        from autopar.planning.steps import NEAR, QUICK

        self.planner, self.best, self.quick = planner, planner.assignment(free), QUICK
        self.before = planner.evaluate(self.best, QUICK).seconds
        self.hidden = planner.evaluate(self.best, NEAR).hidden_part
        self.priced = self.objective(self.best)

    def objective(self, assignment: Any) -> float:
        """Seconds at the prices of the plan's timeline. Raises ValueError for decisions that contradict each other."""
        from autopar.planning.account import account

        return account(self.planner.searches.hiding(self.hidden), assignment).seconds

    def row(self, what: str, assignment: Any) -> Row:
        row: Row = {"what": what, "objective_ratio": self.objective(assignment) / self.priced}
        return row | {"ratio": self.planner.evaluate(assignment, self.quick).seconds / self.before}

    def differing(self, assignment: Any) -> str:
        """The sites that decide otherwise than the plan, in the rest and in the middle copies of layers."""
        told = []
        for (where, ours), (_, theirs) in zip(_parts(self.best), _parts(assignment), strict=True):
            told += [f"{where}{name}: {ours[name]} -> {theirs[name]}" for name in ours if ours[name] != theirs[name]]
        return "; ".join(told)


def _parts(assignment: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", assignment.rest
    for number, copies in enumerate(assignment.copies):
        yield f"layer {number} ", copies[len(copies) // 2]


def choices_of(planner: Any) -> dict[str, list[Any]]:
    """Site -> the options that it may take wherever it stands; those of joined borders are the same."""
    from autopar.passes.space.sites import joined_sites
    from autopar.planning.options import Options, joint

    space, choices = planner.space, {}
    everything = Options(space, {}, None).everything()
    for name, sites in joined_sites(space.regions(), space.twins).items():
        offered = joint(sites[0], everything[name], None)
        choices[name] = [c for c in offered if all(space.option(site, c) is not None for site in sites)]
    return choices


def restarted(planner: Any, timed: Timed, number: int) -> Iterator[Row]:
    """Where descents end that start from random decisions, all copies alike."""
    from autopar.planning.request import Request

    space, draw, choices = planner.space, random.Random(1), choices_of(planner)
    joined = space.twins
    for at in range(number):
        search = planner.search(Request(), planner.searches.hiding(timed.hidden))
        start = {name: [_plain(draw, of_site)] for name, of_site in choices.items()}
        for names in dict.fromkeys(joined.values()):
            start.update(dict.fromkeys(names, start[names[0]]))
        descent = search.descent
        try:
            found = descent.descend(start, descent.axes(), purse=descent.purse(descent.effort.descents))
        except ValueError as error:
            yield {"what": f"start {at}", "error": str(error)[:200]}
            continue
        yield timed.row(f"start {at}", found.assignment) | {"differing": timed.differing(found.assignment)}


def _plain(draw: random.Random, choices: Sequence[Any]) -> Any:
    """An option without partial sums or rows that travel to their experts, of which many starts would contradict each
    other."""
    plain = [c for c in choices if not any(on_axis.is_partial or on_axis.routes for on_axis in c.axes)]
    return draw.choice(plain or list(choices))


def changed(planner: Any, timed: Timed, number: int) -> Iterator[Row]:
    """Random changes of one to eight sites, in all copies of a layer and at both ends of a run at once, that contradict
    nothing."""

    draw, choices, best = random.Random(0), choices_of(planner), timed.best
    joined, names = planner.space.twins, list(choices)
    tried = 0
    while tried < number:
        changes: dict[str, Any] = {}
        for name in draw.sample(names, draw.randint(1, 8)):
            changes.update(dict.fromkeys(joined.get(name, (name,)), draw.choice(choices[name])))

        def with_changes(decisions: Mapping[str, Any], changes: Mapping[str, Any] = changes) -> dict[str, Any]:
            return {name: changes.get(name, choice) for name, choice in decisions.items()}

        assignment = replace(
            best, rest=with_changes(best.rest), copies=tuple(tuple(map(with_changes, of)) for of in best.copies)
        )
        what = "; ".join(f"{name}: {choice}" for name, choice in changes.items())
        try:
            timed.objective(assignment)
        except ValueError:
            continue  # a reader cannot have what it would need: another draw
        tried += 1
        yield timed.row(what, assignment) | {"differing": timed.differing(assignment)}


def told(rows: Iterator[Row], kind: str) -> list[Row]:
    """The rows; those that are shorter are printed as they come."""
    kept = []
    for row in rows:
        kept.append(row)
        if row.get("ratio", 1.0) < 1 - GAIN:
            priced = f", {row['objective_ratio']:.4f} by the objective" if "objective_ratio" in row else ""
            differing = f": {row['differing']}" if "differing" in row else ""
            print(f"  {kind}: {row['what']}: {row['ratio']:.4f} of the plan's step{priced}{differing}", flush=True)
    return kept


def measure(planner: Any, options: argparse.Namespace) -> Row:
    free = planner.plan()
    print(f"  plan: {free.seconds * 1e3:.3f} ms, {free.bytes / 1e9:.2f} GB", flush=True)
    timed = Timed(planner, free)
    by_pin = pinned(planner, free, options.only) if options.golden is None else iter(())
    rows = {
        "pins": told(by_pin, "pin"),
        "restarts": told(restarted(planner, timed, options.restarts), "restart"),
        "changes": told(changed(planner, timed, options.changes), "change"),
    }
    return {"step_ms": free.seconds * 1e3, **rows}


def line(case: str, row: Row) -> tuple[str, ...]:
    cells = [case, f"{row['step_ms']:.3f} ms"]
    for kind in KINDS:
        ratios = [one["ratio"] for one in row[kind] if "ratio" in one]
        shorter = sum(ratio < 1 - GAIN for ratio in ratios)
        cells += [f"{len(ratios)}, {shorter} shorter", f"{min(ratios):.4f}"] if ratios else ["-", "-"]
    return tuple(cells)


def main() -> None:
    from autopar.report.rendering import rendered
    from autopar.report.sections import Grid, Section

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:LlamaConfig")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the model's configuration")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--golden", nargs="*", metavar="NAME", help="these models of the golden plans, or all of them")
    parser.add_argument("--changes", type=int, default=200, help="how many random changes are tried")
    parser.add_argument("--restarts", type=int, default=30, help="how many random starts are tried")
    parser.add_argument("--only", nargs="*", help="parameters that are pinned, such as lm_head.weight (none: all)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, lines = {}, [("model and cluster", "step", *(cell for kind in KINDS for cell in (kind, "shortest")))]
    for case, make in cases(options):
        print(case, flush=True)
        began = time.perf_counter()
        rows[case] = measure(make(), options)
        lines.append(line(case, rows[case]))
        print("  " + "  ".join(lines[-1]) + f"  ({time.perf_counter() - began:.0f} s)", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    heads, *others = lines
    print(rendered([Section("", [Grid(heads, others, keys=0)])], 1000))


if __name__ == "__main__":
    main()
