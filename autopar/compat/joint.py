"""The joint graph of forward and backward, from a recorded forward, and what torch notes on its nodes."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from .autocast import autocast_dtype
from .exporting import without_autocast
from .recording import Recorded, writes
from .regions import region_of
from .tensors import is_real, memory_of, value_of
from .watching import Writes, WritesInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """What an input of a joint graph is. `index` counts parameters, buffers (constants included) or
    inputs; for a tangent it is the index of the output that it belongs to."""

    node: fx.Node
    kind: Literal["parameter", "buffer", "input", "tangent"]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an output of a joint graph is. `node` is None where there is none (no gradient)."""

    node: fx.Node | None
    kind: Literal["output", "mutation", "parameter mutation", "parameter gradient", "input gradient"]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A traced forward and backward. `parameters` and `buffers` are the names that the indices of
    placeholders and results count; `constants` are the tensors that the model closed over, whose
    names stand in `buffers` too."""

    graph: fx.Graph
    placeholders: tuple[Placeholder, ...]
    results: tuple[Result, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]


def joint(record: Recorded, inputs: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> Joint:
    """Forward and backward of a record as one functional graph.

    Two traces, because each alone loses models: `torch.export` (not strict) records the model's own
    calls with their module paths, and AOT autograd makes the functional joint graph of that record.
    """
    lifted = _Lifted(record, mode)
    with contextlib.ExitStack() as stack:
        # forward enters the autocast context itself: backward runs outside of it, as eager's does
        stack.enter_context(without_autocast(lifted.kind))
        stack.enter_context(_without_effects())
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

        traced = aot_export_joint_with_descriptors(stack, lifted, inputs)
        return _with_constants(_describe(traced.graph_module.graph, lifted), traced.graph_module)


def _with_constants(described: Joint, module: fx.GraphModule) -> Joint:
    """The graph with the tensors that its own code makes of numbers (`torch.tensor(0.5)` in an autograd.Function, which
    runs only when the joint graph is traced) as inputs, equal ones as one."""
    placed: dict[Any, fx.Node] = {}
    placeholders, buffers, constants = [*described.placeholders], [*described.buffers], {**described.constants}
    for node in described.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor) or not is_real(tensor):
            continue
        key = (value_of(tensor) or node.target, tensor.dtype, tuple(tensor.shape), tensor.device)
        if key not in placed:
            name = f"lifted_constant_{len(placed)}"
            with described.graph.inserting_before(placeholders[0].node):
                placed[key] = described.graph.placeholder(name)
            placed[key].meta["val"] = node.meta.get("val", tensor)
            placeholders.append(Placeholder(node=placed[key], kind="buffer", index=len(buffers)))
            buffers.append(name)
            constants[name] = tensor
        node.replace_all_uses_with(placed[key])
    return replace(described, placeholders=tuple(placeholders), buffers=tuple(buffers), constants=constants)


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    """The check of a factorisation's success is no more than an assertion: where torch takes it for an effect (from
    2.13 on), a traced graph would have tokens among its inputs."""
    holder = getattr(torch._library.simple_registry.singleton.find("aten::_linalg_check_errors"), "effect", None)
    if holder is None or holder.effect is None:
        yield
        return
    effect = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)


class _Lifted(nn.Module):
    """A record as a module whose parameters and buffers are numbered.

    `ExportedProgram.module()` would do, slower, and gives a tied weight one input for each name.
    """

    def __init__(self, record: Recorded, mode: FakeTensorMode) -> None:
        super().__init__()
        self.kind, self.autocast = record.device_type, autocast_dtype(record.device_type)
        # kept in a tuple, lest nn.Module register it as a submodule with names of its own
        self.body = (record,)
        names: dict[str, str] = {}
        parameters: list[str] = []
        buffers: list[str] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.order: list[str | int] = []
        count = 0
        for given in record.inputs:
            if given.kind == "input":
                self.order.append(count)
                count += 1
                continue
            assert given.tensor is not None
            if given.target not in names:
                if given.kind == "parameter":
                    names[given.target] = f"p{len(parameters)}"
                    parameters.append(given.target)
                    self.register_parameter(names[given.target], given.tensor)  # type: ignore[arg-type]
                else:
                    names[given.target] = f"b{len(buffers)}"
                    buffers.append(given.target)
                    if given.kind == "constant":
                        self.constants[given.target] = given.tensor
                    self.register_buffer(names[given.target], _as_fake(given.tensor, mode))
            self.order.append(names[given.target])
        self.names = (tuple(parameters), tuple(buffers))
        self.mutated = tuple(None if target is None else names[target] for target in record.mutated)
        self.written = self._written_parameters(mode)

    def _written_parameters(self, mode: FakeTensorMode) -> tuple[str, ...]:
        """The parameters that forward writes: a run on fakes shows it, of a graph that writes anything."""
        record = self.body[0]
        regions = [m.graph for m in record.module.modules() if m is not record.module and isinstance(m, fx.GraphModule)]
        if not any(writes(node) for graph in (record.graph, *regions) for node in graph.nodes):
            return ()
        trial = {name: p.detach().clone() for name, p in self.named_parameters()}
        values = [
            trial[o] if o in trial else given.node.meta["val"].detach().clone()
            for o, given in zip(self.order, record.inputs, strict=True)
        ]
        watching = Writes()
        with mode, watching, torch.no_grad():
            body = _Traced(record.module, garbage_collect_values=False, graph=record.graph)
            body.run(*values, enable_io_processing=False)
        return tuple(name for name, tensor in trial.items() if memory_of(tensor) in watching.memory)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch.fx.traceback import preserve_node_meta

        # what is written of a parameter is a copy, which is read from then on and is a result of its own; gradients
        # reach the parameter through it. `_describe` removes the copying.
        copies = {name: getattr(self, name).clone() for name in self.written}
        values = [inputs[o] if isinstance(o, int) else copies.get(o, getattr(self, o)) for o in self.order]
        # the recorded nodes hand their module paths to what is traced from them
        cast = torch.autocast(self.kind, dtype=self.autocast, enabled=self.autocast is not None)
        with preserve_node_meta(), cast:
            body = _Traced(self.body[0].module, garbage_collect_values=False, graph=self.body[0].graph)
            results = body.run(*values, enable_io_processing=False)
        outputs = []
        for name, result in zip(self.mutated, results, strict=True):
            if name is None:
                # An output that is a view (of an input, of another output) would come back from AOT as its base.
                # `_describe` removes the clone.
                outputs.append(result.clone())
            else:
                getattr(self, name).copy_(result)
        return *outputs, *(copy.detach().clone() for copy in copies.values())


class _Traced(fx.Interpreter):
    """Runs a recorded graph. Upsampling stays one operator, with torch's own backward: its decompositions in Python
    look rows up by computed indices, which hides that they are in order."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.__name__.split(".")[0] in _KEPT:
            with torch._C._DisablePythonDispatcher():
                return super().call_function(target, args, kwargs)
        if target is torch.ops.higher_order.cond:
            return _either(*args, **kwargs)
        if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in _LOOPS:
            raise ValueError(
                f"the model has control flow that depends on data, torch's {target.__name__}, which one graph cannot "
                f"hold: write the loop out in Python, or as operators on all of its steps"
            )
        if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in _WRAPPED:
            args = tuple(_within(a) if isinstance(a, fx.GraphModule) else a for a in args)
        return super().call_function(target, args, kwargs)


