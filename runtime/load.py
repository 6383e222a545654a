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

from autopar.compat.checkpoints import SafetensorsReader, Stored
from autopar.compat.converting import Conversion, stored_names
from autopar.compat.wrapping import plain_name
from autopar.files import cut, json_of, reading, text_of
from autopar.ir.layout import Shape
from autopar.passes.capture.errors import listed

from .agreement import all_alike, all_equal, digest, together
from .state_dicts import names_in_state_dict
from .unsaved_buffers import computed_anew, unsaved_buffers
from .values import ModuleValues, all_slots

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


def read_weights(values: ModuleValues, directory: str | Path, *, may_miss: bool) -> list[str]:
    """Give values to parameters and buffers, from files or computed anew, on all ranks at once. Returns the names of
    what has none and is on meta; that is an error unless `may_miss`."""
    with together(values.mesh):
        reader = opened(directory)
        found = found_in(values, reader.stored, directory)
        on_meta = values.on_meta(found.missing)
        if on_meta and not may_miss:
            lacking = listed([*map(plain_name, on_meta)])
            raise ValueError(
                f"{directory} has no values for {lacking}: give files of this model, or give the function "
                f"load_pretrained(..., init=) for what they lack"
            )
        made = {name: values.empty(name, values.device) for name in values.on_meta(found.direct)}
        parts = {name: made[name] if name in made else values[name] for name in found.direct}
    all_equal(
        (len(reader.stored), _digest(reader.stored)),
        values.mesh,
        f"the ranks read different files from {directory}, by number of tensors and digest of names and shapes: give "
        f"all ranks the same directory",
    )
    values.distribute(found.anew.items())
    with together(values.mesh), torch.no_grad():
        for name, stored in found.direct.items():
            local, owned = values.held(name, parts[name])
            _read(reader, stored, [(box.offsets, box.sizes, box.of(local)) for box in owned])
    torch.autograd.graph.increment_version([part for name, part in parts.items() if name not in made])
    _check_replicas(values, parts)
    values.distribute(_converted(values, reader, found.conversions))
    for name, part in made.items():
        values.adopt(name, part)
    _warn(values, reader.stored, found, directory)
    return on_meta


def found_in(values: ModuleValues, stored: Mapping[str, Stored], directory: str | Path) -> Found:
    """What files have for each value, by their tables of contents. Raises ValueError for what does not fit."""
    known = {alias: value for value, aliases in values.aliases.items() for alias in aliases}
    called = names_in_state_dict(values.root)
    for slot in all_slots(values.root):
        if value := values.name(slot):
            known |= dict.fromkeys(called.get(id(slot.tensor), ()), value)
    names, conversions = stored_names(values.root, stored, known)
    direct: dict[str, str] = {}
    for alias, name in names.items():
        direct.setdefault(known[alias], name)
    made = set()
    for conversion in conversions:
        like = conversion.made(values.root, lambda name: torch.empty(stored[name].shape, device="meta"))
        for alias, tensor in like.items():
            if alias in known:
                check_shape(values, known[alias], alias, tensor.shape, directory)
                made.add(known[alias])
    if not direct and not made:
        what = listed([*stored]) or "nothing"
        raise ValueError(f"{directory} holds {what}, of which the model has none: give files of this model")
    for value, name in direct.items():
        check_shape(values, value, name, stored[name].shape, directory)
        if values[value].is_floating_point() and not stored[name].dtype.is_floating_point:
            raise ValueError(
                f"{name} is {stored[name].dtype} in {directory} and {values[value].dtype} in the model: quantized "
                f"files cannot be trained from; give those of the full precision"
            )
    anew = {name: value for name, value in computed_anew(values).items() if name not in direct}
    missing = [name for name in values.aliases if name not in direct and name not in made and name not in anew]
    return Found(direct=direct, conversions=conversions, made=made, anew=anew, missing=missing)


def check_shape(values: ModuleValues, value: str, name: str, shape: Sequence[int], source: str | Path) -> None:
    """Raises ValueError where a source of values has another shape, under this name, than the model."""
    present = list(values[value].shape)
    if present != list(shape):
        raise ValueError(f"{name} is {list(shape)} in {source} and {present} in the model")


def _converted(
    values: ModuleValues, reader: SafetensorsReader, conversions: list[Conversion]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole values, of whole tensors of files, one conversion at a time."""

    def read(name: str) -> torch.Tensor:
        held = torch.empty(reader.stored[name].shape, dtype=reader.stored[name].dtype)
        _read(reader, name, [((0,) * held.dim(), tuple(held.shape), held)])
        return held

    for conversion in conversions:
        for alias, tensor in conversion.made(values.root, read).items():
            if (name := values.canonical(alias)) is not None:
                yield name, tensor.to(values[name].dtype)


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
            raise ValueError(f"{folder} lacks {listed(lacking)}, which {INDEX} names: {AGAIN}")
        return files
    if files := sorted(folder.glob("*.safetensors")):
        return files
    others = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern))
    hint = f" (it has {listed(others)}: load and save them with transformers once)" if others else ""
    raise ValueError(f"{folder} has no file {SINGLE}, {INDEX} or *.safetensors{hint}: give a directory of weights")


def _read(reader: SafetensorsReader, name: str, parts: Sequence[tuple[Shape, Shape, torch.Tensor]]) -> None:
    try:
        reader.read(name, parts)
    except Exception as error:  # of safetensors, of the file system
        why = f"{type(error).__name__}: {cut(str(error))}"
        raise ValueError(f"{cut(name)} cannot be read from {reader.folder} ({why}); {AGAIN}") from error


def _check_replicas(values: ModuleValues, parts: Mapping[str, torch.Tensor]) -> None:
    """Ranks that hold the same part of a value have read the same."""
    own = {}
    for name, part in parts.items():
        local, owned = values.held(name, part)
        own.update({(name, box.offsets, box.sizes): digest(box.of(local)) for box in owned})
    text = "the ranks read different values for {name!r}: give all of them the same files"
    all_alike(own, values.mesh, text, everywhere=False)


def _warn(values: ModuleValues, stored: Iterable[str], found: Found, directory: str | Path) -> None:
    """Of what files hold beside the model, other names of tied weights apart, and of what keeps its values."""
    expected = [re.compile(p) for p in getattr(values.root, "_keys_to_ignore_on_load_unexpected", None) or ()]
    used = {*found.direct.values(), *(name for each in found.conversions for _, name in each.sources)}
    used.update(alias for aliases in values.aliases.values() for alias in aliases)
    unused = [name for name in stored if name not in used and not any(p.search(name) for p in expected)]
    if unused:
        logger.warning("%s: the model has no place for %s", directory, listed(unused))
    unsaved = {plain_name(slot.name) for slot in unsaved_buffers(values.root)}
    never_saved = {n for n, aliases in values.aliases.items() if unsaved.issuperset(map(plain_name, aliases))}
    without = {*values.on_meta(found.missing), *never_saved}
    kept = [name for name in found.missing if name not in without]
    if kept:
        logger.warning("%s has no values for %s, which stay as they are", directory, listed([*map(plain_name, kept)]))


def _digest(stored: Mapping[str, Stored]) -> str:
    text = "\n".join(f"{name} {s.dtype} {s.shape}" for name, s in sorted(stored.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
