"""Ways to split attention over a long sequence, measured on slow links: `sudo python benchmarks/rings.py [CELL ...]`.

A cell is a lab (`autopar lab`, needs root) on which a small Llama trains on one causal sequence. In each, all in the
same ranks and in turn (`lab.in_turns`), a step (forward, backward and SGD) of

- *found*: the solver's plan for the lab's calibrated file;
- the ways that people write by hand (`tests/support/context_parallel.py`), with parameters in shards: keys and values
  that go around in a ring, in a ring of a sequence that is dealt out one by one (striped), that are gathered, or heads
  by all-to-all;
- *torch*: `torch.distributed.tensor.experimental.context_parallel` in DDP, by either of its rotate methods. As of 2.13
  it runs on CUDA alone, so the CPU's kernel is added to its table (`tests/support/torch_context_parallel.py`).

The table has medians of the slowest rank, each beside what was predicted: seconds of the step, bytes that a rank sends
(counted by its network interface, with headers), and the peak of a rank. *found /* is the median ratio of the found
plan's step to this one, round by round. The losses of the first step are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent)
sys.path.insert(1, str(Path(__file__).parents[1] / "tests/support"))

import lab as cells  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from context_parallel import AXIS, FORMS, register  # noqa: E402
from lab import VOCABULARY, Cell, Piece, calibrated, in_turns, model_of, steps_of, training_step  # noqa: E402
from torch import nn  # noqa: E402
from torch_context_parallel import METHODS, loss_and_backward, with_cpu_kernel  # noqa: E402

from autopar.extensions import scoped  # noqa: E402
from autopar.extras import lab  # noqa: E402

TIMEOUT_SECONDS = 900.0
SETTLED_SECONDS = 0.2
"""After a step, until the kernel has sent what it was told to."""
LONG = {"hidden": 256, "layers": 2, "batch": 1, "sequence": 4096}
CELLS: Mapping[str, Cell] = {
    "two": replace(cells.CELLS["two, deep"], **LONG),
    "two, slower": replace(cells.CELLS["two, deep, slower"], **LONG),
    "four": replace(cells.CELLS["flat"], **LONG),
    "2x2": replace(cells.CELLS["small model"], **LONG),
}
"""At 400 Mbit/s, and at 200 in the slower one; within the nodes of "2x2" 6 Gbit/s."""

FOUND = "found"
MIB = 2**20


class Long(nn.Module):
    """A Llama and the mean loss of its tokens, each with a label of its own."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.llama = Piece(model_of(cell), 0, 1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, places: torch.Tensor | None = None) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits = self.llama(tokens, places)
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def batch_of(cell: Cell) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (cell.batch, cell.sequence), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def by_torch(cell: Cell, batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[nn.Module, Callable[[], float]]]:
    """Name -> (module, its forward and backward, with the loss)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    with_cpu_kernel()
    batch = {**batch, "places": torch.arange(cell.sequence).expand(cell.batch, -1)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    made: dict[str, tuple[nn.Module, Callable[[], float]]] = {}
    for method in METHODS:
        module = DistributedDataParallel(Long(cell))
        made[f"torch, {method}"] = (
            module,
            lambda module=module, method=method: loss_and_backward(module, batch, mesh, method),
        )
    return made


def by_plans(cell: Cell, batch: Mapping[str, torch.Tensor], file: str) -> dict[str, Any]:
    """Name -> the parallel module of the plan found, and of each form."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))

    def by(way: str) -> Any:
        return autopar.parallelize(Long(cell), mesh, kwargs=batch, solver=way, cluster=file, optimizer="sgd")

    found = by("auto")
    with scoped():  # what is registered, the search would try, too
        register()
        return {FOUND: found, **{form: by(form) for form in FORMS}}


def sent_bytes(program: Any, ranks: int) -> float:
    """What a rank sends in a step: messages as they are, of all else what it does not keep, and of an all-reduce twice
    that."""
    times = {"rotate": 1.0, "shift": 1.0, "all_reduce": 2 * (ranks - 1) / ranks}
    return sum(size * times.get(kind, (ranks - 1) / ranks) for kind, _, size in program.collectives())


def attends(program: Any) -> dict[str, int]:
    """A rank's calls of attention in a forward pass, by the heads, queries and keys of each."""
    from autopar.ops.sdpa import ATTENTION

    shapes = [[program.metas[n].shape for n in i.inputs[:2]] for i in program.forward if i.op == ATTENTION]
    return dict(Counter(f"{q[1]} heads, {q[2]} queries, {k[2]} keys" for q, k in shapes))


