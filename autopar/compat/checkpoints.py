"""Files of weights, read by `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .wrapping import plain_name

Part = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
"""Of a global tensor: offsets, sizes, and where these elements are to go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsReader:
    """Tensors in some of a directory's safetensors files, by torch's reader for them: whole tensors as Hugging Face
    writes them, or shards as `torch.distributed.checkpoint` does. Imports safetensors."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystem
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        class Listed(FileSystem):
            """Beside the model's weights, a directory may hold others', or the same ones in another form."""

            def ls(self, path: Any) -> list[str]:
                return [str(file) for file in files]

        self.folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        self._reader.fs = Listed()
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        tensors = {n: m for n, m in self._metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        self._names = {n if plain_name(n) in tensors else plain_name(n): n for n in tensors}
        self.stored: Mapping[str, Stored] = {
            name: Stored(shape=tuple(tensors[n].size), dtype=tensors[n].properties.dtype)
            for name, n in self._names.items()
        }
        """By names without `torch.compile` and `checkpoint_wrapper`, which files may have."""

    def read(self, name: str, parts: Sequence[Part]) -> None:
        """Copy parts of a tensor to where they are to go. Nothing else of the file is read."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        name = self._names[name]
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        wanted = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in parts]
        items = create_read_items_for_chunk_list(name, stored, wanted)
        there = sum(torch.Size(item.lengths).numel() for item in items)
        if there != sum(target.numel() for _, _, target in parts):
            raise ValueError(f"the files hold only a part of {name}, of {list(stored.size)} elements")
        self._reader.read_data(LoadPlan(items), _into({p[0]: p[2] for p in parts})).wait()


def scattered_in_checkpoints(parts_of: Callable[[Any], Sequence[Part]]) -> None:
    """Have `torch.distributed.checkpoint` write and read a DTensor of which a rank holds several parts as these, in all
    of the process. It takes them for one, and refuses what it then sees to overlap."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    def in_parts(name: str, by_torch: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: Any, *args: Any) -> Any:
            if not (parts := parts_of(tensor)):
                return by_torch(tensor, *args)
            offsets, _, held = zip(*parts, strict=True)
            return getattr(LocalShardsWrapper([*held], [*offsets]), name)(*args)

        return method

    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        setattr(DTensor, name, in_parts(name, getattr(DTensor, name)))


def _into(targets: Mapping[tuple[int, ...], torch.Tensor]) -> Any:
    """A planner that has what is read copied to these tensors, by the offsets of the part."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Into(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            target = targets[tuple(read_item.dest_index.offset)]
            for dim, (at, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
                target = target.narrow(dim, at, size)
            return target

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            """It is in its place."""

    return Into()


SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
