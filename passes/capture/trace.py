"""Capture: a model and example inputs in, the joint graph of one step out.

    model, args, kwargs --fake copy--> Step --record--> Recording --functional--> nodes --joint_graph--> JointGraph

What runs is the model's own Python and autograd's own engine, so that the graph is what eager does. It runs twice: what
Python keeps from one call for the next shows in the second.

The model is recorded as a copy whose tensors are fakes, so that a model of any size, real, on `meta` or fake, is
captured on a laptop, and the user's own model is only read.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.autocast import autocast_dtype, autocast_of
from autopar.compat.calls import computed_of, resolved
from autopar.compat.neutral import neutral, without_autocast
from autopar.compat.quick_fakes import quick_fakes
from autopar.compat.recording import followed, function_modes
from autopar.compat.tensors import memory_of, unmodified
from autopar.ir.garbage import uncollected
from autopar.ir.graph import JointGraph
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.tree import flatten
from autopar.ops.normalization import unread

from .captured import Captured
from .checks import without_checks
from .concrete import StepRecorder
from .conversion import HERE
from .errors import CaptureError, NothingTrainedError, OfData, listed
from .fakes import Fakes, canonical_names, gradient_hooks
from .flex import flexible
from .functional import Functional
from .leaves import input_names, leaf_of
from .overrides import Generators, Overrides
from .recorder import Recorder, line_of
from .refusals import TRAINING_CONSTANTS, refusal, refuse, unread_refusal
from .repeat import RepeatedStep
from .saved import watched_hooks
from .step import ModelStep, Recording
from .trace_device import TraceDevice
from .witness import Witness, check_memory

logger = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device_type: str | None = None,
    precision: Precision = AS_IS,
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

    The graph is the same for all devices (see `trace_device`). `device_type` is the device that the step will run on,
    whose autocast context counts, and whose name in the model's code means the device of the trace; without it, that of
    the model's parameters and of the inputs.

    Nodes say in which calls of `torch.utils.checkpoint` they lie (`Node.region`).

    Python sees parameters in the dtypes in which `precision` has them used; the graph's inputs name those at rest.

    Raises CaptureError (a ValueError) if the model cannot be traced, if an input is an empty batch, if no parameter
    gets a gradient although some require one, if two parameters overlap in memory, if the loss is not a floating
    scalar, or if Python does what a graph cannot hold: keep state from one call for the next, draw random numbers of
    its own, hook gradients.
    """
    kind = device_type or _own_device_type(model, args, kwargs)
    is_here = kind == HERE.type or torch.get_default_device().type != kind
    with uncollected(), autocast_of(kind), contextlib.nullcontext() if is_here else HERE:
        return _capture(model, args, dict(kwargs or {}), loss_fn, kind, precision)


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    device_type: str,
    precision: Precision,
) -> Captured:
    mode = quick_fakes()
    grad = torch.is_grad_enabled()
    canonical = canonical_names(model)
    here = TraceDevice(device_type)
    fakes = Fakes(mode, here, precision)
    pairs, input_spec = flatten("", (tuple(args), kwargs))
    input_leaves = tuple(leaf_of(path, value) for path, value in pairs)
    inputs = {path: fakes.tensor(path, value) for path, value in pairs if isinstance(value, torch.Tensor)}
    copy, rebound = fakes.module(model)
    loss_fn = rebound.of(loss_fn)

    inner: dict[str, frozenset[str]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = precision.cast_inputs((args, kwargs))
        output = precision.cast_outputs(copy(*args, **kwargs))
        if loss_fn is None:
            pairs, _ = flatten("output", output)
            with unmodified():
                inner.update(computed_of({path: x for path, x in pairs if isinstance(x, torch.Tensor)}))
        return output

    step = ModelStep(
        copy,
        pairs,
        input_spec,
        inputs,
        mode,
        names=input_names(model, [*inputs]),
        canonical=canonical,
        loss_fn=loss_fn,
        call=call,
        at_rest={name: p.dtype for name, p in model.named_parameters() if precision.used_in(p.dtype) != p.dtype},
    )
    witness = Witness(step.model, loss_fn)
    watched = _WatchedStep(step, here, witness)
    before = step.held()
    try:
        first, recorder, functional = watched.twice()
        assert watched.recorder is not None
        in_place = {name: tensor for name, tensor in step.held().items() if tensor is before.get(name)}
        reread = _reread(watched.recorder, in_place)
        targets = witness.paths_of(recorder.constants, taken={i.target for i in first.inputs})
        graph = first.graph(functional, targets)
        read = {i.target for i in graph.inputs}
        constants = {
            target: here.source(recorder.constants[name]) for name, target in targets.items() if target in read
        }
        check_memory(constants, witness.seen, model)
    except CaptureError as error:
        if isinstance(error, OfData) and (located := unread_refusal(model, watched.unread)):
            raise located from None
        raise
    except Exception as error:
        refused = refusal(error, model, watched.unread, watched.sized)
        if refused is error:
            raise
        raise refused from error
    finally:
        witness.restore()
    if watched.checks:
        logger.warning(
            "the program makes no checks of data: where eager would raise, it goes on (%s)",
            ", ".join(watched.checks),
        )
    if written := [o.target for o in graph.outputs if o.role == "mutation" and o.target in step.at_rest]:
        raise CaptureError(
            f"forward writes parameter {written[0]}, of which param_dtype gives it a cast: make it a buffer, or leave "
            f"param_dtype out"
        )
    outcome = first.outcome
    held = {memory_of(tensor): path for path, tensor in witness.seen.tensors}
    shares = {o.target: held.get(recorder.place(o.name), "") for _, o in first.results if o.name is not None}
    if grad and not any(i.role == "tangent" for i in graph.inputs):
        made = [o.target for o in graph.outputs if o.role == "gradient" and o.name is not None]
        if made:
            raise CaptureError(
                f"forward computes the gradients of {listed(made)} by a backward() of its own, and returns nothing "
                f"that is differentiated: a parallel module has gradients once backward() runs on what it returns. "
                f"Return the loss, and leave backward() to the training loop"
            )
    if first.early and grad:
        logger.warning(
            "forward computes gradients of %s by a backward() of its own: the parallel module gives them together with "
            "those of what it returns, once backward() runs on that",
            listed(first.early),
        )
    missing = _without_gradient(model, graph, outcome.loss) if grad else ()
    differentiated = any(i.role == "tangent" for i in graph.inputs)
    return Captured(
        graph=graph,
        input_spec=input_spec,
        input_leaves=tuple(replace(leaf, same=step.same.get(leaf.path, "")) for leaf in input_leaves),
        output_spec=outcome.spec,
        output_leaves=tuple(replace(leaf, shares=leaf.shares or shares.get(leaf.path, "")) for leaf in outcome.leaves),
        loss=outcome.loss if differentiated else None,
        tied={alias: name for alias, name in canonical.items() if alias != name},
        constants=constants,
        training=model.training,
        without_gradient=missing,
        autocast=autocast_dtype("cpu"),
        reads=witness.reads,
        pinned=recorder.pinned(),
        checkpoints=watched.checkpoints,
        early=tuple(first.early),
        late=watched.late,
        hooked=tuple(name for name, hooks in gradient_hooks(model).items() if hooks),
        reread=reread,
        inner=inner,
        precision=precision,
    )


def _reread(recorder: Recorder, held: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Which of these parameters and buffers backward reads in their memory."""
    backward = (node for node in recorder.nodes if node.backward)
    read = {recorder.values[name].memory for node in backward for name in {*node.inputs} - {*unread(node)}}
    return frozenset(name for name, tensor in held.items() if memory_of(tensor) in read)


class _WatchedStep:
    """A step that is recorded with all that a graph must know: where operators come from, what is traced as something
    else, which values are concrete, and which branches on data raise."""

    def __init__(self, step: ModelStep, here: TraceDevice, witness: Witness) -> None:
        self.step, self.here, self.witness = step, here, witness
        self.paths: dict[int, str] = {}
        for path, module in step.model.named_modules():
            self.paths.setdefault(id(module), path)
        self.recorder: StepRecorder | None = None
        """The last one."""
        self.checks: dict[str, None] = {}
        """Lines of code that look at data and raise."""
        self.checkpoints = 0
        """How many calls of `torch.utils.checkpoint` there were."""
        self.late: tuple[str, ...] = ()
        """What a backward within backward gives gradients."""

    def twice(self) -> tuple[Recording, StepRecorder, Functional]:
        """The step, recorded twice: the second time with the state that the first left. Raises CaptureError where the
        two differ."""
        witness = self.witness
        first, recorder = self._record(witness.watching())
        witness.reads.check_inputs({path: x for path, x in self.step.pairs if isinstance(x, torch.Tensor)})
        witness.valued |= recorder.valued | set(map(memory_of, recorder.constants.values()))
        left = [name for tensor in witness.left if (name := recorder.name(tensor)) is not None]
        second, _ = self._record(witness.again())
        functional = first.functional(left)
        witness.settle(RepeatedStep(first, functional, second, witness.left))
        return first, recorder, functional

    def _record(self, python: contextlib.AbstractContextManager[bool]) -> tuple[Recording, StepRecorder]:
        pairs = self.step.pairs
        sources = {path: resolved(self.here.tensor(value)) for path, value in pairs if isinstance(value, torch.Tensor)}
        generators = Generators()
        torch.clear_autocast_cache()  # within a context around all steps, it holds what the last one cast
        with followed(self.paths) as where, neutral(), flexible():
            self.recorder = recorder = StepRecorder(where, sources, self.witness.name_of)
            overrides = Overrides(generators, recorder, self.here)

            @contextlib.contextmanager
            def watched() -> Iterator[bool]:
                with (
                    python as identities,
                    generators.watched(self.witness.seen.generators),
                    without_checks(self.checks),
                    watched_hooks(recorder),
                ):
                    yield identities

            @contextlib.contextmanager
            def operators() -> Iterator[None]:
                uncast = without_autocast("cpu") if recorder.backward else contextlib.nullcontext()
                with overrides, recorder, uncast:
                    where.modes = function_modes()
                    yield

            recording = self.step.record(recorder, watched(), operators)
            recorder.check_arrays()
            for tensor in recorder.constants.values():  # read where gradients were enabled in a checkpoint's second run
                if tensor.grad is not None:
                    refuse(TRAINING_CONSTANTS, name=self.witness.name_of(tensor))
        self.checkpoints = where.checkpoints
        given = {**self.step.held(), **self.step.fakes}
        self.late = tuple(name for name, tensor in given.items() if id(tensor) in where.leaves)
        return recording, recorder

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
        return line_of(next(filter(None, lines), None))


def _own_device_type(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """The device of the model's parameters and of the inputs, where it is not the CPU's."""
    inputs = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    kinds = (tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *inputs))
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def _without_gradient(model: nn.Module, graph: JointGraph, loss: str | None) -> tuple[str, ...]:
    """The trainable parameters that get no gradient, as in eager. Raises NothingTrainedError where none gets any."""
    reached = {o.target for o in graph.outputs if o.role == "gradient" and o.name is not None}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = tuple(name for name in trainable if name not in reached)
    if missing and len(missing) == len(trainable):
        raise NothingTrainedError(
            f"no trainable parameter ({listed(missing, 10)}) gets a gradient from {loss or 'any output'}: use them in "
            f"what is differentiated, or call requires_grad_(False) on them"
        )
    return missing
