"""A model named on the command line: module:callable, or hf:ConfigClass."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

HEADS = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
"""The head that a configuration of Hugging Face gets is the first that it has: masked before causal, since
encoders have both."""

IMAGE_SIZE = 224
"""Of models that take any, as ImageNet's are cut."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and its global example inputs."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None = None


def load(
    spec: str, settings: Mapping[str, Any], *, batch: int, sequence: int, dtype: str, device: str = "meta"
) -> Loaded:
    """What `spec` names; a model of Hugging Face is made on `device`.

    Raises ValueError where it names nothing, or what it names makes no model."""
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"model {spec!r}: write module:callable, such as train:build, or hf:LlamaConfig")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"--dtype is {dtype!r}: give float32, bfloat16, float16 or float64")
    if module == "hf":
        return _hugging_face(name, settings, batch, sequence, kind, device)
    return _called(module, name, settings, batch, sequence, kind)


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE texts; a value is JSON, or else a text."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set has {setting!r}: write KEY=VALUE, such as hidden_size=1024")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _hugging_face(
    name: str, settings: Mapping[str, Any], batch: int, sequence: int, dtype: torch.dtype, device: str
) -> Loaded:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"hf:{name} needs transformers: pip install 'autopar[hf]'") from error
    make = getattr(transformers, name, None)
    if not inspect.isclass(make) or not issubclass(make, transformers.PretrainedConfig):
        raise ValueError(f"transformers has no configuration {name!r}: give its class, such as hf:LlamaConfig")
    config = make(**{"use_cache": False, **settings})
    unknown = [key for key in settings if not hasattr(make(), key)]
    if unknown:
        raise ValueError(f"{name} has no {', '.join(unknown)}: see its documentation for what --set may name")
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
    # real ones: where programs are measured, routers send tokens where they would
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
    made = make(**given)
    parts = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        raise ValueError(
            f"{module}:{name} returned {type(made).__name__}: return (model, inputs) or (model, inputs, loss_fn), "
            "where inputs are the global example inputs, a tuple of positional or a dict of named ones"
        )
    model, inputs, loss_fn = (*parts, None)[:3]
    if isinstance(inputs, Mapping):
        return Loaded(model=model, kwargs=inputs, loss_fn=loss_fn)
    return Loaded(model=model, args=tuple(inputs), kwargs={}, loss_fn=loss_fn)
