"""How long it takes to simulate a step: `python benchmarks/simulator.py [--layers N] [--json FILE]`.

GPT-3 175B (96 layers, hidden 12288, bfloat16, 1536 sequences of 2048 tokens), from a model on meta, under
Megatron-LM's plan with sequence parallelism on 8, 64 and 1024 devices of cluster dgx-a100. One rank is simulated for
all, so that the number of devices costs nothing. Seconds of one core, best of three, after the plan is made: to
write the program, and to simulate it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.planning.planner import Planner

MESHES = ({"dp": 1, "tp": 8}, {"dp": 8, "tp": 8}, {"dp": 128, "tp": 8})
BATCH, LENGTH, LIMIT_SECONDS = 1536, 2048, 10.0


def best(function: Callable[[], Any]) -> tuple[float, Any]:
    seconds, result = [], None
    for _ in range(3):
        began = time.process_time()
        result = function()
        seconds.append(time.process_time() - began)
    return min(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--json", type=Path, default=Path("simulator.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.device("meta"):
        config = GPT2Config(
            vocab_size=50257, n_positions=LENGTH, n_embd=12288, n_layer=options.layers, n_head=96, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    first = Planner(model, MESHES[0], (), {"input_ids": ids, "labels": ids}, cluster="dgx-a100")
    rows = []
    head = ("devices", "instructions", "program", "simulated", "together", "step", "exposed")
    print(" ".join(f"{cell:>{width}}" for cell, width in zip(head, (8, 13, 9, 10, 9, 10, 9), strict=True)))
    for mesh in MESHES:
        planner = first.on(mesh, "dgx-a100")
        plan = planner.plan(solver="megatron_sp")

        def written(planner: Planner = planner, plan: Any = plan) -> Any:
            planner.writer.programs.clear()  # nothing that is there already
            planner.writer.taken["where quicker"].clear()
            return planner.program(plan)

        def simulated(planner: Planner = planner, plan: Any = plan) -> Any:
            planner.operators.latest.clear()
            return planner.timeline(plan)

        writing, program = best(written)
        simulating, step = best(simulated)
        instructions = len(program.forward) + len(program.backward)
        devices = mesh["dp"] * mesh["tp"]
        rows.append(
            {
                "devices": devices, "instructions": instructions, "program_seconds": writing,
                "simulate_seconds": simulating, "step_seconds": step.seconds, "exposed_seconds": step.exposed_seconds,
            }
        )  # fmt: skip
        print(
            f"{devices:8} {instructions:13} {writing:7.2f} s {simulating:8.2f} s {writing + simulating:7.2f} s "
            f"{step.seconds:8.2f} s {step.exposed_seconds:7.2f} s",
            flush=True,
        )
    last = rows[-1]["program_seconds"] + rows[-1]["simulate_seconds"]
    print(f"{rows[-1]['devices']} devices in {last:.1f} s on one core; asked for: {LIMIT_SECONDS:.0f} s")
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
