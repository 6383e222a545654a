"""How a parallel module gets its values, and gives them away: from a state_dict, a function, or a directory of Hugging
Face's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.compat.wrapping import plain_name

from .agreement import together
from .boxes import Box
from .handover import Receive, hand_over
from .load import check_shape, read_weights
from .mirrors import whole_model
from .save import FILE_BYTES, write_weights
from .state import State
from .state_dicts import saved_names
from .unsaved_buffers import computed_anew, unsaved_buffers
from .values import ModuleValues

logger = logging.getLogger("autopar")

InitFunction = Callable[[str, torch.Tensor], torch.Tensor | None]


class ValuesMixin:
    """A parallel module's values. All ranks call each of these at once."""

    _state: State

    def materialize(self, source: Mapping[str, torch.Tensor] | InitFunction) -> None:
        """Give values to parameters and buffers that are on `meta`, one global tensor at a time, of which
        this rank keeps its slice. Make the optimizer afterwards: the parameters are new objects.

        `source` is a state_dict (global tensors or DTensors, under the model's names; buffers that a
        state_dict does not hold may be among them, and are computed anew if the model says how), which replaces real
        values too; or `init_fn(name, tensor)`, called on every rank in the same order with one global uninitialised
        CPU tensor, which it fills, or returns another for. Random values must be the same on all
        ranks: seed equally. Raises ValueError, on every rank, where a value is missing, has another
        shape, or differs between ranks.
        """
        values = self._state.values
        if isinstance(source, Mapping):
            values.distribute(values_from(source, values))
        else:
            values.distribute(initialized(source, values, values.aliases))

    def load_pretrained(self, directory: str | Path, init: InitFunction | None = None) -> None:
        """Read the weights of a directory that `save_pretrained` wrote, here or in transformers, or that
        `torch.distributed.checkpoint` wrote with its `HuggingFaceStorageWriter`. Each rank reads its part of each
        tensor, from one file or several, whatever the plan was with which they were saved.

        Parameters on `meta` become new objects: make the optimizer afterwards. Others are written in place. Values are
        cast to the dtypes of the model. Buffers that files do not hold are computed anew, as the model does. What else
        is missing is given by `init(name, tensor)`, as of `materialize`; without it, a missing value that is on meta
        is an error, and one that is not stays as it is, with a warning.

        Raises ValueError, on every rank, for files that cannot be read, that lack values or hold other shapes, or that
        differ between ranks. Needs safetensors, which transformers brings.
        """
        values = self._state.values
        lacking = read_weights(values, directory, may_miss=init is not None)
        if init is not None:
            values.distribute(initialized(init, values, lacking))

    def save_pretrained(self, directory: str | Path, max_file_bytes: int = FILE_BYTES) -> None:
        """Write a directory that `from_pretrained` of transformers reads, and `load_pretrained`: safetensors files of
        up to `max_file_bytes`, each tensor whole, the model's config if it has one, and the plan
        (`autopar_plan.json`). Each rank writes its part of each tensor to its place in the file, on a file system that
        all ranks share. Files of an earlier save are replaced once all new ones are complete.

        Tied weights are written once. Raises on every rank what any rank raises.
        """
        write_weights(self._state.values, self._state.module.plan, directory, max_file_bytes)

    def shards(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """What this rank holds of each parameter and persistent buffer, under the names that `save_pretrained` writes:
        boxes of the whole tensor (`offsets`, `sizes`), mostly one, and views of them in this rank's memory. Nothing is
        sent. Raises ValueError for what is on meta."""
        values = self._state.values
        for value, name in saved_names(values).items():
            local, owned = values.held(value, values[value])
            yield from ((name, box, box.of(local)) for box in owned)

    def hand_over(
        self,
        layout: str,
        receive: Receive,
        *,
        width: int,
        on: Sequence[int] | None = None,
        bucket_bytes: int = 64 << 20,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Give the ranks of an inference engine their tensors, as its `layout` says: `VLLM`, `VLLM + VLLM_EXPERTS` of
        `autopar.runtime.engines`, or rows of your own, which that module explains.

        The engine has `width` tensor-parallel ranks, more or fewer than there are here. Engine rank n lives on rank n
        modulo the number of ranks, or on rank `on[n]`; `on` may go on with the ranks of further copies of the engine.
        There, `receive(engine_rank, name, tensor)` is called with one finished tensor after the other, to keep it or to
        copy it to where the engine has it. Tensors travel and arrive in `dtype`, if one is given.

        Beside what it keeps, a rank needs memory for one tensor of each of its engine ranks, and for `bucket_bytes` of
        what it sends and receives. Raises ValueError, on every rank, where layout, model and width do not fit; and on
        every rank what `receive` raises on any, once all have been sent theirs.
        """
        hand_over(self._state.values, layout, receive, width, on, bucket_bytes, dtype)

    def gathered(self) -> torch.nn.Module:
        """The model on one device: a copy with whole values, on each rank, in the mode of this module. It shares
        nothing with it. What the captured call does not do, it does, such as `generate` of Hugging Face's models:

            alone = parallel.gathered().eval()
            tokens = alone.generate(input_ids, max_new_tokens=20)

        Each rank needs the memory of the whole model. Raises ValueError, on every rank, where a value is on meta.
        """
        return whole_model(self._state.values)

    def to_empty(self, *, device: Any = None, recurse: bool = True) -> Any:
        """Give memory without values to what is on `meta`, on the mesh's device, for a checkpoint to be loaded into.
        Buffers that a state_dict does not hold are computed anew. Make the optimizer afterwards."""
        values = self._state.values
        with together(values.mesh):
            if device is not None and torch.device(device).type != values.device.type:
                raise ValueError(f"to_empty(device={str(device)!r}): the mesh is on {values.device}; leave device out")
            anew = computed_anew(values)
        unsaved = {slot.name for slot in unsaved_buffers(values.root)}
        for name in values.on_meta():
            if name not in anew:
                values.adopt(name, values.empty(name, values.device))
                if name in unsaved:
                    logger.warning("%s has memory without values: the model does not say how to compute it", name)
        values.distribute(anew.items())
        return self


def values_from(source: Mapping[str, torch.Tensor], values: ModuleValues) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor's value in a state_dict, under any of its names."""
    missing = []
    source = {plain_name(name): value for name, value in source.items()} | dict(source)
    for canonical, aliases in values.aliases.items():
        present = values[canonical]
        alias = next((name for name in aliases if name in source), None)
        if alias is None:
            if present.device.type == "meta":
                missing.append(canonical)
            continue
        value = source[alias]
        check_shape(values, canonical, alias, value.shape, "the state_dict")
        yield canonical, value.to(present.dtype)
    anew = computed_anew(values) if missing else {}
    if lacking := [name for name in missing if name not in anew]:
        raise ValueError(
            f"the state_dict lacks {', '.join(lacking)}, which are on meta (buffers that the model's own state_dict "
            f"does not hold may be added to it)"
        )
    yield from anew.items()


def initialized(
    function: InitFunction, values: ModuleValues, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of these that is on meta, filled by `function`."""
    for name in values.on_meta(names):
        present = values[name]
        value = torch.empty(present.shape, dtype=present.dtype)
        with torch.no_grad():
            returned = function(name, value)
        value = value if returned is None else returned
        if value.shape != present.shape:
            raise ValueError(f"init_fn returned {list(value.shape)} for {name}, which is {list(present.shape)}")
        yield name, value.to(present.dtype)
