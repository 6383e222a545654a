"""Trains a byte-level Llama on the Python standard library's sources, on a 2 x 2 mesh of gloo ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_llama.py

`examples/train.sh` does that, and sets everything up before. At the end the first steps run again on one process
with plain PyTorch, with the same seed and batches, and the two are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

Batch = dict[str, torch.Tensor]
MESH = {"dp": 2, "tp": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    losses: list[float]
    steps_per_second: float
    parameters: dict[str, torch.Tensor]


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        sys.exit(
            "train_llama.py runs on 4 ranks, and was started as one process: start it with\n"
            "    torchrun --standalone --nproc-per-node 4 examples/train_llama.py\n"
            "or with examples/train.sh, which also sets everything up"
        )
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks != 4:
        sys.exit(f"train_llama.py runs on 4 ranks, and was started on {ranks}: use torchrun --nproc-per-node 4")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    first = dist.get_rank() == 0
    console = Console(quiet=not first, soft_wrap=True)

    text = sources()
    batches = list(draw(text, options))
    size = f"{options.batch} x {options.sequence} bytes"
    console.print(f"{len(text) / 2**20:.1f} MiB of Python, {options.steps} steps of {size}", highlight=False)

    model = llama()
    console.print("capturing the model and planning for it ...")
    started = time.perf_counter()
    parallel = autopar.parallelize(model, mesh, kwargs=batches[0], solver=options.solver)
    console.print(f"\n{parallel.plan}\n", markup=False, highlight=False)
    console.print(f"captured, planned and compiled in {time.perf_counter() - started:.1f} s", highlight=False)

    trained = train(parallel, batches, console, "4 ranks  ", options.compare, parallel.gathered)
    if first and options.compare:
        # the other ranks wait below, without work
        alone = train(model, batches[: options.compare], console, "1 process", options.compare, lambda: model)
        console.print(comparison(trained, alone), markup=False, highlight=False)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level Llama on a 2 x 2 mesh of gloo ranks.")
    parser.add_argument("--steps", type=int, default=120, help="at least 2")
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--solver", default="auto", help="auto, dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    parser.add_argument("--compare", type=int, default=20, help="first steps that one process repeats; 0: none")
    options = parser.parse_args()
    options.compare = min(options.compare, options.steps)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: give at least 2")
    return options


def sources() -> torch.Tensor:
    """The bytes of the standard library's modules, one file after the other."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(text: torch.Tensor, options: argparse.Namespace) -> Iterator[Batch]:
    """Global batches of random windows: the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    window = torch.arange(options.sequence)
    for _ in range(options.steps):
        begin = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=generator)
        ids = text[begin + window].long()
        yield {"input_ids": ids, "labels": ids}


def llama() -> nn.Module:
    """4 layers, hidden 256, 8 heads that share 4 key-value heads, a token a byte; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(
    model: nn.Module, batches: list[Batch], console: Console, name: str, compared: int, whole: Callable[[], nn.Module]
) -> Trained:
    """Plain PyTorch: it does not know whether the model is parallel. `whole` gives the model with whole parameters,
    which are kept as they are after the first `compared` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    losses: list[float] = []
    parameters: dict[str, torch.Tensor] = {}
    with progress(console, name, len(batches)) as advance:
        started = time.perf_counter()
        for number, batch in enumerate(batches):
            if number == 1:  # the first step warms up
                started = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            advance(losses)
            if number + 1 == compared:
                parameters = {name: p.detach().clone() for name, p in whole().named_parameters()}
        seconds = time.perf_counter() - started
    return Trained(
        losses=losses,
        steps_per_second=(len(batches) - 1) / seconds,
        parameters=parameters,
    )


@contextmanager
def progress(console: Console, name: str, steps: int) -> Iterator[Callable[[list[float]], None]]:
    """A bar with the mean loss of the last ten steps, or ten lines where there is no terminal."""
    texts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
    with Progress(*texts, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=steps, loss="")

        def advance(losses: list[float]) -> None:
            done, loss = len(losses), sum(losses[-10:]) / len(losses[-10:])
            bar.update(task, completed=done, loss=f"{loss:.3f}")
            if not console.is_terminal and (done == 1 or done % max(1, steps // 10) == 0):
                console.print(f"{name} step {done}/{steps}, loss {loss:.3f}", highlight=False)

        yield advance


def comparison(parallel: Trained, alone: Trained) -> str:
    """One line: how far the parallel run is from the same run on one process, and how fast both were."""
    steps = len(alone.losses)
    loss = max(abs(a - b) / abs(b) for a, b in zip(parallel.losses[:steps], alone.losses, strict=True))
    parameter = max(
        float((parallel.parameters[name] - value).norm() / value.norm()) for name, value in alone.parameters.items()
    )
    return (
        f"loss after {steps} steps {parallel.losses[steps - 1]:.4f} on 4 ranks, {alone.losses[-1]:.4f} on 1 process; "
        f"largest relative difference: loss {loss:.1e}, parameters {parameter:.1e}; steps per second: "
        f"{parallel.steps_per_second:.2f} on 4 ranks, {alone.steps_per_second:.2f} on 1 process"
    )


if __name__ == "__main__":
    main()
