"""How near estimates from few copies of a layer are to the programs of all: `python benchmarks/estimates.py`.

Random plans in which layers are alike, of eight small models of Hugging Face with eight layers each, on 2 x 2 of
dgx-h100. Of each estimate that searches use (`planning.steps`), the step and the peak beside those of the program that
is written whole: the median, the 95th percentile and the largest of the relative differences, how many are within 1%,
and the CPU seconds that they take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from autopar.cli.loading import load
from autopar.planning.planner import Planner
from autopar.planning.steps import EXACT, NEAR, PARTED, QUICK, ROUGH, Estimate
from autopar.testing.plans import random_assignment

WIDE = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
GROUPED = {**WIDE, "num_key_value_heads": 4, "head_dim": 64}

MODELS: dict[str, dict[str, Any]] = {
    "GPT2Config": {"n_layer": 8, "n_embd": 512, "n_head": 8, "bos_token_id": 0, "eos_token_id": 0, **STILL},
    "LlamaConfig": {**WIDE, "intermediate_size": 1408},
    "MixtralConfig": {**WIDE, "intermediate_size": 1024, "num_key_value_heads": 8, "num_local_experts": 8},
    "BertConfig": {**WIDE, "intermediate_size": 2048},
    "T5Config": {"num_layers": 8, "num_decoder_layers": 8, "d_model": 512, "d_ff": 1024, "num_heads": 8, "d_kv": 64},
    "Qwen3Config": {**GROUPED, "intermediate_size": 1408},
    "GPTNeoXConfig": {**WIDE, "intermediate_size": 2048},
    "Gemma2Config": {**GROUPED, "intermediate_size": 1024},
}

FIGURES = {
    "step, few copies": (QUICK, "seconds"),
    "step, in parts": (PARTED, "seconds"),
    "step, five copies": (NEAR, "seconds"),
    "peak, few copies": (ROUGH, "bytes"),
    "peak, five copies": (NEAR, "bytes"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=63, help="of each model")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("estimates.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        loaded = load(f"hf:{name}", {"vocab_size": 8192, **MODELS[name]}, batch=64, sequence=128, dtype="bfloat16")
        of = loaded.model, {"a": 2, "b": 2}, loaded.args, loaded.kwargs
        planner = Planner(*of, cluster="dgx-h100", micro_batches=options.micro_batches)
        for seed in range(options.plans):
            assignment = random_assignment(planner.space, seed, alike=True)
            row: dict[str, Any] = {"model": name, "seed": seed, "spent": {}}
            exact = planner.evaluate(assignment, EXACT)
            for figure, (accuracy, what) in FIGURES.items():
                value, row["spent"][figure] = _timed(planner.evaluate(assignment, accuracy), what)
                truth, spent = _timed(exact, what)
                row["spent"][what] = row["spent"].get(what, 0.0) + spent
                row[figure] = value / truth - 1
            rows.append(row)
        _print(name, [row for row in rows if row["model"] == name])
    _print("all", rows)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written to {options.json}")


def _timed(estimate: Estimate, what: str) -> tuple[float, float]:
    """A figure of an estimate, and the seconds of a processor that it takes."""
    began = time.process_time()
    return getattr(estimate, what), time.process_time() - began


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    exact = sum(row["spent"][what] for row in rows for what in ("seconds", "bytes"))
    print(f"{name}: {len(rows)} plans, whole programs {exact:.1f} CPU s", flush=True)
    for figure in FIGURES:
        off = sorted(abs(row[figure]) for row in rows)
        within = sum(each <= 0.01 for each in off) / len(off)
        spent = sum(row["spent"][figure] for row in rows)
        print(
            f"  {figure:18} median {statistics.median(off):6.2%}  95% {off[int(0.95 * len(off))]:6.2%}  "
            f"largest {off[-1]:6.2%}  within 1% {within:6.1%}  {spent:7.1f} CPU s",
            flush=True,
        )


if __name__ == "__main__":
    main()
