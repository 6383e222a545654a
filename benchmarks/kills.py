"""A run that is killed ten times, beside one that is not: `python benchmarks/kills.py [--json FILE]`.

The README's Llama, with dropout, trains 200 steps on ten batches, on (2, 2) under `torchrun --max-restarts`, and saves
a checkpoint every four steps. Ten times, at a random moment of a random step, a random rank gets SIGKILL. torchrun then
starts all ranks again, which go on from the last checkpoint. It is compared with the same run without kills, and with
one on (4,) that starts from the killed run's checkpoint after half of the steps.

Prints a row for each death: the step, the rank, whether a checkpoint was being written, how many of the others had an
error, and the seconds until the first and the last of these errors, until torchrun had started ranks again, and until
the next step was done. Exits with 1 if a loss of the killed run (also of a step that it took twice) has other bits than
that of the run without kills, if one on (4,) is off by more than 1e-6 of it, or if a rank had no error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RANKS, EVERY, BATCHES, BATCH, SEQUENCE, VOCABULARY = 4, 4, 10, 8, 32, 256
EVENTS = "events.jsonl"


# -- on a rank


class Log:
    """A file of lines, to which all ranks of all attempts add."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.descriptor = os.open(folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.of = {"rank": rank, "attempt": attempt}

    def write(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "at": time.time(), **self.of, **more})
        os.write(self.descriptor, (line + "\n").encode())


