"""Labels that a mask picks: padded rows until CTC loss reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from autopar import compat
from autopar.ops.ctc import ctc_loss

_SELECTS = (torch.masked_select, torch.Tensor.masked_select, torch.Tensor.__getitem__)
_SUMS = (torch.sum, torch.Tensor.sum)
_KEEP = (torch.Tensor.to, torch.Tensor.long, torch.Tensor.int, torch.Tensor.contiguous, torch.Tensor.detach)
"""What is done to selected values, or to lengths, and leaves each where it is."""


class Selected(torch.Tensor):
    """Stands for integers that a mask of the same shape picks."""

    picked: torch.Tensor
    mask: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor, mask: torch.Tensor) -> Selected:
        selected: Selected = compat.stand_in(Selected)
        selected.picked, selected.mask = values, mask
        return selected


class Selections:
    """Labels that a mask picks, while forward runs.

    `labels.masked_select(mask)` has a shape that depends on data, which a graph cannot hold. CTC loss reads such labels
    with the length of each target: then a row a target, as long as the longest may be, says the same. Until somebody
    reads them what is selected is a `Selected`; whoever is not CTC loss gets what PyTorch gives.
    """

    def __init__(self) -> None:
        self.counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Identity of how many a mask picks of each row -> that, and the mask."""
        self.selected = False
        """Whether anything was."""

    def are_in(self, given: Any) -> bool:
        """Whether selected values are among arguments."""
        return self.selected and any(isinstance(x, Selected) for x in pytree.tree_leaves(given))

    def traced(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result if selected values may stay so, or become rows, else NotImplemented."""
        if func is F.ctc_loss:
            return self._loss(*args, **kwargs)
        if func in _SELECTS and not kwargs and len(args) == 2 and _is_mask(*args):
            self.selected = True
            return Selected.of(*args)
        if self.are_in((args, kwargs)):
            keeps = func in _KEEP and isinstance(args[0], Selected)
            return Selected.of(func(args[0].picked, *args[1:], **kwargs), args[0].mask) if keeps else NotImplemented
        if func in (*_SUMS, *_KEEP) and args and isinstance(args[0], torch.Tensor):
            return self._counted(func, args, kwargs)
        return NotImplemented

    def _counted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes how many a mask picks of each row."""
        source, result = args[0], func(*args, **kwargs)
        if func in _KEEP:
            mask = self.counts.get(id(source), (None, None))[1]
        else:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            rows = source.dtype == torch.bool and source.dim() == 2 and not kwargs.get("keepdim", len(args) > 2)
            mask = source if rows and dim in (1, -1, (1,), (-1,), [1], [-1]) else None
        if mask is not None:
            self.counts[id(result)] = result, mask
        return result

    def _loss(
        self, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if isinstance(targets, Selected):
            counted = self.counts.get(id(target_lengths), (None, None))[1]
            aligned = counted is targets.mask
            targets = _rows(targets) if aligned else _pieces(targets, target_lengths)
        return ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def _is_mask(values: Any, mask: Any) -> bool:
    """Whether integers are picked by a mask of their own shape."""
    if not (isinstance(values, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool):
        return False
    integers = not (values.is_floating_point() or values.is_complex() or isinstance(values, Selected))
    return integers and values.shape == mask.shape and values.dim() > 0


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
