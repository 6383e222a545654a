"""The step that is traced: the model from flat tensors to flat tensors, everything but the loss detached."""

import contextlib
import dis
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar import compat
from autopar.ir.graph import meta_of
from autopar.ir.precision import Precision
from autopar.ir.tree import flatten

from .captured import CaptureError, Leaf, is_constant
from .concrete import ConcreteValues, Pinned
from .here import Here
from .ways import Generators, OtherWays
from .witness import Witness

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What the model returned."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    loss: str | None


class _Outcomes:
    """What a step saw, in an object of its own: export restores a module's own attributes."""

    def __init__(self) -> None:
        self.last: _Outcome | None = None
        self.checks: dict[str, None] = {}
        """Lines of code that look at data and raise."""
        self.pinned = Pinned()
        self.unread: list[tuple[str, tuple[str, ...]]] = []
        """Of `ConcreteValues`."""
        self.inputs: list[tuple[str, torch.Tensor]] = []
        """As they were given, by path."""


class TracedStep(nn.Module):
    """The model from flat tensors to flat tensors, everything but the loss detached."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[tuple[str, Any]],
        spec: pytree.TreeSpec,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        here: Here,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.model, self.here, self.precision = model, here, precision
        self.training = model.training
        # a list, lest nn.Module take a loss that is a module for a part of the model
        self.loss_fn = [loss_fn]
        self.constants = [None if isinstance(value, torch.Tensor) else (value,) for _, value in pairs]
        self.spec = spec
        self.outcomes: _Outcomes = _Outcomes()
        self.outcomes.inputs += [(path, value) for path, value in pairs if isinstance(value, torch.Tensor)]
        self.replaced: set[str] = set()
        self.witness = Witness(model, loss_fn)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant[0] for constant in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        generators = Generators(self.model)
        given = zip(tensors, self.outcomes.inputs, strict=True)
        values = ConcreteValues({path: (fake, self.here.tensor(source)) for fake, (path, source) in given})
        self.outcomes.unread, values.valued = values.unread, self.witness.valued
        with (
            self.witness.tracing(),
            writing_buffers(self.model, self.replaced),
            generators.watched(),
            OtherWays(generators, values, self.here),
            values,
            without_checks(self.outcomes.checks),
        ):
            args, kwargs = self.precision.cast_inputs((args, kwargs))
            output = self.precision.cast_outputs(self.model(*args, **kwargs))
            if self.loss_fn[0] is not None:
                output = self.loss_fn[0](output)
        self.outcomes.pinned = values.pinned()
        pairs, spec = flatten("output", output)
        loss = self._loss(output, pairs)
        described: list[Leaf] = []
        results: list[torch.Tensor] = []
        for path, value in pairs:
            if isinstance(value, torch.Tensor):
                described.append(Leaf(path=path, meta=meta_of(value), requires_grad=value.requires_grad))
                results.append(value if loss in (None, path) else value.detach())
            elif is_constant(value):
                described.append(Leaf(path=path, constant=value))
            else:
                logger.warning(
                    "output %s is a %s, which holds no tensors that a graph could return: it will be None",
                    path,
                    type(value).__name__,
                )
                described.append(Leaf(path=path))
        if not results:
            raise CaptureError(
                f"the model returns no tensor that autopar can find in a {type(output).__name__}: register its class "
                f"with torch.utils._pytree.register_pytree_node, or pass a loss_fn"
            )
        self.outcomes.last = _Outcome(spec=spec, leaves=tuple(described), loss=loss)
        return tuple(results)

    def _loss(self, output: Any, pairs: Sequence[tuple[str, Any]]) -> str | None:
        own = None if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if self.loss_fn[0] is not None:
            loss, source = output, "loss_fn(output)"
        elif own is not None:
            loss, source = own, "the output's .loss"
        elif isinstance(output, torch.Tensor) and output.ndim == 0 and output.is_floating_point():
            loss, source = output, "the output"
        else:
            return None
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
            shown = meta_of(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"{source} is {shown}: the loss must be a tensor that is one floating number")
        path = next((path for path, value in pairs if value is loss), None)
        if path is None:
            raise CaptureError(
                f"{source} is not among the tensors that autopar can find in a {type(output).__name__}: make it a "
                f"dataclass, register it with torch.utils._pytree.register_pytree_node, or pass a loss_fn"
            )
        return path


class Replaced(Exception):
    """Forward replaces these buffers."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


