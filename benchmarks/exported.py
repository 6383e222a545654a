"""Plans as scripts of other libraries, run: `python benchmarks/exported.py [--only NAME ...] [--lab] [--json FILE]`.

Six models are planned on {"dp": 2, "tp": 2} inside of what FSDP2, `parallelize_module` and transformers can express,
and with the split of modules that people write by hand, exported, and trained by the script alone on 4 gloo ranks. A
row says how far loss and parameters are from one process after 5 steps of AdamW, what a step sends and holds as
measured over what the plan predicts, and how many things of the plan the library could not express.

With `--lab` (needs root), scripts train on the links of `benchmarks/lab/2x2.toml`, in turns with what the free plan for
these links gives (`autopar.parallelize`): seconds a step, medians, and what the free plan gains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import ranks
import torch
import torch.distributed as dist
from scripts import Batch, trained
from torch import nn

import autopar
from autopar.extras import lab
from autopar.planning.planner import Planner

LINKS = str(Path(__file__).parent / "lab/2x2.toml")

LAYERS = {"layers.*": "free_full_weight"}
ATTENTION = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}
GATED = {"*.gate_proj": "colwise", "*.up_proj": "colwise", "mlp.down_proj": "rowwise"}
ENDS = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}

BY_HAND: dict[str, dict[str, str]] = {
    "llama": {**ATTENTION, **GATED, **ENDS, **LAYERS},
    "qwen3_moe": {**ATTENTION, **ENDS, **LAYERS},
    "vit": {**ATTENTION, "*.fc1": "colwise", "*.fc2": "rowwise", **LAYERS},
    "t5": {"DenseReluDense.wi": "colwise", "DenseReluDense.wo": "rowwise", "block.*": "free_full_weight"},
}
"""Megatron's split of each model that has layers for it, within FSDP."""

LIBRARIES = ("fsdp2", "parallelize_module", "transformers")
MESH = {"dp": 2, "tp": 2}
VISIT = 3


class Loss(nn.Module):
    """The U-Net of the examples, with its loss as transformers give it."""

    def __init__(self) -> None:
        super().__init__()
        from unet import UNet

        self.net = UNet()

    def forward(self, noisy: torch.Tensor, clean: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(noisy, clean)}


def task(name: str, scale: int = 1) -> tuple[nn.Module, Any]:
    """A model, always the same one, and its batches; `scale` makes it wider, and its batch longer."""
    import transformers as hf

    torch.manual_seed(0)
    width, wide = 64 * scale, {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64 * scale}
    text = {**wide, "intermediate_size": 2 * width, "vocab_size": 256}
    makers: dict[str, Any] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, num_hidden_layers=4)),
        "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **text,
                num_hidden_layers=2,
                head_dim=width // 4,
                moe_intermediate_size=width // 2,
                num_experts=4,
                num_experts_per_tok=2,
            )
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_layer=4,
                n_embd=width,
                n_head=4,
                vocab_size=256,
                n_positions=128,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                num_hidden_layers=4,
                hidden_size=width,
                intermediate_size=2 * width,
                num_attention_heads=4,
                image_size=32,
                patch_size=8,
                num_labels=10,
            )
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                num_layers=2,
                d_model=width,
                d_kv=width // 4,
                d_ff=2 * width,
                num_heads=4,
                vocab_size=256,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        ),
        "unet": Loss,
    }
    model = makers[name]()

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        if name in ("vit", "unet"):
            first, second = (torch.randn(8, 3, 32, 32, generator=generator) for _ in range(2))
            labels = torch.randint(10, (8,), generator=generator)
            return {"pixel_values": first, "labels": labels} if name == "vit" else {"noisy": first, "clean": second}
        ids = torch.randint(250, (8, 32 * scale), generator=generator)
        return {"input_ids": ids, "labels": ids.roll(1, 0)}

    return model, batch


def on_ranks(name: str) -> tuple[nn.Module, Any]:
    """On a CPU grouped products of float32 run one expert at a time."""
    model, batch = task(name)
    if name == "qwen3_moe":
        model.set_experts_implementation("eager")
    return model, batch


