"""Micro-batches whose gradients are reduced once, on links slowed down as configured:
`sudo .venv/bin/python benchmarks/accumulation.py [CELL ...] [--plans PLAN ...] [--json accumulation.json]`.

Cells are those of `benchmarks/lab.py`; a step is some micro-batches of a cell's batch, and one of SGD. In the same
ranks, by turns: DDP within `no_sync()`, FSDP2 after `set_requires_gradient_sync(False)` (resharded after forward, and
not), the combinations of tensor and data parallel by hand, which reduce after the last micro-batch; autopar's plan for
so many micro-batches, its presets, and its plan for one, all within `no_sync()`; and the first without it. Printed are
medians of the slowest rank, the predicted seconds, and what the network interfaces of all ranks sent in a step.
`--plans` takes some of them alone, by the names that are printed: all take a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent)

from lab import (  # noqa: E402
    CELLS,
    TIMEOUT_SECONDS,
    VOCABULARY,
    Cell,
    by_hand,
    calibrated,
    in_turns,
    layers_of,
    model_of,
    steps_of,
)

from autopar.extras import lab  # noqa: E402

INTERFACES = Path("/proc/self/net/dev")
"""Of the rank's own network namespace, which /sys does not show."""
REDUCING = "autopar, reducing each"
CLEAN = 2
"""Steps for counting bytes."""


def sent() -> int:
    """Bytes that this rank has sent to others."""
    lines = (line.split(":") for line in INTERFACES.read_text().splitlines() if ":" in line)
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


def fsdp(cell: Cell, *, reshards: bool) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    model = model_of(cell)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshards)


def waiting(module: Any) -> Callable[[bool], AbstractContextManager[Any]]:
    """What surrounds a micro-batch, which is the last one or not."""

    def around(is_last: bool) -> AbstractContextManager[Any]:
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(is_last)
            if not getattr(module, "reshards", True):
                module.set_reshard_after_backward(is_last)
        elif hasattr(module, "no_sync") and not is_last:
            context: AbstractContextManager[Any] = module.no_sync()
            return context
        return nullcontext()

    return around


def step_of(module: Any, batch: Mapping[str, Any], count: int, *, waits: bool = True) -> Callable[[], None]:
    """Forward and backward of so many micro-batches, and SGD."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    around = waiting(module)

    def step() -> None:
        for micro in range(count):
            with around(micro == count - 1) if waits else nullcontext():
                (module(**batch).loss / count).backward()
        if hasattr(module, "reduce"):
            module.reduce()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(cell_fields: dict[str, Any], file: str, rounds: int, count: int, taken: list[str]) -> dict[str, Any]:
    """On one rank: seconds of every step, bytes that it sent, and what was predicted. `taken` are the names of
    the plans that take part; all if it is empty."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    cell = Cell(**cell_fields)
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (cell.batch, cell.sequence), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    hand = by_hand(cell, batch)
    kept = fsdp(cell, reshards=False)
    kept.reshards = False
    hand["FSDP2, kept"] = kept, hand["FSDP2"][1]
    hand = {name: module for name, module in hand.items() if not taken or name in taken}
    steps = {name: step_of(module, inputs, count) for name, (module, inputs) in hand.items()}
    grid = (cell.nodes, cell.ranks) if cell.nodes > 1 else (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
    predicted, plans = {}, {}
    for name, solver, planned in (
        ("autopar", "dp", count), ("autopar, ddp", "ddp", count), ("autopar, fsdp", "fsdp", count),
        ("autopar, planned for one", "dp", 1),
    ):  # fmt: skip
        if taken and name not in taken:
            continue
        module = autopar.parallelize(
            model_of(cell), mesh, kwargs=batch, solver=solver, cluster=file, optimizer="sgd", micro_batches=planned
        )
        steps[name], plans[name] = step_of(module, batch, count), str(module.plan.training.given)
        if planned == count:
            predicted[name] = module.plan.seconds
        if name == "autopar" and (not taken or REDUCING in taken):
            steps[REDUCING] = step_of(module, batch, count, waits=False)
    bytes_sent = {}
    for name, step in steps.items():
        step()
        dist.barrier()
        before = sent()
        dist.barrier()
        for _ in range(CLEAN):
            step()
        dist.barrier()
        bytes_sent[name] = (sent() - before) / CLEAN
    return {
        "seconds": in_turns(steps, rounds), "bytes": bytes_sent, "predicted": predicted, "plans": plans,
        "by_hand": list(hand),
    }  # fmt: skip


def report(name: str, cell: Cell, count: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    steps, first = steps_of(ranks), ranks[0]
    medians = {plan: statistics.median(times) for plan, times in steps.items()}
    sizes = {plan: sum(rank["bytes"][plan] for rank in ranks) for plan in medians}
    print(f"\n{name}: {count} micro-batches of {cell.batch} x {cell.sequence}, {cell.links()}")
    print(f"{'plan':<26} {'measured ms':>12} {'predicted ms':>13} {'MB sent':>9}")
    for plan in sorted(medians, key=lambda plan: medians[plan]):
        guess = f"{first['predicted'][plan] * 1e3:13.0f}" if plan in first["predicted"] else " " * 13
        print(
            f"{plan:<26} {medians[plan] * 1e3:12.0f} {guess} {sizes[plan] / 1e6:9.1f}  {first['plans'].get(plan, '')}"
        )
    ratios = {
        other: statistics.median(a / b for a, b in zip(steps["autopar"], steps[other], strict=True))
        for other in medians
        if other != "autopar"
    }
    for other, ratio in sorted(ratios.items()):
        print(f"autopar / {other}: {ratio:.2f}")
    return {"cell": asdict(cell), "steps": steps, "bytes": sizes, "ratios": ratios, **first}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cells", nargs="*", default=["small model"], help=f"of {', '.join(CELLS)}")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each plan")
    parser.add_argument("--plans", nargs="+", default=[], help="those that take part, autopar among them; all if none")
    parser.add_argument("--json", type=Path, default=Path("accumulation.json"))
    options = parser.parse_args()
    if unknown := sorted(set(options.cells) - set(CELLS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CELLS)}")
    if options.plans and "autopar" not in options.plans:
        parser.error("--plans lacks autopar, with which all are compared")
    results = {}
    for name in options.cells:
        cell = CELLS[name]
        arguments = (asdict(cell), calibrated(cell, False), options.rounds, options.micro_batches, options.plans)
        ranks = lab.run(cell.links(), measure, *arguments, timeout_seconds=TIMEOUT_SECONDS)
        results[name] = report(name, cell, options.micro_batches, ranks)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
