"""Compiled programs beside `torch.compile` of the model, on one rank: `python benchmarks/compiled.py [--json FILE]`.

    python benchmarks/compiled.py [--models llama gpt2] [--hidden 256 512 1024] [--rounds 15] [--json compiled.json]
    python benchmarks/compiled.py --large    # on a GPU: 0.9 billion parameters, 16 layers, batch 8 x 2048, bf16

All variants live in one process (one thread on a CPU) and take turns, a step each a round, in one order and the other:
eager, `torch.compile` of the model, autopar's program, and the same compiled. With `--large`, also FSDP2 around
compiled layers. A step is forward, backward, and fused AdamW with
zero_grad. Reported are medians, the median over the rounds of each one's seconds over those of `torch.compile`,
seconds until the second step is done, the peak on a GPU (of this variant alone), and what autopar predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

EAGER, COMPILED, PROGRAM, FUSED, FSDP = "eager", "torch.compile", "autopar", "autopar, compiled", "FSDP2, compiled"
LARGE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 8,
}  # fmt: skip


def llama(hidden: int, options: argparse.Namespace) -> Any:
    import transformers

    small = {
        "vocab_size": 256, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4 // 64 * 64,
        "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64,
    }  # fmt: skip
    sizes = LARGE if options.large else small
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=options.layers, max_position_embeddings=4096, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(hidden: int, options: argparse.Namespace) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_embd=hidden, n_layer=options.layers, n_head=hidden // 64, n_positions=2048, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[int, argparse.Namespace], Any]] = {"llama": llama, "gpt2": gpt2}


class Variant:
    """A module that trains, and what was seen of it."""

    def __init__(self, name: str, module: Any, inputs: dict[str, torch.Tensor], device: str) -> None:
        self.name, self.module, self.inputs, self.device = name, module, inputs, device
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        self.seconds: list[float] = []
        self.loss = self.begun_seconds = 0.0
        self.bytes = self.resident = 0

    def step(self) -> float:
        begun = now(self.device)
        loss = self.module(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = now(self.device) - begun
        self.loss = float(loss.detach())
        return seconds


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def variants(name: str, hidden: int, options: argparse.Namespace, device: str) -> list[Variant]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import autopar

    dtype = torch.bfloat16 if options.large else torch.float32
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("dp",))

    def model() -> Any:
        torch.manual_seed(0)
        return MODELS[name](hidden, options).to(device, dtype)

    vocabulary = LARGE["vocab_size"] if options.large else 256
    ids = torch.randint(vocabulary, (options.batch, options.sequence), device=device)
    inputs = {"input_ids": ids, "labels": ids}
    cluster = "dgx-h100" if device == "cuda" else None

    def parallel(**how: Any) -> Any:
        return autopar.parallelize(
            model(), mesh, kwargs=inputs, cluster=cluster, memory_limit_bytes=float("inf"), **how
        )

    def sharded() -> Any:
        module = model()
        for layer in module.model.layers:
            layer.compile()
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    makers: dict[str, Callable[[], Any]] = {
        EAGER: model,
        COMPILED: lambda: torch.compile(model()),
        PROGRAM: parallel,
        FUSED: lambda: parallel(compile=True),
    }
    if options.large:
        makers[FSDP] = sharded
    for mode in options.modes:
        makers[f"torch.compile, {mode}"] = lambda mode=mode: torch.compile(model(), mode=mode)
        makers[f"autopar, {mode}"] = lambda mode=mode: parallel(compile=mode)
    found = []
    for what, make in makers.items():
        if options.only and what not in options.only:
            continue
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        begun = now(device)
        try:
            variant = Variant(what, make(), inputs, device)
            variant.step()
            if device == "cuda":
                variant.resident = torch.cuda.memory_allocated() - before
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated() - variant.resident
            variant.step()
            if device == "cuda":
                variant.bytes = torch.cuda.max_memory_allocated() - held
        except Exception:
            traceback.print_exc()
            continue
        variant.begun_seconds = now(device) - begun
        found.append(variant)
    return found


def measured(name: str, hidden: int, options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    turns = variants(name, hidden, options, device)
    for number in range(options.rounds):
        for variant in turns if number % 2 else reversed(turns):
            variant.seconds.append(variant.step())
    for variant in turns if options.profile else ():
        profiled(variant)
    reference = next((v for v in turns if v.name == COMPILED), turns[0])
    rows = []
    for variant in turns:
        plan = getattr(variant.module, "plan", None)
        ratios = [one / other for one, other in zip(variant.seconds, reference.seconds, strict=True)]
        flops = plan.provenance.flops if plan is not None and plan.provenance is not None else None
        rows.append(
            {
                "model": name, "hidden": hidden, "variant": variant.name, "seconds": statistics.median(variant.seconds),
                "ratio": statistics.median(ratios), "begun_seconds": variant.begun_seconds, "bytes": variant.bytes,
                "loss": variant.loss, "flops": flops, "predicted_seconds": None if plan is None else plan.seconds,
                "predicted_bytes": None if plan is None else plan.bytes,
            }
        )  # fmt: skip
    return rows


def profiled(variant: Variant) -> None:
    """Prints which kernels a step consists of."""
    from torch.profiler import profile

    with profile() as seen:
        variant.step()
    print(variant.name)
    on_gpu = torch.cuda.is_available()
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=70))


def shown(rows: list[dict[str, Any]], peak_flops: float) -> Table:
    table = Table(
        "model", "hidden", "variant", "ms", "/ torch.compile", "predicted ms", "MFU", "GB", "predicted", "begun s"
    )
    flops = {(r["model"], r["hidden"]): r["flops"] for r in rows if r["flops"]}
    for r in rows:
        seconds, of = r["predicted_seconds"], flops.get((r["model"], r["hidden"]))
        table.add_row(
            r["model"], str(r["hidden"]), r["variant"], f"{r['seconds'] * 1e3:.1f}", f"{r['ratio']:.3f}",
            "" if seconds is None else f"{seconds * 1e3:.1f}",
            f"{of / r['seconds'] / peak_flops:.1%}" if of and peak_flops else "",
            f"{r['bytes'] / 1e9:.2f}" if r["bytes"] else "",
            f"{r['predicted_bytes'] / 1e9:.2f}" if r["predicted_bytes"] else "", f"{r['begun_seconds']:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--hidden", nargs="*", type=int, default=[256, 512, 1024])
    parser.add_argument("--layers", type=int, help="4, or 16 with --large")
    parser.add_argument("--batch", type=int, help="4, or 8 with --large")
    parser.add_argument("--sequence", type=int, help="128, or 2048 with --large")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--modes", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    for name, small, large in (("layers", 4, 16), ("batch", 4, 8), ("sequence", 128, 2048)):
        if getattr(options, name) is None:
            setattr(options, name, large if options.large else small)
    device = "cuda" if options.large else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", "0")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        cells = (
            [("llama", LARGE["hidden_size"])]
            if options.large
            else [(m, h) for m in options.models for h in options.hidden]
        )
        for name, hidden in cells:
            torch._dynamo.reset()
            rows += measured(name, hidden, options, device)
            Console(width=160).print(shown(rows, 989e12 if device == "cuda" else 0.0))
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
