"""Weights for an inference engine: `python benchmarks/handover.py [--rounds N] [--layers N] [--json FILE]`.

A Llama with random weights (156 MB in float32 for 8 layers) is trained by 4 gloo ranks of this machine on a mesh of
(2, 2) under fsdp. Its weights are given to engines of 1, 2, 4 and 8 tensor-parallel ranks as vLLM holds them, in three
ways that take turns, a handover a round:

- `by shard`: `hand_over(VLLM, ...)`, in buckets of 16 MiB;
- `a tensor at a time`: `full_tensor()` of each parameter, of which each rank cuts what its engine ranks hold;
- `all at once`: a state dict of whole tensors on each rank, and cut then.

Prints medians of the seconds of the slowest rank, the most bytes of tensors that any rank has at once, and how many of
them are neither its shard of the model nor tensors of the engine, which it keeps (none if the peak is the end). Exits
with 1 if ways differ in a bit, or if a handover by shard needs more than its bucket.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[0] = str(ROOT / "tests/support")

RANKS, WIDTHS, BUCKET_BYTES = 4, (1, 2, 4, 8), 16 << 20


def rank(layers: int, rounds: int) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.runtime.engines import VLLM, engine_tensors
    from autopar.runtime.memory import Alive
    from autopar.runtime.timing import all_ranks, slowest

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16_000, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1000, (8, 16))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    module = autopar.parallelize(
        LlamaForCausalLM(config), mesh, kwargs={"input_ids": ids, "labels": ids}, solver="fsdp"
    )
    named = dict(module.named_parameters())
    kept: dict[tuple[int, str], torch.Tensor] = {}

    def keep(engine_rank: int, name: str, tensor: torch.Tensor) -> None:
        kept[engine_rank, name] = tensor

    def whole(name: str) -> torch.Tensor:
        parameter = named[name].detach()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def cut(width: int, value: Callable[[str], torch.Tensor]) -> None:
        """Each engine tensor of this rank, from whole ones."""
        for tensor in engine_tensors(VLLM, named, width, config):
            values = {source: value(source) for source in tensor.sources}
            for engine_rank in range(dist.get_rank(), width, RANKS):
                made = torch.zeros(tensor.shape)
                for source, box in tensor.ranks[engine_rank]:
                    box.of(made).copy_(box.within(values[source]))
                keep(engine_rank, tensor.name, made)

    def all_at_once(width: int) -> None:
        states = {name: whole(name) for name in named}
        cut(width, states.__getitem__)

    ways: dict[str, Callable[[int], None]] = {
        "by shard": lambda width: module.hand_over(VLLM, keep, width=width, bucket_bytes=BUCKET_BYTES),
        "a tensor at a time": lambda width: cut(width, whole),
        "all at once": all_at_once,
    }
    rows = []
    for width in WIDTHS:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        most: dict[str, list[int]] = {}
        first: dict[tuple[int, str], torch.Tensor] = {}
        for way, run in ways.items():
            kept.clear()
            alive = Alive(named.values())
            before = alive.bytes
            with alive, torch.no_grad():
                run(width)
            own = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
            peaks = torch.tensor([alive.peak_bytes, alive.peak_bytes - before - own])
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
            most[way] = peaks.tolist()
            first = first or dict(kept)
            alike = kept.keys() == first.keys() and all(torch.equal(x, first[key]) for key, x in kept.items())
            assert alike, f"{way} gives other weights"
        first.clear()
        for number in range(rounds + 1):
            for way in (ways, reversed(ways))[number % 2]:
                kept.clear()
                taken = slowest(lambda: ways[way](width), torch.device("cpu"), all_ranks())  # noqa: B023
                if number:
                    seconds[way].append(taken)
        rows += [
            {"width": width, "way": way, "seconds": statistics.median(seconds[way])}
            | dict(zip(("peak_bytes", "beyond_bytes"), most[way], strict=True))
            for way in ways
        ]
    return [{"model_bytes": sum(p.nbytes for p in named.values()), **row} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    from ranks import run

    rows = run(RANKS, rank, options.layers, options.rounds, timeout_seconds=3600)[0]
    print(f"model {rows[0]['model_bytes'] / 1e6:.0f} MB on {RANKS} ranks, bucket {BUCKET_BYTES / 1e6:.1f} MB")
    print("engine ranks  way                 seconds  peak MB  beyond shard and engine MB")
    for row in rows:
        peak, beyond = row["peak_bytes"] / 1e6, row["beyond_bytes"] / 1e6
        print(f"{row['width']:<12}  {row['way']:<18}  {row['seconds']:<7.2f}  {peak:<7.0f}  {beyond:.1f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["beyond_bytes"] <= BUCKET_BYTES for row in rows if row["way"] == "by shard") else 1


if __name__ == "__main__":
    sys.exit(main())
