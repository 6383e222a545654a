"""The free plan against the best preset: `python benchmarks/union.py [--model NAME ...] [--cluster NAME ...] [--docs]`.

Every cluster of the library, on up to 64 of its devices, as nodes x devices of a node and, on three axes, nodes x two
axes within a node: GPT-3 175B, Llama-3 8B and 70B, Mixtral 8x7B, BERT-large, a ViT of 22B parameters and the U-Nets of
Par4D's Table II, each at its real depth, on meta. All are scored by one evaluator: predicted seconds of a step, nothing
overlapped. `--fit` asks for plans that fit into the devices' memory. Rows of other models, clusters and meshes stay in
the file that `--json` names; with `--docs` the table of `docs/papers.md` is written from those of two axes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import marked
import torch
import torch.nn.functional as F
from torch import nn

from autopar.cluster.library import CLUSTERS, named_cluster
from autopar.cluster.machine import Cluster
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.report.rendering import rendered
from autopar.report.sections import Grid, Section

DEVICES = 64


@dataclass(frozen=True)
class Loaded:
    """A model on meta with its global batch."""

    model: nn.Module
    args: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, torch.Tensor] | None = None
    loss_fn: Callable[[Any], torch.Tensor] | None = None


def language(config: str, head: str, batch: int, sequence: int, **settings: Any) -> Loaded:
    """A Hugging Face model of tokens in bfloat16."""
    import transformers

    built = getattr(transformers, config)(use_cache=False, **settings)
    with torch.device("meta"):
        model = getattr(transformers, head)(built).to(torch.bfloat16)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return Loaded(model, kwargs={"input_ids": tokens, "labels": tokens})


def llama(batch: int, hidden: int, inner: int, layers: int, heads: int) -> Loaded:
    return language(
        "LlamaConfig", "LlamaForCausalLM", batch, 4096, vocab_size=128256, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500000.0,
    )  # fmt: skip


def vit(batch: int) -> Loaded:
    """ViT-22B's sizes: 48 layers of width 6144, MLP of 24576, 48 heads, patches of 14."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=6144, num_hidden_layers=48, num_attention_heads=48, intermediate_size=24576, patch_size=14,
        image_size=224, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config).to(torch.bfloat16)
        pixels = torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.zeros(batch, dtype=torch.long)
    return Loaded(model, kwargs={"pixel_values": pixels, "labels": labels})


