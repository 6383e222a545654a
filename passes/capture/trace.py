"""Capture: a model and example inputs in, the joint graph of one step out.

    model, args, kwargs --fake copy--> fakes --export_joint--> torch.fx graph --Conversion--> JointGraph

The model is traced as a copy whose tensors are fakes, so that a model of any size, real, on `meta` or fake, is captured
on a laptop, and the user's own model is only read.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar import compat
from autopar.ir.garbage import uncollected
from autopar.ir.graph import JointGraph
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.tree import flatten

from .captured import Captured, CaptureError, NothingTrainedError, input_names, leaf_of
from .conversion import Conversion
from .cut import cut
from .fakes import Fakes, canonical_names
from .here import HERE, Here
from .looks import listed
from .refusals import OfData, Unlocated, line_raised, refusal, unread_refusal
from .rest import with_rest
from .stamp import Unfit, stamped
from .step import Replaced, TracedStep
from .witness import check_constants, check_hooks, check_memory

logger = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device_type: str | None = None,
    stamp: bool = True,
    regions: bool = False,
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

    The graph is the same for all devices (see `here`). `device_type` is the device that the step will run on, whose
    autocast context counts, and whose name in the model's code means the device of the trace; without it, that of the
    model's parameters and of the inputs.

    With `stamp`, layers that the record shows to be alike, operator for operator, are differentiated once, and the
    result is repeated (`cut`, `stamp`): what is captured is the same, up to the names of values. The Python of every
    layer runs in any case.

    With `regions`, nodes say in which calls of `torch.utils.checkpoint` they lie (`Node.region`).

    Python sees parameters in the dtypes in which `precision` has them used; the graph's inputs name those at rest.

    Raises CaptureError (a ValueError) if the model cannot be traced, if an input is an empty batch, if no parameter
    gets a gradient although some require one, if two parameters overlap in memory, if the loss is not a floating
    scalar, or if Python does what a graph cannot hold: keep state from one call for the next, draw random numbers of
    its own, hook gradients.
    """
    kind = device_type or _own_device_type(model, args, kwargs)
    is_here = kind == HERE.type or torch.get_default_device().type != kind
    traced = partial(_capture, model, args, dict(kwargs or {}), loss_fn, kind, regions=regions, precision=precision)
    with uncollected(), compat.autocast_of(kind), contextlib.nullcontext() if is_here else HERE:
        try:
            return traced(stamp=stamp, lines=False)
        except Unlocated:
            # traced again, with the line of each operator, which takes twice the time
            return traced(stamp=False, lines=True)


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    device_type: str,
    *, stamp: bool, regions: bool, lines: bool, precision: Precision,
) -> Captured:  # fmt: skip
    """`capture`; with `lines`, refusals of operators say where they are in the model."""
    mode = compat.fake_mode()
    grad = torch.is_grad_enabled()
    canonical = canonical_names(model)
    check_hooks(model)
    here = Here(device_type)
    fakes = Fakes(mode, here, grad, precision)
    pairs, input_spec = flatten("", (tuple(args), kwargs))
    input_leaves = tuple(leaf_of(path, value) for path, value in pairs)
    step = TracedStep(fakes.module(model), pairs, input_spec, loss_fn, here, precision)
    inputs = tuple(fakes.tensor(path, value) for path, value in pairs if isinstance(value, torch.Tensor))
    tied = {f"model.{a}": f"model.{b}" for a, b in canonical.items()}
    input_paths = [leaf.path for leaf in input_leaves if leaf.meta is not None]
    with contextlib.ExitStack() as stack:
        try:
            try:
                record = stack.enter_context(compat.recorded(step, inputs, tied, lines=lines, regions=regions))
            except Replaced as error:
                step.replaced = error.names
                record = stack.enter_context(compat.recorded(step, inputs, tied, lines=lines, regions=regions))
            outcome = step.outcomes.last
            assert outcome is not None
            output_paths = [leaf.path for leaf in outcome.leaves if leaf.meta is not None]
            names = input_names(model, input_paths)

            def converted(part: compat.Recorded) -> Conversion:
                return Conversion(compat.joint(part, inputs, mode), input_paths, output_paths, names, lines=lines)

            with mode:
                step.witness.settle(step, inputs)
            own = any(map(compat.is_recorded_function, record.graph.nodes))
            with step.witness.differentiating() if own else contextlib.nullcontext():
                graph, constants = _joint_graph(record, converted, stamp)
            constants = {name: here.source(tensor) for name, tensor in constants.items()}
            if grad:
                check_constants(constants, step.witness.seen)
            check_memory(constants, step.witness.seen, model)
        except CaptureError as error:
            if isinstance(error, OfData) and (located := unread_refusal(model, step.outcomes.unread)):
                raise located from None
            raise
        except compat.WritesReal as error:
            raise CaptureError(f"{step.witness.written(error.tensor)}{line_raised(error)}") from None
        except compat.WritesInput as error:
            raise CaptureError(
                f"forward writes input {input_paths[error.index]} in place, which a program does not do: write a copy "
                f"(clone()), or make it a buffer"
            ) from None
        except Exception as error:
            raise refusal(error, model, step.outcomes.unread) from error
    if step.outcomes.checks:
        logger.warning(
            "the program makes no checks of data: where eager would raise, it goes on (%s)",
            ", ".join(step.outcomes.checks),
        )
    if computed := [name for name, tensor in constants.items() if compat.is_fake(tensor)]:
        raise CaptureError(
            f"{type(model).__name__} computes {len(computed)} values in forward that are no part of the graph, such as "
            f"the gradients of torch.autograd.grad (a penalty on gradients): a step is differentiated once. "
            f"Compute such a penalty outside of the model, or write its gradients out as operators"
        )
    with mode:
        missing = _without_gradient(model, graph, step, inputs, outcome.loss) if grad else ()
    differentiated = any(i.role == "tangent" for i in graph.inputs)
    return Captured(
        graph=with_rest(graph, model),
        input_spec=input_spec,
        input_leaves=input_leaves,
        output_spec=outcome.spec,
        output_leaves=outcome.leaves,
        loss=outcome.loss if differentiated else None,
        tied={alias: name for alias, name in canonical.items() if alias != name},
        constants=constants,
        training=model.training,
        without_gradient=missing,
        autocast=compat.autocast_dtype("cpu"),
        reads=step.witness.reads,
        pinned=step.outcomes.pinned,
        checkpoints=record.checkpoints,
        precision=precision,
    )


