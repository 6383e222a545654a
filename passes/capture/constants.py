"""Numbers, and elements picked by masks, that forward reads off tensors which depend on constants and inputs alone.

`ConcreteValues` holds their values. A number becomes Python's, and where elements are is a constant of the graph. What
depends on an input is pinned to what it was in the example. Labels that a mask picks are padded rows until CTC loss
reads them: see `Selections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from autopar import compat
from autopar.ops.ctc import ctc_loss

from .concrete import ConcreteValues

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


_READS: Mapping[str, Callable[[torch.Tensor], Any]] = MappingProxyType(
    {
        "item": torch.Tensor.item,
        "tolist": torch.Tensor.tolist,
        "__int__": int,
        "__index__": int,
        "__float__": float,
        "__bool__": bool,
        "__complex__": complex,
    }
)
"""By name: capture has a `Tensor.__bool__` of its own."""

_PLACES = frozenset({"nonzero", "argwhere", "unique", "unique_consecutive", "_unique2"})
"""Functions whose result has as many elements as the data says: they run where that data is concrete."""

_NARROWS = frozenset({"narrow", "tensor_split"})
"""Functions that take tensors for sizes."""

_INDEXES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_MASKS = (torch.bool, torch.uint8)


class Constants:
    """Functions that ask for values, in one forward."""

    def __init__(self, values: ConcreteValues) -> None:
        self.values = values

    def read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function that reads concrete values, or NotImplemented."""
        name = getattr(func, "__name__", "")
        if (name in _READS or name == "numpy") and len(args) == 1 and not kwargs:
            return self._number(name, args[0])
        if name in _PLACES or (name == "where" and len(args) == 1 and not kwargs):
            places = self.values.read(func, args, kwargs)
            return places if places is NotImplemented else pytree.tree_map_only(torch.Tensor, _lifted, places)
        sizes = _tensors(args[1:], kwargs) if name in _NARROWS else []
        if any(compat.is_fake(x) and self.values.is_concrete(x) for x in sizes):
            numbers = pytree.tree_map_only(torch.Tensor, self.number, (args[1:], kwargs))
            return func(args[0], *numbers[0], **numbers[1])
        if func in _INDEXES:
            index = self._places(args[1], narrow=func is torch.Tensor.__setitem__ and _is_one(args[2]))
            return NotImplemented if index is None else func(args[0], index, *args[2:])
        if name == "masked_select" and not kwargs and len(args) == 2:
            x, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            index = self._places(mask, narrow=False)
            return NotImplemented if index is None else x[index]
        if name == "repeat_interleave" and self._repeats(args, kwargs):
            return self._repeated(args[0], args[1], *args[2:], **kwargs)
        return NotImplemented

    def number(self, x: torch.Tensor) -> Any:
        """The number that a tensor holds, or the tensor itself if it has no concrete value."""
        number = self._number("tolist", x)
        return x if number is NotImplemented else number

    def _number(self, name: str, x: Any) -> Any:
        if compat.is_fake(x):
            if name != "numpy":
                return self.values.read(_READS[name], (x,), {})
            value = self.values.read(torch.Tensor.clone, (x,), {})
            if value is NotImplemented:
                return value
            with compat.unmodified():
                return value.numpy()
        if not self.values.is_concrete(x):
            return NotImplemented
        self.values.valued.add(compat.memory_of(x))
        with compat.unmodified():
            return x.numpy() if name == "numpy" else _READS[name](x)

    def _places(self, index: Any, *, narrow: bool) -> tuple[Any, ...] | None:
        """An index with the places that masks pick in the place of the masks; None if there are none to replace.
        `narrow` leaves a mask as it is: what is written is one number, and no size depends on the mask."""
        parts: Sequence[Any] = index if isinstance(index, tuple) else (index,)
        if narrow or not any(map(self._is_mask, parts)):
            return None
        replaced: list[Any] = []
        for part in parts:
            places = self.values.read(torch.nonzero, (part,), {}) if self._is_mask(part) else NotImplemented
            if places is NotImplemented:
                replaced.append(part)
            else:
                with compat.unmodified():
                    columns = [column.clone() for column in places.unbind(1)]
                replaced += map(_lifted, columns)
        return tuple(replaced)

    def _is_mask(self, x: Any) -> bool:
        fake = isinstance(x, torch.Tensor) and compat.is_fake(x)
        return fake and x.dtype in _MASKS and x.dim() > 0 and self.values.is_concrete(x)

    def _repeats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        by_tensor = len(args) > 1 and isinstance(args[1], torch.Tensor) and compat.is_fake(args[1])
        return by_tensor and args[1].dim() == 1 and self.values.is_concrete(args[1]) and "output_size" not in kwargs

    def _repeated(self, x: torch.Tensor, repeats: torch.Tensor, dim: int | None = None) -> Any:
        x, dim = (x.flatten(), 0) if dim is None else (x, dim)
        repeats = repeats.expand(x.shape[dim])
        places = self.values.read(torch.repeat_interleave, (repeats,), {})
        return NotImplemented if places is NotImplemented else x.index_select(dim, _lifted(places))


def _tensors(*given: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() == 1


def _lifted(value: torch.Tensor) -> torch.Tensor:
    """A constant of the graph, as `torch.tensor` makes one."""
    constant: torch.Tensor = torch.ops.aten.lift_fresh_copy.default(value)
    return constant
