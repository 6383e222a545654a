"""The graph of a model and the program of a rank as JSON, and as DOT for Graphviz."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from autopar.ir.graph import GraphInput, GraphOutput, JointGraph, Node, Ref, TensorMeta, producers
from autopar.ir.layout import describe
from autopar.ir.program import Program, ProgramInput, ProgramOutput, RankIndex

FILLS = {"collective": "#ffd8a8", "forward": "#e7f5ff", "backward": "#f3f0ff"}
"""Colours of DOT nodes."""


def to_json(graph: JointGraph | Program) -> dict[str, Any]:
    """The inputs, nodes and outputs, as plain dicts, lists, numbers and texts. Shapes of a graph are global, those of a
    program are a rank's, with the global `shape` and `layout` of what goes in and comes out beside the `local_shape`.
    Arguments name values as {"value": NAME}, and numbers that differ by rank as {"rank": EXPRESSION}."""
    axes = _axes(graph)
    inputs, outputs = (
        [{"name": e.name, "role": e.role, "target": e.target, **_placed(e, graph, axes)} for e in ends]
        for ends in (graph.inputs, graph.outputs)
    )
    nodes = [
        {
            "op": node.op,
            "phase": phase,
            "module": node.module,
            "args": [_argument(value, axes) for value in node.args],
            "kwargs": {key: _argument(value, axes) for key, value in node.kwargs},
            "outputs": [{"name": name, **_meta(graph.metas[name])} for name in node.outputs if name],
        }
        for phase, node in _nodes(graph)
    ]
    mesh = {"mesh": dict(zip(graph.axes, graph.mesh, strict=True))} if isinstance(graph, Program) else {}
    return {**mesh, "inputs": inputs, "nodes": nodes, "outputs": outputs}


def to_dot(graph: JointGraph | Program) -> str:
    """The graph in Graphviz's language: `dot -Tsvg`. Boxes are operators and collectives, ellipses are what goes in and
    comes out, edges are tensors with their shapes; a box's tooltip is the module that it is for."""
    nodes = list(_nodes(graph))
    inputs: tuple[GraphInput | ProgramInput, ...] = graph.inputs
    outputs: tuple[GraphOutput | ProgramOutput, ...] = graph.outputs
    made = {name: f"n{number}" for name, number in producers([node for _, node in nodes]).items()}
    made |= {i.name: f"i{number}" for number, i in enumerate(inputs)}
    lines = ["digraph {", "  node [shape=box, style=filled, fontname=Helvetica]", "  edge [fontname=Helvetica]"]
    for number, given in enumerate(inputs):
        lines.append(f"  i{number} [shape=ellipse, fillcolor=white, label={_quoted(f'{given.role} {given.target}')}]")
    for number, (phase, node) in enumerate(nodes):
        fill = FILLS["collective" if node.op.startswith("collective.") else phase]
        axis = f" {_axes(graph)[node.args[-1]]}" if node.collective else ""
        label = _quoted(f"{node.op}{axis}\n{node.name}")
        lines.append(f"  n{number} [fillcolor={_quoted(fill)}, label={label}, tooltip={_quoted(node.module)}]")
        for name in dict.fromkeys(node.inputs):
            lines.append(f"  {made[name]} -> n{number} [label={_quoted(str(graph.metas[name]))}]")
    for number, result in enumerate(outputs):
        if result.name is not None:
            label = _quoted(f"{result.role} {result.target}")
            lines.append(f"  o{number} [shape=ellipse, fillcolor=white, label={label}]")
            lines.append(f"  {made[result.name]} -> o{number}")
    return "\n".join([*lines, "}"])


def _axes(graph: JointGraph | Program) -> tuple[str, ...]:
    return graph.axes if isinstance(graph, Program) else ()


def _nodes(graph: JointGraph | Program) -> Iterator[tuple[str, Node]]:
    """The nodes in their order, each with its phase."""
    if isinstance(graph, Program):
        yield from chain((("forward", node) for node in graph.forward), (("backward", node) for node in graph.backward))
    else:
        yield from (("backward" if node.backward else "forward", node) for node in graph.nodes)


def _meta(meta: TensorMeta) -> dict[str, Any]:
    return {"shape": list(meta.shape), "dtype": str(meta.dtype).removeprefix("torch.")}


def _placed(value: Any, graph: JointGraph | Program, axes: tuple[str, ...]) -> dict[str, Any]:
    """What an input or output of a graph or a program is, and where it lies."""
    if isinstance(value, GraphInput):
        return _meta(graph.metas[value.name])
    if isinstance(value, GraphOutput) or value.name is None or value.meta is None:
        return {}
    local = list(graph.metas[value.name].shape)
    return {**_meta(value.meta), "local_shape": local, "layout": describe(value.layout, axes)}


def _argument(value: Any, axes: tuple[str, ...]) -> Any:
    if isinstance(value, Ref):
        return {"value": value.name}
    if isinstance(value, RankIndex):
        return {"rank": value.source(axes)}
    if isinstance(value, tuple):
        return [_argument(item, axes) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
