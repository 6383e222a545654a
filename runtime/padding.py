"""Batches made up to few shapes with values that count for nothing, and outputs cut back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
    """With what the inputs of calls are made up to shapes that have a program.

    `values` maps the names of inputs to a value that counts for nothing in the model and its loss, such as
    `{"input_ids": 0, "attention_mask": 0, "labels": -100}`. A batch with fewer rows (dim 0) than the example gets rows
    of these values. With the `lengths` of `autopar.parallelize`, the length of a batch becomes the smallest of them
    that holds it: that is dim 1 of these inputs, or, for those in `dims`, the dims there, such as
    `{"attention_mask": (2, 3), "features": ()}`. That the values count for nothing is the caller's promise: a mean over
    rows, or a batch norm, counts every row.

    Raises ValueError for values and dims that are none.
    """

    values: Mapping[str, float]
    dims: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or not self.values:
            raise ValueError(f"padding values is {self.values!r}: give a value by input, such as {{'labels': -100}}")
        for name, value in self.values.items():
            if not isinstance(value, int | float):
                raise ValueError(f"padding value of {name!r} is {value!r}: give a number")
        for name, dims in self.dims.items():
            if not isinstance(dims, tuple | list) or not all(isinstance(d, int) and d > 0 for d in dims):
                raise ValueError(
                    f"padding dims of {name!r} is {dims!r}: give the dims that are the length, such as (1,)"
                )
            if dims and name not in self.values:
                raise ValueError(f"padding has dims of {name!r} and no value: name one that counts for nothing")


class Padder:
    """Pads the inputs of calls of a model, up to the rows of the inputs that it was captured with, and to one of the
    `lengths`."""

    def __init__(self, padding: Padding, lengths: Collection[int], model: nn.Module) -> None:
        self.padding, self.lengths, self.names = padding, tuple(sorted(lengths)), Names(model)
        self.rows: dict[str, int] = {}
        """Of the inputs that the model was captured with, by path."""
        self.cuts: dict[str, dict[int, int]] = {}
        """Path of an output -> its dims that follow the length, and by how much they are longer."""

    @staticmethod
    def of(padding: Padding | None, lengths: Collection[int], model: nn.Module) -> Padder | None:
        """None if there is nothing to be padded with. Raises ValueError for lengths without it."""
        if padding is None and lengths:
            raise ValueError(
                f"lengths has {', '.join(map(str, sorted(lengths)))}, and nothing says what batches are padded with: "
                f"give padding=autopar.Padding(values={{'labels': -100, ...}}) too"
            )
        return None if padding is None else Padder(padding, lengths, model)

    def example(self, args: Any, kwargs: Any, length: int = 0) -> tuple[Any, Any]:
        """The example inputs, with this length if there are lengths. Raises ValueError for a name that no input has,
        and for an input that is as long as the batch and has no value."""
        inputs = Inputs.of(args, kwargs or {})
        names = self.names.of(inputs.tensors)
        known = {*names.values(), *self.names.signature.parameters}
        if unknown := [name for name in (*self.padding.values, *self.padding.dims) if name not in known]:
            raise ValueError(f"padding names {', '.join(unknown)}, and the inputs are {', '.join(sorted(known))}")
        self.bucket(self.length(inputs))
        return inputs.with_tensors(self._tensors(inputs, 1, length))

    def captured(self, captured: Sequence[Captured]) -> None:
        """Take up what the model was captured with, the longest inputs first."""
        metas = {leaf.path: leaf.meta for leaf in captured[0].input_leaves if leaf.meta is not None}
        self.rows = {path: meta.shape[0] for path, meta in metas.items() if meta.shape}
        if len(captured) < 2:  # nothing shows what follows the length
            return
        shapes = [{leaf.path: leaf.meta.shape for leaf in one.output_leaves if leaf.meta} for one in captured]
        for path, longest in shapes[0].items():
            for dim in range(len(longest)):
                beyond = {
                    of[path][dim] - length if len(of.get(path, ())) == len(longest) else None
                    for of, length in zip(shapes, reversed(self.lengths), strict=True)
                }
                if len(beyond) == 1 and (offset := beyond.pop()) is not None:
                    self.cuts.setdefault(path, {})[dim] = offset

    def length(self, inputs: Inputs) -> int:
        """Of a batch, which is that of the longest of its inputs; 0 if there are no lengths, or it is not padded."""
        return max(self._sizes(inputs), default=0)

    def _sizes(self, inputs: Inputs) -> list[int]:
        names = self.names.of(inputs.tensors)
        tensors = {path: x for path, x in inputs.tensors.items() if not isinstance(x, DTensor)}
        return [x.shape[dim] for path, x in tensors.items() for dim in self._dims(names[path], path, x)]

    def bucket(self, length: int) -> int:
        """The smallest of the lengths that holds this one. Raises ValueError if none does."""
        if self.lengths and length > self.lengths[-1]:
            raise ValueError(
                f"the batch has length {length}, and the longest of lengths is {self.lengths[-1]}: cut it, or add a "
                f"longer one"
            )
        return next((one for one in self.lengths if one >= length), length) if length else 0

    def padded(self, inputs: Inputs, parts: int = 1, length: int | None = None) -> Inputs:
        """The inputs with the shapes of a program, or with this part of its rows; of a batch of this length. Raises
        ValueError for one that is longer than all lengths, or that must be padded and has no value for it."""
        tensors = self._tensors(inputs, parts, self.bucket(self.length(inputs) if length is None else length))
        if not tensors:
            return inputs
        args, kwargs = inputs.with_tensors(tensors)
        return Inputs.of(args, kwargs, identities=inputs.identities)

    def cut(self, inputs: Inputs, shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[int, int]]:
        """Path of an output of these `shapes` -> the sizes along the dims that are cut back to the length of inputs
        before they were padded, where these are equally long."""
        sizes, found = set(self._sizes(inputs)), dict[str, dict[int, int]]()
        if len(sizes) == 1:
            (length,) = sizes
            whole = self.bucket(length)
            for path, shape in shapes.items() if whole > length else ():
                for dim, offset in self.cuts.get(path, {}).items():
                    if dim < len(shape) and shape[dim] == whole + offset:
                        found.setdefault(path, {})[dim] = max(0, length + offset)
        return found

    def _dims(self, name: str, path: str, tensor: torch.Tensor) -> Sequence[int]:
        """The dims of an input that are its length."""
        if not self.lengths or name not in self.padding.values:
            return ()
        dims = self.padding.dims.get(name, (1,) if tensor.dim() > 1 else ())
        if any(dim >= tensor.dim() for dim in dims):
            raise ValueError(f"padding dims of {name!r} is {tuple(dims)}, and input {path} is {meta_of(tensor)}")
        return dims

    def _tensors(self, inputs: Inputs, parts: int, length: int) -> dict[str, torch.Tensor]:
        """Those that are padded, or cut, to a length (0: their own), by path."""
        names, found, short, grown = self.names.of(inputs.tensors), {}, {}, False
        own, made = self.length(inputs), dict[tuple[int, float], torch.Tensor]()
        for path, tensor in inputs.tensors.items():
            if isinstance(tensor, DTensor) or not tensor.dim():
                continue
            name = names[path]
            value, shape = self.padding.values.get(name), [*tensor.shape]
            shape[0] = max(shape[0], self.rows.get(path, self._common()) // parts)
            if value is None:
                if path in self.rows and shape[0] != tensor.shape[0]:
                    short[path] = tensor
                elif path not in self.rows and own in shape[1:] and own and name not in self.padding.dims:
                    raise ValueError(
                        f"input {path} is {meta_of(tensor)}, as long as the batch, and padding has no value for it: "
                        f"name one that counts for nothing, or, if that is not its length, dims={{{name!r}: ()}}"
                    )
                continue
            grown |= shape[0] != tensor.shape[0]
            for dim in self._dims(name, path, tensor):
                shape[dim] = length
            if [*tensor.shape] != shape:
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


def _grown(tensor: torch.Tensor, shape: Sequence[int], value: float, path: str) -> torch.Tensor:
    fill = torch.tensor(value).to(tensor.dtype)
    if fill.item() != value and tensor.dtype != torch.bool and not tensor.dtype.is_floating_point:
        raise ValueError(f"input {path} is {meta_of(tensor)}, which cannot hold the padding value {value}")
    sizes = [size for dim in reversed(range(tensor.dim())) for size in (0, shape[dim] - tensor.shape[dim])]
    return F.pad(tensor, sizes, value=value)
