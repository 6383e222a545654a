"""Seconds of a training step: autopar against DDP, FSDP2 and parallelize_module, and against plain eager.

    python benchmarks/step_time.py [--quick] [--ranks 1 2 4] [--hidden 256 512 1024] [--json step_time.json]
    python benchmarks/step_time.py --presets ddp --ranks 2 4 --runs 2    # ddp against DDP, every cell twice
    python benchmarks/step_time.py --compile    # all of them compiled: autopar by compile=True, the others' layers

All variants live in the same gloo ranks (one thread each) and take turns, one step each a round, in one order and the
other, so that whatever disturbs the machine disturbs them alike. A step is timed in two parts, each begun
together on all ranks and as long as its slowest rank: forward and backward, and the optimizer
(AdamW, fused=True for all, with zero_grad). Reported are medians over the rounds, and the median over
the rounds of autopar's seconds over the competitor's; and the same of the seconds that all threads of all ranks spend
on a processor, which tell more where other work takes the machine. At the end comes, for each preset, the median over
all cells.

The model is a byte-level Hugging Face Llama of 4 layers with grouped-query attention; the global
batch is the same for all. The competitors are built as their documentation does: DDP as it comes;
`fully_shard` on each layer and the root; `parallelize_module` with q, k, v, gate and up column-wise, o and down
row-wise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

PAIRS = {1: (("autopar", "eager"),), 2: (("ddp", "DDP"), ("fsdp", "FSDP2"), ("megatron", "parallelize_module"))}
"""Ranks -> (autopar's preset, competitor); what holds for 2 ranks holds for more."""
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one group of ranks runs."""

    ranks: int
    hidden: int
    layers: int
    batch: int
    sequence: int
    rounds: int
    warmup: int
    compile: bool = False
    presets: tuple[str, ...] = ()
    """Those that are compared; all that there are for so many ranks if none are named."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(autopar's preset, competitor)"""
        pairs = PAIRS[min(self.ranks, 2)]
        return tuple(pair for pair in pairs if not self.presets or pair[0] in self.presets)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: medians in seconds, and medians of autopar's over the competitor's."""

    ranks: int
    hidden: int
    preset: str
    competitor: str
    seconds: float
    competitor_seconds: float
    ratio: float
    optimizer_seconds: float
    competitor_optimizer_seconds: float
    optimizer_ratio: float
    total_ratio: float
    processor_ratio: float
    loss: float
    competitor_loss: float


def llama(hidden: int, layers: int) -> Any:
    """A byte-level Llama; the same weights on every rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def variants(settings: Settings, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Name -> (module that trains on this rank's mesh, what to call it with)."""
    from torch.distributed import get_rank
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    import autopar

    def model() -> Any:
        return llama(settings.hidden, settings.layers)

    def layers_compiled(of: Any) -> Any:
        for layer in of.model.layers if settings.compile else ():
            layer.compile()
        return of

    compiles = {"compile": True} if settings.compile else {}
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("ranks",))
    if settings.ranks == 1:
        return {
            "autopar": (autopar.parallelize(model(), mesh, kwargs=batch, solver="ddp", **compiles), batch),
            "eager": (layers_compiled(model()), batch),
        }
    part = {key: value.chunk(settings.ranks)[get_rank()].clone() for key, value in batch.items()}

    def fsdp() -> Any:
        sharded = model()
        for layer in layers_compiled(sharded).model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(sharded, mesh=mesh)

    def tensor_parallel() -> Any:
        split = model()
        styles: dict[str, Any] = {"self_attn.o_proj": RowwiseParallel, "mlp.down_proj": RowwiseParallel}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            styles[name] = ColwiseParallel
        for layer in split.model.layers:
            parallelize_module(layer, mesh, {name: style() for name, style in styles.items()})
        return layers_compiled(split)

    competitors: dict[str, tuple[Callable[[], Any], Mapping[str, Any]]] = {
        "DDP": (lambda: DistributedDataParallel(layers_compiled(model())), part),
        "FSDP2": (fsdp, part),
        "parallelize_module": (tensor_parallel, batch),
    }
    modules: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for preset, competitor in settings.pairs:
        modules[preset] = (autopar.parallelize(model(), mesh, kwargs=batch, solver=preset, **compiles), batch)
        make, inputs = competitors[competitor]
        modules[competitor] = (make(), inputs)
    return modules


def adamw(module: Any) -> Any:
    """Fused AdamW. What is a DTensor and what is not are two groups: one fused call takes no mixture."""
    import torch
    from torch.distributed.tensor import DTensor

    groups: dict[bool, list[Any]] = {}
    for parameter in module.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


def measure(settings: Settings) -> dict[str, tuple[list[float], list[float], list[float], float]]:
    """Name -> seconds of forward and backward on this rank, seconds of the optimizer, seconds on a processor in both,
    and the last loss."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (settings.batch, settings.sequence), generator=generator)
    modules = variants(settings, {"input_ids": ids, "labels": ids})
    optimizers = {name: adamw(module) for name, (module, _) in modules.items()}
    seconds: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in modules}
    losses: dict[str, float] = {}
    for number in range(settings.warmup + settings.rounds):
        turns = [*modules.items()]
        for name, (module, inputs) in turns if number % 2 else reversed(turns):
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            loss = module(**inputs).loss
            loss.backward()
            middle, spent = time.perf_counter(), time.process_time() - spent
            dist.barrier()
            resumed, again = time.perf_counter(), time.process_time()
            optimizers[name].step()
            optimizers[name].zero_grad()
            ended, spent = time.perf_counter(), spent + time.process_time() - again
            if number >= settings.warmup:
                seconds[name][0].append(middle - began)
                seconds[name][1].append(ended - resumed)
                seconds[name][2].append(spent)
            global_loss = loss.detach()
            if name in ("DDP", "FSDP2"):  # the loss of this rank's part of the batch
                dist.all_reduce(global_loss)
                global_loss /= settings.ranks
            losses[name] = float(global_loss)
    return {name: (*seconds[name], losses[name]) for name in modules}


def compare(settings: Settings, timeout_seconds: float) -> list[Row]:
    """Run one group of ranks and compare each pair of variants."""
    ranks = run(settings, timeout_seconds)
    rows = []
    for preset, competitor in settings.pairs:
        # a part of a step takes as long as its slowest rank
        ours, theirs = (
            [[max(times) for times in zip(*(rank[name][part] for rank in ranks), strict=True)] for part in (0, 1)]
            for name in (preset, competitor)
        )
        ratios = [_ratio(ours[part], theirs[part]) for part in (0, 1)]
        on_processor = [
            [sum(times) for times in zip(*(rank[name][2] for rank in ranks), strict=True)]
            for name in (preset, competitor)
        ]
        both = [[sum(parts) for parts in zip(*side, strict=True)] for side in (ours, theirs)]
        rows.append(
            Row(
                ranks=settings.ranks,
                hidden=settings.hidden,
                preset=preset,
                competitor=competitor,
                seconds=statistics.median(ours[0]),
                competitor_seconds=statistics.median(theirs[0]),
                ratio=ratios[0],
                optimizer_seconds=statistics.median(ours[1]),
                competitor_optimizer_seconds=statistics.median(theirs[1]),
                optimizer_ratio=ratios[1],
                total_ratio=_ratio(*both),
                processor_ratio=_ratio(*on_processor),
                loss=ranks[0][preset][3],
                competitor_loss=ranks[0][competitor][3],
            )
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class Median:
    """Ratios of one preset to its competitor, over all cells and runs."""

    preset: str
    competitor: str
    cells: int
    ratio: float
    optimizer_ratio: float
    total_ratio: float
    processor_ratio: float

    def __str__(self) -> str:
        return (
            f"{self.preset} against {self.competitor}, median over {self.cells} cells: forward and backward "
            f"{self.ratio:.3f}, optimizer {self.optimizer_ratio:.3f}, whole step {self.total_ratio:.3f}, "
            f"on a processor {self.processor_ratio:.3f}"
        )


def medians(rows: list[Row]) -> list[Median]:
    pairs = dict.fromkeys((row.preset, row.competitor) for row in rows)
    return [
        Median(
            preset=preset,
            competitor=competitor,
            cells=len(cells),
            **{
                name: statistics.median(getattr(row, name) for row in cells)
                for name in ("ratio", "optimizer_ratio", "total_ratio", "processor_ratio")
            },
        )
        for preset, competitor in pairs
        for cells in [[row for row in rows if (row.preset, row.competitor) == (preset, competitor)]]
    ]


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def run(settings: Settings, timeout_seconds: float) -> list[Any]:
    """`measure` on each rank, in rank order. RuntimeError with the traceback of a rank that failed or
    did not finish; no process outlives the call."""
    context = multiprocessing.get_context("spawn")
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes, receivers = [], {}
        try:
            for rank in range(settings.ranks):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (rank, settings, os.path.join(folder, "store"), sender)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                receivers[rank] = receiver
            deadline = time.monotonic() + timeout_seconds
            while len(results) < settings.ranks:
                waiting: list[multiprocessing.connection.Connection] = [
                    r for rank, r in receivers.items() if rank not in results
                ]
                ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RuntimeError(f"{settings} is not finished after {timeout_seconds} s")
                for rank, receiver in receivers.items():
                    if receiver in ready:
                        results[rank], error = receiver.recv()
                        if error:
                            raise RuntimeError(f"rank {rank}: {error}")
            for process in processes:
                process.join(10.0)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [results[rank] for rank in range(settings.ranks)]


def _rank(rank: int, settings: Settings, store: str, sender: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=settings.ranks)
        sender.send((measure(settings), ""))
        dist.destroy_process_group()
    except Exception:
        sender.send((None, traceback.format_exc()))


HEADER = (
    f"{'ranks':>5} {'hidden':>6}  {'autopar':<9} {'against':<19}{'ms':>8} {'ms':>8} {'ratio':>6}"
    f" | {'optimizer ms':>12} {'ms':>7} {'ratio':>6} | {'step ratio':>10} {'processor':>9}"
)


def line(row: Row) -> str:
    return (
        f"{row.ranks:>5} {row.hidden:>6}  {row.preset:<9} {row.competitor:<19}"
        f"{row.seconds * 1e3:8.1f} {row.competitor_seconds * 1e3:8.1f} {row.ratio:6.2f}"
        f" | {row.optimizer_seconds * 1e3:12.1f} {row.competitor_optimizer_seconds * 1e3:7.1f}"
        f" {row.optimizer_ratio:6.2f} | {row.total_ratio:10.2f} {row.processor_ratio:9.2f}"
    )


def main(report: Callable[[str], None] = print) -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 ranks, hidden 256, few rounds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--presets", nargs="+", default=[], choices=["autopar", *(preset for preset, _ in PAIRS[2])])
    parser.add_argument("--compile", action="store_true", help="all variants compiled")
    parser.add_argument("--runs", type=int, default=1, help="how often each cell is run, in ranks of its own")
    parser.add_argument("--json", default="step_time.json", help="where the numbers are written")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `run` ends its ranks
    if options.quick:
        options.ranks, options.hidden, options.rounds = [1, 2], [256], 7
    report(
        f"autopar against its competitors, {options.layers} layers, global batch {options.batch} x {options.sequence}, "
        f"gloo, one thread a rank, {os.cpu_count()} cores, torch {torch.__version__}, AdamW(fused=True)\n"
        f"forward and backward | optimizer | both; a ratio below 1 means that autopar is faster"
    )
    report(HEADER)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    rows: list[Row] = []

    def write() -> None:
        with open(options.json, "w", encoding="utf-8") as file:
            numbers = [asdict(row) for row in rows]
            summary = [asdict(median) for median in medians(rows)]
            content = {"machine": machine, "options": vars(options), "rows": numbers, "medians": summary}
            json.dump(content, file, indent=1)

    for _ in range(options.runs):
        for hidden in options.hidden:
            for ranks in options.ranks:
                settings = Settings(
                    ranks=ranks,
                    hidden=hidden,
                    layers=options.layers,
                    batch=options.batch,
                    sequence=options.sequence,
                    rounds=options.rounds,
                    warmup=options.warmup,
                    compile=options.compile,
                    presets=tuple(options.presets),
                )
                for row in compare(settings, TIMEOUT_SECONDS):
                    rows.append(row)
                    report(line(row))
                write()
    for median in medians(rows):
        report(str(median))


if __name__ == "__main__":
    main()
