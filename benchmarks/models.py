"""What works for which model: `python benchmarks/models.py [NAME ...] [--random N] [--gloo] [--dropout RATE]`.

For each model of `tests/support/zoo.py` (or those named): whether it exports, how its layers repeat, how long
planning takes, and whether loss, every gradient and every buffer of a step equal PyTorch's, under the
solver's plan, every preset and random plans, on meshes of (4,) and (2, 2) ranks. Ranks are simulated in
one process, or real with `--gloo`. With `--dropout` every dropout of a model has that rate, and steps
are compared with autopar's on one rank, whose random numbers are the same. Each model runs in a process
of its own. Writes JSON, and with `--docs` the table of `docs/models.md` or `docs/models-dropout.md`.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import multiprocessing
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is this file
sys.path[0] = str(ROOT / "tests/support")

MESHES: Mapping[str, dict[str, int]] = {"(4,)": {"a": 4}, "(2, 2)": {"dp": 2, "tp": 2}}
PRESETS = ("ddp", "fsdp", "megatron", "megatron_sp")
RANKS = 4
TOLERANCE = 1e-5
ENDING_SECONDS = 20.0
"""What a process that has sent its row may take to end its ranks and itself."""
SEED = 5

Row = dict[str, Any]


def measure(name: str, layers: int, randoms: int, gloo: bool, dropout: float, results: Any) -> None:
    """One model; sends a row, complete or up to what failed."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    row: Row = {"model": name, "layers": layers, "search_seconds": {}, "meshes": {}}
    try:
        _measure(row, name, layers, randoms, gloo, dropout)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
        row["traceback"] = traceback.format_exc()
    results.send(row)


def _measure(row: Row, name: str, layers: int, randoms: int, gloo: bool, dropout: float) -> None:
    import models
    import ranks

    from autopar.planning.planner import Planner

    case = _case(name, layers, dropout)
    expected = _alone(case) if dropout else models.eager(case)
    for title, mesh in MESHES.items():
        planner = Planner(case.model, mesh, case.args, case.kwargs, loss_fn=case.loss_fn)
        row.setdefault("capture_seconds", planner.seconds["capture"])
        row["nodes"] = len(planner.captured.graph.nodes)
        row["segments"] = [
            {"name": r.name, "copies": r.count, "nodes": len(r.copies[0]), "borders": len(r.borders)}
            for r in planner.segments.repeats
        ]
        row["rest_nodes"] = len(planner.segments.rest)
        row["without_rule"] = dict(planner.space.without_rule)
        there = row["meshes"][title] = {}
        plans: dict[str, Any] = {}
        for kind in ("dp", *PRESETS):
            there[kind] = _attempt(partial(_plan, planner, kind, plans))
        row["search_seconds"][title] = there["dp"].get("plan_seconds")
        for seed in range(randoms):
            there[f"random {seed}"] = _attempt(partial(_random, planner, seed, plans))
        if gloo:
            for by_kind in ranks.run(RANKS, _rank, name, layers, dropout, mesh, plans, timeout_seconds=600.0):
                for kind, step in by_kind.items():
                    error = step if isinstance(step, dict) else _errors(step, expected)
                    if error.get("error", math.inf) >= there[kind].get("error", 0.0):
                        there[kind] |= error
            continue
        for kind, plan in plans.items():
            there[kind] |= _attempt(partial(_simulated, partial(planner.program, plan), planner, case, expected))


def _case(name: str, layers: int, dropout: float) -> Any:
    import zoo

    case = zoo.case(name, layers)
    return zoo.dropping(case, dropout) if dropout else case


def _alone(case: Any) -> Any:
    """autopar's step on one rank."""
    import models

    from autopar.planning.planner import Planner

    planner = Planner(case.model, {"a": 1}, case.args, case.kwargs, loss_fn=case.loss_fn)
    return models.simulated(planner.program(planner.plan(solver="dp")), planner.captured, case, seed=_seed(case))


