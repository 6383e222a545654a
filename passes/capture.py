"""Capture: a model and example inputs in, the joint graph of one step out.

    model, args, kwargs --fake copy--> fakes --export_joint--> torch.fx graph --_Conversion--> JointGraph

The model is traced as a copy whose tensors are fakes, so that a model of any size, real, on `meta` or
fake, is captured on a laptop, and the user's own model is only read.

In the graph that comes out every pure view is one of two operators, `aten.reshape.default(x, shape)`
with explicit sizes and `aten.permute.default(x, order)` with non-negative dims, and there is none that
does nothing. Which module a node belongs to: a forward node to the module whose forward made it, a
backward node to that of the forward node whose gradient it computes. The adds by which autograd
accumulates the gradients of a tensor with several consumers compute the gradient of no forward node;
their module is "" and their sequence -1.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import keyword
import logging
import operator
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from autopar import checks, compat
from autopar.garbage import uncollected
from autopar.graph import GraphInput, GraphOutput, InputRole, JointGraph, Node, Ref, TensorMeta, references
from autopar.tree import flatten

from .cut import cut
from .known import Known, Pinned
from .stamp import Unfit, stamped
from .state import Reads
from .ways import Generators, OtherWays
from .witness import Beside, Witness, check_constants, check_hooks, check_memory

logger = logging.getLogger(__name__)
aten = torch.ops.aten


class CaptureError(ValueError):
    """The model cannot be captured as it is; the message says what to change."""


class NothingTrainedError(CaptureError):
    """Nothing that is differentiated depends on any trainable parameter, in eager neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf of the inputs or of the output. `path` is the target of its graph input or output
    ("kwargs.input_ids", "output.logits"). A leaf that is not a tensor has `meta` None and is the
    Python constant that it was when the model was captured. `requires_grad` tells of an output whether
    eager would differentiate it."""

    path: str
    meta: TensorMeta | None = None
    constant: Any = None
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What capture knows about a step.

    `input_leaves` are the leaves of (args, kwargs) and `output_leaves` those of the model's output
    (of the loss, where a loss_fn is given), which `output_spec` puts together again. `loss` is the path
    of the scalar that is differentiated, or None where gradients flow into every floating output.
    `tied` maps other names of a parameter or buffer to the name under which it stands in the graph.
    `constants` are tensors that the model closed over: graph inputs of role "buffer" by target.
    `without_gradient` names the trainable parameters on which nothing that is differentiated depends.
    `autocast` is the dtype of the `torch.autocast` context in which it was captured. `reads` are the attributes that
    Python read while the model was traced. `pinned` is what Python read of the values of inputs: the graph is the step
    of calls in which that comes out the same.
    """

    graph: JointGraph
    input_spec: pytree.TreeSpec
    input_leaves: tuple[Leaf, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[Leaf, ...]
    loss: str | None
    tied: Mapping[str, str]
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    training: bool
    without_gradient: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    reads: Reads = field(default_factory=Reads, repr=False)
    pinned: Pinned = field(default_factory=Pinned, repr=False)

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a call by path. Raises ValueError where the call differs from the captured one in
        structure, in a shape or dtype, or in a Python constant."""
        given = dict(flatten("", (tuple(args), dict(kwargs or {})))[0])
        expected = {leaf.path: leaf for leaf in self.input_leaves}
        if given.keys() != expected.keys():
            missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
            raise ValueError(
                f"the inputs differ in structure from those that the model was captured with: "
                f"missing {missing or 'none'}, unexpected {extra or 'none'}"
            )
        tensors = {}
        for path, leaf in expected.items():
            value = given[path]
            if leaf.meta is None:
                if not same_constant(value, leaf.constant):
                    raise ValueError(
                        f"input {path} is {value!r}, and the model was captured with the constant {leaf.constant!r}: "
                        f"capture it again for another value"
                    )
            elif not isinstance(value, torch.Tensor) or _meta(value) != leaf.meta:
                found = _meta(value) if isinstance(value, torch.Tensor) else repr(value)
                raise ValueError(f"input {path} is {found}, and the model was captured with {leaf.meta}")
            else:
                tensors[path] = value
        return tensors

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """The model's output, in its own structure, from its tensors by path."""
        leaves = [leaf.constant if leaf.meta is None else values[leaf.path] for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_spec)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device_type: str | None = None,
    stamp: bool = True,
) -> Captured:
    """Capture one training step of `model(*args, **kwargs)`.

    The model and the inputs may be real, on `meta` or fake; only shapes, dtypes and strides are read, and
    nothing of the model is changed. Inputs are nested containers of tensors and Python constants.

    What is differentiated is `loss_fn(output)`, or the output's `.loss`, or the output itself if it is a
    floating scalar; all other outputs are then detached. Failing these, gradients flow into every floating
    output. Where gradients are disabled, or nothing requires any, the graph has no backward. An input that
    requires a gradient gets one.

    An active `torch.autocast` context is recorded: its casts are operators of the graph, and stay in the program
    whatever context that runs in.

    `device_type` is the device that the graph is traced for ("cuda" chooses other attention kernels than
    "cpu"); without it each tensor keeps its own, and those on `meta` are taken to be on the CPU.

    With `stamp`, layers that the record shows to be alike, operator for operator, are differentiated once, and the
    result is repeated (`cut`, `stamp`): what is captured is the same, up to the names of values. The Python of every
    layer runs in any case.

    Raises CaptureError (a ValueError) if the model cannot be traced, if an input is an empty batch, if no parameter
    gets a gradient although some require one, if two parameters overlap in memory, if the loss is not a floating
    scalar, or if Python does what a graph cannot hold: keep state from one call for the next, draw random numbers of
    its own, hook gradients.
    """
    with uncollected():
        try:
            return _capture(model, args, dict(kwargs or {}), loss_fn, device_type, stamp=stamp, lines=False)
        except _Unlocated:
            # traced again, with the line of each operator, which takes twice the time
            return _capture(model, args, dict(kwargs or {}), loss_fn, device_type, stamp=False, lines=True)