def without_checks(lines: dict[str, None]) -> contextlib.AbstractContextManager[None]:
    """Branches on data that raise are taken not to; `lines` receives where they are. (A mode would not see those in
    torch's own functions.)"""

    def truth(tensor: torch.Tensor) -> bool:
        frame = sys._getframe(1)
        goes_on = passing(frame) if compat.is_fake(tensor) else None
        if goes_on is None:
            return bool(original(tensor))
        lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
        return goes_on

    original = torch.Tensor.__bool__
    truth.__name__ = original.__name__
    return compat.patched(torch.Tensor, "__bool__", truth)


@contextlib.contextmanager
def writing_buffers(model: nn.Module, replaced: set[str]) -> Iterator[None]:
    """Write buffers that forward replaces (`self.count = self.count + 1`) where they stand: export sees the one
    and loses the other. What forward reads of them is a copy, since backward may need what they were.

    Raises Replaced with the names of further ones.
    """
    places = {
        f"{path}.{key}" if path else key: (module._buffers, key, tensor)
        for path, module in model.named_modules()
        for key, tensor in module._buffers.items()
    }
    names: dict[int, int] = {}
    for _, _, old in places.values():
        names[id(old)] = names.get(id(old), 0) + 1
    for name in replaced:
        buffers, key, old = places[name]
        assert old is not None
        buffers[key] = old.clone()
    yield
    further: set[str] = set()
    for name, (buffers, key, old) in places.items():
        new, buffers[key] = buffers[key], old
        if new is old:
            continue
        if old is None or new is None or meta_of(old) != meta_of(new):
            was, now = ("None" if b is None else str(meta_of(b)) for b in (old, new))
            raise CaptureError(f"forward replaces buffer {name}, which is {was}, by {now}: keep its shape and dtype")
        if names[id(old)] > 1:
            raise CaptureError(
                f"forward replaces buffer {name}, which has another name too: write into it with copy_() if both "
                f"are to change, or give each its own tensor"
            )
        if name in replaced:
            with torch.no_grad():
                old.copy_(new)
        else:
            further.add(name)
    if further:
        raise Replaced(further)


def passing(frame: FrameType) -> bool | None:
    """The truth value that goes on, where the code at hand in a frame asks for one and raises for the other. None
    where it does not branch, where neither or both ways end in an exception, and where that might be caught.

    A graph of static shapes has no branches. Of `if torch.any(var < 0): raise ValueError(...)` it can have the way on,
    which every call takes that does not fail.
    """
    code = frame.f_code
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    offsets = sorted(instructions)
    # the branch itself, or the conversion to a truth value before it
    for offset in [o for o in offsets if o >= frame.f_lasti][:2]:
        branch = instructions[offset]
        if branch.opname.startswith("POP_JUMP") and branch.opname.endswith(("_TRUE", "_FALSE")):
            jumps_if = branch.opname.endswith("_TRUE")
            jump, stay = (_only_raises(code, start) for start in (branch.argval, _next(offsets, offset)))
            return None if jump == stay else (not jumps_if if jump else jumps_if)
        if branch.opname != "TO_BOOL":
            break
    return None


def _next(offsets: list[int], offset: int) -> int:
    return next(o for o in offsets if o > offset)


def _only_raises(code: CodeType, start: int) -> bool:
    """Whether all ways from an instruction on end in an exception that this code does not catch."""
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    offsets = sorted(instructions)
    caught = [(entry.start, entry.end) for entry in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    seen, waiting = set(), [start]
    while waiting:
        offset = waiting.pop()
        if offset in seen:
            continue
        seen.add(offset)
        instruction = instructions[offset]
        if any(first <= offset < last for first, last in caught) or offset < start:
            return False
        if instruction.opname.startswith(("RETURN", "YIELD", "SEND")):
            return False
        if instruction.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            waiting.append(instruction.argval)
            if instruction.opname.startswith("JUMP_"):  # JUMP_FORWARD, JUMP_BACKWARD: no way on but there
                continue
        waiting.append(_next(offsets, offset))
    return True
