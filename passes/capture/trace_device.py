"""A step is traced on the CPU, whatever device it will run on, so that its graph is the same everywhere.

A model may name its device: in a factory (`torch.arange(n, device="cuda")`), in a move (`x.cuda()`), or by holding
tensors there. While forward is traced that device is the CPU. What a graph says of devices its program replaces by
the one it runs on (see `runtime.execute`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from autopar.compat.tensors import is_fake, is_real, memory_of, unmodified

from .conversion import HERE


class TraceDevice:
    """Moves what is on `device_type` here, while one step is traced."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.sources: dict[int, torch.Tensor] = {}
        """Memory of a copy -> the tensor that it was copied from."""
        self._copies: dict[int, torch.Tensor] = {}  # by identity of the tensor copied

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor, or the copy on this device of a real one that is elsewhere."""
        if source.device.type == HERE.type or not is_real(source):
            return source
        if id(source) not in self._copies:
            with unmodified():
                copy = source.detach().to(HERE)
            self._copies[id(source)] = copy.requires_grad_(source.requires_grad)
            self.sources[memory_of(copy)] = source
        return self._copies[id(source)]

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a copy was made of, or the tensor itself."""
        return self.sources.get(memory_of(tensor), tensor)

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """A call of torch's with its devices, and tensors on other ones, here."""
        named = dict(kwargs)
        if self.device_type == HERE.type:
            return func, args, named
        if func is _CUDA:
            return torch.Tensor.to, (args[0], HERE), {}
        if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace(f"torch.{self.device_type}.", "torch."), *args[2:])
        if _is_index(named.get("device")):
            named["device"] = HERE
        if func is torch.Tensor.to and len(args) > 1 and _is_index(args[1]):
            args = (args[0], HERE, *args[2:])
        args, named = pytree.tree_map(self._value, (args, named))
        return func, args, named

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return HERE if value.type == self.device_type else value
        if isinstance(value, str):
            return HERE if value.partition(":")[0] == self.device_type else value
        if isinstance(value, torch.Tensor) and not is_fake(value):
            return self.tensor(value)
        return value


def _is_index(device: Any) -> bool:
    """Whether a device is named by its number alone, which is one of the accelerator's."""
    return isinstance(device, int) and not isinstance(device, bool)


_CUDA: Any = torch.Tensor.cuda
