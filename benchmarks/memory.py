"""Predicted against measured peak memory: `python benchmarks/memory.py [--mesh dp=2,tp=2] [--models GPT-2 Llama]`.

Six models on 4 gloo ranks, each under three memory limits: the peak of the plan without a limit, the smallest peak
that the search finds, and halfway between. Measured is the most bytes of tensors alive at once on any rank (parameters,
gradients, AdamW states, inputs, outputs, activations and temporaries, each storage once) over a training step.
Prints a table, and exits with 1 if a measured peak is further than 15 % from the predicted one, or that far above its
limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# in the place of this folder, where `models` is another file
sys.path[0] = str(ROOT / "tests/support")

TOLERANCE = 0.15
HIDDEN, LAYERS, HEADS, VOCABULARY, BATCH, SEQUENCE = 128, 4, 8, 512, 16, 64
IMAGE, PATCH = 64, 8


def gpt2() -> Any:
    import models

    return _text(models.gpt2(LAYERS, n_embd=HIDDEN, n_positions=SEQUENCE, vocab_size=VOCABULARY, n_head=HEADS))


def llama() -> Any:
    import models

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_key_value_heads": HEADS // 2}
    return _text(models.llama(LAYERS, vocab_size=VOCABULARY, **sizes))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return _text(BertForMaskedLM(BertConfig(intermediate_size=4 * HIDDEN, **_common())).train())


def vit() -> Any:
    import models
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=IMAGE, patch_size=PATCH, intermediate_size=4 * HIDDEN, num_labels=10, **_common())

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(step)
        pixels = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
        return (), {"pixel_values": pixels, "labels": torch.randint(10, (BATCH,), generator=generator)}

    return models.Case(model=ViTForImageClassification(config).train(), batch=batch)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 4 * HIDDEN, "num_heads": HEADS, "num_layers": LAYERS}
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **sizes)
    return _text(T5ForConditionalGeneration(config).train())


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        intermediate_size=2 * HIDDEN, num_key_value_heads=HEADS // 2, num_local_experts=8, use_cache=False, **_common()
    )
    return _text(MixtralForCausalLM(config).train())


def _common() -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE}


def _text(model: Any) -> Any:
    import models

    batch = partial(models.tokens, batch=BATCH, sequence=SEQUENCE, vocabulary=VOCABULARY)
    return models.Case(model=model, batch=batch)


MODELS: Mapping[str, Callable[[], Any]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "BERT": bert,
    "ViT": vit,
    "Mixtral": mixtral,
    "T5": t5,
}


def case(name: str) -> Any:
    """The same weights in every process."""
    import torch

    torch.manual_seed(0)
    return MODELS[name]()


def measured(name: str, mesh: dict[str, int], plans: list[Any]) -> list[int]:
    """On each rank: the peak of a step under each plan."""
    import models
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    import autopar
    from autopar.runtime.memory import step_bytes

    on = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    peaks = []
    for plan in plans:
        built = case(name)
        module = autopar.parallelize(built.model, on, built.args, built.kwargs, plan=plan)
        given = {k: distribute_tensor(v, on, module.input_placements[f"kwargs.{k}"]) for k, v in built.kwargs.items()}
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        peaks.append(step_bytes(module, optimizer, (), given, models.loss_of))
    return peaks


def rows(name: str, mesh: dict[str, int]) -> list[dict[str, Any]]:
    import ranks

    from autopar.planning.planner import Planner
    from autopar.solve.problem import Infeasible

    built = case(name)
    planner = Planner(built.model, mesh, built.args, built.kwargs)
    started = time.perf_counter()
    free = planner.plan()
    try:
        planner.plan(memory_limit_bytes=1)
    except Infeasible as error:
        smallest = error.smallest_bytes
    limits = [free.bytes, (free.bytes + smallest) / 2, smallest]
    plans = [free, *(planner.plan(memory_limit_bytes=limit) for limit in limits[1:])]
    seconds = time.perf_counter() - started
    everyone = ranks.run(math.prod(mesh.values()), measured, name, mesh, plans, timeout_seconds=600.0)
    reached = [max(peaks) for peaks in zip(*everyone, strict=True)]
    return [
        {
            "model": name,
            "limit": round(limit),
            "predicted": plan.bytes,
            "measured": peak,
            "ratio": plan.bytes / peak,
            "step_seconds": plan.seconds,
            "peak_at": plan.peak.at,
            "planning_seconds": seconds,
        }
        for limit, plan, peak in zip(limits, plans, reached, strict=True)
    ]


def main() -> None:
    import transformers

    from autopar.cli.common import mesh_shape
    from autopar.report.rendering import rendered
    from autopar.report.sections import Grid, Row, Section

    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mesh", default="ranks=4")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    measured: list[dict[str, Any]] = []
    for name in chosen.models:
        measured += rows(name, mesh_shape(chosen.mesh))
        print(f"{name} done", file=sys.stderr, flush=True)
    lines: list[Row] = [
        {
            "model": r["model"],
            **{f"{name}_bytes": r[name] for name in ("limit", "predicted", "measured")},
            "predicted / measured": f"{r['ratio']:.3f}",
            "predicted_step_seconds": r["step_seconds"],
        }
        for r in measured
    ]
    print(rendered([Section("", [Grid.of(lines, keys=0)])], 1000))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(measured, indent=1) + "\n")
    wrong = [r for r in measured if abs(r["ratio"] - 1) > TOLERANCE or r["measured"] > r["limit"] * (1 + TOLERANCE)]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
