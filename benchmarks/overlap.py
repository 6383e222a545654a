"""What each way of hiding communication gains, on and off: `python benchmarks/overlap.py [--rounds N] [--hidden N]`.

In the lab (two nodes of two ranks at 400 Mbit/s and 6 Gbit/s; needs root), GPT-2 and Llama under several plans, each
as programs of equal value: *plain* waits for each collective where it starts, *buckets* joins the collectives of
parameters and gradients and starts them early (`passes/bucket.py`), *overlap* starts the others early, too
(`passes/overlap.py`), *prefetch* starts gathers further ahead (`passes/prefetch.py`), *slices* and *chunks* run
products and stretches in parts (`passes/slice.py`, `passes/chunk.py`), each alone on top of overlap, and *all* is what
`autopar.parallelize` runs. A lowering that changes nothing of a plan is not measured again ("="). All live in the same
ranks and take turns, one step each a round; a step is forward and backward and takes as long as its slowest rank.
Printed are medians, and what the timeline of each program says; a gain is the part of the plain step that is saved,
the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar import lab

SHAPE = lab.nodes(2, 2, "400mbit", "6gbit")
FILE = str(Path(__file__).parent / "lab" / "2x2.toml")
TIMEOUT_SECONDS = 900.0
CLOSE = 0.1
"""A gain's prediction is to be within so much of the one measured."""

PLANS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("ddp", {"dp": 2, "tp": 2}),
    ("fsdp", {"dp": 2, "tp": 2}),
    ("megatron", {"dp": 2, "tp": 2}),
    ("megatron", {"tp": 4}),
    ("megatron_sp", {"tp": 2, "dp": 2}),
    ("dp", {"dp": 2, "tp": 2}),
)
BATCH, SEQUENCE, VOCABULARY = 16, 128, 512


def model_of(name: str, hidden: int) -> Any:
    """The same weights wherever it is made."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "GPT-2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=hidden, n_layer=4, n_head=8, use_cache=False,
                bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, use_cache=False,
        )
    )  # fmt: skip


def programs(planner: Any, plan: Any) -> dict[str, Any]:
    """A plan's program under each lowering."""
    from autopar.passes.bucket import bucket
    from autopar.passes.chunk import chunk
    from autopar.passes.codegen import codegen
    from autopar.passes.overlap import overlap
    from autopar.passes.prefetch import prefetch
    from autopar.passes.slice import slice_products

    sizes, cluster = planner.space.redistributor.bucket_bytes, planner.cluster
    plain = codegen(planner.space, planner.assignment(plan))
    joined = bucket(plain, sizes, limit_bytes=plan.bucket_bytes)
    early = overlap(joined)
    return {
        "plain": plain,
        "buckets": joined,
        "overlap": early,
        "prefetch": prefetch(plain, cluster, sizes, limit_bytes=plan.bucket_bytes),
        "slices": slice_products(early, cluster),
        "chunks": chunk(early, cluster),
        "all": planner.program(plan),
    }


def measure(name: str, rounds: int, hidden: int) -> dict[str, Any]:
    """On one rank: seconds of every step of every program, and what was predicted."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.planner import Planner
    from autopar.runtime.module import ParallelModule
    from autopar.timeline import timeline

    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    first = Planner(model_of(name, hidden), dict(PLANS[0][1]), (), batch, cluster=FILE, optimizer="sgd")
    modules, predicted, same = {}, {}, {}
    for solver, mesh in PLANS:
        planner = first.on(mesh, FILE)
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        plan = planner.plan(solver=solver)
        first_of: dict[str, str] = {}
        for lowering, program in programs(planner, plan).items():
            key = f"{solver} on {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}|{lowering}"
            same[key] = first_of.setdefault(program.digest, key)
            if same[key] == key:
                modules[key] = ParallelModule(model_of(name, hidden), planner.captured, program, plan, device_mesh)
            told = timeline(program, planner.cluster)
            predicted[key] = {"seconds": told.seconds, "exposed": told.exposed_seconds}
    seconds: dict[str, list[float]] = {key: [] for key in modules}
    losses = {}
    for number in range(rounds + 1):  # the first is warm-up
        for key, module in modules.items():
            dist.barrier()
            began = time.perf_counter()
            loss = module(**batch).loss
            loss.backward()
            if number:
                seconds[key].append(time.perf_counter() - began)
            losses[key] = loss.item()
            module.zero_grad()
    return {"seconds": seconds, "predicted": predicted, "losses": losses, "same": same}


def report(name: str, hidden: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    predicted = found[0]["predicted"]
    same = found[0]["same"]
    steps = {
        key: [max(times) for times in zip(*(rank["seconds"][same[key]] for rank in found), strict=True)]
        for key in predicted
    }
    print(f"\n{name}, {BATCH} x {SEQUENCE}, hidden {hidden}, 4 layers, {SHAPE}")
    print(f"{'plan':<24} {'program':<9} {'measured ms':>12} {'predicted ms':>13} {'gain':>6} {'predicted':>10}")
    rows = []
    for key in predicted:
        plan, lowering = key.split("|")
        base = f"{plan}|plain"
        gain = statistics.median(1 - a / b for a, b in zip(steps[key], steps[base], strict=True))
        told = 1 - predicted[key]["seconds"] / predicted[base]["seconds"]
        median = statistics.median(steps[key])
        rows.append(
            {"plan": plan, "program": lowering, "measured": median, **predicted[key], "gain": gain, "told": told}
        )
        figures = f"{median * 1e3:12.0f} {predicted[key]['seconds'] * 1e3:13.0f} {gain:6.0%} {told:10.0%}"
        if same[key] != key:
            figures = f"{'= ' + same[key].split('|')[1]:>12}"
        print(f"{plan:<24} {lowering:<9} {figures}", flush=True)
    measured = [row for row in rows if same[f"{row['plan']}|{row['program']}"] == f"{row['plan']}|{row['program']}"]
    off = [abs(row["gain"] - row["told"]) for row in measured if row["program"] != "plain"]
    right = sum(o <= CLOSE for o in off)
    print(f"gains predicted within {CLOSE * 100:.0f} points: {right} of {len(off)}, the worst is off by {max(off):.0%}")
    apart = max(found[0]["losses"].values()) - min(found[0]["losses"].values())
    print(f"losses of all programs differ by {apart:.1e} at most")
    return {"rows": rows, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path, default=Path("overlap.json"))
    options = parser.parse_args()
    results = {}
    for name in ("GPT-2", "Llama"):
        found = lab.run(SHAPE, measure, name, options.rounds, options.hidden, timeout_seconds=TIMEOUT_SECONDS)
        results[name] = report(name, options.hidden, found)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
