"""Steps and peaks on one GPU, predicted and measured: `python benchmarks/one_gpu.py [--limits GB ...] [--json FILE]`.

A Llama of 0.9 billion parameters (bf16, batch 8, sequence 2048) trains with fused AdamW in one process: in eager, as
autopar's program within each limit (none, 25 and 16 GB), and with float32 weights that are used in bfloat16. A plan for
one rank has no communication: what is compared are operators, what is kept and what is made again. The cluster is
dgx-h100, so that predictions are for that GPU and its nominal rates. Each row has its process, since a peak belongs to
one. Printed are the median of steps and the peak of allocated memory over them. Without a GPU, a tiny model shows that
it runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

LARGE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
WARM, STEPS = 3, 8
EAGER, MASTERS = "eager", "float32 weights"


def row(case: str, device: str) -> dict[str, Any]:
    """Of eager, of float32 weights, or of a limit in GB ("none")."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    transformers.logging.set_verbosity_error()
    os.environ.setdefault("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **(LARGE if device == "cuda" else TINY), max_position_embeddings=4096, use_cache=False
        )
        dtype = torch.float32 if case == MASTERS else torch.bfloat16
        module: Any = transformers.LlamaForCausalLM(config).to(device, dtype)
        ids = torch.randint(config.vocab_size, (8, 2048) if device == "cuda" else (4, 64), device=device)
        inputs, found = {"input_ids": ids, "labels": ids}, dict[str, Any](case=case)
        if case != EAGER:
            mesh = init_device_mesh(device, (1,), mesh_dim_names=("dp",))
            precision = autopar.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            module = autopar.parallelize(
                module, mesh, kwargs=inputs, cluster="dgx-h100",
                memory_limit_bytes=None if case in ("none", MASTERS) else float(case) * 1e9,
                **({"precision": precision} if case == MASTERS else {}),
            )  # fmt: skip
            found |= {"predicted_seconds": module.plan.seconds, "predicted_bytes": module.plan.bytes}
        found |= trained(module, inputs, device)
        dist.destroy_process_group()
    return found


def trained(module: torch.nn.Module, inputs: dict[str, torch.Tensor], device: str) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    seconds: list[float] = []
    for step in range(WARM + STEPS):
        if step == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = _now(device)
        loss = module(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_now(device) - begun)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"seconds": statistics.median(seconds[WARM:]), "bytes": peak, "loss": loss.item()}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table("limit (GB)", "predicted ms", "measured ms", "ratio", "predicted GB", "measured GB", "ratio", "loss")
    for r in rows:
        seconds, size = r.get("predicted_seconds"), r.get("predicted_bytes")
        table.add_row(
            r["case"],
            "" if seconds is None else f"{seconds * 1e3:.1f}",
            f"{r['seconds'] * 1e3:.1f}",
            "" if seconds is None else f"{seconds / r['seconds']:.3f}",
            "" if size is None else f"{size / 1e9:.2f}",
            f"{r['bytes'] / 1e9:.2f}" if r["bytes"] else "",
            f"{size / r['bytes']:.3f}" if size is not None and r["bytes"] else "",
            f"{r['loss']:.4f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="*", default=["none", "25", "16"], metavar="GB")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [EAGER, *(options.limits if device == "cuda" else ["none"]), MASTERS]
    context = multiprocessing.get_context("spawn")
    rows = []
    for case in cases:
        with context.Pool(1) as pool:
            rows.append(pool.apply(row, (case, device)))
    Console().print(shown(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
