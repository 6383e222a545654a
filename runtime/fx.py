"""The program of one rank as a `torch.fx.GraphModule`.

It is recorded from the source that ranks run (`execute.SourceWriter`): each function that the source calls becomes a
node. One module holds forward and backward, and runs on every rank: it takes the process groups, the rank's coordinate
and the device from the mesh that it is called with.
"""

import builtins
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from autopar.compat.fx_nodes import called_whole
from autopar.ir.program import Program
from autopar.ops import normalization as normalization  # whose kernels a saved module calls
from autopar.ops.kernels import ADAPTED, kernel_of

from .compiled import WATCH, ObservedSource

MESH = "mesh"
"""The first argument of the module."""


def graph_module(program: Program) -> fx.GraphModule:
    """The `program` of a plan as a module of torch.fx, which `torch.save` saves and every rank of the mesh runs.

    Called with a `DeviceMesh` that has the program's axes, and with what a rank holds of `program.inputs`, in their
    order, it returns `(outputs, gradients)`: what the rank holds of `program.outputs`, those of forward and those of
    backward, in their order. Call it within `torch.no_grad()`. The `meta` of a node says which "value" of the program
    it computes, and for which "module" of the model; a module that was saved has no `meta`, as always with torch.fx.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)

    def placeholder(name: str) -> fx.Proxy:
        return fx.Proxy(graph.placeholder(name), tracer)

    mesh = placeholder(MESH)
    inputs = {i.name: placeholder(i.name) for i in program.inputs}
    spread = [size > 1 for size in program.mesh]
    groups: Any = tuple(mesh.get_group(a) if s else None for a, s in zip(program.axes, spread, strict=True))
    ranks: Any = tuple(mesh.get_local_rank(a) if s else 0 for a, s in zip(program.axes, spread, strict=True))
    device: Any = tracer.create_proxy("call_function", getattr, (mesh, "device_type"), {})
    writer = ObservedSource(program, ranks, groups, device)
    source = writer.styled("watched")
    adapted_ops = {function: op for op, function in ADAPTED.items()}

    def recorded(value: Any) -> Any:
        """What a node calls in the place of a function: a method by its name, since methods cannot be imported."""
        if not callable(value) or isinstance(value, fx.Proxy):
            return value
        kind, target, first = "call_function", value, list[Any]()
        name = getattr(value, "__name__", "")
        if value in adapted_ops:
            target, first = adapted, [adapted_ops[value]]
        elif value is getattr(torch.Tensor, name, None):
            kind, target = "call_method", name

        def record(*args: Any, **kwargs: Any) -> fx.Proxy:
            proxy: fx.Proxy = tracer.create_proxy(kind, target, (*first, *args), kwargs)
            called_whole(proxy.node)
            return proxy

        return record

    def named(line: int, *values: fx.Proxy) -> None:
        instruction = writer.lines[line]
        for name, value in zip(filter(None, instruction.outputs), values, strict=True):
            value.node.meta |= {"value": name, "module": instruction.module}

    scope = {name: recorded(value) for name, value in writer.bound.items()}
    scope[WATCH] = named
    exec(builtins.compile(source, f"<program {program.digest}>", "exec"), scope)
    outputs, saved = scope["forward"]([inputs[i.name] for i in program.given])
    gradients = scope["backward"]([*saved, *(inputs[i.name] for i in program.tangents)])
    graph.output(fx.node.map_aggregate((outputs, gradients), lambda value: getattr(value, "node", value)))
    for proxy in (*groups, *ranks, device):
        if isinstance(proxy, fx.Proxy) and not proxy.node.users:
            graph.erase_node(proxy.node)
    graph.lint()
    return fx.GraphModule({}, graph, "Program")


def adapted(op: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the kernel of an operator whose results depend on the device."""
    return kernel_of(op)(*args, **kwargs)
