"""What commands share: their options, their output, and the model that an argument names (module:callable, or
hf:ConfigClass)."""

import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from autopar.cost.optimizers import OPTIMIZERS
from autopar.extensions import nearest
from autopar.planning.costs import COSTS
from autopar.planning.plan import Plan
from autopar.planning.presets import PRESETS
from autopar.planning.provenance import Source
from autopar.solve import SOLVERS

from . import TYPED
from .telling import Ticker, notes

P = ParamSpec("P")
T = TypeVar("T")

BAD_INPUT = 2


def out() -> Console:
    """Standard output, 200 columns wide unless it is a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def reports_bad_input(command: Callable[P, T]) -> Callable[P, T]:
    """The command, with each ValueError as one line on standard error and exit status 2."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except ValueError as error:
            fail(error)

    return checked


def fail(what: object) -> NoReturn:
    notes().print(f"error: {what}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def integers(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}: give integers with commas between, such as 2,2")
    return tuple(int(part) for part in parts)


@contextmanager
def progress(enabled: bool = True) -> Iterator[Callable[[float, str], None]]:
    """Yields a function of the part that is done and the current work, which draws a bar on standard error; lines if
    that is no terminal."""
    console = notes()
    if not enabled:
        yield lambda part, what: None
    elif console.is_terminal:
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda part, what: bar.update(task, completed=part, description=what)
    else:
        with Ticker("starting") as ticker:
            yield lambda part, what: ticker.tell(f"{part:4.0%} {what}".strip())


UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (k + 1) for k, p in enumerate("KMGT")}}
UNITS |= {f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGT")}

Model = Annotated[str, typer.Argument(help="module:callable, or hf:ConfigClass such as hf:LlamaConfig.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE of the configuration, or of the callable. Repeatable.")
]
Batch = Annotated[int, typer.Option(min=1, help="Global batch size.")]
Length = Annotated[int, typer.Option("--seq", min=1, help="Sequence length.")]
Dtype = Annotated[str, typer.Option(help="Of the model.")]
Cost = Annotated[str, typer.Option(help=f"What the plan minimizes: {', '.join(COSTS)}.")]
Limit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Of a rank, such as 40GB; none lifts it. Not given: the memory of the cluster's devices less a reserve.",
    ),
]
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
Again = Annotated[
    str,
    typer.Option(
        "--recompute",
        help="What backward makes again: auto (the planner chooses), asked (what torch.utils.checkpoint marks), none.",
    ),
]
Micros = Annotated[
    int, typer.Option("--micro-batches", min=1, help="Calls of a step, each of --batch; gradients are reduced once.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
Full = Annotated[bool, typer.Option("--full", help="All that the plan says, instead of one page.")]
SOLVER_HELP = f"One of {', '.join(SOLVERS)}; or a preset: {', '.join(PRESETS)}."


def writable(path: Path | None, option: str) -> None:
    """Raises ValueError for a file that cannot be written, before anything is computed for it."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{option} is {path}, a folder: give the path of a file")
    if not folder.is_dir():
        raise ValueError(f"{option} is {path}, and there is no folder {folder}: create it, or give another path")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} is {path}, which cannot be written: give the path of another file")


def drawable(path: Path | None, option: str = "--figure") -> None:
    """As `writable`, and raises ValueError if figures cannot be drawn."""
    writable(path, option)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install 'autopar[figure]'")


def mesh_shape(text: str) -> dict[str, int]:
    """Parses "dp=2,tp=4"."""
    shape: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        if not equals or not size.isdecimal() or name in shape:
            raise ValueError(f"--mesh is {text!r}: write each axis once, with its size, such as dp=2,tp=4")
        shape[name] = int(size)
    return shape


def constraints(texts: list[str]) -> dict[str, dict[str, str]]:
    """Parses texts such as "lm_head.weight:tp=S(0)"."""
    placements: dict[str, dict[str, str]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:=]+):(\w+)=(.+)", text)
        if match is None:
            raise ValueError(f"--pin is {text!r}: write NAME:AXIS=PLACEMENT, such as lm_head.weight:tp=S(0)")
        name, axis, placement = match.groups()
        if placements.setdefault(name, {}).setdefault(axis, placement) != placement:
            raise ValueError(
                f"--pin {text!r} contradicts {axis}={placements[name][axis]} for the same name: give one of them"
            )
    return placements


def byte_count(text: str | None) -> float | None:
    """Parses "40GB" or "40GiB"; "none" and "inf" are no limit, and None leaves it to the cluster's devices."""
    if text is None:
        return None
    if text.strip().lower() in ("none", "inf"):
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"--memory-limit is {text!r}: give bytes, such as 40GB or 40GiB, or none for no limit")
    count: float = float(match[1]) * UNITS[match[2]]
    return count


def optimizer_of(text: str) -> str | float:
    """A name, or a number of bytes."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


HEADS = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
"""A configuration of Hugging Face gets the first of these heads that it has: masked before causal, since encoders have
both."""

IMAGE_SIZE = 224
"""The size that ImageNet's images are cut to, for models that take any."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and its global example inputs."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None = None


def recorded(plan: Plan, model: str, settings: Sequence[str], *, batch: int, sequence: int, dtype: str) -> Plan:
    """The plan with the command that made it, and what builds its model again."""
    values = dict(setting.split("=", 1) for setting in settings)
    source = Source(model=model, settings=values, batch=batch, sequence=sequence, dtype=dtype)
    return with_source(plan, source)


def with_source(plan: Plan, source: Source) -> Plan:
    """The plan with what builds its model, and the command as it was typed."""
    if plan.provenance is None:
        return plan
    command = shlex.join(["autopar", *TYPED]) if TYPED else ""
    return replace(plan, provenance=replace(plan.provenance, source=source, command=command))


def source_of(plan: Plan, source: Source | None = None) -> Source:
    """What builds a plan's model: another `source`, or that of the plan. Raises ValueError if neither says it."""
    source = source or (plan.provenance.source if plan.provenance is not None else None)
    if source is None:
        raise ValueError(
            f"the plan does not say how to build its model {plan.model}: give --model, and --set, --batch, --seq and "
            f"--dtype as autopar plan takes them (plans that it writes say it themselves)"
        )
    return source


def built(plan: Plan, source: Source | None = None) -> Loaded:
    """The model of a plan, built as it was for it, or from another `source`. Raises ValueError if neither says how."""
    source = source_of(plan, source)
    settings = parsed([f"{key}={value}" for key, value in source.settings.items()])
    return load(source.model, settings, batch=source.batch, sequence=source.sequence, dtype=source.dtype)


def load(
    spec: str, settings: Mapping[str, Any], *, batch: int, sequence: int, dtype: str, device: str = "meta"
) -> Loaded:
    """The model that `spec` names; one of Hugging Face is built on `device`.

    Raises ValueError if it names nothing, or nothing that builds a model."""
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"model {spec!r}: write module:callable, such as train:build, or hf:LlamaConfig")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        close = nearest(dtype, ("float32", "bfloat16", "float16", "float64"))
        raise ValueError(f"--dtype is {dtype!r}{close}: give float32, bfloat16, float16 or float64")
    if module == "hf":
        return _hugging_face(name, settings, batch, sequence, kind, device)
    return _called(module, name, settings, batch, sequence, kind)


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Parses KEY=VALUE texts; a value is JSON, or else a text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set has {setting!r}: write KEY=VALUE, such as hidden_size=1024")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values


