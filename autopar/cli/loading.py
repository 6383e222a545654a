"""The model that an argument names: module:callable, hf:ConfigClass, or a configuration file of Hugging Face."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.extensions import nearest
from autopar.files import json_of, reading, text_of
from autopar.ir.precision import Precision
from autopar.planning.plan import Plan
from autopar.planning.request import Source, check_dtype, options_of, parsed

from . import FROM_FILE, TYPED
from .common import wrote
from .configured import FILE

T = TypeVar("T")

OF_MODEL = options_of(Source)

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


def ask(
    verb: Callable[..., T],
    on: Any,
    typed: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    source: Source | None = None,
    **more: Any,
) -> T:
    """What a verb answers about the model that is `typed` (or of a `source` with some of it), on a mesh or so many
    devices, under these options of a request."""
    loaded = built(source or Source(**typed), typed)
    return verb(loaded.model, on, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn, **keywords(options), **more)


def keywords(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a verb."""
    parts = typed.get("precision")
    return {**typed, **({"precision": Precision(**parts)} if isinstance(parts, dict) else {})}


def kept(plan: Plan, source: Source | None, path: Path | None) -> Plan:
    """The plan with what builds its model, and the command as it was typed; saved, if there is a path for it."""
    if plan.provenance is not None:
        command = shlex.join(["autopar", *TYPED]) if TYPED else ""
        if FROM_FILE:
            command = f"{command}  # {FILE}: {shlex.join(FROM_FILE)}"
        plan = replace(plan, provenance=replace(plan.provenance, source=source, command=command))
    if path is not None:
        plan.save(path)
        wrote(path)
    return plan


def source_of(plan: Plan, typed: Mapping[str, Any], *, changes: bool = False, needed: bool = True) -> Source | None:
    """What builds a plan's model: what is `typed`, or what the plan says, with `changes` of it if they are asked for.
    Raises ValueError for options of a model that is not given, and if nothing says how though it is `needed`."""
    if "model" in typed:
        return Source(**typed)
    for name in () if changes else typed:
        raise ValueError(
            f"{OF_MODEL[name].flag_of(name)} goes with --model, which says how to build the plan's model: give both"
        )
    source = None if plan.provenance is None else plan.provenance.source
    if source is not None:
        return replace(source, **{**typed, "settings": {**source.settings, **typed.get("settings", {})}})
    if needed:
        raise ValueError(
            f"the plan does not say how to build its model {plan.model}: give --model, and --set, --batch, --seq and "
            f"--dtype as autopar plan takes them (plans that it writes say it themselves)"
        )
    return None


def _check_own(spec: str) -> None:
    """Raises ValueError for a callable of Python's library, or of an installed package: a plan is a file that others
    hand on, and of itself runs nothing but modules of its reader's own."""
    module, colon, _ = spec.partition(":")
    root = module.partition(".")[0]
    if not colon or module == "hf" or _config_file(spec) is not None:
        return
    sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(root)
    except ValueError:  # of a module that runs as a script
        found = None
    finally:
        sys.path.remove("")
    lies = [] if found is None else [*(found.submodule_search_locations or ()), *filter(None, [found.origin])]
    is_installed = any(folder in ("site-packages", "dist-packages") for place in lies for folder in Path(place).parts)
    if not lies or is_installed or root in (*sys.stdlib_module_names, "autopar"):
        raise ValueError(
            f"the plan is of {spec}, which is no module of your own, and a plan's file runs nothing else by itself: "
            f"give --model {spec} if you trust it"
        )


def built(source: Source, typed: Collection[str] = (), device: str = "meta") -> Loaded:
    """The model of a source, of which some is `typed`."""
    if "model" not in typed:
        _check_own(source.model)
    about = {f.name: getattr(source, f.name) for f in fields(source)}
    name, settings = about.pop("model"), parsed(about.pop("settings"))
    return load(name, settings, **about, device=device, typed=typed)


def load(
    spec: str,
    settings: Mapping[str, Any],
    *,
    batch: int,
    sequence: int,
    dtype: str,
    device: str = "meta",
    typed: Collection[str] = (),
) -> Loaded:
    """The model that `spec` names; one of Hugging Face is built on `device`, and a callable must take what is `typed`.

    Raises ValueError if it names nothing, or nothing that builds a model."""
    module, colon, name = spec.partition(":")
    file = _config_file(spec)
    if file is None and (not colon or not module or not name):
        raise ValueError(
            f"model {spec!r}: write module:callable, such as train:build, or hf:LlamaConfig, or give the path of a "
            f"config.json of Hugging Face, or of its folder"
        )
    check_dtype(dtype)
    offered = {"batch": batch, "sequence": sequence, "dtype": getattr(torch, dtype)}
    if file is None and module != "hf":
        return _called(module, name, settings, offered, typed)
    make, values = (_hugging_face(name), {}) if file is None else _from_file(file)
    return _configured(make, values, settings, **offered, device=device)


def _config_file(spec: str) -> Path | None:
    """The file, if the model is given as one of Hugging Face's configuration, or as its folder."""
    path = Path(spec)
    if path.is_dir() and (path / CONFIG).is_file():
        return path / CONFIG
    return path if path.is_file() and path.suffix == ".json" else None


def _transformers(spec: object) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(f"{spec} needs transformers: pip install 'autopar[hf]'") from error


def _from_file(file: Path) -> tuple[Any, dict[str, Any]]:
    """The class of a configuration file, and its values; nothing is downloaded, and no code of the folder is run."""
    with reading(what := f"configuration {file}", "give a config.json of Hugging Face"):
        values = json_of(text_of(file))
        kind = values.get("model_type") if isinstance(values, dict) else None
        if not isinstance(kind, str):
            raise ValueError("it has no model_type")
    kinds = _transformers(file).CONFIG_MAPPING
    if kind not in kinds:
        raise ValueError(f"{what}: transformers has no model_type {kind!r}{nearest(kind, kinds)}")
    make = kinds[kind]
    given = make.from_dict({key: value for key, value in values.items() if key not in NOT_OF_THE_MODEL}).to_dict()
    return make, {key: value for key, value in given.items() if key not in NOT_OF_THE_MODEL}


def _hugging_face(name: str) -> Any:
    """A class of configurations by its name."""
    transformers = _transformers(f"hf:{name}")
    make = getattr(transformers, name, None)
    if not inspect.isclass(make) or not issubclass(make, transformers.PretrainedConfig):
        close = nearest(name, [known for known in dir(transformers) if known.endswith("Config")])
        raise ValueError(f"transformers has no configuration {name!r}{close}: give its class, such as hf:LlamaConfig")
    return make


def _configured(
    make: Any,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
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
    module: str, name: str, settings: Mapping[str, Any], offered: Mapping[str, Any], typed: Collection[str]
) -> Loaded:
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {module}:{name}: {error}") from error
    finally:
        sys.path.remove("")
    taken = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for key in offered:
        if key not in taken and not takes_any and key in typed:
            option = OF_MODEL[key].flag_of(key)
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
