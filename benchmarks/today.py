"""Models of today at their real size, planned: `python benchmarks/today.py [--only NAME ...] [--json FILE]`.

Each model is built on meta from the default configuration of `transformers` (Llama-3-8B from its own), in bf16, and
planned for a batch of 64 on {"dp": 8, "tp": 8} of dgx-h100. A table says what capture and planning take in seconds of
a processor, forked processes included, the peak memory of the process, the predicted step, and the segments: copies x
operators of a copy. Each model has a process and a limit of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from planning import cpu_seconds

MESH = {"dp": 8, "tp": 8}
BATCH = 64
WAITING = 10
"""How many times its seconds of a processor a process may take on a busy machine."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A class of `transformers` with what its configuration has beside the defaults, and the inputs of its step."""

    head: str
    config: str
    inputs: Callable[[Any], dict[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def text(sequence: int) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"input_ids": _tokens(sequence), "labels": _tokens(sequence)}


def _tokens(*sizes: int) -> Any:
    import torch

    return torch.zeros(BATCH, *sizes, dtype=torch.long, device="meta")


def _floats(*sizes: int) -> Any:
    import torch

    return torch.zeros(BATCH, *sizes, dtype=torch.bfloat16, device="meta")


def _causal(name: str, sequence: int = 1024, **settings: Any) -> Model:
    return Model(head=f"{name}ForCausalLM", config=f"{name}Config", inputs=text(sequence), settings=settings)


def _image(config: Any) -> dict[str, Any]:
    return {"pixel_values": _floats(3, config.image_size, config.image_size), "labels": _tokens()}


def _speech(config: Any) -> dict[str, Any]:
    return {"input_features": _floats(config.num_mel_bins, 2 * config.max_source_positions), "labels": _tokens(448)}


def _pairs(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {"input_ids": _tokens(77), "pixel_values": _floats(3, size, size), "return_loss": True}


LLAMA_3_8B: Mapping[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip

MODELS: Mapping[str, Model] = {
    "Llama-3-8B": _causal("Llama", 8192, **LLAMA_3_8B),
    "Mixtral": _causal("Mixtral"),
    "Qwen3-MoE": _causal("Qwen3Moe"),
    "T5": Model(
        head="T5ForConditionalGeneration", config="T5Config", inputs=text(512), settings={"decoder_start_token_id": 0}
    ),
    "Llama-4": Model(head="Llama4ForCausalLM", config="Llama4TextConfig", inputs=text(1024)),
    "gpt-oss": _causal("GptOss"),
    "Gemma-3": Model(head="Gemma3ForCausalLM", config="Gemma3TextConfig", inputs=text(1024)),
    "Qwen3-Next": _causal("Qwen3Next"),
    "DeepSeek-V3": _causal("DeepseekV3"),
    "Qwen3": _causal("Qwen3"),
    "Mistral": _causal("Mistral"),
    "Phi-3": _causal("Phi3"),
    "OLMo-2": _causal("Olmo2"),
    "Granite-MoE": _causal("GraniteMoe"),
    "GLM-4": _causal("Glm4"),
    "GLM-4-MoE": _causal("Glm4Moe"),
    "SmolLM3": _causal("SmolLM3"),
    "Gemma-2": _causal("Gemma2"),
    "Cohere-2": _causal("Cohere2"),
    "Falcon-H1": _causal("FalconH1"),
    "Whisper": Model(head="WhisperForConditionalGeneration", config="WhisperConfig", inputs=_speech),
    "ViT": Model(head="ViTForImageClassification", config="ViTConfig", inputs=_image),
    "CLIP": Model(head="CLIPModel", config="CLIPConfig", inputs=_pairs),
    "BERT": Model(head="BertForMaskedLM", config="BertConfig", inputs=text(512)),
}  # fmt: skip


# ---- in the process of one model ----------------------------------------------------------------------


def measure(name: str, seconds: int, memory_bytes: int, profile: str | None, verbose: bool, rows: Connection) -> None:
    """One model. Sends its row after each stage."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    row: Row = {"model": name, "stage": "build"}
    try:
        _measure(row, MODELS[name], seconds, profile, verbose, rows)
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:600], "traceback": traceback.format_exc()[-3000:]}
    rows.send({**row, "stage": "done"})


def _measure(row: Row, model: Model, seconds: int, profile: str | None, verbose: bool, rows: Connection) -> None:
    import torch
    import transformers

    from autopar.planning.capturing import captured_for_planning
    from autopar.planning.planner import Planner

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    if verbose:
        logging.basicConfig(format="%(relativeCreated)8.0f %(name)s %(message)s", level=logging.INFO)
        logging.getLogger("torch").setLevel(logging.WARNING)
    config = getattr(transformers, model.config)(**model.settings)
    config.use_cache = False
    with torch.device("meta"):
        built = getattr(transformers, model.head)(config).to(torch.bfloat16).train()
    row["parameters"] = sum(p.numel() for p in built.parameters())
    kwargs = model.inputs(config)
    import torch._dynamo
    import torch.export

    import autopar.api  # noqa: F401 - what it imports is no part of planning

    row["stage"] = "capture"
    rows.send(row)
    before, began = cpu_seconds(), time.perf_counter()
    limit = int(before) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    profiler = _profiler(profile)
    captured = captured_for_planning(built, kwargs=kwargs, device_type="cuda")
    row |= {"capture_seconds": cpu_seconds() - before, "nodes": len(captured.graph.nodes), "stage": "plan"}
    rows.send(row)
    planner = Planner(built, MESH, kwargs=kwargs, cluster="dgx-h100", captured=captured)
    row["segments"] = [(repeat.count, len(repeat.copies[0])) for repeat in planner.segments.repeats]
    row["rest"] = len(planner.segments.rest)
    rows.send(row)
    plan = planner.plan()
    planner.program(plan)
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(str(profile))
    row |= {
        "plan_seconds": cpu_seconds() - before - row["capture_seconds"],
        "wall_seconds": time.perf_counter() - began,
        "seconds": {name: round(took, 2) for name, took in planner.seconds.items()},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_seconds": plan.seconds,
        "objective_seconds": plan.objective_seconds,
        "step_bytes": plan.bytes,
        "gap": plan.gap,
    }


def _profiler(profile: str | None) -> Any:
    if profile is None:
        return None
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    return profiler


# ---- the processes, and what is shown -----------------------------------------------------------------


def measured(name: str, options: argparse.Namespace) -> Row:
    """The row of one model, measured in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    memory = int(options.memory * 2**30)
    process = context.Process(
        target=measure, args=(name, options.timeout, memory, options.profile, options.verbose, sender)
    )
    process.start()
    sender.close()
    row: Row = {"model": name, "stage": "start"}
    ends = time.perf_counter() + WAITING * options.timeout
    try:
        while row["stage"] != "done" and receiver.poll(max(0.0, ends - time.perf_counter())):
            row = receiver.recv()
    except EOFError:
        pass
    if row["stage"] != "done":
        process.kill()
    process.join()
    if row["stage"] != "done":
        late = process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU)
        row["error"] = f"{row['stage']}: {'not done in time' if late else f'died ({process.exitcode})'}"
    return row


COLUMNS = ("model", "GB of weights", "operators", "capture s", "plan s", "sum s", "peak GB", "step ms", "segments")


def cells(row: Row) -> list[str]:
    """A row of the table."""

    def number(key: str, scale: float = 1.0, digits: int = 1) -> str:
        return f"{row[key] * scale:.{digits}f}" if key in row else "-"

    total = f"{row['capture_seconds'] + row['plan_seconds']:.1f}" if "plan_seconds" in row else "-"
    runs = ", ".join(f"{count} x {size}" for count, size in row.get("segments", ()))
    rest = f" + {row['rest']}" if "rest" in row else ""
    return [
        row["model"], number("parameters", 2e-9), str(row.get("nodes", "-")), number("capture_seconds"),
        number("plan_seconds"), total, number("peak_bytes", 1e-9, 2), number("step_seconds", 1e3),
        row.get("error", runs + rest)[:150],
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--timeout", type=int, default=120, help="seconds of a processor for one model")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB of addresses for one model")
    parser.add_argument("--profile", help="write what cProfile says of the last model there")
    parser.add_argument("--verbose", action="store_true", help="log what planning does")
    parser.add_argument("--json", type=Path, default=Path("today.json"))
    options = parser.parse_args()
    rows: list[Row] = []
    print("  ".join(f"{name:>13}" for name in COLUMNS))
    for name in options.only or MODELS:
        rows.append(measured(name, options))
        print("  ".join(f"{cell:>13}" for cell in cells(rows[-1])), flush=True)
        options.json.write_text(json.dumps({"mesh": MESH, "batch": BATCH, "rows": rows}, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