def _hugging_face(
    name: str, settings: Mapping[str, Any], batch: int, sequence: int, dtype: torch.dtype, device: str
) -> Loaded:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"hf:{name} needs transformers: pip install 'autopar[hf]'") from error
    make = getattr(transformers, name, None)
    if not inspect.isclass(make) or not issubclass(make, transformers.PretrainedConfig):
        close = nearest(name, [known for known in dir(transformers) if known.endswith("Config")])
        raise ValueError(f"transformers has no configuration {name!r}{close}: give its class, such as hf:LlamaConfig")
    config = make(**{"use_cache": False, **settings})
    unknown = [key for key in settings if not hasattr(make(), key)]
    if unknown:
        close = nearest(unknown[0], [key for key in vars(make()) if not key.startswith("_")])
        raise ValueError(f"{name} has no {', '.join(unknown)}{close}: see its documentation for what --set may name")
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    heads = [mapping[make] for head in HEADS if make in (mapping := getattr(transformers, head))]
    if not heads:
        raise ValueError(
            f"transformers has no model with a loss for {name}: write a callable, and give module:callable"
        )
    head = heads[0][0] if isinstance(heads[0], tuple) else heads[0]
    with torch.device(device):
        model = head(config).to(dtype)
        if "pixel_values" in inspect.signature(model.forward).parameters:
            size = getattr(config, "image_size", IMAGE_SIZE)
            size = size if isinstance(size, list | tuple) else (size, size)
            pixels = torch.zeros(batch, config.num_channels, *size, dtype=dtype)
            return Loaded(model=model, kwargs={"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)})
    # real tokens, since routers send them to experts by their values when programs are measured
    tokens = torch.randint(
        config.get_text_config().vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(0)
    )
    return Loaded(model=model, kwargs={"input_ids": tokens, "labels": tokens})


def _called(
    module: str, name: str, settings: Mapping[str, Any], batch: int, sequence: int, dtype: torch.dtype
) -> Loaded:
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {module}:{name}: {error}") from error
    finally:
        sys.path.remove("")
    taken = inspect.signature(make).parameters
    offered = {"batch": batch, "sequence": sequence, "dtype": dtype}
    given = {key: value for key, value in offered.items() if key in taken} | dict(settings)
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise ValueError(f"{module}:{name}{inspect.signature(make)}: {error}; give arguments with --set") from error
    result = make(**given)
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        raise ValueError(
            f"{module}:{name} returned {type(result).__name__}: return (model, inputs) or (model, inputs, loss_fn), "
            "where inputs are the global example inputs, a tuple of positional or a dict of named ones"
        )
    model, inputs, loss_fn = (*parts, None)[:3]
    if isinstance(inputs, Mapping):
        return Loaded(model=model, kwargs=inputs, loss_fn=loss_fn)
    return Loaded(model=model, args=tuple(inputs), kwargs={}, loss_fn=loss_fn)
