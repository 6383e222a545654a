"""Generated programs beside eager: how many are right, refused, wrong, crash or hang, by the kinds of their statements.

    python benchmarks/generated.py --programs 20000 --jobs 2 --out generated.jsonl --findings found
    python benchmarks/generated.py --again found/wrong_01.py --mesh a=2,b=2 --plan "random 17"

A program is a model and what trains it, drawn by `tests/support/generator.py` from tables of what people write; three
steps of it are compared with eager PyTorch under random plans on simulated ranks, in slices and chunks too, and as a
parallel module (`tests/support/generator_programs.py`). Each seed is a line of `--out`, and a run with the same file
goes on from there. A failure is shrunk to few statements, and `--findings` holds a file that runs for each that is no
repetition.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import torch
from generator import KINDS, OPERATORS, PYTHON, Program, Unfit, built, drawn, shrunk, why_invalid, without
from generator_programs import FAILURES, Outcome, again, is_same, one_rank, outcomes, script, worst

from autopar.cli.common import mesh_shape

WALL_SECONDS = 900.0
"""After which a process that has not answered is ended: its program hangs where no signal reaches it."""

PROGRAMS_OF_A_PROCESS = 300
"""After which a process gives way to a new one: PyTorch keeps some of what each program made."""

PROGRAMS_OF_A_COLLECTION = 10
"""After which garbage is looked for."""

REPEATED = 2
"""How many failures with the same kinds of statements are shrunk."""

Result = dict[str, Any]


# --------------------------------------------------------------------------------------------------- one process's work


def of_seed(seed: int, options: argparse.Namespace) -> Program:
    """The program of a seed; with `--alone`, one statement among operators, of each kind by turns."""
    if not options.alone:
        return drawn(seed, only=options.kinds)
    names = list(options.kinds or PYTHON)
    return drawn(seed, must=names[seed % len(names)], only=OPERATORS, most=3)


def tried(seed: int, known: Mapping[tuple[str, ...], int], options: argparse.Namespace) -> Result:
    """The outcome of the program of a seed, and, if it fails in another way than is known, a smaller one that does."""
    started = time.process_time()
    try:
        program = of_seed(seed, options)
    except Unfit as error:
        return {"seed": seed, "outcome": "unfit", "reason": str(error)[:300], "kinds": [], "plans": 0, "seconds": 0.0}
    found = list(outcomes(program, seed, effort=1 + (seed % options.thorough == 0)))
    failed = worst(found)
    result = {
        "seed": seed, "kinds": sorted(program.kinds), "plans": len(found), "outcome": failed.kind,
        "reason": failed.reason, "message": failed.message[:1000], "mesh": failed.mesh, "plan": failed.plan,
        "seconds": time.process_time() - started,
    }  # fmt: skip
    if failed.kind in FAILURES:
        result |= {"source": program.source, "smallest": smallest(program, failed, known, options.shrink_seconds)}
    return result


def smallest(
    program: Program, failed: Outcome, known: Mapping[tuple[str, ...], int], seconds: float
) -> dict[str, Any] | None:
    """The failure with few statements; None where without those of known failures it is none."""
    mesh = mesh_shape(failed.mesh) if "=" in failed.mesh else {"a": 2}
    budget = 20.0 if failed.kind == "hang" else 60.0

    def fails(smaller: Program) -> bool:
        return is_same(again(smaller, mesh, failed.plan, budget), failed)

    explained = [kinds for kinds in known if kinds[0] == failed.kind and program.kinds.issuperset(kinds[1:])]
    full = [kinds for kinds in explained if known[kinds] >= REPEATED]
    if full and program.tree is not None:
        with contextlib.suppress(Exception):
            rest = built(without(program.tree, frozenset().union(*(kinds[1:] for kinds in full)) - COMMON))
            if why_invalid(rest) or not fails(rest):
                return None
            program = rest
    if not seconds or not fails(program):  # under another plan before it, or in another state of the process
        return {"script": script(program, failed), "kinds": [failed.kind, *sorted(program.kinds)], "shrunk": False}
    small = shrunk(program, fails, seconds)
    last = again(small, mesh, failed.plan, budget)
    kinds = sorted(small.kinds - COMMON) or sorted(small.kinds)
    return {"script": script(small, last), "kinds": [failed.kind, *kinds], "shrunk": True}


COMMON = frozenset({"rows", "square"})
"""Kinds that shrinking ends with."""


def work(job: int, channel: Connection, options: argparse.Namespace) -> None:
    """Answers seeds with results until it is told to end."""
    if hasattr(os, "sched_setaffinity"):
        there = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {there[job % len(there)]})
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    gc.disable()  # programs make many objects, and few cycles
    with one_rank():
        for count in itertools.count(1):
            if (request := channel.recv()) is None:
                break
            channel.send(tried(*request, options))
            if count % PROGRAMS_OF_A_COLLECTION == 0:
                gc.collect()


# ----------------------------------------------------------------------------------------------------- all processes


class Process:
    """A process that tries programs one after the other."""

    def __init__(self, job: int, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.job, self.options, self.count, self.seed, self.since = job, options, 0, -1, time.monotonic()
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(job, theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, seed: int, known: Mapping[tuple[str, ...], int]) -> None:
        self.seed, self.since, self.count = seed, time.monotonic(), self.count + 1
        self.channel.send((seed, dict(known)))

    def answer(self) -> Result | None:
        """What it found, if it has; a process that ended or that hangs is a result too."""
        try:
            if self.channel.poll():
                return self.channel.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self._lost("crash", f"the process ended with {self.process.exitcode}")
        if time.monotonic() - self.since > WALL_SECONDS:
            self.process.kill()
            return self._lost("hang", f"no answer in {WALL_SECONDS:g} s")
        return None

    def _lost(self, kind: str, reason: str) -> Result:
        self.count = PROGRAMS_OF_A_PROCESS  # what ended one process is not drawn in this one, which it would end too
        return {
            "seed": self.seed, "kinds": [], "plans": 0, "outcome": kind, "reason": reason, "message": reason,
            "mesh": "-", "plan": "-", "seconds": 0.0,
        }  # fmt: skip

    @property
    def is_spent(self) -> bool:
        return self.count >= PROGRAMS_OF_A_PROCESS

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


def run(options: argparse.Namespace) -> list[Result]:
    """Results of all seeds, in their file."""
    path: Path = options.out
    results: list[Result] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {result["seed"] for result in results}
    seeds = iter([s for s in range(options.seed, options.seed + options.programs) if s not in done])
    findings = Findings(options.findings)
    for result in results:
        findings.add(result, write=False)
    processes = [Process(job, options) for job in range(options.jobs)]
    waiting: list[Process] = []
    with path.open("a") as file:
        for process in processes:
            if (seed := next(seeds, None)) is not None:
                process.ask(seed, findings.known)
                waiting.append(process)
        while waiting:
            wait([process.channel for process in waiting], timeout=5)
            for process in list(waiting):
                if (result := process.answer()) is None:
                    continue
                waiting.remove(process)
                results.append(result)
                findings.add(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
                if len(results) % 100 == 0:
                    print(f"{len(results)} programs: {_counts(results)}", file=sys.stderr, flush=True)
                if process.is_spent:
                    process.end()
                    process = Process(process.job, options)
                if (seed := next(seeds, None)) is not None:
                    process.ask(seed, findings.known)
                    waiting.append(process)
                else:
                    process.end()
    return results


class Findings:
    """Failures that are no repetitions, by the kinds of their statements, each a file of a folder if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.known: dict[tuple[str, ...], int] = {}
        self.sources: set[str] = set()

    def add(self, result: Result, write: bool = True) -> None:
        found = result.get("smallest")
        if found is None:
            return
        kinds = tuple(found["kinds"])
        source = re.sub(r"\d+", "0", found["script"].partition("\n\n")[2])
        if source in self.sources:
            return
        self.sources.add(source)
        self.known[kinds] = number = self.known.get(kinds, 0) + 1
        if not write:
            return
        print(f"{', '.join(kinds)} (seed {result['seed']}): {result['message'][:200]}", file=sys.stderr, flush=True)
        if self.folder is not None and number <= REPEATED:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "_", "_".join(kinds))[:80]
            (self.folder / f"{name}_{number}.py").write_text(found["script"])


