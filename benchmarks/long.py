"""Long sequences on paper: `python benchmarks/long.py [NAME ...] [--json FILE]`.

Each case is Llama-3-8B on a cluster, or one of 1 billion, with so many sequences of so many tokens. "found" is what the
planner chooses on the mesh, alone and with what is kept for backward in the host's memory where that pays; the other
ways are what people write by hand (`tests/support/context_parallel.py`): the sequence split on "cp", Megatron with
sequence parallel on "tp", parameters in shards, and in attention keys and values that go around in a ring, in a ring of
a sequence that is dealt out one by one, that are gathered, or heads by all-to-all. All are priced by the same simulator
within the memory of the device, with as many layers recomputed as memory asks for. "published" is what a run with
float8 products and a compiled program measured, or by how much a ring gets quicker where it is dealt out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import torch
from context_parallel import FORMS, register
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.extensions import scoped
from autopar.planning.planner import Planner


@dataclass(frozen=True, kw_only=True)
class Case:
    """`published` tokens a second of a device, in a run of the same mesh, or how many times as many with a ring that is
    dealt out as with one that is not (`published_gain`)."""

    mesh: dict[str, int]
    cluster: str
    sequences: int
    tokens: int
    published: float | None = None
    published_gain: float | None = None
    source: str = ""
    shape: tuple[int, int, int, int] = 32, 4096, 14336, 8
    """Layers, width, width of a feed-forward layer, heads of keys."""


OFFLOAD = "found, offload"
STRIPED = "Striped Attention (arXiv 2311.09431), abstract: up to 1.45 times on A100s at 256k"
TORCHTITAN = "torchtitan, performance of Llama 3.1 (2024-12), table 2: 8 H100, float8 and torch.compile"

CASES = {
    "128k on 64": Case(mesh={"dp": 2, "cp": 4, "tp": 8}, cluster="dgx-h100", sequences=8, tokens=1 << 17),
    "128k on 64, one sequence": Case(mesh={"cp": 8, "tp": 8}, cluster="dgx-h100", sequences=1, tokens=1 << 17),
    "1M on 64": Case(mesh={"cp": 8, "tp": 8}, cluster="dgx-h100", sequences=1, tokens=1 << 20),
    "128k on 8": Case(
        mesh={"dp": 2, "cp": 4}, cluster="grand-teton-h100", sequences=2, tokens=1 << 17, published=1071,
        source=TORCHTITAN,
    ),
    "256k on 8": Case(
        mesh={"cp": 8}, cluster="grand-teton-h100", sequences=1, tokens=1 << 18, published=548, source=TORCHTITAN,
    ),
    "256k on 8 A100, 1B": Case(
        mesh={"cp": 8}, cluster="dgx-a100", sequences=1, tokens=1 << 18, published_gain=1.45, source=STRIPED,
        shape=(16, 2048, 5632, 16),
    ),
}  # fmt: skip


def llama(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, inner, key_heads = case.shape
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=width // 128,
        num_key_value_heads=key_heads, vocab_size=128256, max_position_embeddings=case.tokens, rope_theta=500000.0,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def measured(name: str) -> dict[str, Any]:
    case = CASES[name]
    with torch.device("meta"):
        model = llama(case).to(torch.bfloat16)
        ids = torch.zeros(case.sequences, case.tokens, dtype=torch.long)
    planner = Planner(model, case.mesh, (), {"input_ids": ids, "labels": ids}, cluster=case.cluster)
    row: dict[str, Any] = {"name": name, "source": case.source, "published": case.published, "ways": {}}
    row["published_gain"] = case.published_gain
    for way in ("auto", OFFLOAD):
        row["ways"][way] = planned(planner, way, case)
    with scoped():  # what is registered, the search would try, too
        register()
        for way in (f"{form}_tp" if "tp" in case.mesh else form for form in FORMS):
            row["ways"][way] = planned(planner, way, case)
    return row


def planned(planner: Planner, way: str, case: Case) -> dict[str, Any]:
    started = time.process_time()
    try:
        plan = planner.plan(offload=True) if way == OFFLOAD else planner.plan(solver=way)
    except ValueError as error:
        return {"error": str(error).partition(":")[0], "planning_seconds": time.process_time() - started}
    kinds = {kind for kind, *_ in planner.program(plan).collectives()}
    return {
        "seconds": plan.seconds,
        "tokens_per_second": case.sequences * case.tokens / plan.seconds / plan.ranks,
        "bytes": plan.bytes,
        "limit_bytes": plan.memory_limit_bytes,
        "planning_seconds": time.process_time() - started,
        "rings": "rotate" in kinds,
        "host_bytes": plan.offload_bytes,
        "recomputed": sum(run.count for segment in plan.segments for run in segment.runs if run.recompute),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(
        "case",
        "way",
        "step s",
        "tokens/s/device",
        "peak GiB",
        "on the host GiB",
        "recomputed",
        "ring",
        "planning CPU s",
    )
    for row in rows:
        for way, of in row["ways"].items():
            called = "found" if way == "auto" else way.removesuffix("_tp")
            if "error" in of:
                shown.add_row(row["name"], called, of["error"])
                continue
            shown.add_row(
                row["name"], called, f"{of['seconds']:.3f}", f"{of['tokens_per_second']:.0f}",
                f"{of['bytes'] / 2**30:.1f}", f"{of['host_bytes'] / 2**30:.1f}", str(of["recomputed"]),
                "yes" if of["rings"] else "no", f"{of['planning_seconds']:.1f}",
            )  # fmt: skip
        if row["published"]:
            shown.add_row(row["name"], "published", "", f"{row['published']:.0f}")
        if row["published_gain"]:
            ring, dealt = (row["ways"][form]["seconds"] for form in ("ring", "striped"))
            told = f"{ring / dealt:.2f} times as many as with a ring; published: {row['published_gain']:.2f}"
            shown.add_row(row["name"], "dealt out", "", told)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="Cases; all if none is given.")
    parser.add_argument("--json", type=Path, help="Where to write all figures.")
    options = parser.parse_args()
    rows = []
    for name in options.names or CASES:
        rows.append(measured(name))
        Console(width=140).print(table(rows))
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