class _OfData(CaptureError):
    """A number or a shape of the graph depends on data."""


class _Unlocated(_OfData):
    """An operator is refused whose line in the model is not known."""


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    device_type: str | None,
    *,
    stamp: bool,
    lines: bool,
) -> Captured:
    """`capture`; with `lines`, refusals of operators say where they are in the model."""
    mode = compat.fake_mode()
    grad = torch.is_grad_enabled()
    canonical = _canonical_names(model)
    try:
        check_hooks(model)
    except Beside as error:
        raise CaptureError(str(error)) from None
    fakes = _Fakes(mode, device_type, grad)
    pairs, input_spec = flatten("", (tuple(args), kwargs))
    input_leaves = tuple(_leaf(path, value) for path, value in pairs)
    step = _Step(fakes.module(model), pairs, input_spec, loss_fn)
    inputs = tuple(fakes.tensor(path, value) for path, value in pairs if isinstance(value, torch.Tensor))
    tied = {f"model.{a}": f"model.{b}" for a, b in canonical.items()}
    input_paths = [leaf.path for leaf in input_leaves if leaf.meta is not None]
    with contextlib.ExitStack() as stack:
        try:
            try:
                record = stack.enter_context(compat.recorded(step, inputs, tied, lines=lines))
            except _Replaced as found:
                step.replaced = found.names
                record = stack.enter_context(compat.recorded(step, inputs, tied, lines=lines))
            outcome = step.outcomes.last
            assert outcome is not None
            output_paths = [leaf.path for leaf in outcome.leaves if leaf.meta is not None]
            names = _input_names(model, input_paths)

            def converted(part: compat.Recorded) -> _Conversion:
                return _Conversion(compat.joint(part, inputs, mode), input_paths, output_paths, names, lines=lines)

            with mode:
                step.witness.settle(step, inputs)
            graph, constants = _joint_graph(record, converted, stamp)
            if grad:
                check_constants(constants, step.witness.seen)
            check_memory(constants, step.witness.seen, model)
        except CaptureError as error:
            if isinstance(error, _OfData) and (told := _unread(model, step.outcomes.unread)):
                raise told from None
            raise
        except Beside as error:
            raise CaptureError(str(error)) from None
        except compat.WritesReal as error:
            raise CaptureError(f"{step.witness.written(error.tensor)}{_where(error)}") from None
        except Exception as error:
            raise _refusal(error, model, step.outcomes.unread) from error
    if step.outcomes.checks:
        logger.warning(
            "the program makes no checks of data: where eager would raise, it goes on (%s)",
            ", ".join(step.outcomes.checks),
        )
    if made := [name for name, tensor in constants.items() if compat.is_fake(tensor)]:
        raise CaptureError(
            f"{type(model).__name__} computes {len(made)} values in forward that are no part of the graph, such as the "
            f"gradients of torch.autograd.grad (a penalty on gradients): a step is differentiated once, as a whole. "
            f"Compute such a penalty outside of the model, or write its gradients out as operators"
        )
    with mode:
        missing = _without_gradient(model, graph, step, inputs, outcome.loss) if grad else ()
    differentiated = any(i.role == "tangent" for i in graph.inputs)
    return Captured(
        graph=graph,
        input_spec=input_spec,
        input_leaves=input_leaves,
        output_spec=outcome.spec,
        output_leaves=outcome.leaves,
        loss=outcome.loss if differentiated else None,
        tied={alias: name for alias, name in canonical.items() if alias != name},
        constants=constants,
        training=model.training,
        without_gradient=missing,
        autocast=compat.autocast_dtype(device_type or "cpu"),
        reads=step.witness.reads,
        pinned=step.outcomes.pinned,
    )


def _joint_graph(
    record: compat.Recorded, converted: Callable[[compat.Recorded], _Conversion], stamp: bool
) -> tuple[JointGraph, dict[str, torch.Tensor]]:
    """The graph of a record and the constants that it reads, from a shorter record where layers repeat."""
    found = cut(record) if stamp else None
    if found is not None:
        conversion = converted(found.record)
        try:
            graph = stamped(conversion.graph(), conversion.places, found)
        except Unfit as error:
            logger.info("differentiated in full: %s", error)
        else:
            known = {i.target: i.tensor for i in record.inputs if i.kind == "constant" and i.tensor is not None}
            known = {name.removeprefix("model."): tensor for name, tensor in known.items()} | conversion.constants
            read = {i.target for i in graph.inputs if i.role == "buffer"}
            return graph, {name: tensor for name, tensor in known.items() if name in read}
    conversion = converted(record)
    return conversion.graph(), conversion.constants


