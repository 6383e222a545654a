"""The step that is recorded: the model's forward, its loss, and autograd's backward, on fakes."""

import contextlib
import dis
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.neutral import neutral, without_autocast
from autopar.compat.patching import patched
from autopar.compat.recording import followed, function_modes
from autopar.compat.tensors import is_fake, memory_of
from autopar.ir.graph import GraphInput, GraphOutput, meta_of
from autopar.ir.precision import Precision
from autopar.ir.tree import flatten

from .captured import CaptureError, Leaf, is_constant, repeated
from .concrete import StepRecorder, same_value
from .conversion import identifier
from .functional import Functional
from .here import Here
from .recorder import line_of
from .ways import Generators, OtherWays

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the model returned. `loss` is the path of what is differentiated, None for every floating output."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    loss: str | None

    def same(self, other: "Outcome") -> bool:
        """Whether another call returned the same structure and the same constants. A class that forward makes is
        another one each time."""
        leaves = [[(leaf.path, leaf.meta, leaf.requires_grad) for leaf in each.leaves] for each in (self, other)]
        constants = zip(self.leaves, other.leaves, strict=False)
        return (
            (leaves[0], str(self.spec), self.loss) == (leaves[1], str(other.spec), other.loss)
            and all(same_value(a.constant, b.constant) for a, b in constants)
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One step as it was recorded. `inputs` are those of its graph but for constants, `results` its outputs, each with
    the number of nodes that had run when it was what it is; `checks` are the lines of code that look at data and raise;
    `checkpoints` counts the calls of `torch.utils.checkpoint`; `early` are the parameters and inputs that forward gave
    gradients by a `backward()` of its own."""

    recorder: StepRecorder
    inputs: Sequence[GraphInput]
    results: Sequence[tuple[int, GraphOutput]]
    outcome: Outcome
    checks: Sequence[str]
    checkpoints: int
    early: Sequence[str]
    mode: Any

    @property
    def end(self) -> int:
        return len(self.recorder.nodes)

    def functional(self, left: Iterable[str] = ()) -> Functional:
        """The step in functional form, in which it can be told what these values are at its end."""
        moments: dict[int, set[str]] = {self.end: set(left)}
        for moment, output in self.results:
            if output.name is not None:
                moments.setdefault(moment, set()).add(output.name)
        return Functional(self.recorder, moments, self.mode)

    def outputs(self, functional: Functional) -> list[GraphOutput]:
        """The outputs by the names that they have in functional form, without writes that change nothing."""
        outputs: list[GraphOutput] = []
        held: dict[str, str | None] = {i.target: i.name for i in self.inputs if i.role in ("parameter", "buffer")}
        for moment, output in self.results:
            name = None if output.name is None else functional.at(moment, output.name)
            if output.role in ("mutation", "update"):
                if name == held[output.target]:
                    continue
                held[output.target] = name
            outputs.append(replace(output, name=name))
        return outputs


class Step:
    """A model on fakes, its inputs by path, and its loss. `canonical` maps every name of a parameter or buffer to the
    first of the same tensor."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[tuple[str, Any]],
        spec: pytree.TreeSpec,
        fakes: Mapping[str, torch.Tensor],
        *,
        names: Mapping[str, str],
        canonical: Mapping[str, str],
        loss_fn: Callable[[Any], torch.Tensor] | None,
        here: Here,
        precision: Precision,
        mode: Any,
    ) -> None:
        self.model, self.pairs, self.spec, self.fakes, self.names = model, pairs, spec, fakes, names
        self.canonical, self.loss_fn, self.here, self.precision, self.mode = canonical, loss_fn, here, precision, mode
        self.places = {
            f"{path}.{key}" if path else key: (registry, key)
            for path, module in model.named_modules()
            for registry in (module._parameters, module._buffers)
            for key in registry
        }
        self.paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(id(module), path)
        self.recorder: StepRecorder | None = None
        """The last one."""
        self.same: Mapping[str, str] = {}
        """Paths of inputs that are an earlier one, and its path, once it is known that forward may see it."""

    @property
    def unread(self) -> Sequence[tuple[str, tuple[str, ...]]]:
        """Lines that asked for a value that is not concrete: see `StepRecorder`."""
        return () if self.recorder is None else self.recorder.unread

    @property
    def sized(self) -> str:
        """The first line whose result is as large as data say, in words."""
        if self.recorder is None:
            return ""
        lines = (self.recorder.lines.get(name) for name in self.recorder.of_data)
        return next((line_of(*line) for line in lines if line is not None), "")

    def held(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the model has now, by their first names."""
        tensors = ((name, registry[key]) for name, (registry, key) in self.places.items() if key in registry)
        return {name: tensor for name, tensor in tensors if tensor is not None and self.canonical.get(name) == name}

    def record(self, watched: contextlib.AbstractContextManager[Any]) -> Recording:
        """Runs and records one step. `watched` is around all Python of the model, and says whether that may see which
        inputs are one object."""
        sources = {path: self.here.tensor(value) for path, value in self.pairs if isinstance(value, torch.Tensor)}
        checks: dict[str, None] = {}
        generators = Generators(self.model)
        torch.clear_autocast_cache()  # within a context around all steps, it holds what the last one cast
        with followed(self.paths) as where, neutral():
            recorder = StepRecorder(where, sources)
            self.recorder = recorder
            held = self.held()
            trained = {name: tensor for name, tensor in {**held, **self.fakes}.items() if tensor.requires_grad}
            inputs = self._enter(recorder, held)
            recorder.given = frozenset(recorder.values)
            ways = OtherWays(generators, recorder, self.here)
            with watched as identities, generators.watched(), self.mode, without_checks(checks):
                self.same = repeated(self.pairs) if identities else {}
                with ways, recorder:
                    where.modes = function_modes()
                    outcome, tensors = self._forward()
                    results = [
                        GraphOutput(name=recorder.known(tensor), role="output", target=path)
                        for path, tensor in tensors.items()
                    ]
                    results += self._written(recorder, held)
                forward, late = len(recorder.nodes), list[GraphOutput]()
                early = [name for name, tensor in trained.items() if tensor.grad is not None]
                roots = {
                    path: tensor
                    for path, tensor in tensors.items()
                    if outcome.loss in (None, path) and tensor.requires_grad
                }
                tangents = {path: torch.empty(tensor.shape, dtype=tensor.dtype) for path, tensor in roots.items()}
                for path, tangent in tangents.items():
                    name = recorder.enter(identifier(f"tangent.{path}"), tangent)
                    inputs.append(GraphInput(name=name, role="tangent", target=path))
                if roots:
                    recorder.backward = True
                    with ways, recorder, without_autocast("cpu"):
                        torch.autograd.backward([*roots.values()], [*tangents.values()])
                        late = [replace(output, role="update") for output in self._written(recorder, held)]
        gradients = [
            GraphOutput(name=None if x.grad is None else recorder.known(x.grad), role="gradient", target=name)
            for name, x in trained.items()
        ]
        for tensor in (*trained.values(), *self.fakes.values()):
            tensor.grad = None
        for path, fake in self.fakes.items():
            fake.requires_grad_(path in trained)  # each call is given another one
        return Recording(
            recorder=recorder,
            inputs=inputs,
            results=[(forward, o) for o in results] + [(len(recorder.nodes), o) for o in (*late, *gradients)],
            outcome=outcome,
            checks=[*checks],
            checkpoints=where.checkpoints,
            early=early,
            mode=self.mode,
        )

    def _enter(self, recorder: StepRecorder, held: Mapping[str, torch.Tensor]) -> list[GraphInput]:
        inputs = [
            GraphInput(
                name=recorder.enter(identifier(name), tensor),
                role="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
                target=name,
            )
            for name, tensor in held.items()
        ]
        for path, fake in self.fakes.items():
            name = recorder.enter_input(path, identifier(self.names[path]), fake)
            inputs.append(GraphInput(name=name, role="input", target=path))
        return inputs

    def _forward(self) -> tuple[Outcome, dict[str, torch.Tensor]]:
        """What the model returns, and its tensors by path."""
        leaves = [
            self.fakes[self.same.get(path, path)] if isinstance(value, torch.Tensor) else value
            for path, value in self.pairs
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        args, kwargs = self.precision.cast_inputs((args, kwargs))
        output = self.precision.cast_outputs(self.model(*args, **kwargs))
        if self.loss_fn is not None:
            output = self.loss_fn(output)
        pairs, spec = flatten("output", output)
        loss = self._loss(output, pairs)
        described: list[Leaf] = []
        tensors: dict[str, torch.Tensor] = {}
        memory = {memory_of(tensor): name for name, tensor in self.held().items()}
        for path, value in pairs:
            if isinstance(value, torch.Tensor):
                shares = memory.get(memory_of(value), "")
                described.append(Leaf(path=path, meta=meta_of(value), requires_grad=value.requires_grad, shares=shares))
                tensors[path] = value
            elif is_constant(value):
                described.append(Leaf(path=path, constant=value))
            else:
                logger.warning(
                    "output %s is a %s, which holds no tensors that a graph could return: it will be None",
                    path,
                    type(value).__name__,
                )
                described.append(Leaf(path=path))
        if not tensors:
            raise CaptureError(
                f"the model returns no tensor that autopar can find in a {type(output).__name__}: register its class "
                f"with torch.utils._pytree.register_pytree_node, or pass a loss_fn"
            )
        return Outcome(spec=spec, leaves=tuple(described), loss=loss), tensors

    def _written(self, recorder: StepRecorder, held: Mapping[str, torch.Tensor]) -> list[GraphOutput]:
        """What parameters and buffers hold now."""
        outputs: list[GraphOutput] = []
        lying: dict[int, str] = {}
        for name, old in held.items():
            registry, key = self.places[name]
            new = registry.get(key)
            other = name if new is None else lying.setdefault(memory_of(new), name)
            if other != name:
                raise CaptureError(
                    f"forward leaves {name} in the memory of {other}, with which it would change: give it a copy "
                    f"(clone())"
                )
            if new is not old and isinstance(old, nn.Parameter):
                continue  # refused by `Witness`
            if new is None or meta_of(old) != meta_of(new):
                now = "None" if new is None else str(meta_of(new))
                raise CaptureError(
                    f"forward replaces buffer {name}, which is {meta_of(old)}, by {now}: keep its shape and dtype"
                )
            if new is not old and sum(first == name for first in self.canonical.values()) > 1:
                raise CaptureError(
                    f"forward replaces buffer {name}, which has another name too: write into it with copy_() if both "
                    f"are to change, or give each its own tensor"
                )
            if new.requires_grad and not isinstance(new, nn.Parameter) and not new.is_leaf:
                raise CaptureError(
                    f"the model writes what requires a gradient into buffer {name}, from where the next step would "
                    f"differentiate it: write value.detach(), or write under torch.no_grad()"
                )
            outputs.append(GraphOutput(name=recorder.known(new), role="mutation", target=name))
        return outputs

    def _loss(self, output: Any, pairs: Sequence[tuple[str, Any]]) -> str | None:
        own = None if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if self.loss_fn is not None:
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


def without_checks(lines: dict[str, None]) -> contextlib.AbstractContextManager[None]:
    """Branches on data that raise are taken not to; `lines` receives where they are. (A mode would not see those in
    torch's own functions.)"""

    def truth(tensor: torch.Tensor) -> bool:
        frame = sys._getframe(1)
        goes_on = passing(frame) if is_fake(tensor) else None
        if goes_on is None:
            return bool(original(tensor))
        lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
        return goes_on

    original = torch.Tensor.__bool__
    truth.__name__ = original.__name__
    return patched(torch.Tensor, "__bool__", truth)


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
