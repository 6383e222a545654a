"""Memory and step time of a long run: `python benchmarks/soak.py [--steps N] [--solver NAME] [--json FILE]`.

A Llama of 2 layers, with dropout, trains 2,000 steps on 4 gloo ranks, on (2, 2). Each twentieth batch is smaller. Each
fifty steps it evaluates three batches, of which the last is smaller, every other time without labels, and each hundred
steps it saves a checkpoint and drops the last but one. At every fourth step each rank also takes the step in plain
PyTorch, so that what the machine does besides can be told from what the run does.

Prints, for each hundred steps, each rank's resident memory, and the medians of a step's seconds, of its seconds on a
processor, and of those over the plain ones. Resident memory also holds what glibc keeps of what was freed: in an arena
for each thread, unless `MALLOC_ARENA_MAX` says otherwise, which the benchmark sets to 1 if it is not set; and in pieces
between what is in use. So the benchmark also looks at what is allocated and not freed, and, after 200 steps and at the
end, at what is resident when glibc has given back what it can (`malloc_trim`).

Exits with 1 if, after 200 steps, one of these two grows by more than 2% on a rank, or the processor time of a step
does, both by itself and over the plain ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[0] = str(ROOT / "tests/support")

RANKS, MESH, WARM, MOST = 4, (2, 2), 200, 1.02
BATCH, LAST, SEQUENCE, VOCABULARY = 8, 5, 32, 64
EPOCH, EVALUATION, CHECKPOINT, CONTROL = 20, 50, 100, 4


class Mallinfo(ctypes.Structure):
    """Of `mallinfo2` in glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
    )]  # fmt: skip


@cache
def libc() -> Any:
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = Mallinfo
    return library


def memory() -> dict[str, int]:
    """Bytes that are resident, and those that have been allocated and not freed."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    info = libc().mallinfo2()
    return {"resident": 1024 * int(found[1]), "allocated": info.uordblks + info.hblkhd}


def batch(number: int, rows: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def step(model: Any, optimizer: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """Seconds, and seconds of all threads on a processor."""
    began = clocks()
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ended = clocks()
    return ended[0] - began[0], ended[1] - began[1]


def evaluate(model: Any, with_labels: bool) -> None:
    import torch

    model.eval()
    with torch.no_grad():
        for number, rows in enumerate((BATCH, BATCH, LAST)):
            inputs = batch(number, rows)
            if not with_labels:
                del inputs["labels"]
            model(**inputs)
    model.train()


def save(folder: Path, number: int, model: Any, optimizer: Any) -> None:
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=folder / f"{number}.part")
    if dist.get_rank() == 0:
        (folder / f"{number}.part").rename(folder / str(number))
        shutil.rmtree(folder / str(number - 2 * CHECKPOINT), ignore_errors=True)


def rank(folder: Path, steps: int, solver: str) -> list[dict[str, Any]]:
    """A row for each step."""
    import copy

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attention_dropout=0.1,
    )  # fmt: skip
    alone = LlamaForCausalLM(config).train()
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))
    model = autopar.parallelize(copy.deepcopy(alone), mesh, kwargs=batch(0, BATCH), solver=solver)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    rows = []
    for number in range(steps):
        is_last = (number + 1) % EPOCH == 0
        inputs = batch(number, LAST if is_last else BATCH)
        row: dict[str, Any] = {"last": is_last}
        row["seconds"], row["processor"] = step(model, optimizer, inputs)
        if (number + 1) % EVALUATION == 0:
            evaluate(model, with_labels=(number + 1) % (2 * EVALUATION) == 0)
        if (number + 1) % CHECKPOINT == 0:
            save(folder, number + 1, model, optimizer)
        if number % CONTROL == 0:
            row["plain_seconds"], row["plain_processor"] = step(alone, plain, inputs)
        row |= memory()
        if number + 1 in (WARM, steps):
            libc().malloc_trim(0)
            row["trimmed"] = memory()["resident"]
        rows.append(row)
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of a rank, over some steps: bytes, seconds, and processor time over that of a plain step."""
    whole = [row for row in rows if not row["last"]]
    middle = {name: statistics.median(row[name] for row in whole) for name in ("seconds", "processor")}
    plain = statistics.median(row["plain_processor"] for row in rows if "plain_processor" in row)
    held = {name: statistics.median(row[name] for row in rows) for name in ("resident", "allocated")}
    return held | middle | {"plain": plain, "over_plain": middle["processor"] / plain}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--solver", default="dp")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.steps < 4 * WARM:
        parser.error(f"--steps {options.steps}: give at least {4 * WARM}")
    if "MALLOC_ARENA_MAX" not in os.environ:  # glibc reads it as a process begins
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "MALLOC_ARENA_MAX": "1"})
    from ranks import run

    with tempfile.TemporaryDirectory() as folder:
        found = run(RANKS, rank, Path(folder), options.steps, options.solver, timeout_seconds=7200)
    print("  step   resident memory of each rank, MB                  step ms   processor ms   over plain")
    for end in range(CHECKPOINT, options.steps + 1, CHECKPOINT):
        of = [medians(rows[end - CHECKPOINT : end]) for rows in found]
        held = "".join(f"{each['resident'] / 1e6:10.1f}" for each in of)
        slowest = max(of, key=lambda each: each["seconds"])
        print(
            f"{end:6}{held}{slowest['seconds'] * 1e3:17.1f}{slowest['processor'] * 1e3:15.1f}"
            f"{statistics.mean(each['over_plain'] for each in of):13.2f}"
        )
    tenth = (options.steps - WARM) // 10
    first = [medians(rows[WARM : WARM + tenth]) for rows in found]
    last = [medians(rows[-tenth:]) for rows in found]
    grown = {name: [b[name] / a[name] for a, b in zip(first, last, strict=True)] for name in first[0]}
    grown["trimmed"] = [rows[-1]["trimmed"] / rows[WARM - 1]["trimmed"] for rows in found]
    for name, ratios in grown.items():
        print(f"{name:12} last tenth over first, by rank: {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
    if options.json:
        options.json.write_text(json.dumps({"grown": grown, "first": first, "last": last}, indent=1))
    is_flat = max(*grown["trimmed"], *grown["allocated"]) <= MOST
    is_steady = min(statistics.mean(grown[name]) for name in ("processor", "over_plain")) <= MOST
    return 0 if is_flat and is_steady else 1


if __name__ == "__main__":
    sys.exit(main())