def _seed(case: Any) -> int:
    """What a step of `models.on_ranks` draws."""
    import torch

    torch.manual_seed(SEED)
    case.batch(0)
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))


def _attempt(function: Callable[[], Any]) -> Any:
    """What the function finds, or how it failed."""
    try:
        return function()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _plan(planner: Any, solver: str, plans: dict[str, Any]) -> Row:
    started = time.perf_counter()
    plans[solver] = planner.plan(solver=solver)
    return {"plan_seconds": time.perf_counter() - started}


def _random(planner: Any, seed: int, plans: dict[str, Any]) -> Row:
    import plans

    from autopar.planning.account import account
    from autopar.planning.request import Request
    from autopar.planning.search import SearchResult
    from autopar.solve.problem import Score

    assignment = plans.random_assignment(planner.space, seed)
    priced = account(planner.space, assignment)
    score = Score(seconds=priced.seconds, bytes=priced.bytes)
    solution = SearchResult(assignment=assignment, score=score, lower_bound=0.0, seconds=0.0)
    plans[f"random {seed}"] = planner.describe(solution, Request())
    return {}


def _simulated(program: Callable[[], Any], planner: Any, case: Any, expected: Any) -> Row:
    import models

    return _errors(models.simulated(program(), planner.captured, case, seed=_seed(case)), expected)


def _errors(step: Any, expected: Any) -> Row:
    """How far a step is from PyTorch's."""
    import models

    errors = models.differences(step, expected)
    worst = max(errors, key=lambda what: (errors[what] != errors[what], errors[what]))
    return {"worst": worst, "error": errors[worst]}


def _rank(name: str, layers: int, dropout: float, mesh: Mapping[str, int], plans: Mapping[str, Any]) -> dict[str, Any]:
    """A step under each plan, or how it failed: on all ranks alike."""
    import models
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.planning.planner import Planner
    from autopar.runtime.module import ParallelModule

    logging.disable(logging.WARNING)
    case = _case(name, layers, dropout)
    ranks_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    planner = Planner(case.model, mesh, case.args, case.kwargs, loss_fn=case.loss_fn)

    def step(plan: Any) -> Any:
        # each plan starts from the model's own buffers
        module = ParallelModule(copy.deepcopy(case.model), planner.captured, planner.program(plan), plan, ranks_mesh)
        torch.manual_seed(SEED)
        return models.on_ranks(module, case)

    return {kind: _attempt(partial(step, plan)) for kind, plan in plans.items()}


