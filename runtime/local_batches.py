"""Local batches: what a rank's own loader gives, as part of a global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.compat.distributed import make_dtensor
from autopar.ir.graph import meta_of
from autopar.ir.layout import Placement, Split

from .agreement import exchange
from .inputs import Inputs, Names, each
from .padding import Padder
from .placements import contiguous_stride
from .state import State


class LocalBatches:
    """Which part of a global batch each rank reads: the batch is split along every mesh axis along which the plan
    splits the rows (dim 0) of any input. An input that the plan splits otherwise is moved there."""

    def __init__(self, state: State, model: nn.Module) -> None:
        program = state.program
        inputs = [i for i in program.inputs if i.role == "input"]

        def has_rows(place: Placement) -> bool:
            return isinstance(place, Split) and place.dim == 0

        self.mesh = state.mesh
        self.axes = tuple(
            axis
            for axis, ranks in enumerate(program.mesh)
            if ranks > 1 and any(has_rows(i.layout[axis]) for i in inputs)
        )
        self.size = math.prod(program.mesh[axis] for axis in self.axes)
        self.rank = 0
        for axis in self.axes:
            self.rank = self.rank * program.mesh[axis] + state.coordinate[axis]
        split = (i for i in inputs if any(has_rows(i.layout[axis]) for axis in self.axes))
        self.rows = next((i.meta.shape[0] for i in split), 0)
        self.names = Names(model)
        names = self.names.of(i.target for i in inputs)
        self.known = {names[i.target]: bool(i.meta.shape) and i.meta.shape[0] == self.rows for i in inputs}
        """Name of an input -> whether its rows are those of the batch."""

    def sharded(self, batch: Any, padder: Padder | None) -> Any:
        """The batch with DTensors in the place of tensors that have a row for each sample of this rank. Raises
        ValueError if they do not have as many rows."""
        if self.size == 1:
            return batch
        named, listed = isinstance(batch, Mapping), isinstance(batch, Sequence)
        args = () if named else batch if listed else (batch,)
        inputs = Inputs.of(args, {**batch} if named else {})
        if padder is not None:
            length = padder.length(inputs)
            inputs = padder.padded(inputs, self.size, max(exchange(length, self.mesh)) if padder.lengths else length)
        names = self.names.of(inputs.tensors)
        sizes = {p: x.shape[0] for p, x in inputs.tensors.items() if self.known.get(names[p]) and x.dim()}
        if not sizes:
            raise ValueError(
                f"no input of {inputs.form} has the rows of a batch: give shard_batch the inputs of a call, by name "
                f"or in a tuple, as those that parallelize was given"
            )
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{path} has {size}" for path, size in sizes.items())
            raise ValueError(f"the inputs of a batch have different numbers of rows: {shown}")
        (rows,) = set(sizes.values())
        split = each({p: x for p, x in inputs.tensors.items() if self._is_batched(names[p], x, rows)}, self._split)
        args, kwargs = inputs.with_tensors(split)
        return type(batch)(kwargs) if named else args if listed else args[0]

    def _is_batched(self, name: str, tensor: torch.Tensor, rows: int) -> bool:
        """Whether its rows are samples: as in the example, and of an input that it lacks, if there are as many."""
        return self.known.get(name, tensor.dim() > 0 and tensor.shape[0] == rows)

    def _split(self, local: torch.Tensor) -> torch.Tensor:
        if not local.shape[0]:
            raise ValueError(f"a local batch has no rows: it is {meta_of(local)}. Drop it, on every rank")
        places: list[TorchPlacement] = [Replicate() for _ in self.mesh.shape]
        for axis in self.axes:
            places[axis] = Shard(0)
        shape = torch.Size((local.shape[0] * self.size, *local.shape[1:]))
        return make_dtensor(local.contiguous(), self.mesh, places, shape, contiguous_stride(tuple(shape)))