class Residual(nn.Module):
    """Norm, SiLU, 3 x 3 convolution, twice; the time's embedding is added between."""

    def __init__(self, inputs: int, outputs: int, embedded: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.into = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.out = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedded, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.into(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.out(F.silu(self.second(y)))


class Attention(nn.Module):
    """Over positions, heads of 64 channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, channels), channels // 64
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, channels, height, width = x.shape
        rows = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(rows).view(n, height * width, self.heads, 3, 64).permute(3, 0, 2, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, height * width, channels)
        return x + self.out(attended).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Nichol et al.: four levels, three residual blocks each, attention at 16 x 16 and 8 x 8."""

    def __init__(self, channels: int, levels: Sequence[int] = (1, 2, 2, 2), blocks: int = 3) -> None:
        super().__init__()
        embedded = 4 * channels
        self.embed = nn.Sequential(nn.Linear(channels, embedded), nn.SiLU(), nn.Linear(embedded, embedded))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths, width = [channels], channels
        for depth, scale in enumerate(levels):
            for _ in range(blocks):
                self.down.append(self._stage(width, channels * scale, embedded, depth))
                width = channels * scale
                widths.append(width)
            if depth + 1 < len(levels):
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                widths.append(width)
        self.middle = nn.ModuleList(
            [Residual(width, width, embedded), Attention(width), Residual(width, width, embedded)]
        )
        for depth, scale in reversed(list(enumerate(levels))):
            for _ in range(blocks + 1):
                self.up.append(self._stage(width + widths.pop(), channels * scale, embedded, depth))
                width = channels * scale
            if depth:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _stage(inputs: int, outputs: int, embedded: int, depth: int) -> nn.Module:
        layers: list[nn.Module] = [Residual(inputs, outputs, embedded)]
        return nn.ModuleList([*layers, Attention(outputs)] if depth in (1, 2) else layers)

    @staticmethod
    def _through(stage: nn.Module, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        assert isinstance(stage, nn.ModuleList)
        x = stage[0](x, time)
        return stage[1](x) if len(stage) > 1 else x

    def forward(self, x: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        time = self.embed(time)
        x = self.first(x)
        kept = [x]
        for stage in self.down:
            x = stage(x) if isinstance(stage, nn.Conv2d) else self._through(stage, x, time)
            kept.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time)), time)
        for stage in self.up:
            if isinstance(stage, nn.Conv2d):
                x = stage(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            else:
                x = self._through(stage, torch.cat([x, kept.pop()], 1), time)
        return F.mse_loss(self.last(F.silu(self.norm(x))), noise)


def unet(channels: int, batch: int = 2048) -> Loaded:
    with torch.device("meta"):
        model = UNet(channels).to(torch.bfloat16)
        image = torch.zeros(batch, 3, 32, 32, dtype=torch.bfloat16)
        time = torch.zeros(batch, channels, dtype=torch.bfloat16)
    return Loaded(model, args=(image, time, image))


MODELS: Mapping[str, Callable[[], Loaded]] = {
    "GPT-3 175B": lambda: language(
        "GPT2Config", "GPT2LMHeadModel", 64, 2048, vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96,
        n_head=96, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "Llama-3 8B": lambda: llama(64, 4096, 14336, 32, 32),
    "Llama-3 70B": lambda: llama(64, 8192, 28672, 80, 64),
    "Mixtral 8x7B": lambda: language(
        "MixtralConfig", "MixtralForCausalLM", 64, 4096, vocab_size=32000, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    ),
    "BERT-large": lambda: language(
        "BertConfig", "BertForMaskedLM", 256, 512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
        num_attention_heads=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "ViT-22B": lambda: vit(256),
    "U-Net 250M": lambda: unet(256),
    "U-Net 500M": lambda: unet(416),
    "U-Net 1B": lambda: unet(512),
    "U-Net 2B": lambda: unet(768),
    "U-Net 4B": lambda: unet(1024),
}  # fmt: skip


def meshes(cluster: Cluster) -> list[dict[str, int]]:
    """Nodes x devices of a node, and the same with a node's devices on two axes."""
    within = cluster.levels[-1].size if cluster.name == "tpu-v4" else math.prod(v.size for v in cluster.levels[1:])
    within = 4 if within == 1 else within
    nodes = min(DEVICES if cluster.name != "local" else 8, cluster.devices) // within
    half = 2 ** (round(math.log2(within)) // 2)
    return [{"a": nodes, "b": within}, {"a": nodes, "b": half, "c": within // half}]


def compared(planner: Planner, limit: float | None) -> dict[str, Any]:
    """Predicted seconds of each preset and of the free plan, and what the latter took to find."""
    seconds: dict[str, float] = {}
    for preset in PRESETS:
        try:
            seconds[preset] = planner.plan(solver=preset, cost="serial", memory_limit_bytes=limit).objective_seconds
        except ValueError:
            continue  # it does not fit, or has too small a batch: there is no such plan
    started = time.perf_counter()
    try:
        plan = planner.plan(cost="serial", memory_limit_bytes=limit)
    except ValueError as error:
        return {"presets": seconds, "free": None, "why": str(error)}
    return {
        "presets": seconds,
        "free": plan.objective_seconds,
        "bytes": plan.bytes,
        "gap": plan.gap,
        "planning_seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--cluster", nargs="*", choices=tuple(CLUSTERS), default=tuple(CLUSTERS))
    parser.add_argument("--axes", type=int, nargs="*", choices=(2, 3), default=(2, 3), help="meshes of so many axes")
    parser.add_argument("--fit", action="store_true", help="only plans that fit into the devices' memory")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/papers.md")
    parser.add_argument("--json", type=Path, default=Path("union.json"))
    options = parser.parse_args()
    earlier = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    if any(row["fit"] != options.fit for row in earlier):
        parser.error(f"{options.json} has plans {'without' if options.fit else 'with'} --fit: name another file")
    rows: list[dict[str, Any]] = []
    header = ("model", "cluster", "mesh", "best preset", "its ms", "free ms", "below", "planned in")
    print("  ".join(f"{name:<17}" for name in header), flush=True)
    for name in options.model:
        case = MODELS[name]()
        first: Planner | None = None
        for place in options.cluster:
            cluster = named_cluster(place)
            for mesh in (m for m in meshes(cluster) if len(m) in options.axes):
                if first is None:
                    first = Planner(case.model, mesh, case.args, case.kwargs, loss_fn=case.loss_fn, cluster=cluster)
                seconds = compared(first.on(mesh, cluster), cluster.device.memory_bytes if options.fit else math.inf)
                rows.append({"model": name, "cluster": place, "mesh": mesh, "fit": options.fit, **seconds})
                print("  ".join(f"{cell:<17}" for cell in line(rows[-1])), flush=True)
                data = {"machine": platform.processor(), "rows": merged(earlier, rows)}
                options.json.write_text(json.dumps(data, indent=1) + "\n")
    rows = merged(earlier, rows)
    print()
    print("\n".join(summary(rows)))
    print(f"written to {options.json}")
    if options.docs:
        marked.write("papers.md", "union", documented(rows))


def merged(earlier: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows, the new ones in the place of earlier ones of the same model, cluster and mesh."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["cluster"], tuple(row["mesh"].items())

    return list({key(row): dict(row) for row in (*earlier, *new)}.values())


def line(row: Mapping[str, Any]) -> list[str]:
    mesh = "x".join(map(str, row["mesh"].values()))
    if row["free"] is None:
        return [row["model"], row["cluster"], mesh, "no plan fits"]
    if not row["presets"]:
        return [row["model"], row["cluster"], mesh, "none fits", "-", f"{row['free'] * 1e3:.1f}", "-"]
    best = min(row["presets"], key=row["presets"].__getitem__)
    preset = row["presets"][best]
    return [
        row["model"], row["cluster"], mesh, best, f"{preset * 1e3:.1f}", f"{row['free'] * 1e3:.1f}",
        f"{1 - row['free'] / preset:.1%}", f"{row['planning_seconds']:.1f} s",
    ]  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Model by cluster: by how much the free plan is below the best preset, over the meshes of both."""
    places = list(dict.fromkeys(row["cluster"] for row in rows))
    cells: list[tuple[str, ...]] = [("free below best preset", *places)]
    for name in dict.fromkeys(row["model"] for row in rows):
        below = []
        for place in places:
            here = [r for r in rows if r["model"] == name and r["cluster"] == place and r["free"] is not None]
            presets = [seconds for r in here for seconds in r["presets"].values()]
            below.append(f"{1 - min(r['free'] for r in here) / min(presets):.1%}" if presets else "-")
        cells.append((name, *below))
    heads, *rest = cells
    return rendered([Section("", [Grid(heads, rest, keys=0)])], 1000).splitlines()


def documented(rows: Sequence[Mapping[str, Any]]) -> str:
    """Cluster by model, on two axes: by how much the free plan is below the best preset, and which that is."""
    cells_of: dict[str, dict[str, str]] = {}
    for row in rows:
        if len(row["mesh"]) == 2 and row["presets"] and row["free"] is not None:
            mesh = "x".join(map(str, row["mesh"].values()))
            best = min(row["presets"], key=row["presets"].__getitem__)
            below = f"{1 - row['free'] / row['presets'][best]:.1%} ({best})"
            cells_of.setdefault(f"{row['cluster']}, {mesh}", {})[row["model"]] = below
    models = [name for name in MODELS if any(name in cells for cells in cells_of.values())]
    lines = [("cluster", *models), ("---",) * (1 + len(models))]
    lines += [(place, *[cells_of[place].get(name, "") for name in models]) for place in sorted(cells_of)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