# ---- the table -------------------------------------------------------------------------------------


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, a column of `HEADER` each."""
    if "nodes" not in row:
        return (row["model"], f"no: {row['error'][:100]}", *[""] * 6)
    results = [(mesh, kind, r) for mesh, kinds in row["meshes"].items() for kind, r in kinds.items()]
    late = f" ({row['error'][:60]})" if "error" in row else ""
    return (
        row["model"],
        f"{row['nodes']} nodes, {row['capture_seconds']:.1f} s",
        ", ".join(f"{s['copies']} x {s['nodes']}" for s in row["segments"]) or "none",
        " / ".join("-" if s is None else f"{s:.1f}" for s in row["search_seconds"].values()) + late,
        _parity([r for r in results if r[1] == "dp"]),
        _parity([r for r in results if r[1] in PRESETS]),
        _parity([r for r in results if r[1].startswith("random")]),
        ", ".join(f"{count} x {op}" for op, count in row["without_rule"].items()) or "none",
    )


def _parity(results: Sequence[tuple[str, str, Row]]) -> str:
    """The largest error of all, or how many of them are wrong and the first of these."""
    if not results:
        return "-"
    wrong = [(mesh, kind, r) for mesh, kind, r in results if not r.get("error", float("nan")) <= TOLERANCE]
    if wrong:
        mesh, kind, first = wrong[0]
        why = first.get("failed") or f"{first['worst']} {first['error']:.1e}"
        return f"{len(wrong)} of {len(results)} wrong, {kind} on {mesh}: {why[:80]}"
    return f"{len(results)} x {max(r['error'] for _, _, r in results):.0e}"


SECONDS = "plans, s"
HEADER = ("model", "exports", "repeats", SECONDS, "solver", "presets", "random", "no rule")


def printed(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADER)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=200).print(table)


def page(rows: Sequence[Row], command: str, gloo: bool, dropout: float) -> str:
    """The table in markdown, under what it says."""
    kind = "real gloo ranks" if gloo else "ranks simulated in one process"
    layers = sorted({row["layers"] for row in rows})
    rate = f"every dropout at {dropout}" if dropout else "dropout 0"
    reference = "autopar on one rank" if dropout else "PyTorch on one device"
    # docs/models.md says how long plans take; dropout changes nothing about that
    kept = [number for number, name in enumerate(HEADER) if not (dropout and name == SECONDS)]
    head, *body = ([row[number] for number in kept] for row in (HEADER, *map(cells, rows)))
    lines = [
        "# Models with dropout" if dropout else "# Models",
        "",
        f"Made by `{command}`. Models of `transformers` at tiny sizes ({', '.join(map(str, layers))} layers of each "
        "stack) with random weights, unmodified, and two of `examples/`, "
        f"{rate}; how each is configured says `tests/support/zoo.py`.",
        "",
        "- *exports*: operators in the joint graph of forward and backward, and seconds to capture it;",
        "- *repeats*: copies x operators of what is planned once and used for all copies;",
        *([] if dropout else [f"- *plans*: seconds that the default solver takes on {' / '.join(MESHES)} ranks;"]),
        f"- *solver*, *presets* ({', '.join(PRESETS)}), *random*: how many plans were run on both meshes, on {kind}, "
        "and the largest difference of the loss, any other output, any gradient or any buffer from "
        f"{reference}, relative to the tensor's largest element (for gradients to a hundredth of the largest of all, "
        "where that is more);",
        "- *no rule*: operators that every rank computes in full.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all without one")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--random", type=int, default=10, help="random plans on each mesh")
    parser.add_argument("--gloo", action="store_true", help="on four processes")
    parser.add_argument("--dropout", type=float, default=0.0, help="the rate of every dropout")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a model")
    parser.add_argument("--json", type=Path, default=Path("models.json"))
    parser.add_argument("--docs", action="store_true", help="write docs/models.md")
    options = parser.parse_args()
    import zoo

    unknown = sorted(set(options.names) - set(zoo.ZOO))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(zoo.ZOO)}")
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    for name in options.names or zoo.ZOO:
        receiver, sender = context.Pipe(duplex=False)
        started = time.perf_counter()
        process = context.Process(
            target=measure, args=(name, options.layers, options.random, options.gloo, options.dropout, sender)
        )
        process.start()
        sender.close()
        row: Row = {"model": name, "layers": options.layers, "meshes": {}}
        try:
            row = receiver.recv() if receiver.poll(options.timeout) else {**row, "error": "not done in time"}
        except EOFError:
            row["error"] = "the process died"
        process.join(ENDING_SECONDS)
        process.kill()
        process.join()
        rows.append(row)
        print(f"[{time.perf_counter() - started:.0f} s] " + "; ".join(cells(row)), flush=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    printed(rows)
    if options.docs:
        arguments = ["--random", str(options.random), *(["--gloo"] if options.gloo else []), "--docs"]
        arguments += ["--dropout", str(options.dropout)] if options.dropout else []
        command = shlex.join(["python", "benchmarks/models.py", *options.names, *arguments])
        file = ROOT / "docs" / ("models-dropout.md" if options.dropout else "models.md")
        file.write_text(page(rows, command, options.gloo, options.dropout))


if __name__ == "__main__":
    main()
