"""The model that an argument names: module:callable, hf:ConfigClass, or a configuration file of Hugging Face."""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.extensions import nearest
from autopar.files import json_of, reading, text_of
from autopar.planning.plan import Plan
from autopar.planning.provenance import Source

from . import FROM_FILE, GIVEN, TYPED
from .common import parsed
from .configured import FILE

HEADS = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
"""A configuration of Hugging Face gets the first of these heads that it has: masked before causal, since encoders have
both."""

CONFIG = "config.json"

NOT_OF_THE_MODEL = ("architectures", "auto_map", "dtype", "torch_dtype", "model_type", "transformers_version")
"""What a configuration file says beside the model's fields."""

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
    if FROM_FILE:
        command = f"{command}  # {FILE}: {shlex.join(FROM_FILE)}"
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
    file = _config_file(spec)
    if file is None and (not colon or not module or not name):
        raise ValueError(
            f"model {spec!r}: write module:callable, such as train:build, or hf:LlamaConfig, or give the path of a "
            f"config.json of Hugging Face, or of its folder"
        )
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        close = nearest(dtype, ("float32", "bfloat16", "float16", "float64"))
        raise ValueError(f"--dtype is {dtype!r}{close}: give float32, bfloat16, float16 or float64")
    if file is not None:
        return _from_file(file, settings, batch, sequence, kind, device)
    if module == "hf":
        return _hugging_face(name, settings, batch, sequence, kind, device)
    return _called(module, name, settings, batch, sequence, kind)


def _config_file(spec: str) -> Path | None:
    """The file, if the model is given as one of Hugging Face's configuration, or as its folder."""
    path = Path(spec)
    if path.is_dir() and (path / CONFIG).is_file():
        return path / CONFIG
    return path if path.is_file() and path.suffix == ".json" else None


def _from_file(
    file: Path, settings: Mapping[str, Any], batch: int, sequence: int, dtype: torch.dtype, device: str
) -> Loaded:
    """The model of a configuration file; nothing is downloaded, and no code of the folder is run."""
    with reading(what := f"configuration {file}", "give a config.json of Hugging Face"):
        values = json_of(text_of(file))
        kind = values.get("model_type") if isinstance(values, dict) else None
        if not isinstance(kind, str):
            raise ValueError("it has no model_type")
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ValueError(f"{file} needs transformers: pip install 'autopar[hf]'") from error
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"{what}: transformers has no model_type {kind!r}{nearest(kind, CONFIG_MAPPING)}")
    make = CONFIG_MAPPING[kind]
    given = make.from_dict({key: value for key, value in values.items() if key not in NOT_OF_THE_MODEL}).to_dict()
    kept = {key: value for key, value in given.items() if key not in NOT_OF_THE_MODEL}
    return _configured(make, kept, settings, batch, sequence, dtype, device)


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
    return _configured(make, {}, settings, batch, sequence, dtype, device)


def _configured(
    make: Any,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    batch: int,
    sequence: int,
    dtype: torch.dtype,
    device: str,
) -> Loaded:
    """The model with a loss of a class of configurations, with `settings` over `values`."""
    import transformers

    name = make.__name__
    config = make(**{**values, "use_cache": False, **settings})
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
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for key, option in (("batch", "--batch"), ("sequence", "--seq"), ("dtype", "--dtype")):
        if key not in taken and not takes_any and _is_given(option):
            raise ValueError(
                f"{module}:{name}{inspect.signature(make)} takes no {key}, so {option} would change nothing: let it "
                f"take {key}, or leave {option} out"
            )
    given = {key: value for key, value in offered.items() if key in taken} | dict(settings)
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"{module}:{name}{inspect.signature(make)}: {error}; it is given batch, sequence and dtype if it takes "
            f"arguments of these names, and others with --set"
        ) from error
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


def _is_given(option: str) -> bool:
    """Whether the running command was given an option, by a person or a file."""
    return any(word.partition("=")[0] == option for word in GIVEN)
