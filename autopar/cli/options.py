"""Options that commands about models and plans share, and what their texts say."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from autopar.cost.optimizers import OPTIMIZERS
from autopar.planning.costs import COSTS
from autopar.planning.presets import PRESETS
from autopar.solve import SOLVERS

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (k + 1) for k, p in enumerate("KMGT")}}
UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGT")}

Model = Annotated[str, typer.Argument(help="module:callable, or hf:ConfigClass such as hf:LlamaConfig.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE of the configuration, or of the callable. Repeatable.")
]
Batch = Annotated[int, typer.Option(min=1, help="Global batch size.")]
Length = Annotated[int, typer.Option("--seq", min=1, help="Sequence length.")]
Dtype = Annotated[str, typer.Option(help="Of the model.")]
Cost = Annotated[str, typer.Option(help=f"What is least: {', '.join(COSTS)}.")]
Limit = Annotated[str | None, typer.Option("--memory-limit", help="Of a rank, such as 40GB.")]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0) or model.layers.*.mlp:dp=R. Repeatable."
    ),
]
Kept = Annotated[
    str,
    typer.Option("--optimizer", help=f"Whose states count: {', '.join(OPTIMIZERS)}; or bytes per element."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
KNOWN = f"One of {', '.join(SOLVERS)}; or a preset: {', '.join(PRESETS)}."


def mesh_shape(text: str) -> dict[str, int]:
    """Of "dp=2,tp=4"."""
    found: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        if not equals or not size.isdecimal() or name in found:
            raise ValueError(f"--mesh is {text!r}: write each axis once, with its size, such as dp=2,tp=4")
        found[name] = int(size)
    return found


def constraints(texts: list[str]) -> dict[str, dict[str, str]]:
    """Of "lm_head.weight:tp=S(0)", each."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:=]+):(\w+)=(.+)", text)
        if match is None:
            raise ValueError(f"--pin is {text!r}: write NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0)")
        name, axis, placement = match.groups()
        if found.setdefault(name, {}).setdefault(axis, placement) != placement:
            raise ValueError(
                f"--pin {text!r} contradicts {axis}={found[name][axis]} for the same name: give one of them"
            )
    return found


def byte_count(text: str | None) -> float | None:
    """Of "40GB" or "40GiB"."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"--memory-limit is {text!r}: give bytes, such as 40GB or 40GiB")
    count: float = float(found[1]) * UNITS[found[2]]
    return count


def optimizer_of(text: str) -> str | float:
    """A name, or a number of bytes."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text