def _refusal(error: Exception, model: nn.Module, unread: Sequence[tuple[str, tuple[str, ...]]]) -> CaptureError:
    """What a trace that ended says to the person. `unread` are the values that Python asked for, and were not known."""
    decides = compat.decides_by_data(error)
    if decides or compat.leaves_numbers(error):
        told = _unread(model, unread[-1:] if decides else unread)
        if told is not None:
            return told
    known = f"{type(model).__name__} cannot be captured as a graph of static shapes"
    if decides:
        line = _line(error)
        return CaptureError(
            f"{known}: its code decides by a value of a tensor{f', {line!r}' if line else ''}{_where(error)}. A "
            f"graph takes one way for all data: choose with torch.where, or pass the value as a Python constant"
        )
    return CaptureError(f"{known}: {error}{_where(error)}")


def _unread(model: nn.Module, unread: Sequence[tuple[str, tuple[str, ...]]]) -> CaptureError | None:
    """What is said of values that Python asked for and got none of."""
    told = f"{type(model).__name__} cannot be captured as a graph of static shapes: its code reads"
    bare = [(line, paths) for line, paths in unread if paths]
    if bare:
        line, paths = bare[0]
        return CaptureError(
            f"{told} a value of input {', '.join(paths)}{line}, which was given without values (on meta or fake): give "
            f"a real example of it, and the program will serve inputs of which the same is read"
        )
    if unread:
        return CaptureError(
            f"{told} a number of a tensor{unread[0][0]} that depends on parameters, buffers or random numbers, and "
            f"may differ from step to step. A graph has one for all data: compute with all elements and a mask "
            f"(experts: an implementation that runs each on all tokens, or on padded ones), keep the number in a "
            f"tensor, or pass it as a Python constant"
        )
    return None


def _where(error: Exception) -> str:
    """The line of the model at which an error was raised, if its code is in a file."""
    frame = _frame(error)
    return f" ({frame.filename}:{frame.lineno} in {frame.name})" if frame else ""


def _line(error: Exception) -> str:
    """What stands there."""
    frame = _frame(error)
    return (frame.line or "").strip().rstrip(":") if frame else ""


def _frame(error: Exception) -> traceback.FrameSummary | None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).exists()]
    lines = [frame for frame in frames if not _is_machinery(Path(frame.filename))]
    return lines[-1] if lines else None


def _line_of(node: fx.Node) -> str:
    """The line of the model that made a node, if it is known."""
    found = re.findall(r'File "(.+)", line (\d+), in (\w+)', str(node.meta.get("stack_trace", "")))
    lines = [(file, line, name) for file, line, name in found if not _is_machinery(Path(file))]
    return " at {}:{} in {}".format(*lines[-1]) if lines else ""


def _is_machinery(file: Path) -> bool:
    """Whether code is torch's, ours or Python's own."""
    if any(file.is_relative_to(Path(known).parent) for known in (str(torch.__file__), __file__, checks.__file__)):
        return True
    return file.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in file.parts


# ---------------------------------------------------------------------------------------------- paths


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def _is_constant(value: Any) -> bool:
    plain = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    return isinstance(value, (*plain, Enum))


def same_constant(value: Any, other: Any) -> bool:
    """Whether two Python constants are one to a program: NaN is NaN, 0.0 is not -0.0, and 1 is not True."""
    if type(value) is not type(other):
        return False
    return repr(value) == repr(other) if isinstance(value, float | complex) else bool(value == other)


