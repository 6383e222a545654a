"""Writes and checks the golden plans: what is planned for six models on two meshes, as texts in `tests/golden/`.

    python tests/golden.py                    # plans all of them again and says what differs
    python tests/golden.py --write            # writes them anew
    python tests/golden.py --only gpt2 8x8    # those alone whose names have all of these words in them

A file holds a plan (its decisions, layouts, collectives, predicted seconds and bytes) and its program: on 4 ranks every
instruction of the solver's own plan (of `LONG` models, as of other plans, every collective); on 64 ranks counts and
digests. A preset or a limit that no plan keeps is recorded by its message. All take some minutes;
`tests/planning/test_golden.py` checks those that are quick to plan. Write them anew only where a plan is meant to
change, and say in the commit why it does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "golden"
sys.path[:0] = [path for path in (str(ROOT / "tests/support"), str(ROOT / "examples")) if path not in sys.path]

from golden_text import differences, group_lines, plan_lines, program_lines  # noqa: E402

from autopar.cli.loading import Loaded, load  # noqa: E402
from autopar.ir.program import Program  # noqa: E402
from autopar.planning.plan import Plan  # noqa: E402
from autopar.planning.planner import Planner  # noqa: E402

CLUSTER = "dgx-h100"
MESHES: Mapping[str, Mapping[str, int]] = {"2x2": {"a": 2, "b": 2}, "8x8": {"dp": 8, "tp": 8}}
PRESETS = {"2x2": ("ddp", "fsdp", "megatron", "atp", "meshslice"), "8x8": ("fsdp", "megatron", "par4d")}
VERSIONS = {"torch": "2.13", "transformers": "5.23"}
"""With which the files were written: other ones may capture another graph."""


def _hugging_face(config: str, batch: int, **settings: Any) -> Loaded:
    return load(f"hf:{config}", {"vocab_size": 8192, **settings}, batch=batch, sequence=128, dtype="bfloat16")


def _gpt2() -> Loaded:
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return _hugging_face("GPT2Config", 64, n_layer=3, n_embd=512, n_head=8, **still)


def _llama() -> Loaded:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    return _hugging_face("LlamaConfig", 16, num_hidden_layers=3, hidden_size=2048, intermediate_size=5632, **heads)


def _t5() -> Loaded:
    sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16}
    return _hugging_face("T5Config", 16, num_layers=4, dropout_rate=0, **sizes)


def _mixtral() -> Loaded:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8}
    return _hugging_face("MixtralConfig", 64, num_hidden_layers=3, hidden_size=512, intermediate_size=1024, **heads)


def _bert() -> Loaded:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    return _hugging_face("BertConfig", 64, num_hidden_layers=3, **sizes)


def _unet() -> Loaded:
    from unet import UNet

    with torch.device("meta"):
        model = UNet((128, 256, 512)).to(torch.bfloat16)
        images = torch.zeros(64, 3, 64, 64, dtype=torch.bfloat16)
    return Loaded(model=model, kwargs={"noisy": images, "clean": images})


MODELS: Mapping[str, Callable[[], Loaded]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "mixtral": _mixtral,
    "bert-dropout": _bert,
    "unet": _unet,
}

LONG = ("t5",)
"""Models with programs of hundreds of kilobytes: their files list collectives alone."""

LIMITS: Mapping[tuple[str, str], int] = {
    ("gpt2", "2x2"): 300_000_000,
    ("gpt2", "8x8"): 80_000_000,
    ("llama", "2x2"): 500_000_000,
    ("llama", "8x8"): 190_000_000,
    ("t5", "2x2"): 540_000_000,
    ("mixtral", "2x2"): 410_000_000,
    ("mixtral", "8x8"): 260_000_000,
    ("bert-dropout", "2x2"): 250_000_000,
    ("bert-dropout", "8x8"): 80_000_000,
    ("unet", "2x2"): 450_000_000,
}
"""Bytes: about 60% of the peak of the plan without a limit."""
PRESETS_WITHIN_LIMITS = {("gpt2", "2x2"): ("fsdp",), ("gpt2", "8x8"): ("ddp",)}
"""Presets that are planned within the limit, too. Data parallel does not fit into the one on 64 ranks."""

QUICK = (
    *("gpt2-2x2-dp", "gpt2-2x2-atp", "gpt2-2x2-meshslice", "gpt2-8x8-dp", "gpt2-8x8-dp-limit", "gpt2-8x8-par4d"),
    *("llama-2x2-dp", "llama-8x8-par4d", "bert-dropout-8x8-dp", "bert-dropout-8x8-par4d", "unet-2x2-dp"),
)
"""Plans of the solver and of the papers' presets that the tests check; of the other presets they check all."""


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One plan that is recorded."""

    model: str
    mesh: str
    solver: str
    limit: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mesh}-{self.solver}" + "-limit" * (self.limit is not None)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    @property
    def title(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in MESHES[self.mesh].items())
        limit = "" if self.limit is None else f" within {self.limit} bytes"
        return f"{self.model} on mesh {axes} of {CLUSTER}, by {self.solver}{limit}"

    @property
    def is_quick(self) -> bool:
        """Whether the tests plan it again: they have a minute for all."""
        return self.name in QUICK or self.solver in ("ddp", "fsdp", "megatron")

    def text(self) -> str:
        """The file as it is now."""
        lines = [self.title, "", *group_lines(MESHES[self.mesh]), ""]
        try:
            plan, program = planned(self)
        except ValueError as error:
            return "\n".join([*lines, "[no plan]", f"message: {error}"]) + "\n"
        small = self.mesh == "2x2"
        own = self.solver == "dp" and self.limit is None and self.model not in LONG
        text = program_lines(program, every_instruction=small and own, every_collective=small)
        return "\n".join([*lines, *plan_lines(plan, captured(self.model).captured.graph), "", *text]) + "\n"

    def differences(self) -> list[str]:
        """Between the file and what is planned now, a sentence each."""
        if not self.path.exists():
            return [f"{self.title}: {self.path.relative_to(ROOT)} is missing; write it with tests/golden.py --write"]
        return [f"{self.title}: {told}" for told in differences(self.path.read_text(), self.text())]


def _goldens() -> Iterator[Golden]:
    for model in MODELS:
        for mesh in MESHES:
            yield Golden(model=model, mesh=mesh, solver="dp")
            if (limit := LIMITS.get((model, mesh))) is not None:
                yield Golden(model=model, mesh=mesh, solver="dp", limit=limit)
            for preset in PRESETS_WITHIN_LIMITS.get((model, mesh), ()):
                yield Golden(model=model, mesh=mesh, solver=preset, limit=LIMITS[model, mesh])
            for preset in PRESETS[mesh]:
                yield Golden(model=model, mesh=mesh, solver=preset)


GOLDENS = {golden.name: golden for golden in _goldens()}


@cache
def captured(model: str) -> Planner:
    """Each model is captured once in a process."""
    loaded = MODELS[model]()
    return Planner(loaded.model, MESHES["2x2"], loaded.args, loaded.kwargs, cluster=CLUSTER)


@cache
def planner(model: str, mesh: str) -> Planner:
    return captured(model).on(MESHES[mesh], CLUSTER)


@cache
def planned(golden: Golden) -> tuple[Plan, Program]:
    """The plan and its program. Raises ValueError where there is none."""
    on = planner(golden.model, golden.mesh)
    plan = on.plan(solver=golden.solver, memory_limit_bytes=golden.limit)
    return plan, on.program(plan)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the golden plans, or write them anew.")
    parser.add_argument("--write", action="store_true", help="write the files instead of comparing with them")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of the names of files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [golden for golden in GOLDENS.values() if all(part in golden.name for part in options.only)]
    if not chosen:
        parser.error(f"no golden plan has {' and '.join(options.only)} in its name; there are {', '.join(GOLDENS)}")
    found = 0
    for golden in chosen:
        if options.write:
            FOLDER.mkdir(exist_ok=True)
            began = time.process_time()
            golden.path.write_text(golden.text())
            print(f"wrote {golden.path.relative_to(ROOT)} ({time.process_time() - began:.1f} s)", flush=True)
        else:
            told = golden.differences()
            found += bool(told)
            print("\n".join(told or [f"{golden.title}: as recorded"]), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
