"""What capturing a deep model takes: `python benchmarks/capture.py [--layers N] [--rounds N] [--other DIR] [--json F]`.

Hugging Face `LlamaConfig` at the size of Llama-3-8B, on meta, bf16, sequence 8192, batch 64: the step is recorded twice
and compared. `--other` is the folder of another checkout of autopar, installed in its own .venv, whose captures take
turns with these. Each capture runs in a process of its own, after a small one that loads what all need; medians of
processor seconds, which other work on the machine disturbs less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

CHILD = """
import sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from autopar.passes.capture.trace import capture
def model(layers, width):
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=128256, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers,
            num_attention_heads=32, num_key_value_heads=8, use_cache=False)).to(torch.bfloat16)
def run(model):
    ids = torch.empty(64, 8192, dtype=torch.long, device="meta")
    began = time.process_time()
    captured = capture(model, kwargs={"input_ids": ids, "labels": ids})
    return time.process_time() - began, len(captured.graph.nodes)
run(model(2, 256))
print(*run(model(int(sys.argv[1]), 4096)))
"""


def seconds(python: Path, checkout: Path, layers: int) -> tuple[float, int]:
    """Processor seconds of one capture and the nodes of its graph."""
    command = [str(python), "-c", CHILD, str(layers)]
    out = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True, timeout=600).stdout
    taken, nodes = out.split()[-2:]
    return float(taken), int(nodes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    here = Path(__file__).resolve().parent.parent
    checkouts = {"this": (Path(sys.executable), here)}
    if options.other is not None:
        other = options.other.resolve()
        checkouts["other"] = (other / ".venv/bin/python", other)
    taken: dict[str, list[float]] = {name: [] for name in checkouts}
    nodes: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            one, nodes[name] = seconds(*checkout, options.layers)
            taken[name].append(one)
    base = statistics.median(taken["this"])
    table = Table(title=f"capture of {options.layers} layers, processor seconds, median of {options.rounds}")
    for column in ("checkout", "nodes", "seconds", "of this"):
        table.add_column(column, justify="left" if column == "checkout" else "right")
    rows = []
    for name, each in taken.items():
        median = statistics.median(each)
        table.add_row(name, str(nodes[name]), f"{median:.2f}", f"{median / base:.2f}")
        rows.append({"checkout": name, "nodes": nodes[name], "seconds": each})
    Console(width=100).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"layers": options.layers, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