def rows(names: list[str]) -> list[dict[str, Any]]:
    """What each script does, beside what its plan predicts."""
    found = []
    for name in names:
        model, batch = task(name)
        planner = Planner(model, MESH, kwargs=batch(0))
        for library in LIBRARIES[: 2 if name == "unet" else 3]:  # it is no model of transformers
            for how in ("chosen", *(["by hand"] if name in BY_HAND and library != "fsdp2" else [])):
                plan = planner.plan(within=library if how == "chosen" else BY_HAND[name])
                written = plan.answering(lambda on=planner: on).export(library)
                try:
                    ran = ranks.run(4, trained, written.script, partial(on_ranks, name))
                except RuntimeError as error:  # of a script whose library cannot express the model
                    if not written.missing:
                        raise
                    found.append({"model": name, "library": library, "plan": how, "missing": list(written.missing)})
                    print(f"{name:10} {library:19} {how:8} fails: {written.missing[0]} ({str(error)[:60]})", flush=True)
                    continue
                sent = sum(c.bytes for c in written.plan.account.collectives)
                row = {
                    "model": name,
                    "library": library,
                    "plan": how,
                    "loss": max(one.loss for one in ran),
                    "parameter": max(one.parameter for one in ran),
                    "sent": ran[0].sent_bytes / sent,
                    "peak": max(one.peak_bytes for one in ran) / written.plan.bytes,
                    "missing": list(written.missing),
                }
                found.append(row)
                print(
                    f"{name:10} {library:19} {how:8} {row['loss']:8.1e} {row['parameter']:10.1e} {row['sent']:6.3f} "
                    f"{row['peak']:6.3f} {len(written.missing):8}",
                    flush=True,
                )
    return found


def steps(module: nn.Module, batch: Batch) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> float:
        dist.barrier()
        started = time.perf_counter()
        module(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - started

    return step


def measured(name: str, scripts: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """On each rank of a lab: the seconds of steps of scripts and of the free plan, which take turns."""
    warnings.simplefilter("ignore")
    made: dict[str, Any] = {}
    for label, script in scripts.items():
        model, batch = task(name, scale=4)
        space: dict[str, Any] = {}
        exec(script, space)
        mesh = space["make_mesh"]("cpu")
        mine = {key: space["rows"](tensor, mesh) for key, tensor in batch(0).items()}
        made[label] = steps(space["parallelize"](model, mesh), mine)
    model, batch = task(name, scale=4)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = autopar.parallelize(model, mesh, kwargs=batch(0), cluster=LINKS, optimizer="sgd")
    made["free"] = steps(ours, ours.shard_batch(batch(0)))
    seconds: dict[str, list[float]] = {label: [] for label in made}
    for turn in range(rounds):
        for label, step in made.items():
            taken = [step() for _ in range(VISIT)]
            seconds[label] += taken[1:] if turn else []
    return seconds


def in_lab(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step by each library's best plan for the links of the lab, and by the free plan."""
    shape = lab.nodes(2, 2, "400mbit", "6gbit")
    found = []
    for name in names:
        model, batch = task(name, scale=4)
        planner = Planner(model, MESH, kwargs=batch(0), cluster=LINKS, optimizer="sgd")
        scripts = {}
        for library in LIBRARIES[:2]:
            plan = planner.plan(within=library).answering(lambda on=planner: on)
            scripts[library] = plan.export(library).script
        taken = lab.run(shape, measured, name, scripts, rounds, timeout_seconds=900)
        slowest = {label: zip(*(rank[label] for rank in taken), strict=True) for label in taken[0]}
        medians = {label: statistics.median(map(max, each)) for label, each in slowest.items()}
        best = min(seconds for label, seconds in medians.items() if label != "free")
        found.append({"model": name, **medians, "gain": best / medians["free"]})
        print(name, {k: round(v, 4) for k, v in medians.items()}, f"{best / medians['free']:.2f}x", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ["llama", "qwen3_moe", "gpt2", "vit", "t5", "unet"]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.lab:
        print("model      library             plan         loss  parameter   sent   peak  missing")
    result = in_lab(options.only, options.rounds) if options.lab else rows(options.only)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
