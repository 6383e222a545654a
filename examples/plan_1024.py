"""Plans a Llama-3-70B for 1,024 H100 on a laptop: no device, no weights, and no process group.

    python examples/plan_1024.py

It compares ways to lay a mesh on 128 machines of eight, prints the plan of the best, and asks it two questions. With
all 80 layers that takes some minutes on two cores, most of them in the searches; `--layers 8` takes one.
"""

from __future__ import annotations

import argparse
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

MESHES = ({"dp": 128, "tp": 8}, {"dp": 256, "tp": 4})


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan a Llama for 1,024 H100, without any.")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=1024, help="sequences of a step, of all devices")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--solver", default="dp", help="dp, ilp, or a preset: ddp, fsdp, megatron, megatron_sp")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=options.layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):  # shapes, and no values: 141 GB of weights are not there
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(options.batch, options.sequence, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}

    plans = {}
    for mesh in MESHES:
        shown = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
        try:
            plan = autopar.plan(model, mesh, kwargs=batch, cluster="dgx-h100", solver=options.solver)
        except ValueError as error:  # no plan fits, or a preset does not fit the mesh
            print(f"{shown:<18} no: {error}", flush=True)
            continue
        plans[shown] = plan
        tokens = ids.numel() / plan.seconds / math.prod(mesh.values())
        print(
            f"{shown:<18} step {plan.seconds:.2f} s, {tokens:,.0f} tokens/s a device, MFU {plan.utilization:.1%}, "
            f"peak {plan.bytes / 2**30:.1f} GiB",
            flush=True,
        )
    best = min(plans.values(), key=lambda plan: plan.seconds)
    print(f"\n{best}\n")
    print(best.explain("lm_head.weight"))
    print(best.explain("model.layers.*.self_attn"))


if __name__ == "__main__":
    main()
