"""Numbers that forward reads off tensors which depend on no parameter, buffer or input.

A fake has no values. How it was made is noted where everything that it was made of is known (constants of the model,
`torch.arange` and its like), and run on real tensors if a number of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import compat

_FACTORIES = frozenset(
    (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace, torch.zeros, torch.ones, torch.full,
     torch.eye)
)  # fmt: skip
_READS: Mapping[str, Callable[[torch.Tensor], Any]] = MappingProxyType(
    {
        "item": torch.Tensor.item,
        "tolist": torch.Tensor.tolist,
        "numpy": torch.Tensor.numpy,
        "__int__": int,
        "__index__": int,
        "__float__": float,
        "__bool__": bool,
    }
)
"""By name: capture has a `Tensor.__bool__` of its own."""


@dataclass(frozen=True, slots=True)
class _Made:
    """How a fake was made: its number among the results of a call, and its version then, since it may be written."""

    fake: torch.Tensor
    version: int
    number: int
    call: Callable[[], Any]


class Constants:
    """What is known of the fakes of one forward."""

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}
        self.versions: dict[int, tuple[torch.Tensor, int]] = {}

    def read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is read off a tensor of which all is known, else NotImplemented."""
        name = getattr(func, "__name__", "")
        if name not in _READS or len(args) != 1 or kwargs or not self._is_known(args[0]):
            return NotImplemented
        with compat.unmodified(), _Deterministic() as drawn:
            value = self._value(args[0])
            return NotImplemented if value is None or drawn.seen else _READS[name](value)

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note how a result was made, if all of what it was made of is known."""
        made = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [x for x in made if isinstance(x, torch.Tensor) and compat.is_fake(x)]
        if not tensors or "out" in kwargs or "empty" in getattr(func, "__name__", ""):
            return
        leaves = pytree.tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        symbolic = any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in leaves)
        known = all(map(self._is_known, given)) if given else func in _FACTORIES
        written = any(x is y for x in tensors for y in given)
        if symbolic or written or not known:
            return
        for x in given:
            if not compat.is_fake(x):
                self.versions.setdefault(id(x), (x, x._version))
        real: list[Any] = []

        def call() -> Any:
            if not real:
                values = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
                lost = any(
                    a is not None and b is None for a, b in zip(leaves, pytree.tree_leaves(values), strict=False)
                )
                real.append(None if lost else func(*values[0], **values[1]))
            return real[0]

        for number, x in enumerate(made):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.made[id(x)] = _Made(x, x._version, number if made is result else -1, call)

    def _is_known(self, x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or x.requires_grad:
            return False
        if compat.is_fake(x):
            return id(x) in self.made and x._version == self.made[id(x)].version
        return compat.is_real(x) and compat.is_plain(x)

    def _value(self, x: torch.Tensor) -> torch.Tensor | None:
        """The tensor's value, None if it was written since."""
        if not compat.is_fake(x):
            known, version = self.versions.get(id(x), (x, x._version))
            return x if known._version == version else None
        made = self.made[id(x)]
        if x._version != made.version:
            return None
        result = made.call()
        value = result if made.number < 0 or result is None else result[made.number]
        return value if isinstance(value, torch.Tensor) else None


class _Deterministic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
