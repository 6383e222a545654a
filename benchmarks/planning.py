"""Planning time, step by step, for Llama-3-8B's shape: `python benchmarks/planning.py [--quick] [--limits GB ...]`.

Hugging Face `LlamaConfig` on meta, bf16, sequence 8192, batch 64, cluster dgx-h100, for several depths, meshes and
memory limits ("default" is the cluster's, "none" lifts it). Each case runs in a process of its own, so that its peak
memory is its own. Seconds by step are wall time; "cpu s" are those of all processes, capture included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
STEPS = ("capture", "segments", "space", "search", "others", "describe", "codegen", "bucket")
LIMITS = ("default",)
TIMEOUT_SECONDS = 900


def cpu_seconds() -> float:
    """Of a processor: of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def limit_bytes(text: str) -> float | None:
    return None if text == "default" else math.inf if text == "none" else float(text) * 1e9


def measure(layers: int, mesh: Mapping[str, int], solver: str, limit: str, results: Any) -> None:
    """One case: seconds by step, the plan's figures and the process's peak memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
    started, cpu_before = time.perf_counter(), cpu_seconds()
    planner = Planner(model, mesh, kwargs={"input_ids": tokens, "labels": tokens}, cluster="dgx-h100")
    case = {"layers": layers, "mesh": dict(mesh), "solver": solver, "limit": limit}
    try:
        plan = planner.plan(solver=solver, memory_limit_bytes=limit_bytes(limit))
    except ValueError as error:
        reached = {"error": str(error)}
    else:
        program = planner.program(plan)
        reached = {
            "instructions": len(program.forward) + len(program.backward),
            "predicted_step_seconds": plan.seconds,
            "predicted_peak_bytes": plan.bytes,
            "gap": plan.gap,
        }
    results.put(
        {
            **case,
            **reached,
            "seconds": dict(planner.seconds),
            "total_seconds": time.perf_counter() - started,
            "cpu_seconds": cpu_seconds() - cpu_before,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "imported_bytes": before * 1024,
            "nodes": len(planner.captured.graph.nodes),
        }
    )


def _reached(row: Mapping[str, Any]) -> list[str]:
    """Step, peak and gap of the plan, if there is one."""
    if "error" in row:
        return ["fits not", "-", "-"]
    gap = "-" if row["gap"] is None else f"{row['gap']:.1%}"
    return [f"{row['predicted_step_seconds'] * 1e3:.1f}", f"{row['predicted_peak_bytes'] / 1e9:.1f}", gap]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_LAYERS} layers")
    parser.add_argument("--layers", type=int, nargs="*", help="these depths")
    parser.add_argument("--limits", nargs="*", default=LIMITS, help="of memory, in GB; or default, or none")
    parser.add_argument("--solver", default="dp")
    parser.add_argument("--json", type=Path, default=Path("planning.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    header = ["mesh", "layers", "limit", *STEPS, "total s", "cpu s", "rss GB", "step ms", "peak GB", "gap"]
    print("  ".join(f"{name:>10}" for name in header))
    depths = options.layers or (QUICK_LAYERS if options.quick else LAYERS)
    for mesh, layers, limit in itertools.product(MESHES, depths, options.limits):
        results = context.Queue()
        process = context.Process(target=measure, args=(layers, mesh, options.solver, limit, results))
        process.start()
        row = results.get(timeout=TIMEOUT_SECONDS)
        process.join()
        rows.append(row)
        cells = ["x".join(map(str, mesh.values())), str(layers), limit]
        cells += [f"{row['seconds'].get(step, 0.0):.2f}" for step in STEPS]
        cells += [f"{row[name]:.2f}" for name in ("total_seconds", "cpu_seconds")]
        cells += [f"{row['peak_bytes'] / 1e9:.2f}", *_reached(row)]
        print("  ".join(f"{cell:>10}" for cell in cells), flush=True)
    machine = {"python": platform.python_version(), "processor": platform.processor(), "system": platform.system()}
    options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
