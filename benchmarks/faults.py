"""Faults of one rank among four, drawn at random: what becomes of the others, and how long it takes.

    .venv/bin/python benchmarks/faults.py [--count 20] [--seed 1]

The faults are those of tests/runtime/test_handshake.py (a rank that evaluates alone, that swallows an error, that is
stopped), on random meshes, presets, ranks and steps, with a timeout of 2 s. Every rank must end with an error, and none
hang.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "runtime")]
import test_handshake as handshake
from ranks import outcomes

RANKS = 4


def faulty(name: str, odd: int, shape: tuple[int, ...], solver: str, steps: int) -> None:
    handshake.ODD = odd
    dist.distributed_c10d._set_pg_timeout(handshake.TIMEOUT)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    module = autopar.parallelize(
        handshake.mlp(), mesh, (handshake.BATCH,), loss_fn=handshake.mean_square, solver=solver
    )
    for _ in range(steps):
        handshake.step(module)
    handshake.FAULTS[name][0](module)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, hung = random.Random(options.seed), 0
    for _ in range(options.count):
        name, odd = rng.choice(list(handshake.FAULTS)), rng.randrange(RANKS)
        solver, shape = rng.choice(["ddp", "fsdp", "megatron"]), rng.choice([(2, 2), (4,), (1, 4)])
        began = time.monotonic()
        found = outcomes(RANKS, faulty, name, odd, shape, solver, rng.randrange(4), timeout_seconds=60.0)
        seconds = time.monotonic() - began
        ended = [not (outcome.error is None or isinstance(outcome.error, TimeoutError)) for outcome in found]
        hung += not all(ended)
        kinds = ", ".join(type(outcome.error).__name__ for outcome in found)
        print(f"rank {odd} {name}, {solver} on {shape}: {seconds:.1f} s, {kinds}", flush=True)
    print(f"{options.count} faults, {hung} in which a rank hung or went on")
    return int(hung > 0)


if __name__ == "__main__":
    sys.exit(main())
