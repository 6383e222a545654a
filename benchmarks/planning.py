"""Planning time, step by step, for Llama-3-8B's shape: `python benchmarks/planning.py [--quick] [--json FILE]`.

Hugging Face `LlamaConfig` on meta, bf16, sequence 8192, batch 64, cluster dgx-h100, for several depths
and meshes. Each case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MESHES: tuple[dict[str, int], ...] = ({"tp": 8}, {"dp": 8, "tp": 8}, {"a": 4, "b": 4, "c": 4})
LAYERS = (1, 2, 4, 8, 16, 32, 64)
QUICK_LAYERS = (4, 32)
STEPS = ("capture", "dependency", "blocks", "segments", "space", "search", "describe", "codegen", "bucket")
TIMEOUT_SECONDS = 900


def measure(layers: int, mesh: Mapping[str, int], solver: str, results: Any) -> None:
    """One case: seconds by step, the plan's figures and the process's peak memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from autopar.passes.blocks.partition import blocks
    from autopar.passes.dependency.operators import signatures
    from autopar.planning.planner import Planner

    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
        rope_theta=500000.0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(64, 8192, dtype=torch.long, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    planner = Planner(model, mesh, kwargs={"input_ids": tokens, "labels": tokens}, cluster="dgx-h100")
    plan = planner.plan(solver=solver)
    program = planner.program(plan)
    total = time.perf_counter() - started
    seconds = dict(planner.seconds)
    # what presets and the block level ask for besides; not part of the total
    begun = time.perf_counter()
    signatures(planner.captured.graph)
    seconds["dependency"] = time.perf_counter() - begun
    begun = time.perf_counter()
    blocks(planner.captured.graph, max(mesh.values()))
    seconds["blocks"] = time.perf_counter() - begun
    results.put(
        {
            "layers": layers,
            "mesh": dict(mesh),
            "solver": solver,
            "seconds": seconds,
            "total_seconds": total,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "imported_bytes": before * 1024,
            "nodes": len(planner.captured.graph.nodes),
            "instructions": len(program.forward) + len(program.backward),
            "predicted_step_seconds": plan.seconds,
            "gap": plan.gap,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_LAYERS} layers")
    parser.add_argument("--layers", type=int, nargs="*", help="these depths")
    parser.add_argument("--solver", default="dp")
    parser.add_argument("--json", type=Path, default=Path("planning.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    header = ["mesh", "layers", *STEPS, "total s", "peak GB", "step ms", "gap"]
    print("  ".join(f"{name:>10}" for name in header))
    for mesh in MESHES:
        for layers in options.layers or (QUICK_LAYERS if options.quick else LAYERS):
            results = context.Queue()
            process = context.Process(target=measure, args=(layers, mesh, options.solver, results))
            process.start()
            row = results.get(timeout=TIMEOUT_SECONDS)
            process.join()
            rows.append(row)
            cells = ["x".join(map(str, mesh.values())), str(layers)]
            cells += [f"{row['seconds'].get(step, 0.0):.2f}" for step in STEPS]
            gap = "-" if row["gap"] is None else f"{row['gap']:.1%}"
            cells += [f"{row['total_seconds']:.2f}", f"{row['peak_bytes'] / 1e9:.2f}"]
            cells += [f"{row['predicted_step_seconds'] * 1e3:.1f}", gap]
            print("  ".join(f"{cell:>10}" for cell in cells), flush=True)
    machine = {"python": platform.python_version(), "processor": platform.processor(), "system": platform.system()}
    options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
