"""Every architecture of `transformers`: `python benchmarks/architectures.py [--only NAME ...] [--resume] [--jobs N]`.

Each model type gets its best class with a loss (one without: the squares of its outputs), is built at tiny size with
random weights (`tiny.py`), trains a step in eager PyTorch in float64 (float32 where that fails), and is captured,
planned by the solver, by `fsdp` and by `megatron` on 2 x 2 ranks, and run on these, simulated in one process. Loss,
outputs, every gradient and every buffer are compared with eager. A model that draws random numbers besides its
dropouts, which are 0, is compared with autopar's step on one rank, whose numbers are the same.

Each architecture has a process, a time and a memory limit of its own. Its row is appended to a file of JSON lines as
soon as it is known; with `--resume` what stands there is not run again. Ends with a table of outcomes.
`--until plan --sample 60` draws 60 of them, always the same, and says what planning takes after capture.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# before this folder, which has a `models` too
sys.path[:0] = [str(ROOT / "tests/support")] if str(ROOT / "tests/support") not in sys.path else []
sys.path += [str(ROOT / "benchmarks")] if str(ROOT / "benchmarks") not in sys.path else []

MESH = {"dp": 2, "tp": 2}
SOLVERS = ("dp", "fsdp", "megatron")
WAITING = 10
"""How many times its seconds of a processor a process may take on a busy machine."""
IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.export",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "autopar.api",
    "autopar.runtime.simulate",
)
"""What each process needs, imported once."""

OUTCOMES = (
    "equal in all three",
    "wrong",
    "crash",
    "no plan",
    "not planned in time",
    "refused",
    "runs on CUDA",
    "does not run on CUDA",
    "trains in eager",
    "captured",
    "equal as a graph",
    "planned",
    "cannot train in eager",
    "not done in time",
    "died",
)
"""What can come of an architecture. `refused`: capture says in one sentence why not. `crash`: an error that is no
ValueError. `runs on CUDA`: its programs have a kernel for every operator there, tried on fakes. `trains in eager`,
`captured`, `equal as a graph` (its program on one rank is) and `planned`: no more was asked for (`--until`)."""

QUIET = (
    "equal in all three",
    "runs on CUDA",
    "trains in eager",
    "captured",
    "equal as a graph",
    "planned",
    "cannot train in eager",
)
"""Outcomes with nothing to say besides."""

STAGES = ("eager", "capture", "graph", "plan", "cuda", "run")

Row = dict[str, Any]


# ---- in the process of one architecture ---------------------------------------------------------------


def measure(name: str, until: str, memory_bytes: int, seconds: int, results: Connection) -> None:
    """One architecture. Sends its row after each stage, so that a process that is ended has said how far it was."""
    os.setpgid(0, 0)
    # torch prints the graph of what it cannot export; what went wrong is in the row
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.dup2(silence, sys.stderr.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    row: Row = {"model": name, "stage": "eager", "seconds": {}}
    started = time.perf_counter()

    def entered(stage: str) -> None:
        nonlocal started
        now = time.perf_counter()
        row["seconds"][row["stage"]] = round(now - started, 2)
        row["stage"], started = stage, now
        results.send(row)

    results.send(row)
    import steps

    try:
        _measure(row, name, until, entered)
    except Exception as error:
        row["outcome"] = row.get("outcome") or "crash"
        row["error"] = steps.described(error)
        row["traceback"] = traceback.format_exc()[-3000:]
    entered("done")


def _measure(row: Row, name: str, until: str, entered: Any) -> None:
    import models
    import steps
    import tiny
    import torch
    import transformers
    from planning import cpu_seconds

    from autopar.planning.planner import Planner

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    architecture = next(a for a in tiny.architectures() if a.name == name)
    errors: list[str] = []
    trains = next(steps.training(architecture, errors), None)
    if trains is None:
        row |= {"outcome": "cannot train in eager", "error": errors[0] if errors else "no class", "errors": errors[:12]}
        return
    row |= trains.how
    case = trains.case
    if until == "eager":
        row["outcome"] = "trains in eager"
        return
    entered("capture")
    if until == "cuda":  # whose kernels are for float32
        case = models.in_dtype(case, torch.float32)
    try:
        began = cpu_seconds()
        planner = Planner(
            case.model, {"a": 1} if until == "graph" else MESH, case.args, case.kwargs, loss_fn=case.loss_fn
        )
        row["capture_seconds"] = round(cpu_seconds() - began, 2)
    except ValueError as error:
        row |= {"outcome": "refused", "error": steps.described(error), "traceback": traceback.format_exc()[-3000:]}
        return
    if until == "cuda":
        row |= {"nodes": len(planner.captured.graph.nodes), **_on_cuda(planner, entered)}
        return
    row |= {"nodes": len(planner.captured.graph.nodes), "without_rule": dict(planner.space.without_rule)}
    if until == "capture":
        row["outcome"] = "captured"
        return
    if until == "graph":
        entered("run")
        made = models.simulated(planner.program(planner.plan(solver="ddp")), planner.captured, case, seed=steps.SEED)
        differences = models.differences(made, trains.expected)
        worst = max(differences, key=lambda what: (differences[what] != differences[what], differences[what]))
        same = differences[worst] <= steps.TOLERANCE or trains.random
        row |= {"outcome": "equal as a graph" if same else "wrong", "worst": worst, "difference": differences[worst]}
        return
    if until == "plan":
        entered("plan")
        began = cpu_seconds()
        planner.program(planner.plan())
        row |= {"outcome": "planned", "planning_seconds": round(cpu_seconds() - began, 2)}
        return
    expected = trains.expected
    if trains.random:
        one = Planner(case.model, {"a": 1}, case.args, case.kwargs, loss_fn=case.loss_fn)
        expected = models.simulated(one.program(one.plan(solver="dp")), one.captured, case, seed=steps.SEED)
    plans: dict[str, Row] = row.setdefault("plans", {})
    for solver in SOLVERS:
        entered(f"plan {solver}")
        try:
            program = planner.program(planner.plan(solver=solver))
        except ValueError as error:
            plans[solver] = {"outcome": "no plan", "error": steps.described(error)}
            continue
        except Exception as error:
            plans[solver] = {
                "outcome": "crash",
                "error": steps.described(error),
                "traceback": traceback.format_exc()[-3000:],
            }
            continue
        entered(f"run {solver}")
        try:
            differences = models.differences(
                models.simulated(program, planner.captured, case, seed=steps.SEED), expected
            )
        except Exception as error:
            kind = "wrong" if isinstance(error, AssertionError) else "crash"
            plans[solver] = {
                "outcome": kind,
                "error": steps.described(error),
                "traceback": traceback.format_exc()[-3000:],
            }
            continue
        worst = max(differences, key=lambda what: (differences[what] != differences[what], differences[what]))
        equal = differences[worst] <= steps.TOLERANCE
        plans[solver] = {"outcome": "equal" if equal else "wrong", "worst": worst, "difference": differences[worst]}
        plans[solver]["differ"] = sum(not d <= steps.TOLERANCE for d in differences.values())
    kinds = {plan["outcome"] for plan in plans.values()}
    row["outcome"] = next((o for o in ("wrong", "crash", "no plan") if o in kinds), "equal in all three")


def _on_cuda(planner: Any, entered: Any) -> Row:
    """Whether programs run on fakes of a GPU."""
    from autopar.testing.devices import run_on_fakes

    for solver in SOLVERS:
        entered(f"run {solver}")
        try:
            run_on_fakes(planner.program(planner.plan(solver=solver)))
        except ValueError as error:
            return {"outcome": "does not run on CUDA", "error": f"{solver}: {error}"}
    return {"outcome": "runs on CUDA"}


# ---- the processes ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Running:
    """A process, and the last that it said."""

    process: Any
    receiver: Connection
    row: Row
    started: float


def sweep(names: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all, as they come, at most `options.jobs` at a time."""
    # a server that has imported what takes seconds to import
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    waiting, running = list(names), list[Running]()
    longest = WAITING * options.timeout
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(_start(context, waiting.pop(0), options))
            wait([r.receiver for r in running], timeout=1.0)
            for one in list(running):
                if _has_ended(one, longest):
                    running.remove(one)
                    yield _ended(one, longest)
    finally:
        for one in running:
            _end(one)


