"""Labels that a mask picks: padded rows until CTC loss reads them.

`labels.masked_select(mask)` has a shape that depends on data, which a graph cannot hold. CTC loss reads such labels
with the length of each target: then a row a target, as long as the longest may be, says the same. Until somebody reads
them what is selected is a `Selected`; whoever is not CTC loss gets what PyTorch gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from autopar.compat.tensors import stand_in
from autopar.extensions import Plug
from autopar.ir.graph import CAST
from autopar.ops.aten import COPIES, NO_OPS
from autopar.ops.kinds import SUM
from autopar.passes.capture.overrides import OVERRIDES
from autopar.passes.capture.recorder import Recorder

from .ctc import ctc_loss

_KEEP = (torch.Tensor.to, torch.Tensor.long, torch.Tensor.int, torch.Tensor.contiguous, torch.Tensor.detach)
"""What is done to selected values and leaves each where it is."""

_KEEPS = {*COPIES, *NO_OPS, CAST}
"""Operators of which the same is true of numbers."""


class Selected(torch.Tensor):
    """Stands for integers that a mask of the same shape picks, as both were."""

    picked: torch.Tensor
    mask: torch.Tensor
    readers = (F.ctc_loss,)

    @staticmethod
    def of(values: torch.Tensor, mask: torch.Tensor) -> Selected:
        selected: Selected = stand_in(Selected)
        selected.picked, selected.mask = values, mask
        return selected

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KEEP and isinstance(args[0], Selected):
            return Selected.of(func(args[0].picked, *args[1:], **(kwargs or {})), args[0].mask)
        select = torch.ops.aten.index.Tensor
        args, kwargs = pytree.tree_map_only(Selected, lambda x: select(x.picked, [x.mask]), (args, kwargs or {}))
        return func(*args, **kwargs)


def indexed(values: torch.Tensor, index: Any) -> torch.Tensor:
    """`values[index]`, or what stands for it."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.shape == values.shape
    if not is_mask or values.is_floating_point() or values.is_complex() or not values.dim():
        result: torch.Tensor = values[index]
        return result
    return Selected.of(values.clone(), index.clone())  # either may be written before they are read


def masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`torch.masked_select`, as an index."""
    if input.shape != mask.shape:
        input, mask = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
    return indexed(input, mask)


def selected_loss(
    recorder: Recorder,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """`torch.nn.functional.ctc_loss`, of selected targets too."""
    if isinstance(targets, Selected):
        counted = isinstance(target_lengths, torch.Tensor) and _counts(recorder, target_lengths, targets.mask)
        targets = _rows(targets) if counted else _pieces(targets, target_lengths)
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _counts(recorder: Recorder, lengths: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether lengths are how many a mask picks of each row."""
    made = {name: node for node in recorder.nodes for name in node.outputs}

    def source(name: str) -> str:
        while name in made and made[name].op in _KEEPS:
            name = made[name].inputs[0]
        return name

    picks, count = (source(recorder.name(x) or "") for x in (mask, lengths))
    node = made.get(count)
    if node is None or node.op != SUM or mask.dim() != 2 or node.args[1:] not in _OF_ROWS:
        return False
    written = frozenset[int]().union(*recorder.writes.values())
    unwritten = written.isdisjoint(recorder.values[name].memory for name in (picks, count))
    return unwritten and source(node.inputs[0]) == picks


_OF_ROWS = (((-1,),), ((1,),))


def _rows(selected: Selected) -> torch.Tensor:
    """[batch, longest] of what is picked of each row, zeros behind it."""
    return _packed(selected.picked, selected.mask)[:, :-1]


def _pieces(selected: Selected, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """[batch, all]: the picked elements in order, cut at these lengths; the rest stand behind."""
    picked = _packed(selected.picked.reshape(1, -1), selected.mask.reshape(1, -1))[0]
    counts = torch.as_tensor(lengths, device=picked.device).reshape(-1)
    last = picked.shape[0] - 1
    first = counts.cumsum(0) - counts
    places = first.unsqueeze(1) + torch.arange(last, device=picked.device)
    return picked[places.clamp(max=last)]


def _packed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[rows, n] -> [rows, n + 1]: what is picked of each row in front, zeros behind, and at last one not picked."""
    count = values.shape[1]
    places = torch.where(mask, mask.long().cumsum(1) - 1, count)
    return values.new_zeros((values.shape[0], count + 1)).scatter(1, places, values)


OVERRIDES.know(
    Plug(
        "CTC loss",
        lambda recorder: {
            torch.masked_select: masked_select,
            torch.Tensor.masked_select: masked_select,
            torch.Tensor.__getitem__: indexed,
            F.ctc_loss: partial(selected_loss, recorder),
        },
    )
)
