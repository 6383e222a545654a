"""Parameters at rest: the dtypes in which the model holds what the graph uses in others."""

from dataclasses import replace

from torch import nn

from autopar.ir.graph import JointGraph

from .errors import CaptureError


def with_rest(graph: JointGraph, model: nn.Module) -> JointGraph:
    """The graph that says in which dtypes the model holds what it uses in others. Raises CaptureError for a parameter
    that forward writes, of which it has a cast."""
    held = {name: p.dtype for name, p in model.named_parameters() if name in graph.parameters}
    cast = {name: dtype for name, dtype in held.items() if graph.metas[graph.parameters[name]].dtype != dtype}
    if written := [o.target for o in graph.outputs if o.role == "mutation" and o.target in cast]:
        raise CaptureError(
            f"forward writes parameter {written[0]}, of which param_dtype gives it a cast: make it a buffer, or leave "
            f"param_dtype out"
        )
    inputs = (replace(i, at_rest=cast.get(i.target)) if i.role == "parameter" else i for i in graph.inputs)
    return replace(graph, inputs=tuple(inputs)) if cast else graph
