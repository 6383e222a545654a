"""The forward of a step, recorded operator by operator."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .exporting import as_captured, plain_lstm
from .patching import patched
from .regions import kept_regions, settle_regions


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInput:
    """A placeholder of a recorded forward. `target` is the name that stands for a parameter, a buffer or a constant (a
    tensor that the model closed over); an input of the step has none."""

    node: fx.Node
    kind: Literal["parameter", "buffer", "constant", "input"]
    target: str = ""
    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The forward of a step, operator by operator, as every line of the model's Python called them.

    `inputs` are the placeholders of `graph`, in order. `mutated[i]` is the buffer that output i is written to, or None
    for an output of the step. `module` holds the graphs of regions (without gradients, with autocast). `checkpoints`
    counts the calls of `torch.utils.checkpoint`.
    """

    graph: fx.Graph
    module: fx.GraphModule
    inputs: tuple[RecordedInput, ...]
    mutated: tuple[str | None, ...]
    device_type: str
    checkpoints: int = 0


@contextlib.contextmanager
def recorded(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    canonical: Mapping[str, str],
    *,
    lines: bool = False,
    regions: bool = False,
) -> Iterator[Recorded]:
    """Record `module(*inputs)`, which returns a tuple of tensors. The record can be differentiated within the context.

    The module's tensors and the inputs are fakes of one mode. `canonical` maps every name of a parameter or buffer to
    the name that stands for it: tied ones are one input of the joint graph, whose gradient is the total. With `lines`,
    nodes say which lines of code they come from; with `regions`, in which checkpoints they lie (`region_of`).
    """
    with torch.library._scoped_library(CALLS, "FRAGMENT") as library, _lean(lines), plain_lstm():
        with _recorded_functions(library), as_captured() as entered, kept_regions(regions):
            exported = torch.export.export(module, inputs, strict=False)
        if regions:
            settle_regions(exported.graph_module)
        tensors = (*inputs, *module.parameters(), *module.buffers())
        record = record_of(exported, canonical, next((t.device.type for t in tensors), "cpu"))
        yield replace(record, checkpoints=entered.count)


_NUMBERS = ("aten.item.default", "aten._local_scalar_dense.default")

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def record_of(exported: Any, canonical: Mapping[str, str], device_type: str) -> Recorded:
    from torch.export.graph_signature import InputKind, OutputKind

    kinds: dict[Any, Literal["parameter", "buffer", "constant"]] = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    inputs: list[RecordedInput] = []
    graph = exported.graph_module.graph
    for part in exported.graph_module.modules():
        for node in reversed(part.graph.nodes) if isinstance(part, fx.GraphModule) else ():
            # what was read of a concrete tensor is a number of Python's, and nobody uses the node
            if str(node.target) in _NUMBERS and not node.users and not isinstance(node.meta.get("val"), _SYMBOLS):
                part.graph.erase_node(node)
    for node, spec in zip(graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(RecordedInput(node=node, kind="input"))
        elif spec.kind in kinds:
            held = exported.state_dict.get(spec.target)
            tensor = exported.constants[spec.target] if held is None else held
            target = canonical.get(spec.target, spec.target)
            inputs.append(RecordedInput(node=node, kind=kinds[spec.kind], target=target, tensor=tensor))
        else:
            raise ValueError(f"the model holds {spec.target!r} of kind {spec.kind.name}, which has no tensor form")
    mutated: list[str | None] = []
    for output in exported.graph_signature.output_specs:
        if output.kind is OutputKind.USER_OUTPUT:
            mutated.append(None)
        elif output.kind is OutputKind.BUFFER_MUTATION:
            mutated.append(canonical.get(output.target, output.target))
        else:
            raise ValueError(
                f"the model changes {output.target!r} in place ({output.kind.name}): only buffers and parameters may be"
            )
    return Recorded(
        graph=graph,
        module=exported.graph_module,
        inputs=tuple(inputs),
        mutated=tuple(mutated),
        device_type=device_type,
    )


@contextlib.contextmanager
def _lean(lines: bool) -> Iterator[None]:
    """Trace without what nobody reads: a stack trace for each node, and Python code of each graph on the way."""
    from torch.fx import config
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True), contextlib.ExitStack() as stack:
        if not lines and hasattr(config, "do_not_emit_stack_traces"):  # before 2.12 tracing always takes them
            stack.enter_context(patched(config, "do_not_emit_stack_traces", True))
        yield


def is_recorded_function(node: fx.Node) -> bool:
    """Whether a node of a record stands for the call of a `torch.autograd.Function`, whose forward and backward run
    when the record is differentiated."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == CALLS


PLACE = "autopar_place"


def set_place(node: fx.Node, place: int) -> None:
    """Mark a node of a record; `place_of` finds the mark on the forward nodes that are traced from it."""
    node.meta["custom"] = {**node.meta.get("custom", {}), PLACE: place}


def place_of(node: fx.Node) -> int | None:
    place: int | None = (node.meta.get("custom") or {}).get(PLACE)
    return place


CALLS = "autopar_calls"
"""The namespace of operators that stand for calls of autograd functions while a model is captured."""


def _recorded_functions(library: torch.library.Library) -> contextlib.AbstractContextManager[None]:
    """Export keeps calls of a `torch.autograd.Function`: by itself it records what its forward does, and loses
    the backward that the model wrote. Each call becomes an operator, whose decomposition is the call: export
    takes it as it is, and autograd runs it in the second trace. Those of `torch.library` are operators already."""
    function = torch.autograd.Function
    apply, number = vars(function)["apply"], itertools.count()

    def recorded(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(apply.__func__, cls)
        if cls.__module__ == torch._library.autograd.__name__ or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            raise ValueError(
                f"{cls.__qualname__}, an autograd.Function, is called within a transform of torch.func, which one "
                f"graph cannot hold: call it on the whole batch"
            )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shape: list[pytree.TreeSpec] = []

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            filled = list(leaves)
            for i, tensor in zip(given, tensors, strict=True):
                filled[i] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(filled, spec)
            results, results_spec = pytree.tree_flatten(call(*own_args, **own_kwargs))
            if not all(isinstance(leaf, torch.Tensor) for leaf in results):
                raise TypeError(f"{cls.__qualname__} returns what is no tensor: autopar captures functions of tensors")
            shape[:] = [results_spec]
            return results

        name = f"{cls.__name__}_{next(number)}"
        library.define(f"{name}(Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]
        library.impl(name, run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        results = getattr(getattr(torch.ops, CALLS), name)([leaves[i] for i in given])
        return pytree.tree_unflatten(results, shape[0])

    return patched(function, "apply", classmethod(recorded))


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