def _leaf(path: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and not value.shape[0]:
            raise CaptureError(
                f"input {path} is {_meta(value)}, an empty batch: a program has the sizes of its example inputs, so "
                f"give one of the size that you train with"
            )
        return Leaf(path=path, meta=_meta(value))
    if not _is_constant(value):
        raise CaptureError(
            f"input {path} is a {type(value).__name__}: inputs are tensors and Python constants in dataclasses and "
            f"containers that torch.utils._pytree knows"
        )
    return Leaf(path=path, constant=value)


def _input_names(model: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    """Readable names of inputs: that of forward's argument, followed by the path inside it."""
    signature = inspect.signature(model.forward).parameters.values()
    positional = [p.name for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {}
    for path in paths:
        kind, first, *rest = path.split(".")
        if kind == "args":
            first = positional[int(first)] if int(first) < len(positional) else f"args_{first}"
        names[path] = ".".join([first, *rest])
    return names


# ---------------------------------------------------------------------------------------------- fakes


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for iterator in (model.named_parameters, model.named_buffers):
        for name, tensor in iterator(remove_duplicate=False):
            if nn.parameter.is_lazy(tensor):
                raise CaptureError(f"parameter {name} has no shape yet: call the model once, before autopar")
            if not compat.is_plain(tensor):
                raise CaptureError(
                    f"{name} is a {type(tensor).__name__} of layout {tensor.layout}: autopar takes the model as it "
                    f"is on one device, with plain strided tensors"
                )
            names[name] = first.setdefault(id(tensor), name)
            if names[name] == name and tensor.numel():
                storage, begin, end = compat.storage_span(tensor)
                for other_begin, other_end, other in spans.setdefault(storage, []):
                    if begin < other_end and other_begin < end:
                        raise CaptureError(
                            f"{other} and {name} are two tensors on the same memory: tie them by making them one "
                            f"nn.Parameter, or give each its own memory"
                        )
                spans[storage].append((begin, end, name))
    return names


class _Fakes:
    """Makes fakes of one mode."""

    def __init__(self, mode: Any, device_type: str | None, grad: bool) -> None:
        self.mode, self.device_type, self.grad = mode, device_type, grad

    def tensor(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """A fake of the same shape, dtype, stride and device, a leaf of autograd."""
        if not compat.is_plain(source):
            raise CaptureError(f"{name} is a {type(source).__name__}: give the global tensor, real, on meta or fake")
        own = "cpu" if source.device.type == "meta" else str(source.device)
        device = torch.device(self.device_type or own)
        if device.type != "cpu" and not torch.get_device_module(device).is_available():
            # torch aborts the process when autograd meets a fake on a device that it cannot guard
            raise CaptureError(f"{name} is to be on {device}, which is not available here: capture for device_type cpu")
        with self.mode:
            fake = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
        if isinstance(source, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=source.requires_grad and self.grad)
            compat.take_notes(fake, source)
            return fake
        return fake.requires_grad_(source.requires_grad and self.grad)

    def alias(self, source: torch.Tensor) -> torch.Tensor:
        """The same real tensor, a leaf of autograd."""
        wanted = source.requires_grad and self.grad
        return source.detach().requires_grad_(wanted) if wanted else source.detach()

    def module(self, model: nn.Module) -> nn.Module:
        """A copy of the model that shares no tensor with it, and copies no data."""
        memo: dict[int, Any] = {}
        for iterator in (model.named_parameters, model.named_buffers):
            for name, tensor in iterator():
                memo[id(tensor)] = self.tensor(name, tensor)
        for module in model.modules():
            for name, attribute in vars(module).items():
                if name not in _REGISTRIES:
                    for tensor in pytree.tree_leaves(attribute):
                        # neither parameter nor buffer: real ones become constants of the graph
                        if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                            bare = tensor.device.type == "meta" or compat.is_fake(tensor)
                            memo[id(tensor)] = self.tensor(name, tensor) if bare else self.alias(tensor)
        return copied(model, memo)


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model with its parameters and buffers on `meta`."""
    memo: dict[int, Any] = {}
    for iterator in (model.named_parameters, model.named_buffers):
        for _, tensor in iterator():
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            bare = nn.Parameter(bare, requires_grad=tensor.requires_grad) if is_parameter else bare
            compat.take_notes(bare, tensor)
            memo[id(tensor)] = bare
    for module in model.modules():
        for name, attribute in vars(module).items():
            if name not in _REGISTRIES:
                for tensor in pytree.tree_leaves(attribute):
                    if isinstance(tensor, torch.Tensor):
                        memo.setdefault(id(tensor), tensor)
    return copied(model, memo)


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def copied(model: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A deep copy of the model with what `memo` says in the place of parts of it. Attributes that cannot be copied
    (operators of `torch.library.custom_op`, process groups, locks) are shared with it."""
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:
        shared = dict(memo)
        names = []
        for path, module in model.named_modules():
            for key, attribute in vars(module).items():
                if key not in _REGISTRIES and not _is_copyable(attribute, memo):
                    shared[id(attribute)] = attribute
                    names.append(f"{path}.{key}" if path else key)
        if not names:
            raise CaptureError(f"{type(model).__name__} cannot be copied, as capture must: {error}") from error
        logger.info("shared with the captured copy, since they cannot be copied: %s", ", ".join(names))
        return copy.deepcopy(model, shared)


def _is_copyable(value: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


# ---------------------------------------------------------------------------------------------- the step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What the model was seen to give."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    loss: str | None


class _Outcomes:
    """Where a step leaves what it saw: export puts a module's own attributes back as they were."""

    def __init__(self) -> None:
        self.last: _Outcome | None = None
        self.checks: dict[str, None] = {}
        """Lines of code that look at data and raise."""
        self.pinned = Pinned()
        self.unread: list[tuple[str, tuple[str, ...]]] = []
        """Of `Known`."""
        self.inputs: list[tuple[str, torch.Tensor]] = []
        """As they were given, by path."""


class _Step(nn.Module):
    """The model from flat tensors to flat tensors, everything but the loss detached."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[tuple[str, Any]],
        spec: pytree.TreeSpec,
        loss_fn: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.model = model
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
        known = Known({path: (fake, source) for fake, (path, source) in given})
        self.outcomes.unread, known.valued = known.unread, self.witness.valued
        with (
            self.witness.tracing(),
            _written(self.model, self.replaced),
            generators.watched(),
            OtherWays(generators, known),
            known,
            _unchecked(self.outcomes.checks),
        ):
            output = self.model(*args, **kwargs)
            if self.loss_fn[0] is not None:
                output = self.loss_fn[0](output)
        self.outcomes.pinned = known.pinned()
        pairs, spec = flatten("output", output)
        loss = self._loss(output, pairs)
        described: list[Leaf] = []
        results: list[torch.Tensor] = []
        for path, value in pairs:
            if isinstance(value, torch.Tensor):
                described.append(Leaf(path=path, meta=_meta(value), requires_grad=value.requires_grad))
                results.append(value if loss in (None, path) else value.detach())
            elif _is_constant(value):
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
            found = _meta(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"{source} is {found}: the loss must be a tensor that is one floating number")
        path = next((path for path, value in pairs if value is loss), None)
        if path is None:
            raise CaptureError(
                f"{source} is not among the tensors that autopar can find in a {type(output).__name__}: make it a "
                f"dataclass, register it with torch.utils._pytree.register_pytree_node, or pass a loss_fn"
            )
        return path


class _Replaced(Exception):
    """Forward replaces these buffers."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


@contextlib.contextmanager
def _unchecked(lines: dict[str, None]) -> Iterator[None]:
    """Branches on data that raise are taken not to; `lines` receives where they are. (A mode would not see those in
    torch's own functions.)"""

    def truth(tensor: torch.Tensor) -> bool:
        frame = sys._getframe(1)
        passing = checks.passing(frame) if compat.is_fake(tensor) else None
        if passing is None:
            return bool(known(tensor))
        lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
        return passing

    known = torch.Tensor.__bool__
    truth.__name__ = known.__name__
    torch.Tensor.__bool__ = truth  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.__bool__


@contextlib.contextmanager
def _written(model: nn.Module, replaced: set[str]) -> Iterator[None]:
    """Write buffers that forward replaces (`self.count = self.count + 1`) where they stand: export sees the one
    and loses the other. What forward reads of them is a copy, since backward may need what they were.

    Raises _Replaced with the names of further ones.
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
    found: set[str] = set()
    for name, (buffers, key, old) in places.items():
        new, buffers[key] = buffers[key], old
        if new is old:
            continue
        if old is None or new is None or _meta(old) != _meta(new):
            was, now = ("None" if b is None else str(_meta(b)) for b in (old, new))
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
            found.add(name)
    if found:
        raise _Replaced(found)


def _without_gradient(
    model: nn.Module, graph: JointGraph, step: _Step, inputs: Sequence[torch.Tensor], loss: str | None
) -> tuple[str, ...]:
    """The trainable parameters that get no gradient, as in eager.

    Raises CaptureError where eager gives one, and where none gets any.
    """
    found = {o.target for o in graph.outputs if o.role == "gradient" and o.name is not None}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name in trainable if name not in found]
    if not missing:
        return ()
    lost = _differentiated(step, missing, inputs)
    if lost or missing == trainable:
        error = CaptureError if lost else NothingTrainedError
        lost = lost or missing
        shown = ", ".join(lost[:10]) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
        raise error(
            f"{len(lost)} trainable parameters get no gradient from {loss or 'any output'}: {shown}. "
            f"Call requires_grad_(False) on them, or use them in what is differentiated"
        )
    return tuple(missing)


def _differentiated(step: _Step, names: Sequence[str], inputs: Sequence[torch.Tensor]) -> list[str]:
    """Which of these parameters autograd reaches when the model runs as it is, on fakes."""
    parameters = dict(step.model.named_parameters())
    with compat.as_exported():
        roots = [output for output in step(*inputs) if output.requires_grad]
    if not roots:
        return []
    gradients = torch.autograd.grad(
        roots, [parameters[name] for name in names], [torch.ones_like(r) for r in roots], allow_unused=True
    )
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]


# ---------------------------------------------------------------------------------------------- conversion


@dataclass(slots=True)
class _Draft:
    """A node under construction."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: list[str]
    module: str
    backward: bool
    sequence: int
    place: int | None


_NO_OPS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.lift.default,
        aten.view_as.default,
        aten.resolve_conj.default,
        aten.resolve_neg.default,
    }
)
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_alias.default,
        aten.view_copy.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)
_PERMUTES: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.permute.default: lambda rank, order: tuple(d % rank for d in order),
    aten.t.default: lambda rank: tuple(reversed(range(rank))),
    aten.numpy_T.default: lambda rank: tuple(reversed(range(rank))),
    aten.transpose.int: lambda rank, a, b: _swapped(rank, a, b),
    aten.swapaxes.default: lambda rank, a, b: _swapped(rank, a, b),
    aten.swapdims.default: lambda rank, a, b: _swapped(rank, a, b),
    aten.mT.default: lambda rank: _swapped(rank, -1, -2),
}


_FILLED: dict[Any, str] = {
    aten.new_zeros.default: "aten.zeros.default",
    aten.new_ones.default: "aten.ones.default",
    aten.new_full.default: "aten.full.default",
}
"""Ops that take dtype and device of a tensor, and read nothing of it."""


_LAZY: dict[Any, str] = {
    aten._conj.default: "aten._conj_physical.default",
    aten._neg_view.default: "aten.neg.default",
}
"""Views that leave a sign to whoever reads them: kernels and collectives of shards read what lies there."""


def _long_dims(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dims that have a stride that means something."""
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def _dense(x: torch.Tensor) -> tuple[int, ...] | None:
    """The order in which the dims of a tensor stand in memory, of which every element is one of it; else None."""
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: (x.shape[d] != 1, -strides[d])))
    return order if x.permute(order).is_contiguous() else None


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


def _swapped(rank: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(rank))
    if rank:
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def _identifier(path: str, taken: set[str]) -> str:
    """A Python identifier for a path, distinct from those taken, and takes it."""
    base = re.sub(r"\W", "_", path)
    if not base or base[0].isdigit() or keyword.iskeyword(base):
        base = f"_{base}"
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


class _Conversion:
    """From the traced `torch.fx` graph to ours."""

    def __init__(
        self,
        joint: compat.Joint,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
        input_names: Mapping[str, str],
        *,
        lines: bool,
    ) -> None:
        """With `lines`, nodes know the lines of code that made them."""
        self.joint, self.lines = joint, lines
        self.parameters = [name.removeprefix("model.") for name in joint.parameters]
        self.buffers = [name.removeprefix("model.") for name in joint.buffers]
        self.input_paths, self.output_paths, self.input_names = input_paths, output_paths, input_names
        self.constants = {name.removeprefix("model."): tensor for name, tensor in joint.constants.items()}
        self.taken: set[str] = set()
        self.metas: dict[str, TensorMeta] = {}
        self.values: dict[fx.Node, Any] = {}  # what a node of fx is called here, or the Draft whose outputs it is
        self.made: dict[str, _Draft] = {}  # the draft that makes a value
        self.drafts: list[_Draft] = []
        self.origins: dict[int, tuple[str, int, int | None]] = {}  # of the forward nodes, by autograd's number
        self.places: dict[str, int] = {}  # node -> the node of the record that made it, or whose gradient it computes

    def graph(self) -> JointGraph:
        inputs = [self._input(p) for p in self.joint.placeholders]
        needed = self._needed()
        for node in self.joint.graph.nodes:
            if node not in needed:
                continue  # assertions, and what only they read
            if node.op == "call_function":
                self._node(node)
            elif node.op == "get_attr":
                raise CaptureError(f"the model has control flow ({node.target}), which one graph cannot hold")
        outputs = tuple(self._output(r) for r in self.joint.results)
        nodes, used = self._ordered(inputs, outputs)
        # constants that only no-ops read
        unused = {i.target for i in inputs if i.role == "buffer" and i.target in self.constants and i.name not in used}
        self.constants = {name: tensor for name, tensor in self.constants.items() if name not in unused}
        inputs = [i for i in inputs if i.target not in unused or i.role != "buffer"]
        names = [*(i.name for i in inputs), *(name for node in nodes for name in node.outputs if name)]
        return JointGraph(
            inputs=tuple(inputs), nodes=nodes, outputs=outputs, metas={name: self.metas[name] for name in names}
        )

    def _needed(self) -> set[fx.Node]:
        """The nodes that a result needs."""
        waiting = [result.node for result in self.joint.results if result.node is not None]
        found = set(waiting)
        while waiting:
            fresh = [node for node in waiting.pop().all_input_nodes if node not in found]
            found.update(fresh)
            waiting += fresh
        return found

    def _input(self, placeholder: compat.Placeholder) -> GraphInput:
        kind, index = placeholder.kind, placeholder.index
        role: InputRole = kind
        if kind == "parameter":
            target = path = self.parameters[index]
        elif kind == "buffer":
            target = path = self.buffers[index]
        elif kind == "input":
            target = self.input_paths[index]
            path = self.input_names[target]
        else:
            target = self.output_paths[index]
            path = f"tangent.{target}"
        name = _identifier(path, self.taken)
        self.metas[name] = _meta(placeholder.node.meta["val"])
        self.values[placeholder.node] = name
        return GraphInput(name=name, role=role, target=target)

    def _output(self, result: compat.Result) -> GraphOutput:
        name = None if result.node is None else self.values[result.node]
        if result.kind == "output":
            return GraphOutput(name=name, role="output", target=self.output_paths[result.index])
        if result.kind in ("mutation", "parameter mutation"):
            written = self.buffers if result.kind == "mutation" else self.parameters
            return GraphOutput(name=name, role="mutation", target=written[result.index])
        targets = self.parameters if result.kind == "parameter gradient" else self.input_paths
        return GraphOutput(name=name, role="gradient", target=targets[result.index])

    # -- nodes

    def _node(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self._item(node)
            return
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            self._emit(node, outputs=[""] * len(value))
            return
        if not isinstance(value, torch.Tensor):
            if not self.lines:
                raise _Unlocated(node.name)
            raise _OfData(
                f"{node.name} = {target} is a number that depends on the data ({value}): the model reads a tensor's "
                f"value{_line_of(node)}, and shapes must be static"
            )
        meta = self._static_meta(node)
        if self._is_no_op(node, meta):
            self.values[node] = self._name(node.args[0])
        elif target in _RESHAPES:
            self._reshape(node, meta)
        elif target in _PERMUTES:
            self._permute(node, meta)
        elif target is aten.cat.default:
            self._cat(node, meta)
        elif target in _FILLED:
            self._filled(node, meta)
        elif target in _LAZY:
            self._now(node, meta)
        elif target is aten.as_strided.default:
            self._as_strided(node, meta)
        elif target is aten.as_strided_scatter.default:
            self._as_strided_scatter(node, meta)
        elif target is aten.expand.default:
            self._emit(node, meta=meta, args=(Ref(self._name(node.args[0])), meta.shape))
        elif target is aten.copy.default and self.metas[self._name(node.args[1])] == meta:
            # nothing is left of what is written over, which may be an empty tensor with strides of its own
            contiguous = (("memory_format", torch.contiguous_format),)
            self._emit(
                node, meta=meta, op="aten.clone.default", args=(Ref(self._name(node.args[1])),), kwargs=contiguous
            )
        else:
            self._emit(node, meta=meta)

    def _static_meta(self, node: fx.Node) -> TensorMeta:
        meta = _meta(node.meta["val"])
        if any(type(size) is not int for size in meta.shape):
            raise _OfData(
                f"{node.name} = {node.target} has a shape that depends on the data ({meta}): a graph has static shapes "
                f"(select with torch.where or a mask, not with a boolean index)"
            )
        return meta

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        draft = self.values[source]  # type: ignore[index]
        assert isinstance(draft, _Draft) and isinstance(index, int)
        if not draft.outputs[index]:
            draft.outputs[index] = self._take(node, self._static_meta(node), draft)
        self.values[node] = draft.outputs[index]

    def _is_no_op(self, node: fx.Node, meta: TensorMeta) -> bool:
        target, args = node.target, node.args
        if target in _NO_OPS:
            return True
        if not args or not isinstance(args[0], fx.Node) or self.metas.get(self._name(args[0])) != meta:
            return False
        if target in (aten.expand.default, aten.slice.Tensor):
            return target is aten.expand.default or len(args) < 5 or bool(args[4] == 1)
        if len(args) < 2 or node.kwargs or isinstance(args[1], fx.Node):
            return False
        # not add(x, 0), which turns -0.0 into 0.0
        keeps_with_one = (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor)
        return target in keeps_with_one and bool(args[1] == 1)

    def _reshape(self, node: fx.Node, meta: TensorMeta) -> None:
        source = self._name(node.args[0])
        if (maker := self.made.get(source)) and maker.op == "aten.reshape.default":
            source = maker.args[0].name  # a reshape of a reshape is a reshape
        if self.metas[source].shape == meta.shape:
            self.values[node] = source
        else:
            self._emit(node, meta=meta, op="aten.reshape.default", args=(Ref(source), meta.shape))

    def _now(self, node: fx.Node, meta: TensorMeta) -> None:
        """A change of sign that a view would leave to its readers. Autograd asks for the conjugates of numbers, too."""
        (given,) = node.args
        if isinstance(given, fx.Node):
            self._emit(node, meta=meta, op=_LAZY[node.target], args=(Ref(self._name(given)),))
            return
        assert isinstance(given, (int, float, complex))
        value = given.conjugate() if node.target is aten._conj.default else -given
        where = ("dtype", meta.dtype), ("device", node.meta["val"].device)
        self._emit(node, meta=meta, op="aten.full.default", args=(meta.shape, value), kwargs=where)

    def _as_strided(self, node: fx.Node, meta: TensorMeta) -> None:
        """A view by addresses, where it sees all of a dense tensor, or only restrides dims of size 1."""
        source, given, made = self._name(node.args[0]), node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        here = given.storage_offset() == made.storage_offset()
        if here and _long_dims(given) == _long_dims(made):
            self.values[node] = self._reshaped(node, source, meta.shape)
        elif here and (order := _dense(given)) is not None and (target := _dense(made)) is not None:
            source = self._permuted(node, source, order)
            source = self._reshaped(node, source, tuple(meta.shape[d] for d in target))
            self.values[node] = self._permuted(node, source, _inverse(target))
        else:
            self._refuse_addresses(node, source)

    def _as_strided_scatter(self, node: fx.Node, meta: TensorMeta) -> None:
        """Autograd's gradient of a view by addresses: a tensor that is written over, all of it."""
        base, given = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
        size, stride, offset = (*node.args[2:], base.storage_offset())[:3]
        source = self._name(node.args[1])
        order = _dense(torch.empty_strided(size, stride, device="meta"))
        target = _dense(base)
        whole = offset == base.storage_offset() and given.numel() == base.numel()
        if not whole or order is None or target is None:
            self._refuse_addresses(node, source)
            return
        source = self._permuted(node, source, order)
        source = self._reshaped(node, source, tuple(meta.shape[d] for d in target))
        self.values[node] = self._permuted(node, source, _inverse(target))

    def _refuse_addresses(self, node: fx.Node, source: str) -> None:
        raise CaptureError(
            f"{node.name} = as_strided of {self.metas[source]} (module {compat.module_path(node)}) reads a tensor "
            f"by its addresses in memory, which shards do not have: write it with views, slices, unfold or gather"
        )

    def _reshaped(self, node: fx.Node, source: str, shape: tuple[int, ...]) -> str:
        return source if self.metas[source].shape == shape else self._made("aten.reshape.default", node, source, shape)

    def _permuted(self, node: fx.Node, source: str, order: tuple[int, ...]) -> str:
        in_order = order == tuple(range(len(order)))
        return source if in_order else self._made("aten.permute.default", node, source, order)

    def _made(self, op: str, node: fx.Node, source: str, argument: tuple[int, ...]) -> str:
        """A view on the way to what a node makes."""
        shape = argument
        if op == "aten.permute.default":
            shape = tuple(self.metas[source].shape[d] for d in argument)
        self._emit(node, meta=TensorMeta(shape, self.metas[source].dtype), op=op, args=(Ref(source), argument))
        return self._name(node)

    def _permute(self, node: fx.Node, meta: TensorMeta) -> None:
        source = self._name(node.args[0])
        order = _PERMUTES[node.target](len(meta.shape), *node.args[1:])
        if (maker := self.made.get(source)) and maker.op == "aten.permute.default":
            source, inner = maker.args[0].name, maker.args[1]
            order = tuple(inner[d] for d in order)
        if order == tuple(range(len(order))):
            self.values[node] = source
        else:
            self._emit(node, meta=meta, op="aten.permute.default", args=(Ref(source), order))

    def _cat(self, node: fx.Node, meta: TensorMeta) -> None:
        parts = [self._name(part) for part in node.args[0]]  # type: ignore[union-attr]
        # an empty cache is a tensor of shape [0], to which the first keys are appended
        kept = [part for part in parts if self.metas[part].numel] or parts[:1]
        if len(kept) == 1 and self.metas[kept[0]] == meta:
            self.values[node] = kept[0]
        else:
            self._emit(node, meta=meta, args=(tuple(map(Ref, kept)), *node.args[1:]))

    def _filled(self, node: fx.Node, meta: TensorMeta) -> None:
        """Zeros need no tensor to be made from, which would have to be there."""
        op, value = _FILLED[node.target], node.meta["val"]
        filling = node.args[-1:] if op == "aten.full.default" else ()
        where = ("dtype", meta.dtype), ("device", value.device)
        self._emit(node, meta=meta, op=op, args=(meta.shape, *filling), kwargs=where)

    def _emit(
        self,
        node: fx.Node,
        *,
        meta: TensorMeta | None = None,
        op: str | None = None,
        args: tuple[Any, ...] | None = None,
        kwargs: tuple[tuple[str, Any], ...] = (),
        outputs: list[str] | None = None,
    ) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"{node.name} = {node.target} is not an ATen operator (module {compat.module_path(node)})"
            )
        backward = compat.is_backward(node)
        module, sequence, place = self._origin(node, backward)
        draft = _Draft(
            op=op or str(node.target),
            args=tuple(self._argument(a) for a in node.args) if args is None else args,
            kwargs=kwargs if op else tuple((key, self._argument(value)) for key, value in node.kwargs.items()),
            outputs=[] if outputs is None else outputs,
            module=module,
            backward=backward,
            sequence=sequence,
            place=place,
        )
        self.drafts.append(draft)
        if meta is None:
            self.values[node] = draft
        else:
            self.values[node] = name = self._take(node, meta, draft)
            draft.outputs.append(name)

    def _origin(self, node: fx.Node, backward: bool) -> tuple[str, int, int | None]:
        """Module and sequence of a node, and the place in the record from which it has them.

        Autograd's counter is at the operator's own number when it is traced, and stays there for what
        follows it and is not differentiable: of the forward nodes with one number the first is meant.
        The counter lives as long as the thread: the numbers are counted anew, to be the same each time.
        """
        number = node.meta.get("seq_nr", -1)
        if not backward:
            path = (compat.module_path(node) or "").removeprefix("model").removeprefix(".")
            _, sequence, _ = self.origins.setdefault(number, (path, len(self.origins), compat.place_of(node)))
            return path, sequence, compat.place_of(node)
        if compat.is_accumulation(node):
            return "", -1, None
        return self.origins.get(number, ("", -1, None))

    def _take(self, node: fx.Node, meta: TensorMeta, draft: _Draft) -> str:
        name = _identifier(node.name, self.taken)
        self.metas[name] = meta
        self.made[name] = draft
        return name

    def _name(self, argument: Any) -> str:
        name = self.values[argument]
        assert isinstance(name, str), f"{argument} has several outputs"
        return name

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(self._name(value))
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item) for item in value)
        return value

    # -- order

    def _ordered(
        self, inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput]
    ) -> tuple[tuple[Node, ...], set[str]]:
        """The live nodes, all forward nodes first, and the names that are read.

        Forward is what an output or a mutation needs, and what was traced in forward and needs no
        tangent. A backward node that needs no tangent either (a weight's transpose, zeros to scatter
        into) stays in backward, where its value is not held between the two.
        """
        tainted = {i.name for i in inputs if i.role == "tangent"}
        for draft in self.drafts:
            if any(name in tainted for name in references((draft.args, draft.kwargs))):
                tainted.update(name for name in draft.outputs if name)
        live = {o.name for o in outputs if o.name is not None}
        early = {o.name for o in outputs if o.name is not None and o.role != "gradient"}
        forward: list[Node] = []
        backward: list[Node] = []
        for draft in reversed(self.drafts):
            made = [name for name in draft.outputs if name in live]
            if not made:
                continue
            reads = tuple(references((draft.args, draft.kwargs)))
            late = draft.backward or any(name in tainted for name in made)
            if any(name in early for name in made):
                late = False
            live.update(reads)
            if not late:
                early.update(reads)
            outputs_kept = tuple(name if name in live else "" for name in draft.outputs)
            node = Node(
                op=draft.op,
                args=draft.args,
                kwargs=draft.kwargs,
                outputs=outputs_kept,
                module=draft.module,
                backward=late,
                sequence=draft.sequence,
            )
            if draft.place is not None:
                self.places[node.name] = draft.place
            (backward if late else forward).append(node)
        return tuple(reversed(forward)) + tuple(reversed(backward)), live
