"""What torch does around a call of a module: compiling, profiling, and the backward that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch


def is_profiling() -> bool:
    """Whether a `torch.profiler` records in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is under `torch.compile`: Dynamo would follow it into planning."""
    reason = "a parallel module is compiled already: what it runs is its program"
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each has been written in place. A DTensor counts writes that its local tensor does not."""
    return [tensor._version for tensor in tensors]


def receiver(node: Any) -> tuple[bool, torch.Tensor | None]:
    """Whether the backward that runs hands a gradient to this node of its graph, and the tensor to whose `.grad` the
    node adds it. None: another operator takes it, or the caller of `autograd.grad`."""
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf in autograd.grad
        return True, None
    return runs, getattr(node, "variable", None)


def backward_running() -> int:
    """The number of the backward that runs, each of which has its own; -1 outside."""
    return int(torch._C._current_graph_task_id())


def is_observed(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to see its gradient: by a hook, or by `retain_grad()`."""
    return bool(tensor._backward_hooks) or bool(tensor.retains_grad and not tensor.is_leaf)


def by_tensor() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary of tensors, by identity, that keeps none of them alive."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()