# ------------------------------------------------------------------------------------------------------------ the table


OUTCOMES = ("right", "refused", "wrong", "crash", "hang")


def _counts(results: Iterable[Result]) -> str:
    counts = Counter(result["outcome"] for result in results)
    return ", ".join(f"{counts[kind]} {kind}" for kind in (*OUTCOMES, "unfit") if counts[kind])


def report(results: Sequence[Result]) -> str:
    """Outcomes by kind of statement, reasons of refusals, and failures by what they hold when shrunk."""
    seconds, plans = (sum(result[key] for result in results) for key in ("seconds", "plans"))
    lines = [f"{len(results)} programs, {plans} plans, {seconds:.0f} s of processor time: {_counts(results)}", ""]
    lines.append(f"{'programs with':42}" + "".join(f"{kind:>9}" for kind in OUTCOMES))
    for name in sorted(KINDS):
        of_kind = Counter(result["outcome"] for result in results if name in result["kinds"])
        if of_kind:
            lines.append(f"{name:42}" + "".join(f"{of_kind[kind] or '':>9}" for kind in OUTCOMES))
    for heading, kinds in (("refused", ("refused",)), ("failed", FAILURES), ("unfit", ("unfit",))):
        reasons = Counter(result["reason"] for result in results if result["outcome"] in kinds)
        first = {result["reason"]: result["seed"] for result in reversed(results) if result["outcome"] in kinds}
        lines += ["", f"{heading}, {len(reasons)} reasons:"]
        lines += [f"{count:6}  {reason} (seed {first[reason]})" for reason, count in reasons.most_common()]
    faults: Counter[tuple[str, ...]] = Counter()
    seeds: dict[tuple[str, ...], int] = {}
    for result in results:
        if (found := result.get("smallest")) is not None:
            faults[tuple(found["kinds"])] += 1
            seeds.setdefault(tuple(found["kinds"]), result["seed"])
    lines += ["", f"failures that were shrunk, {len(faults)} by their statements:"]
    lines += [f"{count:6}  {', '.join(kinds)} (seed {seeds[kinds]})" for kinds, count in faults.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="The first program's.")
    parser.add_argument("--out", type=Path, default=Path("generated.jsonl"))
    parser.add_argument("--findings", type=Path, help="A folder for failures that were shrunk.")
    parser.add_argument("--kinds", nargs="*", default=(), choices=sorted(KINDS), help="No others are drawn.")
    parser.add_argument("--alone", action="store_true", help="One statement that is no operator in each, of each kind.")
    parser.add_argument("--thorough", type=int, default=20, help="One of so many programs is tried under many plans.")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="Of processor time, for a failure.")
    parser.add_argument("--print", type=int, help="Print the program of a seed.")
    parser.add_argument("--again", type=Path, help="Run a program that was written down, under one plan.")
    parser.add_argument("--mesh", default="a=2")
    parser.add_argument("--plan", default="random 0", help='"random 7", "sliced 7", "dp", "capture", "module" ...')
    options = parser.parse_args()
    if options.print is not None:
        print(of_seed(options.print, options).source)
        return 0
    if options.again is not None:
        found = again(Program(options.again.read_text()), mesh_shape(options.mesh), options.plan)
        print(f"{found.kind}: {found.message}")
        return int(found.kind in FAILURES)
    results = run(options)
    print(report(results))
    return int(any(result["outcome"] in FAILURES for result in results))


if __name__ == "__main__":
    sys.exit(main())
