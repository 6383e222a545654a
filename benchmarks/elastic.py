"""A run that is killed at random steps, and goes on with other numbers of ranks: `python benchmarks/elastic.py`.

examples/elastic.py trains on 4 ranks, and is started again on 3, on 8, on 2 and on 4. In a random step of each start, a
random rank gets SIGKILL, and all end. After the last death torchrun starts the four again itself (`--max-restarts`).
Another run, on one rank, is left alone. The batch has 24 rows on any number of ranks, and the model is float64, with
dropout.

Prints a row for each start: the ranks, as what mesh, the steps, how far their losses are from those of the run that was
left alone, which rank was killed, and the seconds from the death before to the first step. Exits with 1 if a loss is
off by more than 1e-6, or a step is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "elastic.py"
LINE = re.compile(r"step (\d+): loss (\S+), (.*) ranks")
RANKS = (4, 3, 8, 2, 4)
TOLERANCE = 1e-6


@dataclass(kw_only=True)
class Start:
    """What became of the ranks of one start: a random one is killed after the step `dies_after`, if there is one."""

    ranks: int
    dies_after: int | None
    mesh: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    killed_rank: int | None = None
    first_step_at: float = 0.0
    killed_at: float = 0.0


def train(folder: Path, starts: list[Start], steps: int, every: int, rng: random.Random) -> None:
    """What one command of torchrun starts, and starts again, on as many ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(starts[0].ranks),
        "--max-restarts", str(len(starts) - 1), str(SCRIPT), "--folder", str(folder), "--dtype", "float64",
        "--steps", str(steps), "--every", str(every),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        folder.with_suffix(".errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        current, *later = starts
        assert process.stdout is not None
        for found in filter(None, map(LINE.search, process.stdout)):
            step, loss, mesh = int(found[1]), float(found[2]), found[3]
            if current.killed_rank is not None and step <= max(current.losses):
                current, *later = later
            if not current.losses:
                current.mesh, current.first_step_at = mesh, time.monotonic()
            current.losses[step] = loss
            if step == current.dies_after:
                time.sleep(rng.uniform(0.0, 0.2))  # within a step, or while it is saved
                current.killed_rank, current.killed_at = kill_one_of(process.pid, rng), time.monotonic()
        failed = process.wait() != 0
    if failed != (starts[-1].dies_after is not None):
        sys.exit(
            f"torchrun has {'failed' * failed or 'not failed'}:\n{folder.with_suffix('.errors').read_text()[-4000:]}"
        )


def kill_one_of(launcher: int, rng: random.Random) -> int:
    """Kills one of the processes that torchrun started; its rank."""
    found = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for pid in map(int, found):
        rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
        if rank is not None:
            ranks[int(rank[1])] = pid
    rank = rng.choice(sorted(ranks))
    os.kill(ranks[rank], signal.SIGKILL)
    return rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    deaths = sorted(rng.sample(range(1, options.steps - 1), len(RANKS)))
    killed = [Start(ranks=ranks, dies_after=step) for ranks, step in zip(RANKS, deaths, strict=True)]
    last = [killed[-1], Start(ranks=RANKS[-1], dies_after=None)]
    alone = Start(ranks=1, dies_after=None)
    with tempfile.TemporaryDirectory() as place:
        train(Path(place, "alone"), [alone], options.steps, options.steps, rng)
        for starts in (*([one] for one in killed[:-1]), last):
            train(Path(place, "killed"), starts, options.steps, options.every, rng)
    rows, before = [], 0.0
    print("ranks  as       steps     largest difference  killed           restart")
    for start in (*killed, last[-1]):
        off = max(abs(loss - alone.losses[step]) for step, loss in start.losses.items())
        seconds = start.first_step_at - before if before else None
        row = {"ranks": start.ranks, "mesh": start.mesh, "first_step": min(start.losses), "difference": off}
        row |= {"last_step": max(start.losses), "killed_rank": start.killed_rank, "restart_seconds": seconds}
        rows.append(row)
        before = start.killed_at
        span = f"{row['first_step']} to {row['last_step']}"
        how = f"rank {start.killed_rank}, step {row['last_step']}" if start.killed_rank is not None else ""
        after = "" if seconds is None else f"{seconds:.1f} s"
        print(f"{start.ranks:5}  {start.mesh:7}  {span:8}  {off:18.1e}  {how:15}  {after:>7}", flush=True)
    done = {step for start in (*killed, *last) for step in start.losses} == set(range(options.steps))
    worst = max(row["difference"] for row in rows)
    first, end = alone.losses[0], alone.losses[options.steps - 1]
    print(f"{options.steps} steps, loss {first:.3f} to {end:.3f}; off by {worst:.1e} at most from the run left alone")
    if options.json:
        result = {"steps": options.steps, "every": options.every, "starts": rows, "largest_difference": worst}
        options.json.write_text(json.dumps({**result, "losses": [first, end]}, indent=1))
    return 0 if done and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
