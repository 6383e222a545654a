"""Which results of a program lie in memory that others write, and are copied before they are handed out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.compat.outputs import is_view
from autopar.compat.tensors import memory_of, storage_span


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Of a forward half: results that share memory with an input (a parameter, a buffer, a constant, the caller's
    batch) or with another result, and what is saved for backward and lies in a buffer that the program writes.

    A program's values never change. What a module hands out and keeps lies in memory that people and optimizers write:
    a value that shares memory with such a place is copied. Which they are is a property of the program, so one look at
    where its values lie is enough.
    """

    results: tuple[int, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    """Inputs whose memory is kept for backward as it is."""

    @staticmethod
    def of(
        given: Sequence[torch.Tensor],
        written: Sequence[int],
        results: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
    ) -> SharedMemory:
        """`written` are the indices of the inputs that are buffers and written by the program."""
        storages = [memory_of(x) for x in given]
        taken, buffers = set(storages), {storages[k] for k in written}
        behind = [memory_of(x) for x in saved]
        kept = {storage for storage in behind if storage not in buffers}
        shared = []
        for index, value in enumerate(results):
            if value is not None and value.numel():
                storage = memory_of(value)
                # outputs are no views, and a write into one that was would not be seen to change what is kept
                if storage in taken or (storage in kept and is_view(value)):
                    shared.append(index)
                taken.add(storage)
        return SharedMemory(
            results=tuple(shared),
            saved=tuple(i for i, storage in enumerate(behind) if storage in buffers),
            kept=tuple(i for i, storage in enumerate(storages) if storage in kept),
        )

    def apart(
        self, results: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]]:
        copies, kept = list(results), list(saved)
        for index in self.results:
            value = copies[index]
            assert value is not None
            copies[index] = value.clone(memory_format=torch.contiguous_format)
        for index in self.saved:
            kept[index] = kept[index].clone()
        return tuple(copies), tuple(kept)


def overlapping(
    gradients: list[torch.Tensor | None], kept: list[tuple[weakref.ref[torch.UntypedStorage], tuple[int, int, int]]]
) -> tuple[int, ...]:
    """Indices of the gradients that share memory with an earlier one or with what backward was given and still lives,
    or are not contiguous, as the parameters are.
    """
    taken: dict[int, list[tuple[int, int]]] = {}
    for weak, (storage, begin, end) in kept:
        if weak() is not None:
            taken.setdefault(storage, []).append((begin, end))
    indices = []
    for index, value in enumerate(gradients):
        if value is not None:
            storage, begin, end = storage_span(value)
            spans = taken.setdefault(storage, [])
            if (
                any(begin < other_end and other_begin < end for other_begin, other_end in spans)
                or not value.is_contiguous()
            ):
                indices.append(index)
            spans.append((begin, end))
    return tuple(indices)