def counted_bytes() -> int:
    """What this rank's interface has sent, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def seen(step: Callable[[], object], held: list[torch.Tensor]) -> dict[str, float]:
    """The bytes that this rank sends in a step, and the most that are alive."""
    from autopar.runtime.memory import peak_bytes

    dist.barrier()
    before = counted_bytes()
    peak = peak_bytes(step, held, torch.device("cpu"))
    dist.barrier()
    time.sleep(SETTLED_SECONDS)
    return {"sent": counted_bytes() - before, "peak": peak}


def measure(cell_fields: dict[str, Any], file: str, rounds: int) -> dict[str, Any]:
    """On one rank: seconds of every step of every way, what it sends and holds, and what was predicted."""
    torch.set_num_threads(1)
    cell = Cell(**cell_fields)
    batch = batch_of(cell)
    plans, theirs = by_plans(cell, batch, file), by_torch(cell, batch)
    losses: dict[str, float] = {}
    steps: dict[str, Callable[[], object]] = {}
    held: dict[str, list[torch.Tensor]] = {}
    for name, module in plans.items():
        losses[name] = float(module(**batch).loss.detach())
        steps[name] = training_step(module, batch)
        held[name] = [*module.parameters(), *module.buffers(), *batch.values()]
    for name, (module, gradients) in theirs.items():
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        losses[name] = gradients()
        optimizer.zero_grad()

        def step(gradients: Callable[[], float] = gradients, optimizer: Any = optimizer) -> None:
            gradients()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
        held[name] = [*module.parameters(), *module.buffers(), *batch.values()]
    return {
        "seen": {name: seen(step, held[name]) for name, step in steps.items()},
        "seconds": in_turns(steps, rounds),
        "losses": losses,
        "predicted": {
            name: {"seconds": m.plan.seconds, "sent": sent_bytes(m.program, m.mesh.size()), "peak": m.plan.bytes}
            for name, m in plans.items()
        },
        "attends": attends(plans[FOUND].program),
    }


def report(name: str, cell: Cell, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints a cell's table; returns it."""
    predicted, steps = ranks[0]["predicted"], steps_of(ranks)
    with torch.no_grad():
        whole = float(Long(cell)(**batch_of(cell)).loss)
    print(f"\n{name}: hidden {cell.hidden}, {cell.layers} layers, {cell.batch} x {cell.sequence}, {cell.links()}")
    print("| way | step ms | predicted | off | found / | sent MiB | predicted | peak MiB | predicted | loss off |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = {}
    for way, times in sorted(steps.items(), key=lambda item: statistics.median(item[1])):
        row = {
            "seconds": statistics.median(times),
            "found_over": statistics.median(a / b for a, b in zip(steps[FOUND], times, strict=True)),
            "sent": statistics.fmean(rank["seen"][way]["sent"] for rank in ranks),
            "peak": max(rank["seen"][way]["peak"] for rank in ranks),
            "loss_off": max(abs(rank["losses"][way] - whole) for rank in ranks),
            "predicted": predicted.get(way),
        }
        rows[way] = row
        of = row["predicted"]
        figures = [f"{row['seconds'] * 1e3:.0f}", "", "", f"{row['found_over']:.2f}", f"{row['sent'] / MIB:.1f}", ""]
        figures += [f"{row['peak'] / MIB:.0f}", "", f"{row['loss_off']:.0e}"]
        if of is not None:
            figures[1:3] = f"{of['seconds'] * 1e3:.0f}", f"{of['seconds'] / row['seconds'] - 1:+.0%}"
            figures[5], figures[7] = f"{of['sent'] / MIB:.1f}", f"{of['peak'] / MIB:.0f}"
        print(f"| {way} | {' | '.join(figures)} |", flush=True)
    attends = ", ".join(f"{count} x ({shapes})" for shapes, count in ranks[0]["attends"].items())
    print(f"found: {attends}", flush=True)
    return {"cell": asdict(cell), "ways": rows, "steps": steps, "attends": ranks[0]["attends"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cells", nargs="*", help=f"of {', '.join(CELLS)}; all without one")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=LONG["sequence"])
    parser.add_argument("--files", type=Path, default=cells.FILES, help="cluster files; what lacks is calibrated first")
    parser.add_argument("--json", type=Path, default=Path("rings.json"))
    options = parser.parse_args()
    if unknown := sorted(set(options.cells) - set(CELLS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CELLS)}")
    results = {}
    cells.FILES = options.files
    for name in options.cells or CELLS:
        cell = replace(CELLS[name], sequence=options.tokens)
        arguments = (asdict(cell), calibrated(cell, False), options.rounds)
        ranks = lab.run(cell.links(), measure, *arguments, timeout_seconds=TIMEOUT_SECONDS)
        results[name] = report(name, cell, ranks)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