def _own_device_type(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """The device of the model's parameters and of the inputs, where it is not the CPU's."""
    inputs = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    kinds = (tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *inputs))
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def _joint_graph(
    record: compat.Recorded, converted: Callable[[compat.Recorded], Conversion], stamp: bool
) -> tuple[JointGraph, dict[str, torch.Tensor]]:
    """The graph of a record and the constants that it reads, from a shorter record where layers repeat."""
    shorter = cut(record) if stamp else None
    if shorter is not None:
        conversion = converted(shorter.record)
        try:
            graph = stamped(conversion.graph(), conversion.places, shorter)
        except Unfit as error:
            logger.info("differentiated in full: %s", error)
        else:
            recorded = [i for i in record.inputs if i.kind == "constant"]
            constants = {i.target.removeprefix("model."): i.tensor for i in recorded if i.tensor is not None}
            constants |= conversion.constants
            read = {i.target for i in graph.inputs if i.role == "buffer"}
            return graph, {name: tensor for name, tensor in constants.items() if name in read}
    conversion = converted(record)
    return conversion.graph(), conversion.constants


def _without_gradient(
    model: nn.Module, graph: JointGraph, step: TracedStep, inputs: Sequence[torch.Tensor], loss: str | None
) -> tuple[str, ...]:
    """The trainable parameters that get no gradient, as in eager.

    Raises CaptureError where eager gives one, and where none gets any.
    """
    reached = {o.target for o in graph.outputs if o.role == "gradient" and o.name is not None}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name in trainable if name not in reached]
    if not missing:
        return ()
    lost = _differentiated(step, missing, inputs)
    if lost or missing == trainable:
        error = CaptureError if lost else NothingTrainedError
        lost = lost or missing
        raise error(
            f"{len(lost)} trainable parameters get no gradient from {loss or 'any output'}: {listed(lost, 10)}. "
            f"Call requires_grad_(False) on them, or use them in what is differentiated"
        )
    return tuple(missing)


def _differentiated(step: TracedStep, names: Sequence[str], inputs: Sequence[torch.Tensor]) -> list[str]:
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