def _within(module: fx.GraphModule) -> Any:
    """A part of a record, without gradients or with autocast, whose nodes say where they lie in checkpoints."""
    if not any(region_of(node) for node in module.graph.nodes):
        return module
    return lambda *args: _Traced(module, garbage_collect_values=False).run(*args, enable_io_processing=False)


_WRAPPED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})

_LOOPS = frozenset({"while_loop", "map", "map_impl", "scan", "associative_scan"})


class _IfTaken(torch.autograd.Function):
    """The operand of a branch. A branch that is not taken may be undefined where it stands, and then the derivative of
    nothing is NaN: it gives no gradient instead."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(taken)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (taken,) = ctx.saved_tensors
        return torch.where(taken, gradient, 0.0), None


def _either(wanted: Any, if_true: fx.GraphModule, if_false: fx.GraphModule, operands: Sequence[Any]) -> Any:
    """`torch.cond` on data: both branches run, and their results, a tensor or several, are selected from."""
    if not isinstance(wanted, torch.Tensor):
        raise ValueError(f"the predicate of torch.cond is {wanted!r}: make it a tensor of one bool")
    wanted = wanted.reshape(()).to(torch.bool)

    gate: Any = _IfTaken.apply

    def run(branch: fx.GraphModule, taken: torch.Tensor) -> tuple[list[Any], pytree.TreeSpec]:
        given = [gate(x, taken) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in operands]
        traced = _Traced(branch, garbage_collect_values=False)
        return pytree.tree_flatten(traced.run(*given, enable_io_processing=False))

    results = []
    (one, spec), (other, other_spec) = run(if_true, wanted), run(if_false, wanted.logical_not())
    if spec != other_spec:
        raise ValueError(f"the branches of torch.cond return {spec} and {other_spec}: they must be alike")
    for a, b in zip(one, other, strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            raise ValueError("a branch of torch.cond returns what is no tensor: autopar selects from tensors")
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"the branches of torch.cond return {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}: both run, "
                f"and one result is selected, so that they must be alike"
            )
        results.append(torch.where(wanted, a, b))
    return pytree.tree_unflatten(results, spec)


_KEPT = (
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d")),
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"_upsample_nearest_exact{dims}d" for dims in (1, 2, 3)),
)


def _as_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _describe(graph: fx.Graph, lifted: _Lifted) -> Joint:
    from torch._functorch._aot_autograd import descriptors as d

    def position(description: Any) -> tuple[Any, int]:
        if isinstance(description, d.ParamAOTInput):
            return "parameter", int(description.target[1:])
        if isinstance(description, d.BufferAOTInput):
            return "buffer", int(description.target[1:])
        if isinstance(description, d.PlainAOTInput):
            return "input", description.idx
        if isinstance(description, d.TangentAOTInput) and isinstance(description.output, d.PlainAOTOutput):
            return "tangent", description.output.idx
        if isinstance(description, d.TangentAOTInput) and isinstance(description.output, d.InputMutationAOTOutput):
            kind, index = position(description.output.mutated_input)
            name = lifted.names[1][index] if kind == "buffer" else description.output.mutated_input.expr()
            raise ValueError(
                f"the model writes what requires a gradient into {kind} {name.removeprefix('model.')}, from where the "
                f"next step would differentiate it: write value.detach(), or write under torch.no_grad()"
            )
        raise ValueError(f"the joint graph has an input that autopar does not know: {description.expr()}")

    placeholders = []
    for node in graph.find_nodes(op="placeholder"):
        kind, index = position(node.meta["desc"])
        if kind == "parameter" and f"p{index}" in lifted.written:
            copied = next(user for user in node.users if user.target is torch.ops.aten.clone.default)
            copied.replace_all_uses_with(node)
            graph.erase_node(copied)
        placeholders.append(Placeholder(node=node, kind=kind, index=index))

    output = graph.output_node()
    results = []
    traced: Any = output.args[0]
    for node, description in zip(traced, output.meta["desc"], strict=True):
        if description is None:
            continue  # the place of a gradient that nothing asks for
        if isinstance(description, d.PlainAOTOutput):
            assert node.target is torch.ops.aten.clone.default
            written = description.idx - sum(name is None for name in lifted.mutated)
            if written < 0:
                results.append(Result(node=node.args[0], kind="output", index=description.idx))
            else:
                index = int(lifted.written[written][1:])
                results.append(Result(node=node.args[0], kind="parameter mutation", index=index))
        elif isinstance(description, d.GradAOTOutput):
            kind, index = position(description.grad_of)
            if kind in ("parameter", "input"):
                results.append(Result(node=node, kind=f"{kind} gradient", index=index))  # type: ignore[arg-type]
        elif isinstance(description, d.InputMutationAOTOutput):
            kind, index = position(description.mutated_input)
            if kind != "buffer":
                raise WritesInput(index)
            results.append(Result(node=node, kind="mutation", index=index))
        else:
            raise ValueError(f"the joint graph has an output that autopar does not know: {description.expr()}")
    parameters, buffers = lifted.names
    return Joint(
        graph=graph,
        placeholders=tuple(placeholders),
        results=tuple(results),
        parameters=parameters,
        buffers=buffers,
        constants=lifted.constants,
    )


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module whose forward gave the node ("" for the outermost), or None for
    a node of autograd's."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path: str = next(reversed(stack.values()))[0]
    return path


def is_accumulation(node: fx.Node) -> bool:
    """Whether it is an add by which autograd sums the gradients of a tensor's consumers. Such a
    node carries the sequence number of the last forward node, whose gradient it is not."""
    return bool(node.meta.get("is_gradient_acc"))


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced while autograd ran."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
