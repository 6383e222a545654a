"""Generated models beside eager: how many programs are equal, refused, wrong, crash or hang.

    python benchmarks/generated.py --programs 20000 --jobs 2 --out generated.json
    python benchmarks/generated.py --spec "Spec(family='chain', ...)" --mesh a=2,b=2 --plan "random 17"

A program is one plan of one model on one mesh, executed in float64 on simulated ranks and compared with eager PyTorch
(`tests/generator.py` draws the models, `tests/generator_programs.py` runs them). Hypothesis draws batches of models,
each with a seed of its own; the first failure of a kind that was not seen is shrunk, and printed with what runs it
again. `--out` is written after each batch, and a run with the same file goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import generator
import torch
from generator import FAMILIES, Spec, build, specs
from generator_programs import FAILURES, Outcome, named, outcomes
from hypothesis import HealthCheck, Phase, given, seed, settings

from autopar.cli.common import mesh_shape
from autopar.testing import Trial

BATCH = 20
"""Models of a batch."""


class Failed(Exception):
    """A failure of a kind that was not seen before."""


class Batch:
    """The models of one seed."""

    def __init__(self, number: int, earlier: set[str], families: Sequence[str], shrink_seconds: float) -> None:
        self.number, self.earlier, self.families, self.shrink_seconds = number, earlier, families, shrink_seconds
        self.counts: Counter[str] = Counter()
        self.refused: dict[str, list[Any]] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.shrinking: str | None = None
        self.until = 0.0
        self.seen: dict[Spec, Outcome | None] = {}
        self.models = 0

    def run(self) -> None:
        @seed(self.number)
        @settings(
            max_examples=BATCH,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(specs(families=self.families))
        def one(spec: Spec) -> None:
            if (signature := self.failing(spec)) is not None:
                raise Failed(signature)

        with contextlib.suppress(Failed):  # it is among the failures
            one()

    def failing(self, spec: Spec) -> str | None:
        """What is new about a model that fails; while that is shrunk, what is the same."""
        if self.shrinking is not None:
            return self.shrink(spec)
        self.models += 1
        failed: Outcome | None = None
        for outcome in outcomes(spec, self.number + self.models):
            self.counts[f"{spec.family} {outcome.kind}"] += 1
            if outcome.kind in ("refused", "invalid"):
                entry = self.refused.setdefault(outcome.signature, [0, outcome.message, repr(spec)])
                entry[0] += 1
            if outcome.kind in FAILURES:
                signature = outcome.signature
                entry = self.failures.setdefault(signature, {"count": 0, **_reproducer(spec, outcome)})
                entry["count"] += 1
                if signature not in self.earlier and failed is None and self.shrink_seconds:
                    failed = outcome
        if failed is not None:
            self.earlier.add(failed.signature)
            print(f"  new: {failed.signature}\n    {_shown(_reproducer(spec, failed))}", file=sys.stderr, flush=True)
            self.shrinking, self.until = failed.signature, time.process_time() + self.shrink_seconds
            self.draws = self.number + self.models
            self.seen[spec] = failed
        return self.shrinking

    def shrink(self, spec: Spec) -> str | None:
        """Fails where a smaller model has the same failure under one of the same draws of plans."""
        if spec not in self.seen:
            if time.process_time() > self.until:
                return None
            alike = (o for o in outcomes(spec, self.draws) if o.signature == self.shrinking)
            self.seen[spec] = next(alike, None)
        outcome = self.seen[spec]
        if outcome is not None and self.shrinking is not None:
            self.failures[self.shrinking].update(_reproducer(spec, outcome))
            return self.shrinking
        return None


def _reproducer(spec: Spec, outcome: Outcome) -> dict[str, Any]:
    return {"spec": repr(spec), "mesh": outcome.mesh, "plan": outcome.plan, "message": outcome.message[:1000]}


def _shown(failure: dict[str, Any]) -> str:
    return f'--spec "{failure["spec"]}" --mesh {failure["mesh"]} --plan "{failure["plan"]}"'


def _alone(job: int) -> None:
    """On one processor this process plans all by itself, and its processor time is that of its programs."""
    if hasattr(os, "sched_setaffinity"):
        there = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {there[job % len(there)]})
    torch.set_num_threads(1)


def work(
    job: int, numbers: list[int], programs: int, path: Path, families: Sequence[str], shrink_seconds: float
) -> None:
    """Batches until there are so many programs; what they report is in a file after each."""
    _alone(job)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"batches": {}}
    earlier = {signature for batch in report["batches"].values() for signature in batch["failures"]}
    done = sum(sum(batch["counts"].values()) for batch in report["batches"].values())
    for number in numbers:
        if done >= programs:
            return
        if str(number) in report["batches"]:
            continue
        started = time.process_time()
        batch = Batch(number, earlier, families, shrink_seconds)
        batch.run()
        report["batches"][str(number)] = {
            "counts": dict(batch.counts),
            "refused": batch.refused,
            "failures": batch.failures,
            "models": batch.models,
            "seconds": time.process_time() - started,
        }
        path.write_text(json.dumps(report))
        done += sum(batch.counts.values())
        print(f"batch {number}: {sum(batch.counts.values())} programs, {done} in all", file=sys.stderr, flush=True)
        for signature, failure in batch.failures.items():
            print(f"  {failure['count']} {signature}\n    {_shown(failure)}", file=sys.stderr, flush=True)


def report(batches: list[dict[str, Any]]) -> str:
    """Counts by family and outcome, what was refused, and what runs each failure again."""
    counts: Counter[str] = Counter()
    refused: dict[str, list[Any]] = {}
    failures: dict[str, dict[str, Any]] = {}
    for batch in batches:
        counts.update(batch["counts"])
        for signature, (count, *described) in batch["refused"].items():
            refused.setdefault(signature, [0, *described])[0] += count
        for signature, failure in batch["failures"].items():
            kept = failures.setdefault(signature, {**failure, "count": 0})
            kept["count"] += failure["count"]
            if len(failure["spec"]) < len(kept["spec"]):
                kept.update({key: failure[key] for key in ("spec", "mesh", "plan", "message")})
    seconds, models = (sum(batch[key] for batch in batches) for key in ("seconds", "models"))
    total = sum(counts.values())
    lines = [f"{total} programs of {models} models, {total / max(seconds, 1e-9):.1f} a second of processor time"]
    kinds = sorted({name.split()[1] for name in counts})
    for family in sorted({name.split()[0] for name in counts}):
        lines.append(f"{family:8}" + "".join(f"  {kind} {counts[f'{family} {kind}']}" for kind in kinds))
    lines.append(
        "all     " + "".join(f"  {k} {sum(n for name, n in counts.items() if name.endswith(k))}" for k in kinds)
    )
    lines.append(f"\nrefused, {len(refused)} messages:")
    lines += [f"{count:6}  {described[:300]}" for count, described, _ in sorted(refused.values(), reverse=True)]
    lines.append(f"\nfailures, {len(failures)} kinds:")
    for failure in sorted(failures.values(), key=lambda f: -f["count"]):
        lines.append(f"{failure['count']:6}  {failure['message'][:400]}\n        {_shown(failure)}")
    return "\n".join(lines)


def again(text: str, mesh: str, plan: str) -> int:
    """One program once more, or the model's capture."""
    spec: Spec = eval(text, vars(generator))
    built = build(spec)
    print(built.model)
    trial = Trial(built.model, built.args, loss_fn=built.loss_fn, steps=spec.steps)
    print(trial.captured.graph)
    if mesh == "-":
        return 0
    row = named(trial, mesh_shape(mesh), plan)
    print(row)
    return 0 if row is None or row.equal else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("generated.json"))
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument(
        "--shrink-seconds", type=float, default=90.0, help="Of processor time, for each new kind of failure."
    )
    parser.add_argument("--spec", help="Run one program again: that of this model.")
    parser.add_argument("--mesh", default="a=2,b=2")
    parser.add_argument("--plan", default="dp")
    given_ = parser.parse_args()
    if given_.spec is not None:
        return again(given_.spec, given_.mesh, given_.plan)
    share = -(-given_.programs // given_.jobs)
    paths = [given_.out.with_suffix(f".{job}.json") for job in range(given_.jobs)]
    context = multiprocessing.get_context("spawn")
    workers = []
    for job, path in enumerate(paths):
        numbers = [1000 * (given_.seed + job + given_.jobs * k) for k in range(share)]
        work_of = (job, numbers, share, path, given_.families, given_.shrink_seconds)
        workers.append(context.Process(target=work, args=work_of))
        workers[-1].start()
    for worker in workers:
        worker.join()
    batches = [batch for path in paths if path.exists() for batch in json.loads(path.read_text())["batches"].values()]
    print(report(batches))
    failed = any(batch["failures"] for batch in batches) or any(worker.exitcode for worker in workers)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