def worker(folder: Path, shape: tuple[int, ...], steps: int, deaths: list[tuple[int, int, float]]) -> None:
    """A user's script. `deaths` has the step, the rank, and the seconds after the step began, of each attempt."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar

    # torchrun asks the others to end once it sees that a rank has died; they are to say why they fail, as they would
    # where that one was on another machine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    autopar.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = Log(folder, rank, attempt)
    log.write("started")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False, attention_dropout=0.1,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    plans = map(autopar.Plan.load, sorted(folder.glob("step-??????/plan.json"))[-1:])
    plan = next((plan for plan in plans if tuple(plan.mesh.values()) == shape), None)
    model = autopar.parallelize(LlamaForCausalLM(config).train(), mesh, kwargs=batch(0), plan=plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)
    first = autopar.load(folder, model, optimizer)
    log.write("ready", step=first)
    doing = ["step"]
    try:
        for step in range(first, steps):
            if deaths and step >= deaths[attempt][0] and rank == deaths[attempt][1] and len(doing) == 1:
                doing.append("dies")
                threading.Timer(deaths[attempt][2], die, (log, step, doing)).start()
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                log.write("step", step=step, loss=loss.item())
            if (step + 1) % EVERY == 0:
                doing[0] = "checkpoint"
                autopar.save(folder, model, optimizer, step=step + 1, keep=steps)
                doing[0] = "step"
    except Exception as error:
        log.write("error", kind=type(error).__name__)
        raise
    dist.destroy_process_group()


def die(log: Log, step: int, doing: list[str]) -> None:
    log.write("death", step=step, doing=doing[0])
    os.kill(os.getpid(), signal.SIGKILL)


def batch(step: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step % BATCHES))
    return {"input_ids": ids, "labels": ids}


# -- around them


def launched(folder: Path, shape: tuple[int, ...], steps: int, deaths: list[tuple[int, int, float]]) -> None:
    given = json.dumps({"folder": str(folder), "shape": shape, "steps": steps, "deaths": deaths})
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", str(len(deaths)), __file__, "--worker", given,
    ]  # fmt: skip
    with (folder / "output").open("w") as output:
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    if ended.returncode:
        sys.exit(f"torchrun ended with {ended.returncode}:\n{(folder / 'output').read_text()[-4000:]}")


def events(folder: Path, what: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / EVENTS).read_text().splitlines())
    return [line for line in lines if line["what"] == what]


def losses(folder: Path) -> dict[int, set[float]]:
    """Step -> each loss that an attempt had there."""
    found: dict[int, set[float]] = {}
    for line in events(folder, "step"):
        found.setdefault(line["step"], set()).add(line["loss"])
    return found


def survived(folder: Path) -> list[dict[str, Any]]:
    """A row for each death."""
    rows = []
    for death in events(folder, "death"):
        attempt, at = death["attempt"], death["at"]
        errors = [line for line in events(folder, "error") if line["attempt"] == attempt]
        started, ready, done = (
            [line for line in events(folder, what) if line["attempt"] > attempt]
            for what in ("started", "ready", "step")
        )
        rows.append({
            "step": death["step"], "rank": death["rank"], "doing": death["doing"],
            "errors": len(errors), "kinds": sorted({line["kind"] for line in errors}),
            "first_error_seconds": min((line["at"] for line in errors), default=at) - at,
            "last_error_seconds": max((line["at"] for line in errors), default=at) - at,
            "again_seconds": started[0]["at"] - at,
            "ready_seconds": ready[0]["at"] - at,
            "from_step": ready[0]["step"],
            "next_step_seconds": done[0]["at"] - at,
        })  # fmt: skip
    return rows


def drawn(rng: random.Random, kills: int, steps: int) -> list[tuple[int, int, float]]:
    """The step, the rank and the delay of each death."""
    at = sorted(rng.sample(range(1, steps - EVERY), kills))
    return [(step, rng.randrange(RANKS), rng.uniform(0.0, 0.3)) for step in at]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        given = json.loads(options.worker)
        worker(Path(given["folder"]), tuple(given["shape"]), given["steps"], given["deaths"])
        return 0
    deaths = drawn(random.Random(options.seed), options.kills, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        killed, whole, other = (Path(folder, name) for name in ("killed", "whole", "other"))
        for path in (killed, whole, other):
            path.mkdir()
        launched(killed, (2, 2), options.steps, [*deaths, (options.steps, 0, 0.0)])
        launched(whole, (2, 2), options.steps, [])
        half = options.steps // 2 // EVERY * EVERY
        shutil.copytree(killed / f"step-{half:06}", other / f"step-{half:06}")
        launched(other, (4,), options.steps, [])
        rows, found, expected, elsewhere = survived(killed), losses(killed), losses(whole), losses(other)
    right = {step: min(values) for step, values in expected.items()}
    same = sum(found[step] == {right[step]} for step in right)
    off = {step: abs(min(values) - right[step]) / abs(right[step]) for step, values in elsewhere.items()}
    print("  step  rank  during      errors (others)  first error  last error  ranks again  next step")
    for row in rows:
        print(
            f"{row['step']:6}{row['rank']:6}  {row['doing']:10}{row['errors']:9} of {RANKS - 1}"
            f"{row['first_error_seconds']:13.2f} s{row['last_error_seconds']:10.2f} s{row['again_seconds']:11.2f} s"
            f"{row['next_step_seconds']:9.2f} s",
            flush=True,
        )
    result = {
        "deaths": rows, "steps": options.steps, "steps_with_the_same_bits": same,
        "steps_on_the_other_mesh": len(off), "largest_difference_on_the_other_mesh": max(off.values()),
        "losses": [right[0], right[options.steps - 1]],
        "median_seconds_to_the_first_error": statistics.median(row["first_error_seconds"] for row in rows),
        "median_seconds_to_the_next_step": statistics.median(row["next_step_seconds"] for row in rows),
    }  # fmt: skip
    print(
        f"{same} of {options.steps} steps have the bits of the run without kills (loss {right[0]:.4f} to "
        f"{right[options.steps - 1]:.4f}); on (4,), from step {half}, off by {max(off.values()):.1e} at most"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    all_said = [row["errors"] for row in rows] == [RANKS - 1] * options.kills
    return 0 if same == options.steps and max(off.values()) <= 1e-6 and all_said else 1


if __name__ == "__main__":
    sys.exit(main())
