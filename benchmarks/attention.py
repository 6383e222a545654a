"""Attention as one operator beside PyTorch's own: `python benchmarks/attention.py [--rounds N] [--json FILE]`.

For each form of mask, forward and backward of `autopar::attention`, as programs run it, and of what PyTorch runs in
eager: `scaled_dot_product_attention`, or, where weights are dropped out, products, a softmax and a dropout, as captured
before there was the operator. Both take turns in one process, on a GPU if there is one. Printed are medians of
milliseconds, the peak of memory (MB) beside the operands, and ratios to PyTorch's. Drawing the dropout
mask is part of neither, since both draw the same one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from autopar.ops import sdpa
from autopar.runtime.memory import peak_bytes

SHAPES = ((4, 8, 256, 64), (2, 8, 1024, 64))
"""Batch, heads, sequence, width."""
FORMS = ("free", "causal", "window", "padding", "bias", "grouped heads", "dropout")
DROPPED = 0.1


def arguments(form: str, shape: tuple[int, ...], device: torch.device) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Query, key and value, and the other arguments of `scaled_dot_product_attention`."""
    batch, heads, length, width = shape
    of_keys = (batch, heads // 4, length, width) if form == "grouped heads" else shape
    tensors = [torch.randn(given, device=device, requires_grad=True) for given in (shape, of_keys, of_keys)]
    places = torch.arange(length, device=device)
    named: Mapping[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "window": {"attn_mask": ((places[:, None] - places).abs() < 64)[None, None]},
        "padding": {"attn_mask": (places < length - 32)[None, None, None]},
        "bias": {"attn_mask": torch.randn(1, heads, length, length, device=device)},
        "grouped heads": {"is_causal": True, "enable_gqa": True},
    }
    return tensors, named.get(form, {})


def steps(form: str, shape: tuple[int, ...], device: torch.device) -> tuple[dict[str, Callable[[], Any]], list[Any]]:
    """The two ways, each a forward and a backward, and the tensors that both hold."""
    tensors, named = arguments(form, shape, device)
    gradient, scale = torch.randn_like(tensors[0]), shape[-1] ** -0.5
    kept = torch.rand(*shape[:3], shape[2], device=device) > DROPPED

    plain = [x.detach() for x in tensors]
    about = {"scale": scale, "is_causal": named.get("is_causal", False)}
    about |= {"dropout_p": DROPPED} if form == "dropout" else {}

    @torch.no_grad()
    def ours() -> Any:
        mask = named.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf)
        masks = mask, kept if form == "dropout" else None
        results = sdpa.attention(*plain, *masks, **about)
        return sdpa.attention_backward(gradient, *plain, *results, *masks, **about)

    def torchs() -> Any:
        if form != "dropout":
            return torch.autograd.grad(F.scaled_dot_product_attention(*tensors, **named), tensors, gradient)
        query, key, value = tensors
        weights = (query @ key.transpose(-1, -2) * scale).softmax(-1)
        return torch.autograd.grad((weights * kept / (1 - DROPPED)) @ value, tensors, gradient)

    held = [*tensors, gradient, kept, *(x for x in named.values() if isinstance(x, torch.Tensor))]
    return {"autopar": ours, "torch": torchs}, held


def measure(form: str, shape: tuple[int, ...], rounds: int, device: torch.device) -> dict[str, Any]:
    ways, held = steps(form, shape, device)
    for a, b in zip(*(way() for way in ways.values()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    before = sum(x.untyped_storage().nbytes() for x in held)
    peaks = {name: peak_bytes(way, held, device) - before for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in [*ways][:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            ways[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {"form": form, "shape": shape, "seconds": medians, "peak_bytes": peaks}


def printed(rows: list[dict[str, Any]]) -> None:
    table = Table("form", "batch, heads, sequence, width", "ms", "torch's", "ratio", "peak MB", "torch's", "ratio")
    for row in rows:
        cells = [row["form"], ", ".join(map(str, row["shape"]))]
        for values, unit in ((row["seconds"], 1e3), (row["peak_bytes"], 1e-6)):
            ours, theirs = values["autopar"] * unit, values["torch"] * unit
            cells += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [measure(form, shape, options.rounds, device) for shape in SHAPES for form in FORMS]
    printed(rows)
    print(f"on {device}, one thread; kernels: {', '.join(sdpa.KERNELS)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
