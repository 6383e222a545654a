"""What steps of optimizers and clipping take: `python benchmarks/optimizers.py [--ranks N] [--rounds N] [--json FILE]`.

A Llama of 4 layers (39 parameters) rests under fsdp on gloo ranks of this machine. Each way takes turns with the
others, a step a round: `plain` works on plain tensors of the same shards (for clipping, with one all-reduce of a
number; for Muon, one process steps on whole matrices, and its time is divided by the ranks), `DTensor` is a stock
optimizer on the module's parameters, and `parallel` is `parallel.optimizer` or `autopar.clip_grad_norm_`. Prints
medians of the milliseconds of the slowest rank, of those that its thread spends on a processor, and of the ratios of
each round to plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[0] = str(ROOT / "tests/support")


def rank(hidden: int, rounds: int) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.compat.distributed import local_tensor

    ranks = dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(1024, (2 * ranks, 16))
    whole = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    module = autopar.parallelize(
        model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), kwargs={"input_ids": ids, "labels": ids},
        solver="fsdp",
    )  # fmt: skip
    module(input_ids=ids, labels=ids).loss.backward()
    shards = {}
    for name, p in module.named_parameters():
        shards[name] = nn.Parameter(local_tensor(p).detach().clone())
        shards[name].grad = local_tensor(p.grad).clone()
        whole[name].grad = p.grad.full_tensor()

    def matrices(named: dict[str, Any]) -> list[Any]:
        return [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]

    def one_number() -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in shards.values()]).square()
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(shards.values(), 1e9, norm.sqrt())

    own = dict(module.named_parameters())
    cases: dict[str, dict[str, Callable[[], Any]]] = {}
    for title, options in (("AdamW", {}), ("AdamW foreach", {"foreach": True}), ("AdamW fused", {"fused": True})):
        cases[title] = {
            "plain": torch.optim.AdamW(shards.values(), **options).step,
            "DTensor": torch.optim.AdamW(own.values(), **options).step,
            "parallel": module.optimizer(torch.optim.AdamW, **options).step,
        }
    cases["clipping"] = {
        "plain": one_number,
        "DTensor": lambda: torch.nn.utils.clip_grad_norm_(own.values(), 1e9).full_tensor(),  # type: ignore[attr-defined]
        "parallel": lambda: autopar.clip_grad_norm_(own.values(), 1e9),
    }
    if hasattr(torch.optim, "Muon"):
        cases["Muon"] = {
            "plain": torch.optim.Muon(matrices(whole)).step,
            "DTensor": torch.optim.Muon(matrices(own)).step,
            "parallel": module.optimizer(torch.optim.Muon, matrices(own)).step,
        }
    rows = []
    for title, ways in cases.items():
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(rounds // 10 + 2 if title == "Muon" else rounds):
            for way in (ways, reversed(ways))[number % 2]:
                dist.barrier()
                start, processor = time.perf_counter(), time.thread_time()
                ways[way]()
                taken = torch.tensor([time.perf_counter() - start, time.thread_time() - processor])
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if number >= 2:
                    seconds[way].append((float(taken[0]), float(taken[1])))
        if title == "Muon":  # this rank's share of what one process does
            seconds["plain"] = [(wall / ranks, processor / ranks) for wall, processor in seconds["plain"]]
        for way, rounds_of in seconds.items():
            row: dict[str, Any] = {"what": title, "way": way}
            for number, key in enumerate(("seconds", "processor_seconds")):
                row[key] = statistics.median(taken[number] for taken in rounds_of)
                pairs = zip(rounds_of, seconds["plain"], strict=True)
                row[f"{key}_ratio"] = statistics.median(one[number] / other[number] for one, other in pairs)
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    from ranks import run

    rows = []
    print("hidden  what           way       ms       ratio  processor ms  ratio")
    for hidden in options.hidden:
        found = run(options.ranks, rank, hidden, options.rounds, timeout_seconds=3600)[0]
        for row in found:
            print(
                f"{hidden:<6}  {row['what']:<13}  {row['way']:<8}  {1e3 * row['seconds']:<7.2f}  "
                f"{row['seconds_ratio']:<5.2f}  {1e3 * row['processor_seconds']:<12.2f}  "
                f"{row['processor_seconds_ratio']:.2f}"
            )
            rows.append({"hidden": hidden, "ranks": options.ranks, **row})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
