"""Weights into a directory of safetensors files: each rank writes its part of each tensor to its place.

torch has a writer for them, which writes each rank's shards and then joins the files. It is not used here: as of 2.13,
joining writes zeros for a scalar and fails on integers, and all bytes are written twice.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.compat.checkpoints import SAFETENSORS_DTYPES

from .agreement import all_equal, on_first_rank, together
from .boxes import Box, is_owner
from .load import INDEX, SINGLE
from .state_dicts import saved_names
from .values import ModuleValues

FILE_BYTES = 5_000_000_000
"""Of a file, at most, unless a tensor has more."""

PLAN = "autopar_plan.json"
OF_A_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
PARTIAL = ".part"
"""Ends the name of a file that is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlace:
    """Where a value lies in a file."""

    value: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """In bytes, from the end of the header."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A safetensors file to be."""

    name: str
    places: tuple[FilePlace, ...]

    @property
    def header(self) -> bytes:
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for place in self.places:
            span = [place.offset, place.offset + place.bytes]
            dtype = SAFETENSORS_DTYPES[place.dtype]
            table[place.name] = {"dtype": dtype, "shape": list(place.shape), "data_offsets": span}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def bytes(self) -> int:
        return sum(place.bytes for place in self.places)


def write_weights(values: ModuleValues, plan: Any, directory: str | Path, max_file_bytes: int) -> None:
    """All ranks at once. Raises on every rank what any rank raises."""
    folder = Path(directory)
    with together(values.mesh):
        if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
            raise ValueError(f"max_file_bytes is {max_file_bytes!r}: give a number of bytes, at least 1")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: give a directory, which is made if it is not there")
        files = layout_in_files(values, max_file_bytes)
    all_equal(str(folder.absolute()), values.mesh, "the ranks are to save to different directories: give all the same")
    on_first_rank(lambda: _begin(folder, files), values.mesh)
    with together(values.mesh):
        number = 0
        for file in files:
            _write(values, folder, file, number)
            number += len(file.places)
    on_first_rank(lambda: _finish(values, plan, folder, files), values.mesh)


def layout_in_files(values: ModuleValues, max_file_bytes: int) -> list[File]:
    """Which file each value goes to, and where in it, under one name each. Raises ValueError for what has no value."""
    groups: list[list[tuple[str, str, torch.Tensor]]] = [[]]
    held = 0
    for value, name in saved_names(values).items():
        tensor = values[value]
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not hold")
        more = math.prod(tensor.shape) * tensor.dtype.itemsize
        if groups[-1] and held + more > max_file_bytes:
            groups.append([])
            held = 0
        groups[-1].append((value, name, tensor))
        held += more
    return [_file(number, len(groups), group) for number, group in enumerate(groups, 1)]


def _file(number: int, count: int, group: list[tuple[str, str, torch.Tensor]]) -> File:
    """Wide elements come first, so that each is aligned."""
    places, offset = [], 0
    for value, name, tensor in sorted(group, key=lambda each: -each[2].dtype.itemsize):
        places.append(FilePlace(value=value, name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=offset))
        offset += places[-1].bytes
    return File(name=SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors", places=tuple(places))


def _begin(folder: Path, files: Sequence[File]) -> None:
    """Files of their final size, with headers."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            with (folder / (file.name + PARTIAL)).open("wb") as stream:
                stream.write(file.header)
                stream.truncate(len(file.header) + file.bytes)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}): give another directory") from error


def _write(values: ModuleValues, folder: Path, file: File, number: int) -> None:
    """This rank's part of a file, whose first value is the model's `number`-th."""
    path, start = folder / (file.name + PARTIAL), len(file.header)
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError as error:
        raise ValueError(f"{path}, which the first rank made, is not here: all ranks must share the folder") from error
    try:
        for index, place in enumerate(file.places, number):
            at = values.place_of(place.value)
            if at.coordinate is not None and is_owner(index, at.layout, at.sizes, at.coordinate):
                local, owned = values.held(place.value, values[place.value])
                for box in owned:
                    _write_box(descriptor, start + place.offset, place.shape, box, local)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_box(descriptor: int, start: int, shape: tuple[int, ...], box: Box, local: torch.Tensor) -> None:
    """Piece by piece, each of which is in a row in the file: dims behind the last one that the box cuts are whole."""
    tensor = box.of(local).cpu().contiguous()
    cut = max((dim for dim, size in enumerate(shape) if box.sizes[dim] != size), default=0)
    rows = tensor.reshape(math.prod(box.sizes[:cut]), -1)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begins = torch.zeros(1, dtype=torch.int64)
    for at, size, stride in zip(box.offsets[:cut], box.sizes, strides, strict=False):
        begins = (begins[:, None] + torch.arange(at, at + size) * stride).flatten()
    within = box.offsets[cut] * strides[cut] if shape else 0
    data = memoryview(rows.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    wide = tensor.dtype.itemsize
    length = rows.shape[1] * wide
    for number, begin in enumerate(begins.tolist()):
        _write_all(descriptor, data[number * length : (number + 1) * length], start + (begin + within) * wide)


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    """The system writes 2 GiB at a time at most."""
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _finish(values: ModuleValues, plan: Any, folder: Path, files: Sequence[File]) -> None:
    """Put the files in the place of earlier ones, and write what belongs to them."""
    earlier = {path for path in folder.iterdir() if OF_A_MODEL.fullmatch(path.name)}
    for file in files:
        os.replace(folder / (file.name + PARTIAL), folder / file.name)
    for path in earlier - {folder / file.name for file in files}:
        path.unlink()
    if len(files) > 1:
        total = {"total_size": sum(file.bytes for file in files)}
        names = {place.name: file.name for file in files for place in file.places}
        index = json.dumps({"metadata": total, "weight_map": names}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(index + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    _write_config(values.root, folder)
    if hasattr(plan, "save"):
        plan.save(folder / PLAN)


def _write_config(root: nn.Module, folder: Path) -> None:
    """As `save_pretrained` of transformers does."""
    config: Any = getattr(root, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(root).__name__]
        dtypes = {p.dtype for p in root.parameters() if p.is_floating_point()}
        if len(dtypes) == 1:
            config.dtype = str(dtypes.pop()).removeprefix("torch.")
        config.save_pretrained(folder)
    generation: Any = getattr(root, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
