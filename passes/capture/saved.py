"""Hooks of what autograd saves for backward (`torch.autograd.graph.saved_tensors_hooks`): which of them change it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from autopar.compat.neutral import cond
from autopar.compat.patching import patched
from autopar.compat.tensors import unmodified, unseen
from autopar.ir.graph import CAST, Node, Ref
from autopar.ops.aten import COPIES, NO_OPS

from .recorder import Geometry, Recorder, geometry_of
from .refusals import CHANGING_SAVED, WRITING_SAVED, refuse
from .source import line_shown

_CHECKPOINTS = (checkpoint._checkpoint_hook, checkpoint._recomputation_hook)
"""Hooks that compute again what was saved."""

_FORMULAS = frozenset({"ProdBackward0", "ProdBackward1"})
"""Nodes of autograd whose formula for fakes reads less of what is saved than that for real tensors."""

_OF_GRADIENTS = frozenset({"CumprodBackward0", "LinalgDetBackward0"})
"""The same, where their gradient is differentiated again."""

_STEPS = frozenset({nn.LSTM.forward.__code__, nn.GRU.forward.__code__, nn.RNN.forward.__code__})
"""Code that calls an operator that is recorded as its steps."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a hook made of a saved tensor, how that lay in memory, how many nodes had run, the line of the model, and
    whether the operator stands in for one that saves something else."""

    value: Any
    saved: Geometry
    moment: int
    line: str
    stands_in: bool


@contextlib.contextmanager
def watched_hooks(recorder: Recorder) -> Iterator[None]:
    """Within it hooks may not change what is saved for an operator that is recorded as others, or by another formula:
    its gradient would not be the one that eager computes from what they give back."""

    def enter(hooks: saved_tensors_hooks) -> None:
        pack, unpack = hooks.pack_hook, hooks.unpack_hook
        if not isinstance(hooks, _CHECKPOINTS):
            pack, unpack = _watched(recorder, pack, unpack)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    kind: Any = torch._C._autograd.SavedTensor
    register = kind.register_hooks
    one = {"register_hooks": lambda saved, *hooks: register(saved, *_watched(recorder, *hooks))}
    with patched(saved_tensors_hooks, __enter__=enter), patched(kind, **one):
        yield


def is_hooked() -> bool:
    """Whether hooks of the model see what is saved."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == __name__


def _watched(
    recorder: Recorder, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> tuple[Callable[[torch.Tensor], _Kept], Callable[[_Kept], Any]]:
    def packed(saved: torch.Tensor) -> _Kept:
        with unseen():
            geometry, moment = geometry_of(saved), len(recorder.nodes)
        return _Kept(pack(saved), geometry, moment, line_shown(), _stands_in(sys._getframe(1)))

    def unpacked(kept: _Kept) -> Any:
        given = unpack(kept.value)
        if (kept.stands_in or _is_of_formula(sys._getframe(1))) and not _is_same(recorder, given, kept):
            is_written = recorder.values[recorder.known(given)] == kept.saved
            refuse(WRITING_SAVED if is_written else CHANGING_SAVED, line=kept.line)
        return given

    return packed, unpacked


def _is_of_formula(frame: FrameType) -> bool:
    """Whether a node of autograd reads what it saved, by a formula that is another one for fakes. (A checkpoint reads
    what its function was given while such a node runs.)"""
    if frame.f_code is not torch.autograd.graph._engine_run_backward.__code__:
        return False
    name = torch._C._current_autograd_node().name()
    return name in _FORMULAS or (name in _OF_GRADIENTS and torch.is_grad_enabled())


def _stands_in(frame: FrameType | None) -> bool:
    """Whether code that calls an operator does so in place of torch's own."""
    callers: list[tuple[CodeType, str]] = []
    while frame is not None:
        callers.append((frame.f_code, str(frame.f_globals.get("__name__"))))
        frame = frame.f_back
    code, module = next(
        (code, module)
        for code, module in callers
        if not code.co_name.startswith("__torch_") and not module.startswith(("torch._", "torch.autograd."))
    )
    return module.startswith("autopar.") or code in _STEPS or any(code is cond.__code__ for code, _ in callers)


def _is_same(recorder: Recorder, given: Any, kept: _Kept) -> bool:
    """Whether a tensor is what was saved, or a copy of it."""
    if not isinstance(given, torch.Tensor):
        return True  # which autograd refuses
    name, moment = recorder.known(given), len(recorder.nodes)
    while (lies := recorder.values[name]) != kept.saved:
        made = [
            number
            for number, node in enumerate(recorder.nodes[:moment])
            if name in node.outputs or lies.memory in recorder.writes.get(number, ())
        ]
        if not made or lies.meta != kept.saved.meta:
            return False
        moment = made[-1]
        node = recorder.nodes[moment]
        copies = node.op == "aten.copy_.default" and recorder.values[node.inputs[0]] == lies
        source = node.args[1] if copies else node.args[0] if node.op in (*NO_OPS, *COPIES, CAST) else None
        if not isinstance(source, Ref):
            return False
        name = source.name
    return not any(
        kept.saved.memory in recorder.writes.get(number, ()) and _overlap(recorder, recorder.nodes[number], kept.saved)
        for number in range(kept.moment, moment)
    )


def _overlap(recorder: Recorder, node: Node, saved: Geometry) -> bool:
    """Whether a node that writes into the memory of a tensor writes elements of it."""
    written = [value for name in node.outputs if name and (value := recorder.values[name]).memory == saved.memory]
    if not written:
        return True
    with unmodified():
        spans = [x.offset + sum((n - 1) * s for n, s in zip(x.shape, x.stride, strict=True)) for x in (saved, *written)]
        memory = torch.zeros(max(spans) + 1, dtype=torch.bool)
        for value in written:
            memory.as_strided(value.shape, value.stride, value.offset).fill_(True)
        return bool(memory.as_strided(saved.shape, saved.stride, saved.offset).any())
