"""Weights from a directory of safetensors files: each rank reads its part of each tensor."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.checkpoints import SafetensorsReader, Stored
from autopar.compat.converting import Conversion, stored_names
from autopar.compat.distributed import local_tensor
from autopar.compat.wrapping import plain_name
from autopar.files import cut, json_of, reading, text_of
from autopar.ir.layout import Replicate, Shape

from .agree import agreed, all_equal, digest, exchange, together
from .anew import anew_of, unsaved_buffers
from .boxes import Box, boxes
from .held import State, adopt
from .places import ValuePlace
from .state_dicts import names_in_state_dict, registered

logger = logging.getLogger("autopar")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "copy all of its files again, or give another directory"


@dataclass(kw_only=True)
class Found:
    """What files have for a model."""

    direct: Mapping[str, str]
    """Name of a value -> name in files."""
    conversions: list[Conversion]
    made: set[str]
    """Values that conversions make."""
    anew: Mapping[str, torch.Tensor]
    missing: list[str]


def read_weights(state: State, root: nn.Module, directory: str | Path, *, may_miss: bool) -> list[str]:
    """Give values to parameters and buffers, from files or computed anew, on all ranks at once. Returns the names of
    what has none and is on meta; that is an error unless `may_miss`."""
    with together(state.mesh):
        reader = opened(directory)
        found = found_in(state, root, reader.stored, directory)
        on_meta = [name for name in found.missing if _is_meta(state, name)]
        if on_meta and not may_miss:
            raise ValueError(
                f"{directory} has no values for {_listed(on_meta)}: give files of this model, or give the function "
                f"load_pretrained(..., init=) for what they lack"
            )
        parts = {n: empty_part(state, n) if _is_meta(state, n) else state.value(n) for n in found.direct}
    all_equal(
        (len(reader.stored), _digest(reader.stored)),
        state.mesh,
        f"the ranks read different files from {directory}, by number of tensors and digest of names and shapes: give "
        f"all ranks the same directory",
    )
    state.distribute(iter(found.anew.items()))
    with together(state.mesh), torch.no_grad():
        for canonical, stored in found.direct.items():
            read_part(state, canonical, parts[canonical], reader, stored)
    torch.autograd.graph.increment_version([part for n, part in parts.items() if not _is_meta(state, n)])
    _check_replicas(state, parts)
    state.distribute(_converted(state, root, reader, found.conversions))
    for name, part in parts.items():
        if _is_meta(state, name):
            adopt(state, name, part)
    _warn(state, root, reader.stored, found, directory)
    return on_meta


def found_in(state: State, root: nn.Module, stored: Mapping[str, Stored], directory: str | Path) -> Found:
    """What files have for each value, by their tables of contents. Raises ValueError for what does not fit."""
    values = {alias: value for value, aliases in state.aliases.items() for alias in aliases}
    called = names_in_state_dict(root)
    for _, registry, key in registered(root):
        if value := state.slots.get((id(registry), key)):
            values |= dict.fromkeys(called.get(id(registry[key]), ()), value)
    names, conversions = stored_names(root, stored, values)
    direct: dict[str, str] = {}
    for alias, name in names.items():
        direct.setdefault(values[alias], name)
    made = set()
    for conversion in conversions:
        like = conversion.made(root, lambda name: torch.empty(stored[name].shape, device="meta"))
        for alias, tensor in like.items():
            if alias in values:
                _check_shape(state, values[alias], alias, tuple(tensor.shape), directory)
                made.add(values[alias])
    if not direct and not made:
        what = _listed(list(stored)) or "nothing"
        raise ValueError(f"{directory} holds {what}, of which the model has none: give files of this model")
    for value, name in direct.items():
        _check_shape(state, value, name, stored[name].shape, directory)
        if state.value(value).is_floating_point() and not stored[name].dtype.is_floating_point:
            raise ValueError(
                f"{name} is {stored[name].dtype} in {directory} and {state.value(value).dtype} in the model: quantized "
                f"files cannot be trained from; give those of the full precision"
            )
    anew = {name: value for name, value in anew_of(state, root).items() if name not in direct}
    missing = [name for name in state.aliases if name not in direct and name not in made and name not in anew]
    return Found(direct=direct, conversions=conversions, made=made, anew=anew, missing=missing)


def _check_shape(state: State, value: str, name: str, shape: Shape, directory: str | Path) -> None:
    present = tuple(state.value(value).shape)
    if present != shape:
        raise ValueError(f"{name} is {list(shape)} in {directory} and {list(present)} in the model")


def _converted(
    state: State, root: nn.Module, reader: SafetensorsReader, conversions: list[Conversion]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole values, of whole tensors of files, one conversion at a time."""
    values = {alias: value for value, aliases in state.aliases.items() for alias in aliases}

    def read(name: str) -> torch.Tensor:
        held = torch.empty(reader.stored[name].shape, dtype=reader.stored[name].dtype)
        _read(reader, name, [((0,) * held.dim(), tuple(held.shape), held)])
        return held

    for conversion in conversions:
        for alias, tensor in conversion.made(root, read).items():
            if alias in values:
                yield values[alias], tensor.to(state.value(values[alias]).dtype)


