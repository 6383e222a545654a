"""Pipelines on paper: `python benchmarks/pipelines.py [NAME ...] [--json FILE]`.

Each case is a published run: its model on meta, cluster, stages, data and tensor parallel ranks, batch and sequence.
"published" are its own micro-batches and schedule, equal stages and Megatron's splits (with sequence parallel), with as
many layers recomputed as memory asks for; "found" is what the planner chooses for the same mesh. Both are priced by the
same simulator, within the memory of the device. "capture" are the seconds in which the model is read, which both share.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.cluster.library import named_cluster
from autopar.planning.planner import Planner
from autopar.planning.request import Request


def llama(layers: int, hidden: int, inner: int, heads: int, groups: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=vocabulary, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt(layers: int, hidden: int, heads: int, sequence: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=sequence, vocab_size=51200, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published run. Stages begin with equal numbers of the layers that are called `layer`, followed by a number."""

    model: Callable[[], nn.Module]
    layer: str
    layers: int
    cluster: str
    mesh: dict[str, int]
    batch: int
    sequence: int
    micro_batches: int
    schedule: str
    dtype: torch.dtype
    source: str
    node: int = 0
    """Devices that the run took of a node, where not all."""


CASES = {
    "Llama-3 405B": Case(
        model=lambda: llama(126, 16384, 53248, 128, 8, 128256), layer="model.layers", layers=126, cluster="dgx-h100",
        mesh={"pp": 8, "dp": 8, "tp": 8}, batch=128, sequence=8192, micro_batches=16, schedule="1f1b",
        dtype=torch.bfloat16, source="torchtitan, 512 H100: fsdp 8, tp 8, pp 8, 1F1B",
    ),
    "GPT-3 175B": Case(
        model=lambda: gpt(96, 12288, 96, 2048), layer="transformer.h", layers=96, cluster="dgx-a100",
        mesh={"pp": 8, "dp": 16, "tp": 8}, batch=1536, sequence=2048, micro_batches=96, schedule="1f1b",
        dtype=torch.bfloat16, source="Megatron-LM (arXiv 2104.04473), 1024 A100",
    ),
    "GPT-39B": Case(
        model=lambda: gpt(48, 8192, 64, 1024), layer="transformer.h", layers=48, cluster="v100-nvlink",
        mesh={"pp": 16, "tp": 4}, batch=1024, sequence=1024, micro_batches=1024, schedule="1f1b",
        dtype=torch.float16, source="Alpa (OSDI 2022), 64 V100: 16 equal stages of 4 devices",
    ),
    "DeepSeek-V3": Case(
        model=deepseek_v3, layer="model.layers", layers=61, cluster="gb200-nvl72",
        mesh={"pp": 8, "dp": 32}, batch=2048, sequence=4096, micro_batches=64, schedule="1f1b",
        dtype=torch.bfloat16, source="torchtitan #4016, 256 GB200: TP 1, PP 8, EP 32", node=64,
    ),
    "GPT-2.6B": Case(
        model=lambda: gpt(32, 2560, 32, 1024), layer="transformer.h", layers=32, cluster="v100-nvlink",
        mesh={"pp": 4, "dp": 2}, batch=64, sequence=1024, micro_batches=16, schedule="1f1b",
        dtype=torch.float16, source="Alpa's GPT-2.6B, 8 V100, with equal stages",
    ),
    "Llama 7B": Case(
        model=lambda: llama(32, 4096, 11008, 32, 32, 32000), layer="model.layers", layers=32, cluster="aws-g6",
        mesh={"pp": 4, "dp": 2}, batch=128, sequence=2048, micro_batches=64, schedule="1f1b",
        dtype=torch.bfloat16, source="after Mist (EuroSys 2025): a model of 7B on 8 L4 with 4 stages",
    ),
}  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    case = CASES[name]
    with torch.device("meta"):
        model = case.model().to(case.dtype)
        ids = torch.zeros(case.batch, case.sequence, dtype=torch.long)
    started = time.perf_counter()
    cluster = named_cluster(case.cluster)
    if case.node:
        cluster = replace(cluster, levels=(*cluster.levels[:-1], replace(cluster.levels[-1], size=case.node)))
    request = Request(cluster=cluster, micro_batches="auto")
    planner = Planner(model, case.mesh, (), {"input_ids": ids, "labels": ids}, request=request)
    row: dict[str, Any] = {"name": name, "source": case.source, "capture_seconds": time.perf_counter() - started}
    stages = case.mesh["pp"]
    equal = {f"{case.layer}.{k}": {"pp": k * stages // case.layers} for k in range(case.layers)}
    published = replace(
        request, solver="megatron_sp" if "tp" in case.mesh else "fsdp", schedule=case.schedule, constraints=equal,
        micro_batches=case.micro_batches,
    )  # fmt: skip
    for way, of in (("found", request), ("published", published)):
        row[way] = planned(planner.in_time(case.micro_batches) if way == "published" else planner, of, case)
    return row


def planned(planner: Planner, request: Request, case: Case) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        plan = planner.planned(request)
    except ValueError as error:
        return {"error": str(error), "planning_seconds": time.perf_counter() - started}
    assert plan.pipeline is not None
    tokens = case.batch * case.sequence / plan.seconds / plan.ranks
    return {
        "seconds": plan.seconds,
        "tokens_per_second": tokens,
        "bytes": plan.bytes,
        "limit_bytes": plan.memory_limit_bytes,
        "bound_seconds": plan.lower_bound_seconds,
        "planning_seconds": time.perf_counter() - started,
        "pipeline": asdict(plan.pipeline),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    heads = ("case", "way", "step s", "tokens/s/device", "peak GB", "micro-batches", "schedule", "idle", "planning s")
    shown = Table(*heads)
    for row in rows:
        for way in ("found", "published"):
            if "error" in (of := row[way]):
                shown.add_row(row["name"], way, of["error"])
                continue
            pipeline = of["pipeline"]
            shown.add_row(
                row["name"], way, f"{of['seconds']:.3f}", f"{of['tokens_per_second']:.0f}", f"{of['bytes'] / 1e9:.1f}",
                str(pipeline["micro_batches"]), f"{pipeline['schedule']} {pipeline['chunks']}",
                f"{pipeline['idle_rate']:.1%}", f"{of['planning_seconds']:.1f} + {row['capture_seconds']:.1f}",
            )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="Cases; all if none is given.")
    parser.add_argument("--json", type=Path, help="Where to write all figures.")
    options = parser.parse_args()
    rows = []
    for name in options.names or CASES:
        rows.append(measured(name))
        gc.collect()
        Console(width=140).print(table(rows))
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
