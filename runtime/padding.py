"""Batches made up to few shapes with values that count for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.graph import meta_of
from autopar.passes.capture.captured import Captured

from .inputs import Inputs, Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How the inputs of calls are made up to shapes that have a program.

    `values` maps the names of inputs to a value that counts for nothing in the model and its loss, such as
    `{"input_ids": 0, "attention_mask": 0, "labels": -100}`. A batch with fewer rows (dim 0) than the example gets rows
    of these values. With `lengths`, dim 1 becomes the smallest of them that holds it; a longer one stays as it is.
    Outputs have the padded shapes. That the values count for nothing is the caller's promise: a mean over rows, or a
    batch norm, counts every row.

    Raises ValueError for values and lengths that are none.
    """

    values: Mapping[str, float]
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or not self.values:
            raise ValueError(f"padding values is {self.values!r}: give a value by input, such as {{'labels': -100}}")
        for name, value in self.values.items():
            if not isinstance(value, int | float):
                raise ValueError(f"padding value of {name!r} is {value!r}: give a number")
        sizes = self.lengths if isinstance(self.lengths, tuple | list) else (None,)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"padding lengths is {self.lengths!r}: give positive integers, such as (128, 256, 512)")
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))

    def length(self, size: int) -> int:
        """The smallest of the lengths that holds `size`, which stays if none does."""
        return next((length for length in self.lengths if length >= size), size)


class Padder:
    """Pads the inputs of calls of a model, up to `rows` of the inputs that it was captured with."""

    def __init__(self, padding: Padding, model: nn.Module) -> None:
        self.padding, self.names = padding, Names(model)
        self.rows: dict[str, int] = {}
        """Of the inputs that the model was captured with, by path."""

    def example(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The example inputs, padded in length. Raises ValueError for a name that no input has."""
        inputs = Inputs.of(args, kwargs or {})
        known = {*self.names.of(inputs.tensors).values(), *self.names.signature.parameters}
        if unknown := [name for name in self.padding.values if name not in known]:
            raise ValueError(f"padding names {', '.join(unknown)}, and the inputs are {', '.join(sorted(known))}")
        return inputs.with_tensors(self._tensors(inputs, 1))

    def captured(self, captured: Captured) -> None:
        """Take up what the model was captured with."""
        metas = {leaf.path: leaf.meta for leaf in captured.input_leaves if leaf.meta is not None}
        self.rows = {path: meta.shape[0] for path, meta in metas.items() if meta.shape}

    def padded(self, inputs: Inputs, parts: int = 1) -> Inputs:
        """The inputs with the shapes of a program, or with this part of its rows. Raises ValueError for one that is
        short of rows and has no value to be padded with."""
        tensors = self._tensors(inputs, parts)
        if not tensors:
            return inputs
        args, kwargs = inputs.with_tensors(tensors)
        return Inputs.of(args, kwargs, identities=inputs.identities)

    def _tensors(self, inputs: Inputs, parts: int) -> dict[str, torch.Tensor]:
        """Those that are padded, by path."""
        names, found, short, grown = self.names.of(inputs.tensors), {}, {}, False
        made: dict[tuple[int, float], torch.Tensor] = {}
        for path, tensor in inputs.tensors.items():
            if isinstance(tensor, DTensor) or not tensor.dim():
                continue
            value = self.padding.values.get(names[path])
            rows = max(tensor.shape[0], self.rows.get(path, self._common()) // parts)
            length = self.padding.length(tensor.shape[1]) if tensor.dim() > 1 else 0
            if value is None:
                if path in self.rows and rows != tensor.shape[0]:
                    short[path] = tensor
                continue
            shape = (rows, length, *tensor.shape[2:])[: tensor.dim()]
            grown |= rows != tensor.shape[0]
            if tuple(tensor.shape) != shape:
                key = id(tensor), value  # what is one tensor stays one
                if key not in made:
                    made[key] = _grown(tensor, shape, value, path)
                found[path] = made[key]
        if grown and short:
            path, tensor = next(iter(short.items()))
            raise ValueError(
                f"input {path} is {meta_of(tensor)}, of {self.rows[path] // parts} rows, and padding has no value for "
                f"it: name one that counts for nothing"
            )
        return found

    def _common(self) -> int:
        """The rows of an input that the model was captured without."""
        named = {name: path for path, name in self.names.of(self.rows).items()}
        return next((self.rows[named[name]] for name in self.padding.values if name in named), 0)


def _grown(tensor: torch.Tensor, shape: tuple[int, ...], value: float, path: str) -> torch.Tensor:
    fill = torch.tensor(value).to(tensor.dtype)
    if fill.item() != value and tensor.dtype != torch.bool and not tensor.dtype.is_floating_point:
        raise ValueError(f"input {path} is {meta_of(tensor)}, which cannot hold the padding value {value}")
    sizes = [size for dim in reversed(range(tensor.dim())) for size in (0, shape[dim] - tensor.shape[dim])]
    return F.pad(tensor, sizes, value=value)