def _start(context: Any, name: str, options: argparse.Namespace) -> Running:
    receiver, sender = context.Pipe(duplex=False)
    memory = int(options.memory * 2**30)
    process = context.Process(target=measure, args=(name, options.until, memory, options.timeout, sender))
    process.start()
    sender.close()
    return Running(
        process=process, receiver=receiver, row={"model": name, "stage": "start"}, started=time.perf_counter()
    )


def _has_ended(one: Running, timeout: float) -> bool:
    try:
        while one.receiver.poll():
            one.row = one.receiver.recv()
    except EOFError:
        return True
    return one.row["stage"] == "done" or time.perf_counter() - one.started > timeout


def _ended(one: Running, timeout: float) -> Row:
    took = time.perf_counter() - one.started
    _end(one)
    late = took > timeout or one.process.exitcode == -signal.SIGXCPU
    row = one.row
    row["seconds_in_all"] = round(took, 1)
    if row["stage"] != "done":
        planning = "not planned in time" if row["stage"].startswith("plan") else "not done in time"
        row["outcome"] = planning if late else "died"
        row["error"] = f"in {row['stage']}, after {took:.0f} s"
    return row


def _end(one: Running) -> None:
    """Ends a process with those that it forked."""
    if one.row["stage"] != "done":
        try:
            os.killpg(one.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            one.process.kill()  # before it was the first of a group
    one.process.join()
    one.receiver.close()


# ---- what is shown ------------------------------------------------------------------------------------


def described(row: Mapping[str, Any]) -> str:
    """What came of it, in a line."""
    plans = row.get("plans", {})
    reasons = [
        f"{s}: {p['outcome']}, {p.get('error') or _worst(p)}" for s, p in plans.items() if p["outcome"] != "equal"
    ]
    if "error" in row:
        reasons.insert(0, row["error"])
    return f"{row['outcome']}{': ' if reasons else ''}{'; '.join(reasons)}"


def _worst(plan: Mapping[str, Any]) -> str:
    return f"{plan['worst']} by {plan['difference']:.1e} ({plan['differ']} differ)"


def printed(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=180)
    table = Table("outcome", "architectures", "which")
    for outcome in OUTCOMES:
        there = [row for row in rows if row["outcome"] == outcome]
        if there:
            table.add_row(outcome, str(len(there)), ", ".join(row["model"] for row in there))
    console.print(table)
    for row in rows:
        if row["outcome"] not in QUIET:
            console.print(f"{row['model']} ({row.get('class', '')}): {described(row)[:400]}", markup=False)
    seconds = [row["seconds_in_all"] for row in rows]
    planned = sorted((row["planning_seconds"], row["model"]) for row in rows if "planning_seconds" in row)
    if planned:
        of = [seconds for seconds, _ in planned]
        slowest = ", ".join(f"{model} {seconds:.1f}" for seconds, model in planned[:-6:-1])
        console.print(
            f"planned in seconds of a processor: median {statistics.median(of):.2f}, 95th percentile "
            f"{of[math.ceil(0.95 * len(of)) - 1]:.2f}; slowest: {slowest}"
        )
    if seconds:
        console.print(f"{len(rows)} architectures, {sum(seconds):.0f} s, {sum(seconds) / len(seconds):.1f} s each")


def read(file: Path) -> dict[str, Row]:
    """The last row of each architecture."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["model"]: row for row in map(json.loads, lines)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types, such as llama")
    parser.add_argument("--sample", type=int, help="so many of them, drawn with a fixed seed")
    parser.add_argument("--outcome", nargs="+", choices=OUTCOMES, help="run again those whose last row says this")
    parser.add_argument("--without-loss", action="store_true", help="model types without a loss, too")
    parser.add_argument("--resume", action="store_true", help="leave out those with a row")
    parser.add_argument("--until", choices=STAGES, default="run", help="the last that is tried; cuda: fakes of a GPU")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=150, help="seconds of a processor for an architecture")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB of addresses for an architecture")
    parser.add_argument("--rows", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--list", action="store_true", help="print what there is")
    parser.add_argument("--show", action="store_true", help="print the table of the rows that there are")
    options = parser.parse_args(arguments)
    import tiny

    rows = read(options.rows)
    if options.show:
        return printed(list(rows.values()))
    every = tiny.architectures()
    if unknown := sorted(set(options.only or ()) - {a.name for a in every}):
        parser.error(f"transformers has no {', '.join(unknown)}; --list prints what it has")
    names = options.only or [a.name for a in every if a.has_loss or options.without_loss]
    if options.outcome:
        names = [name for name in names if name in rows and rows[name]["outcome"] in options.outcome]
    elif options.resume:
        names = [name for name in names if name not in rows]
    if options.sample:
        names = random.Random(0).sample(names, min(options.sample, len(names)))
    if options.list:
        return print("\n".join(names))
    with options.rows.open("a") as file:
        for number, row in enumerate(sweep(names, options), 1):
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()
            rows[row["model"]] = row
            print(
                f"{number}/{len(names)} {row['model']} [{row['seconds_in_all']:.0f} s] {described(row)[:200]}",
                flush=True,
            )
    printed(list(rows.values()))


if __name__ == "__main__":
    # who ends the sweep ends its processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
