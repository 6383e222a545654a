"""Training on real text whose batches differ in length: `python benchmarks/lengths.py [--steps 200] [--json FILE]`.

The text is the standard library's own source: each definition at the top level of a module is a document of bytes, cut
at 4096. Batches are of documents that are about equally long, as loaders that group by length give, and come in random
order. Gloo ranks on this machine train a small Llama with `lengths=`, whose shares are those of the batches. Printed
are captures and programs, the seconds in which each length's program was written, the predicted and the median seconds
of its steps, the largest relative difference of a loss from one process that runs every batch as it is, and tokens per
second beside all batches padded to the longest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

LENGTHS = (64, 256, 1024, 4096)
SHORTEST = 17
GROUPED = 25
"""Batches among which documents are sorted by length."""

Batch = dict[str, torch.Tensor]


def documents() -> list[bytes]:
    """The definitions of the standard library's modules, as the text of each, cut at the longest length."""
    texts = [file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))]
    found = [part[: LENGTHS[-1]] for text in texts for part in re.split(rb"\n(?=def |class |import |from )", text)]
    return [part for part in found if len(part) >= SHORTEST]


def batches(steps: int, rows: int) -> list[Batch]:
    """Global batches, the same on every rank; labels are -100 where a document has ended."""
    draw = torch.Generator().manual_seed(0)
    texts = documents()
    found = [padded(sorted(texts, key=len)[:rows])]
    while len(found) < steps:
        some = torch.randint(len(texts), (GROUPED * rows,), generator=draw).tolist()
        ordered = sorted((texts[index] for index in some), key=len)
        found += [padded(ordered[begin : begin + rows]) for begin in range(0, len(ordered), rows)]
    return [found[index] for index in torch.randperm(len(found), generator=draw)[:steps].tolist()]


def padded(texts: list[bytes]) -> Batch:
    """As a tokenizer pads: to the longest of the batch."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    ends = torch.tensor([[len(text)] for text in texts])
    return {"input_ids": ids, "labels": torch.where(torch.arange(longest) < ends, ids, -100)}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTHS[-1], use_cache=False,
        )
    )  # fmt: skip


def trained(module: torch.nn.Module, given: list[Batch]) -> Iterator[tuple[float, float]]:
    """The loss and the seconds of each step of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for batch in given:
        began = time.perf_counter()
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), time.perf_counter() - began


def bucket(batch: Batch) -> int:
    return min(n for n in LENGTHS if n >= batch["input_ids"].shape[1])


class Heard(logging.Handler):
    """What the log says of captures, and how long programs took that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.captures, self.written = 0, dict[int, float]()

    def emit(self, record: logging.LogRecord) -> None:
        self.captures += record.getMessage().startswith("capture: ")
        if record.msg.startswith("wrote a program") and isinstance(record.args, tuple):
            seconds, what = record.args
            self.written[int(re.search(r"input_ids int64\[\d+, (\d+)\]", str(what))[1])] = seconds  # type: ignore


def measured(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    heard, log = Heard(), logging.getLogger("autopar")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    given = batches(options.steps, options.rows)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    shares = Counter(map(bucket, given))
    padding = autopar.Padding(values={"input_ids": 0, "labels": -100})
    began = time.perf_counter()
    module = autopar.parallelize(llama(), mesh, kwargs=given[0], lengths=shares, padding=padding)
    ready, before = time.perf_counter() - began, heard.captures
    steps = [*trained(module, given)]
    longest = autopar.parallelize(llama(), mesh, kwargs=given[0], lengths=LENGTHS[-1:], padding=padding)
    whole = [*trained(longest, given[: options.longest])]
    if rank == 0:
        # the other rank waits below, without work
        alone = [*trained(llama(), given)]
        told = report(given, steps, whole, alone, module.plan, heard, before, ready)
        show(told)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def report(
    given: list[Batch], steps: list[Any], whole: list[Any], alone: list[Any], plan: autopar.Plan, heard: Heard,
    captures: int, ready: float,
) -> dict[str, Any]:  # fmt: skip
    sizes = [batch["input_ids"].shape[1] for batch in given]
    tokens = [int((batch["labels"] >= 0).sum()) for batch in given]
    predicted = {one.length: one.seconds for one in plan.lengths}

    def rate(took: list[Any], first: int) -> float:
        """Tokens per second, of steps after those in which programs are written."""
        pairs = [(count, seconds) for count, (_, seconds) in zip(tokens, took, strict=False)][first:]
        return sum(count for count, _ in pairs) / sum(seconds for _, seconds in pairs)

    rows = []
    for length in LENGTHS:
        taken = [seconds for batch, (_, seconds) in zip(given, steps, strict=True) if bucket(batch) == length]
        rows.append(
            {
                "length": length, "steps": len(taken), "written_seconds": heard.written.get(length),
                "first_seconds": taken[0], "median_seconds": statistics.median(taken[1:] or taken),
                "predicted_seconds": predicted.get(length),
            }
        )  # fmt: skip
    return {
        "steps": len(given), "shortest": min(sizes), "longest": max(sizes), "captures_before": captures,
        "captures_in_steps": heard.captures - captures - 1, "ready_seconds": ready, "lengths": rows,
        "loss_difference": max(abs(a - b) / abs(b) for (a, _), (b, _) in zip(steps, alone, strict=True)),
        "tokens_per_second": rate(steps, 1), "tokens_per_second_of_longest": rate(whole, 1),
        "tokens_per_second_of_same": rate(steps[: len(whole)], 1),
        "tokens_per_second_alone": rate(alone, 1), "steps_of_longest": len(whole),
    }  # fmt: skip


def show(told: dict[str, Any]) -> None:
    print(f"{told['steps']} batches of {told['shortest']} to {told['longest']} bytes")
    print(f"{'length':>8}{'steps':>7}{'written':>10}{'first':>10}{'median':>10}{'predicted':>11}  seconds")
    for row in told["lengths"]:
        cells = (row["written_seconds"], row["first_seconds"], row["median_seconds"])
        shown = "".join(f"{'-' if cell is None else f'{cell:.3f}':>10}" for cell in cells)
        print(f"{row['length']:>8}{row['steps']:>7}{shown}{row['predicted_seconds']:>11.3f}")
    print(
        f"{told['captures_before']} captures before the first step, in {told['ready_seconds']:.1f} s with planning; "
        f"{told['captures_in_steps']} in steps\n"
        f"largest relative difference of a loss from one process: {told['loss_difference']:.1e}\n"
        f"tokens per second: {told['tokens_per_second']:.0f}; one process, as they are: "
        f"{told['tokens_per_second_alone']:.0f}; in the first {told['steps_of_longest']} steps "
        f"{told['tokens_per_second_of_same']:.0f}, and {told['tokens_per_second_of_longest']:.0f} where all are padded "
        f"to {LENGTHS[-1]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on batches of many lengths.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longest", type=int, default=30, help="first steps that are padded to the longest")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        options = parser.parse_args()
        mp.start_processes(measured, (f"{folder}/store", options), nprocs=options.ranks, start_method="fork")


if __name__ == "__main__":
    main()
