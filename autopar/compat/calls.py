"""What torch does around a call of a module: compiling, profiling, and the backward that runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge


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


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as they lie in memory: a view that conjugates or negates what it reads is copied."""
    return tensor.detach().resolve_conj().resolve_neg()


def receiver(node: Any) -> tuple[bool, torch.Tensor | None]:
    """Whether the backward that runs hands a gradient to this node of its graph, and the tensor to whose `.grad` the
    node adds it. None: another operator takes it, or the caller of `autograd.grad`."""
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf in autograd.grad
        return True, None
    return runs, getattr(node, "variable", None)


def keeps_graph() -> bool:
    """Whether the backward that runs may be followed by another one through the same graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_running() -> int:
    """The number of the backward that runs, each of which has its own; -1 outside."""
    return int(torch._C._current_graph_task_id())


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode derivatives are computed of it."""
    if forward_ad._current_level < 0:
        return False
    _, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return tangent is not None


def is_observed(tensor: torch.Tensor, own: int = 0) -> bool:
    """Whether somebody wants to see its gradient: by a hook beside `own` ones, or by `retain_grad()`."""
    return len(own_hooks(tensor)) > own or bool(tensor.retains_grad and not tensor.is_leaf)


def own_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """The hooks on its gradient; of an output those where it is split. A write leaves them where they were."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._backward_hooks or {}


def is_within(function: Any) -> bool:
    """Whether this thread is within a function that Python runs."""
    code = getattr(function, "__func__", function).__code__
    return any(frame.f_code is code for frame in _callers(sys._getframe(1)))


def is_asked(tensor: torch.Tensor) -> bool:
    """Whether a `torch.autograd.grad` that runs is to return its gradient. Looked for in all threads: on a GPU,
    backward has its own."""
    edge = tensor.grad_fn, tensor.output_nr
    frames = sys._current_frames() | {threading.get_ident(): sys._getframe(1)}  # one that held itself would stay alive
    for frame in chain.from_iterable(map(_callers, frames.values())):
        if frame.f_code is torch.autograd.grad.__code__:
            given = frame.f_locals.get("inputs_tuple", frame.f_locals["inputs"])
            if any(x is tensor or (isinstance(x, GradientEdge) and x[:2] == edge) for x in given):
                return True
    return False


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame of Python's, and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def computed_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, frozenset[str]]:
    """Of each tensor, the others among these that are computed of it, or are one with it, and whose gradients therefore
    reach it. Nothing of those without any."""
    there: dict[Any, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.grad_fn is not None:
            there.setdefault((tensor.grad_fn, tensor.output_nr), set()).add(name)
    reached: dict[Any, set[str]] = {}
    waiting = [node for node, _ in there]
    while waiting:
        edges = [edge for edge in waiting[-1].next_functions if edge[0] is not None]
        if ahead := [node for node, _ in edges if node not in reached]:
            waiting += ahead
        else:
            reached[waiting.pop()] = set().union(*(reached[edge[0]] | there.get(edge, set()) for edge in edges))
    found: dict[str, set[str]] = {}
    for (node, number), names in there.items():
        for name in names:
            for other in (reached[node] | there[node, number]) - {name}:
                found.setdefault(other, set()).add(name)
    return {name: frozenset(others) for name, others in found.items()}


def by_tensor() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary of tensors, by identity, that keeps none of them alive."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()