def opened(directory: str | Path) -> SafetensorsReader:
    """The files that hold a model's weights. Raises ValueError for what cannot be read."""
    folder = Path(directory)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise ValueError(f"{folder} {what}: give a local directory of weights, such as save_pretrained writes")
    files = weight_files(folder)
    try:
        return SafetensorsReader(folder, files)
    except ImportError as error:
        raise ValueError("reading safetensors files needs the package safetensors: pip install safetensors") from error
    except Exception as error:  # the package has exceptions of its own, and torch's reader asserts
        raise ValueError(
            f"{folder} holds files that cannot be read as safetensors ({cut(str(error))}); {AGAIN}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names, or the single one, or all that there are (shards, without an index)."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if index.exists():
        with reading(str(index), "give a directory that save_pretrained wrote"):
            held = json_of(text_of(index))
            mapping = held.get("weight_map") if isinstance(held, dict) else None
            table: dict[str, Any] = mapping if isinstance(mapping, dict) else {"": None}
            if not all(isinstance(name, str) and Path(name).name == name for name in table.values()):
                raise ValueError("weight_map is not a table from tensors to files of the directory")
        files = [folder / name for name in sorted(set(table.values()))]
        if lacking := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{folder} lacks {_listed(lacking)}, which {INDEX} names: {AGAIN}")
        return files
    if files := sorted(folder.glob("*.safetensors")):
        return files
    others = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern))
    hint = f" (it has {_listed(others)}: load and save them with transformers once)" if others else ""
    raise ValueError(f"{folder} has no file {SINGLE}, {INDEX} or *.safetensors{hint}: give a directory of weights")


def empty_part(state: State, name: str) -> torch.Tensor:
    """Memory for this rank's part of a value."""
    present = state.value(name)
    if not isinstance(present, nn.Parameter):
        return torch.empty(present.shape, dtype=present.dtype, device=state.device)
    place = state.place(name)
    local = torch.empty(place.held(tuple(present.shape)), dtype=present.dtype, device=state.device)
    return place.dtensor(local, present.shape).requires_grad_(present.requires_grad)


def place_of(state: State, name: str) -> ValuePlace:
    """At rest; buffers are whole on every rank."""
    if isinstance(state.value(name), DTensor):
        return state.place(name)
    return state.whole_place((Replicate(),) * len(state.program.mesh))


def held_of(state: State, name: str, value: torch.Tensor) -> tuple[torch.Tensor, tuple[Box, ...]]:
    """What this rank holds of a value, and where that belongs in the global tensor."""
    local, place = local_tensor(value) if isinstance(value, DTensor) else value, place_of(state, name)
    if place.coordinate is None:
        return local.detach(), ()
    return local.detach(), boxes(tuple(value.shape), place.layout, place.sizes, place.coordinate)


def read_part(state: State, name: str, part: torch.Tensor, reader: SafetensorsReader, stored: str) -> None:
    """Read this rank's part of a value."""
    local, owned = held_of(state, name, part)
    _read(reader, stored, [(box.offsets, box.sizes, box.of(local)) for box in owned])


def _read(reader: SafetensorsReader, name: str, parts: Sequence[tuple[Shape, Shape, torch.Tensor]]) -> None:
    try:
        reader.read(name, parts)
    except Exception as error:  # of safetensors, of the file system
        why = f"{type(error).__name__}: {cut(str(error))}"
        raise ValueError(f"{cut(name)} cannot be read from {reader.folder} ({why}); {AGAIN}") from error


def _is_meta(state: State, name: str) -> bool:
    return state.value(name).device.type == "meta"


def _check_replicas(state: State, parts: Mapping[str, torch.Tensor]) -> None:
    """Ranks that hold the same part of a value have read the same."""
    own = {}
    for name, part in parts.items():
        local, owned = held_of(state, name, part)
        own.update({(name, box.offsets, box.sizes): digest(box.of(local)) for box in owned})
    seen: dict[Any, int] = {}
    for digests in exchange(own, state.mesh):
        for key, value in digests.items():
            if seen.setdefault(key, value) != value:
                text = f"the ranks read different values for {key[0]!r}: give all of them the same files"
                raise agreed(ValueError(text), state.mesh)


def _warn(state: State, root: nn.Module, stored: Iterable[str], found: Found, directory: str | Path) -> None:
    """Of what files hold beside the model, other names of tied weights apart, and of what keeps its values."""
    expected = [re.compile(p) for p in getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()]
    used = {*found.direct.values(), *(name for each in found.conversions for _, name in each.sources)}
    used.update(alias for aliases in state.aliases.values() for alias in aliases)
    unused = [name for name in stored if name not in used and not any(p.search(name) for p in expected)]
    if unused:
        logger.warning("%s: the model has no place for %s", directory, _listed(unused))
    unsaved = {plain_name(name) for name, _, _ in unsaved_buffers(root)}
    never_saved = {n for n, aliases in state.aliases.items() if unsaved.issuperset(map(plain_name, aliases))}
    kept = [n for n in found.missing if not _is_meta(state, n) and n not in never_saved]
    if kept:
        logger.warning("%s has no values for %s, which stay as they are", directory, _listed(kept))


def _digest(stored: Mapping[str, Stored]) -> str:
    text = "\n".join(f"{name} {s.dtype} {s.shape}" for name, s in sorted(stored.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _listed(names: list[str]) -> str:
    return ", ".join(map(plain_name, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
