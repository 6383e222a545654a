"""Capture: a model and example inputs in, the joint graph of one step out.

    model, args, kwargs --fake copy--> Step --record--> Recording --functional--> nodes --joint_graph--> JointGraph

What runs is the model's own Python and autograd's own engine, so that the graph is what eager does. It runs twice: what
Python keeps from one call for the next shows in the second.

The model is recorded as a copy whose tensors are fakes, so that a model of any size, real, on `meta` or fake, is
captured on a laptop, and the user's own model is only read.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.autocast import autocast_dtype, autocast_of
from autopar.compat.tensors import fake_mode, memory_of
from autopar.compat.watching import WritesInput, WritesReal
from autopar.ir.garbage import uncollected
from autopar.ir.graph import GraphInput, JointGraph
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.rewrite import with_own_metas
from autopar.ir.tree import flatten

from .captured import Captured, CaptureError, NothingTrainedError, input_names, leaf_of
from .concrete import TrainedConstant
from .conversion import joint_graph
from .fakes import Fakes, canonical_names, gradient_hooks
from .functional import Functional
from .here import HERE, Here
from .looks import listed
from .refusals import OfData, refusal, unread_refusal
from .repeat import Repeated
from .rest import with_rest
from .shown import line_raised
from .step import Recording, Step
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

    The graph is the same for all devices (see `here`). `device_type` is the device that the step will run on, whose
    autocast context counts, and whose name in the model's code means the device of the trace; without it, that of the
    model's parameters and of the inputs.

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
    mode = fake_mode()
    grad = torch.is_grad_enabled()
    canonical = canonical_names(model)
    here = Here(device_type)
    fakes = Fakes(mode, here, grad, precision)
    pairs, input_spec = flatten("", (tuple(args), kwargs))
    input_leaves = tuple(leaf_of(path, value) for path, value in pairs)
    inputs = {path: fakes.tensor(path, value) for path, value in pairs if isinstance(value, torch.Tensor)}
    copy, rebound = fakes.module(model)
    loss_fn = rebound.of(loss_fn)
    step = Step(
        copy,
        pairs,
        input_spec,
        inputs,
        names=input_names(model, [*inputs]),
        canonical=canonical,
        loss_fn=loss_fn,
        here=here,
        precision=precision,
        mode=mode,
    )
    witness = Witness(step.model, loss_fn)
    try:
        first, functional = _recorded(step, witness)
        constants = {name: here.source(tensor) for name, tensor in first.recorder.constants.items()}
        targets = witness.paths_of(first.recorder.constants, taken={i.target for i in first.inputs})
        graph = joint_graph(
            functional.nodes,
            functional.values,
            [*first.inputs, *(GraphInput(name=n, role="buffer", target=target) for n, target in targets.items())],
            first.outputs(functional),
            of_data=first.recorder.of_data,
            lines=first.recorder.lines,
        )
        read = {name for node in graph.nodes for name in node.inputs} | {o.name for o in graph.outputs}
        unread = targets.keys() - read
        graph = with_own_metas(replace(graph, inputs=tuple(i for i in graph.inputs if i.name not in unread)))
        constants = {target: constants[name] for name, target in targets.items() if name in read}
        check_memory(constants, witness.seen, model)
    except CaptureError as error:
        if isinstance(error, OfData) and (located := unread_refusal(model, step.unread)):
            raise located from None
        raise
    except TrainedConstant as error:
        raise CaptureError(f"{witness.trained(error.tensor)}{line_raised(error)}") from None
    except WritesReal as error:
        raise CaptureError(f"{witness.written(error.args[0])}{line_raised(error)}") from None
    except WritesInput as error:
        raise CaptureError(
            f"forward writes input {error.args[0]} in place{line_raised(error)}, which a program does not do: write a "
            f"copy (clone()), or make it a buffer"
        ) from None
    except Exception as error:
        refused = refusal(error, model, step.unread, step.sized)
        if refused is error:
            raise
        raise refused from error
    finally:
        witness.restore()
    if first.checks:
        logger.warning(
            "the program makes no checks of data: where eager would raise, it goes on (%s)",
            ", ".join(first.checks),
        )
    outcome = first.outcome
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
        graph=with_rest(graph, model),
        input_spec=input_spec,
        input_leaves=tuple(replace(leaf, same=step.same.get(leaf.path, "")) for leaf in input_leaves),
        output_spec=outcome.spec,
        output_leaves=outcome.leaves,
        loss=outcome.loss if differentiated else None,
        tied={alias: name for alias, name in canonical.items() if alias != name},
        constants=constants,
        training=model.training,
        without_gradient=missing,
        autocast=autocast_dtype("cpu"),
        reads=witness.reads,
        pinned=first.recorder.pinned(),
        checkpoints=first.checkpoints,
        early=tuple(first.early),
        hooked=tuple(name for name, hooks in gradient_hooks(model).items() if hooks),
        precision=precision,
    )


def _recorded(step: Step, witness: Witness) -> tuple[Recording, Functional]:
    """The step, recorded twice: the second time with the state that the first left. Raises CaptureError where the two
    differ."""
    first = step.record(witness.watching())
    witness.valued |= first.recorder.valued | set(map(memory_of, first.recorder.constants.values()))
    left = [name for tensor in witness.left if (name := first.recorder.name(tensor)) is not None]
    second = step.record(witness.again())
    functional = first.functional(left)
    witness.settle(Repeated(first, functional, second, witness.left))
    return first, functional


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
