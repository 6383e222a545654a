"""Narrow travel beside float32: `sudo .venv/bin/python benchmarks/narrow.py [--steps 200] [--json narrow.json]`.

A Llama trains by FSDP on two gloo ranks of `autopar lab`, each way of travelling by itself: gathers of parameters in
bfloat16 and in float8, reductions of gradients in bfloat16, and both. Two tables. On links of 200 Mbit/s: the bytes of
a step's collectives, its seconds and its peak, predicted from the lab's calibrated cluster file and measured (medians
of the slowest rank; the most bytes of tensors alive at once). On fast links: the mean loss of the last 20 steps on a
text, after a half of them and after all, beside one process in float32, with the same batches. Each way is also checked
against one process by `verify=`, which knows what travels.

Exits with 1 if a way's last loss is 2% above that of one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[0] = str(Path(__file__).parent)

from lab import CELLS, TIMEOUT_SECONDS, Cell, calibrated, in_turns, model_of, steps_of, training_step  # noqa: E402

from autopar.extras import lab  # noqa: E402

WAYS: Mapping[str, Mapping[str, str]] = {
    "float32": {},
    "gather bfloat16": {"gather_dtype": "bfloat16"},
    "gather float8": {"gather_dtype": "float8_e4m3fn"},
    "reduce bfloat16": {"reduce_dtype": "bfloat16"},
    "both bfloat16": {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "float8, bfloat16": {"gather_dtype": "float8_e4m3fn", "reduce_dtype": "bfloat16"},
}
TOLERANCE = 0.02
"""The most by which a way's last loss may lie above that of float32, as a part of it."""
MEANS = 20
SPEED = replace(CELLS["two, deep, slower"], hidden=256, layers=4, batch=8)
TRAINED = replace(SPEED, hidden=128, layers=2, batch=16)


def parallel(cell: Cell, batch: Mapping[str, Any], way: Mapping[str, str], **more: Any) -> Any:
    """The cell's model on all ranks, by FSDP."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (cell.nodes * cell.ranks,), mesh_dim_names=("dp",))
    precision: Any = autopar.Precision(**way)  # type: ignore[arg-type]
    return autopar.parallelize(model_of(cell), mesh, kwargs=batch, solver="fsdp", precision=precision, **more)


def batches(cell: Cell, steps: int) -> list[dict[str, torch.Tensor]]:
    """Bytes of the documentation, at random places that are the same in all processes."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    data, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(data) - cell.sequence, (cell.batch,), generator=generator).tolist()
        ids = torch.stack([data[start : start + cell.sequence] for start in starts]).long()
        found.append({"input_ids": ids, "labels": ids})
    return found


def speed(cell_fields: dict[str, Any], file: str, rounds: int) -> dict[str, Any]:
    """On one rank: of each way, what was predicted and what is measured."""
    from torch.distributed.tensor import distribute_tensor

    from autopar.runtime.memory import step_bytes

    cell = Cell(**cell_fields)
    batch = batches(cell, 1)[0]
    steps, told = {}, {}
    for name, way in WAYS.items():
        module = parallel(cell, batch, way, cluster=file, optimizer="sgd")
        plan, mesh = module.plan, module.mesh
        given = {key: distribute_tensor(x, mesh, module.input_placements[f"kwargs.{key}"]) for key, x in batch.items()}
        peak = step_bytes(module, torch.optim.SGD(module.parameters(), lr=1e-3), (), given, lambda out: out.loss)
        sent = sum(size for _, _, size in module.program.collectives())
        told[name] = {"predicted": plan.seconds, "peak": plan.bytes, "measured peak": peak, "bytes": sent}
        steps[name] = training_step(module, batch)
    return {"told": told, "seconds": in_turns(steps, rounds)}


def curve(module: Any, given: list[dict[str, torch.Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=2e-3), []
    for batch in given:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(getattr(loss, "full_tensor", lambda loss=loss: loss)()))
    return losses


def curves(cell_fields: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """On one rank: the losses of each way, and those of one process."""
    cell = Cell(**cell_fields)
    given = batches(cell, steps)
    found = {name: curve(parallel(cell, given[0], way, verify=2), given) for name, way in WAYS.items()}
    return {"one process": curve(model_of(cell), given), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way on slow links")
    parser.add_argument("--json", type=Path, default=Path("narrow.json"))
    options = parser.parse_args()
    ranks = lab.run(
        SPEED.links(), speed, asdict(SPEED), calibrated(SPEED, False), options.rounds, timeout_seconds=TIMEOUT_SECONDS
    )
    told, medians = ranks[0]["told"], {name: statistics.median(times) for name, times in steps_of(ranks).items()}
    print(
        f"{'on links of ' + SPEED.inter:<18} {'MB a step':>10} {'step':>8} {'predicted':>10} {'peak MB':>8} predicted"
    )
    for name, row in told.items():
        row["seconds"], peak = medians[name], max(rank["told"][name]["measured peak"] for rank in ranks)
        print(
            f"{name:<18} {row['bytes'] / 1e6:>10.1f} {row['seconds'] * 1e3:>5.0f} ms {row['predicted'] * 1e3:>7.0f} ms"
            f" {peak / 1e6:>8.1f} {row['peak'] / 1e6:>9.1f}"
        )
    fast = lab.flat(2, "6gbit")
    losses = lab.run(fast, curves, asdict(TRAINED), options.steps, timeout_seconds=TIMEOUT_SECONDS)[0]
    half = options.steps // 2
    print(f"\n{'losses':<18} {'first':>8} {f'to {half}':>8} {f'to {options.steps}':>8} {'beside float32':>15}")
    ends = {}
    for name, seen in losses.items():
        middle, ends[name] = (statistics.mean(seen[end - MEANS : end]) for end in (half, options.steps))
        apart = ends[name] / ends["one process"] - 1
        print(f"{name:<18} {seen[0]:>8.4f} {middle:>8.4f} {ends[name]:>8.4f} {apart:>+14.2%}")
    options.json.write_text(json.dumps({"speed": told, "losses": losses}, indent=1) + "\n")
    return int(max(ends.values()) > ends["one process"] * (1 + TOLERANCE))


if __name__ == "__main__":
    sys.exit(main())
